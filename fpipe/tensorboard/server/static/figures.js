/** The server's figures: summary of a capture, comparison with another, and the line above the timeline. */

import { element, named } from "./dom.js";
import { change, percent, time } from "./format.js";
import { names } from "./pair.js";
import * as routes from "./routes.js";

const NOTHING = 1e-9; // share of the makespan that counts as rounding error
const MOST_REPLICAS = 4; // whose makespans are all shown

/** What the bubble is. */
export const BUBBLE =
  "The bubble is the idle share of a step. A step takes as long as the longest span of a rank, from the start of its " +
  "first effect to the end of its last: where steps follow each other, a rank’s warm-up runs beside the drain of the " +
  "step before.";

export class Figures {
  /**
   * @param {import("./notices.js").Notices} notices
   * @param {() => void} changed called after each change
   */
  constructor(shell, sheet, notices, changed) {
    [this.shell, this.sheet, this.notices, this.changed] = [shell, sheet, notices, changed];
    this.answer = null; // of the comparison
    this.unanswered = false; // whether the server was not there for some of the figures
  }

  /** Forgets the previous captures' comparison. */
  clear() {
    this.answer = null;
    this._tell();
  }

  /** Fetches the figures; this may take longer than the drawing. */
  async show(main, other, signal) {
    this.unanswered = false;
    await this._sum(main, "summary", signal);
    if (signal.aborted) return;
    this.sheet.summed();
    if (main.summary) this.notices.tell("summary", main.summary.notices);
    else main.whatIf = null;
    this._tell();
    if (!main.summary) return;
    if (other) await this._beside(main, other, signal);
    if (!signal.aborted && !main.large) await this.ask(main, signal);
  }

  async _beside(main, other, signal) {
    await this._sum(other, `summary of ${other.label}`, signal);
    if (signal.aborted || !other.summary) return;
    this.sheet.redraw();
    await this._compare(main, other, signal);
  }

  /** Fetches what would help a capture. */
  async ask(capture, signal = undefined) {
    if (capture.whatIf || capture.asked) return;
    capture.asked = true;
    try {
      capture.whatIf = await routes.whatIf(capture.entry, signal);
    } catch (error) {
      if (!signal?.aborted) {
        capture.whatIf = null;
        this._failed("what would help", error);
      }
    }
    capture.asked = false;
    if (capture === this.sheet.main) this._tell();
  }

  async _sum(capture, what, signal) {
    try {
      capture.summary ??= await routes.summary(capture.entry, signal);
      if (capture.keep(capture.summary.ranks.map(({ rank }) => rank))) this.sheet.arrange();
    } catch (error) {
      if (signal.aborted) return;
      capture.summary = null;
      if (error.status === 422) this.notices.tell(what, [error.message]);
      else this._failed(what, error);
    }
  }

  async _compare(main, other, signal) {
    let answer = null;
    try {
      answer = await routes.compare(main.entry, other.entry, signal);
    } catch (error) {
      if (!signal.aborted) this._failed("comparison", error);
    }
    if (signal.aborted || !answer) return;
    this.answer = answer;
    this.notices.tell("comparison", answer.notices);
    this._tell();
  }

  _failed(what, error) {
    this.unanswered ||= error instanceof routes.Unanswered;
    this.notices.failed(what, error.message);
  }

  _tell() {
    this.headline();
    this.changed();
  }

  /** The names of the two captures. */
  get names() {
    return names(this.sheet.main?.entry, this.sheet.other?.entry);
  }

  /** Shows the figures of the whole capture, or of two. */
  headline() {
    const { answer, names, sheet } = this;
    if (!sheet.main) return;
    const { entry, summary, unit, whatIf } = sheet.main;
    const counts = [
      [entry.expected || entry.ranks.length, "rank", "s"],
      [entry.stages, "stage", "s"],
      [entry.microbatches, "microbatch", "es"],
    ].filter(([count]) => count);
    const extent = counts.map(([count, what, ending]) => `${count} ${what}${count === 1 ? "" : ending}`).join(", ");
    const parts = [entry.schedule ? named(entry.schedule, 40) : null, extent];
    if (summary) {
      const within = summary.makespan - summary.cost > NOTHING * summary.makespan;
      const of = within ? ` of the longest span of a rank, ${time(summary.cost, unit)}` : "";
      parts.push(period(summary, unit));
      parts.push(figure("makespan", time(summary.makespan, unit)));
      parts.push(figure("bubble", percent(summary.bubble_rate), of, BUBBLE));
    }
    if (whatIf?.headline) parts.push(element("b", { class: "help" }, whatIf.headline));
    if (summary?.makespans.length) parts.push(...replicas(summary, unit));
    if (answer) {
      const other = sheet.other.summary;
      const by = (a, b) => (Math.abs(a - b) > NOTHING * Math.max(a, b) ? change(a, b) || "0%" : "the same");
      const beside = (a, b) => (summary.steps === other.steps ? ` (${names[0]} is ${by(a, b)})` : "");
      parts.push(period(other, unit, `${names[1]} `, beside(summary.period, other.period)));
      const [a, b] = answer.makespan;
      parts.push(figure(`${names[1]} makespan`, time(b, unit), beside(a, b)));
      parts.push(figure(`${names[1]} bubble`, percent(answer.bubble_rate[1]), "", BUBBLE));
    }
    this.shell.headline.replaceChildren(
      ...parts.filter(Boolean).map((part) => element("span", { class: "part" }, part)),
    );
  }
}

const figure = (name, text, more = "", title = null) =>
  element("span", { class: "figure", title }, `${name} `, element("b", {}, text), more);

/** The period of several steps. */
const period = ({ steps, period: each }, unit, of = "", more = "") =>
  steps > 1 ? figure(`${of}period`, time(each, unit), ` over ${steps} steps${more}`) : null;

/** The makespans of a few replicas: of all, or where there are many, of the shown one and the slowest. */
function replicas({ replica, makespans }, unit) {
  const slowest = makespans.indexOf(Math.max(...makespans));
  const shown = makespans.length <= MOST_REPLICAS ? makespans.map((_, at) => at) : [...new Set([replica, slowest])];
  return shown.map((at) => {
    const took = element(at === replica ? "b" : "span", {}, time(makespans[at], unit));
    return element("span", { class: "figure", title: at === replica ? "shown here" : "" }, `replica ${at} `, took);
  });
}
