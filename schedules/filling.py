"""Words of forwards and input gradients, and the weight gradients that fill their waits. No torch.

Words without weight gradients fix in which order ranks meet, whatever the times are. So one topological order of them
serves every way to fill them, and a fill is one linear pass. Invariants:

- Weight gradients run after their input gradients, in the order of these: where the next pass lacks memory; in a wait
  that holds one whole; else only where the wait would exceed the idle time that the rank may have. So an input
  gradient, for which other ranks wait, is late only where its own rank would be.
- Memory is counted at the ends of passes, as in `fpipe.footprint`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf
from operator import itemgetter
from typing import NamedTuple

from fpipe.costs import ROUNDING
from fpipe.schedules.work import INPUT, WEIGHT, Room, Words, Work

ROUNDED = 1 + ROUNDING
BISECTIONS = 10
Target = float | Sequence[float]
"""The span up to which a rank may wait; one for all, or by rank."""


class Filled(NamedTuple):
    """Words with their weight gradients, and their cost."""

    cost: float
    words: Words


class Event(NamedTuple):
    """A forward or an input gradient, in place.

    Args:
        slot: its number among all, pass by pass.
        grows: how much more its rank holds after it.
        late: its weight gradient: time, memory that it frees, pass.
        hops: slots of its readers: slot, edge, time on the edge, latency; -1 for an edge within the rank.
    """

    rank: int
    at: int
    slot: int
    time: float
    grows: float
    late: tuple[float, float, int] | None
    hops: tuple[tuple[int, int, float, float], ...]


class Filling:
    """The ways to fill words, on the passes of a plan and within a room.

    Args:
        busy: by rank, the time of all its passes.
    """

    def __init__(self, work: Work, room: Room) -> None:
        plan = work.plan
        self.work, self.room, self.plan = work, room, plan
        self.busy = [work.total(rank) for rank in range(plan.ranks)]
        self.count = WEIGHT * work.count  # of the passes that words have
        edges = sorted({hop.edge for each in work.hops for hops in each for hop in hops if hop.edge})
        self._edges = {edge: n for n, edge in enumerate(edges)}
        self._own = [work.microbatches(at) for at in range(self.count)]
        self._first = [0, *accumulate(map(len, self._own))]
        self.events = [[self._event(at, m) for m in own] for at, own in enumerate(self._own)]
        self._rank = [event.rank for each in self.events for event in each]
        self._missing = [work.inputs[at][m % plan.cycle] for at, own in enumerate(self._own) for m in own]

    def _slot(self, at: int, m: int) -> int:
        return self._first[at] + self._own[at].index(m)

    def _event(self, at: int, m: int) -> Event:
        work, room, (kind, place) = self.work, self.room, divmod(at, self.work.count)
        rank, weight = work.places[place].rank, WEIGHT * work.count + place
        residuals, deferred = (size[place] * room.sizes[m] for size in (room.residuals, room.deferred))
        late, grows = None, residuals
        if kind == INPUT:
            grows, late = deferred - residuals, (work.times[weight] * work.scale[m], deferred, weight)
        hops = tuple(
            (
                self._slot(hop.target, m),
                -1 if hop.edge is None else self._edges[hop.edge],
                hop.wire * work.sizes[m],
                hop.latency,
            )
            for hop in work.hops[at][m % self.plan.cycle]
            if hop.target < self.count
        )
        return Event(rank, at, self._slot(at, m), work.times[at] * work.scale[m], grows, late, hops)

    def sequence(self, words: Words) -> list[Event] | None:
        """Return the events of words in a topological order; None if ranks wait for each other, or for a value."""
        missing, rows = self._missing.copy(), []
        for word in words:
            left = {at: iter(self.events[at]) for at in set(word)}
            rows.append([next(left[at]) for at in word])
        at, order, turns = [0] * len(rows), list[Event](), [*range(len(rows))]
        rank_of = self._rank
        while turns:
            rank = turns.pop()
            row, first = rows[rank], at[rank]
            n = first
            for n in range(first, len(row)):
                event = row[n]
                if missing[event.slot]:
                    break
                for target, _, _, _ in event.hops:
                    missing[target] -= 1
                    if not missing[target] and (reader := rank_of[target]) != rank:
                        turns.append(reader)
            else:
                n = len(row)
            order += row[first:n]
            at[rank] = n
        return order if len(order) == sum(map(len, rows)) else None

    def cost(
        self,
        sequence: Sequence[Event],
        target: Target,
        limits: Sequence[float] | None = None,
        words: list[list[int]] | None = None,
    ) -> float:
        """Return the cost (the largest span of a rank) of filled words; infinite if memory does not suffice.

        Args:
            limits: of memory, by rank; by default those of the room.
            words: by rank, empty lists for the filled words.
        """
        ranks = range(self.plan.ranks)
        spans = target if isinstance(target, Sequence) else [target] * len(ranks)
        spare = [span - busy + ROUNDING * span for span, busy in zip(spans, self.busy, strict=True)]
        most = [limit * (1 + ROUNDING) for limit in limits or self.room.limits]
        free, held = [0.0] * len(ranks), [0.0] * len(ranks)
        began = [-1.0] * len(ranks)
        late: list[deque[tuple[float, float, int]]] = [deque() for _ in ranks]
        sent, ready = [0.0] * len(self._edges), [0.0] * len(self._missing)
        for rank, at, slot, time, grows, weight, hops in sequence:
            now, queue = free[rank], late[rank]
            while held[rank] + grows > most[rank]:
                if not queue:
                    return inf
                took, freed, pass_ = queue.popleft()
                now += took
                held[rank] -= freed
                if words:
                    words[rank].append(pass_)
            due = ready[slot]
            if began[rank] < 0:
                now = began[rank] = due
            elif now < due:
                while queue and now < due:
                    took, freed, pass_ = queue[0]
                    if now + took > due * ROUNDED and due - now <= spare[rank]:
                        break
                    queue.popleft()
                    now += took
                    held[rank] -= freed
                    if words:
                        words[rank].append(pass_)
                if now < due:
                    spare[rank] -= due - now
                    now = due
            now += time
            free[rank] = now
            held[rank] += grows
            if weight:
                queue.append(weight)
            if words:
                words[rank].append(at)
            for reader, edge, wire, latency in hops:
                if edge < 0:
                    continue
                leaves = sent[edge]
                if leaves < now:
                    leaves = now
                sent[edge] = leaves = leaves + wire
                arrival = leaves + latency
                if arrival > ready[reader]:
                    ready[reader] = arrival
        if words:
            for rank in ranks:
                words[rank] += [at for _, _, at in late[rank]]
        return max(free[rank] + sum(took for took, _, _ in late[rank]) - began[rank] for rank in ranks)

    def best(self, words: Words, targets: Iterable[float]) -> tuple[float, float]:
        """Return the least cost of filled words and its target; infinite if ranks wait for each other or memory."""
        if (sequence := self.sequence(words)) is None:
            return inf, inf
        return min(((self.cost(sequence, target), target) for target in targets), key=itemgetter(0))

    def fill(self, words: Words, target: Target) -> Filled:
        """Return words with weight gradients, in as little of the room as makes them no slower.

        The cost is infinite, and there are no words, if ranks wait for each other or for memory.
        """
        sequence = self.sequence(words)
        if sequence is None or (cost := self.cost(sequence, target)) == inf:
            return Filled(inf, [])
        low, high = 0.0, 1.0  # of the room
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            limits = [limit * middle for limit in self.room.limits]
            low, high = (low, middle) if self.cost(sequence, target, limits) <= cost * ROUNDED else (middle, high)
        filled: list[list[int]] = [[] for _ in words]
        cost = self.cost(sequence, target, [limit * high for limit in self.room.limits], filled)
        return Filled(cost, filled)
