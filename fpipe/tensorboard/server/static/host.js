/** The surrounding TensorBoard page: its reload button and its dark mode. */

/**
 * Calls `reloaded` after TensorBoard has reloaded its logs. The frame opens the channel; messages are JSON of
 * {type, id, payload, error, isReply}, and each must be answered with its id.
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

/** Calls `changed(dark)` now and after each change of the mode. */
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

/** The window whose address the user sees: TensorBoard's; the frame's own if that has another origin. */
export const addressed = () => (hostBody() ? window.parent : window);

function hostBody() {
  try {
    return window.parent === window ? null : window.parent.document.body;
  } catch {
    return null; // the host has another origin, for example a notebook
  }
}

/** Copies the host's fonts, so that the frame needs no font files. */
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
    return []; // the style sheet has another origin
  }
}
