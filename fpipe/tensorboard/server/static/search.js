/**
 * Finds effects: "mb=5 kind=B", "rank=0-3 dur>1ms or recv", "F3". Terms beside each other must all match, in an overlap
 * for one of its two effects; "or" separates alternatives, and "not" turns the term after it round. A value is a
 * comma-separated list of alternatives and ranges. Quotes hold words together.
 */

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

class BadQuery extends Error {}

/**
 * @typedef {{letters: string[], labels: string[], stage: number, microbatch: number}} Part an effect, or one of the two of
 *   an overlap
 * @typedef {(rank: object, row: number, part: Part) => boolean} Term
 */

/**
 * @param {string} text
 * @param {object[]} known the captures' kinds
 * @param {string} unit of their times
 * @returns {((rank: object, row: number) => boolean) | null} null for an empty query
 */
export function parseQuery(text, known, unit) {
  const letters = known.flatMap((kind) => kind.parts).map((part) => part.letter.toLowerCase());
  const words = split(text);
  if (!words.length) return null;
  const groups = [[]];
  for (const word of words) if (word.toLowerCase() === "or") groups.push([]); else groups.at(-1).push(word);
  const alternatives = groups.map((group) => conjunction(group, letters, unit, text.trim()));
  return (rank, row) => {
    const own = parts(rank, row);
    return alternatives.some((terms) => own.some((part) => terms.every((holds) => holds(rank, row, part))));
  };
}

