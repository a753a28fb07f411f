/** The labels around the timeline: names of ranks and tracks at the left, times at the top. */

import { tick, ticks } from "./format.js";
import { AXIS, FONT, TICK } from "./measures.js";

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
  for (const group of groups) {
    const compute = group.tracks.find((track) => track.kind === "compute") ?? group;
    named(context, theme, group, main, compute.y + shift + compute.height / 2);
    context.fillStyle = theme.line;
    context.fillRect(0, group.y + group.height + shift - 1, view.left, 1);
    context.fillStyle = theme.faint;
    context.textAlign = "right";
    for (const track of group.tracks) {
      context.fillText(trackName(track, state), view.left - 6, track.y + shift + track.height / 2);
    }
  }
}

function named(context, theme, group, main, middle) {
  const rank = main.ranks.get(group.number);
  context.textAlign = "left";
  context.fillStyle = theme.text;
  context.font = `500 12px ${FONT}`;
  context.fillText(`${group.collapsed ? "▸" : "▾"} rank ${group.number}`, 6, middle);
  context.font = `10px ${FONT}`;
  context.fillStyle = theme.faint;
  if (!main.entry.ranks.includes(group.number)) context.fillText("missing", 66, middle);
  else if (!rank) context.fillText(main.lost.has(group.number) ? "not readable" : "loading…", 66, middle);
  else if (!rank.header.clock && group.height > TALL) {
    context.fillText("clock not", 8, middle + 14);
    context.fillText("compared", 8, middle + 25);
  } else if (!rank.header.clock) context.fillText("⚠", 66, middle);
}

function trackName({ kind, rank, capture }, { main, other, memoryText }) {
  if (kind === "memory") return memoryText(rank);
  if (kind !== "compute") return NAMES[kind];
  if (!other) return "";
  const beside = other.ranks.get(rank.number);
  const alike = main.entry.kind === other.entry.kind && beside;
  const apart = alike && main.ranks.get(rank.number)?.header.replica !== beside.header.replica;
  return apart ? `replica ${rank.header.replica}` : capture.entry.kind;
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
