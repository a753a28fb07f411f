/** The Pipeline tab: each rank's effects and idle time by cause. TensorBoard loads this module and calls `render`. */

import { App } from "./app.js";
import { shell } from "./shell.js";

export function render() {
  const elements = shell();
  const app = new App(elements);
  const pixel = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  /**
   * For measurements and tests. `ready` resolves when the first capture, or the empty page, is drawn; `redraw()`
   * redraws everything synchronously and returns the milliseconds, pixels included; `frames` has the milliseconds of
   * the last redraws; `app` is the page's state.
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
