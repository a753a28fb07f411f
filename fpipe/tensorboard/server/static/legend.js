/** The legend of the colours. */

import { element } from "./dom.js";
import { causeClass, colours, HUES, inks, patternImage, UNTOLD, WAITING } from "./palette.js";

/** Fills the legend with the capture's kinds, and sets the colours in the page's style. */
export function legend(place, capture, colouring, theme) {
  const hues = colours(theme);
  const { style } = document.documentElement;
  hues.forEach((colour, at) => style.setProperty(`--hue-${at}`, colour));
  inks(theme).forEach((_, at) => style.setProperty(`--cause-${at}`, patternImage(theme, at)));
  const ranks = [...(capture?.ranks.values() ?? [])];
  const computes = (capture?.kinds ?? []).filter((kind) => kind.track === "compute");
  const kinds = [...new Map(computes.map((kind) => [`${kind.letter} ${kind.name}`, kind])).values()].sort((a, b) => a.hue - b.hue);
  const meaning =
    colouring === "kind"
      ? kinds.map(({ letter, name, hue }) => key(hues[hue], name, letter))
      : [
          faint(colouring),
          ...hues.slice(0, HUES).map((colour, at) => key(colour, at + 1 < HUES ? `${at}, ${at + HUES}` : "…")),
        ];
  const untold = ranks.some((rank) => rank.tracks.receive.rows.some((row) => Number.isNaN(rank.left[row])));
  const lanes = new Map((capture?.kinds ?? []).filter(besides).map((kind) => [kind.name, kind]));
  const beside = colouring === "kind" ? Array.from(lanes.values(), ({ name, hue }) => key(hues[hue], name)) : [];
  const receives = [key(hues[WAITING], "waiting"), ...(untold ? [key(hues[UNTOLD], "receive, not told apart")] : [])];
  const causes = Object.keys(capture?.summary?.causes ?? {}).map((name) => key(`var(--cause-${causeClass(name)})`, name));
  place.replaceChildren(...meaning, ...beside, ...receives, faint("idle:"), ...causes);
}

const besides = ({ track }) => ["gather", "scatter", "offload", "fetch"].includes(track);

const faint = (text) => element("span", { class: "faint" }, text);

const key = (colour, text, letter = "") =>
  element("span", { class: "key" }, element("i", { class: "swatch", style: `background:${colour}` }, letter), text);
