/** The timeline on its two canvases: view, pointer, selection, measured range. */

import { bytes } from "./format.js";
import { layout } from "./layout.js";
import { theme } from "./palette.js";
import { Overlay } from "./overlay.js";
import { Overview } from "./overview.js";
import { Pointer } from "./pointer.js";
import { AXIS } from "./measures.js";
import { Scene } from "./scene.js";
import { View } from "./view.js";

const GUTTER = 132;
const WIDER = 208; // of two captures, which are named
const FRAMES = 240;
const UNFOLDED = 8; // with more ranks than this, all start folded

export class Sheet {
  /**
   * @param {Record<string, HTMLElement>} shell
   * @param {{changed: () => void, viewed: () => void, selected: (spot: object | null) => void, ranged: (range: object | null) => void,
   *   say: (text: string) => void}} tell
   */
  constructor(shell, tell) {
    this.shell = shell;
    this.tell = tell;
    this.view = new View();
    this.scene = new Scene(shell.canvas);
    this.overlay = new Overlay(shell.over);
    this.overview = new Overview(shell, this.view, (share) => this._dragged(share));
    this.shown = new Set();
    this.collapsed = new Set();
    this.colouring = "kind";
    [this.dark, this.theme] = [false, theme(false)];
    this.frames = [];
    this.layout = { groups: [], height: 0 };
    this.main = this.other = this.selected = this.idle = this.range = null; // idle: the selected gap
    this.account = null; // the selected moment of a rank's memory
    this.pointer = new Pointer(this);
    this.matches = this.path = null;
    this.chain = [];
    this.later = 0; // by which the other's times are later than the main's, from the first compute of each
    new ResizeObserver(() => this.resize()).observe(shell.timeline);
  }

  // The shown captures

  /** Shows a capture, and optionally another below each of its ranks; called again as ranks arrive. */
  show(main, other, all) {
    const changed = main !== this.main || other !== this.other;
    if (main !== this.main) {
      const { selected } = this;
      this._wanted =
        selected && !selected.other
          ? { rank: selected.rank, key: this._rank(selected).key(selected.row) }
          : this._wanted;
      this.pointer.leave();
      this.range = this.selected = this.idle = this.account = this.matches = this.path = null;
      this.chain = [];
      if (main.entry.run !== this.main?.entry.run) this.view.forget();
      if (!this.main || count(main.entry) !== count(this.main.entry)) this.collapsed = usual(main.entry);
    }
    if (other !== this.other && this.selected?.other) this.selected = null;
    if (other !== this.other && this.idle?.other) this.idle = null;
    [this.main, this.other] = [main, other];
    if (changed) this.tell.changed();
    this.memory = Math.max(0, ...Array.from(main.ranks.values(), (rank) => rank.memory.most));
    this.later = other ? other.first - main.first : 0;
    const last = Math.max(main.last, (other?.last ?? 0) - this.later);
    const begin = Math.min(main.begin, (other?.begin ?? 0) - this.later);
    this.view.extend(all || this.view.fitted ? last : Math.max(last, this.view.whole), begin);
    this.arrange();
    if (all) this.overview.draw(main, this.theme, this.ratio);
    if (all && this._wanted) this._again();
  }

  /** Selects the previous capture's selected effect, if this capture has it. */
  _again() {
    const { rank, key } = this._wanted;
    this._wanted = null;
    const row = this.main.ranks.get(rank)?.find(key) ?? -1;
    if (row >= 0) this.select({ rank, row });
  }

  arrange() {
    if (!this.main) return;
    this.overview.fit(this.main);
    const { scroll, spacer } = this.shell;
    const available = scroll.clientHeight - AXIS;
    this.layout = layout(this.main, this.other, { tracks: this.shown, collapsed: this.collapsed, available });
    spacer.style.height = `${Math.max(this.layout.height + AXIS, scroll.clientHeight)}px`;
    this.resize();
  }

  resize() {
    const { scroll, canvas, over, sheet } = this.shell;
    const [width, height] = [scroll.clientWidth, scroll.clientHeight];
    const ratio = window.devicePixelRatio || 1;
    const left = this.other ? WIDER : GUTTER;
    if (this.width !== width || this.height !== height || this.ratio !== ratio || this.view.left !== left) {
      [this.width, this.height, this.ratio] = [width, height, ratio];
      sheet.style.height = `${height}px`;
      for (const one of [canvas, over]) {
        one.width = Math.max(1, Math.round(width * ratio));
        one.height = Math.max(1, Math.round(height * ratio));
        one.style.width = `${width}px`;
        one.style.height = `${height}px`;
      }
      this.view.place(left, width - left - 1);
      if (this.main) this.overview.draw(this.main, this.theme, ratio);
      if (this.main) return this.arrange();
    }
    this.redraw();
  }

