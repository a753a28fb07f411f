/** A heat map: rows of ranks, each cell coloured by how far its value is from the median of all cells. */

import { element } from "./dom.js";
import { percent } from "./format.js";
import { theme } from "./palette.js";
import { median } from "./trend.js";

const LEAST = 0.02; // share of the median at which the colour is at its end, at least
const TALL = [3, 16]; // pixels of a row, at least and at most
const HEIGHT = 220; // pixels of the map, where rows need not be smaller
const WIDTH = 560;
const COLUMNS = 2 * WIDTH; // at most; of more, a cell is the mean of several
const SPREAD = 0.98; // the share of the cells whose colours are not cut

/**
 * @param {object} map
 * @param {string} map.name of the map
 * @param {number[]} map.ranks the rows
 * @param {number[]} map.columns the numbers of the columns
 * @param {(rank: number, column: number) => number} map.value by places; NaN for none
 * @param {(row: number, column: number, value: number, share: string) => string} map.text of a cell
 * @param {(row: number, column: number) => void} map.press
 * @param {boolean} map.dark
 * @returns {Node[]}
 */
export function heat({ name, ranks, columns, value, text, press, dark }) {
  const each = Math.ceil(columns.length / COLUMNS); // columns of a cell
  const wide = Math.ceil(columns.length / each);
  const cells = Float64Array.from({ length: ranks.length * wide }, (_, at) => {
    const [row, first] = [Math.floor(at / wide), (at % wide) * each];
    return mean(columns.slice(first, first + each).map((_, past) => value(row, first + past)));
  });
  const known = cells.filter(Number.isFinite);
  const typical = median(known);
  if (!(typical > 0)) return [element("h4", {}, name), element("p", {}, "Half of the cells are empty: nothing to compare.")];
  const off = Float64Array.from(known, (cell) => Math.abs(cell / typical - 1)).sort();
  const most = Math.max(LEAST, off[Math.floor((off.length - 1) * SPREAD)] ?? 0);
  const canvas = drawn(cells, ranks.length, wide, (cell) => cell / typical - 1, most, dark);
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${name}: ${ranks.length} ranks, ${columns.length} columns; the table has the figures`);
  const said = element("output", { class: "faint" }, "Move over the map; a click goes there.");
  const place = (event) => {
    const { width, height, left, top } = canvas.getBoundingClientRect();
    const share = (at, of, count) => Math.max(0, Math.min(count - 1, Math.floor((at / of) * count)));
    return [share(event.clientY - top, height, ranks.length), share(event.clientX - left, width, wide)];
  };
  canvas.addEventListener("pointermove", (event) => {
    const [row, column] = place(event);
    const cell = cells[row * wide + column];
    const by = cell / typical - 1;
    const share = `${percent(Math.abs(by))} ${by < 0 ? "below" : "above"} the median`;
    const mixed = each > 1 ? `; the mean from there to ${columns[Math.min(columns.length, (column + 1) * each) - 1]}` : "";
    const there = Number.isFinite(cell);
    said.textContent = there ? `${text(row, column * each, cell, share)}${mixed}` : `rank ${ranks[row]}: none`;
  });
  canvas.addEventListener("click", (event) => {
    const [row, column] = place(event);
    press(row, column * each);
  });
  return [
    element("h4", {}, name),
    element(
      "div",
      { class: "heat" },
      element("span", { class: "faint rows" }, element("span", {}, `rank ${ranks[0]}`), ends(ranks)),
      element("span", {}, canvas, element("span", { class: "faint columns" }, String(columns[0]), ends(columns, ""))),
      scale(most, dark),
    ),
    said,
  ];
}

/** The mean of the numbers among some; NaN if there is none. */
function mean(values) {
  const known = values.filter(Number.isFinite);
  return known.length ? known.reduce((sum, one) => sum + one, 0) / known.length : NaN;
}

const ends = (list, what = "rank ") => (list.length > 1 ? element("span", {}, `${what}${list.at(-1)}`) : null);

function drawn(cells, rows, columns, share, most, dark) {
  const wide = Math.max(0.5, Math.min(24, WIDTH / columns));
  const tall = Math.max(TALL[0], Math.min(TALL[1], Math.floor(HEIGHT / rows)));
  const canvas = element("canvas", { width: columns, height: rows });
  Object.assign(canvas.style, { width: `${wide * columns}px`, height: `${tall * rows}px` });
  const context = canvas.getContext("2d");
  const image = new ImageData(columns, rows);
  cells.forEach((cell, at) => {
    if (Number.isFinite(cell)) image.data.set([...colour(share(cell) / most, dark), 255], 4 * at);
  });
  context.putImageData(image, 0, 0);
  return canvas;
}

/** A colour between blue, for -1, the ground, and red, for 1: blue and red differ for colour-blind eyes too. */
function colour(share, dark) {
  const { heat: ends } = theme(dark);
  const end = share < 0 ? ends.below : ends.above;
  const part = Math.min(1, Math.abs(share));
  return ends.middle.map((from, at) => Math.round(from + (end[at] - from) * part));
}

function scale(most, dark) {
  const css = (share) => `rgb(${colour(share, dark).join()})`;
  const least = Math.min(most, 1); // nothing is further below the median
  const style = `background:linear-gradient(to top, ${[-least / most, 0, 1].map(css).join()})`;
  return element(
    "span",
    { class: "scale faint" },
    element("i", { style }),
    element("span", {}, `+${percent(most)}`),
    element("span", {}, "median"),
    element("span", {}, `−${percent(least)}`),
  );
}
