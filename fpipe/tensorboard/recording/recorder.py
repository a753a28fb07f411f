"""An observer that records chosen steps for TensorBoard as timelines, and all of them as curves.

Invariants:
- training goes on whatever happens here: what can't be recorded is a warning;
- spans are kept in memory that is made once; simulating, packing and writing are done by a thread of their own;
- times of two ranks are put together only where their clocks were compared;
- ranks speak with each other over connections of their own, and after one failure no more.
"""

from __future__ import annotations

import os
import resource
import secrets
import sys
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.effects import Effect, Value
from fpipe.errors import ScheduleError, TransportError
from fpipe.handlers.protocol import Handler, Outcome, Store
from fpipe.norms import squares
from fpipe.profiling.gathering import digest, gathered
from fpipe.profiling.recording import Recording
from fpipe.programs.program import Programs
from fpipe.tensorboard.files.writer import Writer
from fpipe.tensorboard.recording.background import Background
from fpipe.tensorboard.recording.captured import Captured, Files
from fpipe.tensorboard.recording.device_clock import Kept, Later, Marks
from fpipe.tensorboard.recording.memory import Held
from fpipe.timelines.measurement import Measurement

FLUSH = 5.0  # seconds after which curves are written, also when no step is captured
PATIENCE = 30.0  # seconds that other ranks have to come with their share of a captured step


