/** The Pipeline tab: what every rank did when, and why it idled. TensorBoard loads this module and calls `render`. */

import { App } from "./app.js";
import { shell } from "./shell.js";

export function render() {
  const elements = shell();
  const app = new App(elements);
  const pixel = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  /**
   * For measurements and tests. `ready` is done once the first capture, or that there is none, is drawn; `redraw()`
   * draws all anew at once and gives the milliseconds that took, pixels included; `frames` holds those of the last
   * redraws; `app` is the page's own state.
   */
  window.fpipe = {
    ready: app.ready,
    redraw() {
      const begun = performance.now();
      app.sheet.draw(true);
      pixel.drawImage(elements.canvas, 0, 0, 1, 1);
      pixel.getImageData(0, 0, 1, 1);
      return performance.now() - begun;
    },
    get frames() {
      return [...app.sheet.frames];
    },
    app,
  };
  void app.start();
}
