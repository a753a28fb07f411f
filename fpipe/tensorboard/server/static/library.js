/** The list of captures, and the cache of fetched ones. */

import { Capture, Rank } from "./model.js";
import * as routes from "./routes.js";

const KEPT = 4; // captures in memory

export class Library {
  constructor() {
    this.entries = [];
    this.notices = [];
    this.flights = []; // {experiment, name}, the newest of each experiment first
    this.kept = new Map();
  }

  async refresh() {
    const { captures, notices, flights = [] } = await routes.index();
    [this.entries, this.notices, this.flights] = [captures, notices, flights];
  }

  get runs() {
    return [...new Set(this.entries.map((entry) => entry.run))];
  }

  /** A run's entries, by step. */
  steps(run) {
    return this.entries.filter((entry) => entry.run === run).sort((a, b) => a.step - b.step);
  }

  find(run, step) {
    return this.entries.find((entry) => entry.run === run && entry.step === step) ?? null;
  }

  /** The entry of a capture in which something is ideal, null if there is no such capture. */
  imagined({ run, step, what }) {
    const entry = this.find(run, step);
    return entry && { ...entry, what, kind: "what-if" };
  }

  /** The initial run: the last measured one, else the last of all. */
  get latest() {
    const measured = this.entries.filter((entry) => entry.kind === "measured");
    const among = measured.length ? measured : this.entries;
    return among.reduce((last, entry) => (!last || entry.wall >= last.wall ? entry : last), null);
  }

  /** The entry to stand beside a capture: of a run, and of a step or, where that is null, of the nearest other one. */
  beside({ run, step }, entry) {
    const same = (one) => one.run === entry.run && one.step === entry.step;
    const among = this.steps(run).filter((one) => !same(one));
    if (step !== null) return among.find((one) => one.step === step) ?? null;
    const off = (one) => Math.abs(one.step - entry.step);
    return among.reduce((best, one) => (!best || off(one) < off(best) ? one : best), null);
  }

  /** The prediction for a capture: of the same experiment, with the nearest step. */
  predicted(entry) {
    const among = this.entries.filter((one) => one.experiment === entry.experiment && one.kind === "predicted");
    if (entry.kind === "predicted") return null;
    const off = (one) => Math.abs(one.step - entry.step);
    return among.reduce((best, one) => (!best || off(one) < off(best) ? one : best), null);
  }

  /**
   * Fetches a capture with all its ranks.
   *
   * @param {object} entry
   * @param {(capture: Capture) => void} arrived called at once, and again for each rank that arrives
   * @param {AbortSignal} signal
   */
  async load(entry, arrived, signal) {
    const key = JSON.stringify([entry.run, entry.step, entry.what, entry.ranks, entry.wall]);
    const capture = this.kept.get(key) ?? new Capture(entry);
    this._keep(key, capture);
    arrived(capture);
    const missing = entry.ranks.filter((number) => !capture.ranks.has(number));
    if (!missing.length) return capture;
    capture.tries += 1;
    capture.lost.clear();
    const fetched = missing.map(async (number) => {
      try {
        capture.ranks.set(number, new Rank(await routes.rank(entry, number, signal)));
      } catch (error) {
        if (signal.aborted) throw error;
        capture.lost.set(number, error.status === 422 ? null : error.message);
      }
      if (!signal.aborted) arrived(capture);
    });
    await Promise.all(fetched);
    capture.link();
    return capture;
  }

  _keep(key, capture) {
    this.kept.delete(key);
    this.kept.set(key, capture);
    for (const old of this.kept.keys()) if (this.kept.size > KEPT) this.kept.delete(old);
  }
}
