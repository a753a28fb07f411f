/** What effects are called. */

import { HOST } from "./palette.js";

/** Each kind's track, letter and class of colour; the keys are the kinds of a header. */
export const KINDS = {
  Forward: { track: "compute", letter: "F", name: "forward", hue: 0 },
  BackwardInput: { track: "compute", letter: "I", name: "input gradient", hue: 1 },
  BackwardWeight: { track: "compute", letter: "W", name: "weight gradient", hue: 2 },
  Backward: { track: "compute", letter: "B", name: "backward", hue: 3 },
  "Overlap Backward": { track: "compute", letter: "&", name: "overlap", hue: 4, second: "B" },
  "Overlap BackwardInput": { track: "compute", letter: "&", name: "overlap", hue: 4, second: "I" },
  Reduce: { track: "host", letter: "R", name: "reduce", hue: HOST },
  Host: { track: "host", letter: "H", name: "host", hue: HOST },
  "Send Activation": { track: "send", letter: "S", name: "send", hue: 0, value: "activation" },
  "Send Gradient": { track: "send", letter: "S", name: "send", hue: 3, value: "gradient" },
  "Send WeightGradient": { track: "send", letter: "S", name: "send", hue: 2, value: "weight gradient" },
  "Recv Activation": { track: "receive", letter: "R", name: "receive", hue: 0, value: "activation" },
  "Recv Gradient": { track: "receive", letter: "R", name: "receive", hue: 3, value: "gradient" },
  "Recv WeightGradient": { track: "receive", letter: "R", name: "receive", hue: 2, value: "weight gradient" },
};
export const UNKNOWN = { track: "host", letter: "?", name: "unknown", hue: HOST };

/** a to z, then aa, ab, as the columns of a spreadsheet. */
function letters(number) {
  const last = String.fromCharCode(97 + (number % 26));
  return number < 26 ? last : letters(Math.floor(number / 26) - 1) + last;
}

function part(rank, stage, microbatch, letter) {
  return `${letter}${microbatch}${rank.stages.length > 1 ? letters(rank.stages.indexOf(stage)) : ""}`;
}

/** An effect's name as on its box: "F3", of a rank with several stages "F3a", of an overlap "F7b&B5a". */
export function short(rank, row) {
  const kind = rank.kindOf(row);
  const [stage, microbatch] = [rank.stage[row], rank.microbatch[row]];
  if (kind.second) {
    return `${part(rank, stage, microbatch, "F")}&${part(rank, rank.other[row], rank.second[row], kind.second)}`;
  }
  if (kind.track === "compute") return part(rank, stage, microbatch, kind.letter);
  if (kind === KINDS.Host) return rank.header.host[row - rank.recorded][0];
  if (kind === KINDS.Reduce) return `reduce ${stage}`;
  if (kind.value === "weight gradient") return `${kind.name} weight gradient ${stage}`;
  return kind.value ? `${kind.name} ${kind.value} ${microbatch}` : kind.name;
}

/** What is on a box that has no room for its name, longest first. */
export function mark(rank, row) {
  const kind = rank.kindOf(row);
  if (kind.value) return [String(rank.microbatch[row])];
  if (kind.track !== "compute") return [];
  return kind.second ? [kind.letter] : [`${kind.letter}${rank.microbatch[row]}`, kind.letter];
}

/** The value that a send or receive carries. */
export function value(rank, row) {
  const kind = rank.kindOf(row);
  const [stage, microbatch, other] = [rank.stage[row], rank.microbatch[row], rank.other[row]];
  if (kind.value === "activation") return `activation of stage ${stage}, microbatch ${microbatch}`;
  if (kind.value === "gradient")
    return `gradient of stage ${stage}'s output from stage ${other}, microbatch ${microbatch}`;
  return kind.value ? `weight gradient of stage ${stage} from rank ${other}` : "";
}

/** An effect and where it is. */
export const full = (rank, row) => `${short(rank, row)} on rank ${rank.number}`;
