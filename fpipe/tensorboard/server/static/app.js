/** The page: the shown capture, the capture compared with it, and the panels. */

import * as address from "./address.js";
import * as bookmark from "./bookmark.js";
import { details, gapDetails, memoryDetails } from "./details.js";
import { element, settled, shortened } from "./dom.js";
import { Exports } from "./exports.js";
import { Figures } from "./figures.js";
import { Finder } from "./finder.js";
import { flightContent, Flights } from "./flights.js";
import { time } from "./format.js";
import { borrowFonts, onReload, onTheme } from "./host.js";
import { listen } from "./input.js";
import { legend } from "./legend.js";
import { Library } from "./library.js";
import { AXIS } from "./measures.js";
import { Notices } from "./notices.js";
import { drawer, nothing, splitter } from "./panes.js";
import { selectors } from "./selectors.js";
import { Sheet } from "./sheet.js";
import { TOGGLES } from "./shell.js";
import { Steps } from "./steps.js";
import { Tabs } from "./tabs.js";

const REPLICA = /(^|\/)replica\d+$/u; // the folder of a replica, whose flights are with those of the others

const POLL = 5000; // milliseconds
const TRIES = 5; // polls that retry to fetch the ranks that failed

export class App {
  constructor(shell) {
    this.shell = shell;
    this.library = new Library();
    this.choice = bookmark.choice({});
    this.notices = new Notices(shell);
    this.ready = new Promise((done) => (this._ready = done));
    this.sight = null;
    this.rest = settled(() => requestIdleCallbackOr(() => this._rested()), 350);
    this.link = {}; // the state that is still to be shown, from the address
    this.keep = settled(() => this._store(), 300);
    this.announce = settled(() => this._announce(), 400);
    this.sheet = new Sheet(shell, {
      changed: () => this._changed(),
      viewed: () => this._viewed(),
      selected: (spot) => this._selected(spot),
      ranged: (range) => this._ranged(range),
      say: (text) => this.say(text),
    });
    this.figures = new Figures(shell, this.sheet, this.notices, () => {
      this.legend();
      this.tabs.update();
      this._idle();
    });
    this.flights = new Flights(this.notices, () => this._flown());
    this.steps = new Steps(this.library, () => this.tabs.update());
    this.tabs = new Tabs(shell, () => this.state, () => this.keep());
    this.finder = new Finder(shell, this.sheet, (text) => this.say(text), () => {
      this.tabs.update();
      this.keep();
    });
  }

  async start() {
    this._wire();
    this._goTo(address.read());
    address.onMoved(() => {
      this._goTo(address.read());
      void this._resolve();
    });
    onTheme((dark) => {
      document.documentElement.classList.toggle("dark", dark);
      this.sheet.recolour(dark);
      this.legend();
      this.tabs.update();
    });
    borrowFonts();
    onReload(() => this.refresh({ again: true }));
    setInterval(() => this._poll(), POLL);
    await this.refresh();
  }

  get capture() {
    return this.sheet.main;
  }

  get answer() {
    return this.figures.answer;
  }

  say(text) {
    this.announce.cancel(); // of a view before it
    this.shell.live.textContent = shortened(text, 400);
  }

  _wire() {
    const { shell, sheet } = this;
    const on = (id, event, call) => shell[id].addEventListener(event, call);
    for (const [id] of TOGGLES) on(`toggle-${id}`, "click", () => sheet.toggle(id));
    on("run", "change", () => this.choose({ run: shell.run.value, step: null, other: this.choice.other && "auto" }));
    on("step", "change", () => this.choose({ run: shell.run.value, step: Number(shell.step.value) }));
    on("step-prev", "click", () => this.stepBy(-1));
    on("step-next", "click", () => this.stepBy(1));
    on("follow", "change", () =>
      this.choose({ follow: shell.follow.checked, step: shell.follow.checked ? null : this.choice.step }),
    );
    on("other", "change", () => this.choose({ other: JSON.parse(shell.other.value) }));
    on("other-step", "change", () => {
      const { run } = JSON.parse(shell.other.value);
      return this.choose({ other: { run, step: JSON.parse(shell["other-step"].value) } });
    });
    on("colour", "change", () => this._recolour());
    on("fit", "click", () => sheet.fit());
    on("help", "click", () => shell["help-dialog"].showModal());
    const failed = (reason) => this.notices.failed("export", reason);
    new Exports(shell, sheet, (text) => this.say(text), failed);
    this.resize = splitter(shell, () => {
      sheet.arrange();
      this.keep();
    });
    drawer(shell);
    listen(this);
  }

