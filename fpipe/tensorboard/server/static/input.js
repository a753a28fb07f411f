/** Input by pointer, wheel and keys. */

import { held } from "./dom.js";
import { AXIS } from "./measures.js";
import { across, back, enter, idle, neighbour } from "./selection.js";

const CLICK = 4; // pixels: movement up to which a press is a click
const STEP = 1.3; // zoom factor per key press
const PAN = 0.12; // share of the view moved per key press
const LINE = 40; // pixels scrolled per key press

/** @param {import("./app.js").App} app */
export function listen(app) {
  const { canvas, scroll } = app.shell;
  canvas.addEventListener("wheel", (event) => wheel(app, event), { passive: false });
  canvas.addEventListener("pointerdown", (event) => press(app, event));
  canvas.addEventListener("pointermove", (event) => event.buttons || app.sheet.hover(event.offsetX, event.offsetY));
  canvas.addEventListener("pointerleave", () => app.sheet.hover(null, null));
  canvas.addEventListener("dblclick", (event) => {
    const found = app.sheet.pointer.find(event.offsetX, event.offsetY);
    if (found?.spot) app.sheet.zoomTo(found.spot);
  });
  scroll.addEventListener("scroll", () => app.sheet.scrolled());
  document.addEventListener("keydown", (event) => key(app, event));
}

function wheel(app, event) {
  const unit = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1;
  const [dx, dy] = [event.deltaX * unit, event.deltaY * unit];
  const { scroll } = app.shell;
  const overflows = scroll.scrollHeight > scroll.clientHeight + 1;
  if (event.ctrlKey || event.metaKey || (!overflows && !event.shiftKey && Math.abs(dy) > Math.abs(dx))) {
    const strength = event.ctrlKey && Math.abs(dy) < 40 ? 0.01 : 0.0025; // a pinch arrives as small steps
    app.sheet.view.zoom(Math.exp(-dy * strength), app.sheet.view.when(event.offsetX));
  } else if (event.shiftKey || Math.abs(dx) > Math.abs(dy)) {
    app.sheet.view.pan((event.shiftKey && !dx ? dy : dx) / app.sheet.view.width);
  } else return;
  event.preventDefault();
  app.sheet.moved();
  app.announce();
}

/** Handles a press until its release: a click, a drag, or a range measurement. */
function press(app, event) {
  if (event.button !== 0) return;
  const { canvas, scroll } = app.shell;
  const { view } = app.sheet;
  const [x, y] = [event.offsetX, event.offsetY];
  const begun = { from: view.from, to: view.to, top: scroll.scrollTop };
  const measuring = x >= view.left && (event.shiftKey || y < AXIS);
  let dragged = false;
  canvas.focus({ preventScroll: true });
  const move = (now) => {
    const [dx, dy] = [now.offsetX - x, now.offsetY - y];
    dragged ||= Math.hypot(dx, dy) > CLICK;
    if (!dragged) return;
    app.sheet.hover(null, null);
    if (measuring) return app.sheet.measure(view.when(x), view.when(now.offsetX));
    view.show(begun.from - dx / view.scale, begun.to - dx / view.scale);
    scroll.scrollTop = begun.top - dy;
    canvas.classList.add("grabbing");
    app.sheet.moved();
  };
  held(canvas, event, move, (now) => {
    canvas.classList.remove("grabbing");
    if (dragged && measuring) app.sheet.measured();
    if (!dragged && now.type === "pointerup") app.sheet.pointer.click(x, y);
  });
}

function key(app, event) {
  const { target } = event;
  const writing = target.matches("input[type=search], select, textarea");
  if (app.shell["help-dialog"].open) return;
  if (target === app.shell.search && (event.key === "Enter" || event.key === "Escape")) {
    event.preventDefault(); // the browser would clear the field
    if (event.key === "Escape") return app.shell.canvas.focus();
    return app.finder.match(event.shiftKey ? -1 : 1);
  }
  if (event.key === "Escape") return app.release();
  const typed = event.getModifierState("AltGraph"); // many keyboards type brackets so
  if (writing || (!typed && (event.ctrlKey || event.metaKey))) return;
  const arrows = event.key.startsWith("Arrow");
  if (arrows && target.closest("[role=tab], [role=separator], [role=tabpanel], #details") && !event.altKey) return;
  if (event.key === "Enter" && target !== app.shell.canvas) return;
  const act = (event.altKey && !typed ? ALT : KEYS)[event.key];
  if (!act) return;
  event.preventDefault();
  act(app);
}

const zoom = (factor) => (app) => {
  app.sheet.view.zoom(factor, app.sheet.pointer.when ?? undefined);
  app.sheet.moved();
  app.announce();
};
const pan = (share) => (app) => {
  app.sheet.view.pan(share);
  app.sheet.moved();
  app.announce();
};
const fit = (app) => {
  app.sheet.fit();
  app.announce();
};
const scrolled = (by) => (app) => app.shell.scroll.scrollBy(0, by);

const KEYS = {
  w: zoom(STEP),
  "+": zoom(STEP),
  "=": zoom(STEP),
  s: zoom(1 / STEP),
  "-": zoom(1 / STEP),
  a: pan(-PAN),
  d: pan(PAN),
  ArrowLeft: pan(-PAN),
  ArrowRight: pan(PAN),
  ArrowUp: scrolled(-LINE),
  ArrowDown: scrolled(LINE),
  PageUp: (app) => app.shell.scroll.scrollBy(0, -app.shell.scroll.clientHeight),
  PageDown: (app) => app.shell.scroll.scrollBy(0, app.shell.scroll.clientHeight),
  0: fit,
  f: fit,
  ",": (app) => neighbour(app.sheet, -1),
  ".": (app) => neighbour(app.sheet, 1),
  Enter: (app) => enter(app.sheet),
  p: (app) => back(app.sheet),
  g: (app) => idle(app.sheet, 1),
  G: (app) => idle(app.sheet, -1),
  c: (app) => app.sheet.toggle("path"),
  x: (app) => app.sheet.selected && app.sheet.fold(app.sheet.selected.rank),
  X: (app) => app.sheet.foldAll(),
  n: (app) => app.finder.match(1),
  N: (app) => app.finder.match(-1),
  "[": (app) => app.stepBy(-1),
  "]": (app) => app.stepBy(1),
  "/": (app) => app.shell.search.focus(),
  "?": (app) => app.shell["help-dialog"].showModal(),
};
const ALT = {
  ArrowLeft: KEYS[","],
  ArrowRight: KEYS["."],
  ArrowUp: (app) => across(app.sheet, -1),
  ArrowDown: (app) => across(app.sheet, 1),
};
