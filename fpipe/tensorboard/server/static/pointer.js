/** The item under the pointer. The position is stored in pixels, because the timeline may move. */

import { pick } from "./pick.js";
import { about, told } from "./tooltip.js";

export class Pointer {
  /** @param {import("./sheet.js").Sheet} sheet */
  constructor(sheet) {
    this.sheet = sheet;
    this.leave();
  }

  /** Clears the position, for example when the pointer leaves. */
  leave() {
    this.place = this.spot = this.gap = null;
    this.sheet.shell.hover.hidden = true;
  }

  /** The moment under the pointer, null outside the timeline. */
  get when() {
    const { view } = this.sheet;
    return this.place && this.place[0] >= view.left ? view.when(this.place[0]) : null;
  }

  find(x, y) {
    return pick(this.sheet.state, x, y);
  }

  /** Moves the pointer, or finds the item at the same position again. */
  move(x, y) {
    this.place = [x, y];
    const found = this.find(x, y);
    this.spot = found?.spot ?? null;
    this.gap = found?.gap ?? null;
    this._tooltip(found, x, y);
    const beside = found && x < this.sheet.view.left;
    const memory = found?.track?.kind === "memory";
    this.sheet.shell.canvas.style.cursor = found?.spot || found?.gap || memory || beside ? "pointer" : "";
  }

  again() {
    if (this.place) this.move(...this.place);
  }

  _tooltip(found, x, y) {
    const { sheet } = this;
    const { hover, timeline, scroll } = sheet.shell;
    const rank = found && x < sheet.view.left ? sheet.main.ranks.get(found.group.number) : null;
    const content = rank ? about(rank) : found && told(sheet, (spot) => sheet.twin(spot), found);
    hover.hidden = !content;
    if (!content) return;
    hover.replaceChildren(...content);
    const { width, height } = hover.getBoundingClientRect();
    const left = x + 16 + width > timeline.clientWidth ? Math.max(4, x - 16 - width) : x + 16;
    const top = Math.min(y + 16 + scroll.offsetTop, timeline.clientHeight - height - 4);
    hover.style.transform = `translate(${Math.round(left)}px, ${Math.round(Math.max(4, top))}px)`;
  }

  /** Folds the rank whose name was clicked, or selects the effect. */
  click(x, y) {
    const found = this.find(x, y);
    if (found && x < this.sheet.view.left) return this.sheet.fold(found.group.number);
    if (found?.track?.kind === "memory") this.sheet.selectMemory(found);
    else if (found?.gap) this.sheet.selectGap(found.gap);
    else this.sheet.select(found?.spot ?? null);
  }
}
