/** The page: which capture is shown and beside which, and what the panels say of it. */

import { element, named, settled, shortened } from "./dom.js";
import { Exports } from "./exports.js";
import { Finder } from "./finder.js";
import { time } from "./format.js";
import { borrowFonts, onReload, onTheme } from "./host.js";
import { listen } from "./input.js";
import { legend } from "./legend.js";
import { Library, stored } from "./library.js";
import { AXIS } from "./measures.js";
import { nothing, open, options, splitter, tabs } from "./panes.js";
import * as panels from "./panels.js";
import * as routes from "./routes.js";
import { Sheet } from "./sheet.js";
import { TOGGLES } from "./shell.js";

const POLL = 5000; // milliseconds

export class App {
  constructor(shell) {
    this.shell = shell;
    this.library = new Library();
    this.choice = { run: null, step: null, other: "auto", follow: true, ...stored.read().choice };
    this.answer = null; // of the comparison
    this.failures = [];
    this.ready = new Promise((done) => (this._ready = done));
    this.tables = settled(() => requestIdleCallbackOr(() => this._effects()), 350);
    this.keep = settled(() => this._store(), 300);
    this.sheet = new Sheet(shell, {
      viewed: () => this._viewed(),
      selected: (spot) => this._selected(spot),
      ranged: (range) => this._ranged(range),
      say: (text) => this.say(text),
    });
    this.finder = new Finder(shell, this.sheet, (text) => this.say(text));
  }

  async start() {
    const { view, colour = "kind", shown } = stored.read();
    for (const [id, , , , on] of TOGGLES) this.sheet.toggle(id, shown ? shown.includes(id) : on);
    this.sheet.colouring = this.shell.colour.value = colour;
    this.shell.follow.checked = this.choice.follow;
    this._wire();
    this._ranged(null);
    onTheme((dark) => {
      document.documentElement.classList.toggle("dark", dark);
      this.sheet.recolour(dark);
      this.legend();
    });
    borrowFonts();
    onReload(() => this.refresh({ again: true }));
    setInterval(() => document.visibilityState === "visible" && this.choice.follow && this.refresh(), POLL);
    this.remembered = view;
    await this.refresh();
  }

  get capture() {
    return this.sheet.main;
  }

  say(text) {
    this.shell.live.textContent = shortened(text, 400);
  }

  _wire() {
    const { shell, sheet } = this;
    const on = (id, event, call) => shell[id].addEventListener(event, call);
    for (const [id] of TOGGLES) on(`toggle-${id}`, "click", () => sheet.toggle(id));
    on("run", "change", () => this.choose({ run: shell.run.value, step: null, other: this.choice.other && "auto" }));
    on("step", "change", () => this.choose({ step: Number(shell.step.value) }));
    on("step-prev", "click", () => this.stepBy(-1));
    on("step-next", "click", () => this.stepBy(1));
    on("follow", "change", () =>
      this.choose({ follow: shell.follow.checked, step: shell.follow.checked ? null : this.choice.step }),
    );
    on("other", "change", () => this.choose({ other: JSON.parse(shell.other.value) }));
    on("colour", "change", () => this._recolour());
    on("fit", "click", () => sheet.fit());
    on("help", "click", () => shell["help-dialog"].showModal());
    new Exports(
      shell,
      sheet,
      (text) => this.say(text),
      (reason) => this._failed("export", reason),
    );
    tabs(shell);
    splitter(shell, () => sheet.arrange());
    listen(this);
  }

  // What is shown

  /** Looks again what there is; shows what is new, if it is followed, and `again` what failed before. */
  async refresh({ again = false } = {}) {
    if (this._refreshing) return;
    if (again && this.failures.length) this.key = null;
    this._refreshing = true;
    try {
      await this.library.refresh();
      this.unreachable = null;
    } catch (error) {
      this.unreachable = error.message;
    } finally {
      this._refreshing = false;
    }
    this._notices();
    await this._resolve();
  }

  /** Takes a choice of the user's. */
  async choose(change) {
    Object.assign(this.choice, change);
    if (change.step != null && change.step !== this.library.steps(this.choice.run).at(-1)?.step)
      this.choice.follow = false;
    await this._resolve();
  }

  stepBy(by) {
    const steps = this.library.steps(this.choice.run);
    const at = steps.findIndex((entry) => entry.step === this.choice.step) + by;
    if (at < 0 || at >= steps.length) return this.say(by > 0 ? "the last step" : "the first step");
    return this.choose({ step: steps[at].step });
  }

