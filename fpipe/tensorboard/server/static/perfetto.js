/**
 * Opens a trace in Perfetto's page, by messages between the two windows: the trace goes to the other window of this
 * browser, and to no server (perfetto.dev/docs, "Deep linking to the Perfetto UI").
 */

const ORIGIN = "https://ui.perfetto.dev";
const ASK = 100; // milliseconds between two questions whether the page is there
const PATIENCE = 15_000; // milliseconds

/** Perfetto's page in a new window; null if the browser opens none. */
export const opened = () => window.open(ORIGIN);

/** Hands a trace over once the page answers; throws if it does not, or if there is none. */
export async function handed(page, buffer, title, fileName) {
  if (!page) throw new Error("the browser opens no window: allow this page to, or save the file and open it there");
  await answered(page);
  page.postMessage({ perfetto: { buffer, title, fileName } }, ORIGIN, [buffer]);
}

function answered(page) {
  return new Promise((done, failed) => {
    const over = new AbortController();
    const end = (call, value) => {
      clearInterval(asking);
      clearTimeout(patience);
      over.abort();
      call(value);
    };
    const asking = setInterval(() => page.postMessage("PING", ORIGIN), ASK);
    const reason = `${ORIGIN} does not answer: without a network, save the file (button Perfetto) and open it elsewhere`;
    const patience = setTimeout(() => end(failed, new Error(reason)), PATIENCE);
    const heard = ({ data, origin, source }) => data === "PONG" && origin === ORIGIN && source === page && end(done);
    window.addEventListener("message", heard, { signal: over.signal });
  });
}
