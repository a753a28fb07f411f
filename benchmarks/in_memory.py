"""Measure the cost of memory checkpoints: steps with one after each and without, in the same processes, in turn.

    python -m benchmarks.in_memory                      # 2 ranks, widths 256 and 512
    python -m benchmarks.in_memory --width 256 --json   # a list of objects, and nothing else

The model and data of `benchmarks.peers`, by 1F1B over gloo, one thread a process, with AdamW, fused and donated. A
round runs a block of steps with memory checkpoints and one without, in alternating order. `ms` and `plain_ms` are
medians of the rounds, by the clock; `ratio` is the median of the rounds' ratios. `cpu_ratio` is that of the processor
time of rank 0 in the same blocks, all its threads, which other programs disturb less. Of this, `write_ms` is that of a
checkpoint in the thread that trains, and `beside_ms` that in all other threads, by the median of the rounds'
differences; `share` is the sum of these two over the steps without. `bytes` is the size. A width has a row with a
checkpoint after each step, and two rows with `neighbour`, after each step and after each eighth: there each rank plays
a host, and sends its checkpoints to the other one, through the loopback, while the next step runs.
"""

from __future__ import annotations

import gc
import itertools
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import fpipe
from benchmarks import models
from fpipe import Placement, handlers, interop, schedules
from fpipe.stages.pytree import flatten

FILES = 3  # of a process at most, which are written in turn
CASES = ((False, 1), (True, 1), (True, 8))
"""`neighbour` and `every` of `interop.Memory`."""


class Seconds(NamedTuple):
    """Seconds of a step, by the clock and of processor time: of all threads, and of all but the one that trains."""

    clock: float
    cpu: float
    beside: float

    @classmethod
    def now(cls) -> Seconds:
        cpu = time.process_time()
        return cls(time.perf_counter(), cpu, cpu - time.thread_time())


class Training:
    """A training state, and the step that replaces it."""

    def __init__(
        self, rank: int, ranks: int, width: int, handler: handlers.Distributed, folder: str, memory: interop.Memory
    ) -> None:
        modules = models.stages(models.layers(width), ranks)
        pipeline, params = interop.from_modules(modules, loss=models.loss_fn)
        plan = pipeline.plan(Placement.loop(ranks), models.MICROBATCHES)
        adamw = interop.optimizer(torch.optim.AdamW, lr=1e-4, fused=True, donate=True)
        self.params = pipeline.params_on(params, plan, rank)
        self.optimizer, self.number, self.data = adamw.init(self.params), 0, models.data(width)
        self.train = fpipe.train_step(pipeline, schedules.one_f_one_b, plan, adamw, handler=handler)
        self.every = memory.every
        self.checkpoints = interop.Checkpoints(folder, pipeline, plan, handler=handler, memory=memory)
        self.checkpoints.resume(params=self.params, optimizer=self.optimizer, step=0)
        self.write_seconds: list[float] = []

    def step(self) -> None:
        self.params, self.optimizer, _ = self.train(self.params, self.optimizer, *self.data)
        self.number += 1

    def step_and_write(self) -> None:
        self.step()
        start = time.thread_time()
        self.write(self.number)
        if self.number % self.every == 0:
            self.write_seconds.append(time.thread_time() - start)

    def write(self, number: int) -> None:
        self.checkpoints.keep_in_memory(params=self.params, optimizer=self.optimizer, step=number)

    @property
    def bytes(self) -> int:
        return sum(leaf.nbytes for leaf in flatten((self.params, self.optimizer)).leaves)


def block(step: Callable[[], object], steps: int) -> Seconds:
    """Return the mean of some steps, after an uncounted one."""
    gc.collect()
    step()
    dist.barrier()
    start = Seconds.now()
    for _ in range(steps):
        step()
    dist.barrier()
    return Seconds(*((end - begin) / steps for end, begin in zip(Seconds.now(), start, strict=True)))


def job(
    rank: int, ranks: int, widths: Sequence[int], rounds: int, folder: str, hosts: str
) -> Iterator[list[dict[str, Any]]]:
    """Run one process: yield a row for every width and case, as measured on rank 0.

    Args:
        hosts: a folder in shared memory where each rank plays a host of its own.
    """
    handler = handlers.Distributed(timeout=models.TIMEOUT)
    for width, (neighbour, every) in itertools.product(widths, CASES):
        memory = interop.Memory(every=every, neighbour=neighbour, folder=f"{hosts}/{rank}" if neighbour else "/dev/shm")
        training, steps = Training(rank, ranks, width, handler, folder, memory), max(every, 1024 // width)
        ways = [training.step_and_write, training.step]
        for way in ways * 2:
            way()
        for turn in range(FILES):  # which are laid out by the first write
            training.write(turn * every)
        training.write_seconds.clear()
        times: list[tuple[Seconds, ...]] = []
        gc.disable()
        for i in range(rounds):
            pair = [block(way, steps) for way in ways[:: 1 if i % 2 else -1]]
            times.append(tuple(pair[:: 1 if i % 2 else -1]))
        gc.enable()
        training.checkpoints.clear_memory()
        write = statistics.median(training.write_seconds)
        beside = every * statistics.median(kept.beside - plain.beside for kept, plain in times)
        yield [
            {
                "width": width,
                "ranks": ranks,
                "neighbour": neighbour,
                "every": every,
                "ms": 1e3 * statistics.median(kept.clock for kept, _ in times),
                "plain_ms": 1e3 * statistics.median(plain.clock for _, plain in times),
                "ratio": statistics.median(kept.clock / plain.clock for kept, plain in times),
                "cpu_ratio": statistics.median(kept.cpu / plain.cpu for kept, plain in times),
                "share": (write + beside) / every / statistics.median(plain.cpu for _, plain in times),
                "write_ms": 1e3 * write,
                "beside_ms": 1e3 * beside,
                "bytes": training.bytes,
                "rounds": rounds,
            }
        ]


def show(rows: Sequence[dict[str, Any]]) -> None:
    for r in rows:
        print(
            "width {width}, {ranks} ranks, every {every}{0}: {ms:.1f} ms a step, ".format(
                ", neighbour" * r["neighbour"], **r
            ),
            end="",
        )
        print("{plain_ms:.1f} without".format(**r), end="")
        print(", ratio {ratio:.3f}, of processor time {cpu_ratio:.3f}".format(**r), end="")
        print("; a checkpoint of {0:.1f} MiB takes {write_ms:.2f} ms of it".format(r["bytes"] / 2**20, **r), end="")
        print(" and {beside_ms:.2f} beside, {share:.2%} of the steps".format(**r), flush=True)


def main() -> None:
    parser = models.parser(__doc__, rounds=11, limit=1800)
    parser.add_argument("--ranks", type=int, nargs="+", choices=models.RANKS, default=[2])
    parser.add_argument("--width", type=int, nargs="+", choices=models.WIDTHS, default=[256, 512])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        for rank in range(max(options.ranks)):
            pathlib.Path(shared, str(rank)).mkdir()
        arguments = options.width, options.rounds, folder, shared
        parts = (
            part for ranks in options.ranks for part in models.in_processes(job, ranks, *arguments, limit=options.limit)
        )
        models.run("in_memory", options, parts, show)


if __name__ == "__main__":
    main()
