/** Creates the page's empty elements. */

import { element } from "./dom.js";
import { BUBBLE } from "./figures.js";
import { COLOURINGS } from "./palette.js";
import { makesFiles, place } from "./server.js";

const MADE = { hidden: !makesFiles }; // buttons of files that a server makes

/** Tracks and marks that can be hidden: [id, label, title, key, shown at first]. */
export const TOGGLES = [
  ["send", "sends", "sends, from post to delivery", "", true],
  ["receive", "receives", "receives: waiting in grey, transfer in colour", "", true],
  ["gather", "gathers", "gathers of parameters from the replicas", "", true],
  ["scatter", "scatters", "sums of gradients over the replicas", "", true],
  ["offload", "offloads", "copies of residuals to the host", "", true],
  ["fetch", "fetches", "copies of residuals back from the host", "", true],
  ["host", "host", "what the host did around the effects, and reductions", "", true],
  ["memory", "memory", "bytes that a rank holds", "", true],
  ["causes", "causes", "idle time in the pattern of its cause", "", true],
  ["arrows", "arrows", "from each send to its receive, once few enough are in sight", "", true],
  ["path", "critical path", "the chain of waits that ends last (c)", "c", false],
];
const KEYS = [
  ["w s, + −, Ctrl+wheel", "zoom in and out"],
  ["a d, ← →, Shift+wheel, drag", "move in time"],
  ["↑ ↓, wheel", "scroll the ranks; where all are in sight, the wheel zooms"],
  ["0 or f", "fit all of the step"],
  ["Shift+drag, drag on the axis", "measure a range"],
  ["click, double click", "select an effect or idle time, zoom to the effect"],
  [", . or Alt+← →", "select the effect before, or after, on the track"],
  ["Alt+↑ ↓", "select on the rank above, or below"],
  ["Enter, p", "zoom to the selection; select what it waited for"],
  ["g G", "select the rank’s next idle time, or the one before"],
  ["/, Enter, n N", "search; the next match, and the one before"],
  ["[ ]", "the step before, and the next"],
  ["c", "critical path"],
  ["x, X, click on a rank", "fold a rank to its compute, or unfold it; X all of them"],
  ["Esc", "let go of the range, the selection, the search"],
];
const SYNTAX =
  'mb=5 kind=B, mb=3-7, stage=0,3, rank=1, kind=F,I, kind=send, peer=2, dur>1ms, F3, recv, "weight gradient", ' +
  "rank=1 or rank=2, not kind=F";
const HALVES =
  "Terms beside each other must all match. kind=B and kind=backward find the halves of a backward too; an overlap is " +
  "found by either of its effects.";

const READING = [
  `The legend has the letters of effects; & stands between two that overlap. The number is the microbatch, a letter
   after it tells which of the rank’s stages. Where boxes are narrower than a pixel, the pixel is as opaque as the rank
   was busy.`,
  `A moment in which a rank computes nothing has one cause. Click on it to see what the rank waited for. Imbalance is
   the time that the busiest rank computes more than this one: no order of the same effects can save it. Each wait for a
   value that is not computed yet has the same share of it, at its end.`,
  BUBBLE,
  `A trace for Perfetto is a file: open it at ui.perfetto.dev by “Open trace file”. Where there is a network, ↗ opens
   that page and hands it the trace inside this browser. All else contacts nothing but this TensorBoard.`,
];

const labelled = (text, control) => element("label", {}, element("span", {}, text), control);
const button = (id, text, title, more = {}) => element("button", { id, type: "button", title, ...more }, text);

/** @returns {Record<string, HTMLElement>} elements by id, in the document */
export function shell() {
  document.documentElement.lang = "en";
  document.title = "Pipeline";
  document.head.append(
    element("link", { rel: "stylesheet", href: place("page.css").href }),
    element("link", { rel: "icon", href: "data:," }), // empty, so that browsers do not request one
  );
  document.body.replaceChildren(
    element(
      "div",
      { id: "page" },
      toolbar(),
      element("div", { id: "notices", role: "status", hidden: true }),
      band(),
      timeline(),
      below(),
    ),
    element("div", { id: "live", role: "status", "aria-live": "polite", class: "unseen" }),
    help(),
  );
  return Object.fromEntries(Array.from(document.querySelectorAll("[id]"), (node) => [node.id, node]));
}

