"""Building blocks on the V placement, which repeat: where the search for orders begins. No torch.

A rank runs six kinds of passes, each in microbatch order, so its order is a word of kinds: the number of equal kinds
before it gives the microbatch. A building block is the passes of one microbatch, each in a slot of its rank, such that
a microbatch can follow the one before it after a period (Qi et al. 2024, "Pipeline Parallelism with Controllable
Memory", arXiv 2405.15362).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count
from typing import NamedTuple

from fpipe.effects import Effect
from fpipe.plan import Plan
from fpipe.schedules import work as passes_of
from fpipe.schedules.work import Words

# A microbatch passes down the ranks through their chunks a, up through their chunks b, and back; then weight gradients.
FA, FB, IB, IA, WB, WA = range(6)
CHUNK = (0, 1, 1, 0, 1, 0)

Word = Sequence[int]
Block = list[list[float]]  # when a rank starts each of the first four kinds


def effects(word: Word, rank: int, plan: Plan) -> Iterator[Effect]:
    """Return the effects of a word."""
    numbers = passes(rank, plan)
    return passes_of.effects((numbers[kind] for kind in word), plan)


def passes(rank: int, plan: Plan) -> list[int]:
    """Return the scheduler's numbers of a rank's passes, by kind."""
    stages = plan.stages_on(rank)
    return [kind // 2 * plan.stages + stages[chunk] for kind, chunk in enumerate(CHUNK)]


class Shape(NamedTuple):
    """The slots that a building block waits more than it has to, at each hop of its four ways and at its three turns.

    The waits at hops are relative; `block` multiplies them by its stretch.
    """

    hops: tuple[int, int, int, int]
    turns: tuple[int, int, int]


def block(ranks: int, shape: Shape, stretch: float = 1.0, period: int = 6) -> Block:
    """Return the earliest slots of a microbatch that leave room for the same block every period (modulo scheduling).

    >>> block(ranks=2, shape=Shape((0, 0, 0, 0), (0, 0, 0)))
    [[0.0, 3.0, 4.0, 7.0], [1.0, 2.0, 5.0, 6.0]]
    """
    slots: Block = [[] for _ in range(ranks)]
    time = 0.0
    for kind in (FA, FB, IB, IA):
        down = kind in (FA, IB)
        for n, rank in enumerate(range(ranks) if down else reversed(range(ranks))):
            if n:
                time += stretch * shape.hops[kind]
            elif kind:
                time += shape.turns[kind - 1]
            time = _slot(time, slots[rank], period)
            slots[rank].append(time)
            time += 1
    return slots


def _slot(time: float, taken: Iterable[float], period: int) -> float:
    """Return the earliest slot from `time` that overlaps no taken slot in any period. Three taken slots leave one."""
    for other in taken:
        after = (time - other) % period
        if not 1 <= after <= period - 1:
            return _slot(time + (1 - after) % period, taken, period)
    return time


def in_flight(slots: Block, period: int) -> int:
    """Return the most chunks between forward and input gradient on a rank, if a block is repeated without end."""
    return max(
        sum(int((now - f) // period - (now - i) // period) for f, i in ((fa, ia), (fb, ib)))
        for fa, fb, ib, ia in slots
        for now in (fa, fb)
    )


def repeat(slots: Block, period: int, microbatches: int) -> Words:
    """Return the words of a repeated block, without weight gradients."""
    passes = [
        [(t + period * m, kind) for kind, t in enumerate(starts) for m in range(microbatches)] for starts in slots
    ]
    return [[kind for _, kind in sorted(times)] for times in passes]


# About a hundred shapes were tried under limits for p = 4 to 14, at equal and unequal costs. These come nearly as close
# to the lower bound as all of them.
SHAPES = (
    Shape((0, 0, 0, 0), (0, 0, 0)),
    Shape((0, 0, 0, 0), (1, 0, 0)),
    Shape((0, 0, 0, 0), (0, 2, 0)),  # V-Min, unless p = 1 mod 3, which is the first
    Shape((1, 0, 1, 0), (0, 0, 1)),  # V-Half, p odd
    Shape((0, 1, 0, 0), (0, 2, 1)),
    Shape((0, 1, 0, 0), (1, 3, 4)),
    Shape((0, 1, 0, 0), (1, 5, 3)),
    Shape((1, 0, 0, 1), (0, 2, 0)),
    Shape((0, 1, 1, 0), (2, 2, 2)),
    Shape((0, 1, 0, 1), (2, 4, 5)),
    Shape((1, 1, 0, 1), (0, 0, 1)),
    Shape((0, 1, 1, 1), (0, 0, 0)),
    Shape((1, 1, 1, 1), (1, 1, 0)),
    Shape((0, 3, 1, 0), (2, 2, 0)),
    Shape((0, 2, 0, 1), (3, 3, 5)),
    Shape((1, 0, 2, 0), (4, 4, 2)),
    Shape((2, 1, 0, 1), (3, 0, 1)),
    Shape((3, 1, 2, 0), (1, 5, 5)),
)
STRETCHES = [quarters / 4 for quarters in range(24, -1, -1)]


def fitted(ranks: int, shape: Shape, period: int, limit: int) -> Block | None:
    """Return a shape's block, stretched as far as `limit` chunks in flight allow; None if none fits."""
    return next((slots for chunks, slots in _stretched(ranks, shape, period) if chunks <= limit), None)


@lru_cache(maxsize=1024)
def _stretched(ranks: int, shape: Shape, period: int) -> list[tuple[int, Block]]:
    """Return a shape's blocks, the longest first, with the chunks in flight, but for those that hold no fewer."""
    blocks: list[tuple[int, Block]] = []
    for stretch in STRETCHES if any(shape.hops) else (0.0,):
        slots = block(ranks, shape, stretch, period)
        chunks = in_flight(slots, period)
        if not blocks or chunks < min(each for each, _ in blocks):
            blocks.append((chunks, slots))
    return blocks


def shortest_period(ranks: int, limit: int) -> int:
    """Return the shortest period in which one of the shapes fits; from two chunks on there is one."""
    return next(period for period in count(6) if any(fitted(ranks, shape, period, limit) for shape in SHAPES))
