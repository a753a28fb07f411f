"""The passes of a plan, with their times: what engines that order passes have in common. No torch.

A place is a stage on one of its ranks; without copies, places are the stages in order. A pass is one kind of effect in
one place, `kind * places + place`, and runs in the order of the place's microbatches. So a word of passes is an order
of effects: the number of equal passes before one is that of its microbatch among those.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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


class Place(NamedTuple):
    """A stage on one of its ranks."""

    stage: int
    rank: int


def places_of(plan: Plan) -> list[Place]:
    """Return every place, by stage, and those of copies in the order of the placement."""
    return [Place(stage, rank) for stage in range(plan.stages) for rank in plan.ranks_of(stage)]


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

    The latter two depend on which copies run a microbatch: they are listed by its number modulo `plan.cycle`.

    Args:
        scale, sizes: by microbatch, the factors of its times, and of the time that its bytes take on an edge.
        absent: the passes of halves that a stage's backward does not have. They take no time, so that an order may have
            them; lowering leaves them out. That of the input gradients waits for the gradients that the other half
            needs, so that the latter can follow it at any time.
    """

    plan: Plan
    places: list[Place]
    scale: Sequence[float]
    sizes: Sequence[float]
    times: list[float]
    inputs: list[list[int]]
    hops: list[list[list[Hop]]]
    absent: frozenset[int]

    @classmethod
    def of(cls, plan: Plan, costs: Costs) -> Work:
        """Read a plan and its costs.

        Raises:
            ScheduleError: the costs do not fit the plan.
        """
        costs.check(plan)
        places, alike = places_of(plan), [1.0] * plan.microbatches
        scale, sizes = costs.scale or alike, costs.sizes or alike
        costs = replace(costs, scale=(), sizes=())
        count, stages = len(places), [stage for stage, _ in places]
        without_inputs = {INPUT * count + n for n, s in enumerate(stages) if not plan.has_input_half(s)}
        absent = without_inputs | {WEIGHT * count + n for n, s in enumerate(stages) if not plan.is_trained(s)}
        passes = [kind(stage, 0) for kind in KINDS for stage in stages]
        times = [0.0 if at in absent else costs.time(effect) for at, effect in enumerate(passes)]
        inputs = [[0] * plan.cycle for _ in times]
        hops: list[list[list[Hop]]] = [[[] for _ in range(plan.cycle)] for _ in times]
        work = cls(plan, places, scale, sizes, times, inputs, hops, frozenset(absent))
        for m in range(plan.cycle):
            work._connect_all(m, costs)
        return work

    def _connect_all(self, m: int, costs: Costs) -> None:
        """Connect the passes of a microbatch, which are those of each `plan.cycle`-th one."""
        plan = self.plan
        for stage in range(plan.stages):
            forward, by_input, by_weight = (self.pass_of(kind(stage, m)) for kind in KINDS)
            self._connect(m, forward, by_input)
            self._connect(m, by_input, by_weight)
            for reader in plan.consumers(stage):
                self._connect(m, forward, self.pass_of(Forward(reader, m)), costs, Activation(stage, m))
                if not plan.is_differentiated(stage):
                    continue
                gradient = self.pass_of(BackwardInput(reader, m))
                self._connect(m, gradient, by_input, costs, Gradient(stage, reader, m))
                if (higher := plan.added_to(stage, reader, m)) is not None:
                    self._connect(m, self.pass_of(BackwardInput(higher, m)), gradient)

    def _connect(
        self, m: int, source: int, target: int, costs: Costs | None = None, value: Value | None = None
    ) -> None:
        a, b = (self.places[at % self.count].rank for at in (source, target))
        hop = Hop(target, b)
        if a != b and costs is not None and value is not None:
            link, size = costs.link(a, b), TABLE.message_bytes(value, costs, self.plan, b)
            hop = hop._replace(edge=(a, b), wire=size / link.bandwidth, latency=link.latency)
        self.hops[source][m].append(hop)
        self.inputs[target][m] += 1

    @property
    def count(self) -> int:
        """The number of places."""
        return len(self.places)

    @cached_property
    def _numbers(self) -> dict[tuple[int, int], int]:
        return {place: n for n, place in enumerate(self.places)}

    def pass_of(self, effect: Any) -> int:
        """Return the pass of an effect, without its microbatch."""
        place = self._numbers[effect.stage, self.plan.rank_of(effect.stage, effect.microbatch)]
        return KINDS.index(type(effect)) * self.count + place

    def on(self, rank: int) -> list[int]:
        """Return the places on a rank, lowest first."""
        return [n for n, place in enumerate(self.places) if place.rank == rank]

    def microbatches(self, at: int) -> range:
        """Return the microbatches of a pass."""
        return self.plan.microbatches_of(*self.places[at % self.count])

    @property
    def even(self) -> bool:
        """Whether all passes take the same time, and transfers take none."""
        alike = len(set(self.times)) == 1 and len(set(self.scale)) == 1
        return alike and not any(hop.wire or hop.latency for each in self.hops for hops in each for hop in hops)

    def total(self, rank: int) -> float:
        """The time of all passes on a rank."""
        total, own, cycle = 0.0, self.on(rank), self.plan.cycle
        for m in range(cycle):
            run = [n for n in own if m in self.microbatches(n)]
            each = sum(sum(self.times[kind * self.count + n] for kind in range(3)) for n in run)
            total += each * sum(self.scale[m::cycle])
        return total


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
        residuals: by place, from the forward to the input gradient.
        deferred: by place, from there to the weight gradient.
        sizes: by microbatch, a factor of the latter two.
    """

    limits: Sequence[float]
    residuals: Sequence[float]
    deferred: Sequence[float]
    sizes: Sequence[float]

    @classmethod
    def counted(cls, plan: Plan, limits: Sequence[float]) -> Room:
        """Return room for so many microbatches; a chunk of v counts 1/v, from its forward to its weight gradient."""
        sizes = [plan.is_differentiated(stage) / len(plan.stages_on(rank)) for stage, rank in places_of(plan)]
        return cls(limits, sizes, sizes, [1.0] * plan.microbatches)

    @classmethod
    def sized(cls, plan: Plan, costs: Costs, limits: Sequence[float]) -> Room:
        """Return room for so many bytes of residuals and deferred values."""
        plain, stages = replace(costs, scale=(), sizes=()), [stage for stage, _ in places_of(plan)]
        residuals = [plain.bytes(Residuals(s, 0)) * plan.is_differentiated(s) for s in stages]
        halves = [plan.has_input_half(s) and plan.is_trained(s) for s in stages]
        deferred = [
            plain.bytes(Deferred(s, 0)) if both else whole
            for s, both, whole in zip(stages, halves, residuals, strict=True)
        ]
        rooms = [max(0.0, limit - prepared_on(plan, costs, rank)) for rank, limit in enumerate(limits)]
        return cls(rooms, residuals, deferred, costs.sizes or [1.0] * plan.microbatches)

    def fitting(self, plan: Plan, held: Sequence[float]) -> list[int]:
        """Return by place how many microbatches fit its rank if each holds so much, smallest first; at least 1."""
        sizes = [*accumulate(sorted(self.sizes))]
        rooms = [self.limits[rank] * (1 + ROUNDING) for _, rank in places_of(plan)]
        return [
            max(1, bisect_right(sizes, room / size)) if size else len(sizes)
            for room, size in zip(rooms, held, strict=True)
        ]


def peaks(words: Words, work: Work) -> list[float]:
    """Return by rank the most microbatches in flight, each until its weight gradient; a chunk of v counts 1/v."""
    sizes = Room.counted(work.plan, []).residuals
    change = [*sizes, *[0.0] * work.count, *[-size for size in sizes]]
    return [max(accumulate(change[at] for at in word), default=0.0) for word in words]


def table(words: Words, plan: Plan) -> Table:
    """Return the effects of each rank's word."""
    return {rank: tuple(effects(word, plan)) for rank, word in enumerate(words)}


def effects(passes: Iterable[int], plan: Plan) -> Iterator[Effect]:
    """Yield the effects of passes."""
    places = places_of(plan)
    own = [iter(plan.microbatches_of(*place)) for _ in KINDS for place in places]
    for at in passes:
        kind, place = divmod(at, len(places))
        yield KINDS[kind](places[place].stage, next(own[at]))
