"""One traced step as a measurement: its programs, and each effect's times. No torch."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import NamedTuple

from fpipe.effects import Effect, Name, Overlap, Recv, Send, parts
from fpipe.errors import ScheduleError
from fpipe.interop.torch_csv import from_csv
from fpipe.interop.torch_traces.annotations import Action, RankTrace
from fpipe.interop.torch_traces.reading import BadTrace
from fpipe.interop.torch_traces.steps import WholeStep, check_stages
from fpipe.plan import Plan, Schedule
from fpipe.programs.lowering import collect, communicate, reduce
from fpipe.programs.program import Program, Programs, plan_of
from fpipe.programs.verifier import check
from fpipe.timelines.measurement import Columns


class Origin(NamedTuple):
    """What times count from: a trace's time in microseconds, and what that counts from, nanoseconds after 1970."""

    time: float
    base: int

    def seconds(self, time: float, trace: RankTrace) -> float:
        """Return a time of a trace, on its own clock."""
        return 1e-6 * (time - self.time + (trace.base - self.base) / 1e3)

    @property
    def wall(self) -> float:
        """Seconds since 1970; 0 if the traces do not say when they were made."""
        wall = self.base / 1e9 + self.time / 1e6
        return wall if 1e9 < wall < 1e11 else 0.0


class Message(NamedTuple):
    """A message between two ranks: when it was posted by one, and when the other had it; each on its own clock."""

    source: int
    target: int
    posted: float
    had: float


class Order(NamedTuple):
    """An order of actions as programs.

    Args:
        programs: complete, with torch's sends and receives where these are in the traces.
        traced: each rank's effects of its actions, one each.
    """

    schedule: Schedule
    programs: Programs
    traced: Mapping[int, Sequence[Effect]]

    @property
    def plan(self) -> Plan:
        return plan_of(self.programs)


class Orders:
    """The programs of steps, made once for each order."""

    def __init__(self) -> None:
        self._known = dict[str, Order]()

    def of(self, step: WholeStep) -> Order:
        """Return the order of a step.

        Raises:
            BadTrace: it is no schedule's.
        """
        check_stages(step.parts)
        text = "\n".join(",".join(action.cell for action in step.parts[rank].actions) for rank in sorted(step.parts))
        if text not in self._known:
            try:
                schedule, plan = from_csv(text)
                programs = collect(schedule, plan)
                traced = {rank: program.effects for rank, program in programs.items()}
                programs = reduce(_communicating(programs))
                check(programs, ordered=False)
            except ScheduleError as error:
                raise BadTrace(
                    f"step {step.number} is no whole schedule: {error}; record it again, with the profiler around "
                    "whole steps of all ranks"
                ) from None
            self._known[text] = Order(schedule, programs, traced)
        return self._known[text]


@dataclass(frozen=True)
class TimedStep:
    """A step whose ranks' times are each on the rank's own clock, in seconds from an origin."""

    number: int
    order: Order
    columns: Mapping[int, Columns]

    @property
    def messages(self) -> Iterable[Message]:
        """The messages of which both ends are known: a send cannot come after its arrival.

        An overlap waits within it for its second part's, so that its arrivals are bounds from below.
        """
        sends = {
            (effect.value, effect.rank): (rank, self.columns[rank].starts[at])
            for rank, program in self.order.programs.items()
            for at, effect in enumerate(program)
            if isinstance(effect, Send)
        }
        for rank, program in self.order.programs.items():
            overlapped = {
                name
                for each in program
                if isinstance(each, Overlap)
                for name in program.table.needs(each, program.plan)
            }
            for at, effect in enumerate(program):
                if isinstance(effect, Recv) and effect.value not in overlapped:
                    source, posted = sends[effect.value, rank]
                    yield Message(source, rank, posted, self.columns[rank].arrivals[at])


def _communicating(programs: Programs) -> Programs:
    """Return the programs with sends and receives: torch's, or where these are not in the traces the plan's."""
    sends = any(isinstance(effect, Send | Recv) for program in programs.values() for effect in program)
    return programs if sends else communicate(programs)


def timed(step: WholeStep, order: Order, origin: Origin, on_device: bool) -> TimedStep:
    """Return a step with the times of each effect: on the rank's device, or on its host."""
    columns = dict[int, Columns]()
    for rank, part in step.parts.items():
        actions = dict(zip(order.traced[rank], part.actions, strict=True))
        columns[rank] = _Rank(order.programs[rank], actions, part.trace, origin, on_device).columns()
    return TimedStep(step.number, order, columns)


class _Pass(NamedTuple):
    """When a rank ran a pass, and its wait before.

    Args:
        used, had: when it began to wait for a value of another rank, and when it had that.
    """

    start: float
    end: float
    used: float
    had: float


