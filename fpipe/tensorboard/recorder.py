"""An observer that writes timelines of chosen steps, and curves of all, for TensorBoard.

Invariants:
- training goes on whatever happens here: what can't be written is a warning;
- spans are kept in memory that is made once; simulating, packing and writing are done by a thread of their own;
- times of two ranks are put together only where their clocks were compared.
"""

from __future__ import annotations

import math
import os
import resource
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fpipe.effects import TABLE, Effect, Value
from fpipe.errors import ScheduleError, TransportError
from fpipe.gathering import gathered
from fpipe.handlers.distributed import Distributed
from fpipe.handlers.local import Local
from fpipe.handlers.protocol import Handler, Outcome, Store
from fpipe.handlers.simulator import play
from fpipe.measurement import Measurement
from fpipe.program import Programs
from fpipe.recording import Recording
from fpipe.tensorboard.captures import columns_of
from fpipe.tensorboard.columns import Clock, Header
from fpipe.tensorboard.held import Held
from fpipe.tensorboard.marks import Marks
from fpipe.tensorboard.writer import Writer
from fpipe.timeline import CAUSES, Timeline
from fpipe.tree import flatten

FLUSH = 5.0  # seconds after which curves are written, also when no step is captured
WAITING = 4  # captured steps and pieces of curves that may wait to be written


