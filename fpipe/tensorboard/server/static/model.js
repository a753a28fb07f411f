/** A capture for drawing: ranks, their tracks, and the cause of each start. */

import { before, Levels } from "./levels.js";
import { HOST_KIND, kindOf } from "./names.js";
import { HUES, UNTOLD, WAITING } from "./palette.js";

const LARGE = 150_000; // effects
const LANES = 3; // at most; further overlapping spans are cut where the next begins
const WAITS = new Set(["warm-up", "dependency", "imbalance", "transfer", "gather", ""]); // causes of a gap
const COLUMNS = ["stage", "microbatch", "other", "second", "peer"];

/** Intervals of one track that do not overlap. */
class Lane {
  constructor(rank, rows) {
    this.rows = Uint32Array.from(rows);
    this.starts = Float64Array.from(this.rows, (row) => rank.start[row]);
    this.ends = Float64Array.from(this.rows, (row) => rank.end[row]);
    this.longest = 0;
    for (let at = 0; at < rows.length; at += 1) {
      if (at + 1 < rows.length) this.ends[at] = Math.min(this.ends[at], this.starts[at + 1]);
      this.longest = Math.max(this.longest, this.ends[at] - this.starts[at]);
    }
  }

  /** The rows of the intervals that overlap a range. */
  *within({ from, to }) {
    const until = before(this.starts, to) + 1;
    for (let at = Math.max(0, before(this.starts, from)); at < until; at += 1) {
      if (this.ends[at] >= from) yield this.rows[at];
    }
  }

  /** The index of the interval at a moment, or at most `near` away; -1 if there is none. */
  at(when, near) {
    const place = before(this.starts, when);
    const past = place < 0 ? Infinity : when - this.ends[place];
    if (past <= 0) return place;
    const ahead = place + 1 < this.starts.length ? this.starts[place + 1] - when : Infinity;
    if (Math.min(past, ahead) > near) return -1;
    return past <= ahead ? place : place + 1;
  }
}

/** A track of one rank, for example its sends, in enough lanes that spans do not overlap. */
class Track {
  constructor(rank, kind, rows) {
    this.rank = rank;
    this.kind = kind;
    this.rows = ordered(rows, rank.start);
    const lanes = [];
    const until = [];
    for (const row of this.rows) {
      let lane = until.findIndex((end) => end <= rank.start[row]);
      if (lane < 0 && lanes.length < LANES) lane = lanes.push([]) - 1;
      if (lane < 0) lane = until.indexOf(Math.min(...until));
      lanes[lane].push(row);
      until[lane] = Math.max(rank.end[row], until[lane] ?? -Infinity);
    }
    this.lanes = lanes.map((own) => new Lane(rank, own));
  }

  /** The lanes' levels in a colouring. */
  levels(colouring) {
    const linked = this.kind === "receive" && this.rank.linked;
    if (this._coloured !== colouring || this._linked !== linked) {
      this._levels = this.lanes.map((lane) => this._of(lane, colouring));
      [this._coloured, this._linked] = [colouring, linked];
    }
    return this._levels;
  }

  _of(lane, colouring, chosen = null) {
    const { rank } = this;
    const starts = [];
    const ends = [];
    const classes = [];
    for (let at = 0; at < lane.rows.length; at += 1) {
      const row = lane.rows[at];
      if (chosen && !chosen.has(row)) continue;
      let start = lane.starts[at];
      const end = lane.ends[at];
      if (this.kind === "receive") {
        const told = !Number.isNaN(rank.left[row]);
        const left = told ? rank.left[row] : end;
        if (left > start) {
          starts.push(start);
          ends.push(left);
          classes.push(told ? WAITING : UNTOLD);
          start = left;
        }
      }
      if (end > start || start === lane.starts[at]) {
        starts.push(start);
        ends.push(end);
        classes.push(rank.hue(row, colouring));
      }
    }
    return new Levels(Float64Array.from(starts), Float64Array.from(ends), Uint8Array.from(classes));
  }

  /** The levels of the given rows only. */
  only(chosen, colouring) {
    return this.lanes.map((lane) => this._of(lane, colouring, chosen));
  }

  /** [lane, row] at a moment. */
  pick(when, lane, near) {
    const own = this.lanes[Math.min(lane, this.lanes.length - 1)];
    const place = own ? own.at(when, near) : -1;
    return place < 0 ? -1 : own.rows[place];
  }

  /** The lane of a row. */
  laneOf(row) {
    const start = this.rank.start[row];
    return Math.max(
      0,
      this.lanes.findIndex((lane) => {
        let place = before(lane.starts, start);
        while (place > 0 && lane.rows[place] !== row && lane.starts[place - 1] === start) place -= 1;
        return lane.rows[place] === row;
      }),
    );
  }

  /** The row that is `by` places after this one. */
  next(row, by) {
    const at = this.rows.indexOf(row) + by;
    return at >= 0 && at < this.rows.length ? this.rows[at] : -1;
  }
}

