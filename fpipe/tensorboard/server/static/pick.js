/** Finds the item at a point of the canvas. */

import { groupAt, trackAt } from "./layout.js";
import { before } from "./levels.js";
import { AXIS } from "./measures.js";

const NEAR = 3; // pixels: distance at which the pointer still hits

/**
 * @param {object} state as the scene draws it
 * @returns {{group: object, track: object | null, spot?: object, gap?: object | null, when?: number} | null}
 */
export function pick({ main, view, viewOf, layout, scroll }, x, y) {
  if (!main || y < AXIS) return null;
  const at = y - AXIS + scroll;
  const group = groupAt(layout.groups, at);
  if (!group) return null;
  const track = trackAt(group, at);
  if (x < view.left || !track) return { group, track };
  const when = viewOf(track.other).when(x);
  if (track.kind === "memory") return { group, track, when };
  const own = track.rank.tracks[track.kind];
  const lane = Math.max(0, Math.floor(((at - track.y) / track.height) * own.lanes.length));
  const row = own.pick(when, lane, NEAR / view.scale);
  if (row >= 0) return { group, track, spot: { rank: group.number, row, other: track.other } };
  const gap = track.kind === "compute" ? gapAt(track, when) : null;
  return { group, track, gap: gap && { ...gap, rank: group.number, other: track.other } };
}

/** The gap at a moment: the server's, with its cause; if the server lists none, that between two effects. */
function gapAt(track, when) {
  const known = track.capture.gaps(track.rank.number);
  if (known) {
    const at = before(known.start, when);
    const there = at >= 0 && when <= known.end[at];
    return there ? { start: known.start[at], end: known.end[at], cause: known.cause[at] } : null;
  }
  const [lane] = track.rank.tracks.compute.lanes;
  const at = lane ? before(lane.starts, when) : -1;
  if (at < 0 || at + 1 >= lane.starts.length) return null;
  return { start: lane.ends[at], end: lane.starts[at + 1], cause: "" };
}
