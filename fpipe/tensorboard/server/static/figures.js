/** The server's figures: summary of a capture, and comparison with another. */

import { element, shortened } from "./dom.js";
import { open } from "./panes.js";
import * as panels from "./panels.js";
import * as routes from "./routes.js";

export class Figures {
  /** @param {import("./notices.js").Notices} notices */
  constructor(shell, sheet, notices) {
    [this.shell, this.sheet, this.notices] = [shell, sheet, notices];
    this.answer = null; // of the comparison
  }

  /** Empties the tables of the previous captures. */
  clear() {
    const { shell } = this;
    this.answer = null;
    for (const id of ["critical", "ranks-diff", "effects-diff", "lies", "effects"]) shell[id].replaceChildren();
    shell.bubbles.replaceChildren(element("caption", {}, "adding up …"));
    this.headline();
  }

  /** Fetches and shows the figures; this may take longer than the drawing. */
  async show(main, other, signal) {
    const { shell, sheet } = this;
    shell["tab-diff"].hidden = !other;
    if (!other && !shell["panel-diff"].hidden) open(shell, "bubbles");
    await this._sum(main, "summary", signal);
    if (signal.aborted) return;
    if (main.summary) {
      sheet.summed();
      panels.bubbles(shell.bubbles, main);
      panels.critical(shell.critical, main, (spot) => sheet.select(spot, { reveal: true }));
    } else shell.bubbles.replaceChildren(element("caption", {}, "there is no summary"));
    this.notices.tell("summary", main.summary?.notices);
    this.headline();
    if (!other) return;
    await this._compare(main, other, signal);
    if (signal.aborted) return;
    await this._sum(other, `summary of ${other.label}`, signal);
    if (!signal.aborted) sheet.redraw();
  }

  async _sum(capture, what, signal) {
    if (capture.summary) return;
    try {
      capture.summary = await routes.summary(capture.entry, signal);
    } catch (error) {
      if (!signal.aborted) this.notices.failed(what, error.message);
    }
  }

  async _compare(main, other, signal) {
    const { shell, sheet } = this;
    let answer = null;
    try {
      answer = await routes.compare(main.entry, other.entry, signal);
    } catch (error) {
      if (!signal.aborted) this.notices.failed("comparison", error.message);
    }
    if (signal.aborted || !answer) return;
    this.answer = answer;
    const names = this._names();
    panels.ranksDiff(shell["ranks-diff"], answer, names, main.unit);
    panels.effectsDiff(shell["effects-diff"], answer, names, main, (spot) => sheet.select(spot, { reveal: true }));
    panels.lies(shell.lies, answer, names, main.unit);
    this.notices.tell("comparison", answer.notices);
    this.headline();
  }

  headline() {
    const { main, other } = this.sheet;
    if (main) panels.headline(this.shell.headline, main, this.answer, other ? this._names() : []);
  }

  /** The names of two runs shown side by side. */
  _names() {
    const [main, other] = [this.sheet.main.entry, this.sheet.other.entry];
    if (main.kind !== other.kind) return [main.kind, other.kind];
    if (main.run !== other.run) return [shortened(main.run, 20), shortened(other.run, 20)];
    return [`step ${main.step}`, `step ${other.step}`];
  }
}