function ordered(rows, starts) {
  let sorted = true;
  for (let at = 1; at < rows.length && sorted; at += 1) sorted = starts[rows[at - 1]] <= starts[rows[at]];
  return sorted ? rows : rows.sort((a, b) => starts[a] - starts[b] || a - b);
}

/** One rank's spans by row: the effects, then the host's activities. */
export class Rank {
  constructor({ header, columns }) {
    const host = header.host ?? [];
    this.header = header;
    this.number = header.rank;
    this.recorded = columns.kind.length;
    this.stages = header.plan.holders.flatMap((held, stage) => (held.includes(header.rank) ? [stage] : []));
    this.kinds = [...header.kinds.map(kindOf), HOST_KIND];
    const lengthened = (column, more) => (host.length ? concatenated(column, host.map(more)) : column);
    this.kind = lengthened(columns.kind, () => header.kinds.length);
    for (const name of COLUMNS) this[name] = lengthened(columns[name], () => 0);
    this.start = lengthened(columns.start, ([, start]) => start);
    this.end = lengthened(columns.end, ([, , end]) => end);
    this.fromRank = lengthened(columns.from_rank, () => -1);
    this.fromRow = lengthened(columns.from_row, () => -1);
    this.used = columns.used;
    this.bytes = columns.bytes;
    this.memory = {
      at: columns.memory_at,
      bytes: columns.memory,
      most: columns.memory.reduce((a, b) => Math.max(a, b), 0),
    };
    this.left = new Float64Array(this.kind.length).fill(NaN);
    this.linked = 0;
    this.tracks = this._tracks();
    this.begin = this.start.reduce((a, b) => Math.min(a, b), 0);
    this.last = this.end.reduce((a, b) => Math.max(a, b), 0);
  }

  _tracks() {
    const rows = { compute: [], send: [], receive: [], gather: [], scatter: [], offload: [], fetch: [], host: [] };
    for (let row = 0; row < this.kind.length; row += 1) rows[this.kinds[this.kind[row]].track].push(row);
    return Object.fromEntries(Object.entries(rows).map(([kind, own]) => [kind, new Track(this, kind, own)]));
  }

  kindOf(row) {
    return this.kinds[this.kind[row]];
  }

  /** When the memory is at its peak; NaN if it has none. */
  get peak() {
    const { at, bytes, most } = this.memory;
    return at.length ? at[bytes.indexOf(most)] : NaN;
  }

  hue(row, colouring) {
    const kind = this.kindOf(row);
    if (colouring === "kind" || kind.track === "host") return kind.hue;
    return (colouring === "stage" ? this.stage[row] : this.microbatch[row]) % HUES;
  }

  /** The start of an effect's duration; of a receive, the time when its send was posted. */
  begun(row) {
    return Number.isNaN(this.left[row]) ? this.start[row] : this.left[row];
  }

  /** A key of an effect that is the same in other runs; equal effects are told apart by their order. */
  key(row) {
    return this._keys[row];
  }

  /** The row of an effect, -1 if this rank has none. */
  find(key) {
    this._found ??= new Map(this._keys.map((own, row) => [own, row]));
    return this._found.get(key) ?? -1;
  }

  get _keys() {
    if (!this._named) {
      const counts = new Map();
      this._named = Array.from({ length: this.recorded }, (_, row) => {
        const name = [this.kindOf(row).key, ...COLUMNS.map((column) => this[column][row])].join(" ");
        const count = counts.get(name) ?? 0;
        counts.set(name, count + 1);
        return count ? `${name} again ${count}` : name;
      });
    }
    return this._named;
  }
}

function concatenated(column, more) {
  const both = new column.constructor(column.length + more.length);
  both.set(column);
  both.set(more, column.length);
  return both;
}

/** One step of one run: its ranks as they arrive. */
export class Capture {
  /** @param {object} entry of the index */
  constructor(entry) {
    this.entry = entry;
    /** @type {Map<number, Rank>} */
    this.ranks = new Map();
    this.summary = undefined; // null if it can't be had
    this.whatIf = undefined; // what would help; likewise
    this.lost = new Map(); // rank that failed to load -> the reason; null if the summary tells it
    this.tries = 0;
  }

  get unit() {
    return this.entry.unit;
  }

  get label() {
    const { run, step, what } = this.entry;
    return `${run}, step ${step}${what ? `, if ${what} were ideal` : ""}`;
  }

  /** When the first compute of all ranks begins; 0 if there is none. */
  get first() {
    const starts = Array.from(this.ranks.values(), ({ start, tracks }) => start[tracks.compute.rows[0]] ?? Infinity);
    const first = Math.min(...starts);
    return Number.isFinite(first) ? first : 0;
  }

  /** When the first of all effects begins: 0, or before that. */
  get begin() {
    return Math.min(0, ...Array.from(this.ranks.values(), (rank) => rank.begin));
  }

