"""Cuts of a model's layers into stages of neighbours, on ranks. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise
from math import comb, inf
from typing import NamedTuple

from fpipe.costs import ROUNDING
from fpipe.plan import Placement

FEW = 512  # cuts that are all tried


class Partition(NamedTuple):
    """Stages on ranks, each of some number of neighbouring layers."""

    placement: Placement
    layers: tuple[int, ...]

    def loads(self, times: Sequence[float]) -> list[float]:
        """Return the time of each rank for a microbatch; copies of a stage share its microbatches.

        Args:
            times: of the layers.
        """
        loads, sums = [0.0] * self.placement.ranks, [0.0, *accumulate(times)]
        ends = [0, *accumulate(self.layers)]
        for (begin, end), ranks in zip(pairwise(ends), self.placement.holders, strict=True):
            for rank in ranks:
                loads[rank] += (sums[end] - sums[begin]) / len(ranks)
        return loads

    def moves(self) -> Iterator[Partition]:
        """Yield the cuts in which a stage has one layer less, and another one more: those between them move along."""
        for source, count in enumerate(self.layers):
            for target in range(len(self.layers)) if count > 1 else ():
                if source != target:
                    layers = [*self.layers]
                    layers[source], layers[target] = count - 1, layers[target] + 1
                    yield Partition(self.placement, tuple(layers))

    def every(self) -> Iterator[Partition]:
        """Yield all cuts of the same layers into as many stages."""
        count = sum(self.layers)
        for cuts in combinations(range(1, count), len(self.layers) - 1):
            yield Partition(self.placement, tuple(end - begin for begin, end in pairwise([0, *cuts, count])))

    def near(self, times: Sequence[float]) -> list[Partition]:
        """Return other cuts, those first whose busiest rank has least to do: all where they are few, else the moves."""
        cuts = self.every() if comb(sum(self.layers) - 1, len(self.layers) - 1) <= FEW else self.moves()
        return sorted((each for each in cuts if each != self), key=lambda each: _unevenness(each.loads(times)))


def even(placement: Placement, count: int) -> Partition:
    """Return stages of equal numbers of layers, the first ones of one more where they do not divide.

    >>> even(Placement.loop(3), 8).layers
    (3, 3, 2)
    """
    each, more = divmod(count, placement.stages)
    return Partition(placement, tuple(each + (stage < more) for stage in range(placement.stages)))


def balanced(placement: Placement, times: Sequence[float]) -> Partition:
    """Return stages of which the longest is as short as it can be, where copies share its time.

    >>> balanced(Placement.loop(3), [1, 1, 1, 1, 1, 3]).layers, balanced(Placement([(0, 1), 2]), [3, 1, 1, 1]).layers
    ((3, 2, 1), (2, 2))
    """
    of = blocks(times, [*map(len, placement.holders)])
    return Partition(placement, tuple(of.count(stage) for stage in range(placement.stages)))


def levelled(placement: Placement, times: Sequence[float]) -> Partition:
    """Return stages whose ranks have about equal times: from balanced stages, layers move while that helps.

    >>> levelled(Placement.loop(3), [1, 1, 1, 1, 1, 3]).layers, levelled(Placement.v(2), [1, 1, 1, 1, 1, 3]).layers
    ((3, 2, 1), (1, 3, 1, 1))
    """
    best = balanced(placement, times)
    while True:
        unevenness = _unevenness(best.loads(times))
        better = min(best.moves(), key=lambda each: _unevenness(each.loads(times)), default=best)
        if not _unevenness(better.loads(times)) < unevenness:
            return best
        best = better


def _unevenness(loads: Sequence[float]) -> tuple[float, float]:
    """Return what is least where ranks have equal loads: the largest, then the sum of squares."""
    return float(f"{max(loads):.12g}"), sum(load * load for load in loads)


def blocks(times: Sequence[float], shares: Sequence[int]) -> list[int]:
    """Return the block of each layer, in blocks of neighbours.

    The longest block, whose time its copies share, is as short as it can be, and the first ones have as many layers as
    that allows.

    Args:
        shares: the number of copies of each block.

    >>> blocks([1, 1, 1, 1], [1, 1, 1]), blocks([3, 1, 1, 1], [1, 1]), blocks([3, 1, 1, 1], [1, 2])
    ([0, 0, 1, 2], [0, 1, 1, 1], [0, 1, 1, 1])
    """
    count, sums, last = len(times), [0.0, *accumulate(times)], len(shares) - 1
    least = [each / shares[0] for each in sums]  # for the first layers in the first blocks
    for block in range(1, last + 1):
        least = [
            min((max(least[n], (sums[end] - sums[n]) / shares[block]) for n in range(block, end)), default=inf)
            for end in range(count + 1)
        ]
    if least[count] == inf:  # fewer layers than blocks
        return [0] * count
    limit = least[count] * (1 + ROUNDING)

    def ends(first: int, block: int, rest: Sequence[int]) -> list[int]:
        """Return where a block that starts at a layer may end, so that the later blocks have the rest."""
        return [end for end in rest if end > first and (sums[end] - sums[first]) / shares[block] <= limit]

    rests = [[count]]  # from the last block on: the layers with which it may start
    for block in range(last, 0, -1):
        rests.insert(0, [n for n in range(count) if ends(n, block, rests[0])])
    block_of = list[int]()
    for block, rest in enumerate(rests):
        block_of += [block] * (max(ends(len(block_of), block, rest)) - len(block_of))
    return block_of
