/** Two captures beside each other: their names, by run and step. */

import { shortened } from "./dom.js";

const RUN = 16; // letters of a run

/** The names of a capture and of the one beside it: no two alike. */
export function names(main, other) {
  if (!main || !other) return [];
  const step = (one, run) => `${shortened(run, RUN)}, step ${one.step}`;
  const [own, its] = apart(main.run, other.run);
  return [step(main, own), other.what ? `if ${shortened(other.what, 20)}` : step(other, its)];
}

/** The parts of two runs' names that differ; of one run, the last part. */
function apart(one, other) {
  const parts = [one, other].map((run) => run.split("/"));
  if (one === other) return parts.map((own) => own.at(-1));
  const [a, b] = parts;
  let [begin, end] = [0, 0];
  while (begin < a.length && a[begin] === b[begin]) begin += 1;
  const most = Math.min(a.length, b.length) - begin;
  while (end < most - 1 && a.at(-1 - end) === b.at(-1 - end)) end += 1;
  return parts.map((own) => own.slice(begin, own.length - end).join("/") || own.at(-1));
}
