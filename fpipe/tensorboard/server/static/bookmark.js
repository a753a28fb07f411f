/** What a link to the page holds: its state as texts by name, and back. */

import { TOGGLES } from "./shell.js";

/** @param {import("./app.js").App} app */
export function texts({ choice, sheet, shell, tabs }) {
  const { view, range, colouring } = sheet;
  return {
    run: choice.run,
    step: choice.step,
    follow: choice.follow ? null : "no",
    ...beside(choice.other),
    view: view.fitted ? null : [view.from, view.to].join(),
    range: range && [range.from, range.to].join(),
    ...selection(sheet),
    search: shell.search.value || null,
    folded: sheet.folding && ranged(sheet.folding),
    colour: colouring === "kind" ? null : colouring,
    shown: shownText(sheet.shown),
    tab: tabs.chosen,
    height: shell.below.style.flexBasis.replace("px", "") || null,
  };
}

function beside(other) {
  if (other === "auto") return {};
  return { beside: other?.run ?? "", beside_step: other?.step ?? null, beside_what: other?.what ?? null };
}

function selection({ selected, idle }) {
  const lane = (spot) => (spot.other ? ["beside"] : []);
  return {
    effect: selected && [selected.rank, selected.row, ...lane(selected)].join(),
    idle: idle && [idle.rank, idle.start, ...lane(idle)].join(),
  };
}

const usual = () => TOGGLES.filter(([, , , , on]) => on).map(([id]) => id);

function shownText(shown) {
  const all = TOGGLES.map(([id]) => id).filter((id) => shown.has(id));
  return all.join() === usual().join() ? null : all.join();
}

/** The capture that a link names, and what stands beside it. */
export function choice({ run = null, step, follow, beside: other, beside_step: its, beside_what: what }) {
  const named = other && { run: other, step: whole(its), ...(what ? { what } : {}) };
  return { run, step: whole(step), follow: follow !== "no", other: other === undefined ? "auto" : named || null };
}

/** The marks that a link shows. */
export const shown = ({ shown: text }) => new Set(text === undefined ? usual() : text.split(","));

/** The height of the tables; null for the usual one. */
export const height = (link) => numbers(link.height, 1)?.[0] ?? null;

/** A part of the step, as [from, to], from `view` or `range`; null if the link has none. */
export const span = (link, name) => numbers(link[name], 2);

/** The selected effect: {rank, row, other}; null if the link has none. */
export function effect(link) {
  const [rank, row] = numbers(link.effect, 2) ?? [];
  return Number.isSafeInteger(row) ? { rank, row, other: lane(link.effect) } : null;
}

/** The selected idle time: {rank, start, other}; null if the link has none. */
export function idle(link) {
  const [rank, start] = numbers(link.idle, 2) ?? [];
  return start === undefined ? null : { rank, start, other: lane(link.idle) };
}

/** The folded ranks; null if they are the usual ones. */
export function folded({ folded: text }) {
  if (text === undefined) return null;
  const ranks = new Set();
  for (const part of text.split(",").filter(Boolean)) {
    const [low, high = low] = part.split("-").map(whole);
    if (low === null || high === null) continue;
    for (let rank = low; rank <= Math.min(high, low + RANKS); rank += 1) ranks.add(rank);
  }
  return ranks;
}

const RANKS = 100_000; // at most, in one range of a link

/** Numbers as ranges: "0-3,7". */
function ranged(set) {
  const runs = [];
  for (const number of [...set].sort((a, b) => a - b)) {
    if (runs.at(-1)?.[1] === number - 1) runs.at(-1)[1] = number;
    else runs.push([number, number]);
  }
  return runs.map(([low, high]) => (low === high ? low : `${low}-${high}`)).join();
}

const lane = (text) => text.endsWith(",beside");

const whole = (text) => (/^\d{1,15}$/u.test(text ?? "") ? Number(text) : null);

/** The first numbers of a list; null if one is missing or none. */
function numbers(text, count) {
  const found = (text ?? "").split(",").slice(0, count);
  const list = found.map((part) => (part.trim() ? Number(part) : NaN));
  return list.length === count && list.every(Number.isFinite) ? list : null;
}
