/** TensorBoard around the frame: its reload button, and whether it is dark. */

/**
 * Calls `reloaded` when TensorBoard has read its logs anew. The frame opens the channel; messages are JSON of
 * {type, id, payload, error, isReply}, and each is to be answered with its id.
 */
export function onReload(reloaded) {
  if (window.parent === window) return;
  const { port1: port, port2 } = new MessageChannel();
  port.onmessage = ({ data }) => {
    const { type, id, isReply } = JSON.parse(data);
    if (isReply) return;
    port.postMessage(JSON.stringify({ type, id, payload: null, error: null, isReply: true }));
    if (type === "experimental.DataReloaded") reloaded();
  };
  window.parent.postMessage("experimental.bootstrap", window.location.origin, [port2]);
}

/** Calls `changed` with whether it is dark, now and whenever that changes. */
export function onTheme(changed) {
  const preferred = window.matchMedia("(prefers-color-scheme: dark)");
  const body = hostBody();
  if (!body) {
    preferred.addEventListener("change", () => changed(preferred.matches));
    return changed(preferred.matches);
  }
  const tell = () => changed(body.classList.contains("dark-mode"));
  new MutationObserver(tell).observe(body, { attributes: true, attributeFilter: ["class"] });
  tell();
}

function hostBody() {
  try {
    return window.parent === window ? null : window.parent.document.body;
  } catch {
    return null; // a host of another origin, such as a notebook's
  }
}

/** Takes over the host's fonts, so that the frame has its look without files of its own. */
export function borrowFonts() {
  if (!hostBody()) return;
  const there = window.parent.document;
  const rules = Array.from(there.styleSheets, (sheet) => Array.from(readable(sheet))).flat();
  const faces = rules.filter((rule) => rule.constructor.name === "CSSFontFaceRule");
  const style = document.head.appendChild(document.createElement("style"));
  for (const { cssText, parentStyleSheet } of faces) {
    const base = parentStyleSheet.href ?? there.baseURI;
    style.append(cssText.replace(/url\("([^"]+)"\)/gu, (_, url) => `url("${new URL(url, base).href}")`));
  }
}

function readable(sheet) {
  try {
    return sheet.cssRules;
  } catch {
    return []; // of another origin
  }
}
