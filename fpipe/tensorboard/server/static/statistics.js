/** How long the effects of each kind took, of those that are selected by a range, by the search, or by both. */

const HIGH = 0.95;

/**
 * @param {import("./model.js").Capture} capture
 * @param {{from: number, to: number} | null} range effects that are at least partly in it
 * @param {import("./search.js").Matches | null} matches of the search
 * @returns {{name: string, count: number, mean: number, high: number, total: number}[]} the longest in total first
 */
export function statistics(capture, range, matches) {
  const durations = new Map(); // name of a kind -> of its effects
  for (const rank of capture.ranks.values()) {
    for (const row of rows(rank, range)) {
      if (matches && !matches.has(rank, row)) continue;
      const { name, value } = rank.kindOf(row);
      const text = value ? `${name} ${value}` : name;
      if (!durations.has(text)) durations.set(text, []);
      durations.get(text).push(rank.end[row] - rank.start[row]);
    }
  }
  return Array.from(durations, ([name, all]) => summed(name, all)).sort((a, b) => b.total - a.total);
}

function* rows(rank, range) {
  for (const track of Object.values(rank.tracks)) {
    if (range) for (const lane of track.lanes) yield* lane.within(range);
    else yield* track.rows;
  }
}

function summed(name, durations) {
  const sorted = Float64Array.from(durations).sort();
  const count = sorted.length;
  const total = sorted.reduce((sum, took) => sum + took, 0);
  return { name, count, mean: total / count, high: sorted[Math.ceil(HIGH * count) - 1], total };
}
