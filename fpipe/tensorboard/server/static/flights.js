/** Flights: what the ranks of a job did last, and why it hangs or has ended. */

import { element, named, shortened, table } from "./dom.js";
import * as routes from "./routes.js";

const MANY = 64; // ranks whose files are read again at each look, and whose rows are shown
const FINAL = new Set(["gone"]); // causes that no longer change
const FAULTS = new Set(["gone", "failed", "stopped", "silent", "deadlock", "lost"]);
const SENTENCE = /^.*?(\.(?= )|$)/su; // the first one
const TURNING = { step: "the step begins", end: "the step has ended" };

export class Flights {
  /** @param {() => void} changed called when another flight, or more of it, is shown */
  constructor(notices, changed) {
    [this.notices, this.changed] = [notices, changed];
    this.shown = null; // the newest flight of the experiment, as the server tells it
  }

  /**
   * Shows the newest flight of an experiment; of all, where it is null.
   *
   * @param {{experiment: string, name: string}[]} listed the newest of each experiment first
   */
  async show(listed, experiment) {
    const own = listed.filter((one) => experiment === null || one.experiment === experiment);
    const newest = own.reduce((last, one) => (!last || one.name > last.name ? one : last), null);
    const key = JSON.stringify([newest?.experiment, newest?.name, experiment]);
    const again = this.shown && this.shown.ranks.length <= MANY && !FINAL.has(this.shown.cause);
    if (key === this.key && !again) return;
    this.key = key;
    const flight = newest && (await this._read(newest));
    if (flight === undefined) return void (this.key = null); // it is asked for again at the next look
    if (key !== this.key || JSON.stringify(flight) === JSON.stringify(this.shown)) return;
    this.shown = flight;
    const fault = flight && FAULTS.has(flight.cause);
    this.notices.tell("flight", fault ? [`${flight.text.match(SENTENCE)[0]} See “Last effects”.`] : []);
    this.changed();
  }

  async _read(flight) {
    try {
      return await routes.flight(flight);
    } catch (error) {
      if (error.status === 404) return null;
      this.notices.tell("flight", [error.message]);
      return undefined;
    }
  }
}

/** The explanation of a flight, a row for each rank, and the last records of each. */
export function flightContent(flight) {
  const when = flight.copied ? ` as of ${clock(flight.copied)}` : "";
  const ranks = ordered(flight).slice(0, MANY);
  const more = flight.ranks.length > ranks.length ? `, ${ranks.length} of ${flight.ranks.length} ranks` : "";
  const rows = ranks.map((rank) => {
    const last = rank.records.at(-1);
    const mark = flight.at.includes(rank.process) ? "b" : "span";
    return [
      element(mark, {}, named(rank.name)),
      rank.outcome === "open" ? rank.state : rank.outcome,
      last ? last.step : "",
      element("span", { class: "left" }, last ? named(recordText(last), 80) : "nothing yet"),
      last ? clock(last.begin) : "",
      last && last.kind === "wait" && last.end === null ? named(awaited(flight, last), 40) : "",
    ];
  });
  const head = ["rank", "state", "step", "last record", "at", "waits for"];
  return [
    element("p", {}, named(flight.text, 4000)),
    table(`Job ${shortened(flight.name, 80)}${when}${more}`, head, rows),
    ...ranks.map(records),
  ];
}

/** Those at fault first, then those that wait nearest to them. */
function ordered({ ranks, at, chains }) {
  const place = ({ process }) => (at.includes(process) ? 0 : (chains[process]?.length ?? Infinity));
  const near = (one, other) => (place(one) === place(other) ? one.process - other.process : place(one) - place(other));
  return ranks.length > MANY ? [...ranks].sort(near) : ranks;
}

function awaited({ ranks }, { peer }) {
  return peer === null ? "any rank" : (ranks.find((rank) => rank.process === peer)?.name ?? `process ${peer}`);
}

function records({ name, host, pid, reason, records: last }) {
  const rows = last.map((record) => [
    clock(record.begin),
    record.step,
    element("span", { class: "left" }, named(recordText(record), 120)),
    record.kind === "wait" ? (record.end === null ? "still waits" : `${(1e3 * (record.end - record.begin)).toFixed(1)} ms`) : "",
  ]);
  return element(
    "details",
    {},
    element("summary", {}, named(name), `: process ${pid} on `, named(host)),
    reason ? element("p", {}, named(reason, 600)) : null,
    table("Last records", ["at", "step", "record", "waited"], rows),
  );
}

const recordText = ({ kind, text }) => TURNING[kind] ?? text;

/** A time of day, in milliseconds. */
function clock(seconds) {
  const at = new Date(1e3 * seconds);
  const two = (number) => String(number).padStart(2, "0");
  const parts = [at.getHours(), at.getMinutes(), at.getSeconds()].map(two);
  return `${parts.join(":")}.${String(at.getMilliseconds()).padStart(3, "0")}`;
}
