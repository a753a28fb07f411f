"""Measure the Pipeline tab in Chromium with software rendering: 16 ranks, 1400 pixels.

    python -m benchmarks.tab

Interactive: the time from the creation of the page's frame, without TensorBoard's own loading, until all spans are
drawn and respond to the pointer. Panel: the time to fill the slowest panel below. Redraw: the time to draw everything,
at several zooms. The targets are 0.5 s and 16 ms for 100,000 spans, 1.5 s and 16 ms for a million.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from tests.support.board import Board
from tests.support.tab import CLOCK, Tab, browser, large

COUNTS = (100_000, 1_000_000)
ROUNDS = 5
ZOOMS = (1, 4, 64, 1024)
REDRAWS = """zoom => {
    const { view } = window.fpipe.app.sheet;
    view.fit();
    view.zoom(zoom);
    return Array.from({ length: 15 }, () => window.fpipe.redraw());
}"""


PANELS = """() => {
    const { tabs } = window.fpipe.app;
    window.fpipe.app.sheet.measure(0, window.fpipe.app.sheet.view.whole / 2);
    return Math.max(...[...tabs.panes].filter(([, { tab }]) => !tab.hidden).map(([panel, { place }]) => {
        const begun = performance.now();
        tabs.filled.delete(panel);
        tabs.open(panel);
        place.getBoundingClientRect();
        return performance.now() - begun;
    }));
}"""


def measured(count: int) -> tuple[float, float, dict[int, float]]:
    """Return medians: seconds until the tab is interactive, and milliseconds of the slowest panel and of redraws."""
    with tempfile.TemporaryDirectory() as logdir, browser() as chromium:
        large(Path(logdir), count)
        with Board(logdir) as board:
            board.until(lambda captures: captures and len(captures[0]["ranks"]) == 16)
            taken, panels = [], []
            for _ in range(ROUNDS):
                page = chromium.new_page(viewport={"width": 1400, "height": 900})
                page.add_init_script(CLOCK)
                tab = Tab(page, board)
                taken.append(tab.js("window.done - window.begun") / 1e3)
                panels.append(tab.js(PANELS))
                redraws = {zoom: statistics.median(tab.js(REDRAWS, zoom)) for zoom in ZOOMS}
                page.close()
            return statistics.median(taken), statistics.median(panels), redraws


def main() -> None:
    print("  ".join(["    spans", "interactive", "      panel", *(f"redraw x{zoom}".rjust(13) for zoom in ZOOMS)]))
    for count in COUNTS:
        taken, panel, redraws = measured(count)
        print(
            "  ".join(
                [
                    f"{count:>9,}",
                    f"{taken:9.2f} s",
                    f"{panel:8.0f} ms",
                    *(f"{time:10.1f} ms" for time in redraws.values()),
                ]
            )
        )


if __name__ == "__main__":
    main()