  // The shown capture

  _poll() {
    if (document.visibilityState === "visible") void this.refresh({ again: this._lost() });
  }

  /** Whether parts of the shown captures failed to load and may be retried. */
  _lost() {
    const lost = [this.sheet.main, this.sheet.other].some((one) => one?.lost.size && one.tries < TRIES);
    return lost || this.figures.unanswered;
  }

  /**
   * Reloads the list of captures; shows a new one in follow mode. With `again`, and once a server that did not answer is
   * back, retries what failed.
   */
  async refresh({ again = false } = {}) {
    if (this._refreshing) {
      this._asked = { again: again || Boolean(this._asked?.again) };
      return;
    }
    this._refreshing = true;
    try {
      await this.library.refresh();
      if ((again || this.unreachable) && this.notices.failures.size) this.key = null;
      this.unreachable = null;
    } catch (error) {
      this.unreachable = error.message;
    }
    this._refreshing = false;
    this.notices.tell("index", [this.unreachable, ...this.library.notices].filter(Boolean));
    await this._resolve();
    void this._fly();
    const asked = this._asked;
    this._asked = null;
    if (asked) await this.refresh(asked);
  }

  /** Applies the user's choice. */
  async choose(change) {
    Object.assign(this.choice, change);
    if (change.step != null && change.step !== this.library.steps(this.choice.run).at(-1)?.step)
      this.choice.follow = false;
    await this._resolve();
    void this._fly();
  }

  stepBy(by) {
    if (!this.capture) return;
    const { run, step } = this.library.find(this.choice.run, this.choice.step) ?? this.capture.entry;
    const steps = this.library.steps(run);
    const at = steps.findIndex((entry) => entry.step === step) + by;
    if (at < 0 || at >= steps.length) return this.say(by > 0 ? "the last step" : "the first step");
    return this.choose({ run, step: steps[at].step });
  }

  /** Shows the chosen capture, if it is another than before. */
  async _resolve() {
    const { library, capture, shell } = this;
    const entry = this._entry();
    const shown = entry ?? capture?.entry;
    shell.empty.hidden = Boolean(shown);
    if (!shown) {
      const { shown: flight } = this.flights;
      shell.empty.replaceChildren(...(flight ? flightContent(flight) : nothing(this.unreachable)));
      return this._ready();
    }
    this.notices.tell("choice", missing(library, this.choice, entry));
    const other = entry ? this._other(entry) : this.sheet.other?.entry;
    selectors(shell, library, this.choice, shown, other ?? null);
    this.steps.look(shown.run);
    const key = JSON.stringify([entry, other]);
    if (!entry || key === this.key) return this.loaded && this._recall();
    [this.key, this.loaded] = [key, false];
    await this._load(entry, other);
  }

  /**
   * The capture to show: the chosen one, the newest in its place if it is not listed, or null to keep what is shown:
   * a server that was started again lists its captures one by one.
   */
  _entry() {
    const { library, choice } = this;
    choice.run ??= library.latest?.run ?? null;
    const steps = library.steps(choice.run);
    const last = steps.at(-1)?.step ?? null;
    const before = this.newest?.run === choice.run ? this.newest.step : null;
    const came = before !== null && last > before;
    if (last !== null) this.newest = { run: choice.run, step: Math.max(last, before ?? last) };
    if (choice.step === null || (choice.follow && came)) choice.step = last;
    const shown = this.capture?.entry;
    if (shown?.run === choice.run && shown.step === choice.step) return library.find(choice.run, choice.step);
    return library.find(choice.run, choice.step) ?? steps.at(-1) ?? library.latest;
  }

