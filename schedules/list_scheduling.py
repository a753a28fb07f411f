"""List scheduling: each rank, when it is free, starts the best pass that can start. No torch.

A pass is one kind of effect of one stage, `kind * stages + stage`, and runs in microbatch order. `ListScheduler` plays
the ranks against each other; `greedy` chooses by rules, and v_blocks.py by orders that are nearly right already.

- Passes are placed in the order of their starts: a rank chooses with the knowledge of all that has started before.
- Transfers on one edge queue, as in the simulator.
- Under `greedy` a rank never exceeds its limit, and always keeps room to finish its older microbatches before its newer
  ones. So the oldest microbatch can proceed on every rank, and no choice leads to a deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import compress, product
from math import inf
from typing import Literal, NamedTuple

from fpipe.costs import Costs
from fpipe.effects import Activation, BackwardInput, BackwardWeight, Compute, Effect, Forward, Gradient, Value
from fpipe.plan import Plan

ROUNDING = 1e-12
Table = dict[int, tuple[Effect, ...]]
KINDS: tuple[type[Compute], ...] = (Forward, BackwardInput, BackwardWeight)
FORWARD, INPUT, WEIGHT = range(3)


class Hop(NamedTuple):
    """The way of a pass's result to another pass: over an edge whose bytes queue, or within the rank.

    Args:
        wire, latency: time that the bytes take on the edge, and until they arrive.
    """

    target: int
    rank: int
    edge: tuple[int, int] | None = None
    wire: float = 0.0
    latency: float = 0.0


@dataclass(frozen=True)
class Work:
    """The passes of a plan: the time of each, how many inputs it waits for, and where its result goes.

    Args:
        absent: the passes of halves that a stage's backward does not have. They take no time, so that an order may have
            them; lowering leaves them out. That of the input gradients waits for the gradients that the other half
            needs, so that the latter can follow it at any time.
    """

    plan: Plan
    times: list[float]
    inputs: list[int]
    hops: list[list[Hop]]
    absent: frozenset[int]

    @classmethod
    def of(cls, plan: Plan, costs: Costs) -> Work:
        """Read a plan without copies, and its costs.

        Raises:
            ScheduleError: the costs do not fit the plan.
        """
        costs.check(plan)
        count = plan.stages
        without_inputs = {INPUT * count + s for s in range(count) if not plan.has_input_half(s)}
        absent = without_inputs | {WEIGHT * count + s for s in range(count) if not plan.is_trained(s)}
        passes = [kind(stage, 0) for kind in KINDS for stage in range(count)]
        times = [0.0 if at in absent else costs.time(effect) for at, effect in enumerate(passes)]
        work = cls(plan, times, [0] * len(times), [[] for _ in times], frozenset(absent))
        for stage in range(count):
            forward, by_input, by_weight = (kind * count + stage for kind in (FORWARD, INPUT, WEIGHT))
            work._connect(forward, by_input)
            work._connect(by_input, by_weight)
            for reader in plan.consumers(stage):
                work._connect(forward, reader, costs, Activation(stage, 0))
                if not plan.is_differentiated(stage):
                    continue
                work._connect(INPUT * count + reader, by_input, costs, Gradient(stage, reader, 0))
                if (higher := plan.added_to(stage, reader, 0)) is not None:
                    work._connect(INPUT * count + higher, INPUT * count + reader)
        return work

    def _connect(self, source: int, target: int, costs: Costs | None = None, value: Value | None = None) -> None:
        a, b = (self.plan.rank_of(at % self.plan.stages, 0) for at in (source, target))
        hop = Hop(target, b)
        if a != b and costs is not None and value is not None:
            link = costs.link(a, b)
            hop = hop._replace(edge=(a, b), wire=costs.bytes(value) / link.bandwidth, latency=link.latency)
        self.hops[source].append(hop)
        self.inputs[target] += 1

    @property
    def even(self) -> bool:
        """Whether all passes take the same time, and transfers take none."""
        return len(set(self.times)) == 1 and not any(hop.wire or hop.latency for hops in self.hops for hop in hops)

    def total(self, rank: int) -> float:
        """The time of one microbatch's passes on a rank."""
        count = self.plan.stages
        return sum(sum(self.times[kind * count + s] for kind in range(3)) for s in self.plan.stages_on(rank))


