/** The page around the timeline: select lists, the splitter, the page without captures. */

import { element, held, shortened } from "./dom.js";

/** Fills a select list, if its options have changed. */
export function options(select, pairs, chosen) {
  const key = JSON.stringify(pairs);
  if (select.dataset.key !== key) {
    const option = ([value, text]) => {
      const title = text.length > 48 ? text.slice(0, 2000) : null;
      return element("option", { value, title, dir: "auto" }, shortened(text));
    };
    select.replaceChildren(...pairs.map(option));
    select.dataset.key = key;
  }
  select.value = chosen;
  select.title = shortened(pairs.find(([value]) => value === chosen)?.[1] ?? "", 400);
}

const RECORD = `from fpipe.tensorboard import Recorder

recorder = Recorder("logs/mine")
step = fpipe.value_and_grad(pipeline, schedule, plan, handler=handler, observe=recorder)`;

/** Instructions for a log directory without captures. */
export function nothing(unreachable) {
  if (unreachable) return [element("h2", {}, "No answer"), element("p", {}, unreachable)];
  return [
    element("h2", {}, "No timelines here yet"),
    element("p", {}, "Record steps of a training run:"),
    element("pre", {}, RECORD),
    element("p", {}, "or simulate a schedule:"),
    element("pre", {}, "fpipe simulate zb-v --ranks 4 --microbatches 12 --logdir logs/mine"),
    element("p", { class: "faint" }, "Then start TensorBoard on that folder: this page looks every five seconds."),
  ];
}

/** The button that opens the marks and the legend where the window is too low to have them in sight. */
export function drawer({ marks, extras }) {
  const set = (open) => marks.setAttribute("aria-expanded", String(open));
  marks.addEventListener("click", () => set(marks.getAttribute("aria-expanded") === "false"));
  document.addEventListener("pointerdown", ({ target }) => marks.contains(target) || extras.contains(target) || set(false));
  document.addEventListener("keydown", ({ key }) => key === "Escape" && set(false));
}

const LEAST = 60; // pixels of the tables
const KEPT = 200; // pixels of the timeline, as in page.css

/**
 * The splitter between timeline and tables, moved by pointer or keys.
 *
 * @returns {(tall: number | null) => void} sets the height of the tables; null for the usual one
 */
export function splitter(shell, changed) {
  const set = (tall) => {
    const most = Math.max(LEAST, shell.below.offsetHeight + shell.timeline.offsetHeight - KEPT);
    shell.below.style.flexBasis = tall === null ? "" : `${Math.max(LEAST, Math.min(tall, most))}px`;
    changed();
  };
  shell.splitter.addEventListener("pointerdown", (event) => {
    const begun = shell.below.clientHeight + event.clientY;
    held(shell.splitter, event, (now) => set(begun - now.clientY));
  });
  shell.splitter.addEventListener("keydown", (event) => {
    const by = { ArrowUp: 24, ArrowDown: -24 }[event.key];
    if (by) set(shell.below.clientHeight + by);
  });
  return set;
}