  _other(entry) {
    const { other } = this.choice;
    const same = (one) => one.run === entry.run && one.step === entry.step;
    if (other?.what && same(other)) return this.library.imagined(other);
    if (other === "auto" || other?.what) return this.library.predicted(entry);
    return other && this.library.beside(other, entry);
  }

  /** Looks for what the ranks of the shown run's job did last. */
  _fly() {
    const entry = this.library.find(this.choice.run, this.choice.step);
    const shown = entry ?? this.capture?.entry;
    return this.flights.show(this.library.flights, shown ? shown.experiment.replace(REPLICA, "") : null);
  }

  _flown() {
    this.tabs.update();
    if (!this.capture) void this._resolve();
  }

  /** Takes over the state of a link; what needs its capture waits until that is shown. */
  _goTo(link) {
    const { sheet, shell } = this;
    this.link = link;
    this.choice = bookmark.choice(link);
    shell.follow.checked = this.choice.follow;
    const shown = bookmark.shown(link);
    for (const [id] of TOGGLES) sheet.toggle(id, shown.has(id));
    shell.colour.value = link.colour ?? "kind";
    if (!shell.colour.value) shell.colour.value = "kind";
    sheet.colouring = shell.colour.value;
    shell.search.value = link.search ?? "";
    this.tabs.choose(link.tab);
  }

  /** Shows the rest of a link's state, now that its capture is there; returns whether there was a link. */
  _recall() {
    const { link, sheet, capture } = this;
    this.link = null;
    if (!link || !capture) return false;
    const [view, range] = ["view", "range"].map((name) => bookmark.span(link, name));
    const folded = bookmark.folded(link);
    this.resize(bookmark.height(link));
    sheet.reset(folded);
    if (view) sheet.view.show(...view);
    else sheet.view.fit();
    if (range) {
      sheet.measure(...range);
      sheet.measured();
    }
    const effect = bookmark.effect(link);
    if (effect && sheet.of(effect)) sheet.select(effect);
    this.wanted = bookmark.idle(link);
    this.tabs.choose(link.tab); // a range has opened its own
    this.finder.search();
    this.legend();
    this._idle();
    return true;
  }

  /** Selects the idle time of a link, once the summary lists those of its rank. */
  _idle() {
    const { wanted, sheet } = this;
    const gaps = wanted && sheet.of(wanted)?.gaps(wanted.rank);
    if (!gaps) return;
    this.wanted = null;
    const at = gaps.start.indexOf(wanted.start);
    if (at >= 0) sheet.selectGap({ ...wanted, end: gaps.end[at], cause: gaps.cause[at] });
  }