class ListScheduler:
    """The state of all ranks while passes are placed. Times of what has not been placed are infinite.

    Args:
        done: by pass, how many microbatches have started.
        live: by rank, how many chunks that have a backward are between the start of their forward and that of their
            weight gradient.
        order: by rank, the passes placed.
    """

    def __init__(self, work: Work, microbatches: int) -> None:
        ranks, passes = work.plan.ranks, len(work.times)
        self.work, self.plan = work, work.plan
        self.done, self.live = [0] * passes, [0] * ranks
        self.ready = [[0.0] * microbatches + [inf] for _ in work.inputs]  # the latest known arrival of an input
        self.missing = [[count] * microbatches + [0] for count in work.inputs]  # inputs without a known arrival
        self.order: list[list[int]] = [[] for _ in range(ranks)]
        self.began, self.free = [inf] * ranks, [0.0] * ranks
        self.sent: dict[tuple[int, int], float] = {}  # when the last bytes have left, by edge

    def run(self, choose: Callable[[int, float], int | None]) -> float:
        """Place all passes, and return the cost, the largest span of a rank.

        Args:
            choose: (rank, now) -> the pass that it starts now, or None. A rank is asked when it becomes free and, while
                free, when an input arrives.
        """
        agenda = [(0.0, rank) for rank in range(self.plan.ranks)]
        while agenda:
            now, rank = heappop(agenda)
            if now >= self.free[rank] and (chosen := choose(rank, now)) is not None:
                for event in self._place(chosen, rank, now):
                    heappush(agenda, event)
        return max(free - began for free, began in zip(self.free, self.began, strict=True))

    def _place(self, at: int, rank: int, now: float) -> list[tuple[float, int]]:
        """Start a pass, and return when ranks have to choose because of it."""
        microbatch, end = self.done[at], now + self.work.times[at]
        kind, stage = divmod(at, self.plan.stages)
        self.done[at] += 1
        if self.plan.is_differentiated(stage):
            self.live[rank] += (kind == FORWARD) - (kind == WEIGHT)
        self.order[rank].append(at)
        self.began[rank], self.free[rank] = min(self.began[rank], now), end
        events = [(end, rank)]
        for target, reader, edge, wire, latency in self.work.hops[at]:
            arrival = end
            if edge is not None:
                self.sent[edge] = max(end, self.sent.get(edge, 0.0)) + wire
                arrival = self.sent[edge] + latency
                events.append((arrival, reader))
            self.missing[target][microbatch] -= 1
            if arrival > self.ready[target][microbatch]:
                self.ready[target][microbatch] = arrival
        return events

    def arrival(self, at: int) -> float:
        """Return when the last input of a pass's next microbatch arrives, as far as known; infinite after the last."""
        microbatch = self.done[at]
        return inf if self.missing[at][microbatch] else self.ready[at][microbatch]


@dataclass(frozen=True)
class Rules:
    """The rules by which a rank chooses.

    Of two stages' forwards it takes the later stage's, of two input gradients the earlier's.

    Args:
        first: which runs first if a forward and an input gradient can both start; "turn" alternates.
        patience: a weight gradient fills a wait of at least this part of its own time.
        caution: a forward is delayed for an input gradient that can start within this part of the forward's time.
    """

    first: Literal["turn", "forward", "input"] = "turn"
    patience: float = 0.0
    caution: float = 0.0


FIRST: tuple[Literal["turn", "forward", "input"], ...] = ("turn", "forward", "input")
RULES = tuple(Rules(*choice) for choice in product(FIRST, (0.0, 0.5, 1.0), (0.0, 0.5)))


def greedy(plan: Plan, costs: Costs, limits: Sequence[float], rules: Sequence[Rules] = RULES) -> Table:
    """Return the order of least cost (the largest span of a rank) that one of the rules leads to.

    It takes any DAG, and any placement without copies.

    Args:
        limits: the most microbatches in flight on each rank, at least 1; a chunk of v counts 1/v.

    >>> from fpipe import Placement
    >>> greedy(Plan(Placement.loop(1), 2), Costs(), limits=[1])
    {0: (Forward(stage=0, microbatch=0), BackwardInput(stage=0, microbatch=0), BackwardWeight(stage=0, microbatch=0), \
Forward(stage=0, microbatch=1), BackwardInput(stage=0, microbatch=1), BackwardWeight(stage=0, microbatch=1))}
    """
    work = Work.of(plan, costs)
    busiest = plan.microbatches * max(map(work.total, range(plan.ranks)))
    least, best = inf, list[list[int]]()
    for rule in rules:
        choice = _Greedy(ListScheduler(work, plan.microbatches), limits, rule)
        cost = choice.state.run(choice.choose)
        if cost < least:
            least, best = cost, choice.state.order
        if least <= busiest * (1 + ROUNDING):
            break  # no order is faster
    return {rank: tuple(effects(order, plan.stages)) for rank, order in enumerate(best)}