class Recorder:
    """Writes what `value_and_grad(..., observe=recorder)` does, a run for each rank: `logdir/measured/rank0`.

    A captured step becomes a timeline in the Pipeline tab, and beside it the one that the simulator predicts from what
    its effects took. Every step gives points of the curves `step/loss`, `step/seconds` and `step/samples_per_second`,
    captured ones those of bubble, times by kind, idle times by cause and memory.

    On CUDA, times are those at which the device passed the effects, read after the next step; else the host's. Ranks of
    several processes compare their clocks after each captured step, so all of them record, with equal arguments, and
    `close` together.

    Args:
        logdir: the folder of this run, which `tensorboard --logdir` is given, or one above it.
        every: which steps are captured: the one after the first, which traces, and then every so many.
        steps: the numbers of the steps that are captured instead.
        first: the first step's number, in a run that goes on.
        tokens: of one sample, for `step/tokens_per_second`.
        gradient_norm: whether captured steps give the norm of the gradient over all ranks, each parameter once.
        device: where times are read from; by default the handler's device.

    Raises:
        ValueError: what is asked for can't be; or a second function is observed.
        OSError: (at once) the folder can't be made.

    >>> import tempfile
    >>> from fpipe import Pipeline, Placement, handlers, schedules, value_and_grad
    >>> pipeline = Pipeline([lambda p, x: x * p] * 2, loss=lambda y, t: y.sum())
    >>> plan = pipeline.plan(Placement.loop(ranks=2), microbatches=2)
    >>> logdir = Path(tempfile.mkdtemp())
    >>> with Recorder(logdir, steps=[1]) as recorder:
    ...     step = value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local(), observe=recorder)
    ...     for i in range(2):
    ...         loss, grads = step({0: torch.tensor(2.0), 1: torch.tensor(1.0)}, torch.arange(4.0))
    >>> sorted(str(run.relative_to(logdir)) for run in logdir.glob("*/*"))
    ['measured/rank0', 'measured/rank1', 'predicted/rank0', 'predicted/rank1']
    """

    def __init__(
        self,
        logdir: str | os.PathLike[str],
        every: int = 50,
        steps: Collection[int] | None = None,
        *,
        first: int = 0,
        tokens: int | None = None,
        gradient_norm: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        if every < 1 or first < 0 or min(steps or [0]) < 0:
            raise ValueError(f"every is at least 1, steps at least 0, not every={every}, steps={steps}, first={first}")
        self.logdir, self.every, self.first, self.tokens = Path(logdir), every, first, tokens
        self.steps = None if steps is None else frozenset(steps)
        self.step, self.gradient_norm = first, gradient_norm
        self.device = None if device is None else torch.device(device)
        self.logdir.mkdir(parents=True, exist_ok=True)
        self._job: _Job | None = None
        self._work = _Work()
        self._curves: list[tuple[str, float | Tensor, int, float]] = []
        self._flushed = self._last = time.perf_counter()
        self._pending: _Captured | None = None
        self._weighs = False

    @property
    def agreed(self) -> object:
        """What must be the same on all ranks, or they would wait for each other."""
        chosen = None if self.steps is None else sorted(self.steps)
        return "Recorder", self.every, chosen, self.first, self.gradient_norm

    def captures(self, step: int) -> bool:
        """Whether a step is captured."""
        if self.steps is not None:
            return step in self.steps
        return step == self.first + 1 or (step % self.every == 0 and step > self.first)

    def scalar(self, name: str, value: float | Tensor, step: int | None = None) -> None:
        """A point of a curve of one's own, in rank 0's run; elsewhere nothing happens.

        Args:
            step: by default that of the last step that ended.
        """
        if self._job is None or self._job.lowest == 0:
            value = value.detach() if isinstance(value, Tensor) else float(value)
            self._curves.append((name, value, max(self.first, self.step - 1) if step is None else step, time.time()))

    # Observing

    def prepare(self, name: str, programs: Programs, handler: Handler) -> None:
        if self._job is not None:
            raise ValueError("this Recorder observes a function already: give each its own, with a logdir of its own")
        self._job = _Job(name, programs, handler, self.device)

    def hold(self, rank: int, store: Store) -> None:
        self._own.stores[rank] = store

    def begin(self, rank: int, effect: Effect) -> None:
        if self._weighs:
            self._own.held[rank].begin(effect)
        self._own.recording.begin(rank, effect)

    def end(self, rank: int, effect: Effect) -> None:
        self._own.recording.end(rank, effect)
        if self._weighs:
            self._own.held[rank].end(effect)

    def wait(self, rank: int, value: Value) -> None:
        self._own.recording.wait(rank, value)

    def arrive(self, rank: int, value: Value) -> None:
        self._own.recording.arrive(rank, value)

    def step_begins(self) -> None:
        job = self._own
        captured = self.captures(self.step)
        # What is held is looked at in the step before, so that looking doesn't slow down the one that is captured.
        self._weighs = self.captures(self.step + 1) or (captured and not job.held)
        if self._weighs:
            job.held = {rank: Held(job.programs[rank], store) for rank, store in job.stores.items()}
        if job.marks is not None:
            job.marks.on = captured
        job.begun = time.perf_counter()

    def step_ends(self, outcome: Outcome) -> None:
        now = time.perf_counter()
        self._weighs = False
        self._finish()
        self._note(outcome, now)
        if self.captures(self.step):
            self._capture(outcome, now)
        self.step += 1
        self._last = time.perf_counter()
        if self._last - self._flushed > FLUSH:
            self._flush()

    def flush(self) -> None:
        """Have all that is captured in the files. All ranks call it."""
        self._finish()
        self._flush()
        self._work.wait()

    def close(self) -> None:
        """Flush, and end the files. All ranks call it."""
        self.flush()
        self._work.close()
        for writer in self._own.writers.values() if self._job else ():
            writer.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and self._pending is not None:
            self._pending.alone = True  # other ranks may never come
        self.close()

    # What a step gives

    @property
    def _own(self) -> _Job:
        assert self._job is not None, "a step function prepares its witness"
        return self._job

    def _note(self, outcome: Outcome, now: float) -> None:
        self.scalar("step/loss", outcome.loss, self.step)
        self.scalar("step/seconds", now - self._own.begun, self.step)
        if outcome.rows is not None and self.step > self.first:
            speed = outcome.rows / (now - self._last)  # with what is done between steps
            self.scalar("step/samples_per_second", speed, self.step)
            if self.tokens is not None:
                self.scalar("step/tokens_per_second", speed * self.tokens, self.step)

    def _capture(self, outcome: Outcome, now: float) -> None:
        job = self._own
        try:
            measurement = job.recording.measurement()
        except ValueError as error:
            warnings.warn(f"step {self.step} could not be captured: {error}", stacklevel=4)
            return
        squares = _squares(outcome.gradients, job) if self.gradient_norm else None
        self._pending = _Captured(self.step, measurement, (job.begun, now), time.time(), job.peaks(), job.held, squares)
        if job.marks is None:
            self._finish()

    def _finish(self) -> None:
        """Hand the captured step to be written; on CUDA the device has passed it by now."""
        captured, self._pending = self._pending, None
        if captured is None:
            return
        job, width = self._own, 0.0
        if job.marks is not None:
            columns = dict(captured.measurement.columns)
            for rank, own in columns.items():
                columns[rank], width = job.marks.seconds(own)
            captured.measurement = replace(captured.measurement, columns=columns)
        if isinstance(job.handler, Distributed) and not captured.alone:
            self._gather(captured, job.handler, width)
        self._flush()
        self._work.do(lambda: _write(self.logdir, job, captured))

    def _gather(self, captured: _Captured, handler: Distributed, width: float) -> None:
        """Have all ranks' times on rank 0's clock, and the whole gradient's norm."""
        try:
            group = handler.control
            found = gathered(captured.measurement, self._own.programs, captured.step + 1, time.perf_counter, group)
            if captured.squares is not None:
                squares = captured.squares.to("cpu", torch.float64).reshape(1)
                group.allreduce([squares]).wait()
                captured.squares = squares
        except (TransportError, ScheduleError, ValueError, RuntimeError) as error:
            captured.alone = True
            warnings.warn(f"step {captured.step} is recorded by this rank alone: {error}", stacklevel=5)
        else:
            off = {rank: uncertainty + width for rank, uncertainty in found.uncertainty.items()}
            captured.measurement = replace(found, uncertainty=off)

    def _flush(self) -> None:
        self._flushed = time.perf_counter()
        curves, self._curves = self._curves, []
        if curves:
            self._work.do(lambda: self._draw(curves))

    def _draw(self, curves: Sequence[tuple[str, float | Tensor, int, float]]) -> None:
        writer = self._own.writer(self.logdir, "measured", 0)
        for name, value, step, wall in curves:
            writer.scalar(name, value.item() if isinstance(value, Tensor) else value, step, wall)
        writer.flush()


class _Job:
    """What is observed, and this process's part in it."""

    def __init__(self, name: str, programs: Programs, handler: Handler, device: torch.device | None) -> None:
        self.name, self.programs, self.handler = name, programs, handler
        self.plan = programs[0].plan
        self.ranks = handler.ranks(self.plan)
        self.devices = _devices(handler, device, self.ranks)
        marked = set(self.devices.values())
        self.marks: Marks | None = None
        if len(marked) == 1 and (only := marked.pop()).type == "cuda":
            most = sum(4 * len(programs[rank]) for rank in self.ranks)  # begin, end, wait and arrive, at most
            self.marks = Marks(only, 2 * most)  # a step's are read while the next one runs
        self.recording = Recording(programs, time.perf_counter if self.marks is None else self.marks)
        self.stores: dict[int, Store] = {}
        self.held: dict[int, Held] = {}
        self.writers: dict[tuple[str, int], Writer] = {}
        self.begun = 0.0

    @property
    def lowest(self) -> int:
        return min(self.ranks)

    def writer(self, logdir: Path, kind: str, rank: int) -> Writer:
        if (kind, rank) not in self.writers:
            self.writers[kind, rank] = Writer(logdir, kind, rank)
        return self.writers[kind, rank]

    def peaks(self) -> dict[int, tuple[float, str]]:
        """By rank, the most memory up to now: of its device's allocator, or of this process."""
        unit = 1 if sys.platform == "darwin" else 1024
        process = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit), "process"
        return {
            rank: (float(torch.cuda.max_memory_allocated(device)), "allocator") if device.type == "cuda" else process
            for rank, device in self.devices.items()
        }


