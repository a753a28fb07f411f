/** What would help: each thing that, if it were ideal, would shorten the step, the largest first. */

import { element, link, table } from "./dom.js";
import { column, percent, time } from "./format.js";

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
    const { what_if: rows, makespan, error, headline } = result;
    const times = column([makespan], capture.unit);
    const lines = rows.map(({ what, seconds, makespan: then, assumes }) => {
      const shown = other?.entry.what === what;
      const name = link(what, () => imagine(what));
      name.setAttribute("aria-pressed", String(shown));
      return [name, times.cell(seconds), percent(seconds / makespan), times.cell(then), left(assumes)];
    });
    const head = ["if ideal", "wins", "share", "makespan then", "how"];
    const apart = `${percent(Math.abs(error))} ${error > 0 ? "more" : "less"}`;
    const trust = `Replayed with its own times, the step takes ${apart} than its ${time(makespan, capture.unit)}.`;
    const caption = `Each alone${times.name}; a click shows that step beside this one`;
    return [
      element("p", {}, element("b", {}, headline || "Nothing stands out"), element("span", { class: "faint" }, ` ${trust}`)),
      lines.length ? table(caption, head, lines) : table("nothing wins a thousandth"),
    ];
  },
};

const left = (text) => element("span", { class: "left faint" }, text);
