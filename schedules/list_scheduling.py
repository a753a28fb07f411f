"""List scheduling: each rank, when it is free, takes the best of what it can run. No torch.

- Effects are placed in the order of their starts: a rank decides knowing all that has started anywhere before.
- The effects of one kind and stage run in microbatch order.
- A rank holds no more than its limit, and always keeps room to finish its older microbatches before its newer ones.
  So the oldest can go on on every rank, and no choice leads to ranks that wait for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product
from math import inf
from typing import Literal, NamedTuple

from fpipe.costs import Costs
from fpipe.effects import Activation, BackwardInput, BackwardWeight, Effect, Forward, Gradient, Name
from fpipe.plan import Plan

ROUNDING = 1e-12
Table = dict[int, tuple[Effect, ...]]
Kind = type[Forward] | type[BackwardInput] | type[BackwardWeight]
KINDS: tuple[Kind, ...] = (Forward, BackwardInput, BackwardWeight)


@dataclass(frozen=True)
class Policy:
    """How a rank chooses. Of two stages' forwards it takes the later stage's, of two input gradients the earlier's.

    Args:
        first: what goes first where a forward and an input gradient are both there; "turn" takes them in turn.
        patience: a weight gradient fills a wait of at least this part of its own time.
        caution: a forward is held back for an input gradient that comes within this part of the forward's time.
    """

    first: Literal["turn", "forward", "input"] = "turn"
    patience: float = 0.0
    caution: float = 0.0


FIRST: tuple[Literal["turn", "forward", "input"], ...] = ("turn", "forward", "input")
POLICIES = tuple(Policy(*choice) for choice in product(FIRST, (0.0, 0.5, 1.0), (0.0, 0.5)))


def greedy(plan: Plan, costs: Costs, limits: Sequence[float], policies: Sequence[Policy] = POLICIES) -> Table:
    """The order of least cost (the largest span of a rank) that one of the policies leads to.

    Any DAG and any placement without copies. Transfers on one edge don't hold each other up here, as they do in the
    simulator where an edge has a bandwidth.

    Args:
        limits: the most microbatches in flight on each rank, at least 1; a chunk of v counts 1/v.

    >>> from fpipe import Placement
    >>> greedy(Plan(Placement.loop(1), 2), Costs(), limits=[1])
    {0: (Forward(stage=0, microbatch=0), BackwardInput(stage=0, microbatch=0), BackwardWeight(stage=0, microbatch=0), \
Forward(stage=0, microbatch=1), BackwardInput(stage=0, microbatch=1), BackwardWeight(stage=0, microbatch=1))}
    """
    least, best = inf, None
    for policy in policies:
        run = _Run(plan, costs, limits, policy)
        if (cost := run.go()) < least:
            least, best = cost, run
        if least <= run.busiest * (1 + ROUNDING):
            break  # no order is faster
    assert best is not None
    return {rank: tuple(effects) for rank, effects in enumerate(best.effects)}


class _Next(NamedTuple):
    """An effect that a rank could run next, and when it could start."""

    start: float
    kind: Kind
    stage: int


class _Run:
    """Where every rank stands. Times are known of all that has been placed, and infinite before."""

    def __init__(self, plan: Plan, costs: Costs, limits: Sequence[float], policy: Policy) -> None:
        ranks, stages = range(plan.ranks), range(plan.stages)
        self.plan, self.costs, self.policy = plan, costs, policy
        self.own = [plan.stages_on(rank) for rank in ranks]
        self.rank_of = [plan.rank_of(stage, 0) for stage in stages]
        self.limits = [int(min(limits[r], plan.microbatches) * len(self.own[r]) + 1e-9) for r in ranks]
        self.times = {kind: [costs.time(kind(stage, 0)) for stage in stages] for kind in KINDS}
        work = [sum(self.times[kind][stage] for kind in KINDS) for stage in stages]
        self.busiest = plan.microbatches * max(sum(work[stage] for stage in own) for own in self.own)
        self.done = {kind: [0] * plan.stages for kind in KINDS}
        self.ends = {kind: [[inf] * plan.microbatches for _ in stages] for kind in KINDS}
        self.inputs = {
            Forward: [self._activations(s) for s in stages],
            BackwardInput: [self._gradients(s) for s in stages],
        }
        self.effects: list[list[Effect]] = [[] for _ in ranks]
        self.held = [0] * plan.ranks
        self.turn: list[Kind] = [Forward] * plan.ranks
        self.began, self.free = [inf] * plan.ranks, [0.0] * plan.ranks

    def _activations(self, stage: int) -> list[tuple[list[float], float]]:
        """What a stage's forwards wait for: when each was made, by microbatch, and how long it travels."""
        sources = self.plan.sources(stage)
        return [(self.ends[Forward][s], self._delay(s, stage, Activation(s, 0))) for s in sources]

    def _gradients(self, stage: int) -> list[tuple[list[float], float]]:
        consumers = self.plan.consumers(stage)
        given = [(self.ends[BackwardInput][c], self._delay(c, stage, Gradient(stage, c, 0))) for c in consumers]
        return [(self.ends[Forward][stage], 0.0), *given]

    def _delay(self, source: int, target: int, value: Name) -> float:
        return self.costs.delay(self.rank_of[source], self.rank_of[target], value)

    def go(self) -> float:
        """Place everything; the largest span of a rank."""
        agenda = [(0.0, rank) for rank in range(self.plan.ranks)]
        while agenda:
            now, rank = heappop(agenda)
            if now < self.free[rank]:
                continue
            chosen = self.choose(rank, now)
            if chosen.start == now:
                self.place(rank, chosen)
                heappush(agenda, (self.free[rank], rank))
                for reader in self.readers(chosen):
                    if self.free[reader] <= now:
                        heappush(agenda, (now, reader))
            elif chosen.start < inf:
                heappush(agenda, (chosen.start, rank))
        return max(free - began for free, began in zip(self.free, self.began, strict=True))

    def place(self, rank: int, chosen: _Next) -> None:
        start, kind, stage = chosen
        microbatch = self.done[kind][stage]
        self.effects[rank].append(kind(stage, microbatch))
        self.done[kind][stage] += 1
        self.began[rank] = min(self.began[rank], start)
        self.free[rank] = self.ends[kind][stage][microbatch] = start + self.times[kind][stage]
        self.held[rank] += (kind is Forward) - (kind is BackwardWeight)
        if kind is not BackwardWeight:
            self.turn[rank] = BackwardInput if kind is Forward else Forward

    def readers(self, chosen: _Next) -> list[int]:
        """The ranks that may start something with what an effect gives."""
        if chosen.kind is BackwardWeight:
            return []
        neighbours = self.plan.consumers if chosen.kind is Forward else self.plan.sources
        return [self.rank_of[stage] for stage in neighbours(chosen.stage)]

    def choose(self, rank: int, now: float) -> _Next:
        """What a rank runs now; or, with a later start, when it has to choose again."""
        forward, backward = self.next(Forward, rank, now), self.next(BackwardInput, rank, now)
        first = {"turn": self.turn[rank], "forward": Forward, "input": BackwardInput}[self.policy.first]
        if backward.start == now and (forward.start > now or first is BackwardInput):
            return backward
        if forward.start == now:
            if not 0 < backward.start - now < self.policy.caution * self.times[Forward][forward.stage]:
                return forward
            wait = backward
        else:
            wait = min(forward, backward, key=lambda n: n.start)
        for stage in self.own[rank]:
            late = self.done[BackwardWeight][stage] < self.done[BackwardInput][stage]
            if late and wait.start - now >= self.policy.patience * self.times[BackwardWeight][stage]:
                return _Next(now, BackwardWeight, stage)
        return wait

    def next(self, kind: Kind, rank: int, now: float) -> _Next:
        """The rank's forward, or input gradient, that can start first, from now on."""
        found = _Next(inf, kind, -1)
        for stage in self.own[rank] if kind is BackwardInput else reversed(self.own[rank]):
            microbatch = self.done[kind][stage]
            if microbatch < self.plan.microbatches and (kind is BackwardInput or self.room(rank, stage)):
                start = max([now, *(ends[microbatch] + delay for ends, delay in self.inputs[kind][stage])])
                if start < found.start:
                    found = _Next(start, kind, stage)
        return found

    def room(self, rank: int, stage: int) -> bool:
        """Whether a rank can hold one more forward of a stage and still finish the older microbatches first."""
        own, free = self.own[rank], self.limits[rank] - self.held[rank] - 1
        if free < 0 or free >= len(own) - 1:  # each microbatch that is begun lacks fewer stages than there are
            return free >= 0
        begun = [self.done[Forward][s] + (s == stage) for s in own]
        ended = [self.done[BackwardWeight][s] for s in own]
        for microbatch in range(min(ended), max(begun)):
            inside = sum(microbatch < b for b in begun)
            if free < len(own) - inside:
                return False
            free += inside - sum(microbatch < e for e in ended)
            if free >= len(own) - 1:
                return True
        return True
