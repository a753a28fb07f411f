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

const SIDE = 8; // pixels of a pattern

/** Where the pattern of each cause of idle time has ink: no two look alike without their colours. */
const INK = {
  "warm-up": (x, y) => (x + y) % 8 === 0,
  dependency: (x, y) => (x + y) % 4 === 0,
  transfer: (x, y) => y % 4 === 0,
  imbalance: (x, y) => (x + y) % 8 === 0 || (x + 8 - y) % 8 === 0,
  drain: (x, y) => (x + 8 - y) % 8 === 0,
  gather: (x) => x % 4 === 0,
  scatter: (x, y) => x % 8 < 2 && y % 4 < 3,
  host: (x, y) => x % 4 < 2 && y % 4 < 2,
  offload: (x, y) => y % 8 < 2 && x % 4 < 3,
};
const CAUSES = Object.keys(INK);

/** The patterns of the causes, by class: for each row of pixels and each pixel of it, whether it has ink. */
export const PATTERNS = CAUSES.map((cause) =>
  Array.from({ length: SIDE }, (_, y) => Array.from({ length: SIDE }, (_, x) => INK[cause](x, y))),
);

/** Opacity of the pixels without ink, to that of those with it. */
export const GROUND = 0.25;

/** The class of a cause of idle time. */
export const causeClass = (cause) => Math.max(0, CAUSES.indexOf(cause));

/** The inks of the classes of causes. */
export const inks = ({ causes }) => CAUSES.map((cause) => causes[cause]);

const IMAGES = new Map();

/** The pattern of a class of causes as a CSS image; to encode one takes a millisecond, so each is kept. */
export function patternImage(theme, at) {
  const ink = inks(theme)[at];
  const key = `${at} ${ink}`;
  if (!IMAGES.has(key)) IMAGES.set(key, image(PATTERNS[at], ink));
  return IMAGES.get(key);
}

function image(pattern, ink) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = SIDE;
  const context = tile.getContext("2d");
  context.fillStyle = ink;
  pattern.forEach((row, y) =>
    row.forEach((inked, x) => {
      context.globalAlpha = inked ? 1 : GROUND;
      context.fillRect(x, y, 1, 1);
    }),
  );
  return `url("${tile.toDataURL()}")`;
}

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
  heat: { below: [33, 102, 172], middle: [240, 240, 240], above: [178, 24, 43] },
  causes: {
    "warm-up": "#607d8b",
    dependency: "#c62828",
    transfer: "#a35f00",
    imbalance: "#7b1fa2",
    drain: "#455a64",
    gather: "#5f6f00",
    scatter: "#795548",
    host: "#00796b",
    offload: "#3949ab",
  },
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
  heat: { below: [103, 169, 207], middle: [66, 66, 66], above: [239, 138, 98] },
  causes: {
    "warm-up": "#b0bec5",
    dependency: "#ff8a80",
    transfer: "#ffca28",
    imbalance: "#e1a6f0",
    drain: "#90a4ae",
    gather: "#d4e157",
    scatter: "#d7b8a8",
    host: "#4dd0c0",
    offload: "#9fa8da",
  },
};

export const theme = (dark) => (dark ? DARK : LIGHT);

/** A colour's red, green and blue. */
export const rgb = (colour) => [1, 3, 5].map((at) => Number.parseInt(colour.slice(at, at + 2), 16));

/** Colours as pixels without opacity: red in the lowest byte. */
export const packed = (list) => list.map((colour) => rgb(colour).reduce((sum, part, at) => sum | (part << (8 * at)), 0));
