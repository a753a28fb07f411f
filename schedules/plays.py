"""Plays of words of forwards and input gradients, which may go on from the play before. No torch.

A player fills waits with weight gradients, as `Filling.cost` does. After a move of one pass, it plays on from a state
of the play before, up to where the orders differ. It ends the play early where a rank has waited too long or a pass
starts too late.
Invariants:

- A play depends on the words alone, not on the state that it goes on from.
- A play to the end costs what `Filling.cost` says for the same target.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

from fpipe.costs import ROUNDING
from fpipe.schedules.filling import ROUNDED, Filling
from fpipe.schedules.work import Words

STATES = 16  # of a play, from which others go on
Rows = list[list[int]]  # words of slots, by rank
Late = tuple[float, float]  # the time of a weight gradient, and the memory that it frees

# A forward or an input gradient, in place: rank, time, what more its rank holds after it, its weight gradient, and hops
# to readers on other ranks (slot, edge, time on it, latency). A plain tuple, since it is unpacked faster.
Step = tuple[int, float, float, Late | None, tuple[tuple[int, int, float, float], ...]]


class State(NamedTuple):
    """The state of a play; lists by rank, but for those by edge or by slot.

    Args:
        free, holds, run: when each is free, what it holds, and how many of its weight gradients have run.
        spare: for how much longer each may wait.
        late: weight gradients.
        starts: of the passes that have run.
    """

    free: list[float]
    holds: list[float]
    run: list[int]
    spare: list[float]
    sent: list[float]
    ready: list[float]
    starts: list[float]
    late: list[list[Late]]

    def copy(self) -> State:
        free, holds, run, spare, sent, ready, starts, late = self
        return State(
            free[:], holds[:], run[:], spare[:], sent[:], ready[:], starts[:], [weights[:] for weights in late]
        )


class Limits(NamedTuple):
    """The limits of waits and starts. A player ends a play that exceeds one of them.

    Args:
        least_spare: of each rank's waits; negative where a rank may wait longer than the target allows.
        latest: by slot, the deadline of its start.
        tolerance: how much later than that a slot may start.
    """

    least_spare: float
    latest: Sequence[float]
    tolerance: float = 0.0


class Played(NamedTuple):
    """A play to the end.

    Args:
        spans: of ranks.
        heads: by rank, the slot of its first pass.
        ready, starts: by slot, when its inputs arrived and it started.
        order: of all slots, a topological one, nearly that of their starts.
        turns: by slot, its place in the order.
        states: by how many passes of the order have run. Those from which another play started are kept.
    """

    spans: list[float]
    heads: Sequence[int]
    ready: list[float]
    starts: list[float]
    order: list[int]
    turns: list[int]
    states: dict[int, State]


class Player:
    """Plays words up to one span, with which `Filling` fills them.

    Args:
        memory: by rank, its limit.
        tied: by slot, the slots of its rank that it stays before or behind, and its own.
        sources, readers: by slot, those on other ranks from which it receives, and to which it sends.
        steps: by slot.
        begin: the state before all passes.
        unlimited: limits that end no play.
    """

    def __init__(self, filling: Filling, target: float) -> None:
        events = [event for each in filling.events for event in each]
        self.filling, self.target, self.rank_of = filling, target, [event.rank for event in events]
        self.pass_of = [event.at for event in events]
        self.memory = [limit * ROUNDED for limit in filling.room.limits]
        self.tied = [{event.slot} for event in events]
        self.sources, self.readers = ([list[int]() for _ in events] for _ in range(2))
        for before, event in pairwise(events):
            if before.at == event.at:
                self._tie(before.slot, event.slot)
        for event in events:
            for reader, edge, _, _ in event.hops:
                if edge < 0:
                    self._tie(event.slot, reader)
                else:
                    self.sources[reader].append(event.slot)
                    self.readers[event.slot].append(reader)
        self.steps: list[Step] = [
            (
                event.rank,
                event.time,
                event.grows,
                event.late and event.late[:2],
                tuple(hop for hop in event.hops if hop[1] >= 0),
            )
            for event in events
        ]
        ranks, size = filling.plan.ranks, len(events)
        self.begin = State(
            free=[0.0] * ranks,
            holds=[0.0] * ranks,
            run=[0] * ranks,
            spare=[target - busy + ROUNDING * target for busy in filling.busy],
            sent=[0.0] * (1 + max((edge for *_, hops in self.steps for _, edge, _, _ in hops), default=0)),
            ready=[0.0] * size,
            starts=[0.0] * size,
            late=[[] for _ in range(ranks)],
        )
        self.unlimited = Limits(-inf, [inf] * size)

    def _tie(self, a: int, b: int) -> None:
        self.tied[a].add(b)
        self.tied[b].add(a)

    def rows(self, words: Iterable[Iterable[int]]) -> Rows:
        """Return words of passes as words of slots."""
        events, rows = self.filling.events, Rows()
        for word in words:
            left = [iter(each) for each in events]
            rows.append([next(left[at]).slot for at in word])
        return rows

    def words(self, rows: Rows) -> Words:
        """Return words of slots as words of passes."""
        return [[self.pass_of[slot] for slot in row] for row in rows]

    def play(self, rows: Rows) -> Played | None:
        """Play words from the beginning; None if ranks wait for each other or for memory."""
        sequence, heads = self.filling.sequence(self.words(rows)), [row[0] for row in rows]
        if sequence is None:
            return None
        order = [event.slot for event in sequence]
        state = self.run(order, self.begin, heads, self.unlimited)
        return state and self.finished(order, state, heads, 0, {0: self.begin})

    def finished(
        self, order: list[int], state: State, heads: Sequence[int], done: int, states: dict[int, State]
    ) -> Played:
        """Return the play that has ended in a state.

        Args:
            order: in which slots ran. So many as are `done` stay as they are; the others are sorted by their starts.
            states: of the play before. Those after more than `done` passes are dropped.
        """
        order = order[:done] + sorted(order[done:], key=state.starts.__getitem__)
        turns = [0] * len(order)
        for turn, slot in enumerate(order):
            turns[slot] = turn
        before = {n: each for n, each in states.items() if n <= done}
        return Played(self.spans(state, heads), heads, state.ready, state.starts, order, turns, before)

    def spans(self, state: State, heads: Sequence[int]) -> list[float]:
        """Return the spans of ranks, with the weight gradients that are left."""
        return [
            free + sum([took for took, _ in weights[run:]]) - state.starts[head]
            for free, run, weights, head in zip(state.free, state.run, state.late, heads, strict=True)
        ]

    def state(self, played: Played, most: int) -> tuple[int, State]:
        """Return how many passes have run, at most so many, and the state then; it stays among those of the play."""
        order, states, step = played.order, played.states, max(1, len(played.order) // STATES)
        done = max(n for n in states if n <= most)
        while done + step <= most:
            state = self.run(order[done : done + step], states[done], played.heads, self.unlimited)
            assert state is not None
            done += step
            states[done] = state
        return done, states[done]

    def run(self, slots: Iterable[int], state: State, heads: Sequence[int], limits: Limits) -> State | None:
        """Run slots, and return the state behind them; None if ranks wait for memory, or where the play ends early.

        Args:
            heads: by rank, the slot of its first pass.
        """
        free, holds, run, spare, sent, ready, starts, late = state = state.copy()
        steps, memory, (least, latest, tolerance) = self.steps, self.memory, limits
        for slot in slots:
            rank, time, grows, weight, hops = steps[slot]
            now, held, due = free[rank], holds[rank] + grows, ready[slot]
            if held > memory[rank]:
                queue, n = late[rank], run[rank]
                while held > memory[rank]:
                    if n == len(queue):
                        return None
                    took, freed = queue[n]
                    n += 1
                    now += took
                    held -= freed
                run[rank] = n
            if now < due:
                if heads[rank] == slot:
                    now = due
                else:
                    queue, n = late[rank], run[rank]
                    while n < len(queue) and now < due:
                        took, freed = queue[n]
                        if now + took > due * ROUNDED and due - now <= spare[rank]:
                            break
                        n += 1
                        now += took
                        held -= freed
                    run[rank] = n
                    if now < due:
                        spare[rank] -= due - now
                        if spare[rank] < least:
                            return None
                        now = due
            if now > latest[slot] + tolerance:
                return None
            starts[slot] = now
            free[rank] = now = now + time
            holds[rank] = held
            if weight:
                late[rank].append(weight)
            for reader, edge, wire, latency in hops:
                leaves = sent[edge]
                if leaves < now:
                    leaves = now
                sent[edge] = leaves = leaves + wire
                arrival = leaves + latency
                if arrival > ready[reader]:
                    ready[reader] = arrival
        return state

    def latest(self, played: Played) -> list[float]:
        """Return by slot an estimate of the latest start with which no span exceeds the longest one.

        It assumes that the first pass of a rank starts when it did, that transfers do not queue, and that weight
        gradients stay where they are. Those in waits may run later at no cost.
        """
        spans, starts, ready = played.spans, played.starts, played.ready
        longest, latest, following = max(spans), [0.0] * len(starts), [-1] * len(spans)
        for slot in reversed(played.order):
            rank, time, _, _, hops = self.steps[slot]
            end, after = starts[slot] + time, following[rank]
            if after < 0:
                due = end + longest - spans[rank]
            else:
                due, start = latest[after], starts[after]
                if start > ready[after] * ROUNDED:
                    due -= start - end
            for reader, _, wire, latency in hops:
                leaves = latest[reader] - latency - wire
                if leaves < due:
                    due = leaves
            latest[slot] = due - time
            following[rank] = slot
        return latest

    def reordered(
        self, played: Played, slot: int, passed: Sequence[int], is_later: bool
    ) -> tuple[int, list[int]] | None:
        """Return the part of the order that a move changes: where it begins, and its slots; None if ranks wait then.

        What depends on the moved pass stays behind it, or what it depends on before it; all else stays in its order
        (Pearce and Kelly, "A dynamic topological sort algorithm for directed acyclic graphs", JEA 11, 2006).

        Args:
            passed: the slots of its rank that the pass moves behind, if it `is_later`, or before.
        """
        first, last = played.turns[slot], played.turns[passed[-1 if is_later else 0]]
        span, neighbours = played.order[first : last + 1], self.sources
        if not is_later:
            span, neighbours, first = played.order[last : first + 1], self.readers, last
            span.reverse()
        rank_of, kept, moved, ranks, own = self.rank_of, list[int](), [slot], set[int](), self.rank_of[slot]
        for each in span[1:]:
            rank = rank_of[each]
            if rank not in ranks and all(other not in moved for other in neighbours[each]):
                kept.append(each)
            elif rank == own:
                return None
            else:
                moved.append(each)
                ranks.add(rank)
        between = kept + moved
        return first, between if is_later else between[::-1]
