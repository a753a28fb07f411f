"""Layouts on placements that nobody named: each layer on any rank, in the order of a building block. No torch.

A rank for each layer makes a layout: neighbouring layers on one rank are a stage. Placements are drawn at random, with
cuts that give the ranks about equal times. The better half of them goes on with twice the effort, again and again
(successive halving). Then layers of the best ones move to other ranks.

Invariants:
- Ranks are numbered as they first appear, and taken as alike: so no layout is tried twice. Where links differ by edge,
  the same stages on other ranks are not tried.
- The result depends on the arguments alone: what ends the search is a number of placed passes, not time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from heapq import nsmallest
from itertools import groupby
from random import Random

from fpipe.costs import ROUNDING
from fpipe.errors import ScheduleError
from fpipe.plan import Placement
from fpipe.programs.footprint import least_bytes
from fpipe.schedules.filling import Filling
from fpipe.schedules.grouping import Grouping
from fpipe.schedules.modulo import Blocks
from fpipe.schedules.partitions import Partition, levelled
from fpipe.schedules.space import FEW_LIMITED, Space
from fpipe.schedules.work import Room, Work

PLACED = 12_000_000  # passes that a search places
DRAWN, HALVED = 0.3, 0.6  # the parts of the search that draw and halve, as they end
LEVELLED = 1 / 3  # passes that are placed while a layer of a draw with one stage is moved
EFFORT = 120  # times the passes of a layout, when it is tried first
BEST = 4  # layouts whose layers move


def scattered(
    space: Space, name: str, cost: float, limit: float | None, limit_bytes: float | None, count: int
) -> list[Partition]:
    """Return the layouts on which building blocks cost least, the best first.

    Args:
        name: of the schedule that orders on them, for the progress.
        cost: of a known result: no layout whose busiest rank takes as long is tried.
        limit, limit_bytes: of memory, in microbatches in flight and in bytes on a rank.
        count: how many.
    """
    search = _Scattering(space, name, cost, limit, limit_bytes)
    search.run()
    return [partition for partition, _ in search.best(count)]


def of_ranks(ranks: Sequence[int]) -> Partition:
    """Return the stages of layers with a rank each.

    >>> of_ranks([2, 2, 0, 2, 1])
    Partition(placement=Placement((0, 1, 0, 2)), layers=(2, 1, 1, 1))
    """
    numbers = {rank: n for n, rank in enumerate(dict.fromkeys(ranks))}
    runs = [(numbers[rank], len([*run])) for rank, run in groupby(ranks)]
    return Partition(Placement([rank for rank, _ in runs]), tuple(count for _, count in runs))


class _Scattering:
    """The state of a search.

    Args:
        tried: by layout its blocks; None if they can't be fast enough, or fit the memory.
        left: the passes that are to be placed.
    """

    def __init__(self, space: Space, name: str, cost: float, limit: float | None, limit_bytes: float | None) -> None:
        plan = space.plan
        self.space, self.name, self.cost, self.limit, self.limit_bytes = space, name, cost, limit, limit_bytes
        self.rng, self.tried = Random(0), dict[Partition, Blocks | None]()
        self.most = float(min(PLACED, 24 * (2 * plan.stages * plan.microbatches) ** 2))
        self.left = self.most

    def run(self) -> None:
        self._grow(self._drawn(), (1 - DRAWN) * self.most)
        blocks, effort = [each for each in self.tried.values() if each], EFFORT
        while self.left > (1 - HALVED) * self.most and len(blocks) > 1:
            blocks = nsmallest((len(blocks) + 1) // 2, blocks, key=lambda each: each.best.cost)
            effort *= 2
            for each in blocks:
                self._effort(each, effort)
        while self.left > 0 and (moved := [*self._moved()]):
            self._grow(iter(moved), 0.0)
            for _, each in self.best(BEST):
                self._effort(each, EFFORT)

    def best(self, count: int) -> list[tuple[Partition, Blocks]]:
        fit = [(partition, blocks) for partition, blocks in self.tried.items() if blocks]
        return nsmallest(count, fit, key=lambda each: each[1].best.cost)

    def _grow(self, partitions: Iterator[Partition], until: float) -> None:
        """Try layouts that are new."""
        for partition in partitions:
            if self.left <= until:
                return
            self.left -= self.space.plan.microbatches * len(partition.layers)  # also for one that is refused
            if partition not in self.tried:
                self.tried[partition] = blocks = None
                with suppress(ScheduleError):  # such as for costs without an edge between two of its ranks
                    self.tried[partition] = blocks = self._blocks(partition)
                if blocks:
                    self._effort(blocks, EFFORT)

    def _effort(self, blocks: Blocks, effort: int) -> None:
        self.space.report(self.name)
        before = blocks.placed
        blocks.run(before + effort * blocks.plan.stages * blocks.plan.microbatches)
        self.left -= blocks.placed - before

    def _drawn(self) -> Iterator[Partition]:
        """Yield placements at random, with their ranks' times as equal as moving layers makes them."""
        rng, ranks, layers = self.rng, self.space.plan.ranks, self.space.plan.stages
        while self.left > (1 - DRAWN) * self.most:
            placed = [
                *range(ranks),
                *rng.choices(range(ranks), k=rng.randint(0, min(FEW_LIMITED * ranks, layers) - ranks)),
            ]
            if self.limit is not None and len({*Counter(placed).values()}) > 1:  # as in `_blocks`
                self.left -= len(placed)
                continue
            self.left -= LEVELLED * len(placed) ** 3 * layers
            rng.shuffle(placed)
            yield of_ranks(_ranks(levelled(Placement(placed), self.space.times)))

    def _moved(self) -> Iterator[Partition]:
        """Yield layouts near the best ones: a layer on its neighbour's rank, or on any, or two that change places."""
        rng = self.rng
        for partition, _ in self.best(BEST):
            for _ in range(BEST):
                ranks = _ranks(partition)
                a, b = rng.sample(range(len(ranks)), 2)
                change = rng.randrange(3)
                if change == 0:
                    ranks[a] = ranks[max(0, a - 1) if b < a else min(len(ranks) - 1, a + 1)]
                elif change == 1:
                    ranks[a] = rng.randrange(self.space.plan.ranks)
                else:
                    ranks[a], ranks[b] = ranks[b], ranks[a]
                if len({*ranks}) == self.space.plan.ranks:
                    yield of_ranks(ranks)

    def _blocks(self, partition: Partition) -> Blocks | None:
        """Return the blocks of a layout; None if its busiest rank takes too long, or its memory does not suffice."""
        space = self.space
        if space.units * max(partition.loads(space.times)) >= self.cost:
            return None
        counts = Counter(rank for (rank,) in partition.placement.holders)
        if self.limit is not None and len({*counts.values()}) > 1:  # a microbatch in flight is then no share of a model
            return None
        grouping = Grouping(space.plan, partition.layers, space.host)
        placed = grouping.placed(partition.placement)
        costs = grouping.costs(space.costs, placed)
        room = Room.counted(placed, [self.limit or placed.microbatches] * placed.ranks)
        if self.limit_bytes is not None:
            rooms = [self.limit_bytes - each for each in least_bytes(placed, costs)]
            if min(rooms) < -ROUNDING * self.limit_bytes:
                return None
            room = Room.sized(placed, costs, rooms)
        blocks = Blocks(Filling(Work.of(placed, costs), room))
        return blocks if blocks.least < self.cost else None


def _ranks(partition: Partition) -> list[int]:
    """Return the rank of each layer."""
    stages = zip(partition.placement.holders, partition.layers, strict=True)
    return [rank for (rank,), count in stages for _ in range(count)]
