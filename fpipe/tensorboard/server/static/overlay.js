/** The overlay of the timeline: hover, selection and its chain, the critical path, a range. */

import { time } from "./format.js";
import { boxOf } from "./layout.js";
import { before } from "./levels.js";
import { AXIS, FONT } from "./measures.js";
import { arrow, curve } from "./scene.js";

const LINKS = 400; // links of a chain that are drawn

export class Overlay {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
  }

  draw(state) {
    const { width, height, ratio, view, theme, scroll } = state;
    const { context } = this;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    if (!state.main) return;
    const shift = AXIS - scroll;
    if (state.range) this._range(state);
    context.save();
    context.beginPath();
    context.rect(view.left, AXIS, view.width, height - AXIS);
    context.clip();
    if (state.gap) this._gap(state, state.gap, shift, [3, 2]);
    if (state.critical) this._path(state, state.critical, shift, theme.critical);
    if (state.selected) this._chain(state, state.selected, shift);
    if (state.idle) {
      if (state.chain.length) this._chain(state, state.chain[0], shift);
      this._gap(state, state.idle, shift, []);
    }
    if (state.hovered && !same(state.hovered, state.selected)) this._spot(state, state.hovered, shift, 1.5);
    context.restore();
    if (state.pointer != null) this._pointer(state);
  }

  _outline({ viewOf, layout, other }, capture, spot, shift, line) {
    const view = viewOf(capture === other);
    const box = boxOf(layout.groups, capture, spot);
    if (!box || box.hidden) return;
    const rank = capture.ranks.get(spot.rank);
    const left = view.x(rank.start[spot.row]);
    const wide = Math.max(3, view.x(rank.end[spot.row]) - left);
    this.context.lineWidth = line;
    this.context.strokeRect(
      left - line / 2 + 0.5,
      box.y + shift - line / 2 + 0.5,
      wide + line - 1,
      box.height + line - 1,
    );
  }

  /** A span, the arrow between send and receive, and the cause of its wait. */
  _spot(state, spot, shift, line) {
    const { context } = this;
    const { layout, theme } = state;
    const view = state.viewOf(spot.other);
    const capture = spot.other ? state.other : state.main;
    context.strokeStyle = context.fillStyle = theme.strong;
    this._outline(state, capture, spot, shift, line);
    const kind = capture.ranks.get(spot.rank).kindOf(spot.row).track;
    const partner = capture.partner(spot);
    context.lineWidth = 1.5;
    if (partner) {
      this._outline(state, capture, partner, shift, 1);
      const [send, receive] = kind === "send" ? [spot, partner] : [partner, spot];
      arrow(context, view, layout.groups, capture, send, receive, shift);
    } else if (kind === "compute") {
      const cause = capture.cause(spot);
      if (cause) this._outline(state, capture, cause, shift, 1);
      const sent = cause ? capture.partner(cause) : null;
      if (sent) arrow(context, view, layout.groups, capture, sent, cause, shift);
    }
    const twin = state.twin(spot);
    if (twin) {
      context.setLineDash([4, 3]);
      this._outline(state, spot.other ? state.main : state.other, twin, shift, line);
      context.setLineDash([]);
    }
  }

  /** The selection's chain of waits, as far as it is in view. */
  _chain(state, spot, shift) {
    const { context } = this;
    const { layout, theme } = state;
    const view = state.viewOf(spot.other);
    const capture = spot.other ? state.other : state.main;
    context.strokeStyle = context.fillStyle = theme.rangeEdge;
    let drawn = 0;
    for (let at = 1; at < state.chain.length && drawn < LINKS; at += 1) {
      const [after, own] = [state.chain[at - 1], state.chain[at]];
      const [rank, next] = [capture.ranks.get(own.rank), capture.ranks.get(after.rank)];
      if (next.end[after.row] < view.from) break;
      if (rank.start[own.row] > view.to) continue;
      this._outline(state, capture, own, shift, 1.5);
      const [a, b] = [boxOf(layout.groups, capture, own), boxOf(layout.groups, capture, after)];
      if (a && b && own.rank !== after.rank) {
        const sent = rank.kindOf(own.row).track === "send";
        const [x0, x1] = [
          view.x(sent ? rank.start[own.row] : rank.end[own.row]),
          view.x(sent ? next.end[after.row] : next.start[after.row]),
        ];
        curve(context, x0, a.y + a.height / 2 + shift, x1, b.y + b.height / 2 + shift);
      }
      drawn += 1;
    }
    this._spot(state, spot, shift, 2.5);
  }

  /** A bar under each span of a path, and a line at each change of rank. */
  _path({ view, layout, main }, path, shift, colour) {
    const { context } = this;
    context.strokeStyle = context.fillStyle = colour;
    context.lineWidth = 1.5;
    const until = before(path.starts, view.to) + 1;
    const drawn = new Map(); // height -> end of the last drawn bar; bars within half a pixel of it are skipped
    const first = Math.max(0, before(path.starts, view.from) - 1);
    const linked = until - first < 4 * LINKS;
    let last = null;
    for (let at = first; at < until; at += 1) {
      const { rank, row } = path.spots[at];
      const own = main.ranks.get(rank);
      const box = boxOf(layout.groups, main, { rank, row });
      if (!box) continue;
      const [left, right] = [view.x(own.begun(row)), view.x(own.end[row])];
      const wide = Math.max(1, right - left);
      const kind = own.kindOf(row).track;
      const y = box.y + shift;
      if (!box.hidden && kind !== "send" && right - (drawn.get(y) ?? -Infinity) >= 0.5) {
        context.fillRect(left, y + box.height - 3, wide, 3);
        if (wide > 3) context.strokeRect(left + 0.5, y + 0.5, wide - 1, box.height - 1);
        drawn.set(y, right);
      }
      const middle = y + box.height / 2;
      if (linked && last && last.rank !== rank) {
        context.beginPath();
        context.moveTo(last.kind === "send" ? last.left : last.right, last.middle);
        context.lineTo(kind === "receive" ? right : left, middle);
        context.stroke();
      }
      last = { rank, kind, left, right, middle };
    }
  }

  _gap({ viewOf, layout, theme }, gap, shift, dashes) {
    const { context } = this;
    const view = viewOf(gap.other);
    const group = layout.groups.find((one) => one.number === gap.rank);
    const track = group?.tracks.find((one) => one.kind === "compute" && one.other === gap.other);
    if (!track) return;
    context.strokeStyle = theme.strong;
    context.setLineDash(dashes);
    context.lineWidth = dashes.length ? 1 : 2;
    const [left, right] = [view.x(gap.start), view.x(gap.end)];
    context.strokeRect(left + 0.5, track.y + shift + 0.5, Math.max(1, right - left - 1), track.height - 1);
    context.setLineDash([]);
  }

  _range({ view, range, theme, height, main }) {
    const { context } = this;
    const [left, right] = [view.x(range.from), view.x(range.to)].map((x) =>
      Math.max(view.left, Math.min(x, view.left + view.width)),
    );
    context.fillStyle = theme.range;
    context.fillRect(left, 0, right - left, height);
    context.fillStyle = theme.rangeEdge;
    for (const x of [left, right]) context.fillRect(x, 0, 1, height);
    this._tag(time(range.to - range.from, main.unit), (left + right) / 2, theme.rangeEdge, "#ffffff", view);
  }

  _pointer({ view, pointer, theme, height, main }) {
    this.context.fillStyle = theme.faint;
    this.context.globalAlpha = 0.5;
    this.context.fillRect(Math.round(view.x(pointer)), AXIS, 1, height - AXIS);
    this.context.globalAlpha = 1;
    this._tag(time(pointer, main.unit, 6), view.x(pointer), theme.faint, theme.page, view);
  }

  _tag(text, x, back, front, view) {
    const { context } = this;
    context.font = `11px ${FONT}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    const half = context.measureText(text).width / 2 + 5;
    const middle = Math.max(view.left + half, Math.min(x, view.left + view.width - half));
    context.fillStyle = back;
    context.fillRect(middle - half, 3, 2 * half, 17);
    context.fillStyle = front;
    context.fillText(text, middle, 12);
  }
}

const same = (one, other) =>
  Boolean(
    one && other && one.rank === other.rank && one.row === other.row && Boolean(one.other) === Boolean(other.other),
  );
