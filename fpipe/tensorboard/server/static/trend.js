/** Drift and outliers of a figure over steps, by estimates that a few outliers do not move. */

const NOTABLE = 0.03; // share of the median from which a deviation is told
const NOISE = 4; // deviations of the noise from which one is told
const FEWEST = 5; // steps that a drift needs
const MOST = 60; // steps between which slopes are taken; of more, evenly spaced ones

export function median(values) {
  const sorted = Float64Array.from(values).sort();
  const middle = sorted.length >> 1;
  if (!sorted.length) return NaN;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/**
 * The drift of values over steps, and the steps that stand out of it. The line is Theil's and Sen's: the median of the
 * slopes between all pairs. Noise is the median deviation from it, scaled as for a normal distribution.
 *
 * @param {number[]} steps in order
 * @param {number[]} values NaN where there is none
 * @returns {{drift: number, outliers: {at: number, by: number}[]}} shares: the change from the first step to the last,
 *   0 if it is not notable; and by how much a value is above the line
 */
export function trend(steps, values) {
  const known = values.flatMap((value, at) => (Number.isFinite(value) ? [at] : []));
  const typical = median(known.map((at) => values[at]));
  if (known.length < 3 || !(typical > 0)) return { drift: 0, outliers: [] };
  const slope = known.length < FEWEST ? 0 : middleSlope(steps, values, thinned(known));
  const level = median(known.map((at) => values[at] - slope * steps[at]));
  const off = known.map((at) => values[at] - level - slope * steps[at]);
  const noise = 1.4826 * median(off.map(Math.abs));
  const change = slope * (steps[known.at(-1)] - steps[known[0]]);
  const notable = (by) => Math.abs(by) > Math.max(NOTABLE * typical, NOISE * noise);
  const outliers = known.flatMap((at, place) => (notable(off[place]) ? [{ at, by: off[place] / typical }] : []));
  return { drift: notable(change) ? change / typical : 0, outliers };
}

function middleSlope(steps, values, places) {
  const slopes = [];
  for (let i = 0; i < places.length; i += 1) {
    for (let j = i + 1; j < places.length; j += 1) {
      const [a, b] = [places[i], places[j]];
      slopes.push((values[b] - values[a]) / (steps[b] - steps[a]));
    }
  }
  return median(slopes);
}

const thinned = (places) =>
  places.length <= MOST
    ? places
    : Array.from({ length: MOST }, (_, at) => places[Math.round((at * (places.length - 1)) / (MOST - 1))]);
