/** The figures of a run's captured steps, fetched a few at a time and kept. */

import * as routes from "./routes.js";

const AT_ONCE = 8; // steps of one request
const MOST = 500; // steps; of more, the last are shown

export class Steps {
  /**
   * @param {import("./library.js").Library} library
   * @param {() => void} changed called when figures have arrived
   */
  constructor(library, changed) {
    [this.library, this.changed] = [library, changed];
    this.kept = new Map(); // run, step and when it was written -> its figures
    this.shown = null; // {run, rows, all, reason}; another object after each change
  }

  /** Fetches those of new steps, if the run was asked for before. */
  look(run) {
    if (this.run === run) void this.load(run);
  }

  /** Fetches the figures of a run's steps that are not kept. */
  async load(run) {
    if (run !== this.run) [this.run, this.reason] = [run, null];
    await null; // the panel that asks is being filled
    this._show();
    if (this.loading) return;
    this.loading = true;
    for (let missing = this._missing(); missing.length; missing = this._missing()) {
      try {
        await this._fetch(missing.slice(0, AT_ONCE));
      } catch (error) {
        if (missing[0].run !== this.run) continue; // another one was asked for meanwhile
        this.reason = error.message;
        break;
      }
      this._show();
    }
    if (!this._missing().length) this.reason = null;
    this.loading = false;
    this._show();
  }

  async _fetch(entries) {
    const answers = await routes.steps(entries[0].run, entries.map(({ step }) => step));
    entries.forEach((entry, at) => this.kept.set(key(entry), { wall: entry.wall, ...answers[at] }));
  }

  get _entries() {
    return this.library.steps(this.run).slice(-MOST);
  }

  _missing() {
    return this._entries.filter((entry) => !this.kept.has(key(entry)));
  }

  _show() {
    const rows = this._entries.flatMap((entry) => this.kept.get(key(entry)) ?? []);
    const all = this.library.steps(this.run).length;
    const { run, reason = null } = this;
    const last = this.shown;
    const same = last?.run === run && last.all === all && last.reason === reason && last.rows.length === rows.length;
    if (same && rows.every((row, at) => row === last.rows[at])) return;
    this.shown = { run, rows, all, reason, most: MOST };
    this.changed();
  }
}

const key = ({ run, step, wall, ranks }) => JSON.stringify([run, step, wall, ranks.length]);
