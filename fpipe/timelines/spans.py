"""Spans of effects, predicted or measured, and the gaps between them, with the causes of idle time. No torch."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

from fpipe.effects import Effect
from fpipe.tables import TABLE, Table

CAUSES = {  # cause of idle time -> when a rank is idle by it
    "warm-up": "before the rank's first effect",
    "dependency": "what it needed was not computed yet",
    "transfer": "what it needed was under way",
    "imbalance": "what it needed was not computed yet, because the busiest rank has more to compute",
    "drain": "after the rank's last effect",
    "gather": "its parameters were under way from the other replicas",
    "scatter": "its gradients were being added over the replicas, after its last effect",
    "host": "it waited for nothing: the host was between two effects",
    "offload": "its residuals were under way to or from the host's memory",
}
"""Every moment in which a rank computes nothing has one cause, so that each rank's causes add up to its idle time.

No order of the same effects can save the time that the busiest rank computes more than another. So much of the other's
waits for values that are not computed yet is `imbalance`, at most all; the rest is `dependency`, which another schedule
may save. A rank has one ratio of the two: each of its waits is split in it, and the imbalance comes last.
"""
CAUSE_OF_LANE = {"gather": "gather", "scatter": "scatter", "offload": "offload", "fetch": "offload"}


class Span(NamedTuple):
    """One effect on one rank: a compute, a send until it is delivered, a receive from its post to its arrival, or a
    gather or a scatter.

    `waited_for` is the index of the span whose end allowed this one to start, or None. A receive waits for the end of
    its send; a send that queues behind the bytes of another send waits for that send.
    """

    rank: int
    track: str
    effect: Effect
    start: float
    end: float
    waited_for: int | None


class Gap(NamedTuple):
    """An interval in which a rank computes nothing, and its cause."""

    start: float
    end: float
    cause: str


@dataclass(frozen=True)
class Spans(Sequence[Span]):
    """The spans as columns, grouped by rank, and in each group in the order of the program.

    Args:
        first: the index of each rank's first span, and at the end the number of all spans.
        effects, starts, ends, waited: the columns; `waited` is -1 for a span that waited for none.
        table: the table of the effects.
    """

    first: Sequence[int]
    effects: Sequence[Effect]
    starts: array[float]
    ends: array[float]
    waited: array[int]
    table: Table = field(default=TABLE, compare=False, repr=False)

    def of(self, rank: int) -> range:
        """Return the indices of a rank's spans."""
        return range(self.first[rank], self.first[rank + 1])

    def __len__(self) -> int:
        return len(self.effects)

    @overload
    def __getitem__(self, at: int) -> Span: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Span]: ...
    def __getitem__(self, at: int | slice) -> Span | Sequence[Span]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        effect, waited = self.effects[at], self.waited[at]
        rank, track = bisect_right(self.first, at) - 1, self.table.effects[type(effect)].track
        return Span(rank, track, effect, self.starts[at], self.ends[at], waited if waited >= 0 else None)
