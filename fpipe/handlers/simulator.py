"""When each effect happens, given what it costs: programs -> timeline. No torch.

- A rank runs its compute in the order of its program, each as soon as the rank is free and what it needs is there.
- A value travels from its send, which occupies no rank; on one edge values arrive in the order in which they were sent,
  and their bytes go one after the other where the edge has a bandwidth.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from typing import get_args

from fpipe.costs import Costs, Link
from fpipe.effects import Compute, Effect, Name, Overlap, Recv, Send, frees, gives, needs
from fpipe.interleave import interleave
from fpipe.lowering import lower
from fpipe.program import Plan, Programs, Schedule
from fpipe.timeline import Spans, Timeline


def simulate(schedule: Schedule, plan: Plan, costs: Costs = Costs(), *, depth: int | None = None) -> Timeline:
    """The timeline of a schedule under given costs.

    Args:
        costs: what effects take, per stage; one unit each, and nothing for transfers, by default.
        depth: receives posted beyond the next one used, as in `lower`.

    Raises:
        ScheduleError: the ranks wait for each other for ever, or the costs don't fit the plan.

    >>> from fpipe import Costs, Placement, Plan, schedules
    >>> simulate(schedules.gpipe, Plan(Placement.loop(4), 8), Costs(forward=1, backward=2)).bubble_rate
    0.2727272727272727
    """
    costs.check(plan)
    return play(lower(schedule, plan, depth=depth), costs)


def play(programs: Programs, costs: Costs) -> Timeline:
    """The timeline of complete programs."""
    plan = programs[0].plan
    return Timeline(plan, _Run(plan, costs).spans(interleave(programs)), costs)


class _Edge:
    """One direction between two ranks: its link, until when bytes occupy it, and whose other end is yet to come."""

    def __init__(self, link: Link) -> None:
        self.link, self.free = link, 0.0
        self.sends: deque[int] = deque()
        self.receives: deque[int] = deque()


class _Run:
    """The state of a simulation: spans as columns, and for each rank when it is free and what is there."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.plan, self.costs = plan, costs
        self.times = {kind: [costs.time(kind(s, 0)) for s in range(plan.stages)] for kind in get_args(Compute)}
        self.free = [0.0] * plan.ranks
        self.last = [-1] * plan.ranks  # the span that keeps the rank until it is free
        self.here: list[dict[Name, int]] = [{} for _ in range(plan.ranks)]  # the span that gave each name
        self.edges: dict[tuple[int, int], _Edge] = {}
        self.ranks, self.effects = array("l"), list[Effect]()
        self.starts, self.ends, self.waited = array("d"), array("d"), array("q")

    def spans(self, order: Iterable[tuple[int, Effect]]) -> Spans:
        for rank, effect in order:
            if isinstance(effect, Send):
                self._send(rank, effect)
            elif isinstance(effect, Recv):
                self._receive(rank, effect)
            else:
                self._run(rank, effect)
        return Spans(self.ranks, self.effects, self.starts, self.ends, self.waited)

    def _add(self, rank: int, effect: Effect, start: float, end: float, waited: int) -> int:
        self.ranks.append(rank)
        self.effects.append(effect)
        self.starts.append(start)
        self.ends.append(end)
        self.waited.append(waited)
        return len(self.effects) - 1

    def _run(self, rank: int, effect: Effect) -> None:
        start, waited, here = self.free[rank], self.last[rank], self.here[rank]
        for name in needs(effect, self.plan):
            given = here[name]
            if self.ends[given] > start:
                start, waited = self.ends[given], given
        for name in frees(effect, self.plan):
            del here[name]
        end = start + self._time(effect)
        at = self._add(rank, effect, start, end, waited)
        here.update(dict.fromkeys(gives(effect, self.plan), at))
        self.free[rank], self.last[rank] = end, at

    def _time(self, effect: Effect) -> float:
        if isinstance(effect, Compute):
            return self.times[type(effect)][effect.stage]
        return self.costs.time(effect) if isinstance(effect, Overlap) else 0.0

    def _send(self, rank: int, effect: Send) -> None:
        edge, waited, posted = self._edge(rank, effect.rank), self.last[rank], self.free[rank]
        left = max(posted, edge.free) + self.costs.bytes(effect.value) / edge.link.bandwidth
        edge.free = left
        at = self._add(rank, effect, posted, left + edge.link.latency, waited)
        if edge.receives:
            self._arrive(at, edge.receives.popleft())
        else:
            edge.sends.append(at)

    def _receive(self, rank: int, effect: Recv) -> None:
        edge, posted = self._edge(effect.rank, rank), self.free[rank]
        at = self.here[rank][effect.value] = self._add(rank, effect, posted, posted, -1)
        if edge.sends:
            self._arrive(edge.sends.popleft(), at)
        else:
            edge.receives.append(at)

    def _arrive(self, sent: int, received: int) -> None:
        self.ends[received] = max(self.starts[received], self.ends[sent])
        self.waited[received] = sent

    def _edge(self, source: int, target: int) -> _Edge:
        if (source, target) not in self.edges:
            self.edges[source, target] = _Edge(self.costs.link(source, target))
        return self.edges[source, target]
