"""Words for few microbatches, as words for more: what all ranks repeat is repeated more often. No torch."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fpipe.costs import ROUNDING
from fpipe.schedules.work import Words

LONGEST = 2  # microbatches in a period


class Period(NamedTuple):
    """A part of each rank's word that has as many microbatches of every pass.

    Args:
        spans: by rank, where it begins and ends.
    """

    microbatches: int
    spans: list[tuple[int, ...]]


def periods(words: Words, starts: Sequence[Sequence[float]]) -> Iterator[Period]:
    """Yield the parts of words that run in one span of time, and have as many microbatches of each pass on all ranks.

    Args:
        words: of passes.
        starts: when the passes start, by rank and place in its word.
    """
    passes = [set(word) for word in words]
    for count in range(1, LONGEST + 1):
        for begin, end in zip(starts[0], starts[0][count * len(passes[0]) :], strict=False):
            spans = [tuple(bisect_left(each, time * (1 - ROUNDING)) for time in (begin, end)) for each in starts]
            runs = [Counter(word[a:b]) for word, (a, b) in zip(words, spans, strict=True)]
            if all(run == dict.fromkeys(own, count) for run, own in zip(runs, passes, strict=True)):
                yield Period(count, spans)


def stretched(words: Words, period: Period, times: int) -> tuple[tuple[int, ...], ...]:
    """Return words in which a period comes so many times more."""
    spans = zip(words, period.spans, strict=True)
    return tuple((*word[:b], *(list(word[a:b]) * times), *word[b:]) for word, (a, b) in spans)
