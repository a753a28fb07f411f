"""An observer that records when each effect of a step begins and ends, and when each value arrives.

Invariants:
- memory is allocated once for each rank of this process: doubles for the last complete steps and the current one;
- a step that fails leaves nothing: the next step starts over, and a loop begins behind it;
- a run of the effects that the same step makes again leaves nothing.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import isnan, nan

from fpipe._format import counted, extent
from fpipe.effects import Effect, Name, Recv
from fpipe.errors import ScheduleError
from fpipe.errors.arguments import checked, is_whole
from fpipe.handlers.protocol import Handler, Outcome
from fpipe.profiling.observers import HostTimed
from fpipe.programs.program import Programs, plan_of
from fpipe.timelines.measurement import Columns, Measurement, posts_of


class _Lane:
    """The recording of one rank's step.

    Args:
        effects: of the rank's program; the first is None, so that the first effect of a step always takes the slow
            path, and one more None ends the list.
        posts: value -> indices of the effects that post its receive, its gather or its scatter, in ascending order.
        at: the index of the current effect.
    """

    __slots__ = ("arrivals", "at", "begun", "effects", "ends", "posts", "starts", "waits")

    def __init__(self, effects: list[Effect | None], posts: Mapping[Name, Sequence[int]]) -> None:
        self.effects, self.posts, self.at, self.begun = effects, posts, 0, False
        self.starts, self.ends, self.waits, self.arrivals = (array("d", [nan]) * (len(effects) - 1) for _ in range(4))

    def posted(self, value: Name) -> int:
        """Return the index of the last effect so far that posted a value: a stage is gathered several times."""
        posts = self.posts[value]
        return posts[0] if len(posts) == 1 else posts[bisect_right(posts, self.at) - 1]

    @property
    def complete(self) -> bool:
        return self.at == len(self.effects) - 1


class Recording(HostTimed):
    """An observer that keeps the last complete step, or several, in memory that does not grow.

    Times are the host's: on a GPU, those at which it launches work, not those at which the work runs, which it warns of
    once, unless `clock` is another. `fpipe.tensorboard.Recorder` has the GPU's own times.

    Args:
        programs: those that run: `lower(schedule, plan, depth=prefetch)`, with the prefetch of `value_and_grad`; with
            `schedules.updating(schedule)` where `train_step` updates each stage as soon as its gradients are final.
        clock: returns seconds since any origin; the default is the same clock for all ranks of one machine.
        loop: how many steps in a row a measurement has.

    A process that plays several replicas of the pipeline records the first of them.

    Raises:
        ScheduleError: loop is less than 1; or (in the step) other programs run.

    >>> import torch
    >>> from fpipe import Pipeline, Placement, handlers, lower, schedules, value_and_grad
    >>> pipeline = Pipeline([lambda p, x: x * p] * 2, loss=lambda y, t: y.sum())
    >>> plan = pipeline.plan(Placement.loop(ranks=2), microbatches=2)
    >>> recording = Recording(lower(schedules.gpipe, plan))
    >>> step = value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local(), observe=recording)
    >>> loss, grads = step({0: torch.tensor(2.0), 1: torch.tensor(1.0)}, torch.arange(4.0))
    >>> [type(span.effect).__name__ for span in recording.measurement().timeline().compute(rank=0)]
    ['Forward', 'Forward', 'Backward', 'Backward']
    """

    @checked()
    def __init__(self, programs: Programs, clock: Callable[[], float] = time.perf_counter, loop: int = 1) -> None:
        plan_of(programs)  # one of each rank
        if not is_whole(loop, least=1):
            raise ScheduleError(f"loop must be a whole number of at least 1, not {loop!r}")
        self.programs, self.clock, self.loop = programs, clock, loop
        self._has_warned = clock is not time.perf_counter
        self._effects: dict[int, tuple[list[Effect | None], Mapping[Name, Sequence[int]]]] = {}
        self._lanes: dict[int, _Lane] = {}  # of the current step
        self._last: list[dict[int, _Lane]] = []  # of complete steps before it, in a row, at most `loop`
        self._spare: list[dict[int, _Lane]] = []  # whose times are not needed any more
        self._runs = self._has_begun = False  # a step is under way; it has begun its first effect
        self._before = 0  # complete steps before the current one
        self.replica = 0

    def __repr__(self) -> str:
        return f"<Recording of {extent(plan_of(self.programs))}: {self.steps} complete steps>"

    def on_compile(self, name: str, programs: Programs, handler: Handler) -> None:
        super().on_compile(name, programs, handler)
        self.replica = handler.replicas(plan_of(programs)).here[0]

    def on_step_begin(self) -> None:
        failed, self._runs, self._has_begun = self._runs, True, False
        if failed or not _complete(self._lanes):
            self._start_over()
        if failed and self.loop > 1:
            self._forget()

    def on_step_end(self, outcome: Outcome) -> None:
        super().on_step_end(outcome)
        self.end_step()

    def end_step(self) -> None:
        """Note that a step has ended without an error."""
        self._runs = False

    def begin(self, rank: int, effect: Effect) -> None:
        lane = self._lanes.get(rank) or self._lane(rank)
        if effect is not lane.effects[lane.at]:
            lane = self._placed(lane, rank, effect)
        lane.starts[lane.at] = self.clock()

    def end(self, rank: int, effect: Effect) -> None:
        now = self.clock()
        lane = self._lanes[rank]
        lane.ends[lane.at] = now
        lane.at += 1

    def wait(self, rank: int, value: Name) -> None:
        lane = self._lanes[rank]
        lane.waits[lane.posted(value)] = self.clock()

    def arrive(self, rank: int, value: Name) -> None:
        now = self.clock()
        lane = self._lanes[rank]
        lane.arrivals[lane.posted(value)] = now

    def _lane(self, rank: int) -> _Lane:
        if rank not in self._effects:
            program = self.programs[rank]
            self._effects[rank] = [None, *program.effects[1:], None], posts_of(program)
        self._lanes[rank] = lane = _Lane(*self._effects[rank])
        return lane

    def _placed(self, lane: _Lane, rank: int, effect: Effect) -> _Lane:
        """Return the lane of an effect that is not the object in the lane's current place."""
        effects, at = self.programs[rank].effects, lane.at
        if 0 < at < len(effects) and effect == effects[at]:
            lane.effects[at] = effect  # the next step finds this object without a comparison
        elif effect == effects[0]:
            if lane.begun and self._runs and self._has_begun:
                self._reset()
            elif lane.begun:
                self._start_over()
                lane = self._lanes[rank]
            lane.begun = self._has_begun = True
        else:
            expected = effects[at] if at < len(effects) else "ended"
            raise ScheduleError(
                f"rank {rank} begins {effect}, where the recorded program has {expected}: record the programs that "
                "run, lower(schedule, plan, depth=prefetch), with updating(schedule) where train_step has updates"
            )
        return lane

    def _start_over(self) -> None:
        """Begin a step, after one that completed or failed."""
        if _complete(self._lanes):
            self._last.append(self._lanes)
            self._spare += self._last[: -self.loop]
            del self._last[: -self.loop]
            self._lanes = self._spare.pop() if self._spare else {}
            self._before += 1
            for rank in self._last[-1].keys() - self._lanes.keys():
                self._lane(rank)
        elif self.loop > 1:
            self._forget()
        self._reset()

    def _forget(self) -> None:
        """Forget the steps before the current one."""
        self._spare += self._last
        self._last.clear()

    def _reset(self) -> None:
        """Begin the current step anew."""
        for lane in self._lanes.values():
            lane.at, lane.begun = 0, False

    @property
    def steps(self) -> int:
        """The number of complete steps that have been recorded."""
        return self._before + _complete(self._lanes)

    def measurement(self) -> Measurement:
        """Return the last complete steps of the ranks that this process plays, `loop` in a row.

        Raises:
            ValueError: there are fewer, or the handler does not report when values arrive.
        """
        if not self.steps:
            raise ValueError("no complete step has been recorded: pass observe=recording, and run a step")
        in_row = [*self._last, *([self._lanes] if _complete(self._lanes) else [])][-self.loop :]
        if len(in_row) < self.loop:
            raise ValueError(
                f"{counted(len(in_row), 'complete step')} in a row of {self.loop}: run more, without one that fails"
            )
        for rank, lane in (item for lanes in in_row for item in lanes.items()):
            for at, effect in enumerate(self.programs[rank]):
                if isinstance(effect, Recv) and isnan(lane.arrivals[at]):
                    raise ValueError(
                        f"rank {rank}'s handler never reported that {effect.value} arrived: a handler calls "
                        "observe.arrive"
                    )
        each = {rank: [lanes[rank] for lanes in in_row] for rank in sorted(in_row[-1])}
        return Measurement(self.programs, {rank: _columns(lanes) for rank, lanes in each.items()}, steps=self.loop)


def _columns(lanes: Sequence[_Lane]) -> Columns:
    """Return the times of a rank's steps, one behind the other."""
    times = zip(*((lane.starts, lane.ends, lane.waits, lane.arrivals) for lane in lanes), strict=True)
    return Columns(*(array("d", chain.from_iterable(column)) for column in times))


def _complete(lanes: Mapping[int, _Lane]) -> bool:
    return bool(lanes) and all(lane.complete for lane in lanes.values())