class Recorder:
    """Writes what `value_and_grad(..., observe=recorder)` does, a run for each rank: `logdir/measured/rank0`.

    A captured step becomes a timeline in the Pipeline tab, and beside it the one that the simulator predicts from what
    its effects took. Every step gives points of the curves `step/loss`, `step/seconds` (of the call, on the host) and
    `step/samples_per_second`, captured ones those of bubble, times by kind, idle times by cause and memory. What a rank
    holds is looked at in the step before, which is slower for it.

    On CUDA, times are those at which the device passed the effects, read after the next step; else the host's. Ranks of
    several processes compare their clocks after each captured step, so all of them record, with equal arguments, and
    `close` together. Of several replicas of a pipeline each has a folder of its own. What fails here is a warning, and
    training goes on.

    Args:
        logdir: the folder of this run, which `tensorboard --logdir` is given, or one above it.
        every: which steps are captured: the one after the first, which traces, and then every so many. One that is
            captured waits until the one before it is written.
        steps: the numbers of the steps that are captured instead.
        first: the first step's number, in a run that goes on.
        tokens: of one sample, for `step/tokens_per_second`.
        gradient_norm: whether captured steps give the norm of the gradient over all ranks, each parameter once.
        device: whose times are taken, where the handler doesn't say: a CUDA device that `Local()` computes on.

    Raises:
        ValueError: what is asked for can't be; or, once steps ran, a second function is observed.
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
        if every != int(every) or every < 1 or first < 0 or min(steps or [0]) < 0:
            raise ValueError(f"every is at least 1, steps at least 0, not every={every}, steps={steps}, first={first}")
        self.logdir, self.every, self.first, self.tokens = Path(logdir), every, first, tokens
        self.steps = None if steps is None else frozenset(steps)
        self.step, self.gradient_norm = first, gradient_norm
        self.device = None if device is None else torch.device(device)
        self.logdir.mkdir(parents=True, exist_ok=True)
        self._job: _Job | None = None
        self._work = Background()
        self._curves: list[tuple[str, float | Later, int, float]] = []
        self._flushed = self._last = time.perf_counter()
        self._pending: _Pending | None = None
        self._weighs = self._closed = False

    @property
    def agreed(self) -> tuple[object, ...]:
        """What must be the same on all ranks, or they would wait for each other."""
        chosen = None if self.steps is None else tuple(sorted(self.steps))
        deferred = self._job is not None and self._job.marks is not None
        return (("Recorder", self.every, chosen, self.first, self.gradient_norm, deferred),)

    def captures(self, step: int) -> bool:
        """Whether a step is captured."""
        if self.steps is not None:
            return step in self.steps
        return step == self.first + 1 or (step % self.every == 0 and step > self.first)

    def scalar(self, name: str, value: float | Tensor, step: int | None = None) -> None:
        """A point of a curve of one's own, in rank 0's run; what other ranks say is left out.

        Args:
            value: a number as it is now; of one on a device nothing waits.
            step: by default that of the last step that ended.

        Raises:
            ValueError: it is more than one number.
        """
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"{name} is one number, not a tensor of shape {tuple(value.shape)}")
        kept = Later(value) if isinstance(value, Tensor) else float(value)
        self._curves.append((name, kept, max(self.first, self.step - 1) if step is None else step, time.time()))

    # Observing

    def prepare(self, name: str, programs: Programs, handler: Handler) -> None:
        if self._job is not None and self._job.ran:
            raise ValueError("this Recorder observes a function already: give each its own, with a logdir of its own")
        self._job = _Job(self.logdir, name, programs, handler, self.device)

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
        job, captured = self._own, self.captures(self.step) and not self._ended
        job.ran = True
        self._weighs = not self._ended and (self.captures(self.step + 1) or (captured and not job.held))
        if self._weighs:
            job.held = {rank: Held(job.programs[rank], store) for rank, store in job.stores.items()}
        if job.marks is not None:
            job.marks.begin(captured)
        if captured:
            self._work.wait()  # so that writing doesn't slow it down
        job.begun = time.perf_counter()

    def step_ends(self, outcome: Outcome) -> None:
        now = time.perf_counter()
        self._weighs = False
        if not self._ended:
            try:
                self._finish()
                self._note(outcome, now)
                if self.captures(self.step):
                    self._capture(outcome, now)
                if now - self._flushed > FLUSH:
                    self._flush()
            except Exception as error:
                self._work.fail(error)
        self.step += 1
        self._last = now

    def flush(self) -> None:
        """Have all that is captured in the files. All ranks call it."""
        try:
            self._finish()
            self._flush()
        except Exception as error:
            self._work.fail(error)
        self._work.wait()

    def close(self) -> None:
        """Flush, and end the files; steps that follow are not recorded. All ranks call it."""
        if self._closed:
            return
        self.flush()
        self._closed = True
        self._work.close()
        if self._job is not None:
            self._job.files.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and self._job is not None:
            self._job.alone = True  # other ranks may never come
        self.close()

    @property
    def _own(self) -> _Job:
        assert self._job is not None, "a step function prepares its witness"
        return self._job

    @property
    def _ended(self) -> bool:
        return self._closed or self._work.failed

    # Curves of every step

    def _note(self, outcome: Outcome, now: float) -> None:
        if outcome.loss is not None:
            self.scalar("step/loss", outcome.loss, self.step)
            self._own.warn_of_launches(outcome.loss.device)
        self.scalar("step/seconds", now - self._own.begun, self.step)
        if outcome.rows is not None and self.step > self.first:
            speed = outcome.rows / (now - self._last)  # with what is done between steps
            self.scalar("step/samples_per_second", speed, self.step)
            if self.tokens is not None:
                self.scalar("step/tokens_per_second", speed * self.tokens, self.step)

    def _flush(self) -> None:
        self._flushed = time.perf_counter()
        curves, self._curves = self._curves, []
        if curves and _is_first(self._job):
            self._work.do(lambda: self._draw(curves))

    def _draw(self, curves: Sequence[tuple[str, float | Later, int, float]]) -> None:
        writer = self._job.files.writer("measured", 0) if self._job else Writer(self.logdir, "measured", 0)
        for name, value, step, wall in curves:
            writer.scalar(name, value.item() if isinstance(value, Later) else value, step, wall)
        writer.flush()
        if self._job is None:
            writer.close()

    # Captured steps

    def _capture(self, outcome: Outcome, now: float) -> None:
        job, kept, squares = self._own, None, None
        try:
            own: Measurement | ValueError = job.recording.measurement()
            kept = job.marks.keep() if job.marks is not None else None
            squares = _squares(outcome.gradients, job) if self.gradient_norm else None
        except Exception as error:  # the other ranks must be told, who wait for this one's share
            own = ValueError(f"{type(error).__name__}: {error}")
            warnings.warn(f"step {self.step} could not be recorded: {error}", stacklevel=5)
        self._pending = _Pending(self.step, own, kept, (job.begun, now), time.time(), job.peaks(), job.held, squares)
        if job.marks is None:
            self._finish()

    def _finish(self) -> None:
        """Hand the captured step to be written, with all ranks' share; on CUDA the device has passed it by now."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        job, own, width = self._own, pending.own, 0.0
        if pending.kept is not None and isinstance(own, Measurement):
            columns, width = pending.kept.seconds(own.columns)
            own = replace(own, columns=columns)
        squares = pending.squares.item() if pending.squares is not None else None
        apart = getattr(job.handler, "apart", None)
        if apart is not None and not job.alone:
            own, squares = self._gather(pending.step, own, width, squares, apart)
        if isinstance(own, ValueError):
            return
        norm = None if squares is None or job.alone else squares**0.5
        about = pending.step, own, pending.called, pending.wall, pending.peaks, pending.held
        captured = Captured(*about, alone=job.alone, norm=norm)
        self._flush()
        self._work.do(lambda: captured.write(job.files))

    def _gather(
        self, step: int, own: Measurement | ValueError, width: float, squares: float | None, apart: Any
    ) -> tuple[Measurement | ValueError, float | None]:
        """All ranks' times on rank 0's clock, and their sum of squares; else this process's own, and none again."""
        job = self._own
        try:
            group = apart("recorder", min(PATIENCE, job.handler.timeout / 2))  # type: ignore[attr-defined]
            if not job.files.job:
                name = torch.tensor([secrets.randbits(62)])
                group.broadcast(name, 0).wait()
                job.files.job = f"{int(name):x}"
            found = gathered(own, len(job.programs), job.digest, step + 1, time.perf_counter, group)
            if squares is not None:
                whole = torch.tensor([squares], dtype=torch.float64)
                group.allreduce([whole]).wait()
                squares = whole.item()
        except ValueError as error:
            return error, None  # a rank has not captured it, and all were told so
        except (TransportError, ScheduleError, RuntimeError) as error:
            job.alone = True
            warnings.warn(f"from step {step} on this rank is recorded alone: {error}", stacklevel=6)
            return own, None
        off = {rank: uncertainty + width for rank, uncertainty in found.uncertainty.items()}
        return replace(found, uncertainty=off), squares


