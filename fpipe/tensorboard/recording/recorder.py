"""An observer that records chosen steps for TensorBoard as timelines, and all of them as curves.

Invariants:
- training goes on whatever fails here: a failure is a warning;
- spans are kept in memory that is allocated once; a background thread simulates, packs and writes;
- times of two ranks are combined only if their clocks were compared;
- ranks gather over separate connections, and after one failure never again.
"""

from __future__ import annotations

import os
import resource
import secrets
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.devices import Device, device_of
from fpipe.effects import Effect, Value
from fpipe.errors import ScheduleError
from fpipe.errors.arguments import is_whole
from fpipe.errors.tracebacks import warn
from fpipe.flight.runs import link, unlink
from fpipe.handlers.protocol import Handler, Observer, Outcome, Peers, ValueStore
from fpipe.profiling.gathering import Step, digest, gathered
from fpipe.profiling.recording import Recording
from fpipe.programs.program import Programs
from fpipe.tensorboard.files.writer import Writer
from fpipe.tensorboard.recording.background import Background
from fpipe.tensorboard.recording.captured import Files, StepCapture, folder_of
from fpipe.tensorboard.recording.device_clock import Kept, Later, Marks, Numbers
from fpipe.tensorboard.recording.memory import SlotMemory
from fpipe.timelines.measurement import Measurement
from fpipe.training.norms import squares

FLUSH_INTERVAL = 5.0  # seconds after which curves are written, also if no step is captured
GATHER_TIMEOUT = 30.0  # seconds that one wait for the other ranks may take after a captured step


