/** The visible range of time, and the conversion from time to canvas position. */

const DEEPEST = 1e-8; // smallest visible share of the whole, limited by the precision of numbers
const MARGIN = 0.015; // share of the whole, at either end

export class View {
  constructor() {
    this.whole = this.begin = 0;
    [this.from, this.to] = [0, 1];
    [this.left, this.width] = [0, 1];
  }

  /** Sets the area for time on the canvas: from `left`, `width` wide; pixels. */
  place(left, width) {
    [this.left, this.width] = [left, Math.max(1, width)];
  }

  /**
   * Sets the whole range, 0 to `whole`. Keeps the visible range, unless all was visible. What `begin`s before 0 can be
   * moved into sight.
   */
  extend(whole, begin = 0) {
    const fitted = this.fitted;
    [this.whole, this.begin] = [whole, begin];
    if (fitted) this.fit();
    else this.show(this.from, this.to);
  }

  /** Resets the view: the next capture is shown whole. */
  forget() {
    this.whole = 0;
  }

  get fitted() {
    const { from, to } = this.all;
    const least = (to - from) * 1e-9;
    return !this.whole || (this.from <= from + least && this.to >= to - least);
  }

  fit() {
    ({ from: this.from, to: this.to } = this.all);
  }

  /** The longest visible range. */
  get all() {
    const margin = (this.whole || 1) * MARGIN;
    return { from: -margin, to: (this.whole || 1) + margin };
  }

  /** Shows a range, moved and clipped to the whole, and to what begins before. */
  show(from, to) {
    const { all } = this;
    const span = Math.min(Math.max(to - from, (this.whole || 1) * DEEPEST), all.to - all.from);
    const start = Math.min(Math.max((from + to - span) / 2, Math.min(all.from, this.begin)), all.to - span);
    [this.from, this.to] = [start, start + span];
  }

  get span() {
    return this.to - this.from;
  }

  /** Pixels for one unit of time. */
  get scale() {
    return this.width / this.span;
  }

  /** This view of times that are `by` later. */
  later(by) {
    const view = new View();
    const { from, to, left, width, whole } = this;
    return Object.assign(view, { from: from + by, to: to + by, left, width, whole });
  }

  x(when) {
    return this.left + (when - this.from) * this.scale;
  }

  when(x) {
    return this.from + (x - this.left) / this.scale;
  }

  /** Zooms around a moment, which keeps its position. */
  zoom(factor, about = (this.from + this.to) / 2) {
    const span = Math.max(this.span / factor, (this.whole || 1) * DEEPEST);
    const start = about - ((about - this.from) / this.span) * span;
    this.show(start, start + span);
  }

  /** Moves by a share of the visible range. */
  pan(share) {
    this.show(this.from + share * this.span, this.to + share * this.span);
  }

  /** Moves as little as needed to make a range visible. */
  reveal(start, end) {
    if (start >= this.from && end <= this.to) return;
    const span = Math.max(this.span, (end - start) * 1.5);
    const middle = (start + end) / 2;
    this.show(middle - span / 2, middle + span / 2);
  }
}
