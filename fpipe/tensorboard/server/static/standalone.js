/** In a single file, the answers that a server would give: they are in the file, and nothing is asked of a network. */

const { style, answers } = JSON.parse(document.querySelector("#answers").textContent);
const key = (route, query) => JSON.stringify([route, ...Object.entries(query).sort()]);
const packed = new Map(answers.map(([route, query, body]) => [key(route, query), body]));
const ROOT = "fpipe:/";
const MISSING = "this is not in the file: open the run itself, with TensorBoard or fpipe timeline";

/** @param {string} name of a file or route */
export const place = (name) => new URL(name === "page.css" ? style : `${ROOT}${name}`);

export const makesFiles = false;

/** @returns {Promise<Response>} */
export async function ask(url, { signal } = {}) {
  signal?.throwIfAborted();
  const route = url.pathname.slice(1);
  const body = packed.get(key(route, Object.fromEntries(url.searchParams)));
  if (body === undefined) return new Response(`${MISSING} (${route})`, { status: 404 });
  const bytes = Uint8Array.from(atob(body), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")));
}
