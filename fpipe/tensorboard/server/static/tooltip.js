/** The tooltip of the item under the pointer. */

import { facts, gapFacts, gapTitle, heldAt, title } from "./details.js";
import { card, shortened } from "./dom.js";
import { bytes, time } from "./format.js";

/** @returns {Node[] | null} for the result of `pick` */
export function told({ main, other }, twin, { track, spot, gap, when }) {
  if (spot) {
    const capture = spot.other ? other : main;
    return card(title(capture.ranks.get(spot.rank), spot.row), facts(capture, spot, twin(spot)), capture.entry.kind);
  }
  if (gap) return card(gapTitle(gap), gapFacts(gap.other ? other : main, gap));
  return when === undefined ? null : card("memory", held(track, when, main.unit));
}

function held({ rank }, when, unit) {
  return [
    ["rank", String(rank.number)],
    ["at", time(when, unit, 6)],
    ["holds", bytes(heldAt(rank, when))],
    ["peak", bytes(rank.memory.most)],
  ];
}

/** The details of a rank. */
export function about(rank) {
  const { clock, device, peak } = rank.header;
  const known = [
    ["stages", rank.stages.join(", ")],
    ["effects", String(rank.recorded)],
  ];
  if (device) known.push(["device", shortened(device)]);
  if (peak) known.push(["peak memory", `${bytes(peak[0])}, of the ${peak[1]}`]);
  if (!clock) known.push(["clock", "not compared: drawn from its own first start"]);
  else if (clock.uncertainty) known.push(["clock", `within ${time(clock.uncertainty, "s", 2)} of rank 0's`]);
  return card(`rank ${rank.number}`, known);
}
