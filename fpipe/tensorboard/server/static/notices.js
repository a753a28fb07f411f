/** The strip of errors and notices about the shown captures. */

import { element, named } from "./dom.js";

const LASTING = new Set(["index", "choice", "flight"]); // sources that are not of the shown captures

export class Notices {
  constructor(shell) {
    this.shell = shell;
    this.failures = new Map(); // action -> error
    this.told = new Map(); // source -> texts
  }

  /** Sets the notices of one source. */
  tell(who, texts = []) {
    this.told.set(who, texts);
    this._show();
  }

  /** Sets the error of an action; null clears it. */
  failed(what, reason) {
    if (reason) this.failures.set(what, `${what}: ${reason}`);
    else this.failures.delete(what);
    this._show();
  }

  /** Clears the notices of the previous captures. */
  clear() {
    this.failures.clear();
    for (const who of this.told.keys()) if (!LASTING.has(who)) this.told.delete(who);
    this._show();
  }

  _show() {
    const { notices } = this.shell;
    const texts = [...new Set([...Array.from(this.told.values()).flat(), ...this.failures.values()])];
    notices.hidden = !texts.length;
    if (texts.join("\n") === this._shown) return;
    this._shown = texts.join("\n");
    notices.replaceChildren(...texts.map((text) => element("p", {}, named(text, 300))));
  }
}
