/** Calls of the plugin's routes. Each throws `Refused` with the server's reason. */

import { parse } from "./columns.js";
import { ask, place } from "./server.js";

const HELD = 1 << 24; // bytes of an export

/** @property {number} status of the answer; for ranks and summaries, 422 is a file that the server can't read */
class Refused extends Error {
  constructor(reason, status = 0) {
    super(reason);
    this.status = status;
  }
}

/** The server was not there. */
export class Unanswered extends Refused {}

async function answer(route, query, signal) {
  const url = place(route);
  for (const [name, value] of Object.entries(query)) url.searchParams.set(name, String(value));
  let response;
  try {
    response = await ask(url, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unanswered(`TensorBoard does not answer (${error.message}): is it still running?`);
  }
  if (response.ok) return response;
  const reason = (await response.text()).slice(0, 500).trim();
  throw new Refused(reason || `${route}: ${response.status} ${response.statusText}`, response.status);
}

const json = async (...given) => (await answer(...given)).json();

/** All captures. */
export const index = (signal) => json("index", {}, signal);

/** What the ranks of a job did last. */
export const flight = ({ experiment, name }, signal) => json("flight", { experiment, name }, signal);

/** The parameters that name a capture; with `what`, one in which that is ideal. */
const named = ({ run, step, what }) => (what ? { run, step, what } : { run, step });

/** The summary of a capture. */
export const summary = (entry, signal) => json("summary", named(entry), signal);

/** The figures of steps of a run: of each, or why there are none. */
export const steps = (run, numbers) => json("steps", { run, steps: numbers.join() });

/** What would help a capture. */
export const whatIf = ({ run, step }, signal) => json("what_if", { run, step }, signal);

/** The comparison of two captures. */
export const compare = ({ run, step }, other, signal) => {
  const what = other.what ? { other_what: other.what } : {};
  return json("compare", { run, step, other: other.run, other_step: other.step, ...what }, signal);
};

/** One rank's header and columns. */
export async function rank(entry, number, signal) {
  return parse(await (await answer("rank", { ...named(entry), rank: number }, signal)).arrayBuffer());
}

/**
 * A capture in another program's format.
 *
 * @param {AbortSignal} signal ends it
 * @param {(share: number) => void} told how much of it is there
 */
export async function exported({ run, step }, format, signal, told) {
  const response = await answer("export", { run, step, format }, signal);
  const lines = Number(response.headers.get("Fpipe-Lines"));
  const reader = response.body.getReader();
  let [parts, bytes, line] = [[], 0, 0];
  for (let { done, value } = await reader.read(); !done; { done, value } = await reader.read()) {
    parts.push(value);
    bytes += value.length;
    if (bytes > HELD) [parts, bytes] = [[new Blob(parts)], 0]; // which the browser may keep on disk
    for (let at = value.indexOf(10); at >= 0; at = value.indexOf(10, at + 1)) line += 1;
    told(lines ? Math.min(1, line / lines) : 0);
  }
  return new Blob(parts);
}
