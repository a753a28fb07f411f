/**
 * The share of each pixel's time that a lane is busy, by class.
 *
 * Intervals are sorted and do not overlap. Prefix sums by class give the busy time between any two moments after a
 * search, so the cost of a lane depends on its pixels, not on its number of intervals. The opacity of a pixel is its
 * busy share, so short intervals and short gaps stay visible.
 */

import { classes as classCount } from "./palette.js";

const SEEN = 0.14; // least opacity of a pixel with any busy time
const MOMENT = 0.6; // opacity of a pixel with an interval of length 0
const OPEN = 0.9; // largest opacity of a pixel with any idle time
const FULL = 1 - 1e-4;

/** The last index at or before `when`, -1 if there is none. */
export function before(times, when, low = 0, high = times.length) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] <= when) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

export class Levels {
  /**
   * @param {Float64Array} starts in order
   * @param {Float64Array} ends not after the next start
   * @param {Uint8Array} classes indices in a list of colours
   */
  constructor(starts, ends, classes) {
    this.starts = starts;
    this.ends = ends;
    const place = new Int8Array(classCount()).fill(-1);
    this.present = [];
    for (const found of classes) if (place[found] < 0) place[found] = this.present.push(found) - 1;
    const width = this.present.length;
    this.places = new Uint8Array(classes.length);
    this.sums = new Float64Array((classes.length + 1) * width);
    for (let at = 0; at < classes.length; at += 1) {
      const own = (this.places[at] = place[classes[at]]);
      for (let c = 0; c < width; c += 1) this.sums[(at + 1) * width + c] = this.sums[at * width + c];
      this.sums[(at + 1) * width + own] += ends[at] - starts[at];
    }
  }

  /** Busy time by class up to a moment, given the last interval that starts by then. */
  _until(when, at, into) {
    const width = this.present.length;
    if (at < 0) return into.fill(0);
    for (let c = 0; c < width; c += 1) into[c] = this.sums[at * width + c];
    into[this.places[at]] += Math.min(when, this.ends[at]) - this.starts[at];
    return into;
  }

  /** The last interval that starts by a moment: an exponential search from an earlier one. */
  _on(from, when) {
    const { starts } = this;
    let low = from + 1;
    let step = 1;
    while (low + step <= starts.length && starts[low + step - 1] <= when) {
      low += step;
      step *= 2;
    }
    return before(starts, when, low, Math.min(low + step, starts.length));
  }

  /** Busy time between two moments. */
  busy(from, to) {
    const into = new Float64Array(this.present.length);
    const total = (when) => this._until(when, before(this.starts, when), into).reduce((sum, part) => sum + part, 0);
    return total(to) - total(from);
  }

  /** Adds to each of equally long intervals its busy share. */
  add(shares, from, each) {
    const into = new Float64Array(this.present.length);
    const total = () => into.reduce((sum, part) => sum + part, 0);
    let at = before(this.starts, from);
    this._until(from, at, into);
    let last = total();
    for (let x = 0; x < shares.length; x += 1) {
      const when = from + (x + 1) * each;
      at = this._on(at, when);
      this._until(when, at, into);
      const next = total();
      shares[x] += (next - last) / each;
      last = next;
    }
  }

  /**
   * Writes one row of pixels.
   *
   * @param {Uint32Array} pixels red in the lowest byte
   * @param {number} offset of the row's first pixel
   * @param {number} width in pixels
   * @param {number} from the time at the row's left
   * @param {number} each the time that one pixel takes
   * @param {number[]} colours by class, as in `pixels`, without opacity
   * @param {number} strength the opacity of a pixel that is busy all the time
   */
  paint(pixels, offset, width, from, each, colours, strength = 1) {
    const count = this.present.length;
    if (!count || from + width * each < this.starts[0] || from > this.ends.at(-1)) return;
    let last = new Float64Array(count);
    let next = new Float64Array(count);
    let at = before(this.starts, from);
    this._until(from, at, last);
    for (let x = 0; x < width; x += 1) {
      const when = from + (x + 1) * each;
      const was = at;
      at = this._on(at, when);
      this._until(when, at, next);
      let sum = 0;
      let most = 0;
      let dominant = 0;
      for (let c = 0; c < count; c += 1) {
        const part = next[c] - last[c];
        sum += part;
        if (part > most) {
          most = part;
          dominant = c;
        }
      }
      if (most > 0) {
        const share = sum / each;
        const alpha = share >= FULL ? 1 : Math.max(SEEN, Math.min(OPEN, share));
        pixels[offset + x] = colours[this.present[dominant]] | ((alpha * strength * 255) << 24);
      } else if (at > was)
        pixels[offset + x] = colours[this.present[this.places[at]]] | ((MOMENT * strength * 255) << 24);
      [last, next] = [next, last];
    }
  }
}