/** The words of a query; quotes hold some together, and a sign needs no spaces around it. */
function split(text) {
  const pieces = text.split(/("[^"]*")/u);
  if (pieces.some((piece, at) => at % 2 === 0 && piece.includes('"'))) {
    throw new BadQuery(`${text.trim()}: a quote is not closed`);
  }
  const closed = pieces.map((piece, at) => (at % 2 ? piece : piece.replace(/\s*(>=|<=|=|>|<)\s*/gu, "$1")));
  return closed.join("").match(/(?:[^\s"]|"[^"]*")+/gu) ?? [];
}

/** @returns {Term[]} */
function conjunction(words, letters, unit, whole) {
  const terms = [];
  let negated = false;
  for (const word of words) {
    const lower = word.toLowerCase();
    if (lower === "and" && !negated && terms.length) continue;
    if (lower === "not" && !negated) negated = true;
    else {
      const holds = term(word, letters, unit);
      terms.push(negated ? (...one) => !holds(...one) : holds);
      negated = false;
    }
  }
  if (!terms.length || negated) throw new BadQuery(`${whole}: something is missing beside or, or after not`);
  return terms;
}

/** @returns {Part[]} */
function parts(rank, row) {
  const kind = rank.kindOf(row);
  const of = (letters, labels, { stage, microbatch }) => ({
    ...{ letters, labels },
    stage: rank[stage]?.[row],
    microbatch: rank[microbatch]?.[row],
  });
  if (!kind.parts.length) return [of([kind.letter], [kind.name], kind.columns)];
  return kind.parts.map((part) => of(part.letters, part.labels, part));
}

/** @returns {Term} */
function term(text, letters, unit) {
  if (/^"[^"]*"$/u.test(text)) return free(bare(text, text).toLowerCase(), []);
  if (/[()|&!]/u.test(text)) throw new BadQuery(`${text}: instead of ( ) | & ! write or, and, not`);
  const [, name, sign, quoted] = /^([a-z]+)(>=|<=|=|>|<)(.*)$/iu.exec(text) ?? [];
  if (!name) return /[=<>]/u.test(text) ? unknown(text) : free(bare(text, text).toLowerCase(), letters);
  const wanted = bare(quoted, text, "");
  const field = name.toLowerCase();
  if (field === "dur" || field === "duration") return duration(sign, wanted, unit);
  const kind = field === "kind" || field === "k";
  const column = field === "rank" || field === "r" ? "rank" : FIELDS.get(field);
  if (!kind && !column) return unknown(text);
  if (sign !== "=") throw new BadQuery(`${text}: only dur takes ${sign}`);
  if (kind) return kinds(wanted, text);
  const holds = ranges(wanted, text);
  if (column === "rank") return (rank) => holds(rank.number);
  if (column === "peer") return (rank, row) => Boolean(rank.kindOf(row).value) && holds(rank.peer[row]);
  return (rank, row, part) => holds(part[column]);
}

/** A text without its quotes; it must not be empty then, unless there is another in its place. */
function bare(text, whole, instead = null) {
  const inner = text.replaceAll('"', "").trim();
  if (!inner && instead === null) throw new BadQuery(`${whole}: there is nothing between the quotes`);
  return inner || instead;
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
  return (rank, row, { letters }) => letters.some((letter) => letter.toUpperCase() === wanted);
}

/** By the name that is shown, by that of what it is a part of, by its value's, or by its class's. */
function called(wanted) {
  const text = wanted.toLowerCase();
  return (rank, row, { labels }) => {
    const { key, value: carried = "" } = rank.kindOf(row);
    return [...labels, carried, key].some((one) => one.toLowerCase().includes(text));
  };
}

function duration(sign, text, unit) {
  const [, number, measure] = /^([\d.]+(?:e-?\d+)?)(s|ms|us|µs|ns|)$/u.exec(text) ?? [];
  const bound = Number(number) * (UNITS.get(measure) ?? NaN);
  if (!Number.isFinite(bound)) throw new BadQuery(`dur${sign}${text}: give a time, as in dur>1ms`);
  if (unit !== "s" && measure) {
    throw new BadQuery(`dur${sign}${text}: times have no unit here, give a number, as in dur>1.5`);
  }
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
function free(text, letters) {
  const exact = letters.some((letter) => text.startsWith(letter) && /^\d+[a-z]*$/u.test(text.slice(letter.length)));
  const named = called(text);
  return (rank, row, part) => {
    const name = short(rank, row).toLowerCase();
    if (!exact) return name.includes(text) || named(rank, row, part) || value(rank, row).toLowerCase().includes(text);
    return name.split("&").some((own) => own === text || own.replace(/[a-z]+$/u, "") === text);
  };
}

/** The matches of a query, in order of start, rank and row. */
export class Matches {
  /**
   * @param {import("./model.js").Capture[]} captures the shown one, and the one beside it
   * @param {(capture: object) => number} by how much later a capture's times are than the view's
   */
  constructor(captures, query, by) {
    [this.captures, this._by] = [captures, by];
    this._rows = new Map(); // rank of a capture -> its rows
    this._levels = new Map(); // likewise -> its tracks' levels
    this.counts = captures.map((capture) => {
      const sizes = Array.from(capture.ranks.values(), (rank) => this._find(rank, query).size);
      return sizes.reduce((a, b) => a + b, 0);
    });
    this.count = this.counts.reduce((a, b) => a + b, 0);
  }

  _find(rank, query) {
    const rows = new Set();
    for (let row = 0; row < rank.kind.length; row += 1) if (query(rank, row)) rows.add(row);
    this._rows.set(rank, rows);
    return rows;
  }

  has(rank, row) {
    return this._rows.get(rank)?.has(row) ?? false;
  }

  /** The levels of a track's matches. */
  levels(rank, kind, colouring) {
    if (!this._levels.has(rank)) this._levels.set(rank, new Map());
    const own = this._levels.get(rank);
    const key = `${kind} ${colouring} ${rank.linked}`;
    if (!own.has(key)) own.set(key, rank.tracks[kind].only(this._rows.get(rank) ?? new Set(), colouring));
    return own.get(key);
  }

  get _order() {
    this._sorted ??= this.captures.flatMap((capture, at) => this._spots(capture, at > 0)).sort(this._compare.bind(this));
    return this._sorted;
  }

  _spots(capture, other) {
    const of = (rank) => Array.from(this._rows.get(rank), (row) => ({ rank: rank.number, row, other }));
    return Array.from(capture.ranks.values(), of).flat();
  }

  _compare(one, other) {
    const lanes = [one, other].map((spot) => (spot.other ? 1 : 0));
    const [a, b] = [one, other].map(({ rank, row }, at) => {
      const capture = this.captures[lanes[at]];
      return capture.ranks.get(rank).start[row] - this._by(capture);
    });
    return a - b || one.rank - other.rank || lanes[0] - lanes[1] || one.row - other.row;
  }

  /** The number of matches before a spot, or up to and including it. */
  _before(spot, included = false) {
    let [low, high] = [0, this.count];
    while (low < high) {
      const middle = (low + high) >> 1;
      const by = this._compare(this._order[middle], spot);
      if (by < 0 || (included && by === 0)) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** The match after, or before, a spot; wraps around at the end. */
  next(spot, by) {
    if (!this.count) return null;
    if (!spot) return this._order.at(by > 0 ? 0 : -1);
    return this._order.at(by > 0 ? this._before(spot, true) % this.count : this._before(spot) - 1);
  }

  /** The number of matches up to and including a spot. */
  place(spot) {
    return this._before(spot, true);
  }
}
