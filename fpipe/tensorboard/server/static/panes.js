/** The page around the timeline: select lists, tabs, the splitter. */

import { element, held, shortened } from "./dom.js";

/** Fills a select list, if its options have changed. */
export function options(select, pairs, chosen) {
  const key = JSON.stringify(pairs);
  if (select.dataset.key !== key) {
    select.replaceChildren(
      ...pairs.map(([value, text]) =>
        element(
          "option",
          { value, title: text.length > 48 ? text.slice(0, 2000) : null, dir: "auto" },
          shortened(text),
        ),
      ),
    );
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
    element(
      "p",
      { class: "faint" },
      "Then start TensorBoard on that folder. This page looks again every five seconds.",
    ),
  ];
}

/** Opens a tab. */
export function open(shell, id) {
  for (const tab of shell.tabs.children) {
    const on = tab.id === `tab-${id}`;
    tab.setAttribute("aria-selected", String(on));
    tab.tabIndex = on ? 0 : -1;
    shell[tab.getAttribute("aria-controls")].hidden = !on;
  }
}

/** Opens tabs by pointer and by arrow keys. */
export function tabs(shell) {
  const name = (tab) => tab.id.slice("tab-".length);
  for (const tab of shell.tabs.children) tab.addEventListener("click", () => open(shell, name(tab)));
  shell.tabs.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    const shown = Array.from(shell.tabs.children).filter((tab) => !tab.hidden);
    const next = shown[(shown.indexOf(document.activeElement) + by + shown.length) % shown.length];
    open(shell, name(next));
    next.focus();
  });
}

/** The splitter between timeline and tables, moved by pointer or keys. */
export function splitter(shell, changed) {
  const set = (tall) => {
    const most = shell.page.clientHeight - 220;
    shell.below.style.flexBasis = `${Math.max(60, Math.min(tall, most))}px`;
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
}
