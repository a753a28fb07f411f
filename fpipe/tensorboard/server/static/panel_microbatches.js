/** Each rank's compute by microbatch, as a heat map and a table. */

import { table } from "./dom.js";
import { column, time } from "./format.js";
import { heat } from "./heat.js";
import { median } from "./trend.js";

const MOST = 500; // rows of the table

export const microbatches = {
  id: "microbatches",
  title: "Microbatches",
  reads: ["capture", "ranks", "dark"],
  content({ capture, dark, select }) {
    const ranks = [...capture.ranks.keys()].sort((a, b) => a - b);
    const sums = new Map(ranks.map((rank) => [rank, computed(capture.ranks.get(rank))]));
    const numbers = [...new Set([...sums.values()].flatMap((own) => [...own.keys()]))].sort((a, b) => a - b);
    if (!numbers.length) return [table("no effect computes a microbatch")];
    const took = (rank, at) => sums.get(ranks[rank]).get(numbers[at])?.took ?? NaN;
    const map = heat({
      name: "Compute of each rank by microbatch",
      ...{ ranks, columns: numbers, dark, value: took },
      text: (rank, at, value, by) => `rank ${ranks[rank]}, microbatch ${numbers[at]}: ${time(value, capture.unit)}, ${by}`,
      press: (rank, at) => {
        const first = sums.get(ranks[rank]).get(numbers[at]);
        if (first) select({ rank: ranks[rank], row: first.row });
      },
    });
    return [...map, figures(capture, sums, numbers)];
  },
};

/** The time that a rank computes of each microbatch, and its longest effect; an overlap counts half to each of its two. */
function computed(rank) {
  const sums = new Map();
  for (const row of rank.tracks.compute.rows) {
    const parts = rank.kindOf(row).parts.filter(({ microbatch }) => microbatch);
    const took = rank.end[row] - rank.start[row];
    for (const { microbatch } of parts) {
      const number = rank[microbatch][row];
      const sum = sums.get(number) ?? { took: 0, row, longest: 0 };
      sum.took += took / parts.length;
      if (took > sum.longest) [sum.row, sum.longest] = [row, took];
      sums.set(number, sum);
    }
  }
  return sums;
}

function figures(capture, sums, numbers) {
  const all = [...sums.values()].flatMap((own) => Array.from(own.values(), ({ took }) => took));
  const { cell, name } = column(all, capture.unit);
  const rows = numbers.slice(0, MOST).map((number) => {
    const own = [...sums].flatMap(([rank, of]) => (of.has(number) ? [[rank, of.get(number).took]] : []));
    const [slowest, most] = own.reduce((a, b) => (b[1] > a[1] ? b : a));
    const total = own.reduce((sum, [, took]) => sum + took, 0);
    return [`microbatch ${number}`, cell(total), cell(median(own.map(([, took]) => took))), `rank ${slowest}`, cell(most)];
  });
  const cut = numbers.length > MOST ? `, the first ${MOST}` : "";
  return table(`Compute by microbatch${name}${cut}`, ["", "all ranks", "median rank", "slowest rank", "its compute"], rows);
}
