/** Colours. Kinds have Okabe and Ito's colours, as in fpipe's drawings, which colour-blind readers can distinguish. */

const OKABE_ITO = ["#56b4e9", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#f0e442", "#7b9fd4"];
const NEUTRAL = "#9e9e9e";

/** Colour classes: indices in the lists of colours. */
export const HUES = OKABE_ITO.length;
export const WAITING = 7;
export const HOST = 8;
export const UNTOLD = 9; // a receive whose send time is unknown
const FIXED = 10;
const more = []; // colours of further kinds, in order of first use

/** The meaning of the colours, by colouring. */
export const COLOURINGS = { kind: "Kind", microbatch: "Microbatch", stage: "Stage" };

/** The colours of the classes. */
export function colours({ waiting, untold }) {
  return [...OKABE_ITO, waiting, NEUTRAL, untold, ...more];
}

/** The class of a cause of idle time, from its place in the summary's causes. */
export const causeHue = (at) => at % LIGHT.causes.length;

/** The number of classes. */
export const classes = () => FIXED + more.length;

/** The class of a kind's colour. */
export function hueOf(colour) {
  if (colour === NEUTRAL) return HOST;
  const known = OKABE_ITO.indexOf(colour);
  if (known >= 0) return known;
  if (!more.includes(colour)) more.push(colour);
  return FIXED + more.indexOf(colour);
}

const LIGHT = {
  page: "#ffffff",
  track: "#f4f5f6",
  line: "#e0e0e0",
  grid: "rgba(0,0,0,0.07)",
  text: "#212121",
  faint: "#616161",
  edge: "rgba(0,0,0,0.28)",
  label: "#111111",
  arrow: "rgba(33,33,33,0.5)",
  strong: "#000000",
  critical: "#b00020",
  range: "rgba(25,118,210,0.14)",
  rangeEdge: "#1976d2",
  memory: "#7e57c2",
  waiting: "#cdcdcd",
  untold: "#a7bdb9",
  overview: "#90a4ae",
  causes: ["#cfd8dc", "#ffcdd2", "#ffe082", "#e1bee7", "#b0bec5", "#e6ee9c", "#d7ccc8"],
};
const DARK = {
  page: "#303030",
  track: "#3a3a3a",
  line: "#555555",
  grid: "rgba(255,255,255,0.08)",
  text: "#ffffff",
  faint: "#bdbdbd",
  edge: "rgba(0,0,0,0.45)",
  label: "#111111",
  arrow: "rgba(255,255,255,0.55)",
  strong: "#ffffff",
  critical: "#ff8a80",
  range: "rgba(100,181,246,0.2)",
  rangeEdge: "#64b5f6",
  memory: "#b39ddb",
  waiting: "#6a6a6a",
  untold: "#4f6b68",
  overview: "#78909c",
  causes: ["#546e7a", "#6d3b40", "#6d5a1e", "#5d4066", "#455a64", "#4b6130", "#4e443f"],
};

export const theme = (dark) => (dark ? DARK : LIGHT);

/** A colour's red, green and blue. */
export const rgb = (colour) => [1, 3, 5].map((at) => Number.parseInt(colour.slice(at, at + 2), 16));
