/**
 * Finds effects: "mb=5 kind=B", "rank=0-3 dur>1ms", "F3". All terms must match, in an overlap for one of its two
 * effects; a value is a comma-separated list of alternatives and ranges.
 */

import { before } from "./levels.js";
import { short, value } from "./names.js";

const FIELDS = new Map([
  ["mb", "microbatch"],
  ["microbatch", "microbatch"],
  ["m", "microbatch"],
  ["stage", "stage"],
  ["s", "stage"],
  ["peer", "peer"],
]);
const UNITS = new Map([
  ["s", 1],
  ["ms", 1e-3],
  ["us", 1e-6],
  ["µs", 1e-6],
  ["ns", 1e-9],
  ["", 1],
]);
const HALVES = "IW"; // of a backward

class BadQuery extends Error {}

/**
 * @typedef {{letter: string, stage: number, microbatch: number}} Part an effect, or one of the two of an overlap
 * @typedef {(rank: object, row: number, part: Part) => boolean} Term
 */

/** @returns {((rank: object, row: number) => boolean) | null} null for an empty query */
export function parseQuery(text) {
  const terms = text.trim().split(/\s+/u).filter(Boolean).map(term);
  return terms.length
    ? (rank, row) => parts(rank, row).some((part) => terms.every((holds) => holds(rank, row, part)))
    : null;
}

/** @returns {Part[]} */
function parts(rank, row) {
  const kind = rank.kindOf(row);
  const of = (letter, { stage, microbatch }) => ({ letter, stage: rank[stage]?.[row], microbatch: rank[microbatch]?.[row] });
  return kind.parts.length ? kind.parts.map((part) => of(part.letter, part)) : [of(kind.letter, kind.columns)];
}

/** @returns {Term} */
function term(text) {
  const [, name, sign, wanted] = /^([a-z]+)(>=|<=|=|>|<)(.*)$/iu.exec(text) ?? [];
  if (!name) return /[=<>]/u.test(text) ? unknown(text) : free(text.toLowerCase());
  const field = name.toLowerCase();
  if (field === "dur" || field === "duration") return duration(sign, wanted);
  const kind = field === "kind" || field === "k";
  const column = field === "rank" || field === "r" ? "rank" : FIELDS.get(field);
  if (!kind && !column) return unknown(text);
  if (sign !== "=") throw new BadQuery(`${text}: only dur takes ${sign}`);
  if (kind) return kinds(wanted, text);
  const holds = ranges(wanted, text);
  if (column === "rank") return (rank) => holds(rank.number);
  return (rank, row, part) => (column === "peer" ? Boolean(rank.kindOf(row).value) && holds(rank.peer[row]) : holds(part[column]));
}

function unknown(text) {
  throw new BadQuery(`${text}: search by mb, stage, rank, kind, peer or dur, as in mb=5 or dur>1ms`);
}

function ranges(text, whole) {
  const bounds = text.split(",").map((one) => {
    const [, low, high = low] = /^(\d+)(?:-(\d+))?$/u.exec(one) ?? [];
    if (low === undefined) throw new BadQuery(`${whole}: give numbers, as in mb=5, mb=3-7 or mb=1,4`);
    if (Number(high) < Number(low)) throw new BadQuery(`${whole}: ${one} holds nothing, give the smaller number first`);
    return [Number(low), Number(high)];
  });
  return (number) => bounds.some(([low, high]) => number >= low && number <= high);
}

function kinds(text, whole) {
  const wanted = text.split(",");
  if (wanted.includes("")) throw new BadQuery(`${whole}: give kinds, as in kind=F,B or kind=send`);
  const alternatives = wanted.map((one) => (one.length === 1 ? lettered(one.toUpperCase()) : called(one)));
  return (rank, row, part) => alternatives.some((holds) => holds(rank, row, part));
}

function lettered(wanted) {
  return (rank, row, { letter }) => {
    const kind = rank.kindOf(row);
    if (wanted === "R" && kind.track === "host") return false;
    const letters = [letter, kind.letter].map((each) => each.toUpperCase());
    return letters.includes(wanted) || (wanted === "B" && HALVES.includes(letter));
  };
}

function called(wanted) {
  const text = wanted.toLowerCase();
  return (rank, row) => {
    const { name, value: carried } = rank.kindOf(row);
    return name.toLowerCase().includes(text) || Boolean(carried?.toLowerCase().includes(text));
  };
}

