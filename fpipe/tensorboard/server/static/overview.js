/**
 * The whole step above the timeline, and the part in sight: the share of ranks that compute over time. With many ranks,
 * which start folded and are not all in sight, each of them is a row of pixels in the colours of its effects.
 */

import { held } from "./dom.js";
import { colours, packed } from "./palette.js";

const DENSE = 64; // ranks from which each is a row
const LOW = 22; // pixels: height of the share
const BORDER = 1; // pixels, below the rows
const ROOM = 0.3; // at most this share of the timeline's height for rows
const HIGHEST = 160; // pixels, likewise

export class Overview {
  /**
   * @param {Record<string, HTMLElement>} shell
   * @param {import("./view.js").View} view
   * @param {(share: number | null) => void} moved called when the part in sight was dragged; with rows, to which share of
   *   the ranks' height
   */
  constructor(shell, view, moved) {
    [this.shell, this.view, this.moved] = [shell, view, moved];
    this.dense = false;
    shell.overview.addEventListener("pointerdown", (event) => this._press(event));
  }

  /** Sets the height that the ranks of a capture need; returns whether it has changed. */
  fit(capture) {
    const { overview, scroll, timeline } = this.shell;
    const count = capture.entry.ranks.length;
    this.dense = count >= DENSE;
    const most = Math.min(HIGHEST, Math.max(DENSE, Math.round(timeline.clientHeight * ROOM)));
    const tall = this.dense ? Math.min(count, most) + BORDER : LOW;
    if (tall === this.tall) return false;
    this.tall = tall;
    overview.style.height = `${tall}px`;
    scroll.style.top = `${tall}px`;
    const what = this.dense ? "each rank is a row" : "share of the ranks that compute";
    overview.title = `${what}; drag to move`;
    return true;
  }

  /** Redraws the ranks. */
  draw(capture, theme, ratio) {
    const { "overview-canvas": canvas, overview } = this.shell;
    const width = overview.clientWidth - this.view.left;
    const tall = overview.clientHeight;
    canvas.style.left = `${this.view.left}px`;
    [canvas.width, canvas.height] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(tall * ratio))];
    const ranks = [...capture.ranks.values()].sort((a, b) => a.number - b.number);
    const context = canvas.getContext("2d");
    if (this.dense) this._rows(context, ranks, capture, theme);
    else this._share(context, ranks, theme);
  }

  _share(context, ranks, theme) {
    const { width, height } = context.canvas;
    const shares = new Float64Array(width);
    const { from, to } = this.view.all;
    for (const rank of ranks)
      for (const levels of rank.tracks.compute.levels("kind")) levels.add(shares, from, (to - from) / width);
    context.fillStyle = theme.overview;
    shares.forEach((share, x) => {
      const tall = (share / ranks.length) * (height - 2);
      context.fillRect(x, height - tall, 1, tall);
    });
  }

  _rows(context, ranks, capture, theme) {
    const { width, height } = context.canvas;
    const count = Math.max(capture.entry.expected || 0, ...capture.entry.ranks.map((number) => number + 1));
    const strip = document.createElement("canvas");
    [strip.width, strip.height] = [width, ranks.length];
    const image = new ImageData(width, Math.max(1, ranks.length));
    const pixels = new Uint32Array(image.data.buffer);
    const own = packed(colours(theme));
    const { from, to } = this.view.all;
    ranks.forEach(({ tracks }, at) => {
      for (const levels of tracks.compute.levels("kind")) levels.paint(pixels, at * width, width, from, (to - from) / width, own);
    });
    strip.getContext("2d").putImageData(image, 0, 0);
    const each = height / count;
    ranks.forEach(({ number }, at) => context.drawImage(strip, 0, at, width, 1, 0, number * each, width, each));
  }

  /** Marks the visible part; `rows` are the shares of the ranks' height at its top and its bottom. */
  mark([top, bottom]) {
    const { view } = this;
    const { from, to } = view.all;
    const [left, right] = [view.from, view.to].map((when) => ((when - from) / (to - from)) * view.width);
    const { style } = this.shell.sight;
    style.left = `${view.left + left}px`;
    style.width = `${Math.max(3, right - left)}px`;
    style.top = this.dense ? `${100 * top}%` : "0";
    style.bottom = this.dense ? `${100 * (1 - bottom)}%` : "0";
  }

  _press(event) {
    const { overview } = this.shell;
    const { view } = this;
    const { from, to } = view.all;
    const go = ({ clientX, clientY }) => {
      const place = overview.getBoundingClientRect();
      const share = (clientX - place.left - view.left) / view.width;
      const middle = from + share * (to - from);
      const half = view.span / 2;
      view.show(middle - half, middle + half);
      this.moved(this.dense ? (clientY - place.top) / place.height : null);
    };
    held(overview, event, go);
    go(event);
  }
}
