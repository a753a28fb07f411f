"""Two timelines side by side: by effect, by rank, and where the difference of their makespans lies. No torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby, islice
from typing import Any, NamedTuple

from fpipe.effects import Effect, Recv, Send, parts
from fpipe.tables import Row, Table
from fpipe.timelines.format import extent
from fpipe.timelines.text import looks
from fpipe.timelines.timeline import CAUSES, Spans, Timeline

Pair = tuple[float, float]
TRANSFER, HOST, ELSEWHERE, UNMATCHED = "transfer", "host", "elsewhere", "unmatched"
_MOST = 200  # effects that JSON has


class Matched(NamedTuple):
    """An effect that both timelines have, by its place among each one's spans.

    Args:
        took: its durations; of a receive, from when its value was sent, however early it was posted.
        start: when it began, each by its own timeline.
    """

    effect: Effect
    at: tuple[int, int]
    rank: tuple[int, int]
    took: Pair
    start: Pair

    @property
    def longer(self) -> float:
        """How much longer it took in the first."""
        return self.took[0] - self.took[1]

    @property
    def shift(self) -> float:
        """How much later it began in the first."""
        return self.start[0] - self.start[1]


class Link(NamedTuple):
    """A stretch of a chain of waits: what a span adds to it, after a gap since the end of the one before.

    Of a receive that was posted early only what comes after its send's end is its own. Where clocks differ a little, a
    span may end before what it waited for, and its own time is less than nothing.
    """

    at: int
    gap: float
    own: float


@dataclass(frozen=True, eq=False)
class Difference:
    """What differs between two timelines. Pairs are in their order, and a difference is the first's less the second's.

    Effects are the same where they are equal and ran on the same rank; compute is also the same on another rank, since
    a microbatch passes a stage once. What only one of the timelines has is left out, and `notices` says so.

    Args:
        a, b: in one unit, or the figures can't be compared.

    >>> from fpipe import Costs, Placement, Plan, schedules, simulate
    >>> plan = Plan(Placement.loop(2), 4)
    >>> slow = simulate(schedules.one_f_one_b, plan, Costs(forward=1.5, communication=0.5))
    >>> found = Difference(slow, simulate(schedules.one_f_one_b, plan))
    >>> found.makespan, found.lies
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
        """The ranks that ran something in both."""
        both = range(min(self.a.plan.ranks, self.b.plan.ranks))
        return [rank for rank in both if self.a.spans.of(rank) and self.b.spans.of(rank)]

    @cached_property
    def effects(self) -> list[Matched]:
        """What both have, the largest differences of duration first.

        Of a transfer that no compute waited for a measurement has only a bound: these are left out.
        """
        known = _known(self.a), _known(self.b)
        found = (each for each in self.matched.values() if each.at[0] in known[0] and each.at[1] in known[1])
        return sorted(found, key=lambda each: (-abs(each.longer), -abs(each.shift), each.at))

    @cached_property
    def matched(self) -> dict[int, Matched]:
        """By the place among the first's spans."""
        places = {key: at for at, _, key in reversed([*_keys(self.b)])}
        found = dict[int, Matched]()
        for at, rank, key in _keys(self.a):
            other = places.pop(key, None)
            if other is not None:
                spans, others = self.a.spans, self.b.spans
                found[at] = Matched(
                    spans.effects[at],
                    (at, other),
                    (rank, others[other].rank),
                    (_took(spans, at), _took(others, other)),
                    (spans.starts[at], others.starts[other]),
                )
        return found

    @property
    def _looks(self) -> dict[type, Row]:
        return looks(self.a.table) | looks(self.b.table)

    @cached_property
    def kinds(self) -> dict[str, Pair]:
        """Kind of compute -> the time that all of it took."""
        totals = [_totals(self.a), _totals(self.b)]
        names = [kind.__name__ for kind in self._looks if any(kind.__name__ in total for total in totals)]
        return {name: (totals[0].get(name, 0.0), totals[1].get(name, 0.0)) for name in names}

    @cached_property
    def lies(self) -> dict[str, float]:
        """Where the difference of the makespans lies; the parts add up to it.

        The first's critical path is a chain of waits from its start to its end, so that its makespan is the sum of
        what each link adds: its own time, from when all that it waited for was there, and a gap before, in which
        nothing that was recorded ran. The same links are looked up in the second.

        - A kind of compute by its name, and `transfer`: own times in the first less those in the second. What reduces
          gradients counts as host.
        - `host`: the gaps in the first, less those of the second where the link waited for the same one there too.
        - `unmatched`: own times of links that the second doesn't have; only there if there are such.
        - `elsewhere`: less the rest of the second's makespan, in which it ran or waited for what is not on this path.
          Large where the first's path isn't critical in the second: look at the difference the other way round too.
        """
        found: dict[str, float] = defaultdict(float)
        found.update({row.label: 0.0 for kind, row in self._looks.items() if self.kinds.get(kind.__name__)})
        found |= {TRANSFER: 0.0, HOST: 0.0}
        covered, before = 0.0, -1
        for link in links(self.a):
            matched = self.matched.get(link.at)
            found[HOST] += link.gap
            if matched is None:
                found[UNMATCHED] += link.own
            else:
                own, gap = self._there(matched.at[1], before)
                found[part(matched.effect, self.a.table)] += link.own - own
                found[HOST] -= gap
                covered += own + gap
            before = matched.at[1] if matched else -2
        return {**found, ELSEWHERE: covered - self.b.makespan}

    def _there(self, at: int, before: int) -> Pair:
        """What a span adds in the second, and its gap there, if it waited for the one before (-1: for none)."""
        waited = self.b.spans.waited[at]
        link = _link(self.b, at, _origin(self.b))
        return link.own, link.gap if waited == before else 0.0

    @cached_property
    def notices(self) -> list[str]:
        """What can't be compared."""
        found = []
        if self.a.plan != self.b.plan:
            first, second = extent(self.a.plan), extent(self.b.plan)
            which = f": {first}, and {second}" if first != second else " in where stages run or what they read"
            found.append(f"the plans differ{which}; what both have is compared")
        for one, other, which in ((self.a, self.b, "first"), (self.b, self.a, "second")):
            there = {rank for rank in range(other.plan.ranks) if other.spans.of(rank)}
            if only := [r for r in range(one.plan.ranks) if one.spans.of(r) and r not in there]:
                ranks = ", ".join(map(str, only[:8])) + (", …" if len(only) > 8 else "")
                found.append(f"only the {which} has rank{'s' if len(only) > 1 else ''} {ranks}")
            if missing := len(one.spans) - len(self.matched):
                found.append(f"{missing} of the {len(one.spans)} effects of the {which} are not in the other")
        return found

    def as_json(self) -> dict[str, Any]:
        """What JSON can hold of it, the largest differences of effects among it. A row is a place in a rank's spans."""
        return {
            "makespan": list(self.makespan),
            "bubble_rate": list(self.bubble_rate),
            "ranks": [self._rank(rank) for rank in self.ranks],
            "kinds": {kind: list(pair) for kind, pair in self.kinds.items()},
            "lies": self.lies,
            "effects": [self._effect(each) for each in self.effects[:_MOST]],
            "notices": self.notices,
        }

    def _rank(self, rank: int) -> dict[str, Any]:
        causes = {cause: [self.a.causes[rank][cause], self.b.causes[rank][cause]] for cause in CAUSES}
        busy, idle = [self.a.busy[rank], self.b.busy[rank]], [self.a.idle[rank], self.b.idle[rank]]
        return {"rank": rank, "busy": busy, "idle": idle, "causes": causes}

    def _effect(self, each: Matched) -> dict[str, Any]:
        rows = (each.at[0] - self.a.spans.first[each.rank[0]], each.at[1] - self.b.spans.first[each.rank[1]])
        places = {"rank": each.rank[0], "row": rows[0], "other_rank": each.rank[1], "other_row": rows[1]}
        return {**places, "took": list(each.took), "start": list(each.start)}