  /** Makes the choice one that exists, and shows it if it is another than what is shown. */
  async _resolve() {
    const { library, choice, shell } = this;
    shell.empty.hidden = library.entries.length > 0;
    if (!library.entries.length) {
      shell.empty.replaceChildren(...nothing(this.unreachable));
      this._ready();
      return;
    }
    if (!library.runs.includes(choice.run)) [choice.run, choice.step] = [library.latest.run, null];
    const steps = library.steps(choice.run);
    const newest = steps.at(-1).step;
    const came = this.newest?.run === choice.run && newest > this.newest.step;
    this.newest = { run: choice.run, step: newest };
    if (!library.find(choice.run, choice.step) || (choice.follow && came)) choice.step = newest;
    const entry = library.find(choice.run, choice.step);
    const other = this._other(entry);
    this._selectors(entry, other);
    const key = JSON.stringify([entry, other]);
    if (key === this.key) return;
    this.key = key;
    await this._load(entry, other);
  }

  _other(entry) {
    const { other } = this.choice;
    const found = other === "auto" ? this.library.predicted(entry) : other && this.library.find(other.run, other.step);
    return found && (found.run !== entry.run || found.step !== entry.step) ? found : null;
  }

  async _load(entry, otherEntry) {
    const { library, sheet, shell } = this;
    this.loading?.abort();
    const { signal } = (this.loading = new AbortController());
    this.answer = null;
    this.failures = [];
    shell.progress.hidden = false;
    this.say(`loading ${entry.run}, step ${entry.step}`);
    let [main, other] = [null, null];
    const arrived = () => {
      if (signal.aborted || !main || (!main.ranks.size && this.capture)) return;
      const done = main.ranks.size + (other?.ranks.size ?? 0);
      shell.progress.style.transform = `scaleX(${done / (entry.ranks.length + (otherEntry?.ranks.length ?? 0) || 1)})`;
      this.arrive(main, other);
    };
    try {
      await Promise.all([
        library.load(entry, (capture) => arrived((main = capture)), signal),
        otherEntry && library.load(otherEntry, (capture) => arrived((other = capture)), signal),
      ]);
    } catch (error) {
      if (signal.aborted) return;
      this.failures.push(error.message);
    }
    if (signal.aborted) return;
    sheet.show(main, other, true);
    if (this.remembered) sheet.view.show(...this.remembered);
    this.remembered = null;
    sheet.draw(true);
    shell.progress.hidden = true;
    this.failures.push(...main.failures, ...(other?.failures ?? []).map((text) => `${other.label}: ${text}`));
    this._notices();
    this._headline();
    this.legend();
    this.finder.search();
    this._selected(sheet.selected);
    this.tables();
    this._store();
    this.say(`${main.label}: ${main.ranks.size} ranks, ${main.size} effects`);
    this._ready();
    await this._summaries(main, other, signal);
  }

  /** A rank has come: drawn at the next frame. */
  arrive(main, other) {
    this.sheet.show(main, other, false);
    this._headline();
  }

  /** The server's figures: they may take longer than the drawing. */
  async _summaries(main, other, signal) {
    const tell = (what) => (error) => signal.aborted || this._failed(what, error.message);
    const { shell, sheet } = this;
    shell["tab-diff"].hidden = !other;
    if (!other && !shell["panel-diff"].hidden) open(shell, "bubbles");
    if (!main.summary) shell.bubbles.replaceChildren(element("caption", {}, "adding up …"));
    await (main.summary
      ? null
      : routes.summary(main.entry, signal).then((found) => (main.summary = found), tell("summary")));
    if (signal.aborted) return;
    if (main.summary) {
      sheet.summed();
      panels.bubbles(shell.bubbles, main);
      panels.critical(shell.critical, main, (spot) => sheet.select(spot, { reveal: true }));
    } else shell.bubbles.replaceChildren(element("caption", {}, "there is no summary"));
    this._notices();
    this._headline();
    if (!other) return;
    const names = this._names(main, other);
    const answer = await routes.compare(main.entry, other.entry, signal).catch(tell("comparison"));
    if (signal.aborted || !answer?.ranks) return;
    this.answer = answer;
    panels.ranksDiff(shell["ranks-diff"], answer, names, main.unit);
    panels.effectsDiff(shell["effects-diff"], answer, names, main, (spot) => sheet.select(spot, { reveal: true }));
    panels.lies(shell.lies, answer, names, main.unit);
    this._headline();
    this._notices();
    if (!other.summary)
      await routes.summary(other.entry, signal).then((found) => (other.summary = found), tell("summary"));
    if (!signal.aborted) sheet.redraw();
  }

