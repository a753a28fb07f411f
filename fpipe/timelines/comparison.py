"""Compare two timelines: by effect, by rank, and by the parts of the difference of their makespans. No torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from statistics import median
from typing import Any, NamedTuple

from fpipe._format import counted, extent, number
from fpipe.costs import ROUNDING
from fpipe.effects import Effect, Recv, parts
from fpipe.tables import LANES, Row, Table
from fpipe.timelines.labels import drawn_rows
from fpipe.timelines.spans import CAUSES, Spans
from fpipe.timelines.timeline import Timeline

Pair = tuple[float, float]
TRANSFER, HOST, ELSEWHERE, UNMATCHED = "transfer", "host", "elsewhere", "unmatched"
_MAX_EFFECTS = 200  # in the JSON
_MAX_GROUPS = 200  # likewise


class Matched(NamedTuple):
    """An effect that both timelines have.

    Args:
        at: its index among the spans of each timeline.
        rank: its rank in each timeline.
        took: its durations; of a receive, from the send of its value, even if it was posted earlier.
        start: its start times, each on its timeline's clock.
    """

    effect: Effect
    at: tuple[int, int]
    rank: tuple[int, int]
    took: Pair
    start: Pair

    @property
    def longer(self) -> float:
        """The duration in the first less that in the second."""
        return self.took[0] - self.took[1]

    @property
    def shift(self) -> float:
        """The start in the first less that in the second."""
        return self.start[0] - self.start[1]


class Group(NamedTuple):
    """The effects of one kind on one rank of the first timeline, compared with their matches in the second.

    Args:
        name: of the rank and the kind, as in "rank 5: B".
        size: the number of effects.
        total: the sum of their differences of duration, the first less the second.
        median: of the differences.
        largest: the effect that differs most.
    """

    name: str
    rank: int
    kind: type[Effect]
    size: int
    total: float
    median: float
    largest: Matched


class PathStep(NamedTuple):
    """A span of the critical path, with the time that it adds, after a gap since the end of the span before.

    A receive that was posted early adds only the time after the end of its send. Where clocks differ a little, a span
    may end before the span that it waited for; its duration is then negative.
    """

    at: int
    gap: float
    duration: float


@dataclass(frozen=True, eq=False)
class Difference:
    """The difference of two timelines. Pairs are in the order (a, b), and a difference is a's value less b's.

    Two effects match if they are equal and ran on the same rank; of equal ones, such as gathers of a stage, the first
    match, the second, and so on. Compute matches also on another rank, because a stage runs a microbatch once. An
    effect that only one timeline has is left out, and `notices` reports it.

    Args:
        a, b: the timelines, in the same unit.

    >>> from fpipe import Costs, Placement, Plan, schedules, simulate
    >>> plan = Plan(Placement.loop(2), 4)
    >>> slow = simulate(schedules.one_f_one_b, plan, Costs(forward=1.5, communication=0.5))
    >>> difference = Difference(slow, simulate(schedules.one_f_one_b, plan))
    >>> difference.makespan, difference.breakdown
    ((19.5, 15.0), {'forward': 2.5, 'backward': 0.0, 'transfer': 2.0, 'host': 0.0, 'elsewhere': 0.0})
    """

    a: Timeline
    b: Timeline

    @property
    def makespan(self) -> Pair:
        return self.a.makespan, self.b.makespan

    @property
    def bubble_rate(self) -> Pair:
        return self.a.bubble_rate, self.b.bubble_rate

    @property
    def ranks(self) -> list[int]:
        """The ranks that ran an effect in both."""
        both = range(min(self.a.plan.ranks, self.b.plan.ranks))
        return [rank for rank in both if self.a.spans.of(rank) and self.b.spans.of(rank)]

    @cached_property
    def effects(self) -> list[Matched]:
        """The effects that both have, the largest differences of duration first.

        Transfers that no compute waited for are left out, because a measurement has only a bound of their end.
        """
        known = _known(self.a), _known(self.b)
        effects = (each for each in self.matched.values() if each.at[0] in known[0] and each.at[1] in known[1])
        return sorted(effects, key=lambda each: (-abs(each.longer), -abs(each.shift), each.at))

    @cached_property
    def groups(self) -> list[Group]:
        """The `effects` by rank and kind, the largest sum of differences first.

        >>> from fpipe import Costs, Placement, Plan, schedules, simulate
        >>> plan = Plan(Placement.loop(2), 4)
        >>> slow = simulate(schedules.one_f_one_b, plan, Costs(backward=[2, 3.5]))
        >>> group = Difference(slow, simulate(schedules.one_f_one_b, plan)).groups[0]
        >>> group.rank, group.kind.__name__, group.size, group.median, group.total
        (1, 'Backward', 4, 1.5, 6.0)
        """
        by_kind = defaultdict[tuple[int, type[Effect]], list[Matched]](list)
        for each in self.effects:
            by_kind[each.rank[0], type(each.effect)].append(each)
        groups = []
        for (rank, kind), same in by_kind.items():
            longer, row = [each.longer for each in same], self.a.table.effects[kind]
            name = f"rank {rank}: {row.letter if row.track == 'compute' else row.label}"
            groups.append(Group(name, rank, kind, len(same), sum(longer), median(longer), same[0]))
        return sorted(groups, key=lambda group: (-abs(group.total), group.rank))

    @cached_property
    def apart(self) -> list[Matched]:
        """The `effects` that differ otherwise than the median of their group, the furthest from it first.

        >>> from fpipe import Costs, Placement, Plan, schedules, simulate
        >>> plan = Plan(Placement.loop(2), 4)
        >>> slow = simulate(schedules.one_f_one_b, plan, Costs(forward=1.5, scale=[1, 1, 3, 1]))
        >>> [each.effect for each in Difference(slow, simulate(schedules.one_f_one_b, plan)).apart[:2]]
        [Backward(stage=0, microbatch=2), Backward(stage=1, microbatch=2)]
        """
        usual = {(group.rank, group.kind): group.median for group in self.groups}
        off = {each.at: abs(each.longer - usual[each.rank[0], type(each.effect)]) for each in self.effects}
        least = ROUNDING * max(self.makespan)
        return sorted((each for each in self.effects if off[each.at] > least), key=lambda each: -off[each.at])

    @cached_property
    def matched(self) -> dict[int, Matched]:
        """The effects that both have, by their index among the first's spans."""
        places = {key: at for at, _, key in reversed([*_keys(self.b)])}
        matched = dict[int, Matched]()
        for at, rank, key in _keys(self.a):
            other = places.pop(key, None)
            if other is not None:
                spans, others = self.a.spans, self.b.spans
                matched[at] = Matched(
                    spans.effects[at],
                    (at, other),
                    (rank, others[other].rank),
                    (_took(spans, at), _took(others, other)),
                    (spans.starts[at], others.starts[other]),
                )
        return matched

    @property
    def _rows(self) -> dict[type, Row]:
        return drawn_rows(self.a.table) | drawn_rows(self.b.table)

    @cached_property
    def kinds(self) -> dict[str, Pair]:
        """Kind of compute -> its total time in each timeline."""
        totals = [_totals(self.a), _totals(self.b)]
        names = [kind.__name__ for kind in self._rows if any(kind.__name__ in total for total in totals)]
        return {name: (totals[0].get(name, 0.0), totals[1].get(name, 0.0)) for name in names}

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """The parts of the difference of the makespans; their sum is that difference.

        The first's critical path is a chain of waits from its start to its end. Its makespan is therefore the sum over
        the steps of the path: the duration of each step, from the end of the span that it waited for, and the gap
        before it, in which no recorded effect ran. The same steps are looked up in the second.

        - A kind of compute by its name, `transfer`, and with replicas `gather` and `scatter`: durations in the first
          less those in the second. `Reduce` and `Release` count as host.
        - `host`: the gaps in the first, less the gaps of those steps that waited for the same span in the second.
        - `unmatched`: durations of steps that the second doesn't have; absent if there are none.
        - `elsewhere`: minus the rest of the second's makespan, in which effects ran that are not on this path. It is
          large if the first's path isn't critical in the second; then also compare the other way round.
        """
        shares: dict[str, float] = defaultdict(float)
        shares.update({row.label: 0.0 for kind, row in self._rows.items() if self.kinds.get(kind.__name__)})
        shares |= {TRANSFER: 0.0, HOST: 0.0}
        covered, before = 0.0, -1
        for step in path_steps(self.a):
            matched = self.matched.get(step.at)
            shares[HOST] += step.gap
            if matched is None:
                shares[UNMATCHED] += step.duration
            else:
                duration, gap = self._in_second(matched.at[1], before)
                shares[part(matched.effect, self.a.table)] += step.duration - duration
                shares[HOST] -= gap
                covered += duration + gap
            before = matched.at[1] if matched else -2
        return {**shares, ELSEWHERE: covered - self.b.makespan}

    def _in_second(self, at: int, before: int) -> Pair:
        """Return a span's duration in the second, and its gap if it waited for the span `before` (-1: for none)."""
        waited = self.b.spans.waited[at]
        step = _step(self.b, at)
        return step.duration, step.gap if waited == before else 0.0

    @cached_property
    def notices(self) -> list[str]:
        """The parts of the timelines that can't be compared, as sentences."""
        notices = []
        if self.a.plan != self.b.plan:
            first, second = extent(self.a.plan), extent(self.b.plan)
            how = f": {first}, and {second}" if first != second else " in where stages run or what they read"
            notices.append(f"the plans differ{how}; what both have is compared")
        if self.a.plan.stages != self.b.plan.stages:
            ratio = number(self.b.plan.stages / self.a.plan.stages)
            notices.append(
                f"a stage of the first is {ratio} times as much of the model as one of the second: totals compare, "
                "single effects do not"
            )
        if self.a.steps != self.b.steps:
            first, second = (counted(line.steps, "step") for line in (self.a, self.b))
            notices.append(f"the first is a timeline of {first}, the second of {second}: totals do not compare")
        for one, other, which in ((self.a, self.b, "first"), (self.b, self.a, "second")):
            recorded = {rank for rank in range(other.plan.ranks) if other.spans.of(rank)}
            if only := [r for r in range(one.plan.ranks) if one.spans.of(r) and r not in recorded]:
                ranks = ", ".join(map(str, only[:8])) + (", …" if len(only) > 8 else "")
                notices.append(f"only the {which} has rank{'s' if len(only) > 1 else ''} {ranks}")
            if missing := len(one.spans) - len(self.matched):
                notices.append(f"{missing} of the {len(one.spans)} effects of the {which} are not in the other")
        return notices

    def as_json(self) -> dict[str, Any]:
        """Return JSON values, with the largest differences of groups and of effects.

        A row is an index among a rank's spans; that of a group is its largest effect's.
        """
        return {
            "makespan": list(self.makespan),
            "bubble_rate": list(self.bubble_rate),
            "ranks": [self._rank(rank) for rank in self.ranks],
            "kinds": {kind: list(pair) for kind, pair in self.kinds.items()},
            "breakdown": self.breakdown,
            "groups": [self._group(each) for each in self.groups[:_MAX_GROUPS]],
            "effects": [self._effect(each) for each in self.effects[:_MAX_EFFECTS]],
            "notices": self.notices,
        }

    @property
    def cause_names(self) -> tuple[str, ...]:
        """The causes that either timeline can have."""
        return tuple(name for name in CAUSES if name in (*self.a.cause_names, *self.b.cause_names))

    def _rank(self, rank: int) -> dict[str, Any]:
        both = self.a.causes[rank], self.b.causes[rank]
        causes = {cause: [each.get(cause, 0.0) for each in both] for cause in self.cause_names}
        busy, idle = [self.a.busy[rank], self.b.busy[rank]], [self.a.idle[rank], self.b.idle[rank]]
        return {"rank": rank, "busy": busy, "idle": idle, "causes": causes}

    def _group(self, each: Group) -> dict[str, Any]:
        known = {"name": each.name, "kind": each.kind.__name__, "count": each.size}
        return self._effect(each.largest) | known | {"total": each.total, "median": each.median}

    def _effect(self, each: Matched) -> dict[str, Any]:
        rows = (each.at[0] - self.a.spans.first[each.rank[0]], each.at[1] - self.b.spans.first[each.rank[1]])
        places = {"rank": each.rank[0], "row": rows[0], "other_rank": each.rank[1], "other_row": rows[1]}
        return {**places, "took": list(each.took), "start": list(each.start)}