def _keys(timeline: Timeline) -> Iterator[tuple[int, int, tuple[object, ...]]]:
    """Place, rank, and what makes an effect the same one in another timeline."""
    for rank in range(timeline.plan.ranks):
        for at in timeline.spans.of(rank):
            effect = timeline.spans.effects[at]
            yield (
                at,
                rank,
                (effect,) if any(timeline.table.effects[type(e)].work for e in parts(effect)) else (rank, effect),
            )


def _origin(timeline: Timeline) -> float:
    """When the first compute begins."""
    firsts = (islice(timeline.compute(rank), 1) for rank in range(timeline.plan.ranks))
    return min((span.start for span in chain.from_iterable(firsts)), default=0.0)


def links(timeline: Timeline) -> list[Link]:
    """The critical path as what each of its spans adds to the makespan: gaps and own times add up to it."""
    origin = _origin(timeline)
    return [_link(timeline, at, origin) for at in timeline.critical_spans]


def _link(timeline: Timeline, at: int, origin: float) -> Link:
    spans = timeline.spans
    waited, end = spans.waited[at], spans.ends[at]
    before = spans.ends[waited] if waited >= 0 else origin
    gap = max(0.0, spans.starts[at] - before)
    return Link(at, gap, end - before - gap)


def part(effect: Effect, table: Table) -> str:
    """Return the part of a difference that an effect counts to."""
    row = table.effects[type(effect)]
    if row.track == "compute":
        return row.label
    return TRANSFER if row.track in ("send", "receive") else HOST