class _Rank:
    """The times of one rank's effects.

    A host that waits within a pass waits at its beginning. A device begins a pass when it is free and its values are
    there, whatever the host does; and it sends and receives after the pass before, as NCCL's streams wait for it.
    """

    def __init__(
        self, program: Program, actions: Mapping[Effect, Action], trace: RankTrace, origin: Origin, on_device: bool
    ) -> None:
        self.program, self.actions, self.on_device = program, actions, on_device
        self.origin, self.trace = origin, trace
        self._receive_of = {effect.value: effect for effect in program if isinstance(effect, Recv)}
        self._consumers = dict[Name, int]()  # the first use of each value that is received
        for at, effect in enumerate(program):
            if not isinstance(effect, Recv):
                for name in self._needs(effect):
                    if name in self._receive_of:
                        self._consumers.setdefault(name, at)

    def _seconds(self, time: float) -> float:
        return self.origin.seconds(time, self.trace)

    def columns(self) -> Columns:
        passes = self._passes()
        columns = Columns(*(array("d", [nan]) * len(self.program) for _ in range(4)))
        free, later = -inf, deque(sorted(passes))
        for at, effect in enumerate(self.program):
            if at in passes:
                start, end = passes[at].start, passes[at].end
                free = end
                later.popleft()
            else:
                start, end = self._post(effect, free, passes[later[0]].start if later else inf)
            columns.starts[at], columns.ends[at] = start, end
            if isinstance(effect, Recv):
                use = passes[consumer := self._consumers[effect.value]]
                first = effect.value in self._needs(parts(self.program.effects[consumer])[0])
                columns.waits[at] = max(start, use.used if first else use.had)  # one wait for both parts of an overlap
                columns.arrivals[at] = max(columns.waits[at], use.had)
        return columns

    def _passes(self) -> dict[int, _Pass]:
        """Return the times of each pass, by its index in the program."""
        passes, free = dict[int, _Pass](), -inf
        for at, effect in enumerate(self.program):
            if self.program.table.effects[type(effect)].track == "compute":
                passes[at] = each = self._on_device(effect, free) if self.on_device else self._on_host(effect, free)
                free = each.end
        return passes

    def _on_host(self, effect: Effect, free: float) -> _Pass:
        action = self.actions[effect]
        begin = max(self._seconds(action.start), free)
        end = max(self._seconds(action.end if action.sent is None else min(action.sent, action.end)), begin)
        posts = [post for post in self._posts_for(parts(effect)[0]) if post is not None]
        times = [post.received[1] for post in posts if post.received]
        if not times and action.received and self._posts_for(effect):
            times = [action.received[1]]
        had = self._seconds(max(times)) if times else begin
        if had > begin:  # it waited within the pass
            return _Pass(min(had, end), end, begin, min(had, end))
        return _Pass(begin, end, *self._wait(free, had, begin))

    def _on_device(self, effect: Effect, free: float) -> _Pass:
        start, end = (self._seconds(time) for time in self.actions[effect].device or (0.0, 0.0))
        begin = max(start, free)
        arrived = [post.device[1] for post in self._posts_for(effect) if post is not None and post.device]
        had = self._seconds(max(arrived)) if arrived else begin
        return _Pass(begin, max(end, begin), *self._wait(free, min(had, begin), begin))

    def _wait(self, free: float, had: float, begin: float) -> tuple[float, float]:
        """Return when a free rank began to wait, and when it had what it waited for, before a pass began."""
        used = free if free > -inf else min(had, begin)
        return used, max(used, had)

    def _posts_for(self, effect: Effect) -> list[Action | None]:
        """Return the actions that post the receives for a pass; None for one that is not in the trace."""
        values = [value for value in self._needs(effect) if value in self._receive_of]
        return [self.actions.get(self._receive_of[value]) for value in values]

    def _needs(self, effect: Effect) -> Sequence[Name]:
        return self.program.table.needs(effect, self.program.plan)

    def _post(self, effect: Effect, free: float, until: float) -> tuple[float, float]:
        """Return when an effect ran that runs between two passes.

        Args:
            free, until: the end of the pass before and the start of the one after.
        """
        action = self.actions.get(effect)
        if action is None and isinstance(effect, Recv):
            use = self.actions[self.program.effects[self._consumers[effect.value]]]
            begin = end = self._seconds(use.received[0] if use.received else use.start)
        elif action is None:
            begin = end = free
        else:
            begin, end = self._seconds(action.start), self._seconds(action.end)
        start = min(max(begin, free), until)
        return start, min(max(end, start), until)