function toolbar() {
  const colourings = Object.entries(COLOURINGS).map(([value, text]) => element("option", { value }, text));
  return element(
    "div",
    { class: "toolbar", role: "group", "aria-label": "Pipeline" },
    labelled("Run", element("select", { id: "run" })),
    element(
      "span",
      { class: "joined" },
      labelled("Step", element("select", { id: "step" })),
      button("step-prev", "‹", "the step before ([)", { "aria-label": "the step before" }),
      button("step-next", "›", "the next step (])", { "aria-label": "the next step" }),
    ),
    element(
      "label",
      { class: "check", title: "show each new step of this run as it comes" },
      element("input", { id: "follow", type: "checkbox" }),
      "Follow",
    ),
    element(
      "span",
      { class: "joined" },
      labelled("Beside", element("select", { id: "other" })),
      element("select", { id: "other-step", "aria-label": "Step beside" }),
    ),
    labelled("Colour", element("select", { id: "colour" }, ...colourings)),
    element(
      "span",
      { class: "joined grow" },
      element("input", {
        id: "search",
        type: "search",
        placeholder: "Search: mb=5 kind=B",
        "aria-label": "Search effects",
        title: SYNTAX,
        spellcheck: "false",
        autocomplete: "off",
      }),
      element("output", { id: "search-count", for: "search" }),
    ),
    element(
      "span",
      { class: "joined" },
      button("fit", "Fit", "all of the step (0 or f)"),
      button("export-png", "PNG", "the timeline as it is shown, as an image"),
      button("export-svg", "SVG", "the timeline of all ranks, as a figure", MADE),
      button("export-csv", "CSV", "all effects with their times, as a table", MADE),
      button("export-json", "Perfetto", "a trace to open at ui.perfetto.dev: nothing is sent there from here", MADE),
      button("export-open", "↗", "opens ui.perfetto.dev in a window and hands it the trace, inside this browser", {
        ...MADE,
        "aria-label": "Open in Perfetto’s page",
      }),
      button("help", "?", "keys and search (?)", { "aria-label": "Help" }),
    ),
  );
}

function band() {
  const toggles = TOGGLES.map(([id, text, title, key, on]) =>
    button(`toggle-${id}`, text, title, {
      class: "chip",
      "aria-pressed": String(on),
      "aria-keyshortcuts": key || null,
    }),
  );
  return element(
    "div",
    { class: "band" },
    element("div", { id: "headline" }),
    button("marks", "Marks", "what is shown, and the legend", { "aria-expanded": "false", "aria-controls": "extras" }),
    element(
      "div",
      { id: "extras" },
      element("div", { class: "chips", role: "group", "aria-label": "Shown" }, ...toggles),
      element("div", { id: "legend", "aria-label": "Legend" }),
    ),
  );
}

function timeline() {
  const label = "Timeline of all ranks. Comma and full stop move the selection, question mark lists the keys.";
  return element(
    "div",
    { id: "timeline" },
    element(
      "div",
      { id: "overview", "aria-hidden": "true", title: "share of the ranks that compute; drag to move" },
      element("canvas", { id: "overview-canvas" }),
      element("div", { id: "sight" }),
    ),
    element(
      "div",
      { id: "scroll", tabindex: -1 },
      element(
        "div",
        { id: "spacer" },
        element(
          "div",
          { id: "sheet" },
          element("canvas", {
            id: "canvas",
            tabindex: 0,
            role: "application",
            "aria-label": label,
            "aria-describedby": "live",
          }),
          element("canvas", { id: "over", "aria-hidden": "true" }),
        ),
      ),
    ),
    element("div", { id: "progress", hidden: true }),
    element("div", { id: "empty", hidden: true }),
    element("div", { id: "hover", role: "tooltip", hidden: true }),
  );
}

function below() {
  const label = { "aria-orientation": "horizontal", "aria-label": "Height of the tables" };
  return element(
    "div",
    { id: "below" },
    element("div", { id: "splitter", role: "separator", tabindex: 0, ...label }),
    element("section", { id: "details", "aria-label": "Selection", tabindex: 0 }),
    element("section", { id: "tables" }, element("div", { role: "tablist", id: "tabs", "aria-label": "Tables" })),
  );
}

function help() {
  const rows = KEYS.flatMap(([keys, text]) => [element("dt", {}, keys), element("dd", {}, text)]);
  return element(
    "dialog",
    { id: "help-dialog", "aria-label": "Help", tabindex: -1, autofocus: true },
    element("h2", {}, "Keys"),
    element("dl", {}, ...rows),
    element("h2", {}, "Search"),
    element("p", {}, SYNTAX),
    element("p", {}, HALVES),
    element("h2", {}, "Reading it"),
    ...READING.map((text) => element("p", {}, text)),
    element("form", { method: "dialog" }, element("button", {}, "Close")),
  );
}
