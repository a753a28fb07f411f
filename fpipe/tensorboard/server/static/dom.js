/** Creates elements; text is never parsed as HTML. */

import { sortable } from "./sorting.js";

/**
 * @param {string} tag
 * @param {Record<string, any>} [attributes] `class`, `id`, `aria-*` and so on; `on` holds listeners by event
 * @param {...(Node | string | number | null)} children
 */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
    } else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, String(value));
  }
  made.append(
    ...children.filter((child) => child != null).map((child) => (child instanceof Node ? child : String(child))),
  );
  return made;
}

/** A user's text on one line, with its own direction; if it is cut, the title has all of it. */
export function named(text, most = 48) {
  const short = shortened(text, most);
  return element("bdi", { title: short === text ? null : text.slice(0, 2000) }, short);
}

const TURNS = /[\u202a-\u202e\u2066-\u2069]/gu; // characters that turn the text after them round

/** The beginning and the end of a text that is longer than `most`. */
export function shortened(text, most = 48) {
  const line = String(text).replace(/\s+/gu, " ").replace(TURNS, "\ufffd");
  const letters = [...line.slice(0, 4 * most), ...(line.length > 4 * most ? line.slice(-2 * most) : "")];
  if (line.length <= most) return line;
  const end = Math.floor(most / 3);
  return `${letters.slice(0, most - end - 1).join("")}…${letters.slice(-end).join("")}`;
}

/**
 * A table whose heads sort it.
 *
 * @param {string} caption
 * @param {(string | {text: string, title?: string})[]} head
 * @param {(Node | string | number)[][]} rows the first cell of each is its header
 */
export function table(caption, head = [], rows = []) {
  const titles = head.map((cell) => {
    const { text, title = null } = typeof cell === "string" ? { text: cell } : cell;
    return element("th", { scope: "col", title }, text);
  });
  const lines = rows.map(([first, ...cells]) =>
    element("tr", {}, element("th", { scope: "row" }, first), ...cells.map((cell) => element("td", {}, cell))),
  );
  const made = element(
    "table",
    {},
    element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...titles)),
    element("tbody", {}, ...lines),
  );
  sortable(made);
  return made;
}

/** A button in a text. */
export const link = (text, press) => element("button", { type: "button", class: "link", on: { click: press } }, text);

/** The items of a list with at most `most` of some things, and the number of the rest. */
export function items(things, most, content) {
  const shown = things.slice(0, most).map((thing) => element("li", {}, ...content(thing)));
  if (things.length > most) shown.push(element("li", { class: "faint" }, `and ${things.length - most} more`));
  return shown;
}

/** A title over pairs of a name and a text. */
export function card(heading, pairs, note = "") {
  const lines = pairs.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]);
  const head = element("h3", {}, heading, note ? element("span", { class: "faint" }, ` ${note}`) : null);
  return [head, element("dl", {}, ...lines)];
}

/** Follows a pointer from press to release or cancel. */
export function held(target, { pointerId }, move, end = () => {}) {
  const pressed = new AbortController();
  const { signal } = pressed;
  const over = (event) => {
    pressed.abort();
    end(event);
  };
  target.setPointerCapture(pointerId);
  target.addEventListener("pointermove", move, { signal });
  for (const type of ["pointerup", "pointercancel"]) target.addEventListener(type, over, { signal });
}

/** Runs the last of several calls after `wait` milliseconds without another one, unless it is cancelled. */
export function settled(call, wait) {
  let timer = 0;
  const later = (...given) => {
    later.cancel();
    timer = setTimeout(() => call(...given), wait);
  };
  later.cancel = () => clearTimeout(timer);
  return later;
}

/** Downloads a file. */
export function download(blob, name) {
  const href = URL.createObjectURL(blob);
  element("a", { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}
