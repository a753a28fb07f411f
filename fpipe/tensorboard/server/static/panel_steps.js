/** All captured steps of the run: makespan or period, bubble and each rank's compute, with drift and outliers. */

import { chart } from "./chart.js";
import { element, items, link, shortened, table } from "./dom.js";
import { column, percent, time } from "./format.js";
import { heat } from "./heat.js";
import { trend } from "./trend.js";

const MOST = 12; // lines of what stands out

export const steps = {
  id: "steps",
  title: "Steps",
  reads: ["capture", "steps", "dark"],
  content(state) {
    const { capture, steps: known, askSteps } = state;
    const { run, step } = capture.entry;
    askSteps(run);
    if (known?.run !== run) return [table("adding up …")];
    const rows = known.rows.filter(({ error }) => !error).map(perStep);
    const notes = [known.reason, cut(known), unread(known)].filter(Boolean).map((text) => element("p", {}, text));
    if (rows.length < 2) return known.all > 1 ? notes : [element("p", {}, "The run has one captured step so far."), ...notes];
    const label = rows.some((row) => row.steps > 1) ? "period" : "makespan";
    const view = { ...state, rows, label, numbers: rows.map((row) => row.step), at: rows.findIndex((row) => row.step === step) };
    return [...notes, ...told(view), ...charts(view), ...map(view), figures(view)];
  },
};

const cut = ({ all, rows, most }) => (all > most ? `The last ${rows.length} of ${all} steps.` : loading(rows, all));
const loading = (rows, all) => (rows.length < all ? `${rows.length} of ${all} steps …` : "");

function unread({ rows }) {
  const lost = rows.filter(({ error }) => error);
  return lost.length ? `Not readable: ${lost.map(({ step, error }) => `step ${step}, ${error}`).join("; ")}` : "";
}

/** The figures of one step: where several are one timeline, each rank's compute is their mean. */
const perStep = ({ busy, ...row }) => ({
  ...row,
  busy: Object.fromEntries(Object.entries(busy).map(([rank, total]) => [rank, total / row.steps])),
});

const ranksOf = (rows) => [...new Set(rows.flatMap(({ busy }) => Object.keys(busy).map(Number)))].sort((a, b) => a - b);

/** The figures over steps: [name, values]. */
function series({ rows, label }) {
  const ranks = ranksOf(rows);
  return [
    [label, rows.map((row) => row.period)],
    ...ranks.map((rank) => [`rank ${rank}’s compute`, rows.map(({ busy }) => busy[rank] ?? NaN)]),
  ];
}

/** What drifts and what stands out, the largest first. */
function told(view) {
  const { numbers, go } = view;
  const marks = series(view).flatMap(([name, values]) => {
    const { drift, outliers } = trend(numbers, values);
    const span = `from step ${numbers[0]} to ${numbers.at(-1)}`;
    const drifts = drift ? [{ by: drift, text: `${name} drifts ${share(drift)} ${span}` }] : [];
    const out = outliers.map(({ at, by }) => ({ by, step: numbers[at], text: `step ${numbers[at]}: ${name} ${share(by)}` }));
    return [...drifts, ...out];
  });
  marks.sort((a, b) => Math.abs(b.by) - Math.abs(a.by));
  if (!marks.length) return [element("p", {}, "No step stands out, and nothing drifts.")];
  const lines = items(marks, MOST, ({ text, step }) => [step === undefined ? text : link(text, () => go(step))]);
  return [element("ul", { class: "marks" }, ...lines)];
}

const share = (by) => `${by < 0 ? "−" : "+"}${percent(Math.abs(by))}`;

function charts({ rows, label, numbers, at: shown, go, capture: { unit } }) {
  const lines = [
    [label, rows.map((row) => row.period), (value) => time(value, unit)],
    ["bubble", rows.map((row) => row.bubble_rate), percent],
  ];
  return lines.flatMap(([name, values, said]) => {
    const marked = new Set(trend(numbers, values).outliers.map(({ at }) => at));
    const text = (at) => `step ${numbers[at]}: ${name} ${said(values[at])}`;
    const range = `${said(Math.min(...values))} to ${said(Math.max(...values))}`;
    const press = (at) => go(numbers[at]);
    return [
      element("h4", {}, `${name} `, element("span", { class: "faint" }, range)),
      chart({ name, steps: numbers, values, marked, shown, text, press }),
    ];
  });
}

function map({ rows, numbers, go, dark, capture: { unit } }) {
  const ranks = ranksOf(rows);
  return heat({
    name: "Compute of each rank over steps",
    ...{ ranks, columns: numbers, dark },
    value: (rank, at) => rows[at].busy[ranks[rank]] ?? NaN,
    text: (rank, at, value, by) => `rank ${ranks[rank]}, step ${numbers[at]}: ${time(value, unit)}, ${by}`,
    press: (rank, at) => go(numbers[at]),
  });
}

function figures({ rows, label, go, capture }) {
  const { cell, name } = column(rows.map((row) => row.period), capture.unit);
  const lines = rows.map(({ step, period, bubble_rate: bubble, busy }) => {
    const [rank, most] = Object.entries(busy).reduce((a, b) => (b[1] > a[1] ? b : a));
    return [link(String(step), () => go(step)), cell(period), percent(bubble), `rank ${rank}`, cell(most)];
  });
  const head = ["step", label, "bubble", "busiest rank", "its compute"];
  return table(`Captured steps${name}; ${shortened(capture.entry.run, 80)}`, head, lines);
}
