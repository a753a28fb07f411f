/**
 * Draws the timeline. A lane is a row of pixels by coverage, one pixel high, stretched to its height; boxes that are
 * wide enough get an edge and a label.
 */

import { ticks } from "./format.js";
import { axis, gutter } from "./gutter.js";
import { boxOf } from "./layout.js";
import { before, Levels } from "./levels.js";
import { AXIS, FONT, TICK } from "./measures.js";
import { mark, short } from "./names.js";
import { causeClass, colours, GROUND, inks, packed, PATTERNS } from "./palette.js";

const EDGED = 4; // pixels: width from which a box has an edge
const ARROWS = 100; // at most; more are not readable
const DIMMED = 0.22;

const CLASSES = PATTERNS.map((_, at) => at); // in place of colours

export class Scene {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.strip = document.createElement("canvas");
    this.gaps = new WeakMap();
  }

  /**
   * @param {object} state
   * @param {import("./view.js").View} state.view
   * @param {{groups: import("./layout.js").Group[]}} state.layout
   * @param {number} state.scroll the height that is above the canvas
   */
  draw(state) {
    const { width, height, ratio, theme, layout, scroll } = state;
    const { context } = this;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = theme.page;
    context.fillRect(0, 0, width, height);
    const groups = layout.groups.filter((group) => group.y + group.height > scroll && group.y < scroll + height - AXIS);
    const shift = AXIS - scroll;
    this._backgrounds(state, groups, shift);
    if (state.causes) this._idle(state, groups, shift);
    this._lanes(state, groups, shift);
    context.save();
    this._clip(state);
    for (const group of groups) {
      for (const track of group.tracks) if (track.kind !== "memory") this._boxes(state, track, shift);
    }
    if (state.arrows) this._arrows(state, groups, shift);
    for (const group of groups) {
      for (const track of group.tracks) if (track.kind === "memory") this._memory(state, track, shift);
    }
    context.restore();
    gutter(context, state, groups, shift);
    axis(context, state);
  }

  _clip({ view, height }) {
    this.context.beginPath();
    this.context.rect(view.left, AXIS, view.width, height - AXIS);
    this.context.clip();
  }

  _backgrounds({ view, theme, height }, groups, shift) {
    const { context } = this;
    context.fillStyle = theme.track;
    for (const { tracks } of groups) {
      for (const track of tracks)
        if (track.kind !== "memory") context.fillRect(view.left, track.y + shift, view.width, track.height);
    }
    context.fillStyle = theme.grid;
    for (const { at } of ticks(view.from, view.to, TICK / view.scale)) {
      context.fillRect(Math.round(view.x(at)), AXIS, 1, height - AXIS);
    }
    context.fillStyle = theme.line;
    for (const group of groups) context.fillRect(0, group.y + group.height + shift - 1, view.left + view.width, 1);
  }

  /** Paints the rows of all visible lanes, then stretches each to its height. */
  _lanes({ view, viewOf, ratio, theme, colouring, matches }, groups, shift) {
    const columns = Math.ceil(view.width * ratio);
    const own = packed(colours(theme));
    const rows = [];
    for (const track of groups.flatMap((group) => group.tracks)) {
      if (track.kind === "memory") continue;
      const chosen = matches?.levels(track.rank, track.kind, colouring);
      const { from } = viewOf(track.other);
      const lanes = track.rank.tracks[track.kind].levels(colouring);
      const tall = track.height / lanes.length;
      lanes.forEach((levels, lane) => {
        rows.push([levels, from, matches ? DIMMED : 1, track.y + lane * tall, tall]);
        if (chosen) rows.push([chosen[lane], from, 1, track.y + lane * tall, tall]);
      });
    }
    if (!rows.length || !columns) return;
    const pixels = this._cleared(columns, rows.length);
    rows.forEach(([levels, from, strength], at) => {
      levels.paint(pixels, at * columns, columns, from, view.span / (view.width * ratio), own, strength);
    });
    this.strip.getContext("2d").putImageData(this.image, 0, 0);
    this.context.imageSmoothingEnabled = false;
    rows.forEach(([, , , y, tall], at) => {
      const bottom = tall > 6 && tall < 12 ? 1 : 0; // between lanes
      this.context.drawImage(this.strip, 0, at, columns, 1, view.left, y + shift, columns / ratio, tall - bottom);
    });
  }

  _cleared(columns, rows) {
    if (this.strip.width !== columns || this.strip.height < rows) {
      this.strip.width = columns;
      this.strip.height = Math.max(rows, this.strip.height);
      this.image = new ImageData(columns, this.strip.height);
      this.pixels = new Uint32Array(this.image.data.buffer);
    } else this.pixels.fill(0, 0, columns * rows);
    return this.pixels;
  }

  /** Paints the idle time of each rank: a row by coverage, repeated for the rows of the patterns of its causes. */
  _idle({ view, viewOf, ratio, theme, matches }, groups, shift) {
    const columns = Math.ceil(view.width * ratio);
    const computes = groups.flatMap((group) => group.tracks).filter(({ kind }) => kind === "compute");
    const tracks = computes.filter((track) => this._gaps(track));
    if (!tracks.length || !columns) return;
    const [ink, side] = [packed(inks(theme)), PATTERNS[0].length];
    const wide = Math.max(1, Math.round(ratio)); // device pixels of one of a pattern
    const begin = Math.floor(view.from * view.scale * ratio); // patterns move with the time
    const pixels = this._cleared(columns, tracks.length * side);
    const row = new Uint32Array(columns);
    tracks.forEach((track, at) => {
      const levels = this._gaps(track);
      row.fill(0);
      const { from } = viewOf(track.other);
      levels.paint(row, 0, columns, from, view.span / (view.width * ratio), CLASSES, matches ? DIMMED : 1);
      for (let x = 0; x < columns; x += 1) {
        if (!row[x]) continue;
        const [cause, alpha] = [row[x] & 0xff, row[x] >>> 24];
        const across = ((Math.floor((x + begin) / wide) % side) + side) % side;
        for (let y = 0; y < side; y += 1) {
          const share = PATTERNS[cause][y][across] ? alpha : alpha * GROUND;
          pixels[(at * side + y) * columns + x] = ink[cause] | (share << 24);
        }
      }
    });
    this.strip.getContext("2d").putImageData(this.image, 0, 0);
    this.context.imageSmoothingEnabled = false;
    const tall = (side * wide) / ratio;
    tracks.forEach(({ y, height }, at) => {
      for (let top = 0; top < height; top += tall) {
        const part = Math.min(1, (height - top) / tall);
        const place = [view.left, y + top + shift, columns / ratio, part * tall];
        this.context.drawImage(this.strip, 0, at * side, columns, part * side, ...place);
      }
    });
  }

  _gaps({ capture, rank }) {
    const gaps = capture.gaps(rank.number);
    if (!gaps) return null;
    if (!this.gaps.has(gaps)) {
      const classes = Uint8Array.from(gaps.cause, causeClass);
      this.gaps.set(gaps, new Levels(Float64Array.from(gaps.start), Float64Array.from(gaps.end), classes));
    }
    return this.gaps.get(gaps);
  }

  /** Edges and labels of the boxes that are wide enough. */
  _boxes({ viewOf, theme, matches }, track, shift) {
    const { context } = this;
    const view = viewOf(track.other);
    const lanes = track.rank.tracks[track.kind].lanes;
    const tall = track.height / (lanes.length || 1);
    const labels = [];
    context.fillStyle = theme.edge;
    lanes.forEach((lane, at) => {
      if (lane.longest * view.scale < EDGED) return;
      const y = track.y + at * tall + shift;
      const until = before(lane.starts, view.to) + 1;
      for (let place = Math.max(0, before(lane.starts, view.from)); place < until; place += 1) {
        const wide = (lane.ends[place] - lane.starts[place]) * view.scale;
        if (wide < EDGED || lane.ends[place] < view.from) continue;
        const x = view.x(lane.ends[place]);
        context.fillRect(Math.round(x) - 1, y, 1, tall - (tall < 12 ? 1 : 0));
        if (wide >= 9 && (!matches || matches.has(track.rank, lane.rows[place])))
          labels.push([lane, place, y]);
      }
    });
    if (tall < 9) return;
    const size = Math.min(11, Math.round(tall * 0.62) + (tall < 12 ? 2 : 0));
    context.font = `${size}px ${FONT}`;
    context.textBaseline = "middle";
    context.textAlign = "center";
    const letter = context.measureText("F0").width / 2;
    for (const [lane, place, y] of labels) {
      const start = Math.max(track.rank.begun(lane.rows[place]), lane.starts[place], view.from);
      const [left, right] = [view.x(start), view.x(Math.min(lane.ends[place], view.to))];
      const fitting = this._label(track.rank, lane.rows[place], right - left - 2, letter);
      if (!fitting) continue;
      context.fillStyle = theme.label;
      context.fillText(fitting, (left + right) / 2, y + tall / 2 + 0.5);
    }
  }

  _label(rank, row, room, letter) {
    if (room < letter) return "";
    const name = short(rank, row);
    if (name.length * letter <= room) return name;
    const less = mark(rank, row).find((one) => one.length * letter <= room);
    return less ?? "";
  }

  _memory({ view, theme, memory }, { rank, y, height }, shift) {
    const { context } = this;
    const { at, bytes } = rank.memory;
    const level = (value) => y + shift + height - (memory ? value / memory : 0) * (height - 2);
    const until = before(at, view.to) + 1;
    const first = before(at, view.from);
    if (first < 0 && !until) return;
    const line = new Path2D();
    const begin = first < 0 ? Math.floor(view.x(at[0])) : view.left;
    let held = bytes[Math.max(0, first)];
    line.moveTo(begin, level(held));
    let column = -1;
    let most = held;
    for (let place = Math.max(0, first); place < until; place += 1) {
      const x = Math.floor(view.x(at[place]));
      if (x !== column) {
        line.lineTo(Math.max(x, begin), level(held));
        column = x;
        most = 0;
      }
      held = bytes[place];
      most = Math.max(most, held);
      if (place + 1 === until || Math.floor(view.x(at[place + 1])) !== column) {
        if (most > held) line.lineTo(Math.max(column, begin), level(most));
        line.lineTo(Math.max(column, begin), level(held));
      }
    }
    const end = Math.max(begin, Math.min(view.left + view.width, view.x(rank.last)));
    line.lineTo(end, level(held));
    const area = new Path2D(line);
    area.lineTo(end, level(0));
    area.lineTo(begin, level(0));
    context.globalAlpha = 0.35;
    context.fillStyle = theme.memory;
    context.fill(area);
    context.globalAlpha = 1;
    context.strokeStyle = theme.memory;
    context.lineWidth = 1;
    context.stroke(line);
  }

  _arrows(state, groups, shift) {
    const { view, layout, theme, main, matches } = state;
    const spots = [];
    for (const { number } of groups) {
      for (const lane of main.ranks.get(number)?.tracks.receive.lanes ?? []) {
        for (const row of lane.within(view)) if (spots.push({ rank: number, row }) > ARROWS) return;
      }
    }
    this.context.strokeStyle = this.context.fillStyle = theme.arrow;
    this.context.lineWidth = 1;
    this.context.globalAlpha = matches ? DIMMED : 1;
    for (const spot of spots) arrow(this.context, view, layout.groups, main, main.cause(spot), spot, shift);
    this.context.globalAlpha = 1;
  }
}

/** An arrow from the start of a send to the end of its receive. */
export function arrow(context, view, groups, capture, from, to, shift) {
  const boxes = [from, to].map((spot) => spot && boxOf(groups, capture, spot));
  if (!boxes[0] || !boxes[1] || !capture.comparable(capture.ranks.get(from.rank), capture.ranks.get(to.rank))) return;
  const [x0, x1] = [
    view.x(capture.ranks.get(from.rank).start[from.row]),
    view.x(capture.ranks.get(to.rank).end[to.row]),
  ];
  const [y0, y1] = boxes.map((box) => box.y + box.height / 2 + shift);
  curve(context, x0, y0, x1, y1);
}

/** A bent line with a head at its end. */
export function curve(context, x0, y0, x1, y1) {
  const bend = Math.max(12, Math.min(80, Math.abs(x1 - x0) / 2));
  context.beginPath();
  context.moveTo(x0, y0);
  context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
  context.stroke();
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x1 - 5, y1 - 2.5);
  context.lineTo(x1 - 5, y1 + 2.5);
  context.fill();
}
