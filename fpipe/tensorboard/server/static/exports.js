/** Exports: the timeline as an image, and traces for other viewers. */

import { download } from "./dom.js";
import * as routes from "./routes.js";

const FORMATS = ["pftrace", "json"];
const NAME = 60; // characters of the run's name in a file name

export class Exports {
  constructor(shell, sheet, say, failed) {
    [this.sheet, this.say, this.failed] = [sheet, say, failed];
    shell["export-png"].addEventListener("click", () => this._image());
    for (const format of FORMATS) shell[`export-${format}`].addEventListener("click", () => this._trace(format));
  }

  async _image() {
    if (!this.sheet.main) return;
    const image = await this.sheet.image();
    if (!image) return this.failed("the browser has no memory for an image of this size: make the window smaller");
    download(image, this._name("png"));
    this.failed(null);
    this.say("the image is saved");
  }

  async _trace(format) {
    if (!this.sheet.main) return;
    this.say(`making the ${format} file`);
    try {
      download(await routes.exported(this.sheet.main.entry, format), this._name(format));
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