@dataclass
class _Pending:
    """A captured step whose times may still be marks, and its rank's share alone.

    Args:
        own: of the ranks played here, or why there is none.
        called: when the step was called, and had its results, on this host's clock.
        squares: the sum of squares of this process's share of the gradient.
    """

    step: int
    own: Measurement | ValueError
    kept: Kept | None
    called: tuple[float, float]
    wall: float
    peaks: Mapping[int, tuple[float, str]]
    held: Mapping[int, Held]
    squares: Later | None


class _Job:
    """What is observed, and this process's part in it."""

    def __init__(
        self, logdir: Path, name: str, programs: Programs, handler: Handler, device: torch.device | None
    ) -> None:
        self.programs, self.handler = programs, handler
        self.plan, self.digest = programs[0].plan, digest(programs)
        self.ranks = handler.ranks(self.plan)
        self.devices = _devices(handler, device, self.ranks)
        places = set(self.devices.values())
        self.marks: Marks | None = None
        if len(places) == 1 and (only := next(iter(places))).type == "cuda":
            most = sum(4 * len(programs[rank]) for rank in self.ranks)  # begin, end, wait and arrive, at most
            self.marks = Marks(only, most)
        self.recording = Recording(programs, time.perf_counter if self.marks is None else self.marks)
        self.stores: dict[int, Store] = {}
        self.held: dict[int, Held] = {}
        launched = "" if self.marks else ", times of launching"
        said = {rank: f"{at}{launched if at.type == 'cuda' else ''}" for rank, at in self.devices.items()}
        self.files = Files(logdir, name, programs, said, turns=len(self.ranks) > 1 and len(places) == 1)
        if len(self.ranks) == self.plan.ranks:
            self.files.job = f"{secrets.randbits(62):x}"
        self.begun = 0.0
        self.ran = self.alone = self._warned = False

    def warn_of_launches(self, device: torch.device) -> None:
        """Times that the host has of a device tell little."""
        if device.type == "cuda" and self.marks is None and not self._warned:
            self._warned = True
            warnings.warn(f"recorded times are those of launching: pass Recorder(..., device='{device}')", stacklevel=6)

    def peaks(self) -> dict[int, tuple[float, str]]:
        """By rank, the most memory up to now: of its device's allocator, or of this process."""
        unit = 1 if sys.platform == "darwin" else 1024
        process = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit), "process"
        return {
            rank: (float(torch.cuda.max_memory_allocated(device)), "allocator") if device.type == "cuda" else process
            for rank, device in self.devices.items()
        }


def _devices(handler: Handler, device: torch.device | None, ranks: Sequence[int]) -> dict[int, torch.device]:
    """Where each rank computes, as far as the handler says; a CUDA device has a number."""
    many = getattr(handler, "devices", None) or [device or getattr(handler, "device", torch.device("cpu"))] * len(ranks)
    return {
        rank: torch.device("cuda", torch.cuda.current_device()) if at.type == "cuda" and at.index is None else at
        for rank, at in zip(ranks, many, strict=True)
    }


def _is_first(job: _Job | None) -> bool:
    """Whether this process has rank 0, whose run has the curves."""
    if job is not None:
        return 0 in job.ranks
    return not dist.is_initialized() or dist.get_rank() == 0


def _squares(gradients: Mapping[int, Any], job: _Job) -> Later:
    """The sum of squares of the gradients, of what several ranks have only that of the first of them."""
    return Later(squares(gradients, job.plan, job.ranks).sum())
