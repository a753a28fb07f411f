/** The ranks of each replica side by side: how long they computed, and how long the step took. */

import { element, shortened, table } from "./dom.js";
import { change, column } from "./format.js";

const NOTABLE = 0.05; // share above the median of a rank's replicas

export const replicas = {
  id: "replicas",
  title: "Replicas",
  reads: ["capture", "summary"],
  absent: ({ summary }) => !summary?.busy.length,
  content({ capture, summary }) {
    if (!summary) return [];
    const { busy, makespans, replica } = summary;
    const times = column(makespans, capture.unit);
    const head = ["", ...busy.map((_, at) => ({ text: `replica ${at}`, title: at === replica ? "shown above" : null }))];
    const rows = busy[0].map((_, rank) => line(`rank ${rank} busy`, busy.map((ranks) => ranks[rank]), times));
    rows.push(line("makespan", makespans, times));
    return [table(`Replicas of the pipeline${times.name}; ${shortened(capture.label, 80)}`, head, rows)];
  },
};

/** A row of one time in all replicas; one that is well above the median says by how much. */
function line(title, values, { cell: shown }) {
  const median = [...values].sort((a, b) => a - b)[Math.floor((values.length - 1) / 2)];
  const cell = (value) => {
    const text = shown(value);
    if (!(value > median * (1 + NOTABLE))) return text;
    return element("span", {}, element("b", {}, text), ` ${change(value, median)}`);
  };
  return [title, ...values.map(cell)];
}
