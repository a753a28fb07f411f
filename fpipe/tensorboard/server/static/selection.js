/** Moves the selection by keys: along a track, to other ranks, to the cause of a wait. */

import { before } from "./levels.js";

/** Selects the effect `by` places later on its track. */
export function neighbour(sheet, by) {
  const spot = sheet.selected;
  if (!spot) return first(sheet);
  const rank = sheet.of(spot).ranks.get(spot.rank);
  const row = rank.tracks[rank.kindOf(spot.row).track].next(spot.row, by);
  if (row < 0) return sheet.tell.say(by > 0 ? "the last of its track" : "the first of its track");
  sheet.select({ ...spot, row }, { reveal: true });
}

/** Selects the effect at that time on the rank `by` ranks below. */
export function across(sheet, by) {
  const spot = sheet.selected;
  if (!spot) return first(sheet);
  const { ranks } = sheet.of(spot);
  const rank = ranks.get(spot.rank);
  const numbers = [...ranks.keys()].sort((a, b) => a - b);
  const next = ranks.get(numbers[numbers.indexOf(spot.rank) + by]);
  if (!next) return sheet.tell.say(by > 0 ? "the last rank" : "the first rank");
  const middle = (rank.start[spot.row] + rank.end[spot.row]) / 2;
  const row = next.tracks[rank.kindOf(spot.row).track].pick(middle, 0, Infinity);
  if (row >= 0) sheet.select({ rank: next.number, row, other: spot.other }, { reveal: true });
}

/** Zooms to the selection. */
export function enter(sheet) {
  if (sheet.selected) sheet.zoomTo(sheet.selected);
  else first(sheet);
}

/** Selects the effect that it waited for. */
export function back(sheet) {
  const { chain, selected } = sheet;
  if (chain.length > 1) sheet.select({ ...chain[1], other: selected.other }, { reveal: true });
  else sheet.tell.say(selected ? "it waited for nothing" : "nothing is selected");
}

/** Selects the idle time `by` places later on the selection's rank. */
export function idle(sheet, by) {
  const last = sheet.idle ?? sheet.selected ?? { rank: Math.min(...sheet.main.ranks.keys()), other: false };
  const gaps = sheet.of(last).gaps(last.rank);
  if (!gaps) return sheet.tell.say("idle times are not listed");
  const { rank, other, row } = last;
  const start = last.start ?? (row === undefined ? -Infinity : sheet.of(last).ranks.get(rank).start[row]);
  const from = before(gaps.start, start);
  const at = by > 0 ? from + 1 : from - (gaps.start[from] === start ? 1 : 0);
  if (at < 0 || at >= gaps.start.length) return sheet.tell.say(`the ${by > 0 ? "last" : "first"} of its rank`);
  const gap = { rank, other: Boolean(other), start: gaps.start[at], end: gaps.end[at], cause: gaps.cause[at] };
  sheet.selectGap(gap, { reveal: true });
}

/** Selects the first visible compute effect, from the top. */
function first(sheet) {
  const { main, view, layout, shell } = sheet;
  for (const group of layout.groups.filter((one) => one.y + one.height > shell.scroll.scrollTop)) {
    const [lane] = main.ranks.get(group.number)?.tracks.compute.lanes ?? [];
    if (!lane?.rows.length) continue;
    const at = Math.max(0, before(lane.starts, view.from));
    const place = lane.ends[at] < view.from && at + 1 < lane.rows.length ? at + 1 : at;
    return sheet.select({ rank: group.number, row: lane.rows[place] }, { reveal: true });
  }
}