def _keys(timeline: Timeline) -> Iterator[tuple[int, int, tuple[object, ...]]]:
    """Yield index, rank and key of each span; effects with equal keys match."""
    works = Counter[Effect]()  # of all ranks; each step of a loop has them once
    for rank in range(timeline.plan.ranks):
        before = Counter[Effect]()
        for at in timeline.spans.of(rank):
            effect = timeline.spans.effects[at]
            if any(timeline.table.effects[type(each)].work for each in parts(effect)):
                yield at, rank, (effect, works[effect])
                works[effect] += 1
            else:
                yield at, rank, (rank, effect, before[effect])
                before[effect] += 1


def path_steps(timeline: Timeline) -> list[PathStep]:
    """Return the steps of the critical path. Their gaps and durations add up to the makespan."""
    return [_step(timeline, at) for at in timeline.critical_spans]


def _step(timeline: Timeline, at: int) -> PathStep:
    spans = timeline.spans
    waited, end = spans.waited[at], spans.ends[at]
    before = spans.ends[waited] if waited >= 0 else timeline.start
    gap = max(0.0, spans.starts[at] - before)
    return PathStep(at, gap, end - before - gap)


def part(effect: Effect, table: Table) -> str:
    """Return the part of a difference that an effect counts to."""
    row = table.effects[type(effect)]
    if row.track == "compute":
        return row.label
    if row.track in LANES:
        return row.track
    return TRANSFER if row.track in ("send", "receive") else HOST


