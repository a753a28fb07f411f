"""The named orders on the V placement, as words: ZB-V by formula, V-Half and V-Min from building blocks. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

from fpipe.costs import Costs
from fpipe.plan import Placement, Plan
from fpipe.schedules.squeezing import Fill, Squeezing
from fpipe.schedules.v_blocks import FA, FB, IA, IB, WA, WB, Shape, Word, block, repeat
from fpipe.schedules.work import Words, Work

Order = Callable[[int, int], Words]  # ranks, microbatches -> words


def _zb_v_order(rank: int, ranks: int, microbatches: int) -> Word:
    """Return the paper's order for 2p - 1 microbatches or more; for fewer, leave the missing ones out."""
    count, below = max(microbatches, 2 * ranks - 1), ranks - rank
    warmup = [FA] * (2 * below - 1) + [FB, FA] * rank + [FB, IB, WB] * below
    steady = [FA, IA, WA, FB, IB, WB] * (count - ranks - below + 1) + [IA, WA, FB, IB, WB] * (below - 1)
    cooldown = [IA, IB] * rank + [IA, WA] * below + [WB] * rank + [WA] * rank
    word, done = [], [0] * 6
    for kind in warmup + steady + cooldown:
        if done[kind] < microbatches:
            word.append(kind)
        done[kind] += 1
    return word


@lru_cache(maxsize=8)
def zb_v_orders(ranks: int, microbatches: int) -> Words:
    """ZB-V: the orders of all ranks."""
    return [_zb_v_order(rank, ranks, microbatches) for rank in range(ranks)]


def half(ranks: int) -> int:
    """Return V-Half's peak in chunks."""
    return (ranks + 2) // 2 * 2


def third(ranks: int) -> int:
    """Return V-Min's peak in chunks."""
    return (ranks + 4) // 3 * 2


def half_orders(ranks: int, microbatches: int) -> Words:
    """V-Half: two slots for each rank on the way down, one on the way up."""
    return _orders(ranks, microbatches, Shape((1, 0, 1, 0), (0, 0 if ranks % 2 else 3, 1)), half(ranks))


def min_orders(ranks: int, microbatches: int) -> Words:
    """V-Min: a microbatch waits only at the turn, and only if 3 divides p, where it would collide with others.

    If p = 2 mod 3, the peak has room for the same wait. The paper has no wait there, and costs up to 4 units more.
    """
    return _orders(ranks, microbatches, Shape((0, 0, 0, 0), (0, 0 if ranks % 3 == 1 else 2, 0)), third(ranks))


@lru_cache(maxsize=8)
def _orders(ranks: int, microbatches: int, shape: Shape, limit: int) -> Words:
    """Repeat a block and squeeze it at unit costs, with reordering if that helps."""
    work = Work.of(Plan(Placement.v(ranks), microbatches), Costs())
    words = repeat(block(ranks, shape), 6, microbatches)
    squeezing = Squeezing(work)
    results = [squeezing.squeeze(words, limit, Fill(reorder)) for reorder in (False, True)]
    return min(results, key=lambda result: result[0])[1]


def named_orders(ranks: int, limit: int) -> Iterator[Order]:
    """Yield the named orders whose peak is within a limit in chunks."""
    for peak, order in ((2 * ranks, zb_v_orders), (half(ranks), half_orders), (third(ranks), min_orders)):
        if peak <= limit:
            yield order
