/** The names of effects, from the kinds in a header. */

import { HOST, hueOf } from "./palette.js";

/**
 * @typedef {object} Kind effects of one kind
 * @property {string} key its name in the header
 * @property {string} name the shown name
 * @property {string} letter
 * @property {string} track
 * @property {number} hue its class of colour
 * @property {{letter: string, label: string, letters: string[], labels: string[], stage?: string, microbatch?: string,
 *   slice?: string}[]} parts of a compute: itself, or the two of an overlap, with all letters and names that find it, and
 *   the columns that have its numbers
 * @property {string} [value] name of the value that it carries
 * @property {Record<string, string>} columns its own numbers, or its value's: field -> column
 */

/** The kind of the host's activities around the effects. */
export const HOST_KIND = { key: "Host", name: "host", letter: "H", track: "host", hue: HOST, parts: [], columns: {} };

/** @returns {Kind} a kind of a header */
export function kindOf({ name, label, letter, track, colour, parts: described = [], value, fields }) {
  const parts = described.map((part) => ({
    ...part,
    letters: [letter, part.letter, ...(part.part_of ?? [])],
    labels: [label, part.label, ...(part.whole ?? [])],
  }));
  const [{ stage, microbatch } = {}, second] = parts;
  const carried = Object.values(fields).find((field) => typeof field === "object")?.fields;
  const columns = second ? { stage, microbatch } : carried ?? fields;
  const hue = hueOf(value?.colour ?? colour);
  return { key: name, name: label, letter, track, hue, parts, value: value?.label, columns };
}

/** a to z, then aa, ab, as the columns of a spreadsheet. */
function letters(number) {
  const last = String.fromCharCode(97 + (number % 26));
  return number < 26 ? last : letters(Math.floor(number / 26) - 1) + last;
}

/** The number of an effect's microbatch, and of its slice where the plan has slices: "3", "3.1". */
function which(rank, row, { microbatch, slice }) {
  return `${microbatch ? rank[microbatch][row] : ""}${slice ? `.${rank[slice][row]}` : ""}`;
}

function part(rank, row, { letter, stage, ...numbers }) {
  const chunk = stage && rank.stages.length > 1 ? letters(rank.stages.indexOf(rank[stage][row])) : "";
  return `${letter}${which(rank, row, numbers)}${chunk}`;
}

/** An effect's name as on its box: "F3", of a rank with several stages "F3a", of an overlap "F7b&B5a". */
export function short(rank, row) {
  const kind = rank.kindOf(row);
  if (kind.parts.length) return kind.parts.map((each) => part(rank, row, each)).join("&");
  if (kind === HOST_KIND) return rank.header.host[row - rank.recorded][0];
  const { stage, microbatch } = kind.columns;
  if (!kind.value) return stage ? `${kind.name} ${rank[stage][row]}` : kind.name;
  const number = microbatch ? ` ${which(rank, row, kind.columns)}` : stage ? ` ${rank[stage][row]}` : "";
  return `${kind.name} ${kind.value}${number}`;
}

/** Shorter labels for a box that is too narrow for the name, longest first. */
export function mark(rank, row) {
  const kind = rank.kindOf(row);
  if (kind.value) return kind.columns.microbatch ? [which(rank, row, kind.columns)] : [];
  if (kind.track !== "compute") return [];
  const { microbatch } = kind.columns;
  return microbatch ? [`${kind.letter}${which(rank, row, kind.columns)}`, kind.letter] : [kind.letter];
}

const PREPOSITIONS = { stage: " of stage", consumer: " from stage", rank: " from rank" };

/** The value that a send or receive carries. */
export function value(rank, row) {
  const kind = rank.kindOf(row);
  if (!kind.value) return "";
  const numbers = Object.entries(kind.columns).map(([field, column]) => {
    return `${PREPOSITIONS[field] ?? `, ${field}`} ${rank[column][row]}`;
  });
  return `${kind.value}${numbers.join("")}`;
}

/** The name of an effect with its rank. */
export const full = (rank, row) => `${short(rank, row)} on rank ${rank.number}`;
