"""List scheduling: each rank, when it is free, starts the best pass that can start. No torch.

`ListScheduler` plays the ranks against each other; `greedy` chooses by rules, and `follow` keeps to words.

- Passes are placed in the order of their starts: a rank chooses with the knowledge of all that has started before.
- Transfers on one edge queue, as in the simulator.
- Under `greedy` a rank never exceeds its limit, and always keeps room to finish its older microbatches before its newer
  ones. So the oldest microbatch can proceed on every rank, and no choice leads to a deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import compress, product
from math import inf
from typing import Literal

from fpipe.costs import ROUNDING
from fpipe.schedules.filling import Filled
from fpipe.schedules.work import FORWARD, INPUT, WEIGHT, Words, Work


class ListScheduler:
    """The state of all ranks while passes are placed. Times of what has not been placed are infinite.

    Args:
        numbers: by pass, its microbatches, and twice a number that is none, for those after the last one.
        done: by pass, how many of them have started.
        until: the kind of pass that ends a flight.
        live: by rank, how many chunks that have a backward are between the start of their forward and that pass.
        order: by rank, the passes placed.
    """

    def __init__(self, work: Work, until: int = WEIGHT) -> None:
        self.until = until
        ranks, passes, microbatches = work.plan.ranks, len(work.times), work.plan.microbatches
        self.work, self.plan, self.cycle = work, work.plan, work.plan.cycle
        self.numbers = [[*work.microbatches(at), microbatches, microbatches] for at in range(passes)]
        self.done, self.live = [0] * passes, [0] * ranks
        self.ready = [[0.0] * microbatches + [inf] for _ in work.inputs]  # the latest known arrival of an input
        cycles = microbatches // self.cycle
        self.missing = [[*counts * cycles, 0] for counts in work.inputs]  # inputs without a known arrival
        self.order: list[list[int]] = [[] for _ in range(ranks)]
        self.began, self.free = [inf] * ranks, [0.0] * ranks
        self.sent: dict[tuple[int, int], float] = {}  # when the last bytes have left, by edge

    def run(self, choose: Callable[[int, float], int | None]) -> float:
        """Place all passes, and return the cost, the largest span of a rank.

        Args:
            choose: (rank, now) -> the pass that it starts now, or None. A rank is asked when it becomes free and, while
                free, when an input arrives.
        """
        agenda = [(0.0, rank) for rank in range(self.plan.ranks)]
        while agenda:
            now, rank = heappop(agenda)
            if now >= self.free[rank] and (chosen := choose(rank, now)) is not None:
                for event in self._place(chosen, rank, now):
                    heappush(agenda, event)
        return max(free - began for free, began in zip(self.free, self.began, strict=True))

    def _place(self, at: int, rank: int, now: float) -> list[tuple[float, int]]:
        """Start a pass, and return when ranks have to choose because of it."""
        microbatch = self.numbers[at][self.done[at]]
        end = now + self.work.times[at] * self.work.scale[microbatch]
        kind, place = divmod(at, self.work.count)
        self.done[at] += 1
        if self.plan.is_differentiated(self.work.places[place].stage):
            self.live[rank] += (kind == FORWARD) - (kind == self.until)
        self.order[rank].append(at)
        self.began[rank], self.free[rank] = min(self.began[rank], now), end
        events = [(end, rank)]
        for target, reader, edge, wire, latency in self.work.hops[at][microbatch % self.cycle]:
            arrival = end
            if edge is not None:
                self.sent[edge] = max(end, self.sent.get(edge, 0.0)) + wire * self.work.sizes[microbatch]
                arrival = self.sent[edge] + latency
                events.append((arrival, reader))
            self.missing[target][microbatch] -= 1
            if arrival > self.ready[target][microbatch]:
                self.ready[target][microbatch] = arrival
        return events

    def arrival(self, at: int) -> float:
        """Return when the last input of a pass's next microbatch arrives, as far as known; infinite after the last."""
        microbatch = self.numbers[at][self.done[at]]
        return inf if self.missing[at][microbatch] else self.ready[at][microbatch]


def follow(words: Words, work: Work) -> float:
    """Return the cost of words with their weight gradients."""
    state = ListScheduler(work)

    def choose(rank: int, now: float) -> int | None:
        word, done = words[rank], len(state.order[rank])
        return word[done] if done < len(word) and state.arrival(word[done]) <= now else None

    return state.run(choose)


@dataclass(frozen=True)
class Rules:
    """The rules by which a rank chooses.

    Of two stages' forwards it takes the later stage's, of two input gradients the earlier's.

    Args:
        first: which runs first if a forward and an input gradient can both start; "turn" alternates.
        patience: a weight gradient fills a wait of at least this part of its own time.
        caution: a forward is delayed for an input gradient that can start within this part of the forward's time.
    """

    first: Literal["turn", "forward", "input"] = "turn"
    patience: float = 0.0
    caution: float = 0.0


FIRST: tuple[Literal["turn", "forward", "input"], ...] = ("turn", "forward", "input")
RULES = tuple(Rules(*choice) for choice in product(FIRST, (0.0, 0.5, 1.0), (0.0, 0.5)))


