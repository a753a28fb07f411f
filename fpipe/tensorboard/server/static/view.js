/** Which stretch of time is in sight, and where a moment is on the canvas. */

const DEEPEST = 1e-8; // of the whole: closer than this, numbers run out of digits
const MARGIN = 0.015; // of the whole, beyond its ends

export class View {
  constructor() {
    this.whole = 0;
    [this.from, this.to] = [0, 1];
    [this.left, this.width] = [0, 1];
  }

  /** The canvas's stretch for time: from `left` on, `width` wide; pixels. */
  place(left, width) {
    [this.left, this.width] = [left, Math.max(1, width)];
  }

  /** What there is to see: from 0 to `whole`. Keeps the stretch in sight, unless all was. */
  extend(whole) {
    const fitted = this.fitted;
    this.whole = whole;
    if (fitted) this.fit();
    else this.show(this.from, this.to);
  }

  /** Lets go of what there was to see: the next is seen whole. */
  forget() {
    this.whole = 0;
  }

  get fitted() {
    return !this.whole || this.span >= (this.all.to - this.all.from) * (1 - 1e-9);
  }

  fit() {
    ({ from: this.from, to: this.to } = this.all);
  }

  /** The longest stretch that is shown. */
  get all() {
    const margin = (this.whole || 1) * MARGIN;
    return { from: -margin, to: (this.whole || 1) + margin };
  }

  /** Shows a stretch, moved and cut to what there is. */
  show(from, to) {
    const { all } = this;
    const span = Math.min(Math.max(to - from, (this.whole || 1) * DEEPEST), all.to - all.from);
    const start = Math.min(Math.max((from + to - span) / 2, all.from), all.to - span);
    [this.from, this.to] = [start, start + span];
  }

  get span() {
    return this.to - this.from;
  }

  /** Pixels for one unit of time. */
  get scale() {
    return this.width / this.span;
  }

  x(when) {
    return this.left + (when - this.from) * this.scale;
  }

  when(x) {
    return this.from + (x - this.left) / this.scale;
  }

  /** Zooms about a moment, which stays where it is. */
  zoom(factor, about = (this.from + this.to) / 2) {
    const span = Math.max(this.span / factor, (this.whole || 1) * DEEPEST);
    const start = about - ((about - this.from) / this.span) * span;
    this.show(start, start + span);
  }

  /** Moves by a share of what is in sight. */
  pan(share) {
    this.show(this.from + share * this.span, this.to + share * this.span);
  }

  /** Moves as little as is needed for a stretch to be in sight. */
  reveal(start, end) {
    if (start >= this.from && end <= this.to) return;
    const span = Math.max(this.span, (end - start) * 1.5);
    const middle = (start + end) / 2;
    this.show(middle - span / 2, middle + span / 2);
  }
}
