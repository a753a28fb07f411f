"""Building blocks on any placement: the passes of a microbatch, placed modulo a period, which repeat. No torch.

This is software pipelining (Lam, "Software pipelining: an effective scheduling technique for VLIW machines", PLDI 1988;
Rau, "Iterative modulo scheduling", MICRO 1994), with ranks for functional units. Forwards and input gradients are
placed one after another, each at the first time from its inputs' arrival and its own delay on at which its rank is
free. `Filling` adds the weight gradients. Periods and delays are searched by random changes, from the first period
whose repetitions fit the memory.

Invariants:
- Modulo the period, no two passes of a rank overlap, so that a microbatch can begin every period.
- The words of all ranks come from one timeline, so ranks that follow them never deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from random import Random
from typing import NamedTuple

from fpipe.costs import ROUNDING
from fpipe.schedules.filling import Filled, Filling
from fpipe.schedules.work import Words, Work

PLACED = 400_000  # passes that a search places
STRETCHED = (0.97, 1, 1, 1.01, 1.02, 1.04, 1.07)  # times the period so far, or that of the busiest rank's passes
LONGER = 1.25  # times a period, until the first block fits the memory
UPHILL = 0.01  # by how much a change may be worse


class Block(NamedTuple):
    """A building block, and the words of its repetitions.

    Args:
        target: as of `Filling.cost`.
        delays: by pass in topological order, from the arrival of its inputs.
    """

    cost: float
    target: float
    period: float
    delays: Sequence[float]
    words: Words


def repeated(filling: Filling) -> Filled:
    """Return the fastest order of a building block that is found."""
    blocks = Blocks(filling)
    blocks.run(min(PLACED, 24 * sum(map(len, filling.events)) ** 2))
    return blocks.filled()


class Placed(NamedTuple):
    """A pass in topological order: its rank and time, and the places in that order from which it gets its inputs."""

    at: int
    rank: int
    time: float
    sources: tuple[tuple[int, float], ...]


class Blocks:
    """The search for the block whose repetitions cost least.

    Args:
        placed: the passes placed so far.
    """

    def __init__(self, filling: Filling) -> None:
        plan, work = filling.plan, filling.work
        self.filling, self.plan, self.rng = filling, plan, Random(0)
        self.passes, self.placed = _in_order(work, filling.count), 0
        self.least = max(filling.busy)
        self.load = self.least / sum(work.scale)
        self.now = self.best = Block(inf, inf, self.load, (0.0,) * len(self.passes), [])

    def run(self, count: int) -> None:
        """Try changes until so many passes have been placed in all, or the busiest rank never waits.

        At first, periods are tried until a block fits the memory, also beyond that count.
        """
        if not self.placed:
            self._begin()
        while self.placed < count and not self.is_done:
            rng, delays = self.rng, [*self.now.delays]
            for _ in range(rng.choice((1, 1, 2, 3))):
                n = rng.randrange(len(delays))
                more = rng.uniform(-0.3, 0.3) * self.load
                delays[n] = rng.choice((0.0, max(0.0, delays[n] + more), rng.uniform(0, 0.7) * self.load))
            period = self.now.period
            if rng.random() < 0.3:
                period = rng.choice((self.load, period)) * rng.choice(STRETCHED)
            self._try(period, delays)

    def _begin(self) -> None:
        """Try longer and longer periods, until repetitions fit the memory, or microbatches hardly overlap."""
        period, alone = self.load, sum(each.time + sum(way for _, way in each.sources) for each in self.passes)
        self._try(period, self.now.delays)
        while self.best.cost == inf and period < alone:
            period = period * LONGER or alone
            self._try(period, self.now.delays)

    @property
    def is_done(self) -> bool:
        return self.best.cost <= self.least * (1 + ROUNDING)

    def filled(self) -> Filled:
        """Return the best words with their weight gradients."""
        best = self.best
        return self.filling.fill(best.words, best.target) if best.cost < inf else Filled(inf, [])

    def _try(self, period: float, delays: Sequence[float]) -> None:
        self.placed += len(self.passes)
        words = self._words(period, delays)
        if words is None:
            return
        cost, target = self.filling.best(words, (self.least, 1.03 * self.least, inf))
        self.placed += 4 * sum(map(len, words))
        if cost <= self.now.cost * (1 + UPHILL * self.rng.random() ** 3):
            self.now = Block(cost, target, period, delays, words)
            self.best = min(self.best, self.now, key=lambda block: block.cost)

    def _words(self, period: float, delays: Sequence[float]) -> Words | None:
        """Return the words of repetitions; None if the passes of a rank do not fit the period."""
        busy: list[list[tuple[float, float]]] = [[] for _ in range(self.plan.ranks)]
        starts, ends = list[float](), list[float]()
        for (_, rank, time, sources), delay in zip(self.passes, delays, strict=True):
            begin = max([ends[source] + way for source, way in sources], default=0.0) + delay
            start = _free(begin, time, period, busy[rank])
            if start is None:
                return None
            if time:
                busy[rank].append((start % period, time))
            starts.append(start)
            ends.append(start + time)
        rows: list[list[tuple[float, int, int]]] = [[] for _ in busy]
        for n, (start, each) in enumerate(zip(starts, self.passes, strict=True)):
            rows[each.rank] += [(start + m * period, n, each.at) for m in range(self.plan.microbatches)]
        return [[at for _, _, at in sorted(row)] for row in rows]


def _free(begin: float, time: float, period: float, busy: Sequence[tuple[float, float]]) -> float | None:
    """Return the first start from a time on at which a rank is free modulo the period; None if there is none.

    Passes that overlap by no more than times round follow one another.
    """
    start, skipped, least = begin, 0, ROUNDING * period
    while skipped <= len(busy):
        for first, length in busy if time else ():
            after = (start - first) % period
            if period - after <= least:  # it starts where the other one does
                after = 0.0
            if length - after > least:  # it would start within the other pass
                start += length - after
            elif after + time - period > least:  # the other one would start within it
                start += period - after + length
            else:
                continue
            skipped += 1
            break
        else:
            return start
    return None


def _in_order(work: Work, count: int) -> list[Placed]:
    """Return the forwards and input gradients in topological order."""
    missing = [inputs for (inputs,) in work.inputs[:count]]
    ready = [at for at in range(count) if not missing[at]]
    sources: list[list[tuple[int, float]]] = [[] for _ in missing]
    order = list[Placed]()
    while ready:
        at = ready.pop()
        for hop in (hop for hop in work.hops[at][0] if hop.target < count):
            sources[hop.target].append((len(order), hop.wire + hop.latency))
            missing[hop.target] -= 1
            if not missing[hop.target]:
                ready.append(hop.target)
        order.append(Placed(at, work.places[at % work.count].rank, work.times[at], tuple(sources[at])))
    return order
