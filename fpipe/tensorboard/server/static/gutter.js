/** The labels around the timeline: names of ranks and tracks at the left, times at the top. */

import { tick, ticks } from "./format.js";
import { AXIS, FONT, TICK } from "./measures.js";
import { names } from "./pair.js";

const NAMES = {
  ...{ send: "sends", receive: "receives", gather: "gathers", scatter: "scatters" },
  ...{ offload: "offloads", fetch: "fetches", host: "host", memory: "memory" },
};
const TALL = 60; // pixels: height from which a rank shows more lines

/** The names of the ranks in sight and of their tracks. */
export function gutter(context, state, groups, shift) {
  const { view, theme, height, main } = state;
  context.fillStyle = theme.page;
  context.fillRect(0, AXIS, view.left - 1, height - AXIS);
  context.fillStyle = theme.line;
  context.fillRect(view.left - 1, 0, 1, height);
  context.textBaseline = "middle";
  const beside = names(main.entry, state.other?.entry);
  for (const group of groups) {
    const compute = group.tracks.find((track) => track.kind === "compute") ?? group;
    named(context, theme, group, main, compute.y + shift + compute.height / 2);
    context.fillStyle = theme.line;
    context.fillRect(0, group.y + group.height + shift - 1, view.left, 1);
    context.fillStyle = theme.faint;
    context.textAlign = "right";
    for (const track of group.tracks) {
      context.fillText(trackName(track, state, beside), view.left - 6, track.y + shift + track.height / 2);
    }
  }
}

function named(context, theme, group, main, middle) {
  const rank = main.ranks.get(group.number);
  context.textAlign = "left";
  context.fillStyle = theme.text;
  context.font = `500 12px ${FONT}`;
  const name = `${group.collapsed ? "▸" : "▾"} rank ${group.number}`;
  const after = 12 + context.measureText(name).width;
  context.fillText(name, 6, middle);
  context.font = `10px ${FONT}`;
  context.fillStyle = theme.faint;
  if (!main.entry.ranks.includes(group.number)) context.fillText("missing", after, middle);
  else if (!rank) context.fillText(main.lost.has(group.number) ? "not readable" : "loading…", after, middle);
  else if (!rank.header.clock && group.height > TALL) {
    context.fillText("clock not", 8, middle + 14);
    context.fillText("compared", 8, middle + 25);
  } else if (!rank.header.clock) context.fillText("⚠", after, middle);
}

function trackName({ kind, rank, other }, { memoryText }, beside) {
  if (kind === "memory") return memoryText(rank);
  return kind === "compute" ? (beside[other ? 1 : 0] ?? "") : NAMES[kind];
}

/** Times along the top. */
export function axis(context, { view, theme, width, main }) {
  context.fillStyle = theme.page;
  context.fillRect(0, 0, width, AXIS);
  context.fillStyle = theme.line;
  context.fillRect(0, AXIS - 1, width, 1);
  context.font = `11px ${FONT}`;
  context.textBaseline = "middle";
  context.textAlign = "left";
  const largest = Math.max(Math.abs(view.from), Math.abs(view.to));
  for (const { at, step } of ticks(view.from, view.to, TICK / view.scale)) {
    const x = Math.round(view.x(at));
    context.fillStyle = theme.line;
    context.fillRect(x, AXIS - 8, 1, 8);
    const text = tick(at, step, largest, main.unit);
    if (x + 4 + context.measureText(text).width > width) continue;
    context.fillStyle = theme.faint;
    context.fillText(text, x + 4, AXIS / 2);
  }
  context.fillStyle = theme.page;
  context.fillRect(0, 0, view.left - 1, AXIS - 1);
  context.fillStyle = theme.faint;
  context.fillText(main.unit === "s" ? "time" : "time, no unit", 8, AXIS / 2);
}
