/** Each rank's busy and idle time within a measured range; and how long the selected effects took, by kind. */

import { table } from "./dom.js";
import { column, percent, time } from "./format.js";
import { statistics } from "./statistics.js";

const NOTHING = 1e-9; // share of the range that counts as rounding error

export const range = {
  id: "range",
  title: "Selection",
  reads: ["capture", "ranks", "range", "matches"],
  opens: "range",
  content(state) {
    if (!state.range && !state.matches) return [table("Shift+drag on the timeline measures a range; / searches")];
    return [kinds(state), ...(state.range ? [busy(state)] : [])];
  },
};

function kinds({ capture, range: bounds, matches }) {
  const found = statistics(capture, bounds, matches);
  const { cell, name } = column(found.flatMap(({ mean, high }) => [mean, high]), capture.unit);
  const sums = column(found.map(({ total }) => total), capture.unit);
  const rows = found.map((kind) => [
    kind.name,
    String(kind.count),
    cell(kind.mean),
    cell(kind.high),
    sums.cell(kind.total),
  ]);
  const which = [matches ? "that the search finds" : "", bounds ? "that are at least partly in the range" : ""];
  const head = ["kind", "count", "mean", { text: "p95", title: "95 of 100 took no longer" }, `sum${sums.name}`];
  return table(`Effects ${which.filter(Boolean).join(", ")}${name}`, head, rows);
}

function busy({ capture, range: { from, to } }) {
  const span = to - from;
  const { cell, name } = column([span], capture.unit);
  const ranks = [...capture.ranks.values()].sort((a, b) => a.number - b.number);
  const rows = ranks.map((rank) => {
    const levels = rank.tracks.compute.levels("kind");
    const sum = levels.reduce((total, lane) => total + lane.busy(from, to), 0);
    const computed = Math.min(span, sum);
    const idle = span - computed > span * NOTHING ? span - computed : 0;
    const shares = [computed, idle].flatMap((part) => [cell(part), percent(part / span)]);
    return [`rank ${rank.number}`, ...shares];
  });
  const ends = [from, to].map((when) => time(when, capture.unit, 6));
  const caption = `${ends.join(" to ")}: ${time(span, capture.unit)}`;
  return table(caption, ["", `busy${name}`, "share", `idle${name}`, "share"], rows);
}
