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
    const numbers = [...new Set([...sums.values()].flatMap(({ took }) => Object.keys(took).map(Number)))];
    numbers.sort((a, b) => a - b);
    if (!numbers.length) return [table("no effect computes a microbatch")];
    const took = (rank, at) => sums.get(ranks[rank]).took[numbers[at]] ?? NaN;
    const map = heat({
      name: "Compute of each rank by microbatch",
      ...{ ranks, columns: numbers, dark, value: took },
      text: (rank, at, value, by) => `rank ${ranks[rank]}, microbatch ${numbers[at]}: ${time(value, capture.unit)}, ${by}`,
      press: (rank, at) => {
        const row = sums.get(ranks[rank]).rows[numbers[at]];
        if (row !== undefined) select({ rank: ranks[rank], row });
      },
    });
    return [...map, figures(capture, sums, numbers)];
  },
};

/**
 * By microbatch, the time that a rank computes of it and the row of its longest effect; an overlap counts half to each of
 * its two.
 */
function computed(rank) {
  const columns = rank.kinds.map(({ parts }) => parts.flatMap(({ microbatch }) => (microbatch ? [rank[microbatch]] : [])));
  const [took, rows, longest] = [[], [], []];
  for (const row of rank.tracks.compute.rows) {
    const own = columns[rank.kind[row]];
    const time = rank.end[row] - rank.start[row];
    for (const column of own) {
      const number = column[row];
      took[number] = (took[number] ?? 0) + time / own.length;
      if (!(time <= longest[number])) [rows[number], longest[number]] = [row, time];
    }
  }
  return { took, rows };
}

function figures(capture, sums, numbers) {
  const known = numbers.slice(0, MOST).map((number) => {
    const own = [...sums].flatMap(([rank, { took }]) => (number in took ? [[rank, took[number]]] : []));
    const [slowest, most] = own.reduce((a, b) => (b[1] > a[1] ? b : a));
    const total = own.reduce((sum, [, took]) => sum + took, 0);
    return { number, total, middle: median(own.map(([, took]) => took)), slowest, most };
  });
  const { cell, name } = column(known.map(({ total }) => total), capture.unit);
  const rows = known.map(({ number, total, middle, slowest, most }) => [
    `microbatch ${number}`,
    cell(total),
    cell(middle),
    `rank ${slowest}`,
    cell(most),
  ]);
  const cut = numbers.length > MOST ? `, the first ${MOST}` : "";
  return table(`Compute by microbatch${name}${cut}`, ["", "all ranks", "median rank", "slowest rank", "its compute"], rows);
}
