"""Record a run of four processes, of which one is slow, and take the README's picture of it: docs/pipeline.png.

The stages are timed (benchmarks.timed): tensors, graphs and transfers are real, and a piece sleeps for its cost, so
that a few cores play four ranks. That of rank 2 takes 4.5 times as long as the others. This module uses the tests'
support too: a TensorBoard server (tests.support.board) and the page of the Pipeline tab in a browser
(tests.support.tab).

python -m docs.screenshot          # needs Chromium, as Debian packages it, and playwright
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fpipe
from benchmarks.timed import forward
from fpipe import Pipeline, Placement, handlers
from tests.support.board import Board
from tests.support.tab import Tab, browser

ROOT = Path(__file__).parents[1]
RANKS, MICROBATCHES, WIDTH, SLOW = 4, 8, 1 << 14, 2
SECONDS, SLOWER = 8e-3, 4.5  # of a forward, and how many times that the slow one takes
STEPS = (4, 8, 12)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, browser() as chromium:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command = [*torchrun, "-m", "docs.screenshot", str(Path(folder) / "mine")]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
        with Board(folder) as board:
            board.until(lambda captures: sum(c["step"] == STEPS[-1] for c in captures) == 2)
            page = chromium.new_page(viewport={"width": 1400, "height": 900})
            tab = Tab(page, board)
            tab.show("mine/measured", STEPS[-1])
            tab.until("() => window.fpipe.app.answer && window.fpipe.app.capture.whatIf")
            tab.press("X")  # ranks are folded to their compute
            tab.frame.click("#tab-what-if")
            page.screenshot(path=ROOT / "docs" / "pipeline.png")


def record(logdir: str) -> None:
    """Train on this rank of the job."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def stage(seconds: float) -> Callable[..., Any]:
        return lambda w, x: forward(x, w, [seconds] * 3)

    stages = [stage(SECONDS * (SLOWER if at == SLOW else 1)) for at in range(RANKS)]
    pipeline = Pipeline(stages, lambda output, target: (output - target).square().mean())
    plan, handler = pipeline.plan(Placement.loop(RANKS), MICROBATCHES), handlers.Distributed()
    batch = torch.ones(MICROBATCHES, WIDTH)
    with fpipe.tensorboard.Recorder(logdir, steps=STEPS) as recorder:
        step = fpipe.value_and_grad(pipeline, "1f1b", plan, handler=handler, autodiff="graph", observe=recorder)
        for _ in range(STEPS[-1] + 1):
            step({rank: torch.ones(8, 8)}, batch, torch.zeros_like(batch))
    dist.destroy_process_group()


if __name__ == "__main__":
    record(*sys.argv[1:]) if len(sys.argv) > 1 else main()
