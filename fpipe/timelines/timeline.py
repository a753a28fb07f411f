"""What happened when: spans of effects, and where the time went; predicted and measured alike. No torch.

Conventions (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, and ours where it is silent):

- the span of a rank goes from the first start to the last end of its compute; busy is its compute within;
- cost is the largest span, so that a late start doesn't count; makespan counts it;
- idle is span - busy, and the bubble rate idle / span on the rank with the largest span;
- a microbatch is in flight on a stage from its forward to its weight gradient or fused backward.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from typing import NamedTuple, overload

from fpipe.costs import Costs
from fpipe.effects import Effect, Recv, parts
from fpipe.plan import Plan
from fpipe.programs.interning import Interning
from fpipe.programs.memory import LiveMemory
from fpipe.tables import FORWARD, TABLE, WEIGHT, Table

_MOST_DRAWN = 5000  # compute effects in a notebook's drawing
CAUSES = ("warm-up", "dependency", "transfer", "imbalance", "drain")


class Span(NamedTuple):
    """One effect on one rank: a compute, a send until it is delivered, a receive from its post to its arrival.

    `waited_for` is the index of the span whose end let this one start, or None. A receive waits for its send to end; a
    send that queues behind the bytes of another waits for that.
    """

    rank: int
    track: str
    effect: Effect
    start: float
    end: float
    waited_for: int | None


class Gap(NamedTuple):
    """A time in which a rank computes nothing, and why."""

    start: float
    end: float
    cause: str


@dataclass(frozen=True)
class Spans(Sequence[Span]):
    """The spans as columns, one rank after the other, and each rank's in the order of its program.

    Args:
        first: where each rank's spans begin, and at last how many there are.
        effects, starts, ends, waited: the columns; -1 for a span that waited for none.
        table: says what the effects are.
    """

    first: Sequence[int]
    effects: Sequence[Effect]
    starts: array[float]
    ends: array[float]
    waited: array[int]
    table: Table = field(default=TABLE, compare=False, repr=False)

    def of(self, rank: int) -> range:
        """Where a rank's spans are."""
        return range(self.first[rank], self.first[rank + 1])

    def __len__(self) -> int:
        return len(self.effects)

    @overload
    def __getitem__(self, at: int) -> Span: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Span]: ...
    def __getitem__(self, at: int | slice) -> Span | Sequence[Span]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        effect, waited = self.effects[at], self.waited[at]
        rank, track = bisect_right(self.first, at) - 1, self.table.effects[type(effect)].track
        return Span(rank, track, effect, self.starts[at], self.ends[at], waited if waited >= 0 else None)


