/** Exports: the timeline as an image, and a trace for other viewers. */

import { download } from "./dom.js";
import * as routes from "./routes.js";

const NAME = 60; // characters of the run's name in a file name

export class Exports {
  constructor(shell, sheet, say, failed) {
    [this.sheet, this.say, this.failed] = [sheet, say, failed];
    shell["export-png"].addEventListener("click", () => this._image());
    shell["export-json"].addEventListener("click", () => this._trace());
  }

  async _image() {
    if (!this.sheet.main) return;
    const image = await this.sheet.image();
    if (!image) return this.failed("the browser has no memory for an image of this size: make the window smaller");
    download(image, this._name("png"));
    this.failed(null);
    this.say("the image is saved");
  }

  async _trace() {
    if (!this.sheet.main) return;
    this.say("making the file");
    try {
      download(await routes.exported(this.sheet.main.entry, "json"), this._name("json"));
      this.failed(null);
      this.say("the file is saved: open it at ui.perfetto.dev");
    } catch (error) {
      this.failed(error.message);
    }
  }

  _name(ending) {
    const { run, step } = this.sheet.main.entry;
    const safe = run.replace(/[^\w.-]+/gu, "-").replace(/^[.-]+/u, "");
    return `${safe.slice(0, NAME) || "run"}_step_${String(step).padStart(8, "0")}.${ending}`;
  }
}