  /** What two runs are called where they stand beside each other. */
  _names(main, other) {
    if (main.entry.kind !== other.entry.kind) return [main.entry.kind, other.entry.kind];
    if (main.entry.run !== other.entry.run) return [shortened(main.entry.run, 20), shortened(other.entry.run, 20)];
    return [`step ${main.entry.step}`, `step ${other.entry.step}`];
  }

  _selectors(entry, other) {
    const { shell, library, choice } = this;
    options(
      shell.run,
      library.runs.map((run) => [run, run]),
      entry.run,
    );
    options(
      shell.step,
      library.steps(entry.run).map(({ step }) => [String(step), String(step)]),
      String(entry.step),
    );
    const steps = library.steps(entry.run);
    shell["step-prev"].disabled = steps[0].step === entry.step;
    shell["step-next"].disabled = steps.at(-1).step === entry.step;
    const others = library.entries
      .filter((one) => one.run !== entry.run || one.step !== entry.step)
      .map((one) => [JSON.stringify({ run: one.run, step: one.step }), `${shortened(one.run, 36)}, step ${one.step}`]);
    options(
      shell.other,
      [["null", "nothing"], ...others],
      JSON.stringify(other && { run: other.run, step: other.step }),
    );
    shell.follow.checked = choice.follow;
  }

  /** Says what failed, and why; null that it did not. */
  _failed(what, reason) {
    this.failures = this.failures.filter((text) => !text.startsWith(`${what}: `));
    if (reason) this.failures.push(`${what}: ${reason}`);
    this._notices();
  }

  _notices() {
    const { shell, library, capture } = this;
    const found = [
      this.unreachable,
      ...library.notices,
      ...(capture?.summary?.notices ?? []),
      ...(this.answer?.notices ?? []),
      ...this.failures,
    ];
    const texts = [...new Set(found.filter(Boolean))];
    shell.notices.hidden = !texts.length;
    if (texts.join("\n") === this._noticed) return;
    this._noticed = texts.join("\n");
    shell.notices.replaceChildren(...texts.map((text) => element("p", {}, named(text, 300))));
  }

  _headline() {
    const { capture, sheet, answer } = this;
    if (!capture) return;
    panels.headline(this.shell.headline, capture, answer, sheet.other ? this._names(capture, sheet.other) : []);
  }

  // What the panels say

  _selected(spot) {
    const { details } = this.shell;
    const { sheet } = this;
    if (!spot) {
      details.replaceChildren(element("p", { class: "faint" }, "Click an effect, or move to one with , and ."));
      return;
    }
    const known = panels.details(details, sheet, spot);
    this.say(known.map(([name, text]) => `${name} ${text}`.trim()).join(", "));
  }

  _ranged(range) {
    const { shell, capture } = this;
    if (!range)
      return shell.range.replaceChildren(element("caption", {}, "Shift+drag on the timeline measures a range"));
    panels.within(shell.range, capture, range);
    open(shell, "range");
    this.say(`range of ${time(range.to - range.from, capture.unit)}`);
  }

  _viewed() {
    if (!this.capture) return;
    this.tables();
    this.keep();
  }

  _effects() {
    const { sheet, capture, shell } = this;
    if (!capture) return;
    const top = shell.scroll.scrollTop;
    const seen = sheet.layout.groups.filter(
      (group) => group.y + group.height > top && group.y < top + sheet.height - AXIS,
    );
    panels.effects(
      shell.effects,
      capture,
      sheet.view,
      seen.map((group) => group.number),
      (spot) => sheet.select(spot, { reveal: true }),
    );
  }

  _recolour() {
    this.sheet.colouring = this.shell.colour.value;
    this.sheet.redraw();
    this.legend();
    this._store();
  }

  legend() {
    legend(this.shell.legend, this.capture, this.sheet.colouring, this.sheet.theme);
  }

  /** Lets go of the range, then of the selection, then of the search. */
  release() {
    if (!this.sheet.release()) this.finder.release();
  }

  _store() {
    const { view, colouring, shown } = this.sheet;
    stored.write({
      choice: this.choice,
      view: view.fitted ? null : [view.from, view.to],
      colour: colouring,
      shown: [...shown],
    });
  }
}

const requestIdleCallbackOr = (call) =>
  window.requestIdleCallback ? requestIdleCallback(call, { timeout: 1000 }) : setTimeout(call);