class Timeline:
    """Spans, and the account of every rank's time. Times are in the unit of the costs, or in seconds.

    Args:
        plan: whose programs ran.
        spans: what happened.
        costs: whose bytes `memory` counts.

    >>> from fpipe import Costs, Placement, Plan, schedules, simulate
    >>> timeline = simulate(schedules.one_f_one_b, Plan(Placement.loop(2), 4), Costs(communication=0.5))
    >>> timeline.makespan, timeline.cost, timeline.idle, timeline.peak_in_flight
    (17.0, 17.0, [5.0, 1.0], [2.0, 1.0])
    >>> timeline.causes[0]
    {'warm-up': 0.0, 'dependency': 3.5, 'transfer': 1.5, 'imbalance': 0.0, 'drain': 0.0}
    """

    def __init__(self, plan: Plan, spans: Spans, costs: Costs = Costs()) -> None:
        self.plan, self.spans, self.costs, self.table = plan, spans, costs, spans.table
        computes = {kind for kind, row in self.table.effects.items() if row.track == "compute"}
        self._computes = [
            array("q", [at for at in spans.of(rank) if type(spans.effects[at]) in computes])
            for rank in range(plan.ranks)
        ]

    def compute(self, rank: int) -> Iterator[Span]:
        """A rank's compute, in order."""
        return (self.spans[at] for at in self._computes[rank])

    def _repr_svg_(self) -> str | None:
        """Return the drawing that a notebook shows; None for a timeline too long to be drawn in a page."""
        if sum(map(len, self._computes)) > _MOST_DRAWN:
            return None
        drawing: str = import_module("fpipe.timelines.svg").svg(self)  # by name, because it imports this module
        return drawing

    @cached_property
    def _bounds(self) -> list[tuple[float, float]]:
        """Each rank's first start and last end; of one without compute, the timeline's start."""
        starts, ends = self.spans.starts, self.spans.ends
        found = [(starts[own[0]], ends[own[-1]]) if own else None for own in self._computes]
        first = min((bounds[0] for bounds in found if bounds), default=0.0)
        return [bounds or (first, first) for bounds in found]

    @cached_property
    def busy(self) -> list[float]:
        """Each rank's time in compute."""
        starts, ends = self.spans.starts, self.spans.ends
        return [sum(ends[at] - starts[at] for at in own) for own in self._computes]

    @cached_property
    def idle(self) -> list[float]:
        """Each rank's span less its compute."""
        return [max(0.0, end - start - busy) for (start, end), busy in zip(self._bounds, self.busy, strict=True)]

    @property
    def makespan(self) -> float:
        """From the first start to the last end over all ranks."""
        return max(end for _, end in self._bounds) - min(start for start, _ in self._bounds)

    @property
    def cost(self) -> float:
        """The largest span of a rank: what a step takes where steps follow one another without a gap."""
        return max(end - start for start, end in self._bounds)

    @property
    def bubble_rate(self) -> float:
        """Idle over span, on the rank with the largest span."""
        spans = [end - start for start, end in self._bounds]
        widest = spans.index(max(spans))
        return self.idle[widest] / spans[widest] if spans[widest] else 0.0

    def gaps(self, rank: int) -> Iterator[Gap]:
        """When a rank computes nothing: before its first effect, after its last, and between, by what it waited for.

        A wait for a value from another rank is a dependency until the value is sent, and a transfer from then on.
        """
        spans, own = self.spans, self._computes[rank]
        first, last = min(start for start, _ in self._bounds), max(end for _, end in self._bounds)
        start, end = self._bounds[rank]
        if start > first:
            yield Gap(first, start, "warm-up")
        for before, after in pairwise(own):
            begin, until = spans.ends[before], spans.starts[after]
            if until > begin:
                sent = self._sent(after, until)
                if sent > begin:
                    yield Gap(begin, min(sent, until), "dependency")
                if sent < until:
                    yield Gap(max(begin, sent), until, "transfer")
        if end < last:
            yield Gap(end, last, "drain")

    def _sent(self, at: int, otherwise: float) -> float:
        """When the value that a compute waited for was sent to its rank, if it came from another."""
        received = self.spans.waited[at]
        if received < 0 or not isinstance(self.spans.effects[received], Recv):
            return otherwise
        sent = self.spans.waited[received]
        return self.spans.starts[sent] if sent >= 0 else otherwise  # of a rank that is missing, nobody knows

    @cached_property
    def causes(self) -> list[dict[str, float]]:
        """Each rank's makespan less its compute, by cause.

        warm-up and drain lie outside the rank's span. Inside it a rank waits for a transfer, or for another rank to
        get so far. Of the latter, what the busiest rank has more to do is imbalance, and no order can win it back;
        the rest is the schedule's dependencies.
        """
        busiest = max(self.busy)
        found = []
        for rank, busy in enumerate(self.busy):
            cause = dict.fromkeys(CAUSES, 0.0)
            for gap in self.gaps(rank):
                cause[gap.cause] += gap.end - gap.start
            cause["imbalance"] = min(cause["dependency"], busiest - busy)
            cause["dependency"] -= cause["imbalance"]
            found.append(cause)
        return found

    @cached_property
    def kinds(self) -> list[dict[type[Effect], float]]:
        """Each rank's time in compute, by kind of effect."""
        found = []
        for own in self._computes:
            taken = defaultdict[type[Effect], float](float)
            for at in own:
                taken[type(self.spans.effects[at])] += self.spans.ends[at] - self.spans.starts[at]
            found.append(dict(taken))
        return found

    @cached_property
    def critical_path(self) -> list[Span]:
        """The chain of waits that ends last: shorten one of these, or nothing changes."""
        return [self.spans[at] for at in self.critical_spans]

    @cached_property
    def critical_spans(self) -> list[int]:
        """Where the spans of the critical path are."""
        last = [own[-1] for own in self._computes if own]
        path = [max(last, key=self.spans.ends.__getitem__)] if last else []
        while path and (waited := self.spans.waited[path[-1]]) >= 0 and len(path) < len(self.spans):
            path.append(waited)  # so often at most, also where spans that were read from a file wait in a circle
        return path[::-1]

    def in_flight(self, rank: int) -> list[tuple[float, float]]:
        """(time, microbatches in flight from then on): of a whole rank, so that one of v chunks counts 1/v.

        Where nothing runs backward nothing is kept, and nothing is in flight.
        """
        chunks = len(self.plan.stages_on(rank))
        count, found = 0, []
        for at, begun, ended in self._kept(rank):
            if begun:
                count += begun
                found.append((self.spans.starts[at], count / chunks))
            if ended:
                count -= ended
                found.append((self.spans.ends[at], count / chunks))
        return found

    def _kept(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """For each compute: how many microbatches' residuals it begins to keep, and how many it has done with."""
        if not self._trained:
            return
        for at in self._computes[rank]:
            work = [self._work(part) for part in parts(self.spans.effects[at])]
            yield at, sum(w & FORWARD for w in work), sum(bool(w & WEIGHT) for w in work)

    def _work(self, effect: Effect) -> int:
        return self.table.effects[type(effect)].work

    @cached_property
    def _trained(self) -> bool:
        return any(self._work(part) & WEIGHT for effect in self.spans.effects for part in parts(effect))

    @cached_property
    def peak_in_flight(self) -> list[float]:
        """Each rank's most microbatches in flight."""
        return [max((count for _, count in self.in_flight(rank)), default=0.0) for rank in range(self.plan.ranks)]

    def memory(self, rank: int) -> list[tuple[float, float]]:
        """(time, bytes from then on) of what a rank holds: residuals, what is deferred, and values that travel.

        A received value counts from the post of its receive, one that is sent until it is delivered, and what a
        backward gives from its end, when that has used up what it was given. Each memory counts once.
        """
        interning, begins, ends = Interning(self.plan, self.table), dict[int, float](), dict[int, float]()
        for at in self.spans.of(rank):
            needs, gives, frees = interning.ids(self.spans.effects[at])
            start, end = self.spans.starts[at], self.spans.ends[at]
            ends |= {id_: max(ends.get(id_, end), end) for id_ in needs}
            for id_ in gives:
                begins.setdefault(id_, end if frees else start)
        steps = defaultdict[float, tuple[list[int], list[int]]](lambda: ([], []))
        for id_ in begins.keys() & ends.keys():
            steps[begins[id_]][0].append(id_)
            steps[ends[id_]][1].append(id_)
        live, samples = LiveMemory(self.costs, interning, rank), []
        for time in sorted(steps):
            made, gone = steps[time]
            for id_ in made:
                live.add(id_)
            for id_ in gone:
                live.remove(id_)
            samples.append((time, live.bytes))
        return samples
