/** Exports: the timeline as an image, and a trace for other viewers. */

import { download } from "./dom.js";
import * as routes from "./routes.js";

const NAME = 60; // characters of the run's name in a file name

export class Exports {
  constructor(shell, sheet, say, failed) {
    [this.sheet, this.say, this.failed] = [sheet, say, failed];
    this.button = shell["export-json"];
    this.title = this.button.textContent;
    this.making = null; // cancels the trace that is being made
    shell["export-png"].addEventListener("click", () => this._image());
    this.button.addEventListener("click", () => this._trace());
  }

  async _image() {
    if (!this.sheet.main) return;
    const image = await this.sheet.image();
    if (!image) return this.failed("the browser has no memory for an image of this size: make the window smaller");
    download(image, this._name("png"));
    this.failed(null);
    this.say("the image is saved");
  }

  /** Makes a trace, or cancels the one that is being made. */
  async _trace() {
    if (this.making) return this.making.abort();
    if (!this.sheet.main) return;
    const name = this._name("json");
    this.making = new AbortController();
    this.say("making the file; press again to cancel");
    try {
      this._told(0);
      const told = (share) => this._told(share);
      download(await routes.exported(this.sheet.main.entry, "json", this.making.signal, told), name);
      this.failed(null);
      this.say("the file is saved: open it at ui.perfetto.dev");
    } catch (error) {
      const ended = this.making.signal.aborted;
      this.failed(ended ? null : `${error.message}: try again`);
      if (ended) this.say("the export is cancelled");
    }
    this.making = null;
    this.button.textContent = this.title;
  }

  _told(share) {
    this.button.textContent = `Cancel ${Math.floor(100 * share)}%`;
  }

  _name(ending) {
    const { run, step } = this.sheet.main.entry;
    const safe = run.replace(/[^\w.-]+/gu, "-").replace(/^[.-]+/u, "");
    return `${safe.slice(0, NAME) || "run"}_step_${String(step).padStart(8, "0")}.${ending}`;
  }
}
