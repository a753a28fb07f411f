/** The tables beside the timeline. The server computes a capture's figures; this module only adds units. */

import { facts, title } from "./details.js";
import { element, fill, named, shortened } from "./dom.js";
import { before } from "./levels.js";
import { change, number, percent, signed, time, unitOf, bytes } from "./format.js";
import { full, short } from "./names.js";
import { CAUSES } from "./palette.js";
import { card } from "./tooltip.js";

const LINKS = 60; // shown links of a chain
const MOST = 500; // rows of a table
const NOTHING = 1e-9; // share of the makespan that counts as rounding error
const FOLDED = 400; // rows of the critical path

/** The unit of a column of times: [factor, text for the header]. */
function scaled(values, unit) {
  const [factor, name] = unitOf(Math.max(...values.map(Math.abs), 0), unit);
  return [factor, name ? `, in ${name}` : ""];
}

/** Idle time of each rank by cause. */
export function bubbles(table, capture) {
  const { summary, unit } = capture;
  const [factor, name] = scaled([summary.makespan], unit);
  const most = Math.max(...summary.ranks.map((row) => (row.causes ? total(row.causes) : 0)), Number.MIN_VALUE);
  const memory = summary.ranks.some((row) => row.peak_memory != null || row.peak);
  const clocks = summary.ranks.some((row) => row.clock?.uncertainty > 0 || !row.clock);
  const head = [
    "rank",
    "busy",
    { text: "idle", title: "between the rank's first start and last end" },
    { text: "idle share", title: "of the makespan, warm-up and drain with it" },
    { text: "", title: "idle time by cause" },
    ...CAUSES,
    "in flight",
    ...(memory ? ["peak memory"] : []),
    ...(clocks ? [{ text: "clock", title: "how far it is ahead of rank 0's, and how far that may be off" }] : []),
  ];
  const cell = (value) => number(value < summary.makespan * NOTHING ? 0 : value / factor);
  const rows = summary.ranks.map((row) => [
    `rank ${row.rank}`,
    cell(row.busy),
    cell(row.idle),
    row.share_idle === null ? "–" : percent(row.share_idle),
    row.causes ? bar(row.causes, most, (value) => time(value, unit)) : "",
    ...CAUSES.map((cause) => (row.causes ? cell(row.causes[cause]) : "–")),
    number(row.peak_in_flight),
    ...(memory ? [peak(row)] : []),
    ...(clocks ? [clock(row.clock, unit)] : []),
  ]);
  fill(table, `Idle time by cause${name}; ${shortened(capture.label, 80)}`, head, rows);
}

const total = (causes) => CAUSES.reduce((sum, cause) => sum + causes[cause], 0);

function peak(row) {
  const held = row.peak_memory == null ? "" : bytes(row.peak_memory);
  if (!row.peak) return held || "–";
  const whole = `${bytes(row.peak[0])} (${row.peak[1]})`;
  return held ? element("span", { title: `${whole} at most up to then` }, held) : whole;
}

function clock(found, unit) {
  if (!found) return "not compared";
  return found.uncertainty > 0 ? `${signed(found.offset, unit)} ± ${time(found.uncertainty, unit, 2)}` : "the same";
}

function bar(causes, most, text) {
  const parts = CAUSES.filter((cause) => causes[cause] > most * NOTHING).map((cause) =>
    element("i", {
      class: cause,
      title: `${cause} ${text(causes[cause])}`,
      style: `width:${((100 * causes[cause]) / most).toFixed(2)}%`,
    }),
  );
  return element("span", { class: "bar", role: "presentation" }, ...parts);
}

/**
 * The critical path as runs of one kind on one rank, with their times. A send and its receive cover the same
 * interval: only the receive is listed, from the time when the send was posted.
 */
function folded(capture) {
  const found = [];
  for (const [number_, row] of capture.summary.critical) {
    const rank = capture.ranks.get(number_);
    if (!rank || row >= rank.recorded) continue;
    const kind = rank.kindOf(row);
    if (kind.track === "send") continue;
    const took = rank.end[row] - rank.begun(row);
    const last = found.at(-1);
    if (last && last.rank === number_ && last.kind === kind) {
      last.count += 1;
      last.took += took;
      last.last = row;
    } else found.push({ rank: number_, kind, row, last: row, count: 1, took });
  }
  return found;
}