  recolour(dark) {
    [this.dark, this.theme] = [dark, theme(dark)];
    if (this.main) this.overview.draw(this.main, this.theme, this.ratio);
    this.redraw();
  }

  /** Turns a track or mark on or off. */
  toggle(what, on = !this.shown.has(what)) {
    if (on) this.shown.add(what);
    else this.shown.delete(what);
    this.shell[`toggle-${what}`].setAttribute("aria-pressed", String(on));
    this.arrange();
    this.tell.viewed();
  }

  /** Folds a rank to its compute, or unfolds it. */
  fold(number) {
    if (!this.collapsed.delete(number)) this.collapsed.add(number);
    this.arrange();
    this.tell.viewed();
    this.tell.say(`rank ${number} is ${this.collapsed.has(number) ? "folded" : "unfolded"}`);
  }

  /** Folds all ranks, or unfolds them if all are. */
  foldAll(fold = this.layout.groups.some((one) => !one.collapsed)) {
    this.collapsed = new Set(fold ? this.layout.groups.map((one) => one.number) : []);
    this.arrange();
    this.tell.viewed();
  }

  /** Forgets range and selection; folds these ranks, by default those that start folded, and no others. */
  reset(folded) {
    this.range = null;
    this.tell.ranged(null);
    this.select(null);
    this.collapsed = new Set(folded ?? usual(this.main.entry));
    this.arrange();
  }

  /** The folded ranks; null if they are those that start folded. */
  get folding() {
    const own = this.main && usual(this.main.entry);
    return own && own.symmetricDifference(this.collapsed).size ? this.collapsed : null;
  }

  /** Sets the critical path from the summary, when that has arrived. */
  summed() {
    const spots = (this.main.summary?.critical ?? [])
      .map(([rank, row]) => ({ rank, row }))
      .filter(({ rank, row }) => row < (this.main.ranks.get(rank)?.recorded ?? 0));
    const starts = Float64Array.from(spots, ({ rank, row }) => this.main.ranks.get(rank).start[row]);
    for (let at = 1; at < starts.length; at += 1) starts[at] = Math.max(starts[at], starts[at - 1]);
    this.path = { spots, starts };
    this.redraw();
  }

  // Drawing

  get state() {
    const { width, height, ratio, view, theme, layout, main, other, colouring, matches, memory } = this;
    const { selected, pointer, range, chain, shown } = this;
    const its = view.later(this.later);
    return {
      ...{ width, height, ratio, view, theme, layout, main, other, colouring, matches, memory },
      ...{ selected, range, chain, idle: this.idle },
      ...{ hovered: pointer.spot, gap: pointer.gap, pointer: pointer.when },
      scroll: this.shell.scroll.scrollTop,
      arrows: shown.has("arrows"),
      causes: shown.has("causes"),
      critical: shown.has("path") ? this.path : null,
      viewOf: (beside) => (beside ? its : view),
      twin: (spot) => this.twin(spot)?.spot ?? null,
      memoryText: (rank) => `≤ ${bytes(rank.memory.most)}`,
    };
  }

  redraw() {
    this._all = true;
    this._soon();
  }

  _over() {
    this._soon();
  }

  _soon() {
    this._waiting ||= requestAnimationFrame(() => {
      this._waiting = 0;
      this.draw();
    });
  }

  /** Draws the changes; returns the milliseconds. */
  draw(all = this._all) {
    const begun = performance.now();
    const { state } = this;
    if (all && this.main) this.scene.draw(state);
    this.overlay.draw(state);
    this.overview.mark(this._rows);
    this._all = false;
    const took = performance.now() - begun;
    if (all) this.frames.push(took);
    if (this.frames.length > FRAMES) this.frames.shift();
    return took;
  }

  /** The shares of the ranks' height at the top and the bottom of what is in sight. */
  get _rows() {
    const { scrollTop, clientHeight } = this.shell.scroll;
    const { height } = this.layout;
    return [scrollTop / height, Math.min(1, (scrollTop + clientHeight - AXIS) / height)];
  }

  // Moving

  /** The overview was dragged, where it shows ranks to a share of their height. */
  _dragged(share) {
    const { scroll } = this.shell;
    if (share !== null) scroll.scrollTop = share * this.layout.height - (scroll.clientHeight - AXIS) / 2;
    this.moved();
  }

  moved() {
    this.pointer.again();
    this.redraw();
    this.tell.viewed();
  }

