/** Exports: the timeline as an image, files for other programs, and the trace in Perfetto's page. */

import { download } from "./dom.js";
import { handed, opened } from "./perfetto.js";
import * as routes from "./routes.js";

const NAME = 60; // characters of the run's name in a file name

export class Exports {
  constructor(shell, sheet, say, failed) {
    [this.sheet, this.say, this.failed] = [sheet, say, failed];
    this.making = null; // the file that is being made: its button, and what cancels it
    shell["export-png"].addEventListener("click", () => this._image());
    for (const form of ["json", "svg", "csv"]) {
      const button = shell[`export-${form}`];
      button.addEventListener("click", () => this._made(button, form, (content, name) => this._saved(content, name)));
    }
    shell["export-open"].addEventListener("click", ({ currentTarget }) => this._open(currentTarget));
  }

  async _image() {
    if (!this.sheet.main) return;
    const image = await this.sheet.image();
    if (!image) return this.failed("the browser has no memory for an image of this size: make the window smaller");
    download(image, this._name("png"));
    this.failed(null);
    this.say("the image is saved");
  }

  _saved(content, name) {
    download(content, name);
    return name.endsWith("json") ? "the file is saved: open it at ui.perfetto.dev" : "the file is saved";
  }

  /** Hands the trace to Perfetto's page, whose window opens at once: a browser lets a click open one, and nothing later. */
  _open(button) {
    if (!this.sheet.main) return;
    const { label } = this.sheet.main;
    const page = this.making ? null : opened();
    return this._made(button, "json", async (content, name) => {
      await handed(page, await content.arrayBuffer(), label, name);
      return "the trace is open in Perfetto’s page";
    });
  }

  /**
   * Makes a file, or cancels it if it is being made.
   *
   * @param {HTMLButtonElement} button that shows how much of it is there
   * @param {(content: Blob, name: string) => string | Promise<string>} use
   */
  async _made(button, form, use) {
    if (this.making) return this.making.button === button && this.making.control.abort();
    if (!this.sheet.main) return;
    const [name, title, control] = [this._name(form), button.textContent, new AbortController()];
    this.making = { button, control };
    this.say("making the file; press again to cancel");
    const told = (share) => (button.textContent = `Cancel ${Math.floor(100 * share)}%`);
    try {
      told(0);
      this.say(await use(await routes.exported(this.sheet.main.entry, form, control.signal, told), name));
      this.failed(null);
    } catch (error) {
      this.failed(control.signal.aborted ? null : error.message);
      if (control.signal.aborted) this.say("the export is cancelled");
    }
    this.making = null;
    button.textContent = title;
  }

  _name(ending) {
    const { run, step } = this.sheet.main.entry;
    const safe = run.replace(/[^\w.-]+/gu, "-").replace(/^[.-]+/u, "");
    return `${safe.slice(0, NAME) || "run"}_step_${String(step).padStart(8, "0")}.${ending}`;
  }
}