def effects(passes: Iterable[int], stages: int) -> Iterator[Effect]:
    """Yield the effects of passes: the number of equal passes before one is its microbatch."""
    done = [0] * (len(KINDS) * stages)
    for at in passes:
        yield KINDS[at // stages](at % stages, done[at])
        done[at] += 1


class _Greedy:
    """The choice of passes by rules.

    Args:
        passes: by rank its forwards, the passes that run backward as soon as they can, and those that can be late. A
            stage with weight gradients alone has them among the former.
        pairs: by rank the forward, and the weight gradient that ends its flight, of each stage that has a backward.
        absent: by rank the passes that do not exist, which are placed at once.
    """

    def __init__(self, state: ListScheduler, limits: Sequence[float], rules: Rules) -> None:
        plan, self.state, self.rules = state.plan, state, rules
        stages = [plan.stages_on(rank) for rank in range(plan.ranks)]
        self.limits = [int(min(n, plan.microbatches) * len(s) + 1e-9) for n, s in zip(limits, stages, strict=True)]
        self.passes, self.pairs, self.absent = list[list[list[int]]](), list[list[tuple[int, int]]](), list[list[int]]()
        for local in stages:
            forwards, inputs, weights = ([kind * plan.stages + s for s in local] for kind in range(3))
            absent = [at for at in (*inputs, *weights) if at in state.work.absent]
            early = [w if i in absent else i for i, w in zip(inputs, weights, strict=True)]
            late = [w for w in weights if w not in (*early, *absent)]
            self.passes.append([forwards, [at for at in early if at not in absent], late])
            differentiated = map(plan.is_differentiated, local)
            self.pairs.append(list(compress(zip(forwards, weights, strict=True), differentiated)))
            self.absent.append(absent)
        self.turn = [FORWARD] * plan.ranks

    def choose(self, rank: int, now: float) -> int | None:
        for at in self.absent[rank]:
            if self.state.arrival(at) <= now:
                return at
        chosen = self._choose(rank, now)
        forwards, inputs, _ = self.passes[rank]
        if chosen in forwards or chosen in inputs:
            self.turn[rank] = INPUT if chosen in forwards else FORWARD
        return chosen

    def _choose(self, rank: int, now: float) -> int | None:
        forwards, inputs, weights = self.passes[rank]
        times, done, stages = self.state.work.times, self.state.done, self.state.plan.stages
        forward_start, forward = self._next((at for at in reversed(forwards) if self._room(rank, at)), now)
        input_start, backward = self._next(inputs, now)
        first = {"turn": self.turn[rank], "forward": FORWARD, "input": INPUT}[self.rules.first]
        if input_start == now and (forward_start > now or first == INPUT):
            return backward
        wait = min(forward_start, input_start)
        if forward_start == now:
            if not 0 < input_start - now < self.rules.caution * times[forward]:
                return forward
            wait = input_start
        for at in weights:
            if done[at] < done[at - stages] and wait - now >= self.rules.patience * times[at]:
                return at
        return None

    def _next(self, passes: Iterable[int], now: float) -> tuple[float, int]:
        """Return the first start from now on, and the pass that can start then."""
        start, chosen = inf, -1
        for at in passes:
            arrival = max(now, self.state.arrival(at))
            if arrival < start:
                start, chosen = arrival, at
        return start, chosen

    def _room(self, rank: int, forward: int) -> bool:
        """Whether a rank has room for this forward, and can then still finish the older microbatches first."""
        pairs = self.pairs[rank]
        free, done = self.limits[rank] - self.state.live[rank] - 1, self.state.done
        if not any(forward == at for at, _ in pairs):
            return True
        if free < 0 or free >= len(pairs) - 1:  # a microbatch that has begun needs at most that many more chunks
            return free >= 0
        begun = [done[at] + (at == forward) for at, _ in pairs]
        ended = [done[at] for _, at in pairs]
        for microbatch in range(min(ended), max(begun)):
            inside = sum(microbatch < b for b in begun)
            if free < len(pairs) - inside:
                return False
            free += inside - sum(microbatch < e for e in ended)
            if free >= len(pairs) - 1:
                return True
        return True
