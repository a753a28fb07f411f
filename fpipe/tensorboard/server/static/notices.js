/** The strip of what is wrong, or to be known, with what is shown. */

import { element, named } from "./dom.js";

export class Notices {
  constructor(shell) {
    this.shell = shell;
    this.failures = new Map(); // what was tried -> why it failed
    this.told = new Map(); // who says it -> texts
  }

  /** What one of the server's answers says. */
  tell(who, texts = []) {
    this.told.set(who, texts);
    this._show();
  }

  /** Says that something failed, and why; null that it did not. */
  failed(what, reason) {
    if (reason) this.failures.set(what, `${what}: ${reason}`);
    else this.failures.delete(what);
    this._show();
  }

  /** Forgets what was said of the captures before. */
  clear() {
    this.failures.clear();
    for (const who of this.told.keys()) if (who !== "index") this.told.delete(who);
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