def _devices(handler: Handler, device: torch.device | None, ranks: Sequence[int]) -> dict[int, torch.device]:
    if device is not None:
        return dict.fromkeys(ranks, device)
    if isinstance(handler, Distributed):
        return dict.fromkeys(ranks, handler.device)
    if isinstance(handler, Local) and handler.devices is not None:
        return dict(zip(ranks, handler.devices, strict=True))
    return dict.fromkeys(ranks, torch.device("cpu"))


@dataclass
class _Captured:
    """A captured step on its way to the files.

    Args:
        measurement: of the ranks played here, then of all of them.
        called: when the step was called, and had its results, on this host's clock.
        squares: the sum of squares of this process's share of the gradient, then of all of it.
        alone: whether other ranks must not be waited for.
    """

    step: int
    measurement: Measurement
    called: tuple[float, float]
    wall: float
    peaks: Mapping[int, tuple[float, str]]
    held: Mapping[int, Held]
    squares: Tensor | None
    alone: bool = False

    def host(self, rank: int, origin: float) -> list[tuple[str, float, float]]:
        """What the host did before a rank's first effect and after its last, on the clock of the columns."""
        own, offset = self.measurement.columns[rank], self.measurement.offsets.get(rank, 0.0)
        begun, ended = (when - offset for when in self.called)
        parts = ("before the first effect", begun, own.starts[0]), ("after the last effect", max(own.ends), ended)
        return [(what, start - origin, end - origin) for what, start, end in parts if end > start]


def _write(logdir: Path, job: _Job, captured: _Captured) -> None:
    """The ranks played here, as they were measured and as the simulator predicts them; and their curves."""
    measurement = captured.measurement
    timeline = measurement.timeline(partial=captured.alone)
    for rank in job.ranks:
        writer = job.writer(logdir, "measured", rank)
        _write_measured(writer, job, captured, timeline, rank)
        _curves_of(writer, captured, timeline, rank)
    if captured.alone:
        return
    predicted = play(measurement.programs, measurement.costs())
    for rank in job.ranks:
        writer = job.writer(logdir, "predicted", rank)
        header = Header("predicted", captured.step, rank, job.name, job.plan, wall=captured.wall)
        memory = _memory(captured.held.get(rank), predicted, rank)
        writer.timeline(header, columns_of(predicted, rank, sizes=_sizes(captured, rank), memory=memory))
        if rank == 0:
            _bubble(writer, captured, predicted)
            writer.flush()


