"""Record a run of the example in two processes, and take the README's picture of it: docs/pipeline.png.

This module uses the tests' support: a TensorBoard server (tests.support.board) and the page of the Pipeline tab in a
browser (tests.support.tab).

python -m docs.screenshot          # needs Chromium, as Debian packages it, and playwright
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.board import Board
from tests.support.tab import Tab, browser

ROOT = Path(__file__).parents[1]
STEP = 20
RUN = ("--standalone", "--nproc-per-node", "2", "examples/train_gpt.py", "--schedule", "zb-v", "--microbatches", "8")
SIZE = ("--width", "128", "--context", "128", "--steps", str(STEP + 1), "--every", str(STEP))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, browser() as chromium:
        command = [sys.executable, "-m", "torch.distributed.run", *RUN, *SIZE, "--logdir", folder]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
        with Board(folder) as board:
            board.until(lambda captures: sum(c["step"] == STEP for c in captures) == 2)
            page = chromium.new_page(viewport={"width": 1400, "height": 820})
            tab = Tab(page, board)
            (run,) = {c["run"] for c in board.json("index")["captures"] if c["kind"] == "measured"}
            tab.show(run, STEP)
            tab.until("() => window.fpipe.app.answer && window.fpipe.app.capture.whatIf")
            page.screenshot(path=ROOT / "docs" / "pipeline.png")


if __name__ == "__main__":
    main()
