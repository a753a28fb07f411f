"""Other orders of a captured step, simulated with the medians of its times. No torch.

A longer warm-up, another schedule, one more microbatch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from statistics import mean, median
from typing import Any, NamedTuple

from fpipe._format import counted, percent
from fpipe.costs import ROUNDING, Costs
from fpipe.effects import Backward, BackwardInput, BackwardWeight, Effect, Forward, Overlap, Recv, parts
from fpipe.errors import ScheduleError
from fpipe.plan import Plan, Schedule
from fpipe.programs.lowering import lower
from fpipe.programs.program import Program, Programs
from fpipe.programs.schedules import as_schedule, named_schedules
from fpipe.tables import FORWARD, TABLE, Table
from fpipe.timelines.replay import host_time
from fpipe.timelines.simulator import simulate_programs
from fpipe.timelines.timeline import Timeline

_MOST_EFFECTS = 20_000  # of a step whose other orders are tried
_MOST_EDGES = 4096  # each with a time of its own
_ALIKE = 1e-6  # relative difference of makespans that count as one
_NEARLY = 0.95  # of the most that a longer warm-up wins
_WAY_OUT = "in a program, fpipe.what_if(measurement, schedule=...) takes the schedule that ran"


class Other(NamedTuple):
    """Another order.

    Args:
        won: the time that it wins over the captured order, both simulated.
        timeline: makes its timeline.
    """

    what: str
    assumes: str
    won: float
    timeline: Callable[[], Timeline]


def others(timeline: Timeline, schedule: Schedule | str | None) -> tuple[list[Other], list[str]]:
    """Return other orders of a step, and the reasons why some were not tried."""
    if reason := _unfit(timeline):
        return [], [f"other orders were not tried: {reason}"]
    try:
        orders = _Orders(timeline)
    except ScheduleError as error:
        return [], [f"other orders were not tried: the captured one can't be simulated: {error}"]
    notices = []
    if orders.error > 0.05:
        notices.append(f"other orders are simulated; simulated so, the captured one is {percent(orders.error)} off")
    simulated = [*orders.longer_warm_up(), *orders.named()]
    if schedule is not None:
        try:
            simulated.append(orders.one_more(schedule))
        except ScheduleError as error:
            notices.append(f"one more microbatch was not tried: {error}")
    return simulated, notices


def _unfit(timeline: Timeline) -> str:
    spans, rows = timeline.spans, timeline.table.effects
    if any(not spans.of(rank) for rank in range(timeline.plan.ranks)):
        return "ranks are missing"
    if max(len(spans), timeline.plan.stages * timeline.plan.units) > _MOST_EFFECTS:
        return f"there are more than {_MOST_EFFECTS} effects"
    kinds = set(map(type, spans.effects))
    tracks = {rows[kind].track for kind in kinds}
    if tracks & {"gather", "scatter"}:
        return "parameters are gathered, which depends on the order"
    if tracks & {"offload", "fetch"}:
        return "residuals are moved to the host, which depends on the order"
    if timeline.steps > 1:
        return "several steps follow each other"
    alone = [kind.__name__ for kind in kinds if rows[kind].track == "compute" and not _works(kind, timeline.table)]
    if alone:
        return f"{alone[0]} takes part, which schedules leave out"
    if own := [kind.__name__ for kind in kinds if kind not in TABLE.effects]:
        return f"effects that are not fpipe's take part, such as {own[0]}"
    return ""


def _works(kind: type, table: Table) -> bool:
    return bool(table.effects[kind].work) or kind is Overlap


class _Orders:
    """The captured order and costs."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.plan, self.table = timeline, timeline.plan, timeline.table
        spans = timeline.spans
        self.computes = {rank: [span.effect for span in timeline.compute(rank)] for rank in range(self.plan.ranks)}
        self.costs = _costs(timeline)
        self.kinds = {type(effect) for effects in self.computes.values() for effect in effects}
        programs = {
            rank: Program(self.plan, rank, tuple(spans.effects[at] for at in spans.of(rank)), self.table)
            for rank in range(self.plan.ranks)
        }
        self.simulated = simulate_programs(programs, self.costs).makespan
        self.error = abs(self.simulated / timeline.makespan - 1) if timeline.makespan else 0.0

    def _timeline(self, schedule: Schedule, plan: Plan, costs: Costs) -> Timeline:
        return simulate_programs(lower(schedule, plan, effects=self.table), costs)

    def longer_warm_up(self) -> Iterator[Other]:
        """Yield the shortest longer warm-up that wins nearly the most: backwards run after more forwards.

        Where each rank has one stage: up to 1F1B's warm-up, and then up to one that hides transfers, in which a stage
        has run twice as many forwards.
        """
        tried = list[tuple[float, int, Schedule]]()
        for delays in self._delays():
            schedule = self._delayed(delays)
            with suppress(ScheduleError):
                won = self.simulated - self._timeline(schedule, self.plan, self.costs).makespan
                tried.append((won, max(delays), schedule))
        most = max((won for won, *_ in tried), default=0.0)
        if most > 0:
            won, by, schedule = next(each for each in tried if each[0] >= _NEARLY * most)
            more = counted(by, "more microbatch", "es")
            timeline = partial(self._timeline, schedule, self.plan, self.costs)
            yield Other(f"warm-up {by} longer", f"up to {more} in flight on a rank", won, timeline)

    def _delays(self) -> Iterator[list[int]]:
        """Yield for each rank by how many forwards its backwards come later, in ascending order."""
        plan, last = self.plan, list[int]()
        if any(len(plan.stages_on(rank)) != 1 for rank in range(plan.ranks)):
            return
        depths = [plan.stages - plan.stages_on(rank)[0] for rank in range(plan.ranks)]
        begun = [self._warm_up(effects) for effects in self.computes.values()]
        for most in (depths, [2 * depth - 1 for depth in depths]):
            by = 1
            while by < 2 * max(most):
                delays = [min(by, max(0, room - own)) for room, own in zip(most, begun, strict=True)]
                if any(delays) and delays != last:
                    yield delays
                last, by = delays, 2 * by

    def _warm_up(self, effects: Sequence[Effect]) -> int:
        """Return the number of forwards before the first backward."""
        works = [self.table.effects[type(effect)].work for effect in effects]
        return next((at for at, work in enumerate(works) if work != FORWARD), len(works))

    def _delayed(self, delays: Sequence[int]) -> Schedule:
        """Return the schedule in which each backward of a rank comes after so many more forwards, if there are any."""
        orders = {rank: self._later(effects, delays[rank]) for rank, effects in self.computes.items()}
        return lambda rank, plan: iter(orders[rank])

    def _later(self, effects: Sequence[Effect], by: int) -> list[Effect]:
        forwards = [effect for effect in effects if self.table.effects[type(effect)].work == FORWARD]
        order: list[Effect] = []
        seen = run = 0
        for effect in effects:
            if self.table.effects[type(effect)].work == FORWARD:
                seen += 1
                continue
            enough = min(len(forwards), seen + by)
            order += forwards[run:enough]
            run = max(run, enough)
            order.append(effect)
        return order + forwards[run:]

    def named(self) -> Iterator[Other]:
        """Yield the named schedules of the same placement that need no more microbatches in flight."""
        limit = max(self.timeline.peak_in_flight)
        makespans = set[float]()
        # What is searched has halves: where none was measured it would be left out, after seconds.
        searched = not self.kinds.isdisjoint((BackwardInput, BackwardWeight))
        for name, schedule in named_schedules(self.plan, self.costs, limit or None, searched=searched):
            try:
                timeline = self._timeline(schedule, self.plan, self.costs)
            except ScheduleError:
                continue
            kinds = {type(span.effect) for rank in range(self.plan.ranks) for span in timeline.compute(rank)}
            same = any(abs(timeline.makespan / other - 1) < _ALIKE for other in makespans)
            if same or max(timeline.peak_in_flight) > limit * (1 + ROUNDING) or not self._measured(kinds):
                continue
            makespans.add(timeline.makespan)
            assumes = "no more microbatches in flight"
            yield Other(f"schedule {name}", assumes, self.simulated - timeline.makespan, partial(_same, timeline))

    def _measured(self, kinds: Collection[type]) -> bool:
        """Return whether the times of these effects were measured: those of halves are not known from a whole."""
        whole = {Backward} if {BackwardInput, BackwardWeight} <= self.kinds else set[type]()
        both = {Overlap}  # its two parts, one after the other
        return set(kinds) <= self.kinds | whole | both

    def one_more(self, schedule: Schedule | str) -> Other:
        """Return the step with one more microbatch, by its time for as many samples.

        Raises:
            ScheduleError: the schedule did not give the captured order, or takes no such number of microbatches.
        """
        own, name = self._captured(schedule), _named(schedule)
        count = self.plan.microbatches + 1
        costs = replace(self.costs, scale=(*self.costs.scale, mean(self.costs.scale)) if self.costs.scale else ())
        try:
            timeline = self._timeline(own, replace(self.plan, microbatches=count), replace(costs, sizes=()))
        except ScheduleError as error:
            raise ScheduleError(f"{name} does not take {count}: {error}") from None
        won = self.simulated - timeline.makespan * self.plan.microbatches / count
        assumes = "of the same size, by the time for as many samples"
        return Other(f"{count} microbatches", assumes, won, partial(_same, timeline))

    def _captured(self, schedule: Schedule | str) -> Schedule:
        """Return the schedule, if it gives the captured order.

        Raises:
            ScheduleError: it doesn't, or there is none of that name.
        """
        try:
            own = as_schedule(schedule)
            computes = _computes(lower(own, self.plan, effects=self.table))
        except ScheduleError as error:
            raise ScheduleError(f"{error}; {_WAY_OUT}") from None
        if computes != self.computes:
            raise ScheduleError(f"{_named(schedule)} gives another order than the captured one; {_WAY_OUT}")
        return own


