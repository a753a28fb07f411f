/** The details of an effect or a gap, as pairs of a name and a text; and those of the selection. */

import { card, element, items, link, table } from "./dom.js";
import { bytes, change, number, percent, signed, time } from "./format.js";
import { before } from "./levels.js";
import { full, short, value } from "./names.js";

const LINKS = 60; // shown links of a chain

/** The title of an effect. */
export function title(rank, row) {
  const kind = rank.kindOf(row);
  return kind.track === "compute" ? `${short(rank, row)} · ${kind.name}` : short(rank, row);
}

/**
 * @param {object} capture
 * @param {{rank: number, row: number}} spot
 * @param {{capture: object, spot: {rank: number, row: number}} | null} twin the same effect of another run
 * @returns {[string, string][]}
 */
export function facts(capture, spot, twin = null) {
  const rank = capture.ranks.get(spot.rank);
  const { row } = spot;
  const kind = rank.kindOf(row);
  const when = (at) => time(at, capture.unit, 6);
  const [start, end] = [rank.start[row], rank.end[row]];
  const found = [["rank", device(rank)]];
  if (kind.parts.length > 1) {
    for (const { label, stage, microbatch } of kind.parts) {
      found.push([label, `stage ${rank[stage][row]}, microbatch ${rank[microbatch][row]}`]);
    }
  } else if (kind.value) {
    found.push(["value", value(rank, row)], ...peer(rank, row));
  } else {
    const numbers = Object.entries(kind.columns).filter(([field]) => field !== "rank");
    for (const [field, column] of numbers) found.push([field, String(rank[column][row])]);
  }
  found.push(
    ["kind", kind.name],
    ["start", when(start)],
    ["end", when(end)],
    ["duration", time(end - start, capture.unit)],
  );
  if (kind.track === "receive") found.push(...receiving(capture, rank, row));
  if (["gather", "scatter", "offload", "fetch"].includes(kind.track)) found.push(...use(capture, rank, row));
  if (kind.value && rank.bytes.length && !Number.isNaN(rank.bytes[row])) found.push(["bytes", bytes(rank.bytes[row])]);
  if (kind.name !== "host") found.push(["waited for", waited(capture, spot)]);
  if (twin) found.push(...difference(capture, spot, twin));
  return found;
}

/** The other rank of a send or receive. */
function peer(rank, row) {
  const { track } = rank.kindOf(row);
  if (track !== "send" && track !== "receive") return [];
  return [[track === "send" ? "to" : "from", `rank ${rank.peer[row]}`]];
}

const device = (rank) => (rank.header.device ? `${rank.number}, ${rank.header.device}` : String(rank.number));

function receiving(capture, rank, row) {
  const [start, left] = [rank.start[row], rank.left[row]];
  const took = (span) => time(span, capture.unit);
  const found = [];
  if (Number.isNaN(left)) found.push(["waiting", "unknown: its send is not on this clock, or not recorded"]);
  else found.push(["waiting", took(left - start)], ["transfer", transfer(capture, rank, row)]);
  return [...found, ...use(capture, rank, row)];
}

/** The first use of a value that came later than it was asked for, where that was measured. */
function use(capture, rank, row) {
  const used = rank.used.length ? rank.used[row] : NaN;
  if (Number.isNaN(used)) return [];
  const waited = rank.end[row] - used;
  const wait = waited > 0 ? `which waited ${time(waited, capture.unit)} for it` : "when it was there";
  return [["first use", `${time(used, capture.unit, 6)}, ${wait}`]];
}

/** The transfer time; an upper bound if it was measured and nothing waited for the value. */
function transfer({ entry, unit }, rank, row) {
  const took = rank.end[row] - rank.left[row];
  const text = time(took, unit);
  const waited = rank.used.length > 0 && rank.end[row] > rank.used[row];
  if (entry.kind === "measured" && !waited) return `${text} at most`;
  const size = rank.bytes.length ? rank.bytes[row] : NaN;
  return unit === "s" && took > 0 && size > 0 ? `${text}, ${bytes(size / took)}/s` : text;
}

/** The cause of an effect's start, and the time since. */
function waited(capture, spot) {
  const cause = capture.cause(spot);
  if (!cause) return capture.ranks.get(spot.rank).fromRank[spot.row] < 0 ? "nothing" : "an effect that is not recorded";
  const own = capture.ranks.get(cause.rank);
  const name = full(own, cause.row);
  if (capture.ranks.get(spot.rank).kindOf(spot.row).track === "receive") return name;
  const since = capture.ranks.get(spot.rank).start[spot.row] - own.end[cause.row];
  return since > 0 ? `${name}, ${time(since, capture.unit)} before` : name;
}

