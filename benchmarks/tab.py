"""Measure the Pipeline tab in Chromium with software rendering: 16 ranks, 1400 pixels.

    python -m benchmarks.tab
    python -m benchmarks.tab --spans 100000 --rounds 3
    python -m benchmarks.tab --json                 # a list of objects, and nothing else
    python -m benchmarks.tab --out tab.json         # and into a file, with the machine

Interactive: the time from the creation of the page's frame, without TensorBoard's own loading, until all spans are
drawn and respond to the pointer. Panel: the time to fill and lay out each panel below, once its figures are there: what
would help that step, the 40 smaller steps that the run has too, and a measured range of half of the step; the slowest
comes first. Redraw: the time to draw everything, at several zooms. The targets are 0.5 s and 16 ms for 100,000 spans,
1.5 s and 16 ms for a million.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import models
from fpipe import Costs, Placement, Plan, schedules, simulate
from tests.support.board import Board
from tests.support.captures import record
from tests.support.tab import CLOCK, Tab, browser, large

SPANS = (100_000, 1_000_000)
RANKS, SMALL = 16, 40  # ranks, and steps that are small
ZOOMS = (1, 4, 64, 1024)
WORKED_OUT = """async () => {
    const { app } = window.fpipe, { capture } = app;
    const rest = () => new Promise(done => setTimeout(done, 50));
    while (capture.summary === undefined) await rest();
    await app.figures.ask(capture);
    while (capture.whatIf === undefined) await rest();
    await app.steps.load(capture.entry.run);
    while (app.steps.loading) await rest();
    app.sheet.measure(0, app.sheet.view.whole / 2);
    app.sheet.measured();
}"""
PANELS = """() => {
    const { tabs } = window.fpipe.app;
    return [...tabs.panes].filter(([, { tab }]) => !tab.hidden).map(([panel, { place }]) => {
        const begun = performance.now();
        tabs.filled.delete(panel);
        tabs.open(panel);
        place.getBoundingClientRect();
        return [panel.title, performance.now() - begun];
    });
}"""
REDRAWS = """zoom => {
    const { view } = window.fpipe.app.sheet;
    view.fit();
    view.zoom(zoom);
    return Array.from({ length: 15 }, () => window.fpipe.redraw());
}"""


def measured(spans: int, rounds: int) -> dict[str, Any]:
    """Return the medians for a run of so many spans."""
    with tempfile.TemporaryDirectory() as logdir, browser() as chromium:
        small(Path(logdir))
        large(Path(logdir), spans, RANKS, step=SMALL)
        with Board(logdir) as board:
            board.until(lambda captures: [len(each["ranks"]) for each in captures] == [RANKS] * (SMALL + 1))
            taken, panels, redraws = list[float](), dict[str, list[float]](), dict[int, list[float]]()
            for _ in range(rounds):
                page = chromium.new_page(viewport={"width": 1400, "height": 900})
                page.add_init_script(CLOCK)
                tab = Tab(page, board)
                taken.append(tab.js("window.done - window.begun") / 1e3)
                tab.js(WORKED_OUT)
                for title, took in tab.js(PANELS):
                    panels.setdefault(title, []).append(took)
                for zoom in ZOOMS:
                    redraws.setdefault(zoom, []).append(statistics.median(tab.js(REDRAWS, zoom)))
                page.close()
    return {
        "spans": spans,
        "ranks": RANKS,
        "rounds": rounds,
        "interactive_s": statistics.median(taken),
        "panels_ms": {title: statistics.median(each) for title, each in panels.items()},
        "redraws_ms": {str(zoom): statistics.median(each) for zoom, each in redraws.items()},
    }


def small(logdir: Path) -> None:
    """Write steps of 1F1B before the large one."""
    timeline = simulate(schedules.one_f_one_b, Plan(Placement.loop(RANKS), 2 * RANKS), Costs(1e-3, communication=1e-4))
    record(logdir, dict.fromkeys(range(SMALL), timeline))


def show(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        redraws = ", ".join(f"{took:.1f} (x{zoom})" for zoom, took in row["redraws_ms"].items())
        panels = sorted(row["panels_ms"].items(), key=lambda panel: -panel[1])
        print(f"{row['spans']:,} spans, {row['rounds']} rounds: interactive after {row['interactive_s']:.2f} s")
        print(f"  redraws take {redraws} ms")
        print(f"  panels take {', '.join(f'{took:.0f} ({title})' for title, took in panels)} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", nargs="+", type=models.positive, default=list(SPANS))
    parser.add_argument("--rounds", type=models.positive, default=5)
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    models.add_out(parser)
    options = parser.parse_args()
    parts = ([measured(spans, options.rounds)] for spans in options.spans)
    rows = models.report("tab", options.json, parts, show)
    if options.out:
        models.write(options.out, rows)


if __name__ == "__main__":
    main()