function linkName(rank, { kind, row, last, count }) {
  const name = count > 1 ? `${short(rank, row)} … ${short(rank, last)} (${count})` : short(rank, row);
  if (kind.track !== "receive") return `rank ${rank.number}: ${name}`;
  return `rank ${rank.peer[row]} → rank ${rank.number}: ${kind.value} ${rank.microbatch[row]}`;
}

/** The critical path as a list of links that select effects. */
export function critical(list, capture, select) {
  const found = folded(capture);
  const items = found.slice(0, FOLDED).map((link) => {
    const press = () => select({ rank: link.rank, row: link.row });
    const text = linkName(capture.ranks.get(link.rank), link);
    const button = element("button", { type: "button", class: "link", on: { click: press } }, text);
    const took = element("span", { class: "faint" }, ` ${time(link.took, capture.unit)}`);
    return element(
      "li",
      {},
      element("i", { class: "swatch", style: `background:var(--hue-${link.kind.hue})` }),
      button,
      took,
    );
  });
  if (found.length > FOLDED) items.push(element("li", { class: "faint" }, `and ${found.length - FOLDED} more`));
  list.replaceChildren(...items);
}

/** Two runs' ranks side by side. */
export function ranksDiff(table, answer, names, unit) {
  const [factor, name] = scaled(answer.makespan, unit);
  const both = ([a, b]) => [number(a / factor), number(b / factor), a === b ? "0" : signedIn(a - b, factor)];
  const of = (what) => names.map((one) => `${what}, ${one}`);
  const head = ["", ...of("busy"), "difference", ...of("idle"), "difference", "largest change of a cause"];
  const rows = answer.ranks.map((row) => [
    `rank ${row.rank}`,
    ...both(row.busy),
    ...both(row.idle),
    cause(row.causes, factor),
  ]);
  fill(table, `Ranks: ${names.join(" and ")}${name}`, head, rows);
}

const signedIn = (value, factor) => `${value > 0 ? "+" : "−"}${number(Math.abs(value) / factor, 3)}`;

function cause(causes, factor) {
  const found = Object.entries(causes).map(([name, [a, b]]) => [name, a - b]);
  const [name, by] = found.reduce((most, one) => (Math.abs(one[1]) > Math.abs(most[1]) ? one : most), ["", 0]);
  return by ? `${name} ${signedIn(by, factor)}` : "none";
}

/** The effects whose durations differ most; a row's name selects it. */
export function effectsDiff(table, answer, names, capture, select) {
  const { unit } = capture;
  const rows = answer.effects.flatMap((row) => {
    const rank = capture.ranks.get(row.rank);
    if (!rank || row.row < 0 || row.row >= rank.recorded) return [];
    const [took, its] = row.took;
    const press = () => select({ rank: row.rank, row: row.row });
    const button = element("button", { type: "button", class: "link", on: { click: press } }, full(rank, row.row));
    const shift = row.start[0] - row.start[1];
    return [
      [button, time(took, unit), time(its, unit), signed(took - its, unit), change(took, its), signed(shift, unit)],
    ];
  });
  const head = ["effect", ...names.map((one) => `took, ${one}`), "difference", "", "starts"];
  fill(table, "Effects that differ most", head, rows);
}

/** The figures of the whole capture, or of two. */
export function headline(place, capture, answer, names) {
  const { entry, summary, unit } = capture;
  const counts = [
    [entry.expected || entry.ranks.length, "rank", "s"],
    [entry.stages, "stage", "s"],
    [entry.microbatches, "microbatch", "es"],
  ].filter(([count]) => count);
  const extent = counts.map(([count, what, ending]) => `${count} ${what}${count === 1 ? "" : ending}`).join(", ");
  const parts = [entry.schedule ? named(entry.schedule, 40) : null, extent];
  if (summary) {
    parts.push(figure("makespan", time(summary.makespan, unit)), figure("bubble", percent(summary.bubble_rate)));
    if (Math.abs(summary.cost - summary.makespan) > NOTHING * summary.makespan)
      parts.push(figure("cost", time(summary.cost, unit)));
  }
  if (answer) {
    const [a, b] = answer.makespan;
    parts.push(figure(`${names[1]} makespan`, `${time(b, unit)} (${names[0]} is ${change(a, b) || "0%"})`));
    parts.push(figure(`${names[1]} bubble`, percent(answer.bubble_rate[1])));
  }
  place.replaceChildren(
    ...parts.filter(Boolean).map((part) => element("span", { class: "part" }, part)),
  );
}