function difference(capture, spot, { capture: other, spot: twin, later }) {
  const [rank, own] = [capture.ranks.get(spot.rank), other.ranks.get(twin.rank)];
  const took = rank.end[spot.row] - rank.start[spot.row];
  const its = own.end[twin.row] - own.start[twin.row];
  if (capture.unit !== other.unit) return [[other.entry.kind, `took ${number(its)}, in another unit`]];
  const shift = rank.start[spot.row] - own.start[twin.row] + later; // from the first compute of each
  const starts = `${time(Math.abs(shift), capture.unit, 3)} ${shift > 0 ? "later" : "earlier"}`;
  return [
    [other.entry.kind, `took ${time(its, other.unit)}, from ${time(own.start[twin.row], other.unit, 6)} on`],
    ["difference", `${signed(took - its, capture.unit)} ${took === its ? "" : change(took, its)}`.trim()],
    ["starts", shift === 0 ? "at the same time" : starts],
  ];
}

/** The title of a gap. */
export const gapTitle = ({ cause }) => (cause ? `idle: ${cause}` : "idle");

/** The details of a gap. */
export function gapFacts(capture, gap) {
  const account = capture.account(gap.rank);
  const took = gap.end - gap.start;
  const next = capture.after(gap);
  const awaited = capture.awaited(gap);
  const name = (spot) => full(capture.ranks.get(spot.rank), spot.row);
  const pairs = [
    ["rank", String(gap.rank)],
    ["cause", gap.cause ? `${gap.cause}: ${capture.summary.causes[gap.cause]}` : "not told apart yet"],
    ["start", time(gap.start, capture.unit, 6)],
    ["end", time(gap.end, capture.unit, 6)],
    ["duration", time(took, capture.unit)],
  ];
  if (account?.idle > 0) pairs.push(["of the rank's idle time", percent(took / account.idle)]);
  pairs.push(["waited for", awaited ? name(awaited) : "nothing"]);
  if (gap.cause === "imbalance") pairs.push(["busiest rank", busiest(capture, gap.rank)]);
  pairs.push(["then", next ? short(capture.ranks.get(next.rank), next.row) : "nothing more"]);
  return pairs;
}

function busiest(capture, number) {
  const most = capture.summary.ranks.reduce((a, b) => (b.busy > a.busy ? b : a));
  return `${most.rank}, computes ${time(most.busy - capture.account(number).busy, capture.unit)} more`;
}

/** Shows what a rank's memory holds at a moment, and who owns it at the peak; returns the details as pairs. */
export function memoryDetails(place, sheet, { rank: number, when }) {
  const capture = sheet.main;
  const rank = capture.ranks.get(number);
  const pairs = [
    ["rank", device(rank)],
    ["at", time(when, capture.unit, 6)],
    ["holds", bytes(heldAt(rank, when))],
    ["peak", `${bytes(rank.memory.most)} at ${time(rank.peak, capture.unit, 6)}`],
  ];
  place.replaceChildren(...card("memory", pairs, capture.entry.kind), ...owners(rank));
  return [["memory", ""], ...pairs, ...Object.entries(rank.header.owners ?? {}).map(([owner, size]) => [owner, bytes(size)])];
}

/** The bytes that a rank holds at a moment. */
export function heldAt({ memory }, when) {
  const at = before(memory.at, when);
  return at < 0 ? 0 : memory.bytes[at];
}

function owners(rank) {
  const all = Object.entries(rank.header.owners ?? {}).sort(([, a], [, b]) => b - a);
  if (!all.length) return [element("p", { class: "faint" }, "Who owned it at the peak is not known.")];
  const { most } = rank.memory;
  const rows = all.map(([owner, size]) => {
    const bar = element("i", { style: `width:${Math.min(100, (100 * size) / most).toFixed(1)}%` });
    return [owner, bytes(size), percent(size / most), element("span", { class: "bar owned" }, bar)];
  });
  const shown = table("At the peak, by owner; sums of gradients beside it", ["owner", "bytes", "of the peak", ""], rows);
  return [shown];
}

/** Shows the selected gap's details and the chain of waits that ended with it; returns the details as pairs. */
export function gapDetails(place, sheet, gap) {
  const capture = sheet.of(gap);
  const known = gapFacts(capture, gap);
  place.replaceChildren(...card(gapTitle(gap), known, capture.entry.kind), ...chain(capture, sheet, gap));
  return [[gapTitle(gap), ""], ...known];
}

/** Shows the selected effect's details and its chain of waits; returns the details as pairs. */
export function details(place, sheet, spot) {
  const capture = sheet.of(spot);
  const heading = title(capture.ranks.get(spot.rank), spot.row);
  const known = facts(capture, spot, sheet.twin(spot));
  place.replaceChildren(...card(heading, known, capture.entry.kind), ...chain(capture, sheet, spot));
  return [[heading, ""], ...known];
}

function chain(capture, sheet, spot) {
  const select = (wait) => sheet.select({ ...wait, other: spot.other }, { reveal: true });
  const waits = items(sheet.chain.slice(1), LINKS, (wait) => [
    link(full(capture.ranks.get(wait.rank), wait.row), () => select(wait)),
  ]);
  return waits.length ? [element("h4", {}, "What was waited for, in turn"), element("ol", {}, ...waits)] : [];
}
