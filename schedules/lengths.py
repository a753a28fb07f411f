"""Microbatches of unequal lengths: the order in which they run, and their packing into equally long ones."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import SupportsFloat

from fpipe._format import counted
from fpipe.errors.arguments import checked
from fpipe.programs.schedules import peaked


@checked()
def by_length(lengths: Iterable[float]) -> list[int]:
    """Return the numbers of microbatches in the order in which a pipeline waits least: shortest at both ends.

    Sorted by length, every second one comes in ascending order, then the others descending, so that the longest are in
    the middle: a pipeline fills and drains with short ones. Under GPipe with equal stages every order takes as long.

    Args:
        lengths: of each microbatch, such as its tokens, in any unit.

    Raises:
        ValueError: a length is negative or not finite.

    >>> by_length([5, 1, 4, 2, 3])
    [1, 4, 0, 2, 3]
    """
    return peaked(_checked(lengths))


@checked()
def pack(lengths: Iterable[float], microbatches: int) -> list[list[int]]:
    """Return the numbers of the sequences of each microbatch, so that the microbatches are about equally long.

    Longest processing time first: the longest sequence that is left goes into the microbatch that is emptiest, of
    equally empty ones into that with the fewest sequences, then the first. The longest microbatch is at most
    4/3 - 1/(3 microbatches) times as long as it must be (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969).
    Sequences keep their order within a microbatch.

    Args:
        lengths: of each sequence, in any unit.

    Raises:
        ValueError: there are fewer sequences than microbatches, or no microbatches, or a length is negative or not
            finite.

    >>> pack([9, 2, 7, 4, 5, 3], microbatches=3)
    [[0, 1], [2, 5], [3, 4]]
    """
    each = _checked(lengths)
    if microbatches < 1:
        raise ValueError(f"microbatches must be at least 1, not {microbatches}")
    if microbatches > len(each):
        raise ValueError(
            f"lengths: {counted(len(each), 'sequence')} can't fill {counted(microbatches, 'microbatch', 'es')}: each "
            "has at least one"
        )
    packs: list[list[int]] = [[] for _ in range(microbatches)]
    emptiest = [(0.0, 0, m) for m in range(microbatches)]
    for i in sorted(range(len(each)), key=lambda i: -each[i]):
        length, count, m = emptiest[0]
        packs[m].append(i)
        heapq.heapreplace(emptiest, (length + each[i], count + 1, m))
    return list(map(sorted, packs))


def _checked(lengths: Iterable[float]) -> Sequence[float]:
    each = list(lengths)
    for i, length in enumerate(each):
        if not isinstance(length, SupportsFloat):
            raise TypeError(f"length {i} is {length!r}: a length is a number of at least 0")
        if not (isfinite(length) and length >= 0):
            raise ValueError(f"length {i} is {length!r}: a length is a number of at least 0")
    return each
