"""The job that `benchmarks.restarts` kills: the script of one rank, which notes when each part of its start is over.

It imports nothing before its first note: each import is a part of the start.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

LAYERS, ROWS, MICROBATCHES, TOKENS = 8, 2, 4, 16
EVERY = 5  # steps from one checkpoint to the next
AFTER = 10  # steps that a job takes once nobody kills it any more
TIMEOUT = 20.0  # of the handler, in seconds
TRACING = "tracing"  # a part of the first step


class Notes:
    """The times at which parts of a start were over, in a file that outlives the process.

    A line is the name of the part, the time of `time.monotonic`, which all processes share, and the process's own
    seconds of CPU time until then.
    """

    def __init__(self, path: Path) -> None:
        began = _process_start()
        self._file = path.with_suffix(".new").open("w", buffering=1)
        self._write("process", began, 0.0)
        self.over("python")
        path.with_suffix(".new").rename(path)  # with these two lines at least

    def over(self, part: str) -> None:
        self._write(part, time.monotonic(), time.process_time())

    @contextmanager
    def during(self, owner: Any, name: str, part: str) -> Iterator[None]:
        """Sum up the time in a method, and note it as a part that begins at 0."""
        function, seconds, cpu = getattr(owner, name), 0.0, 0.0

        @wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            nonlocal seconds, cpu
            began, used = time.monotonic(), time.process_time()
            try:
                return function(*arguments, **options)
            finally:
                seconds, cpu = seconds + time.monotonic() - began, cpu + time.process_time() - used

        setattr(owner, name, timed)
        try:
            yield
        finally:
            setattr(owner, name, function)
            self._write(part, seconds, cpu)

    def _write(self, part: str, seconds: float, cpu: float) -> None:
        self._file.write(json.dumps([part, seconds, cpu, os.getpid()]) + "\n")


def _process_start() -> float:
    """Return the time of `time.monotonic` at which this process was started, to 10 ms."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


def model(ranks: int, width: int, is_split: bool) -> tuple[Any, Any]:
    """Return the pipeline, of one stage for each rank, and its parameters.

    Args:
        is_split: `interop.split` cuts the whole model, by torch.export.
    """
    import torch
    from torch import nn

    from fpipe import interop

    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(LAYERS)
    ]
    size, loss = LAYERS // ranks, nn.functional.mse_loss
    whole, at = nn.Sequential(*layers), range(size, LAYERS, size)
    if is_split:
        example = torch.zeros(ROWS, TOKENS, width)
        return interop.split(whole, at=list(map(str, at)), example=example, loss=loss)
    return interop.from_modules(whole, at=list(at), loss=loss)


def batch(i: int, width: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(i)
    return torch.randn(2, MICROBATCHES * ROWS, TOKENS, width, generator=generator)


def digest(params: Any) -> str:
    """Return a digest of a stage's parameters in bits."""
    import hashlib

    return hashlib.sha256(b"".join(params[name].numpy().tobytes() for name in sorted(params))).hexdigest()


class Training:
    """Training on one rank, or on all of them in one process.

    Args:
        folder: of its checkpoints; None for a run that saves none.
        over: is called with each part of the start that is over.
    """

    def __init__(
        self,
        handler: Any,
        ranks: int,
        width: int,
        is_split: bool,
        folder: Path | None,
        over: Callable[[str], None] = lambda part: None,
    ) -> None:
        import torch

        import fpipe
        from fpipe import Placement, interop

        self.width = width
        pipeline, params = model(ranks, width, is_split)
        plan = pipeline.plan(Placement.loop(ranks), MICROBATCHES)
        self.adam = interop.optimizer(torch.optim.AdamW, lr=1e-3)
        over("model")
        self.step = fpipe.value_and_grad(pipeline, "1f1b", plan, handler=handler)
        over("connecting")
        own = pipeline.params_on(params, plan, handler)
        saved = None if folder is None else interop.Checkpoints(folder, pipeline, plan, handler=handler, keep=2)
        self.run = interop.resume(saved, params=own, optimizer=self.adam.init(own))
        over("loading")

    def steps(self, total: int) -> Iterator[tuple[int, str]]:
        """Train; yield the number of each step and its loss in bits."""
        for i in self.run.steps(total, every=EVERY):
            loss, grads = self.step(self.run.params, *batch(i, self.width))
            self.run.params, self.run.optimizer = self.adam.update(grads, self.run.optimizer, self.run.params)
            yield i, loss.item().hex()


def main(folder: Path, kills: int, ranks: int, width: int, is_split: bool) -> None:
    """Train on one rank, until nobody kills it any more."""
    restart, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    notes = Notes(folder / f"{restart}-{rank}")
    import torch

    notes.over("torch")
    from fpipe import handlers, interop, value_and_grad  # noqa: F401
    from fpipe.autodiff.functions import TraceConfig

    interop.resume, interop.Checkpoints, interop.optimizer, interop.from_modules  # noqa: B018
    notes.over("fpipe")
    torch.set_num_threads(1)
    handler = handlers.auto(timeout=TIMEOUT)
    notes.over("process group")
    training = Training(handler, ranks, width, is_split, folder / "checkpoints", notes.over)
    import torch._dynamo

    notes.over("torch._dynamo")
    begun = training.run.step
    steps = training.steps(10**6 if restart < kills else begun + AFTER)
    with (folder / f"{restart}-{rank}.losses").open("w", buffering=1) as losses:
        with notes.during(TraceConfig, "partition", TRACING):
            losses.write("{} {}\n".format(*next(steps)))
        notes.over("first step")
        for i, loss in steps:
            losses.write(f"{i} {loss}\n")
    (folder / f"end-{rank}").write_text(f"{training.run.step} {digest(training.run.params[rank])}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5] == "True")
