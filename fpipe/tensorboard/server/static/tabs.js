/** The tabs below the timeline, one for each panel. Only the open panel is filled. */

import { element } from "./dom.js";
import { PANELS } from "./panels.js";

export class Tabs {
  /**
   * @param {() => import("./panels.js").State} state
   * @param {() => void} opened called when another panel is opened
   */
  constructor(shell, state, opened) {
    [this.shell, this.state, this.tell] = [shell, state, opened];
    this.filled = new Map(); // panel -> the state that it shows
    this.awaited = null; // a panel that was chosen, until there is a tab of it
    this.panes = new Map(PANELS.map((panel) => [panel, this._pane(panel)]));
    shell.tabs.append(...Array.from(this.panes.values(), ({ tab }) => tab));
    shell.tables.append(...Array.from(this.panes.values(), ({ place }) => place));
    shell.tabs.addEventListener("keydown", (event) => this._key(event));
    this.open(PANELS[0]);
  }

  _pane(panel) {
    const [tab, place] = [`tab-${panel.id}`, `panel-${panel.id}`];
    const on = { click: () => this._press(panel) };
    return {
      tab: element("button", { id: tab, type: "button", role: "tab", "aria-controls": place, on }, panel.title),
      place: element("div", { id: place, role: "tabpanel", "aria-labelledby": tab, tabindex: 0 }),
    };
  }

  _key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    const shown = PANELS.filter((panel) => !this.panes.get(panel).tab.hidden);
    const next = shown[(shown.indexOf(this.opened) + by + shown.length) % shown.length];
    this._press(next);
    this.panes.get(next).tab.focus();
  }

  _press(panel) {
    this.awaited = null;
    this.open(panel);
  }

  /** The name of the open panel, or of the one that is to be opened; null if it is the first. */
  get chosen() {
    const { id } = this.awaited ?? this.opened;
    return id === PANELS[0].id ? null : id;
  }

  /** Opens the panel of a name, if there is one, once it has a tab; else the first. */
  choose(name) {
    this.awaited = PANELS.find(({ id }) => id === name) ?? null;
    this.open(this.awaited ?? PANELS[0]);
  }

  open(panel) {
    this.opened = panel;
    for (const [one, { tab, place }] of this.panes) {
      tab.setAttribute("aria-selected", String(one === panel));
      tab.tabIndex = one === panel ? 0 : -1;
      place.hidden = one !== panel;
    }
    this.update();
    this.tell();
  }

  /** Fills the open panel, if a part of the state that it shows has changed. */
  update() {
    const [last, state] = [this.last, this.state()];
    if (!state.capture) return;
    this.last = state;
    for (const [panel, { tab }] of this.panes) tab.hidden = Boolean(panel.absent?.(state));
    const called = PANELS.find(({ opens }) => opens && state[opens] && state[opens] !== last?.[opens]);
    if (called && called !== this.opened) return this.open(called);
    const { awaited } = this;
    if (awaited && !this.panes.get(awaited).tab.hidden) {
      this.awaited = null;
      if (awaited !== this.opened) return this.open(awaited);
    }
    const { tab, place } = this.panes.get(this.opened);
    if (tab.hidden) return this.open(PANELS[0]);
    const shown = this.filled.get(this.opened);
    if (shown && this.opened.reads.every((part) => shown[part] === state[part])) return;
    this.filled.set(this.opened, state);
    place.replaceChildren(...this.opened.content(state));
  }
}
