/** Sorts the rows of a table by a column, by numbers with their units or by text; a table that is filled anew keeps it. */

const UNITS = new Map([
  ...[["ns", 1e-9], ["µs", 1e-6], ["ms", 1e-3], ["s", 1]],
  ...[["B", 1], ["KiB", 2 ** 10], ["MiB", 2 ** 20], ["GiB", 2 ** 30], ["TiB", 2 ** 40]],
  ...[["%", 1], ["", 1]],
]);
const AMOUNT = /^([+−±-]?)\s*(\d[\d.]*(?:e[+-]?\d+)?)\s*([a-zµ]*|%)(?![\w.:])/iu;
const chosen = new Map(); // heads of a table -> [column, direction]

/** The number at the beginning of a cell, in its basic unit; NaN if there is none. */
export function amount(text) {
  const [, sign, digits, unit] = AMOUNT.exec(text.trim()) ?? [];
  if (digits === undefined) return NaN;
  return (sign === "−" || sign === "-" ? -1 : 1) * Number(digits) * (UNITS.get(unit) ?? 1);
}

/**
 * Makes the heads of a table sort it: first the largest on top, or the texts in order; then turned round; then as it was.
 *
 * @param {HTMLTableElement} table
 */
export function sortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  const key = heads.map((head) => head.textContent).join("\n");
  const rows = [...table.tBodies[0].rows];
  heads.forEach((head, column) => {
    if (!head.textContent) return;
    head.tabIndex = 0;
    head.classList.add("sorts");
    const press = () => {
      const [last, direction] = chosen.get(key) ?? [-1, 0];
      const next = last === column ? { 1: -1, [-1]: 0, 0: 1 }[direction] : 1;
      chosen.set(key, [column, next]);
      arrange(table, heads, rows, column, next);
    };
    head.addEventListener("click", press);
    head.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      event.stopPropagation();
      press();
    });
  });
  if (chosen.has(key)) arrange(table, heads, rows, ...chosen.get(key));
}

function arrange(table, heads, rows, column, direction) {
  const texts = rows.map((row) => row.cells[column]?.textContent ?? "");
  const numbers = texts.map(amount);
  const numeric = numbers.some((number) => !Number.isNaN(number));
  const ascending = numeric ? direction < 0 : direction > 0;
  const by = (a, b) =>
    numeric ? numbers[a] - numbers[b] : texts[a].localeCompare(texts[b], "en", { numeric: true });
  const missing = (at) => numeric && Number.isNaN(numbers[at]);
  const order = rows.map((_, at) => at);
  if (direction) order.sort((a, b) => missing(a) - missing(b) || (missing(a) ? 0 : ascending ? by(a, b) : by(b, a)) || a - b);
  table.tBodies[0].append(...order.map((at) => rows[at]));
  heads.forEach((head, at) => {
    if (at === column && direction) head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    else head.removeAttribute("aria-sort");
  });
}
