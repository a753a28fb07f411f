/** What would help: each thing that, if it were ideal, would shorten the step, the largest first. */

import { element, link, named, table } from "./dom.js";
import { column, percent, time } from "./format.js";

const NOTHING = 5e-4; // share of the makespan by which a replay may be off unsaid

export const whatIf = {
  id: "what-if",
  title: "What would help",
  reads: ["capture", "whatIf", "other"],
  content({ capture, whatIf: result, other, ask, imagine }) {
    if (result === null) return [table("it can’t be worked out")];
    if (!result) {
      const press = element("button", { type: "button", on: { click: ask } }, "Work it out");
      return capture.large ? [element("p", {}, "This is a large step. ", press)] : [table("replaying …")];
    }
    const { what_if: rows, makespan, error, headline, notices } = result;
    const notes = notices.map((text) => element("p", { class: "faint" }, named(text, 300)));
    if (error === null) return notes;
    const times = column([makespan], capture.unit);
    const lines = rows.map(({ what, seconds, makespan: then, assumes }) => {
      const shown = other?.entry.what === what;
      const name = link(what, () => imagine(what));
      name.setAttribute("aria-pressed", String(shown));
      return [name, times.cell(seconds), percent(seconds / makespan), times.cell(then), left(assumes)];
    });
    const head = ["if ideal", "wins", "share", "makespan then", "how"];
    const apart = `${percent(Math.abs(error))} ${error > 0 ? "more" : "less"} than its`;
    const as = Math.abs(error) < NOTHING ? "the same" : apart;
    const trust = `Replayed with its own times, the step takes ${as} ${time(makespan, capture.unit)}.`;
    const caption = `Each alone${times.name}; a click shows that step beside this one`;
    return [
      element("p", {}, element("b", {}, headline || "Nothing stands out"), element("span", { class: "faint" }, ` ${trust}`)),
      lines.length ? table(caption, head, lines) : table("nothing wins a thousandth"),
      ...notes,
    ];
  },
};

const left = (text) => element("span", { class: "left faint" }, text);
