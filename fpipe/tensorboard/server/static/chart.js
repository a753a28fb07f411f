/** A line of a figure over steps, as an SVG. */

const [WIDTH, HEIGHT, PAD] = [560, 84, 8]; // pixels
const NAMESPACE = "http://www.w3.org/2000/svg";

const part = (name, attributes, ...children) => {
  const node = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, String(value));
  node.append(...children);
  return node;
};

/**
 * @param {object} line
 * @param {string} line.name of the figure
 * @param {number[]} line.steps
 * @param {number[]} line.values
 * @param {Set<number>} line.marked the places of the steps that stand out
 * @param {number} line.shown the place of the step that is shown, -1 for none
 * @param {(at: number) => string} line.text of a step
 * @param {(at: number) => void} line.press
 */
export function chart({ name, steps, values, marked, shown, text, press }) {
  const known = values.filter(Number.isFinite);
  const [low, high] = [Math.min(...known, Infinity), Math.max(...known, -Infinity)];
  const room = high - low || Math.abs(high) || 1;
  const [first, last] = [steps[0], steps.at(-1)];
  const x = (at) => PAD + ((steps[at] - first) / (last - first || 1)) * (WIDTH - 2 * PAD);
  const y = (at) => HEIGHT - PAD - ((values[at] - low) / room) * (HEIGHT - 2 * PAD);
  const places = steps.map((_, at) => at).filter((at) => Number.isFinite(values[at]));
  const points = places.map((at) => `${x(at).toFixed(1)},${y(at).toFixed(1)}`).join(" ");
  const dots = places.map((at) => {
    const kind = `${marked.has(at) ? "marked" : ""} ${at === shown ? "shown" : ""}`.trim();
    const radius = marked.has(at) || at === shown ? 4 : 2;
    const dot = part("circle", { cx: x(at).toFixed(1), cy: y(at).toFixed(1), r: radius, class: kind });
    const target = part("circle", { cx: x(at).toFixed(1), cy: y(at).toFixed(1), r: 6, class: "target" });
    const both = part("g", {}, part("title", {}, text(at)), target, dot);
    both.addEventListener("click", () => press(at));
    return both;
  });
  const line = part("polyline", { points });
  const size = { width: WIDTH, height: HEIGHT, viewBox: `0 0 ${WIDTH} ${HEIGHT}` };
  return part("svg", { ...size, class: "chart", role: "img", "aria-label": `${name} over steps` }, line, ...dots);
}
