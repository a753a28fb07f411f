/** The search field, and moving between matches. */

import { settled } from "./dom.js";
import { names } from "./pair.js";
import { Matches, parseQuery } from "./search.js";

const PAUSE = 150; // milliseconds after the last key until the search starts

export class Finder {
  constructor(shell, sheet, say, searched) {
    [this.shell, this.sheet, this.say, this.tell] = [shell, sheet, say, searched];
    this.searched = "";
    const search = settled(() => this.search(), PAUSE);
    shell.search.addEventListener("input", search);
  }

  /** Searches the shown captures for the field's query. */
  search() {
    const { shell, sheet } = this;
    const { search, "search-count": count } = shell;
    this.searched = search.value;
    search.removeAttribute("aria-invalid");
    if (!sheet.main) return;
    let query = null;
    try {
      query = parseQuery(search.value, [...sheet.main.kinds, ...(sheet.other?.kinds ?? [])], sheet.main.unit);
      count.title = "";
    } catch (error) {
      search.setAttribute("aria-invalid", "true");
      count.title = error.message;
      this.say(error.message);
    }
    const captures = [sheet.main, sheet.other].filter(Boolean);
    sheet.matches = query && new Matches(captures, query, (capture) => sheet.by({ other: capture === sheet.other }));
    this._count();
    sheet.redraw();
    this.tell();
  }

  _count() {
    const { "search-count": count } = this.shell;
    const { matches, selected, main, other } = this.sheet;
    const own = matches && selected && matches.has(this.sheet.of(selected).ranks.get(selected.rank), selected.row);
    const place = own ? `${matches.place(selected)} of ` : "";
    count.textContent = matches ? `${place}${matches.count}` : count.title; // the query's error
    if (!matches) return;
    const beside = names(main.entry, other?.entry).map((name, at) => `${matches.counts[at]} in ${name}`);
    count.title = beside.join("; ");
    this.say(matches.count ? [`${place}${matches.count} found`, ...beside].join("; ") : "nothing found");
  }

  /** Selects the next match, or the one before. */
  match(by) {
    const { shell, sheet } = this;
    if (this.searched !== shell.search.value) this.search();
    const spot = sheet.matches?.next(sheet.selected, by);
    if (!spot) return;
    sheet.select(spot, { reveal: true });
    const told = shell.live.textContent;
    this._count();
    this.say(`${shell["search-count"].textContent}: ${told}`);
  }

  /** Empties the field. */
  release() {
    if (!this.shell.search.value) return;
    this.shell.search.value = "";
    this.search();
  }
}