  async _load(entry, beside) {
    const { library, sheet, shell, figures, notices } = this;
    const otherEntry = beside?.unit === entry.unit ? beside : null;
    this.loading?.abort();
    const { signal } = (this.loading = new AbortController());
    notices.clear();
    if (beside && !otherEntry) notices.failed(`${beside.run}, step ${beside.step}`, apart(entry, beside));
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
      notices.failed(entry.run, error.message);
    }
    if (signal.aborted) return;
    sheet.show(main, other, true);
    this.loaded = true;
    const recalled = this._recall();
    sheet.draw(true);
    shell.progress.hidden = true;
    for (const one of [main, other]) for (const [what, reason] of one?.failures ?? []) notices.failed(what, reason);
    figures.headline();
    this.legend();
    if (!recalled) this.finder.search();
    this._selected(sheet.selected);
    this.rest();
    this.keep();
    this.say(`${main.label}: ${main.ranks.size} rank${main.ranks.size === 1 ? "" : "s"}, ${main.size} effects`);
    this._ready();
    await figures.show(main, other, signal);
  }

  /** A rank was loaded: draws it in the next frame. */
  arrive(main, other) {
    this.sheet.show(main, other, false);
    this.figures.headline();
  }

  /** The shown captures have changed. */
  _changed() {
    this.sight = null;
    this.figures.clear();
    this._selected(null);
  }

  // Panels

  _selected(spot) {
    const place = this.shell.details;
    this.keep();
    const { idle, account } = this.sheet;
    if (!spot && !idle && !account) {
      place.replaceChildren(element("p", { class: "faint" }, "Click an effect or idle time. The keys , and . move from effect to effect, and g to the next idle time."));
      return;
    }
    const pairs = account
      ? memoryDetails(place, this.sheet, account)
      : spot
        ? details(place, this.sheet, spot)
        : gapDetails(place, this.sheet, idle);
    this.say(pairs.map(([name, text]) => `${name} ${text}`.trim()).join(", "));
  }

  /** @returns {import("./panels.js").State} */
  get state() {
    const { sheet, figures, capture, sight } = this;
    return {
      ...{ capture, other: sheet.other, later: sheet.later, range: sheet.range, matches: sheet.matches, sight },
      ...{ flight: this.flights.shown, whatIf: capture?.whatIf, ask: () => figures.ask(capture) },
      ...{ steps: this.steps.shown, askSteps: (run) => void this.steps.load(run) },
      ...{ dark: sheet.dark, go: (step) => this.choose({ run: capture.entry.run, step }) },
      imagine: (what) => this.choose({ other: { run: capture.entry.run, step: capture.entry.step, what } }),
      ...{ ranks: capture?.ranks.size, summary: capture?.summary, answer: figures.answer, names: figures.names },
      select: (spot) => sheet.select(spot, { reveal: true }),
    };
  }

  _ranged(range) {
    this.tabs.update();
    this.keep();
    if (range) this.say(`range of ${time(range.to - range.from, this.capture.unit)}`);
  }

  _announce() {
    const { view } = this.sheet;
    this.say(`in sight: ${time(view.from, this.capture?.unit)} to ${time(view.to, this.capture?.unit)}`);
  }

  _viewed() {
    if (!this.capture) return;
    this.rest();
    this.keep();
  }

  /** The view has come to rest. */
  _rested() {
    const { sheet } = this;
    const top = this.shell.scroll.scrollTop;
    const bottom = top + sheet.height - AXIS;
    const seen = sheet.layout.groups.filter((group) => group.y + group.height > top && group.y < bottom);
    this.sight = { from: sheet.view.from, to: sheet.view.to, ranks: seen.map((group) => group.number) };
    this.tabs.update();
  }

  _recolour() {
    this.sheet.colouring = this.shell.colour.value;
    this.sheet.redraw();
    this.legend();
    this.keep();
  }

  legend() {
    legend(this.shell.legend, this.capture, this.sheet.colouring, this.sheet.theme);
  }

  /** Clears the range, else the selection, else the search. */
  release() {
    if (!this.sheet.release()) this.finder.release();
  }

  _store() {
    if (!this.link && this.capture) address.write(bookmark.texts(this));
  }
}

/** The notices of chosen captures that are not listed. */
function missing(library, { run, step, other }, instead) {
  const then = instead ? `${instead.run}, step ${instead.step}, is shown until it is` : "what was loaded of it stays";
  const texts = library.find(run, step) ? [] : [`${run}, step ${step}: not listed at present; ${then}`];
  if (!other?.run) return texts;
  const any = other.step === null;
  const listed = any ? library.steps(other.run).length : library.find(other.run, other.step);
  const beside = any ? other.run : `${other.run}, step ${other.step}`;
  return listed ? texts : [...texts, `${beside}: not listed at present; it stands beside once it is`];
}

/** The reason why two captures have no common axis. */
function apart(entry, beside) {
  const [unit, its] = [entry, beside].map((one) => (one.unit ? `in ${one.unit}` : "in no unit of time"));
  return `can't stand beside what is shown: its times are ${its}, and those ${unit}`;
}

const requestIdleCallbackOr = (call) =>
  window.requestIdleCallback ? requestIdleCallback(call, { timeout: 1000 }) : setTimeout(call);
