"""Simulated annealing of words of forwards and input gradients, whose waits weight gradients fill. No torch.

A move takes a pass to a place nearby in its rank's word. Most of them take a pass on the critical path, since no other
move makes the slowest rank faster. Of the passes that follow one another there on a rank, a block, the first and the
last are moved into it, since what moves inside changes nothing (Nowicki and Smutnicki, "A fast taboo search algorithm
for the job shop problem", Management Science 42, 1996). What a move costs is played, as `Filling.cost` plays it, from a
state of the last play that is before the move, and no further than to where a rank has waited too long for it
(Kirkpatrick et al., "Optimization by simulated annealing", Science 220, 1983; van Laarhoven et al., "Job shop
scheduling by simulated annealing", Operations Research 40, 1992). Invariants:

- A play depends on the words alone, not on the state that it goes on from.
- What ends the search is a number of passes that are played, not time, so the result depends on the arguments alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from math import inf, log
from random import Random
from typing import NamedTuple

from fpipe.costs import ROUNDING
from fpipe.errors import ScheduleError
from fpipe.schedules.filling import ROUNDED, Filled, Filling
from fpipe.schedules.work import Words

ROUNDS, PLAYED = 3, 500_000  # rounds, and passes in each, as of `Settings`
MOVES = 20  # of each pass, at most, in a round
REFUSED = 8  # passes, which take as long as a move that is not played
STATES = 16  # of a play, from which others go on
HOT, ENDS, MEAN = 0.25, 0.6, 0.4  # as of `Settings`
CRITICAL = 0.8  # of the moves that are not of ends
SHARES = (0.0, 0.5)  # of the way from the bound to the least cost
AWAY = (1, 2, 3)  # places
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


class Played(NamedTuple):
    """The spans of ranks, when the inputs of passes arrived and the passes started, by slot, and states to go on from.

    Args:
        order: of all slots, a topological one, nearly that of their starts.
        states: by how many passes of the order have run; more of them where plays go on.
    """

    spans: list[float]
    ready: list[float]
    starts: list[float]
    order: list[int]
    states: dict[int, State]


class Player:
    """Plays words up to one span, with which `Filling` fills them.

    Args:
        tied: by slot, the slots of its rank that it stays before or behind, and its own.
        sources, readers: by slot, those on other ranks from which it receives, and to which it sends.
    """

    def __init__(self, filling: Filling, target: float) -> None:
        events = [event for each in filling.events for event in each]
        self.filling, self.target, self.rank_of = filling, target, [event.rank for event in events]
        self.pass_of = [event.at for event in events]
        self.limits = [limit * ROUNDED for limit in filling.room.limits]
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
        sequence = self.filling.sequence(self.words(rows))
        played = sequence and self.resume(rows, [event.slot for event in sequence], 0, self.begin)
        return in_order(played, 0, {0: self.begin}) if played else None

    def state(self, rows: Rows, played: Played, most: int) -> tuple[int, State]:
        """Return how many passes have run, at most so many, and the state then; it stays among those of the play."""
        order, states, step = played.order, played.states, max(1, len(played.order) // STATES)
        done = max(n for n in states if n <= most)
        while done + step <= most:
            state = self._run(rows, order[done : done + step], states[done])
            assert state is not None
            done += step
            states[done] = state
        return done, states[done]

    def resume(self, rows: Rows, order: list[int], done: int, state: State, least: float = -inf) -> Played | None:
        """Play words from a state on; None if ranks wait for memory, or too long.

        Args:
            order: a topological one of all slots.
            done: the passes that have run.
            least: what is spare of a rank's waits at the end; negative where the target is exceeded.
        """
        last = self._run(rows, order[done:], state, least)
        if last is None:
            return None
        spans = [
            free + sum([took for took, _ in weights[run:]]) - last.starts[row[0]]
            for free, run, weights, row in zip(last.free, last.run, last.late, rows, strict=True)
        ]
        return Played(spans, last.ready, last.starts, order, {})

    def _run(self, rows: Rows, slots: list[int], state: State, least: float = -inf) -> State | None:
        """Run slots, and return the state behind them; None if ranks wait for memory, or too long."""
        free, holds, run, spare, sent, ready, starts, late = state = state.copy()
        steps, limits, heads = self.steps, self.limits, {row[0] for row in rows}
        for slot in slots:
            rank, time, grows, weight, hops = steps[slot]
            now, held, due = free[rank], holds[rank] + grows, ready[slot]
            if held > limits[rank]:
                queue, n = late[rank], run[rank]
                while held > limits[rank]:
                    if n == len(queue):
                        return None
                    took, freed = queue[n]
                    n += 1
                    now += took
                    held -= freed
                run[rank] = n
            if now < due:
                if slot in heads:
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

    def reordered(
        self, order: list[int], slot: int, passed: Sequence[int], is_later: bool
    ) -> tuple[list[int], int] | None:
        """Return a topological order after a move, and up to where it is the same; None if ranks wait for each other.

        What depends on the moved pass stays behind it, or what it depends on before it; all else stays in its order
        (Pearce and Kelly, "A dynamic topological sort algorithm for directed acyclic graphs", JEA 11, 2006).

        Args:
            order: before the move.
            passed: the slots of its rank that the pass moves behind, if it `is_later`, or before.
        """
        first, last = sorted((order.index(slot), order.index(passed[-1 if is_later else 0])))
        span, neighbours = order[first : last + 1], self.sources if is_later else self.readers
        if not is_later:
            span.reverse()
        rank_of, kept, moved, ranks = self.rank_of, list[int](), [slot], set[int]()
        for each in span[1:]:
            rank = rank_of[each]
            if rank not in ranks and all(other not in moved for other in neighbours[each]):
                kept.append(each)
            elif rank == rank_of[slot]:
                return None
            else:
                moved.append(each)
                ranks.add(rank)
        between = kept + moved
        return order[:first] + (between if is_later else between[::-1]) + order[last + 1 :], first


def in_order(played: Played, done: int, states: dict[int, State]) -> Played:
    """Return a play in the order of its starts, which may differ after so many passes, with states before."""
    order = played.order[:done] + sorted(played.order[done:], key=played.starts.__getitem__)
    return played._replace(order=order, states={n: state for n, state in states.items() if n <= done})


class Settings(NamedTuple):
    """The settings of simulated annealing.

    Args:
        seed: of the random numbers.
        hot: the temperature at first, in mean times of a pass.
        ends: the share of moves that take the first or the last pass of a block of the critical path into the block.
        mean: the weight of the ranks' mean span in the objective, beside the largest one. It shows the way where the
            largest is level.
        rounds, played: how often the temperature falls, and the passes that are played meanwhile, at most, at less than
            a microsecond each; fewer for short words.
    """

    seed: int = 0
    hot: float = HOT
    ends: float = ENDS
    mean: float = MEAN
    rounds: int = ROUNDS
    played: int = PLAYED

    def times(self, effort: float) -> list[Settings]:
        """Return so many settings, of other seeds; of an effort below 1 one that plays this share of the passes."""
        played = int(self.played * min(effort, 1.0))
        return [self._replace(seed=self.seed + n, played=played) for n in range(max(1, round(effort)))]


USUAL = Settings()
LONG = Settings(hot=2 * HOT, rounds=2 * ROUNDS, played=3 * PLAYED)
"""For an order that is searched once: one long annealing leads further than several shorter ones."""
OF_FEW = Settings(hot=2 * HOT, ends=ENDS / 4, mean=MEAN / 4, rounds=2 * ROUNDS, played=PLAYED // 2)
"""For an order of few microbatches, of which the search repeats a part."""


def multistart(
    filling: Filling, filled: Filled, bound: float, effort: float = 1.0, settings: Settings = USUAL
) -> Filled:
    """Return the fastest filled words that annealing finds from the same words, with the settings times an effort."""
    best = filled
    for each in settings.times(effort):
        if best.cost > bound * ROUNDED:
            best = min(best, annealed(filling, filled, bound, each), key=lambda found: found.cost)
    return best


def check_effort(effort: float) -> None:
    """Raise ScheduleError for an effort that is no positive number."""
    if not 0 < effort < inf:
        raise ScheduleError(f"effort is times as many tries as usual, more than 0, not {effort!r}")


def annealed(filling: Filling, filled: Filled, bound: float, settings: Settings = USUAL) -> Filled:
    """Return the fastest filled words that annealing of their forwards and input gradients finds.

    Each round begins with the best words so far, and waits are filled up to spans from the bound to theirs in turn.

    Args:
        bound: at which no move is tried any more.
    """
    rng, best = Random(settings.seed), filled
    for n in range(settings.rounds):
        if best.cost <= bound * ROUNDED or best.cost == inf:
            break
        player = Player(filling, bound + (best.cost - bound) * SHARES[n % len(SHARES)])
        rows = player.rows([at for at in word if at < filling.count] for word in best.words)
        if (play := player.play(rows)) is None:
            continue
        round_ = _Round(player, rows, play, rng, settings)
        round_.run(bound, min(settings.played, MOVES * len(player.steps) ** 2))
        if round_.least < best.cost * (1 - ROUNDING):
            best = min(best, filling.fill(player.words(round_.best), player.target), key=lambda each: each.cost)
    return best


class _Round:
    """One annealing.

    Args:
        rows, played, value: the words so far.
        path: the passes on their critical path.
        ends: the first and the last pass of each block of it, with the way into the block: 1 or -1.
        best, least: the best words, and their cost.
    """

    def __init__(self, player: Player, rows: Rows, played: Played, rng: Random, settings: Settings) -> None:
        self.player, self.rng, self.settings, self.rows = player, rng, settings, [*rows]
        self.size = len(player.steps)
        self.busy = sum(player.filling.busy) / len(rows)
        self._keep(played)
        self.best, self.least = [*rows], max(played.spans)

    def run(self, bound: float, budget: int) -> None:
        """Move passes, at a temperature that falls with the number of passes that have been played."""
        hot = self.settings.hot * sum(time for time, *_ in self.player.steps) / self.size
        left = budget
        while left > 0 and self.least > bound * ROUNDED:
            left -= self._move(hot * left / budget)

    def _move(self, temperature: float) -> int:
        """Try a move, keep it with the probability of the Metropolis rule, and return how many passes were played."""
        slot, away = self._drawn()
        rank = self.player.rank_of[slot]
        row = self.rows[rank]
        a = row.index(slot)
        b = a + away
        passed = row[a + 1 : b + 1] if b > a else row[max(0, b) : a]
        if not 0 <= b < len(row) or not self.player.tied[slot].isdisjoint(passed):
            return REFUSED
        if (moved := self.player.reordered(self.played.order, slot, passed, b > a)) is None:
            return REFUSED
        order, same = moved
        done, state = self.player.state(self.rows, self.played, same)
        most = self.value * ROUNDED - temperature * log(1 - self.rng.random())
        least = self.player.target - (most - self.settings.mean * self.busy)
        self.rows[rank] = [*row]
        self.rows[rank].insert(b, self.rows[rank].pop(a))
        played = self.player.resume(self.rows, order, done, state, least)
        if played is None or self._value_of(played) > most:
            self.rows[rank] = row
            return self.size - done
        self._keep(in_order(played, done, self.played.states))
        if max(played.spans) < self.least * (1 - ROUNDING):
            self.best, self.least = [*self.rows], max(played.spans)
        return 2 * (self.size - done)

    def _value_of(self, played: Played) -> float:
        return max(played.spans) + self.settings.mean * sum(played.spans) / len(played.spans)

    def _keep(self, played: Played) -> None:
        self.played, self.value = played, self._value_of(played)
        self.path = self._critical()
        self.ends = self._ends()

    def _drawn(self) -> tuple[int, int]:
        """Return a pass, and by how many places it moves."""
        random, away = self.rng.random, self.rng.choice(AWAY)
        if self.ends and random() < self.settings.ends:
            slot, inwards = self.ends[int(random() * len(self.ends))]
            return slot, inwards * away
        slot = self.path[int(random() * len(self.path))] if random() < CRITICAL else int(random() * self.size)
        return slot, away if random() < 0.5 else -away

    def _ends(self) -> list[tuple[int, int]]:
        """Return the first and the last pass of each block of the path, and the way into it."""
        ends = list[tuple[int, int]]()
        for _, group in groupby(self.path, self.player.rank_of.__getitem__):  # from the last pass back
            last, *others = group
            if others:
                ends += (others[-1], 1), (last, -1)
        return ends

    def _critical(self) -> list[int]:
        """Return the passes on a critical path: each starts when the one before ends, or its result arrives."""
        places = {slot: n for row in self.rows for n, slot in enumerate(row)}
        spans, ready, starts, *_ = self.played
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