  fit() {
    this.view.fit();
    this.moved();
  }

  /** Moves an effect into view, and zooms only as far as needed. */
  reveal(spot) {
    const [rank, by] = [this._rank(spot), this.by(spot)];
    this.view.reveal(rank.start[spot.row] - by, rank.end[spot.row] - by);
    const group = this.layout.groups.find((one) => one.number === spot.rank);
    const { scroll } = this.shell;
    const room = scroll.clientHeight - AXIS;
    if (group && group.y < scroll.scrollTop) scroll.scrollTop = group.y;
    else if (group && group.y + group.height > scroll.scrollTop + room)
      scroll.scrollTop = group.y + group.height - room;
    this.moved();
  }

  zoomTo(spot) {
    const [rank, by] = [this._rank(spot), this.by(spot)];
    const [start, end] = [rank.start[spot.row] - by, rank.end[spot.row] - by];
    const span = (end - start) * 8 || this.view.span / 8;
    this.view.show((start + end - span) / 2, (start + end + span) / 2);
    this.reveal(spot);
  }

  _rank(spot) {
    return this.of(spot).ranks.get(spot.rank);
  }

  /** The same effect in the other run: {capture, spot, later}, or null; its times are so much later. */
  twin(spot) {
    const [own, capture] = spot.other ? [this.other, this.main] : [this.main, this.other];
    const rank = capture?.ranks.get(spot.rank);
    const row = rank && own ? rank.find(own.ranks.get(spot.rank).key(spot.row)) : -1;
    const later = spot.other ? -this.later : this.later;
    return row < 0 ? null : { capture, later, spot: { rank: spot.rank, row, other: !spot.other } };
  }

  // The pointer

  /** The pointer has moved; null if it has left. */
  hover(x, y) {
    if (x === null) this.pointer.leave();
    else this.pointer.move(x, y);
    this._over();
  }

  /** The ranks have moved under the pointer. */
  scrolled() {
    this.pointer.again();
    this.redraw();
    this.tell.viewed();
  }

  // Selection

  /** Selects an effect; clears the selection if its capture does not have it. */
  select(found, { reveal = false } = {}) {
    const there = found && this.of(found)?.ranks.get(found.rank);
    const spot = there && found.row >= 0 && found.row < there.kind.length ? found : null;
    this.selected = spot;
    this.idle = this.account = null;
    this.chain = spot ? this.of(spot).chain(spot) : [];
    if (spot && reveal) this.reveal(spot);
    this.tell.selected(spot);
    this._over();
  }

  /** Selects a rank's memory at a moment: {rank, when}. */
  selectMemory({ group, when }) {
    this.select(null);
    this.account = { rank: group.number, when };
    this.tell.selected(null);
  }

  /** Selects idle time: {rank, start, end, cause, other}. */
  selectGap(gap, { reveal = false } = {}) {
    const next = this.of(gap).after(gap);
    this.selected = this.account = null;
    this.idle = gap;
    this.chain = next && gap.cause !== "host" ? this.of(gap).chain({ ...next, other: gap.other }) : [];
    if (reveal) {
      this.view.reveal(gap.start - this.by(gap), gap.end - this.by(gap));
      this.moved();
    }
    this.tell.selected(null);
    this._over();
  }

  /** The capture of a spot. */
  of(spot) {
    return spot.other ? this.other : this.main;
  }

  /** By how much the times of a spot are later than the view's. */
  by(spot) {
    return spot.other ? this.later : 0;
  }

  // A range

  measure(from, to) {
    const [low, high] = [Math.min(from, to), Math.max(from, to)];
    this.range = { from: low, to: high };
    this._over();
  }

  measured() {
    this.tell.ranged(this.range);
  }

  /** Clears the range, else the selection; returns whether there was one. */
  release() {
    if (this.range) {
      this.range = null;
      this.tell.ranged(null);
    } else if (this.selected || this.idle || this.account) this.select(null);
    else return false;
    this._over();
    return true;
  }

  /** The visible timeline as an image. */
  async image() {
    this.draw(true);
    const { canvas, over } = this.shell;
    const both = document.createElement("canvas");
    [both.width, both.height] = [canvas.width, canvas.height];
    const context = both.getContext("2d");
    context.drawImage(canvas, 0, 0);
    context.drawImage(over, 0, 0);
    return new Promise((done) => both.toBlob(done, "image/png")); // null if it is too large
  }
}

const count = ({ expected, ranks }) => expected || ranks.length;

/** The ranks that start folded. */
const usual = ({ ranks }) => new Set(ranks.length > UNFOLDED ? ranks : []);
