/** The whole step above the timeline: the share of ranks that compute over time, and the visible part. */

import { held } from "./dom.js";

export class Overview {
  /**
   * @param {Record<string, HTMLElement>} shell
   * @param {import("./view.js").View} view
   * @param {() => void} moved called when the part in sight was dragged
   */
  constructor(shell, view, moved) {
    [this.shell, this.view, this.moved] = [shell, view, moved];
    shell.overview.addEventListener("pointerdown", (event) => this._press(event));
  }

  /** Redraws the share of computing ranks. */
  draw(capture, theme, ratio) {
    const { "overview-canvas": canvas, overview } = this.shell;
    const width = overview.clientWidth - this.view.left;
    const tall = overview.clientHeight;
    canvas.style.left = `${this.view.left}px`;
    [canvas.width, canvas.height] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(tall * ratio))];
    const ranks = [...capture.ranks.values()];
    const shares = new Float64Array(canvas.width);
    const { from, to } = this.view.all;
    for (const rank of ranks)
      for (const levels of rank.tracks.compute.levels("kind")) levels.add(shares, from, (to - from) / canvas.width);
    const context = canvas.getContext("2d");
    context.fillStyle = theme.overview;
    shares.forEach((share, x) => {
      const height = (share / ranks.length) * (canvas.height - 2);
      context.fillRect(x, canvas.height - height, 1, height);
    });
  }

  /** Marks the visible part. */
  mark() {
    const { view } = this;
    const { from, to } = view.all;
    const [left, right] = [view.from, view.to].map((when) => ((when - from) / (to - from)) * view.width);
    const { style } = this.shell.sight;
    style.left = `${view.left + left}px`;
    style.width = `${Math.max(3, right - left)}px`;
  }

  _press(event) {
    const { overview } = this.shell;
    const { view } = this;
    const { from, to } = view.all;
    const go = ({ clientX }) => {
      const share = (clientX - overview.getBoundingClientRect().left - view.left) / view.width;
      const middle = from + share * (to - from);
      const half = view.span / 2;
      view.show(middle - half, middle + half);
      this.moved();
    };
    held(overview, event, go);
    go(event);
  }
}
