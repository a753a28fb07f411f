/** Idle time of each rank by cause. The server computes the figures; this module adds units. */

import { element, shortened, table } from "./dom.js";
import { bytes, column, number, percent, signed, time } from "./format.js";
import { causeClass } from "./palette.js";

const NOTHING = 1e-9; // share of the makespan that counts as rounding error

export const bubbles = {
  id: "bubbles",
  title: "Bubbles",
  reads: ["capture", "summary"],
  content({ capture, summary }) {
    if (!summary) return [table(summary === undefined ? "adding up …" : "there is no summary")];
    const { unit } = capture;
    const causes = Object.keys(summary.causes);
    const { cell, name } = column([summary.makespan], unit);
    const total = (row) => causes.reduce((sum, cause) => sum + (row.causes?.[cause] ?? 0), 0);
    const most = Math.max(...summary.ranks.map(total), Number.MIN_VALUE);
    const memory = summary.ranks.some((row) => row.peak_memory != null || row.peak);
    const clocks = summary.ranks.some((row) => row.clock?.uncertainty > 0 || !row.clock);
    const head = [
      "rank",
      "busy",
      { text: "idle", title: "the makespan less what the rank computes: the sum of its causes" },
      { text: "bubble", title: "the share of a step in which the rank is idle; a step takes the longest span of a rank" },
      { text: "", title: "idle time by cause" },
      ...causes.map((cause) => ({ text: cause, title: summary.causes[cause] })),
      "in flight",
      ...(memory ? ["peak memory"] : []),
      ...(clocks ? [{ text: "clock", title: "how far it is ahead of rank 0's, and how far that may be off" }] : []),
    ];
    const rows = summary.ranks.map((row) => [
      `rank ${row.rank}`,
      cell(row.busy),
      row.causes ? cell(row.idle) : "–",
      percent(row.bubble),
      row.causes ? bar(row.causes, most, (value) => time(value, unit)) : "",
      ...causes.map((cause) => (row.causes ? cell(row.causes[cause]) : "–")),
      number(row.peak_in_flight),
      ...(memory ? [peak(row)] : []),
      ...(clocks ? [clock(row.clock, unit)] : []),
    ]);
    return [table(`Idle time by cause${name}; ${shortened(capture.label, 80)}`, head, rows)];
  },
};

function peak(row) {
  const held = row.peak_memory == null ? "" : bytes(row.peak_memory);
  if (!row.peak) return held || "–";
  const whole = `${bytes(row.peak[0])} (${row.peak[1]})`;
  return held ? element("span", { title: `${whole} at most up to then` }, held) : whole;
}

function clock(difference, unit) {
  if (!difference) return "not compared";
  const { offset, uncertainty } = difference;
  return uncertainty > 0 ? `${signed(offset, unit)} ± ${time(uncertainty, unit, 2)}` : "the same";
}

function bar(causes, most, text) {
  const parts = Object.entries(causes).map(([cause, idle]) => {
    const style = `width:${((100 * idle) / most).toFixed(2)}%;background:var(--cause-${causeClass(cause)})`;
    return idle > most * NOTHING ? element("i", { title: `${cause} ${text(idle)}`, style }) : null;
  });
  return element("span", { class: "bar", role: "presentation" }, ...parts);
}