function duration(sign, text) {
  const [, number, unit] = /^([\d.]+(?:e-?\d+)?)(s|ms|us|µs|ns|)$/u.exec(text) ?? [];
  const bound = Number(number) * (UNITS.get(unit) ?? NaN);
  if (!Number.isFinite(bound)) throw new BadQuery(`dur${sign}${text}: give a time, as in dur>1ms`);
  const compare = {
    ">": (took) => took > bound,
    "<": (took) => took < bound,
    ">=": (took) => took >= bound,
    "<=": (took) => took <= bound,
    "=": (took) => took === bound,
  }[sign];
  return (rank, row) => compare(rank.end[row] - rank.start[row]);
}

/** "F3" finds that effect on every stage; a longer text finds every name that contains it. */
function free(text) {
  const exact = /^[fiwb]\d+[a-z]*$/u.test(text);
  return (rank, row) => {
    const name = short(rank, row).toLowerCase();
    if (!exact) return name.includes(text) || value(rank, row).toLowerCase().includes(text);
    return name.split("&").some((part) => part === text || part.replace(/[a-z]+$/u, "") === text);
  };
}

/** The matches of a query, by rank. */
export class Matches {
  constructor(capture, query) {
    this.rows = new Map();
    this.count = 0;
    this.starts = new Map();
    this._sets = new Map();
    this._levels = new Map();
    for (const rank of capture.ranks.values()) {
      const rows = [];
      for (let row = 0; row < rank.kind.length; row += 1) if (query(rank, row)) rows.push(row);
      rows.sort((a, b) => rank.start[a] - rank.start[b] || a - b);
      this.rows.set(rank.number, rows);
      this.starts.set(
        rank.number,
        Float64Array.from(rows, (row) => rank.start[row]),
      );
      this._sets.set(rank.number, new Set(rows));
      this.count += rows.length;
    }
  }

  has(rank, row) {
    return this._sets.get(rank.number)?.has(row) ?? false;
  }

  /** The levels of a track's matches. */
  levels(rank, kind, colouring) {
    const key = `${rank.number} ${kind} ${colouring} ${rank.linked}`;
    if (!this._levels.has(key)) {
      this._levels.set(key, rank.tracks[kind].only(this._sets.get(rank.number) ?? new Set(), colouring));
    }
    return this._levels.get(key);
  }

  /** The match after, or before, a spot, ordered by start and then by rank; wraps around at the end. */
  next(capture, spot, by) {
    if (!this.count) return null;
    const when = spot ? capture.ranks.get(spot.rank).start[spot.row] : by > 0 ? -Infinity : Infinity;
    let best = null;
    for (const [number, rows] of this.rows) {
      const starts = this.starts.get(number);
      let at = by > 0 ? before(starts, when) + 1 : before(starts, when);
      if (spot) at = this._beside(rows, starts, at, spot, number, when, by);
      if (at < 0 || at >= rows.length) continue;
      const found = { rank: number, row: rows[at], start: starts[at] };
      if (!best || by * (found.start - best.start || found.rank - best.rank) < 0) best = found;
    }
    if (!best) return spot ? this.next(capture, null, by) : null;
    return { rank: best.rank, row: best.row };
  }

  /** Orders equal starts by rank; on the spot's own rank, by row. */
  _beside(rows, starts, at, spot, number, when, by) {
    let low = at;
    while (low > 0 && starts[low - 1] === when) low -= 1;
    const same = [];
    for (let place = low; place < starts.length && starts[place] === when; place += 1) same.push(place);
    const later = same.filter((place) => number > spot.rank || (number === spot.rank && rows[place] > spot.row));
    if (by > 0) return later.length ? later[0] : same.length ? same.at(-1) + 1 : at;
    const sooner = same.filter((place) => number < spot.rank || (number === spot.rank && rows[place] < spot.row));
    return sooner.length ? sooner.at(-1) : low - (same.length ? 1 : 0);
  }

  /** The number of matches up to and including a spot. */
  place(capture, spot) {
    const when = capture.ranks.get(spot.rank).start[spot.row];
    let count = 0;
    for (const [number, rows] of this.rows) {
      const starts = this.starts.get(number);
      let at = before(starts, when);
      while (at >= 0 && starts[at] === when && (number > spot.rank || (number === spot.rank && rows[at] > spot.row)))
        at -= 1;
      count += at + 1;
    }
    return count;
  }
}