  get last() {
    return Math.max(0, ...Array.from(this.ranks.values(), (rank) => rank.last));
  }

  /** The kinds of all ranks. */
  get kinds() {
    return Array.from(this.ranks.values(), (rank) => rank.kinds).flat();
  }

  get size() {
    return Array.from(this.ranks.values(), (rank) => rank.recorded).reduce((a, b) => a + b, 0);
  }

  /** Whether it is too large to be replayed unasked. */
  get large() {
    return this.size > LARGE;
  }

  /** The ranks that failed to load, by reason: [ranks, reason]. */
  get failures() {
    const reasons = new Map();
    for (const [rank, reason] of this.lost) if (reason) reasons.set(reason, [...(reasons.get(reason) ?? []), rank]);
    return Array.from(reasons, ([reason, ranks]) => [
      `${this.label}, rank${ranks.length > 1 ? "s" : ""} ${ranks.sort((a, b) => a - b).join(", ")}`,
      reason,
    ]);
  }

  /** Leaves out all ranks but those that the summary has; returns whether there were any. */
  keep(numbers) {
    const out = [...this.ranks.keys()].filter((number) => !numbers.includes(number));
    for (const number of out) {
      this.ranks.delete(number);
      this.lost.set(number, null);
    }
    return out.length > 0;
  }

  /** Sets the send time of each receive; needs all ranks. */
  link() {
    for (const rank of this.ranks.values()) {
      for (const row of rank.tracks.receive.rows) {
        const sender = this.ranks.get(rank.fromRank[row]);
        if (!sender || !this.comparable(rank, sender)) continue;
        rank.left[row] = Math.min(Math.max(rank.start[row], sender.start[rank.fromRow[row]]), rank.end[row]);
      }
      rank.linked += 1;
    }
    this._sends = null;
  }

  /** Whether two ranks' times are on the same clock. */
  comparable(one, other) {
    return one === other || Boolean(one.header.clock && other.header.clock);
  }

  /** The span that a span waited for: {rank, row}, or null. */
  cause({ rank, row }) {
    const own = this.ranks.get(rank);
    const from = own ? own.fromRank[row] : -1;
    const there = this.ranks.has(from) && own.fromRow[row] >= 0 && own.fromRow[row] < this.ranks.get(from).recorded;
    return there ? { rank: from, row: own.fromRow[row] } : null;
  }

  /** The compute that ended a gap: {rank, row}, or null after the last. */
  after({ rank, end }) {
    const [lane] = this.ranks.get(rank)?.tracks.compute.lanes ?? [];
    if (!lane) return null;
    const at = before(lane.starts, end);
    const next = lane.starts[at] === end ? at : at + 1;
    return next < lane.rows.length ? { rank, row: lane.rows[next] } : null;
  }

  /** The effect that a gap waited for: the first compute of another rank in the chain of waits, or null. */
  awaited(gap) {
    const chain = WAITS.has(gap.cause) ? this.chain(this.after(gap), 64) : [];
    const compute = ({ rank, row }) => rank !== gap.rank && this.ranks.get(rank).kindOf(row).track === "compute";
    return chain.find(compute) ?? chain[1] ?? null;
  }

  /** The chain of spans that a span waited for, beginning with itself. */
  chain(spot, most = 20_000) {
    const found = [];
    const seen = new Set();
    for (let at = spot; at && found.length < most; at = this.cause(at)) {
      const key = `${at.rank} ${at.row}`;
      if (seen.has(key)) break;
      seen.add(key);
      found.push(at);
    }
    return found;
  }

  /** The receive of a send, or the send of a receive: {rank, row}, or null. */
  partner({ rank, row }) {
    const own = this.ranks.get(rank);
    const kind = own.kindOf(row);
    if (kind.track === "receive") return this.cause({ rank, row });
    if (kind.track !== "send") return null;
    this._sends ??= new Map();
    const peer = own.peer[row];
    if (!this._sends.has(peer)) this._sends.set(peer, this._receipts(peer));
    const receive = this._sends.get(peer).get(`${rank} ${row}`);
    return receive === undefined ? null : { rank: peer, row: receive };
  }

  _receipts(number) {
    const rank = this.ranks.get(number);
    const rows = rank ? Array.from(rank.tracks.receive.rows) : [];
    return new Map(rows.map((row) => [`${rank.fromRank[row]} ${rank.fromRow[row]}`, row]));
  }

  /** A rank's part of the summary. */
  account(rank) {
    return this.summary?.ranks.find((row) => row.rank === rank) ?? null;
  }

  /** A rank's gaps by cause: {start, end, cause}, columns; null if there are none. */
  gaps(rank) {
    const at = this.summary?.gaps ? this.summary.ranks.findIndex((row) => row.rank === rank) : -1;
    return at < 0 ? null : this.summary.gaps[at];
  }
}
