/** Formats numbers, times and sizes. */

/** The units of times, as `scale_of` of fpipe/_format.py has them. */
const TIMES = [
  [1, "s"],
  [1e-3, "ms"],
  [1e-6, "µs"],
  [1e-9, "ns"],
];
const NOTHING = 1e-9; // share of the largest of a column that counts as rounding error
const SIZES = ["B", "KiB", "MiB", "GiB", "TiB"];

/** Four digits, without an exponent if the number is readable without it. */
export function number(value, digits = 4) {
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e9 || size < 1e-4) return value.toExponential(2);
  if (size >= 10 ** (digits - 1)) return value.toFixed(0);
  return String(Number(value.toPrecision(digits)));
}

/** A time, in a fitting unit if times are seconds, else a plain number. */
export function time(value, unit, digits = 4) {
  if (!Number.isFinite(value)) return "unknown";
  const [factor, name] = unitOf(value, unit);
  return name ? `${number(value / factor, digits)} ${name}` : number(value, digits);
}

/** The unit for values of about this size: [its factor to the capture's unit, its name]. */
export function unitOf(value, unit) {
  if (unit !== "s") return [1, unit];
  return TIMES.find(([factor]) => Math.abs(value) >= factor * 0.9999) ?? (value === 0 ? TIMES[1] : TIMES.at(-1));
}

/**
 * A column of times: the text for its header, and functions of its cells. All cells have the unit and the decimals that
 * show four digits of the largest value, and none an exponent.
 */
export function column(values, unit) {
  const largest = values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  const [factor, name] = unitOf(largest, unit);
  const decimals = largest > 0 ? Math.max(0, Math.min(12, 3 - Math.floor(Math.log10(largest / factor) + 1e-9))) : 0;
  const size = (value) => (Math.abs(value) > largest * NOTHING ? (Math.abs(value) / factor).toFixed(decimals) : "0");
  const sign = (value, plus) => (Number(size(value)) === 0 ? "" : value < 0 ? "−" : plus);
  return {
    name: name ? `, in ${name}` : "",
    cell: (value) => (Number.isFinite(value) ? sign(value, "") + size(value) : "–"),
    signed: (value) => sign(value, "+") + size(value),
  };
}

/** A difference, with its sign. */
export const signed = (value, unit) => (value > 0 ? "+" : value < 0 ? "−" : "±") + time(Math.abs(value), unit, 3);

/** Bytes, in the largest binary unit that is not above them. */
export function bytes(value) {
  const power = value >= 1 ? Math.min(SIZES.length - 1, Math.floor(Math.log2(value) / 10)) : 0;
  return `${number(value / 1024 ** power)} ${SIZES[power]}`;
}

export const percent = (share) => (Number.isFinite(share) ? `${(100 * share).toFixed(1)}%` : "–");

/** The relative difference of the first to the second. */
export const change = (value, than) =>
  than ? `${value >= than ? "+" : "−"}${Math.abs((100 * (value - than)) / than).toFixed(1)}%` : "";

/** Round times to mark on an axis: about one every `apart` of a range that is `width` wide. */
export function* ticks(from, to, apart) {
  const rough = Math.max(apart, Number.MIN_VALUE);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5].find((multiple) => multiple * power >= rough) ?? 10);
  for (let at = Math.ceil(from / step); at * step <= to; at += 1) yield { at: at * step, step };
}

/** The label of an axis mark, in the axis's unit, with enough digits to differ from the next. */
export function tick(at, step, largest, unit) {
  const [factor, name] = unitOf(largest, unit);
  const digits = Math.max(0, Math.min(9, -Math.floor(Math.log10(step / factor) + 1e-9)));
  return `${(at / factor).toFixed(digits)}${name ? ` ${name}` : ""}`;
}
