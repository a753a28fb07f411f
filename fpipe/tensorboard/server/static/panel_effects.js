/** The visible effects as a table, for screen readers. */

import { link, table } from "./dom.js";
import { time } from "./format.js";
import { short } from "./names.js";

const MOST = 500; // rows of the table

export const effects = {
  id: "effects",
  title: "Effects in view",
  reads: ["capture", "sight"],
  content({ capture, sight, select }) {
    if (!sight) return [];
    const { unit } = capture;
    const places = sight.ranks.flatMap((number) => visible(capture.ranks.get(number), sight));
    places.sort(([a, i], [b, j]) => a.start[i] - b.start[j] || a.number - b.number);
    const rows = places.slice(0, MOST).map(([rank, row]) => {
      const kind = rank.kindOf(row);
      return [
        link(short(rank, row), () => select({ rank: rank.number, row })),
        rank.number,
        kind.name,
        kind.columns.stage ? rank.stage[row] : "",
        kind.columns.microbatch ? rank.microbatch[row] : "",
        time(rank.start[row], unit, 6),
        time(rank.end[row] - rank.start[row], unit),
      ];
    });
    const cut = places.length > MOST ? `, the first ${MOST}` : "";
    const head = ["effect", "rank", "kind", "stage", "microbatch", "start", "duration"];
    return [table(`Effects from ${time(sight.from, unit)} to ${time(sight.to, unit)}${cut}`, head, rows)];
  },
};

/** The effects of a rank in view, [rank, row]: of each lane at most one more than the table has rows. */
function visible(rank, sight) {
  const places = [];
  for (const lane of rank ? Object.values(rank.tracks).flatMap((track) => track.lanes) : []) {
    const until = places.length + MOST;
    for (const row of lane.within(sight)) if (places.push([rank, row]) > until) break;
  }
  return places;
}