def _named(schedule: Schedule | str) -> str:
    return schedule if isinstance(schedule, str) else getattr(schedule, "__name__", "the schedule")


def _same(timeline: Timeline) -> Timeline:
    return timeline


def _computes(programs: Programs) -> dict[int, list[Effect]]:
    return {
        rank: [effect for effect in program if program.table.effects[type(effect)].track == "compute"]
        for rank, program in programs.items()
    }


def _costs(timeline: Timeline) -> Costs:
    """Return the medians of the times by kind and stage, with the host's time before each effect."""
    spans, plan = timeline.spans, timeline.plan
    taken, edges = defaultdict[tuple[type, int], list[float]](list), defaultdict[tuple[int, int], list[float]](list)
    hosts = [host_time(timeline, rank) for rank in range(plan.ranks)]
    waited = set(spans.waited)
    bounds = defaultdict[tuple[int, int], list[float]](list)
    factors = defaultdict[int, list[float]](list)
    for rank in range(plan.ranks):
        for at in spans.of(rank):
            effect: Any = spans.effects[at]
            if timeline.table.effects[type(effect)].track == "compute":
                subject: Any = parts(effect)[0]
                taken[type(effect), subject.stage].append(spans.ends[at] - spans.starts[at])
            elif isinstance(effect, Recv) and (sent := spans.waited[at]) >= 0:
                known = edges if at in waited else bounds
                known[effect.rank, rank].append(spans.ends[sent] - spans.starts[sent])
    usual = {key: median(times) for key, times in taken.items()}
    for rank in range(plan.ranks):
        for span in timeline.compute(rank):
            first: Any = parts(span.effect)[0]
            if (typical := usual[type(span.effect), first.stage]) > 0 and hasattr(first, "microbatch"):
                factors[first.microbatch].append((span.end - span.start) / typical)
    scale = [median(factors[m]) if factors[m] else 1.0 for m in range(plan.microbatches)]

    def times(kind: type) -> list[float] | None:
        if not any((kind, stage) in usual for stage in range(plan.stages)):
            return None
        return [
            usual[kind, stage] + hosts[plan.placement.holders[stage][0]] if (kind, stage) in usual else 0.0
            for stage in range(plan.stages)
        ]

    transfers = {edge: min(most) for edge, most in bounds.items()}
    transfers |= {edge: median(known) for edge, known in edges.items()}
    return Costs(
        forward=times(Forward) or 0.0,
        backward_input=times(BackwardInput) or 0.0,
        backward_weight=times(BackwardWeight) or 0.0,
        backward=times(Backward),
        overlap=times(Overlap),
        communication=_links(transfers, plan),
        scale=scale if max(scale) - min(scale) > 1e-2 else (),
    )


def _links(transfers: Mapping[tuple[int, int], float], plan: Plan) -> float | dict[Any, Any]:
    """Return the time of each edge; the median where an edge was not used, and of all where there are many edges."""
    middle = median(transfers.values()) if transfers else 0.0
    if plan.ranks**2 > _MOST_EDGES:
        return middle
    ranks = range(plan.ranks)
    return {(a, b): transfers.get((a, b), middle) for a in ranks for b in ranks if a != b}