const figure = (name, text) => element("span", { class: "figure" }, `${name} `, element("b", {}, text));

/** The visible effects as a table, for screen readers. */
export function effects(table, capture, view, numbers, select) {
  const found = [];
  let more = false;
  for (const rank_ of numbers) {
    const rank = capture.ranks.get(rank_);
    if (!rank) continue;
    for (const track of Object.values(rank.tracks)) {
      for (const lane of track.lanes) {
        const until = before(lane.starts, view.to) + 1;
        let own = 0;
        for (let at = Math.max(0, before(lane.starts, view.from)); at < until; at += 1) {
          if (lane.ends[at] < view.from) continue;
          if (own >= MOST) {
            more = true;
            break;
          }
          own += found.push([rank, lane.rows[at]]) && 1;
        }
      }
    }
  }
  found.sort(([a, i], [b, j]) => a.start[i] - b.start[j] || a.number - b.number);
  const { unit } = capture;
  const rows = found.slice(0, MOST).map(([rank, row]) => {
    const kind = rank.kindOf(row);
    const took = rank.end[row] - rank.start[row];
    const press = () => select({ rank: rank.number, row });
    const button = element("button", { type: "button", class: "link", on: { click: press } }, short(rank, row));
    return [
      button,
      rank.number,
      kind.name,
      kind.columns.stage ? rank.stage[row] : "",
      kind.columns.microbatch ? rank.microbatch[row] : "",
      time(rank.start[row], unit, 6),
      time(took, unit),
    ];
  });
  const cut = more || found.length > MOST ? `, the first ${MOST}` : "";
  const head = ["effect", "rank", "kind", "stage", "microbatch", "start", "duration"];
  fill(table, `Effects from ${time(view.from, unit)} to ${time(view.to, unit)}${cut}`, head, rows);
}

/** Each rank's busy and idle time within a range. */
export function within(table, capture, range) {
  const span = range.to - range.from;
  const rows = [...capture.ranks.values()]
    .sort((a, b) => a.number - b.number)
    .map((rank) => {
      const levels = rank.tracks.compute.levels("kind");
      const busy = Math.min(
        span,
        levels.reduce((sum, own) => sum + own.busy(range.from, range.to), 0),
      );
      return [
        `rank ${rank.number}`,
        time(busy, capture.unit),
        percent(busy / span),
        time(span - busy, capture.unit),
        percent(1 - busy / span),
      ];
    });
  const bounds = [range.from, range.to].map((when) => time(when, capture.unit, 6));
  const caption = `${bounds.join(" to ")}: ${time(span, capture.unit)}`;
  fill(table, caption, ["", "busy", "share", "idle", "share"], rows);
}

/** The parts of the difference of two makespans; they add up to it. */
export function lies(place, answer, names, unit) {
  const parts = Object.entries(answer.lies ?? {}).filter(([, by]) => by !== 0);
  const [a, b] = answer.makespan;
  const text = `${names[0]} less ${names[1]}: ${signed(a - b, unit)} (${change(a, b) || "0%"})`;
  place.textContent = parts.length
    ? `${text}, of which ${parts.map(([what, by]) => `${what} ${signed(by, unit)}`).join(", ")}`
    : text;
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
  const links = sheet.chain.slice(1);
  if (!links.length) return [];
  const items = links.slice(0, LINKS).map((link) => {
    const press = () => sheet.select({ ...link, other: spot.other }, { reveal: true });
    const name = full(capture.ranks.get(link.rank), link.row);
    return element("li", {}, element("button", { type: "button", class: "link", on: { click: press } }, name));
  });
  if (links.length > LINKS) items.push(element("li", { class: "faint" }, `and ${links.length - LINKS} more`));
  return [element("h4", {}, "It waited for, in turn"), element("ol", {}, ...items)];
}
