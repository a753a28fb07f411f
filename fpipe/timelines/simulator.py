"""Predict when each effect runs, from its costs: programs -> timeline. No torch.

- A rank runs its compute in the order of its program. Each effect starts when the rank is free and its needs are there.
- A gather or a scatter starts when the rank comes to it, its needs are there and its lane is free. It occupies the
  lane. All replicas do the same at the same time. So do copies to the host, and those back.
- A transfer starts at its send and occupies no rank. On one edge values arrive in the order of their sends; if the edge
  has a bandwidth, their bytes are sent one after the other.
- Of several steps, a rank begins one when it has ended the one before. It sends nothing of a step until all ranks have
  begun it, as they agree on a step before a value travels, but for the values that lead (fpipe/programs/leading.py).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from math import inf
from typing import Any

from fpipe.costs import Costs, Link
from fpipe.effects import Recv, Send
from fpipe.errors import ScheduleError
from fpipe.errors.arguments import checked, is_whole
from fpipe.errors.tracebacks import fold_tracebacks
from fpipe.plan import Plan, Schedule
from fpipe.programs.footprint import enforce, footprint
from fpipe.programs.interleaving import turns
from fpipe.programs.leading import leading
from fpipe.programs.lowering import lower
from fpipe.programs.program import Pass, Programs, plan_of, table_of
from fpipe.programs.residence import Residence
from fpipe.tables import LANES, TABLE, Table, fields_of, is_uniform
from fpipe.timelines.spans import Spans
from fpipe.timelines.timeline import Timeline


@fold_tracebacks
@checked("schedule", "plan", "depth")
def simulate(
    schedule: Schedule | str,
    plan: Plan,
    costs: Costs = Costs(),
    *,
    depth: int | None = None,
    resident: Residence | int | None = None,
    offload: Pass | None = None,
    memory_limit_bytes: float | None = None,
    steps: int = 1,
    effects: Table = TABLE,
) -> Timeline:
    """Return the predicted timeline of a schedule. The schedule must be correct: check it with `fpipe.verify`.

    Args:
        costs: the times and sizes of effects and values; by default one unit for each compute, and 0 for transfers.
        schedule, depth, resident, offload, effects: as in `lower`.
        memory_limit_bytes: bytes that a rank has, for all that `fpipe.footprint` counts.
        steps: how many follow each other without a barrier. `Timeline.period` is the time of one in the long run.

    Raises:
        ScheduleError: the ranks wait for each other in a cycle, a rank needs more than the limit, the limit is not
            positive or the costs have no sizes to compare with it, the costs don't fit the plan, or there are no steps.

    >>> from fpipe import Costs, Placement, Plan, schedules
    >>> simulate(schedules.gpipe, Plan(Placement.loop(4), 8), Costs(forward=1, backward=2)).bubble_rate
    0.2727272727272727
    >>> loop = simulate(schedules.zb_h2, Plan(Placement.loop(4), 12), steps=10)
    >>> loop.period, simulate(schedules.zb_h2, Plan(Placement.loop(4), 12)).makespan
    (36.0, 39.0)
    """
    if not is_whole(steps, least=1):
        raise ScheduleError(f"steps must be a whole number of at least 1, not {steps!r}")
    programs = lower(schedule, plan, depth=depth, resident=resident, offload=offload, effects=effects)
    costs.check(plan)
    if memory_limit_bytes is not None:
        enforce(footprint(programs, costs), memory_limit_bytes, costs)
    return simulate_programs(programs, costs, steps)


def simulate_programs(programs: Programs, costs: Costs, steps: int = 1) -> Timeline:
    """Return the predicted timeline of complete programs."""
    plan = plan_of(programs)
    return Timeline(plan, _Simulation(programs, costs.over(plan), steps).spans(), costs, steps)


def _names_part(kind: Any) -> bool:
    return tuple(name for name in fields_of(kind) if name != "slice") == ("stage", "microbatch")


class _Edge:
    """One direction between two ranks: when it is free of bytes, and the posts whose other half is not posted yet."""

    def __init__(self, link: Link) -> None:
        self.latency, self.bandwidth, self.free = link.latency, link.bandwidth, 0.0
        self.last = -1  # the last span whose bytes occupied it
        self.sends: deque[int] = deque()
        self.receives: deque[int] = deque()


class _Simulation:
    """The state of a simulation: the spans as columns, grouped by rank, and the time when each rank is free."""

    def __init__(self, programs: Programs, costs: Costs, steps: int) -> None:
        plan = plan_of(programs)
        ranks, stages = range(plan.ranks), range(plan.stages)
        self.programs, self.costs, self.plan, self.table = programs, costs, plan, table_of(programs)
        self.steps = steps
        self.leading = leading(programs) if steps > 1 else frozenset()
        self.times = {  # by stage, of the effects that take as long for every microbatch
            kind: [row.time(kind(stage, 0), costs) for stage in stages]
            for kind, row in self.table.effects.items()
            if not (costs.scale or costs.slice_scale) and _names_part(kind) and is_uniform(row.time)
        }
        self.free = [0.0 for _ in ranks]
        self.last = [-1 for _ in ranks]  # the span that occupies the rank until it is free
        self.lane_of = {kind: row.track for kind, row in self.table.effects.items() if row.track in LANES}
        self.lanes = dict[tuple[int, str], int]()  # the last span on a rank's lane
        self.edge = cache(lambda source, target: _Edge(costs.link(source, target)))
        self.groups = [0, *accumulate(steps * len(programs[rank]) for rank in ranks)]
        self.first = self.groups[:-1]  # of each rank, the first span of the running step
        self.begun, self.latest = 0.0, -1  # when all ranks have begun it, and the span for which the last one waited
        size = bytes(8 * self.groups[-1])
        self.starts, self.ends, self.waited = array("d", size), array("d", size), array("q", size)

    def spans(self) -> Spans:
        for _ in range(self.steps):
            self._step()
            self.first = [first + len(self.programs[rank]) for rank, first in enumerate(self.first)]
            self.begun, self.latest = max(zip(self.free, self.last, strict=True))
        whole = [e for rank in range(len(self.programs)) for e in self.programs[rank].effects * self.steps]
        return Spans(self.groups, whole, self.starts, self.ends, self.waited, self.table)

    def _step(self) -> None:
        for rank, start, stop, givers in turns(self.programs):
            first, effects = self.first[rank], self.programs[rank].effects
            effect: Any
            for at, effect, needs in zip(range(first + start, first + stop), effects[start:stop], givers, strict=True):
                kind = type(effect)
                if kind is Send:
                    self._send(at, rank, effect, needs)
                elif kind is Recv:
                    self._receive(at, rank, effect)
                elif kind in self.lane_of:
                    self._run_beside(at, rank, effect, needs)
                else:
                    self._run(at, rank, effect, needs)

    def _run(self, at: int, rank: int, effect: Any, givers: Sequence[int]) -> None:
        start, waited, first, ends = self.free[rank], self.last[rank], self.first[rank], self.ends
        for giver in givers:
            if ends[first + giver] > start:
                start, waited = ends[first + giver], first + giver
        times = self.times.get(type(effect))
        took = times[effect.stage] if times else self.costs.time(effect, self.table)
        self.starts[at], self.waited[at] = start, waited
        self.free[rank] = ends[at] = start + took
        self.last[rank] = at

    def _run_beside(self, at: int, rank: int, effect: Any, givers: Sequence[int]) -> None:
        lane, ends = (rank, self.lane_of[type(effect)]), self.ends
        before = [self.first[rank] + giver for giver in givers] + ([self.lanes[lane]] if lane in self.lanes else [])
        start, waited = max([(self.free[rank], self.last[rank]), *((ends[each], each) for each in before)])
        self.starts[at], self.waited[at] = start, waited
        ends[at] = start + self.costs.time(effect, self.table)
        self.lanes[lane] = at

    def _send(self, at: int, rank: int, effect: Send, givers: Sequence[int]) -> None:
        for giver in givers:  # only a scatter ends after the rank is free
            if self.ends[self.first[rank] + giver] > self.free[rank]:
                self.free[rank], self.last[rank] = self.ends[self.first[rank] + giver], self.first[rank] + giver
        if self.begun > self.free[rank] and (effect.value, (rank, effect.rank)) not in self.leading:
            self.free[rank], self.last[rank] = self.begun, self.latest
        edge = self.edge(rank, effect.rank)
        posted = left = self.free[rank]
        waited = self.last[rank]
        if edge.bandwidth < inf:
            if edge.free > posted:
                left, waited = edge.free, edge.last
            size = self.table.message_bytes(effect.value, self.costs, self.plan, effect.rank)
            edge.free = left = left + size / edge.bandwidth
            edge.last = at
        self.starts[at], self.ends[at], self.waited[at] = posted, left + edge.latency, waited
        if edge.receives:
            self._arrive(at, edge.receives.popleft())
        else:
            edge.sends.append(at)

    def _receive(self, at: int, rank: int, effect: Recv) -> None:
        edge = self.edge(effect.rank, rank)
        self.starts[at] = self.free[rank]
        if edge.sends:
            self._arrive(edge.sends.popleft(), at)
        else:
            edge.receives.append(at)

    def _arrive(self, sent: int, received: int) -> None:
        self.ends[received] = max(self.starts[received], self.ends[sent])
        self.waited[received] = sent
