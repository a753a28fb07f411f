/** Two captures side by side: the parts of the difference of their makespans, their ranks, and their effects. */

import { element, link, table } from "./dom.js";
import { change, column, signed, time } from "./format.js";
import { full } from "./names.js";

const NOTHING = 1e-9; // share of the makespan that counts as rounding error

export const difference = {
  id: "diff",
  title: "Difference",
  reads: ["answer", "ranks"],
  absent: ({ other }) => !other,
  content: (state) => (state.answer ? [parts(state), groups(state), ranks(state), effects(state)] : []),
};

/** The parts of the difference of two makespans; they add up to it. */
function parts({ answer, names, capture: { unit } }) {
  const [a, b] = answer.makespan;
  const others = Object.entries(answer.breakdown ?? {}).filter(([, by]) => Math.abs(by) > NOTHING * Math.max(a, b));
  if (Math.abs(a - b) <= NOTHING * Math.max(a, b)) return element("p", {}, `Both take ${time(a, unit)}.`);
  const text = `“${names[0]}” less “${names[1]}”: ${signed(a - b, unit)} (${change(a, b) || "0%"})`;
  const list = others.map(([what, by]) => `${what} ${signed(by, unit)}`).join(", ");
  return element("p", {}, list ? `${text}, of which ${list}` : text);
}

/** The effects of one kind on one rank together; a click selects the one that differs most. */
function groups({ answer, capture, select }) {
  const { unit } = capture;
  const largest = Math.max(...answer.makespan);
  const rows = answer.groups.flatMap((group) => {
    const rank = capture.ranks.get(group.rank);
    const there = rank && group.row >= 0 && group.row < rank.recorded;
    if (!there || Math.abs(group.total) <= NOTHING * largest) return [];
    const text = `${group.name} ${signed(group.median, unit)} × ${group.count}`;
    const name = link(text, () => select({ rank: group.rank, row: group.row }));
    const [took, its] = group.took;
    return [[name, rank.kindOf(group.row).name, signed(group.total, unit), signed(took - its, unit)]];
  });
  if (!rows.length) return element("p", {}, "Every effect that both have took as long.");
  const caption = "Effects of one kind on one rank: the median of their differences, and how many there are";
  return table(caption, ["effects", "kind", "sum of differences", "largest"], rows);
}

function ranks({ answer, names, capture }) {
  const times = column(answer.makespan, capture.unit);
  const both = ([a, b]) => [times.cell(a), times.cell(b), times.signed(a - b)];
  const of = (what) => names.map((one) => `${what}, ${one}`);
  const head = ["", ...of("busy"), "difference", ...of("idle"), "difference", "largest change of a cause"];
  const rows = answer.ranks.map((row) => [
    `rank ${row.rank}`,
    ...both(row.busy),
    ...both(row.idle),
    cause(row.causes, times),
  ]);
  return table(`Ranks: ${names.join(" and ")}${times.name}`, head, rows);
}

function cause(causes, times) {
  const changes = Object.entries(causes).map(([name, [a, b]]) => [name, a - b]);
  const [name, by] = changes.reduce((most, one) => (Math.abs(one[1]) > Math.abs(most[1]) ? one : most), ["", 0]);
  return Number(times.cell(by).replace("−", "")) ? `${name} ${times.signed(by)}` : "none";
}

/** The effects whose durations differ most; a row's name selects it. */
function effects({ answer, names, capture, later, select }) {
  const { unit } = capture;
  const rows = answer.effects.flatMap((row) => {
    const rank = capture.ranks.get(row.rank);
    if (!rank || row.row < 0 || row.row >= rank.recorded) return [];
    const [took, its] = row.took;
    const name = link(full(rank, row.row), () => select({ rank: row.rank, row: row.row }));
    const [by, shift] = [took - its, row.start[0] - row.start[1] + later];
    return [[name, time(took, unit), time(its, unit), signed(by, unit), change(took, its), signed(shift, unit)]];
  });
  const starts = { text: "starts", title: "later, from the first compute of each" };
  const head = ["effect", ...names.map((one) => `took, ${one}`), "difference", "", starts];
  return table("Effects that differ most", head, rows);
}
