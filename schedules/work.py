"""The passes of a plan, with their times: what engines that order passes have in common. No torch.

A pass is one kind of effect of one stage, `kind * stages + stage`, and runs in microbatch order. So a word of passes is
an order of effects: the number of equal passes before one is its microbatch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple

from fpipe.costs import ROUNDING, Costs
from fpipe.effects import (
    Activation,
    BackwardInput,
    BackwardWeight,
    Compute,
    Deferred,
    Effect,
    Forward,
    Gradient,
    Residuals,
    Value,
)
from fpipe.errors import ScheduleError
from fpipe.plan import Plan
from fpipe.programs.memory import prepared_on
from fpipe.tables import TABLE

Table = dict[int, tuple[Effect, ...]]
Words = Sequence[Sequence[int]]  # of passes, by rank
KINDS: tuple[type[Compute], ...] = (Forward, BackwardInput, BackwardWeight)
FORWARD, INPUT, WEIGHT = range(3)


class Hop(NamedTuple):
    """The way of a pass's result to another pass: over an edge whose bytes queue, or within the rank.

    A value of 0 bytes queues too, as in the simulator. An edge without a bandwidth needs no case of its own: its values
    leave in the order of their passes, and take no time on it.

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
        scale, sizes: by microbatch, the factors of its times, and of the time that its bytes take on an edge.
        absent: the passes of halves that a stage's backward does not have. They take no time, so that an order may have
            them; lowering leaves them out. That of the input gradients waits for the gradients that the other half
            needs, so that the latter can follow it at any time.
    """

    plan: Plan
    scale: Sequence[float]
    sizes: Sequence[float]
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
        count, alike = plan.stages, [1.0] * plan.microbatches
        scale, sizes = costs.scale or alike, costs.sizes or alike
        costs = replace(costs, scale=(), sizes=())
        without_inputs = {INPUT * count + s for s in range(count) if not plan.has_input_half(s)}
        absent = without_inputs | {WEIGHT * count + s for s in range(count) if not plan.is_trained(s)}
        passes = [kind(stage, 0) for kind in KINDS for stage in range(count)]
        times = [0.0 if at in absent else costs.time(effect) for at, effect in enumerate(passes)]
        work = cls(plan, scale, sizes, times, [0] * len(times), [[] for _ in times], frozenset(absent))
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
            link, size = costs.link(a, b), TABLE.message_bytes(value, costs, self.plan, b)
            hop = hop._replace(edge=(a, b), wire=size / link.bandwidth, latency=link.latency)
        self.hops[source].append(hop)
        self.inputs[target] += 1

    @property
    def even(self) -> bool:
        """Whether all passes take the same time, and transfers take none."""
        alike = len(set(self.times)) == 1 and len(set(self.scale)) == 1
        return alike and not any(hop.wire or hop.latency for hops in self.hops for hop in hops)

    def total(self, rank: int) -> float:
        """The time of all passes on a rank."""
        count = self.plan.stages
        each = sum(sum(self.times[kind * count + s] for kind in range(3)) for s in self.plan.stages_on(rank))
        return each * sum(self.scale)


def by_rank(plan: Plan, limit: float | Sequence[float] | None) -> list[float]:
    """Return a memory limit of each rank, infinity where there is none.

    Raises:
        ScheduleError: there are limits, but not one for each rank.
    """
    limits = [*limit] if isinstance(limit, Sequence) else [inf if limit is None else limit] * plan.ranks
    if len(limits) != plan.ranks:
        raise ScheduleError(
            f"memory_limit has {len(limits)} entries, the plan {plan.ranks} ranks: give one number for all "
            "ranks, or one for each"
        )
    return limits


@dataclass(frozen=True)
class Room:
    """The memory of each rank, and how much of it a microbatch takes, in one unit.

    Args:
        limits: by rank.
        residuals: by stage, from the forward to the input gradient.
        deferred: by stage, from there to the weight gradient.
        sizes: by microbatch, a factor of the latter two.
    """

    limits: Sequence[float]
    residuals: Sequence[float]
    deferred: Sequence[float]
    sizes: Sequence[float]

    @classmethod
    def counted(cls, plan: Plan, limits: Sequence[float]) -> Room:
        """Return room for so many microbatches; a chunk of v counts 1/v, from its forward to its weight gradient."""
        chunks = [len(plan.stages_on(plan.rank_of(stage, 0))) for stage in range(plan.stages)]
        held = [plan.is_differentiated(stage) / chunks[stage] for stage in range(plan.stages)]
        return cls(limits, held, held, [1.0] * plan.microbatches)

    @classmethod
    def sized(cls, plan: Plan, costs: Costs, limits: Sequence[float]) -> Room:
        """Return room for so many bytes of residuals and deferred values."""
        plain, stages = replace(costs, scale=(), sizes=()), range(plan.stages)
        residuals = [plain.bytes(Residuals(s, 0)) * plan.is_differentiated(s) for s in stages]
        halves = [plan.has_input_half(s) and plan.is_trained(s) for s in stages]
        deferred = [
            plain.bytes(Deferred(s, 0)) if both else residuals[s] for s, both in zip(stages, halves, strict=True)
        ]
        rooms = [max(0.0, limit - prepared_on(plan, costs, rank)) for rank, limit in enumerate(limits)]
        return cls(rooms, residuals, deferred, costs.sizes or [1.0] * plan.microbatches)

    def fitting(self, plan: Plan, held: Sequence[float]) -> list[int]:
        """Return by stage how many microbatches fit its rank if each holds so much, smallest first; at least 1."""
        sizes = [*accumulate(sorted(self.sizes))]
        rooms = [self.limits[plan.rank_of(stage, 0)] * (1 + ROUNDING) for stage in range(plan.stages)]
        return [
            max(1, bisect_right(sizes, room / size)) if size else len(sizes)
            for room, size in zip(rooms, held, strict=True)
        ]


def pass_of(effect: Any, plan: Plan) -> int:
    """Return the pass of an effect, without its microbatch."""
    return KINDS.index(type(effect)) * plan.stages + int(effect.stage)


def peaks(words: Words, work: Work) -> list[float]:
    """Return by rank the most microbatches in flight, each until its weight gradient; a chunk of v counts 1/v."""
    held, plan = Room.counted(work.plan, []).residuals, work.plan
    change = [*held, *[0.0] * plan.stages, *[-each for each in held]]
    return [max(accumulate(change[at] for at in word), default=0.0) for word in words]


def table(words: Words, plan: Plan) -> Table:
    """Return the effects of each rank's word."""
    return {rank: tuple(effects(word, plan.stages)) for rank, word in enumerate(words)}


def effects(passes: Iterable[int], stages: int) -> Iterator[Effect]:
    """Yield the effects of passes: the number of equal passes before one is its microbatch."""
    done = [0] * (len(KINDS) * stages)
    for at in passes:
        yield KINDS[at // stages](at % stages, done[at])
        done[at] += 1
