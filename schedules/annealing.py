"""Simulated annealing of words of forwards and input gradients, whose waits weight gradients fill. No torch.

A move takes a pass to a place nearby in its rank's word. Most of them take a pass on the critical path, since no other
move makes the slowest rank faster. Of the passes that follow one another there on a rank, a block, the first and the
last are moved into it more often, since what moves inside changes nothing (Nowicki and Smutnicki, "A fast taboo search
algorithm for the job shop problem", Management Science 42, 1996).

Nearly all moves are refused. So a play ends at the first pass that starts too late for the passes behind it to end in
time, as they ran in the play before (from the times before a pass and behind it: Taillard, "Parallel taboo search
techniques for the job shop scheduling problem", ORSA Journal on Computing 6, 1994). It is an estimate: some moves are
refused that a whole play would keep. After Kirkpatrick et al., "Optimization by simulated annealing", Science 220,
1983; van Laarhoven et al., "Job shop scheduling by simulated annealing", Operations Research 40, 1992. Invariants:

- The unit of time changes nothing but what is rounded.
- What ends the search is its work, counted in passes, not time, so the result depends on the arguments alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, product
from math import inf, log
from random import Random
from typing import NamedTuple

from fpipe.costs import ROUNDING
from fpipe.errors import ScheduleError
from fpipe.schedules.filling import ROUNDED, Filled, Filling
from fpipe.schedules.plays import Limits, Played, Player, Rows

ROUNDS, BUDGET = 3, 500_000  # as of `Settings`
PLAYS = 20  # of all passes for each pass, at most, in a round
REFUSED, TRIED = 4, 16  # the work of a move, in passes: of one that is not played, and of one that is, beside its play
HOT, MEAN = 0.25, 0.4  # as of `Settings`
ENDS = 0.3  # of the moves take the first or the last pass of a block of the critical path into the block
CRITICAL = 0.5  # of the others take a pass on the critical path
SHARES = (0.0, 0.5)  # of the way from the bound to the least cost
AWAY = 6  # places, at most
TOLERANCE = 0.5  # of deadlines, in times of the longest weight gradient, which may run elsewhere than before


class Settings(NamedTuple):
    """The settings of simulated annealing.

    Args:
        seed: of the random numbers.
        hot: the temperature at first, in mean times of a pass.
        mean: the weight of the ranks' mean span in the objective, beside the largest one. It shows the way where the
            largest is level.
        rounds, budget: how often the temperature falls, and the work meanwhile, in passes that are played, at
            less than a microsecond each; less for short words.
    """

    seed: int = 0
    hot: float = HOT
    mean: float = MEAN
    rounds: int = ROUNDS
    budget: int = BUDGET

    def tries(self, effort: float) -> list[Settings]:
        """Return as many settings as the effort is, which differ in their seed; below 1, one with that much budget."""
        budget = int(self.budget * min(effort, 1.0))
        return [self._replace(seed=self.seed + n, budget=budget) for n in range(max(1, round(effort)))]


USUAL = Settings()
LONG = Settings(rounds=2 * ROUNDS)
"""For an order that is searched once: one long annealing leads further than several shorter ones."""
OF_FEW = Settings(hot=2 * HOT, mean=MEAN / 4, rounds=2 * ROUNDS, budget=BUDGET // 2)
"""For an order of few microbatches, of which the search repeats a part."""


def multistart(
    filling: Filling, starts: Sequence[Filled], bound: float, effort: float = 1.0, settings: Settings = USUAL
) -> Filled:
    """Return the fastest filled words that annealing finds from each start, as often as the effort is.

    Each annealing has a seed of its own, so that a start may be given twice.
    """
    best = min(starts, key=lambda start: start.cost)
    for n, (start, each) in enumerate(product(starts, settings.tries(effort))):
        if best.cost > bound * ROUNDED:
            order = annealed(filling, start, bound, each._replace(seed=settings.seed + n))
            best = min(best, order, key=lambda filled: filled.cost)
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
        round_.run(bound, min(settings.budget, PLAYS * len(player.steps) ** 2))
        if round_.least < best.cost * (1 - ROUNDING):
            best = min(best, filling.fill(player.words(round_.best), player.target), key=lambda each: each.cost)
    return best


class _Round:
    """One annealing.

    Args:
        rows, played, value: the words so far.
        places: by slot, its place in its word.
        latest: by slot, when it may start at the latest for the longest span to stay the same.
        path: the passes on their critical path.
        ends: the first and the last pass of each block of it, with the way into the block: 1 or -1.
        best, least: the best words, and their cost.
    """

    def __init__(self, player: Player, rows: Rows, played: Played, rng: Random, settings: Settings) -> None:
        self.player, self.rng, self.settings, self.rows = player, rng, settings, [*rows]
        self.size, self.places = len(player.steps), [0] * len(player.steps)
        self.mean_busy = sum(player.filling.busy) / len(rows)
        self.weight = max((weight[0] for *_, weight, _ in player.steps if weight), default=0.0)
        for row in rows:
            self._place(row)
        self._keep(played)
        self.best, self.least = [*rows], max(played.spans)

    def run(self, bound: float, budget: int) -> None:
        """Move passes, at a temperature that falls with the work that is done."""
        hot = self.settings.hot * sum(time for _, time, *_ in self.player.steps) / self.size
        left = budget
        while left > 0 and self.least > bound * ROUNDED:
            left -= self._move(hot * left / budget)

    def _move(self, temperature: float) -> int:
        """Try a move, keep it with the probability of the Metropolis rule, and return the work, in passes."""
        player, before, (slot, away) = self.player, self.played, self._drawn()
        rank = player.rank_of[slot]
        row, a = self.rows[rank], self.places[slot]
        b = a + away
        passed = row[a + 1 : b + 1] if b > a else row[max(0, b) : a]
        if not 0 <= b < len(row) or not player.tied[slot].isdisjoint(passed):
            return REFUSED
        if (reordered := player.reordered(before, slot, passed, b > a)) is None:
            return REFUSED
        first, between = reordered
        done, state = player.state(before, first)
        slots = before.order[done:first] + between + before.order[first + len(between) :]
        row = [*row]
        row.insert(b, row.pop(a))
        heads = before.heads if min(a, b) else [*before.heads[:rank], row[0], *before.heads[rank + 1 :]]
        most = self.value * ROUNDED - temperature * log(1 - self.rng.random())
        least_spare = player.target - (most - self.settings.mean * self.mean_busy)
        moved = [slot, *passed]
        deadlines = [self.latest[each] for each in moved]
        for each in moved:
            self.latest[each] = inf  # other passes are behind them now
        left = iter(slots)
        tolerance = most - self.value + TOLERANCE * self.weight  # as if the mean span stayed the same
        ended = player.run(left, state, heads, Limits(least_spare, self.latest, tolerance))
        work = TRIED + len(slots) - len([*left])
        if ended is None or self._value(player.spans(ended, heads)) > most:
            for each, deadline in zip(moved, deadlines, strict=True):
                self.latest[each] = deadline
            return work
        self.rows[rank] = row
        self._place(row)
        self._keep(player.finished(before.order[:done] + slots, ended, heads, done, before.states))
        if max(self.played.spans) < self.least * (1 - ROUNDING):
            self.best, self.least = [*self.rows], max(self.played.spans)
        return work + self.size

    def _value(self, spans: list[float]) -> float:
        return max(spans) + self.settings.mean * sum(spans) / len(spans)

    def _place(self, row: list[int]) -> None:
        for place, slot in enumerate(row):
            self.places[slot] = place

    def _keep(self, played: Played) -> None:
        self.played, self.value = played, self._value(played.spans)
        self.latest = self.player.latest(played)
        self.path = self._critical()
        self.ends = self._ends()

    def _drawn(self) -> tuple[int, int]:
        """Return a pass, and by how many places it moves."""
        random = self.rng.random
        away = 1 + int(AWAY * random())
        if self.ends and random() < ENDS:
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
        places, spans, ready, starts = self.places, self.played.spans, self.played.ready, self.played.starts
        longest = max(spans)
        row = self.rows[self.rng.choice([rank for rank, span in enumerate(spans) if span * ROUNDED >= longest])]
        path, n = list[int](), len(row) - 1
        while n >= 0:
            slot = row[n]
            path.append(slot)
            sources = self.player.sources[slot]
            if sources and starts[slot] <= ready[slot] * ROUNDED:
                slot = max(sources, key=starts.__getitem__)
                row, n = self.rows[self.player.rank_of[slot]], places[slot]
            else:
                n -= 1
        return path
