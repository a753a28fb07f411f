/** The critical path, as a list of links that select effects. */

import { element, items, link } from "./dom.js";
import { time } from "./format.js";
import { short } from "./names.js";

const MOST = 400; // rows of the list

export const critical = {
  id: "critical",
  title: "Critical path",
  reads: ["capture", "summary", "ranks"],
  content({ capture, summary, select }) {
    if (!summary) return [];
    const rows = items(folded(capture, summary), MOST, (run) => [
      element("i", { class: "swatch", style: `background:var(--hue-${run.kind.hue})` }),
      link(name(capture.ranks.get(run.rank), run), () => select({ rank: run.rank, row: run.row })),
      element("span", { class: "faint" }, ` ${time(run.took, capture.unit)}`),
    ]);
    return [element("ol", { class: "path" }, ...rows)];
  },
};

/**
 * The path as runs of one kind on one rank, with their times. A send and its receive cover the same interval: only the
 * receive is listed, from the time when the send was posted.
 */
function folded(capture, summary) {
  const runs = [];
  for (const [number, row] of summary.critical) {
    const rank = capture.ranks.get(number);
    if (!rank || row >= rank.recorded) continue;
    const kind = rank.kindOf(row);
    if (kind.track === "send") continue;
    const took = rank.end[row] - rank.begun(row);
    const run = runs.at(-1);
    if (run && run.rank === number && run.kind === kind) {
      run.count += 1;
      run.took += took;
      run.last = row;
    } else runs.push({ rank: number, kind, row, last: row, count: 1, took });
  }
  return runs;
}

function name(rank, { kind, row, last, count }) {
  const text = count > 1 ? `${short(rank, row)} … ${short(rank, last)} (${count})` : short(rank, row);
  if (kind.track !== "receive") return `rank ${rank.number}: ${text}`;
  return `rank ${rank.peer[row]} → rank ${rank.number}: ${kind.value} ${rank.microbatch[row]}`;
}
