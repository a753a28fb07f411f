"""The search for the fastest order on the V placement under a memory limit. No torch.

Candidates are the named orders, and building blocks of several shapes and periods, which repeat. Ranks that wait run
passes before their turn (`Squeezing`), and weight gradients fill what is left (`Filling`). All are tried on as many
microbatches as show a warm-up, a steady phase and a cool-down, the best on all. Then shapes near the best ones are
tried. The best order is annealed: of few microbatches, where what it repeats is repeated for all, and as a whole. Lower
limits are searched too, unless their lower bound says that they are not faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from math import inf
from random import Random
from typing import NamedTuple

from fpipe.costs import ROUNDING, Costs
from fpipe.effects import Effect
from fpipe.plan import Plan
from fpipe.schedules import work as passes_of
from fpipe.schedules.annealing import LONG, OF_FEW, USUAL, Settings, annealed, multistart
from fpipe.schedules.bounds import lower_bound
from fpipe.schedules.filling import Filled, Filling
from fpipe.schedules.list_scheduling import follow
from fpipe.schedules.periods import periods, stretched
from fpipe.schedules.plays import Player
from fpipe.schedules.requirements import a_v
from fpipe.schedules.squeezing import KEEP, Fill, Squeezing
from fpipe.schedules.v_blocks import IA, SHAPES, Shape, effects, fitted, passes, repeat, shortest_period
from fpipe.schedules.v_orders import Order, named_orders
from fpipe.schedules.work import Room, Words, Work

FEW = 100_000  # budget of a round of annealing, where orders of many layouts are annealed
FIRST = OF_FEW._replace(rounds=2, budget=FEW // 2)
OF_SHORT = LONG._replace(budget=3 * LONG.budget)
LIMITS = 16  # that are searched, at most; all of them up to p = 8
PERIODS = 3  # from the shortest one
NEAR = 30  # blocks near the best ones
FINALISTS = 4
EXTRA = (1, 4)  # microbatches beyond 2p, of which orders are annealed
SHORT = 800  # forwards and input gradients, up to which an order as a whole is annealed for longer
SLOWER = 2  # limits with orders that annealing would not make fast enough, after which no lower one is searched
GAIN = 1.03  # times that annealing is assumed to make an order faster: a lower limit that needs more is not searched
GAIN_OF_MORE = 1.01  # times that many moves are assumed to make it faster than few
CLOSE = 1.05  # times the least cost, up to which a candidate is worth a second look


class Repeated(NamedTuple):
    """A building block, stretched as far as the limit allows, repeated every period."""

    shape: Shape
    period: int


Make = Callable[[int], Words]  # microbatches -> words of kinds, without weight gradients


class Way(NamedTuple):
    """How words come about, and their cost on few microbatches."""

    cost: float
    repeated: Repeated | None
    make: Make
    fill: Fill


def ordered(schedule: str, rank: int, plan: Plan, costs: Costs | None, order: Order, chunks: int) -> Iterator[Effect]:
    """Yield a rank's effects: in a named order if all passes take the same time, else in the best order for the costs.

    Args:
        chunks: in flight on a rank.

    Raises:
        ScheduleError: the placement is not `Placement.v(ranks)`.
    """
    a_v(schedule, plan)
    if costs is None or Work.of(plan, costs).even:
        yield from effects(order(plan.ranks, plan.microbatches)[rank], rank, plan)
    else:
        yield from passes_of.effects(order_within(plan, costs, chunks).words[rank], plan)


def best_order(plan: Plan, costs: Costs, chunks: int, effort: float) -> Filled:
    """Return the fastest order that is found with so many chunks in flight on a rank, or with fewer.

    A lower limit is left out if its orders, without moves or after few, are slower than more moves make up for; at the
    second one that is so without moves, the search ends.
    """
    best, most, slower = _annealed_within(plan, costs, chunks, effort), 2 * plan.ranks, 0
    step = -(-most // LIMITS)
    for fewer in range((chunks - 1) // step * step, 1, -step) if chunks <= most else (most,):
        if lower_bound(plan, costs, fewer / 2) >= best.cost * (1 - ROUNDING):
            break
        if _searched(plan, costs, fewer).best.cost >= best.cost * GAIN:
            slower += 1
            if slower == SLOWER:
                break
        elif order_within(plan, costs, fewer).cost < best.cost * GAIN_OF_MORE:
            best = min(best, _annealed_within(plan, costs, fewer, effort), key=lambda filled: filled.cost)
    return best


@lru_cache(maxsize=64)
def order_within(plan: Plan, costs: Costs, chunks: int) -> Filled:
    """Return the order that the search at this limit finds, with few moves."""
    return _searched(plan, costs, chunks).annealed(FIRST)


@lru_cache(maxsize=64)
def _annealed_within(plan: Plan, costs: Costs, chunks: int, effort: float) -> Filled:
    """Return the fastest order of three annealings: with few moves, with many of few microbatches, and of all."""
    search, best = _searched(plan, costs, chunks), order_within(plan, costs, chunks)
    for settings in OF_FEW.tries(effort):
        if not search.all.is_optimal(best):
            best = min(search.annealed(settings), best, key=lambda filled: filled.cost)
    if search.all.is_optimal(best):
        return best
    settings = OF_SHORT if 2 * plan.stages * plan.microbatches <= SHORT else USUAL
    more = multistart(search.all.filling, [search.best], search.all.bound, effort, settings)
    return min(best, more, key=lambda filled: filled.cost)


@lru_cache(maxsize=LIMITS)
def _searched(plan: Plan, costs: Costs, chunks: int) -> _Search:
    search = _Search(plan, costs, chunks)
    search.run()
    return search


class _Search:
    """The search at one limit.

    Args:
        shortest: the period in which a block fits.
        ways: that were tried on few microbatches.
        least, best: the least cost on few microbatches, and the best order of all.
    """

    def __init__(self, plan: Plan, costs: Costs, chunks: int) -> None:
        self.plan, self.costs, self.chunks = plan, costs, chunks
        self.few, self.all = self._instance(2 * plan.ranks + 4), self._instance(plan.microbatches)
        patience = (0.0,) if self.all.work.even else (0.0, 1.0)
        self.fills = [Fill(reorder, part) for reorder in (True, False) for part in patience]
        self.shortest = shortest_period(plan.ranks, chunks)
        self.ways = list[Way]()
        self.tried = set[tuple[str, int]]()
        self.least, self.best = inf, Filled(inf, [])

    def _instance(self, microbatches: int) -> _Instance:
        """Return the instance of the first microbatches, if all take the same time; else of all."""
        plan, costs = self.plan, self.costs
        count = plan.microbatches if len({*costs.scale}) > 1 else min(plan.microbatches, microbatches)
        costs = replace(costs, scale=costs.scale[:count], sizes=costs.sizes[:count])
        return _Instance(replace(plan, microbatches=count), costs, self.chunks)

    def run(self) -> None:
        """Try named orders and blocks, then the best few on all microbatches."""
        self._try_named()
        for each in chain(self._blocks(), self._near()):
            if self.all.is_optimal(self.best):
                return
            slots = fitted(self.plan.ranks, each.shape, each.period, self.chunks)
            if slots is not None and (key := (repr(slots), each.period)) not in self.tried:
                self.tried.add(key)
                self._try(each, partial(repeat, slots, each.period))
        unlike: dict[str, Way] = {}
        for way in self._ranked():
            unlike.setdefault(f"{way.cost:.9g}", way)
        for way in [*unlike.values()][:FINALISTS]:
            self._finish(way.make(self.plan.microbatches), way.fill)

    def _try_named(self) -> None:
        for order in named_orders(self.plan.ranks, self.chunks):
            words = self.all.passes(order(self.plan.ranks, self.plan.microbatches))
            self._improve(Filled(follow(words, self.all.work), words))
            self._try(None, partial(_without_weights, order, self.plan.ranks))

    def _ranked(self) -> list[Way]:
        return sorted(self.ways, key=lambda way: way.cost)

    def _blocks(self) -> Iterator[Repeated]:
        for period in range(self.shortest, self.shortest + PERIODS):
            yield from (Repeated(shape, period) for shape in SHAPES)

    def _near(self) -> Iterator[Repeated]:
        """Yield blocks near the best ones so far."""
        rng = Random(0)
        for _ in range(NEAR):
            best = [way.repeated for way in self._ranked() if way.repeated][: 2 * FINALISTS]
            if not best:
                return
            near = rng.choice(best)
            waits = [*near.shape.hops, *near.shape.turns]
            for _ in range(rng.choice((1, 2, 3))):
                n = rng.randrange(len(waits))
                waits[n] = max(0, waits[n] + rng.choice((-1, 1)))
            first, second, third, fourth, *turns = waits
            shape = Shape((first, second, third, fourth), (turns[0], turns[1], turns[2]))
            yield Repeated(shape, max(6, near.period + rng.choice((-1, 0, 0, 0, 1))))

    def _try(self, each: Repeated | None, make: Make) -> None:
        words = make(self.few.microbatches)
        for fill in self.fills:
            if each and each.period > self.shortest and not fill.reorder:
                continue  # long waits are for other passes
            cost, order = self.few.squeeze(words, fill, self.least * CLOSE)
            if cost == inf:
                continue
            cost = min(cost, self.few.filled(order, [self.few.least, self.least, inf])[0])
            self.ways.append(Way(cost, each, make, fill))
            if cost <= self.least * (1 + ROUNDING):
                self.least = min(cost, self.least)
                self._finish(make(self.plan.microbatches), fill)

    def _finish(self, words: Words, fill: Fill) -> None:
        """Try words for all microbatches."""
        self._improve(self.all.fastest(words, fill, self.best.cost))

    def annealed(self, settings: Settings) -> Filled:
        """Return the best order after moves of passes for few microbatches; what they repeat is repeated for all."""
        best = self.best
        for extra in EXTRA:
            few = self._instance(2 * self.plan.ranks + extra)
            more = self.plan.microbatches - few.microbatches
            if self.all.is_optimal(best):
                break
            if not more:
                before, best = best, annealed(self.all.filling, best, self.all.bound, settings)
                if best is before:  # again, it would come to the same
                    break
                continue
            way = self._ranked()[0]
            start = few.fastest(way.make(few.microbatches), way.fill, inf)
            words = few.kinds(annealed(few.filling, start, few.bound, settings).words)
            all_longer = (
                stretched(words, period, more // period.microbatches)
                for period in periods(words, few.starts(words))
                if more % period.microbatches == 0
            )
            for longer in dict.fromkeys(all_longer):
                best = min(best, self.all.fastest(longer, KEEP, best.cost), key=lambda filled: filled.cost)
        return best

    def _improve(self, filled: Filled) -> None:
        if filled.cost < self.best.cost * (1 - ROUNDING):
            self.best = filled


class _Instance:
    """Plays and fills words of one number of microbatches.

    Args:
        bound: of their cost.
        least: the time of all passes of a rank.
    """

    def __init__(self, plan: Plan, costs: Costs, chunks: int) -> None:
        work = Work.of(plan, costs)
        self.work, self.microbatches, self.chunks = work, plan.microbatches, chunks
        self.squeezing, self.filling = Squeezing(work), Filling(work, Room.counted(plan, [chunks / 2] * plan.ranks))
        self.bound, self.least = lower_bound(plan, costs, chunks / 2), max(self.filling.busy)
        self._passes = [passes(rank, plan) for rank in range(plan.ranks)]

    def is_optimal(self, filled: Filled) -> bool:
        """Return whether the cost is the bound."""
        return filled.cost <= self.bound * (1 + ROUNDING)

    def squeeze(self, words: Words, fill: Fill, most: float) -> tuple[float, Words]:
        return self.squeezing.squeeze(words, self.chunks, fill, most)

    def passes(self, words: Words, last: int = 5) -> Words:
        """Return words of kinds up to one as words of passes."""
        return [
            [numbers[kind] for kind in word if kind <= last] for numbers, word in zip(self._passes, words, strict=True)
        ]

    def filled(self, words: Words, targets: list[float]) -> tuple[float, float]:
        """Return the least cost of words whose weight gradients are filled in anew, and its target."""
        return self.filling.best(self.passes(words, last=IA), targets)

    def fastest(self, words: Words, fill: Fill, most: float) -> Filled:
        """Return the faster of words with the passes that fill their gaps, and of weight gradients filled in anew.

        Args:
            most: the cost from which on the latter are not filled in.
        """
        cost, order = self.squeeze(words, fill, inf)
        if cost == inf:
            return Filled(inf, [])
        best = Filled(cost, self.passes(order))
        enough = min(cost, most)
        least, target = self.filled(order, [self.least, enough, inf])
        if least < enough * (1 - ROUNDING):
            return self.filling.fill(self.passes(order, last=IA), target)
        return best

    def kinds(self, words: Words) -> Words:
        """Return words of passes as words of kinds, without weight gradients."""
        return [
            [numbers.index(at) for at in word if at < self.filling.count]
            for numbers, word in zip(self._passes, words, strict=True)
        ]

    def starts(self, words: Words) -> list[list[float]]:
        """Return when the passes of words start, by rank and place."""
        player = Player(self.filling, self.bound)
        rows = player.rows(self.passes(words))
        played = player.play(rows)
        return [[played.starts[slot] for slot in row] for row in rows] if played else [[] for _ in rows]


def annealed_blocks(work: Work, room: Room, chunks: int, words: Words) -> Words:
    """Return what annealing makes of the fastest of words, and of blocks with weight gradients that fit a room.

    Args:
        chunks: in flight on a rank, each until its input gradient.
        words: that fit the room, with weight gradients.
    """
    plan, filling = work.plan, Filling(work, room)
    best, least = Filled(follow(words, work), words), max(filling.busy) * (1 + ROUNDING)
    period = shortest_period(plan.ranks, chunks) if chunks > 1 else 0
    for shape in SHAPES if chunks > 1 else ():
        slots = fitted(plan.ranks, shape, period, chunks)
        if slots is None:
            continue
        kinds = repeat(slots, period, plan.microbatches)
        blocks = [[passes(rank, plan)[kind] for kind in word] for rank, word in enumerate(kinds)]
        if best.cost > least:
            cost, target = filling.best(blocks, (least, best.cost, inf))
            if cost < best.cost * (1 - ROUNDING):
                best = filling.fill(blocks, target)
    return annealed(filling, best, max(filling.busy), USUAL._replace(budget=FEW)).words


def _without_weights(order: Order, ranks: int, microbatches: int) -> Words:
    return [[kind for kind in word if kind <= IA] for word in order(ranks, microbatches)]
