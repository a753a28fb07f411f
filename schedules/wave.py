"""Orders of a chain of stages, one on each rank: forwards ahead, then input gradients and forwards in turn. No torch.

What is searched is how many forwards each rank runs ahead: at first the fewest with which no rank waits too long for
its first gradient, for several costs from the lower bound up; then a forward more or less, on a rank or on those before
or after it. `Filling` adds the weight gradients, and says what an order costs. How long a rank may wait is the same for
all of them, or no longer than the bound has it wait at such a cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import inf

from fpipe.costs import ROUNDING
from fpipe.plan import Plan
from fpipe.schedules.bounds import Chain
from fpipe.schedules.filling import Filled, Filling, Target
from fpipe.schedules.work import INPUT, Words

Ahead = tuple[int, ...]  # by stage
PASSES = 8_000_000  # that a search places, at about a microsecond each
SMALL, CLOSE = 1024, 1.0005
STEPS = 16  # between the bound and the cost that a wait of one forward and one input gradient adds


def near(plan: Plan) -> float:
    """Return how many times the lower bound is near enough: for more than SMALL forwards not 1."""
    return 1 + 2 * ROUNDING if plan.ranks * plan.microbatches <= SMALL else CLOSE


def wave(filling: Filling, chain: Chain) -> Filled:
    """Return the best order that is found; of equally fast ones, one that needs little memory."""
    search = _Search(filling, chain)
    search.run()
    return filling.fill(search.words(search.best), search.target)


class _Search:
    """The state of a search.

    Args:
        least, best, target: the least cost, how many forwards are ahead for it, and up to which span a rank may wait.
        placed: the passes placed so far.
    """

    def __init__(self, filling: Filling, chain: Chain) -> None:
        self.filling, self.chain, self.bound = filling, chain, chain.bound()
        self.least, self.placed = inf, 0
        self.target: Target = inf
        self.before_last, _ = chain.before_last(self.bound * (1 + 2 * ROUNDING))
        self.enough = self.bound * near(filling.plan)
        self.best: Ahead = (1,) * chain.count
        self.tried = dict[Ahead, float]()

    def run(self) -> None:
        """Try the starts, then the best of them at more targets, then moves from the best one."""
        for start in self._starts():
            self._try(start, [self.bound, self._spans(start), self.bound * 1.003, inf])
        for ahead in sorted(self.tried, key=self.tried.__getitem__)[:5]:
            self._try(ahead, self._between(12))
        moved = True
        while moved and not self.is_done:
            before = self.least
            for move in self._moves(self.best):
                if move not in self.tried:
                    self._try(move, [self._spans(move), *self._between(6)])
                if self.least < before or self.is_done:
                    break
            moved = self.least < before

    @property
    def is_done(self) -> bool:
        return self.least <= self.enough or self.placed > PASSES

    def _between(self, count: int) -> list[float]:
        """Return targets from the bound to the least cost."""
        return [self.bound + (self.least - self.bound) * n / count for n in range(count)]

    def _try(self, ahead: Ahead, targets: Iterable[Target]) -> None:
        if self.is_done:
            return
        sequence = self.filling.sequence(self.words(ahead)) or []
        self.placed += len(sequence)
        self.tried.setdefault(ahead, inf)
        for target in targets:
            if not sequence or self.least <= self.enough:
                return
            self.placed += len(sequence)
            cost = self.filling.cost(sequence, target)
            self.tried[ahead] = min(cost, self.tried[ahead])
            if cost < self.least * (1 - ROUNDING):
                self.least, self.best, self.target = cost, ahead, target

    def words(self, ahead: Ahead) -> Words:
        """Return the words of each rank, without weight gradients."""
        chain, plan = self.chain, self.filling.work.plan
        words: list[list[int]] = [[]] * chain.count
        for s, count in enumerate(ahead):
            back = INPUT * chain.count + s
            words[plan.rank_of(s, 0)] = [s] * count + [back, s] * (chain.microbatches - count) + [back] * count
        return words

    def _starts(self) -> Iterator[Ahead]:
        chain, last = self.chain, self.chain.count - 1
        paces = chain.forward, [*accumulate(chain.forward, max)]
        longest = max(map(sum, zip(chain.forward, chain.inputs, strict=True))) * max(chain.scale)
        costs = [self.bound + longest * step / STEPS for step in range(2 * STEPS)]
        fewest = [chain.ahead(cost, pace)[0] for cost in costs for pace in paces]
        starts = [_apart(counts, each) for counts in fewest for each in range(3)]
        for each in (1, 2):  # 1F1B and ZB-H1, ZB-H2, and those between
            most = [each * (last - s) + 1 for s in range(chain.count)]
            starts += [most, [min(n, chain.residuals[0] - s) for s, n in enumerate(most)]]
        yield from dict.fromkeys(map(self._fitting, starts))

    def _spans(self, ahead: Ahead) -> list[float]:
        """Return by rank the span with as long waits as the bound has, before the first gradient and the last one."""
        plan, spans = self.filling.plan, self.filling.busy.copy()
        for s, waits in enumerate(zip(self.chain.before_first(ahead), self.before_last, strict=True)):
            spans[plan.rank_of(s, 0)] += sum(waits)
        return spans

    def _moves(self, ahead: Ahead) -> Iterator[Ahead]:
        last = len(ahead) - 1
        for stage in range(len(ahead)):
            for first, end in ((stage, stage), (0, stage), (stage, last)):
                for more in (-1, 1):
                    yield self._fitting(n + more * (first <= s <= end) for s, n in enumerate(ahead))

    def _fitting(self, ahead: Iterable[int]) -> Ahead:
        """Return numbers that fit, of which none exceeds the one before it: later forwards would come too late."""
        each = [min(most, max(1, n)) for n, most in zip(ahead, self.chain.residuals, strict=True)]
        for s in range(len(each) - 2, -1, -1):
            each[s] = min(self.chain.residuals[s], max(each[s], each[s + 1]))
        return tuple(accumulate(each, min))


def _apart(counts: Sequence[int], least: int) -> list[int]:
    """Return numbers of forwards of which each exceeds the next one by so many, where they do not by more.

    A forward more than the next rank is what lets a rank run another one while a microbatch is there and back.
    """
    result = [*counts]
    for s in range(len(counts) - 2, -1, -1):
        result[s] = max(counts[s], result[s + 1] + least)
    return result
