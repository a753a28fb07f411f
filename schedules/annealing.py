"""Simulated annealing of words of forwards and input gradients, whose waits weight gradients fill. No torch.

A move takes a pass to a place nearby in its rank's word: most of them a pass on the critical path, since no other move
makes the slowest rank faster. What a move costs is played, as `Filling.cost` plays it, from a state of the last play
that is before the move, and no further than to where a rank has waited too long for it (Kirkpatrick et al.,
"Optimization by simulated annealing", Science 220, 1983; van Laarhoven et al., "Job shop scheduling by simulated
annealing", Operations Research 40, 1992). Invariants:

- A play depends on the words alone, not on the state that it goes on from.
- What ends the search is a number of passes that are played, not time, so the result depends on the arguments alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, log
from random import Random
from typing import NamedTuple

from fpipe.costs import ROUNDING
from fpipe.schedules.filling import ROUNDED, Filled, Filling

FEW = 100_000  # passes in a round, unless there is time for more
MOVES = 20  # of each pass, at most, in a round
STATES = 16  # of a play, from which others go on
HOT = 0.5  # times the mean time of a pass, by which a cost may rise at first
MEAN = 0.1  # the weight of the ranks' mean span beside the largest one: it shows the way where the largest is level
CRITICAL = 0.8  # of the moves
SHARES = (0.0, 0.5)  # of the way from the bound to the least cost
AWAY = (-3, -2, -1, 1, 2, 3)  # places
Rows = list[list[int]]  # words of slots, by rank
Late = tuple[float, float]  # the time of a weight gradient, and the memory that it frees


# A forward or an input gradient, in place: time, what more its rank holds after it, its weight gradient, and hops
# to readers on other ranks (slot, rank, edge, time on it, latency). A plain tuple, since it is unpacked faster.
Step = tuple[float, float, Late | None, tuple[tuple[int, int, int, float, float], ...]]


class State(NamedTuple):
    """How far each rank has come in its word; lists by rank, but for those by edge or by slot.

    Args:
        turns: the ranks that may go on.
        so_far: when each is free, what it holds, and how many of its weight gradients have run.
        spare: for how much longer each may wait.
        late: weight gradients.
        starts: of the passes that have run.
    """

    at: list[int]
    so_far: list[tuple[float, float, int]]
    began: list[float]
    spare: list[float]
    turns: list[int]
    sent: list[float]
    missing: list[int]
    ready: list[float]
    starts: list[float]
    late: list[list[Late]]

    def copy(self) -> State:
        return State(
            self.at[:],
            self.so_far[:],
            self.began[:],
            self.spare[:],
            self.turns[:],
            self.sent[:],
            self.missing[:],
            self.ready[:],
            self.starts[:],
            [late[:] for late in self.late],
        )


class Played(NamedTuple):
    """The spans of ranks, when the inputs of passes arrived and the passes started, by slot, and states to go on from.

    Args:
        states: by how many passes are left.
    """

    spans: list[float]
    ready: list[float]
    starts: list[float]
    states: dict[int, State]


class Player:
    """Plays words up to one span, with which `Filling` fills them.

    Args:
        tied: by slot, the slots of its rank that it stays before or behind, and its own.
        sources: by slot, those on other ranks from which it receives.
    """

    def __init__(self, filling: Filling, target: float) -> None:
        events = [event for each in filling.events for event in each]
        self.filling, self.target, self.rank_of = filling, target, [event.rank for event in events]
        self.limits = [limit * ROUNDED for limit in filling.room.limits]
        self.tied, self.sources = [{event.slot} for event in events], [list[int]() for _ in events]
        for event in events:
            if event.slot % filling.plan.microbatches:
                self._tie(event.slot, event.slot - 1)
            for reader, edge, _, _ in event.hops:
                if edge < 0:
                    self._tie(event.slot, reader)
                else:
                    self.sources[reader].append(event.slot)
        self.steps: list[Step] = [
            (
                event.time,
                event.grows,
                event.late and event.late[:2],
                tuple(
                    (slot, self.rank_of[slot], edge, wire, last) for slot, edge, wire, last in event.hops if edge >= 0
                ),
            )
            for event in events
        ]
        ranks, size = filling.plan.ranks, len(events)
        self.begin = State(
            at=[0] * ranks,
            so_far=[(0.0, 0.0, 0)] * ranks,
            began=[0.0] * ranks,
            spare=[target - busy + ROUNDING * target for busy in filling.busy],
            turns=[*range(ranks)],
            sent=[0.0] * (1 + max((hop[2] for *_, hops in self.steps for hop in hops), default=0)),
            missing=[*map(len, self.sources)],
            ready=[0.0] * size,
            starts=[0.0] * size,
            late=[[] for _ in range(ranks)],
        )

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

    def play(self, rows: Rows) -> Played | None:
        """Play words from the beginning; None if ranks wait for each other or for memory."""
        return self.resume(rows, len(self.steps), self.begin, -inf, {})

    def resume(
        self, rows: Rows, left: int, state: State, least: float, states: dict[int, State] | None = None
    ) -> Played | None:
        """Play words from a state on; None if ranks wait for each other, for memory, or too long.

        Args:
            left: the passes that have not run.
            least: what is spare of a rank's waits at the end; negative where the target is exceeded.
            states: to which those of this play are added.
        """
        at, so_far, began, spare, turns, sent, missing, ready, starts, late = state = state.copy()
        steps, limits, every = self.steps, self.limits, max(1, len(self.steps) // STATES)
        mark = left if states is not None else -1
        while turns:
            if states is not None and left <= mark:
                states[left], mark = state.copy(), left - every
            rank = turns.pop()
            first, limit, queue = at[rank], limits[rank], late[rank]
            now, holds, run = so_far[rank]
            n = first
            for slot in rows[rank][first:]:
                if missing[slot]:
                    break
                time, grows, weight, hops = steps[slot]
                while holds + grows > limit:
                    if run == len(queue):
                        return None
                    took, freed = queue[run]
                    run += 1
                    now += took
                    holds -= freed
                due = ready[slot]
                if not n:
                    now = began[rank] = due
                elif now < due:
                    while run < len(queue) and now < due:
                        took, freed = queue[run]
                        if now + took > due * ROUNDED and due - now <= spare[rank]:
                            break
                        run += 1
                        now += took
                        holds -= freed
                    if now < due:
                        spare[rank] -= due - now
                        if spare[rank] < least:
                            return None
                        now = due
                n += 1
                starts[slot] = now
                now += time
                holds += grows
                if weight:
                    queue.append(weight)
                for reader, other, edge, wire, latency in hops:
                    sent[edge] = leaves = max(now, sent[edge]) + wire
                    arrival = leaves + latency
                    if arrival > ready[reader]:
                        ready[reader] = arrival
                    missing[reader] = lacks = missing[reader] - 1
                    if not lacks and not missing[rows[other][at[other]]]:
                        turns.append(other)
            left -= n - first
            at[rank], so_far[rank] = n, (now, holds, run)
        if left:
            return None
        ends = [
            now + sum([took for took, _ in weights[run:]]) for (now, _, run), weights in zip(so_far, late, strict=True)
        ]
        return Played([end - start for end, start in zip(ends, began, strict=True)], ready, starts, states or {})


def annealed(filling: Filling, filled: Filled, bound: float, rounds: int = 1, played: int = FEW) -> Filled:
    """Return the fastest filled words that annealing of their forwards and input gradients finds.

    Each round begins with the best words so far, and waits are filled up to spans from the bound to theirs in turn.

    Args:
        bound: at which no move is tried any more.
        played: passes in a round, at most; fewer for short words.
    """
    rng, best = Random(0), filled
    for n in range(rounds):
        if best.cost <= bound * ROUNDED or best.cost == inf:
            break
        player = Player(filling, bound + (best.cost - bound) * SHARES[n % len(SHARES)])
        rows = player.rows([at for at in word if at < filling.count] for word in best.words)
        if (play := player.play(rows)) is None:
            continue
        round_ = _Round(player, rows, play, rng)
        round_.run(bound, min(played, MOVES * len(player.steps) ** 2))
        if round_.least < best.cost * (1 - ROUNDING):
            words = [[slot // filling.plan.microbatches for slot in row] for row in round_.best]
            best = min(best, filling.fill(words, player.target), key=lambda each: each.cost)
    return best


class _Round:
    """One annealing.

    Args:
        rows, played, value: the words so far.
        best, least: the best words, and their cost.
    """

    def __init__(self, player: Player, rows: Rows, played: Played, rng: Random) -> None:
        self.player, self.rng, self.rows, self.played = player, rng, [*rows], played
        self.size = len(player.steps)
        self.busy = sum(player.filling.busy) / len(rows)
        self.value, self.path = _value(played.spans), self._critical()
        self.best, self.least = [*rows], max(played.spans)

    def run(self, bound: float, budget: int) -> None:
        """Move passes, at a temperature that falls with the number of passes that have been played."""
        hot = HOT * sum(time for time, *_ in self.player.steps) / self.size
        left = budget
        while left > 0 and self.least > bound * ROUNDED:
            left -= self._move(hot * left / budget)

    def _move(self, temperature: float) -> int:
        """Try a move, keep it with the probability of the Metropolis rule, and return how many passes were played."""
        rng, random = self.rng, self.rng.random
        slot = self.path[int(random() * len(self.path))] if random() < CRITICAL else int(random() * self.size)
        rank = self.player.rank_of[slot]
        row = self.rows[rank]
        a = row.index(slot)
        b = a + rng.choice(AWAY)
        passed = row[a + 1 : b + 1] if b > a else row[max(0, b) : a]
        if not 0 <= b < len(row) or not self.player.tied[slot].isdisjoint(passed):
            return 1
        most = self.value * ROUNDED - temperature * log(1 - random())
        left, state = next(
            (left, state) for left, state in reversed(self.played.states.items()) if state.at[rank] <= min(a, b)
        )
        moved = row.copy()
        moved.insert(b, moved.pop(a))
        self.rows[rank] = moved
        least = self.player.target - (most - MEAN * self.busy)
        played = self.player.resume(self.rows, left, state, least)
        if played is None or _value(played.spans) > most:
            self.rows[rank] = row
            return left
        states = {n: kept for n, kept in self.played.states.items() if n > left}
        played = self.player.resume(self.rows, left, state, -inf, states)
        assert played is not None
        self.played, self.value, self.path = played, _value(played.spans), self._critical()
        if max(played.spans) < self.least * (1 - ROUNDING):
            self.best, self.least = [*self.rows], max(played.spans)
        return 2 * left

    def _critical(self) -> list[int]:
        """Return the passes on a critical path: each starts when the one before ends, or its result arrives."""
        places = {slot: n for row in self.rows for n, slot in enumerate(row)}
        spans, ready, starts, _ = self.played
        longest = max(spans)
        row = self.rows[self.rng.choice([rank for rank, span in enumerate(spans) if span == longest])]
        path, n = list[int](), len(row) - 1
        while n >= 0:
            slot = row[n]
            path.append(slot)
            sources = self.player.sources[slot]
            if sources and starts[slot] <= ready[slot]:
                slot = max(sources, key=starts.__getitem__)
                row, n = self.rows[self.player.rank_of[slot]], places[slot]
            else:
                n -= 1
        return path


def _value(spans: Sequence[float]) -> float:
    return max(spans) + MEAN * sum(spans) / len(spans)