def greedy(
    work: Work, limits: Sequence[float], rules: Iterable[Rules] = RULES, until: int = WEIGHT
) -> Iterator[Filled]:
    """Yield the order that each of the rules leads to, on any DAG and any placement.

    Args:
        limits: the most microbatches in flight on each rank, at least 1; a chunk of v counts 1/v.
        until: the kind of pass that ends a flight: the weight gradient, or the input gradient.

    >>> from fpipe import Costs, Placement, Plan
    >>> [filled.words for filled in greedy(Work.of(Plan(Placement.loop(1), 2), Costs()), [1], [Rules()])]
    [[[0, 1, 2, 0, 1, 2]]]
    """
    for rule in rules:
        choice = _Greedy(ListScheduler(work, until), limits, rule)
        yield Filled(choice.state.run(choice.choose), choice.state.order)


class _Greedy:
    """The choice of passes by rules.

    Args:
        passes: by rank its forwards, the passes that run backward as soon as they can, and those that can be late. A
            stage with weight gradients alone has them among the former.
        pairs: by rank the forward, and the pass that ends its flight, of each stage that has a backward.
        run: by rank, which of its pairs run a microbatch, by its number modulo `plan.cycle`.
        absent: by rank the passes that do not exist, which are placed at once.
    """

    def __init__(self, state: ListScheduler, limits: Sequence[float], rules: Rules) -> None:
        plan, work, self.state, self.rules = state.plan, state.work, state, rules
        places = [work.on(rank) for rank in range(plan.ranks)]
        self.limits = [
            int(min(n, plan.microbatches) * len(own) * (1 + ROUNDING)) for n, own in zip(limits, places, strict=True)
        ]
        self.passes, self.pairs, self.absent = list[list[list[int]]](), list[list[tuple[int, int]]](), list[list[int]]()
        self.run = list[list[list[int]]]()
        for own in places:
            forwards, inputs, weights = ([kind * work.count + place for place in own] for kind in range(3))
            absent = [at for at in (*inputs, *weights) if at in work.absent]
            early = [w if i in absent else i for i, w in zip(inputs, weights, strict=True)]
            late = [w for w in weights if w not in (*early, *absent)]
            self.passes.append([forwards, [at for at in early if at not in absent], late])
            differentiated = [plan.is_differentiated(work.places[place].stage) for place in own]
            ends = weights if state.until == WEIGHT else inputs
            pairs = list(compress(zip(forwards, ends, strict=True), differentiated))
            self.pairs.append(pairs)
            own_of = [work.microbatches(forward) for forward, _ in pairs]
            self.run.append([[n for n, each in enumerate(own_of) if m in each] for m in range(plan.cycle)])
            self.absent.append(absent)
        self.turn = [FORWARD] * plan.ranks

    def choose(self, rank: int, now: float) -> int | None:
        for at in self.absent[rank]:
            if self.state.arrival(at) <= now:
                return at
        chosen = self._choose(rank, now)
        forwards, inputs, _ = self.passes[rank]
        if chosen in forwards or chosen in inputs:
            self.turn[rank] = INPUT if chosen in forwards else FORWARD
        return chosen

    def _choose(self, rank: int, now: float) -> int | None:
        forwards, inputs, weights = self.passes[rank]
        times, done, count = self.state.work.times, self.state.done, self.state.work.count
        forward_start, forward = self._next((at for at in reversed(forwards) if self._room(rank, at)), now)
        input_start, backward = self._next(inputs, now)
        first = {"turn": self.turn[rank], "forward": FORWARD, "input": INPUT}[self.rules.first]
        if input_start == now and (forward_start > now or first == INPUT):
            return backward
        wait = min(forward_start, input_start)
        if forward_start == now:
            if not 0 < input_start - now < self.rules.caution * times[forward]:
                return forward
            wait = input_start
        for at in weights:
            if done[at] < done[at - count] and wait - now >= self.rules.patience * times[at]:
                return at
        return None

    def _next(self, passes: Iterable[int], now: float) -> tuple[float, int]:
        """Return the first start from now on, and the pass that can start then."""
        start, chosen = inf, -1
        for at in passes:
            arrival = max(now, self.state.arrival(at))
            if arrival < start:
                start, chosen = arrival, at
        return start, chosen

    def _room(self, rank: int, forward: int) -> bool:
        """Whether a rank has room for this forward, and can then still finish the older microbatches first."""
        pairs = self.pairs[rank]
        free, done, numbers = self.limits[rank] - self.state.live[rank] - 1, self.state.done, self.state.numbers
        if not any(forward == at for at, _ in pairs):
            return True
        if free < 0 or free >= len(pairs) - 1:  # a microbatch that has begun needs at most that many more chunks
            return free >= 0
        begun = [numbers[at][done[at] + (at == forward)] for at, _ in pairs]
        ended = [numbers[at][done[at]] for _, at in pairs]
        run, cycle = self.run[rank], self.state.cycle
        for microbatch in range(min(ended), max(begun)):
            run_it = run[microbatch % cycle]
            inside = sum([microbatch < begun[n] for n in run_it])
            if free < len(run_it) - inside:
                return False
            free += inside - sum([microbatch < ended[n] for n in run_it])
            if free >= len(pairs) - 1:
                return True
        return True