def _totals(timeline: Timeline) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for kinds in timeline.kinds:
        for kind, taken in kinds.items():
            totals[kind.__name__] += taken
    return totals


def _known(timeline: Timeline) -> set[int]:
    """The spans whose ends are known also where they were measured: not those of transfers that nobody waited for."""
    spans = timeline.spans
    computes = [at for at, effect in enumerate(spans.effects) if not isinstance(effect, Send | Recv)]
    received = {spans.waited[at] for at in computes}
    received = {at for at in received if at >= 0 and isinstance(spans.effects[at], Recv)}
    return {*computes, *received, *(spans.waited[at] for at in received if spans.waited[at] >= 0)}


def _took(spans: Spans, at: int) -> float:
    start, sent = spans.starts[at], spans.waited[at]
    if sent >= 0 and isinstance(spans.effects[at], Recv):
        start = max(start, spans.starts[sent])
    return spans.ends[at] - start


class PathSegment(NamedTuple):
    """A stretch of the critical path: effects of one rank, or transfers from one to another.

    Args:
        ranks: the one, or both.
        effects: how many of each kind.
        time: from the end of what came before it.
    """

    ranks: tuple[int, ...]
    effects: Mapping[str, int]
    time: float


def path_segments(timeline: Timeline) -> list[PathSegment]:
    """The critical path, rank after rank."""
    spans = [(timeline.spans[link.at], link) for link in links(timeline)]
    folded = groupby(spans, lambda each: TRANSFER if isinstance(each[0].effect, Send | Recv) else each[0].rank)
    found = []
    for where, group in folded:
        run = list(group)
        ranks = tuple(dict.fromkeys(span.rank for span, _ in run)) if where == TRANSFER else (int(where),)
        kinds = Counter(type(span.effect).__name__ for span, _ in run)
        found.append(PathSegment(ranks, dict(kinds), sum(link.gap + link.own for _, link in run)))
    return found


def path_shares(timeline: Timeline) -> dict[str, float]:
    """How much of the makespan each kind of link of the critical path takes."""
    found: dict[str, float] = defaultdict(float)
    for link in links(timeline):
        found[part(timeline.spans.effects[link.at], timeline.table)] += link.own
        found[HOST] += link.gap
    return dict(sorted(found.items(), key=lambda each: -each[1]))
