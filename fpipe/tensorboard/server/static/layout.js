/** The position of each rank's tracks, from the top of the scrolled area; pixels. */

const HEIGHTS = { compute: 26, lane: 10, host: 9, memory: 28 };
const SMALL = ["send", "receive", "gather", "scatter", "offload", "fetch", "host", "memory"]; // tracks below the compute
const LEAST = 14; // pixels: smallest height of a compute track
const GROWTH = 1.6; // largest factor by which tracks grow to fill the height
const BETWEEN = 2;
const AROUND = 5;

/**
 * @typedef {{capture: object, other: boolean, rank: object, kind: string, y: number, height: number}} Placed
 * @typedef {{number: number, y: number, height: number, collapsed: boolean, tracks: Placed[]}} Group
 */

/**
 * @param {object} main capture
 * @param {object | null} other capture; its compute is drawn below each rank's
 * @param {{tracks: Set<string>, collapsed: Set<number>, available: number}} options
 * @returns {{groups: Group[], height: number}}
 */
export function layout(main, other, { tracks, collapsed, available }) {
  const expected = Array.from({ length: main.entry.expected ?? 0 }, (_, number) => number);
  const numbers = [...new Set([...expected, ...main.entry.ranks])].sort((a, b) => a - b);
  const wanted = (rank, kind) => tracks.has(kind) && !collapsed.has(rank.number) && filled(rank, kind);
  const small = (number) => {
    const rank = main.ranks.get(number);
    return rank ? SMALL.filter((kind) => wanted(rank, kind)) : [];
  };
  const computes = other ? 2 : 1;
  const margins = numbers
    .map((number) => 2 * AROUND + (small(number).length + computes) * BETWEEN)
    .reduce((a, b) => a + b, 0);
  const smalls = numbers
    .map((number) => small(number).reduce((sum, kind) => sum + height(main.ranks.get(number), kind), 0))
    .reduce((a, b) => a + b, 0);
  const wide = computes * (numbers.length || 1) * HEIGHTS.compute;
  const growth = Math.max(1, Math.min(GROWTH, (available - margins) / (smalls + wide)));
  const room = ((available - margins - smalls * growth) / wide) * HEIGHTS.compute;
  const compute = Math.round(Math.max(LEAST, Math.min(HEIGHTS.compute * growth, room)));
  const groups = [];
  let y = 0;
  for (const number of numbers) {
    const group = { number, y, height: 0, collapsed: collapsed.has(number), tracks: [] };
    y += AROUND;
    const put = (capture, kind, tall) => {
      const rank = capture.ranks.get(number);
      if (rank) group.tracks.push({ capture, other: capture !== main, rank, kind, y, height: tall });
      y += tall + BETWEEN;
    };
    const rank = main.ranks.get(number);
    for (const kind of ["compute", ...SMALL]) {
      if (kind === "compute") {
        put(main, kind, compute);
        if (other) put(other, kind, compute);
      } else if (rank && wanted(rank, kind)) put(main, kind, Math.floor(height(rank, kind) * growth));
    }
    y += AROUND - BETWEEN;
    group.height = y - group.y;
    groups.push(group);
  }
  return { groups, height: y };
}

/** Whether a rank has spans on a track. */
const filled = (rank, kind) => (kind === "memory" ? rank.memory.at.length > 0 : rank.tracks[kind].rows.length > 0);

const height = (rank, kind) => HEIGHTS[kind] ?? HEIGHTS.lane * rank.tracks[kind].lanes.length;

/** The rank group at a height, or null. */
export const groupAt = (groups, y) => groups.find((group) => y >= group.y && y < group.y + group.height) ?? null;

/** The track at a height, or null. */
export const trackAt = (group, y) =>
  group?.tracks.find((track) => y >= track.y - BETWEEN / 2 && y < track.y + track.height + BETWEEN / 2) ?? null;

/** The top and height of a span's box: those of its lane, or of the rank's compute if its track is hidden. */
export function boxOf(groups, capture, { rank, row }) {
  const group = groups.find((one) => one.number === rank);
  const own = capture.ranks.get(rank);
  if (!group || !own) return null;
  const kind = own.kindOf(row).track;
  const of = (wanted) => group.tracks.find((track) => track.capture === capture && track.kind === wanted);
  const track = of(kind) ?? of("compute");
  if (!track) return null;
  const lanes = own.tracks[track.kind].lanes.length || 1;
  const tall = track.height / lanes;
  const lane = track.kind === kind ? own.tracks[kind].laneOf(row) : 0;
  return { y: track.y + lane * tall, height: tall, hidden: track.kind !== kind };
}