class Recorder(Observer):
    """Writes the steps of `value_and_grad(..., observe=recorder)`, a run for each rank: `logdir/measured/rank0`.

    A captured step becomes a timeline in the Pipeline tab, next to the one that the simulator predicts from the
    measured times of its effects. Every step adds points to the curves `step/loss`, `step/seconds` (of the call, on the
    host) and `step/samples_per_second`; a captured step also to those of bubble, time by kind, idle time by cause, and
    memory. The memory of a rank is measured in the step before a captured one, which makes that step slower.

    Times are the host's; on a GPU, those at which the device passed the effects, read after the next step. The curve
    `time/launch_bound_seconds` is then an upper bound of the time in which the device waited for the host's launches.
    Ranks in several processes compare their clocks after each captured step, so all of them record, with equal
    arguments, and `close` together. The first replica of a pipeline writes into `logdir`, and has the curves of every
    step; the others write into `logdir/replica1`, `logdir/replica2`, with the times of their own ranks. A process that
    plays several replicas records the first. A failure here is a warning, and training goes on.

    With `loop=` a timeline has several steps in a row. Ranks compare their clocks after the last one alone, so that
    each goes on to the next step when its own part is done, as in training. A loop that would begin within another one
    is not captured. Its curves of times and of idle times are of one step on average, and its `bubble/makespan_seconds`
    is the period, the time from one step to the next in its later half. A step that fails ends a loop.

    The files of the flight recorder of `Distributed` are linked into `logdir/flights`, so that after a crash or in a
    hang the tab shows what each rank did last. `close` removes the links, unless a step has failed.

    Args:
        logdir: the folder of this run; `tensorboard --logdir` takes it, or a folder above it.
        every: which steps are captured: the second (the first one traces), then each multiple of this number. A
            captured step waits until the one before it is written.
        steps: the numbers of the captured steps, instead of `every`.
        first: the number of the first step, in a run that is resumed.
        loop: how many steps in a row a timeline has; `every` and `steps` are the numbers of the first of them.
        tokens: of one sample, for `step/tokens_per_second`.
        gradient_norm: whether captured steps have the norm of the gradient over all ranks, each parameter once.
        device: the device whose times are taken, if the handler has no `devices`: the one `Local()` computes on.

    Raises:
        ValueError: an argument is invalid; `loop` is more than 1 where a device's times are recorded by events; or,
            after a step, a second function is observed.
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
        loop: int = 1,
        tokens: int | None = None,
        gradient_norm: bool = False,
        device: torch.device | str | Device | None = None,
    ) -> None:
        if not (is_whole(every, least=1) and is_whole(loop, least=1)) or first < 0 or min(steps or [0]) < 0:
            raise ValueError(
                f"every and loop must be whole numbers of at least 1, steps and first at least 0, not every={every}, "
                f"loop={loop}, steps={steps}, first={first}"
            )
        self.logdir, self.every, self.first, self.tokens = Path(logdir), every, first, tokens
        self.loop = loop
        self.steps = None if steps is None else frozenset(steps)
        self.step, self.gradient_norm = first, gradient_norm
        self.device = None if device is None else device_of(device)
        self.logdir.mkdir(parents=True, exist_ok=True)
        self._job: _Job | None = None
        self._work = Background()
        self._curves: list[tuple[str, float | Later, int, float]] = []
        self._flushed = self._last = time.perf_counter()
        self._numbers: dict[torch.device, Numbers] = {}
        self._pending: _Pending | None = None
        self._measures_memory = self._closed = False
        self._loop: range | None = None  # the numbers of the steps that are being captured

    def __repr__(self) -> str:
        steps = f"every {self.every}" if self.steps is None else f"{sorted(self.steps)}"
        loop = f", {self.loop} from each" if self.loop > 1 else ""
        return f"<Recorder into {self.logdir}: steps {steps}{loop}; now {self.step}>"

    @property
    def agreed(self) -> tuple[object, ...]:
        chosen = None if self.steps is None else tuple(sorted(self.steps))
        deferred = self._job is not None and self._job.marks is not None
        return (("Recorder", self.every, chosen, self.first, self.loop, self.gradient_norm, deferred),)

    def captures(self, step: int) -> bool:
        """Return whether a step is captured, or the first of several that are."""
        if self.steps is not None:
            return step in self.steps
        return step == self.first + 1 or (step % self.every == 0 and step > self.first)

    def scalar(self, name: str, value: float | Tensor, step: int | None = None) -> None:
        """Add a point to a curve, in rank 0's run; calls on other ranks do nothing.

        Args:
            value: the number as it is now; does not wait for the device of a tensor.
            step: by default the last step that ended.

        Raises:
            ValueError: the value is more than one number, or complex.
        """
        if isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex()):
            kind = "complex tensor" if value.is_complex() else "tensor"
            raise ValueError(f"{name} must be one number, not a {kind} of shape {tuple(value.shape)}")
        number = self._later(value) if isinstance(value, Tensor) else float(value)
        self._curves.append((name, number, max(self.first, self.step - 1) if step is None else step, time.time()))

    def _later(self, number: Tensor) -> Later:
        if number.device not in self._numbers:
            own = self.device if self.device and self.device.torch_device == number.device else number.device
            self._numbers[number.device] = Numbers(device_of(own))
        return self._numbers[number.device].later(number)

    # Observing

    def on_compile(self, name: str, programs: Programs, handler: Handler) -> None:
        if self._job is not None and self._job.ran:
            raise ValueError(
                "this Recorder observes a function already: make one Recorder for each function, with its own logdir"
            )
        self._job = _Job(self.logdir, name, programs, handler, self.device, self.loop)

    def on_store(self, rank: int, store: ValueStore) -> None:
        self._own.stores[rank] = store

    def begin(self, rank: int, effect: Effect) -> None:
        if self._measures_memory:
            self._own.memory[rank].begin(effect)
        self._own.recording.begin(rank, effect)

    def end(self, rank: int, effect: Effect) -> None:
        self._own.recording.end(rank, effect)
        if self._measures_memory:
            self._own.memory[rank].end(effect)

    def wait(self, rank: int, value: Value) -> None:
        self._own.recording.wait(rank, value)

    def arrive(self, rank: int, value: Value) -> None:
        self._own.recording.arrive(rank, value)

    def on_step_begin(self) -> None:
        job = self._own
        is_free = self._loop is None or self.step == self._loop[0]  # the first step of a loop that failed begins again
        captured = is_free and self.captures(self.step) and not self._ended
        if captured:
            self._loop = range(self.step, self.step + self.loop)
        if not job.ran:
            job.ran = True
            self._link()
        job.recording.on_step_begin()
        is_next = self.captures(self.step + 1) and (self._loop is None or self.step + 1 not in self._loop)
        self._measures_memory = not self._ended and (is_next or (captured and not job.memory))
        if self._measures_memory:
            job.memory = {rank: SlotMemory(job.programs[rank], store) for rank, store in job.stores.items()}
        if job.marks is not None:
            job.marks.begin(captured)
        if captured:
            self._work.wait()  # so that writing does not slow the step down
        job.start = time.perf_counter()
        if captured:
            job.begun = job.start

    def on_step_end(self, outcome: Outcome) -> None:
        now = time.perf_counter()
        self._measures_memory = False
        self._own.recording.end_step()
        if not self._ended:
            try:
                self._finish()
                self._note(outcome, now)
                if self._loop is not None and self.step == self._loop[-1]:
                    first, self._loop = self._loop[0], None
                    self._capture(first, outcome, now)
                if now - self._flushed > FLUSH_INTERVAL:
                    self._flush()
            except Exception as error:  # of any kind: training goes on
                self._work.fail(error)
        self.step += 1
        self._last = now

    def _link(self) -> None:
        """Link the flight recorder's file into the logdir, where the tab finds it after a failure."""
        if (flight := getattr(self._own.handler, "flight", None)) is not None:
            try:
                link(flight, self.logdir)
            except OSError as error:
                warn(f"the flight recorder is not linked into {self.logdir}: {error}")

    def flush(self) -> None:
        """Write everything that is captured, if no peer has failed. All ranks call it."""
        try:
            if self._job is not None:
                self._job.handler.check()
            self._finish()
            self._flush()
        except Exception as error:  # of any kind: training goes on
            self._work.fail(error)
        self._work.wait()

    def close(self) -> None:
        """Flush, and close the files; later steps are not recorded. All ranks call it."""
        if self._closed:
            return
        self.flush()
        self._closed = True
        self._work.close()
        if self._job is not None:
            self._job.files.close()
            if (flight := getattr(self._job.handler, "flight", None)) is not None:
                unlink(flight, self.logdir)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and self._job is not None:
            self._job.alone = True  # other ranks may never come
        self.close()

    @property
    def _own(self) -> _Job:
        assert self._job is not None, "value_and_grad calls on_compile first"
        return self._job

    @property
    def _ended(self) -> bool:
        return self._closed or self._work.failed

    # Curves of every step

    def _note(self, outcome: Outcome, now: float) -> None:
        if outcome.loss is not None:
            self.scalar("step/loss", outcome.loss, self.step)
            self._own.warn_of_launches(outcome.loss.device)
        self.scalar("step/seconds", now - self._own.start, self.step)
        if outcome.rows is not None and self.step > self.first:
            speed = outcome.rows / (now - self._last)  # with the time between steps
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

    def _capture(self, first: int, outcome: Outcome, now: float) -> None:
        """Take what is measured of this process's ranks, from the first captured step to the one that ends now."""
        job, marks, total = self._own, None, None
        try:
            measurement: Measurement | ValueError = job.recording.measurement()
            marks = job.marks.keep() if job.marks is not None else None
            total = self._later(squares(outcome.gradients, job.plan, job.handler).sum()) if self.gradient_norm else None
        except Exception as error:  # the other ranks wait for this one's share: send them the error
            measurement = ValueError(f"{type(error).__name__}: {error}")
            warn(f"step {self.step} could not be recorded: {error}")
        capture = partial(
            StepCapture,
            first,
            called=(job.begun, now),
            wall=time.time(),
            peaks=job.peaks(),
            memory=job.memory,
            beside=[replace(each) for each in list(getattr(job.handler, "beside", None) or ())],  # as it is now
        )
        self._pending = _Pending(self.step, measurement, marks, total, capture)
        if job.marks is None:
            self._finish()

    def _finish(self) -> None:
        """Gather the captured step from all ranks, and queue it for writing; the device has passed it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        job, measurement, width, launch_bound = self._own, pending.measurement, 0.0, dict[int, float]()
        if pending.marks is not None and isinstance(measurement, Measurement):
            launch_bound = pending.marks.launch_bound(measurement.columns)
            columns, width = pending.marks.seconds(measurement.columns)
            measurement = replace(measurement, columns=columns)
        squares = pending.squares.item() if pending.squares is not None else None
        if job.handler.peers is not None and not job.alone:
            measurement, squares = self._gather(pending.step, measurement, width, squares, job.handler.peers)
        if isinstance(measurement, ValueError):
            return
        norm = None if squares is None or job.alone else squares**0.5
        captured = pending.capture(measurement=measurement, alone=job.alone, norm=norm, launch_bound=launch_bound)
        self._flush()
        self._work.do(lambda: captured.write(job.files))

    def _gather(
        self, step: int, measurement: Measurement | ValueError, width: float, squares: float | None, peers: Peers
    ) -> tuple[Measurement | ValueError, float | None]:
        """Return all ranks' times on one clock, and their sum of squares; on a failure this process's own times.

        Args:
            width: the error of this process's times, in seconds.
        """
        job = self._own

        def share() -> Measurement:
            if isinstance(measurement, ValueError):
                raise measurement
            return measurement

        try:
            timeout = GATHER_TIMEOUT if peers.timeout is None else min(GATHER_TIMEOUT, peers.timeout / 2)
            group = peers.new_group("the recorder", timeout=timeout, error=ValueError)
            place = job.replica, job.ranks[0]
            shares = group.gather((secrets.randbits(62), squares, width, place), "capture")
            job.files.job = job.files.job or f"{shares[0][0]:x}"
            whole = gathered(share, Step(job.digest, job.replica, step + 1), time.perf_counter, group)
        except (ScheduleError, RuntimeError) as error:
            job.alone = True
            warn(f"from step {step} on this rank is recorded alone: {error}")
            return measurement, None
        except ValueError as error:
            return error, None  # a rank has not captured the step, which is an error on all ranks
        if squares is not None:
            squares = sum(each for _, each, *_ in shares if each is not None)
        widths = {rank: width for *_, width, (replica, rank) in shares if replica == job.replica}
        uncertainty = {rank: error + widths[rank] for rank, error in whole.uncertainty.items()}
        return replace(whole, uncertainty=uncertainty), squares


class _Pending(NamedTuple):
    """A captured step of this process's ranks, whose times may still be marks of a device.

    Args:
        measurement: the measurement of these ranks, or the reason why there is none.
        squares: the sum of squares of this process's part of the gradient.
        capture: makes the capture, when all ranks' measurement is known.
    """

    step: int
    measurement: Measurement | ValueError
    marks: Kept | None
    squares: Later | None
    capture: Callable[..., StepCapture]


class _Job:
    """The function that is observed, and this process's ranks of it."""

    def __init__(
        self, logdir: Path, name: str, programs: Programs, handler: Handler, device: Device | None, loop: int
    ) -> None:
        self.programs, self.handler = programs, handler
        self.plan, self.digest = programs[0].plan, digest(programs)
        self.ranks = handler.ranks(self.plan)
        self.replica = handler.replicas(self.plan).here[0]
        devices = [device or "cpu"] * len(self.ranks) if handler.devices is None else handler.devices
        self.devices = {rank: device_of(at) for rank, at in zip(self.ranks, devices, strict=True)}
        first, *others = self.devices.values()
        is_one = all(each.torch_device == first.torch_device for each in others)
        self.marks: Marks | None = None
        if is_one and first.asynchronous:
            if loop > 1:
                raise ValueError(
                    f"loop={loop} does not go with the times of {first.torch_device}, which are kept for one step: "
                    "capture steps with loop=1, for example steps=[4, 5, 6]"
                )
            self.marks = Marks(first, sum(4 * len(programs[rank]) for rank in self.ranks))  # begin, end, wait, arrive
        self.recording = Recording(programs, time.perf_counter if self.marks is None else self.marks, loop)
        self.stores: dict[int, ValueStore] = {}
        self.memory: dict[int, SlotMemory] = {}
        launched = "" if self.marks else ", times of launching"
        texts = {r: f"{at.torch_device}{launched if at.asynchronous else ''}" for r, at in self.devices.items()}
        turns = len(self.ranks) * len(handler.replicas(self.plan).here) > 1 and is_one
        self.files = Files(folder_of(logdir, self.replica), name, texts, turns=turns, replica=self.replica)
        if len(self.ranks) == self.plan.ranks:
            self.files.job = f"{secrets.randbits(62):x}"
        self.start = self.begun = 0.0  # of the current step, and of the first one that is captured
        self.ran = self.alone = self._warned = False

    def warn_of_launches(self, device: torch.device) -> None:
        """Warn once that the host's times of a device are times of launching."""
        if self.marks is None and not self._warned and device_of(device).asynchronous:
            self._warned = True
            warn(f"recorded times are times of launching: pass Recorder(..., device='{device}')")

    def peaks(self) -> dict[int, tuple[float, str]]:
        """Return by rank the peak memory up to now: of its device's allocator, or of this process."""
        unit = 1 if sys.platform == "darwin" else 1024
        process = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit), "process"
        peaks = {rank: device.peak_bytes() for rank, device in self.devices.items()}
        return {rank: process if peak is None else (float(peak), "allocator") for rank, peak in peaks.items()}


def _is_first(job: _Job | None) -> bool:
    """Return whether this process plays rank 0 of replica 0, which writes the curves."""
    if job is not None:
        return 0 in job.ranks and job.replica == 0
    return not dist.is_initialized() or dist.get_rank() == 0
