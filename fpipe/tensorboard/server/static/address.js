/**
 * The page's state in the address, so that a link or a reload shows the same. TensorBoard names the parameters of a
 * plugin so, after the #, and keeps them when other tabs are opened.
 */

import { addressed } from "./host.js";

const PLUGIN = "fpipe_timeline";
const PREFIX = `p.${PLUGIN}.`;

let written = ""; // this page's own part of the address

/** The state in the address: name -> text. */
export function read() {
  const pairs = own().map((part) => part.slice(PREFIX.length).split("="));
  return Object.fromEntries(pairs.map(([name, text = ""]) => [name, decoded(text)]));
}

/** Sets the state in the address, unless another tab is shown; a null leaves a name out. */
export function write(state) {
  const others = parts().filter((part) => !part.startsWith(PREFIX));
  const [tab = PLUGIN] = others.filter((part) => !part.includes("="));
  if (tab !== PLUGIN) return;
  const texts = Object.entries(state).filter(([, text]) => text !== null);
  const params = texts.map(([name, text]) => `${PREFIX}${name}=${encodeURIComponent(String(text).toWellFormed())}`);
  written = params.join("&");
  const there = addressed();
  const url = new URL(there.location.href);
  url.hash = [...others, ...params].join("&");
  if (url.href === there.location.href) return;
  try {
    there.history.replaceState(there.history.state, "", url.href);
  } catch {
    // the browser lets no page change its address here, or not so often: the next change may
  }
}

/** Calls `moved` when the user goes to an address with another state. */
export function onMoved(moved) {
  const left = new AbortController();
  const look = () => own().length && own().join("&") !== written && moved();
  addressed().addEventListener("hashchange", look, { signal: left.signal });
  window.addEventListener("pagehide", () => left.abort());
}

const parts = () => addressed().location.hash.slice(1).split("&").filter(Boolean);
const own = () => parts().filter((part) => part.startsWith(PREFIX));

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // a part of it was lost on its way
  }
}