def _write_measured(writer: Writer, job: _Job, captured: _Captured, timeline: Timeline, rank: int) -> None:
    measurement, own = captured.measurement, captured.measurement.columns[rank]
    clock = None
    if not captured.alone:
        clock = Clock(measurement.offsets.get(rank, 0.0), measurement.uncertainty.get(rank, 0.0))
    origin = measurement.origin
    header = Header(
        kind="measured",
        step=captured.step,
        rank=rank,
        schedule=job.name,
        plan=job.plan,
        clock=clock,
        wall=captured.wall,
        peak=captured.peaks[rank],
        host=captured.host(rank, origin),
        device=str(job.devices[rank]),
    )
    memory = _memory(captured.held.get(rank), timeline, rank)
    used = np.array(own.waits) - origin
    writer.timeline(header, columns_of(timeline, rank, used=used, sizes=_sizes(captured, rank), memory=memory))


def _sizes(captured: _Captured, rank: int) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    held = captured.held.get(rank)
    return None if held is None else np.array(held.sizes)


def _memory(held: Held | None, timeline: Timeline, rank: int) -> Iterator[tuple[float, float]]:
    """What a rank holds over time: during each compute effect, and from its end on."""
    if held is None:
        return
    spans = timeline.spans
    for at, (during, after) in zip(spans.of(rank), zip(held.during, held.after, strict=True), strict=True):
        if TABLE[type(spans.effects[at])].track == "compute":
            yield spans.starts[at], during
            yield spans.ends[at], after


def _curves_of(writer: Writer, captured: _Captured, timeline: Timeline, rank: int) -> None:
    """A rank's share of the curves that captured steps give."""
    step, wall = captured.step, captured.wall
    for kind, taken in timeline.kinds[rank].items():
        writer.scalar(f"time/{kind.__name__}_seconds", taken, step, wall)
    writer.scalar("memory/peak_bytes", captured.peaks[rank][0], step, wall)
    if (held := captured.held.get(rank)) is not None:
        writer.scalar("memory/held_peak_bytes", max(held.during), step, wall)
    if not captured.alone:
        for cause in CAUSES:
            writer.scalar(f"idle/{cause}_seconds", timeline.causes[rank][cause], step, wall)
        if rank == 0:
            _bubble(writer, captured, timeline)
    if rank == 0 and captured.squares is not None:
        writer.scalar("step/gradient_norm", math.sqrt(captured.squares.item()), step, wall)
    writer.flush()


def _bubble(writer: Writer, captured: _Captured, timeline: Timeline) -> None:
    """Measured and predicted have the same names in two runs, which one chart shows together."""
    writer.scalar("bubble/fraction", timeline.bubble_rate, captured.step, captured.wall)
    writer.scalar("bubble/makespan_seconds", timeline.makespan, captured.step, captured.wall)


def _squares(gradients: Mapping[int, Any], job: _Job) -> Tensor:
    """The sum of squares of the gradients, of what several ranks have only that of the first of them."""
    holders = job.plan.placement.holders
    mine = [tree for stage, tree in gradients.items() if holders[stage][0] in job.ranks]
    leaves = [leaf.detach() for leaf in flatten(mine).leaves if isinstance(leaf, Tensor)]
    if not leaves:
        return torch.zeros(())
    return torch.stack([norm.double() for norm in torch._foreach_norm(leaves)]).square().sum()


class _Work:
    """One thread that writes, in order; its first failure is told once, and what follows is left out."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="fpipe recorder")
        self.under_way: deque[Future[None]] = deque()
        self.failed = False

    def do(self, what: Callable[[], None]) -> None:
        """Do it after what came before; waits where that is too much."""
        while self.under_way and (self.under_way[0].done() or len(self.under_way) >= WAITING):
            self._settle()
        if not self.failed:
            self.under_way.append(self.pool.submit(what))

    def wait(self) -> None:
        """Wait until all is done."""
        while self.under_way:
            self._settle()

    def _settle(self) -> None:
        try:
            self.under_way.popleft().result()
        except Exception as error:
            if not self.failed:
                self.failed = True
                warnings.warn(
                    f"nothing more is recorded ({type(error).__name__}: {error}); training goes on", stacklevel=5
                )

    def close(self) -> None:
        self.wait()
        self.pool.shutdown()