def _totals(timeline: Timeline) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for kinds in timeline.kinds:
        for kind, taken in kinds.items():
            totals[kind.__name__] += taken
    return totals


def _known(timeline: Timeline) -> set[int]:
    """Return the spans whose ends a measurement knows: all but transfers, gathers and scatters that nothing waited for.

    For a transfer, compute must have waited.
    """
    spans, table = timeline.spans, timeline.table
    under_way = (TRANSFER, *LANES)
    computes = [at for at, effect in enumerate(spans.effects) if part(effect, table) not in under_way]
    waited = {spans.waited[at] for at in computes} - {-1}
    besides = {at for at in waited if part(spans.effects[at], table) in LANES}
    received = {at for at in waited if isinstance(spans.effects[at], Recv)}
    return {*computes, *besides, *received, *(spans.waited[at] for at in received if spans.waited[at] >= 0)}


def _took(spans: Spans, at: int) -> float:
    start, sent = spans.starts[at], spans.waited[at]
    if sent >= 0 and isinstance(spans.effects[at], Recv):
        start = max(start, spans.starts[sent])
    return spans.ends[at] - start


class PathSegment(NamedTuple):
    """A part of the critical path: effects of one rank, or transfers from one rank to another.

    Args:
        ranks: the rank, or both ranks of the transfer.
        effects: the number of effects of each kind.
        time: from the end of the segment before it.
    """

    ranks: tuple[int, ...]
    effects: Mapping[str, int]
    time: float


def path_segments(timeline: Timeline) -> list[PathSegment]:
    """Return the segments of the critical path, in order."""
    spans = [(timeline.spans[step.at], step) for step in path_steps(timeline)]
    segments = []
    for _, group in groupby(
        spans, lambda each: None if part(each[0].effect, timeline.table) == TRANSFER else each[0].rank
    ):
        run = list(group)
        ranks = tuple(dict.fromkeys(span.rank for span, _ in run))
        kinds = Counter(type(span.effect).__name__ for span, _ in run)
        segments.append(PathSegment(ranks, dict(kinds), sum(step.gap + step.duration for _, step in run)))
    return segments


def path_shares(timeline: Timeline) -> dict[str, float]:
    """Return the time that each part takes on the critical path, longest first; the times add up to the makespan."""
    shares: dict[str, float] = defaultdict(float)
    for step in path_steps(timeline):
        shares[part(timeline.spans.effects[step.at], timeline.table)] += step.duration
        shares[HOST] += step.gap
    return dict(sorted(shares.items(), key=lambda each: -each[1]))
