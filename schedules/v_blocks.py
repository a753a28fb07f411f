"""Orders on the V placement: building blocks, repeated, squeezed and reordered under a memory limit. No torch.

A rank runs six kinds of passes, each in microbatch order; so its order is a word of kinds, and how often a kind came
before says the microbatch. A building block is the passes of one microbatch, each in a slot of its rank, such that one
microbatch may follow another every period (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory",
arXiv 2405.15362). What holds here:

- Words come out of one timeline, so ranks that follow theirs never wait for each other for ever. A pass runs before its
  turn only when all that it needs is there.
- After its next pass, and after all that stand in its word, a rank holds no more than the limit, given that it runs
  its weight gradients in time; so it never waits for room that nobody makes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import NamedTuple

from fpipe.costs import Costs
from fpipe.effects import Activation, BackwardInput, BackwardWeight, Compute, Effect, Forward, Gradient
from fpipe.plan import Plan

# The way of a microbatch: down the ranks through their chunks a, up through b, and back; weight gradients aside.
FA, FB, IB, IA, WB, WA = range(6)
EFFECT: tuple[type[Compute], ...] = (Forward, Forward, BackwardInput, BackwardInput, BackwardWeight, BackwardWeight)
CHUNK = (0, 1, 1, 0, 1, 0)

Word = Sequence[int]
Words = Sequence[Word]  # of all ranks
Block = list[list[float]]  # when a rank starts each of the first four kinds


def effects(word: Word, rank: int, plan: Plan) -> Iterator[Effect]:
    """What a word says."""
    stages, done = plan.stages_on(rank), [0] * len(EFFECT)
    for kind in word:
        yield EFFECT[kind](stages[CHUNK[kind]], done[kind])
        done[kind] += 1


class Hop(NamedTuple):
    """Where a microbatch goes after a pass: to which kind of pass, on which rank, how long bytes and latency take."""

    rank: int
    kind: int
    wire: float
    latency: float


@dataclass(frozen=True)
class Work:
    """Costs as the engine reads them: by rank and kind."""

    times: list[list[float]]
    hops: list[list[Hop | None]]

    @classmethod
    def of(cls, plan: Plan, costs: Costs) -> Work:
        costs.check(plan)
        times = [
            [costs.time(EFFECT[kind](stages[CHUNK[kind]], 0)) for kind in range(6)]
            for stages in map(plan.stages_on, range(plan.ranks))
        ]
        return cls(times, [[_hop(rank, kind, plan, costs) for kind in range(6)] for rank in range(plan.ranks)])

    @property
    def even(self) -> bool:
        """Whether all passes take the same time, and transfers none."""
        same = len({time for row in self.times for time in row}) == 1
        return same and not any(hop and (hop.wire or hop.latency) for row in self.hops for hop in row)


def even(plan: Plan, costs: Costs) -> bool:
    """Whether the costs are those that the named orders are made for."""
    return Work.of(plan, costs).even


def _hop(rank: int, kind: int, plan: Plan, costs: Costs) -> Hop | None:
    target, stage = rank + (1 if kind in (FA, IB) else -1), plan.stages_on(rank)[CHUNK[kind]]
    if kind > IA or (kind == IA and rank == 0):
        return None
    if not 0 <= target < plan.ranks:
        return Hop(rank, kind + 1, 0.0, 0.0)
    link, value = costs.link(rank, target), Activation(stage, 0) if kind < IB else Gradient(stage - 1, stage, 0)
    return Hop(target, kind, costs.bytes(value) / link.bandwidth, link.latency)


class Shape(NamedTuple):
    """What a building block waits beyond what it must: at each hop of its four ways, and at its three turns, in slots.

    The hops' waits are in proportion, and may be stretched.
    """

    hops: tuple[int, int, int, int]
    turns: tuple[int, int, int]


def block(ranks: int, shape: Shape, stretch: float = 1.0, period: int = 6) -> Block:
    """The earliest slots of a microbatch that leave room for its likes every period (modulo scheduling).

    >>> block(ranks=2, shape=Shape((0, 0, 0, 0), (0, 0, 0)))
    [[0.0, 3.0, 4.0, 7.0], [1.0, 2.0, 5.0, 6.0]]
    """
    found: Block = [[] for _ in range(ranks)]
    time = 0.0
    for kind in (FA, FB, IB, IA):
        down = kind in (FA, IB)
        for n, rank in enumerate(range(ranks) if down else reversed(range(ranks))):
            if n:
                time += stretch * shape.hops[kind]
            elif kind:
                time += shape.turns[kind - 1]
            time = _slot(time, found[rank], period)
            found[rank].append(time)
            time += 1
    return found


def _slot(time: float, taken: Iterable[float], period: int) -> float:
    """The earliest from `time` that is one slot away from all that is taken, every period. Three taken leave one."""
    for other in taken:
        after = (time - other) % period
        if not 1 <= after <= period - 1:
            return _slot(time + (1 - after) % period, taken, period)
    return time


def in_flight(slots: Block, period: int) -> int:
    """The most chunks between forward and input gradient on a rank, when a block is repeated for ever."""
    return max(
        sum(int((now - f) // period - (now - i) // period) for f, i in ((fa, ia), (fb, ib)))
        for fa, fb, ib, ia in slots
        for now in (fa, fb)
    )


def repeat(slots: Block, period: int, microbatches: int) -> Words:
    """The words of a block that is repeated, weight gradients left out."""
    passes = [[(t + period * m, kind) for kind, t in enumerate(own) for m in range(microbatches)] for own in slots]
    return [[kind for _, kind in sorted(times)] for times in passes]


class Fill(NamedTuple):
    """How a rank uses the time in which the next pass of its word can't run.

    Args:
        reorder: runs a later pass of its word that can.
        patience: leaves room for the next pass where that is known to come within this part of the time that
            something else, a weight gradient say, would take.
    """

    reorder: bool = False
    patience: float = 0.0


KEEP = Fill()


class _Rank:
    """One rank as its word is squeezed."""

    def __init__(self, word: Word, times: list[float], limit: float, policy: Fill) -> None:
        self.word, self.times, self.limit, self.policy = deque(word), times, limit, policy
        self.fill = not any(kind > IA for kind in word)  # the word leaves weight gradients to us
        self.ready: list[list[float]] = [[] for _ in range(6)]  # from when each kind's microbatches can run
        self.late = deque[int]()  # weight gradients put off
        self.done = [0] * 6
        self.began, self.free = inf, 0.0
        self.order: list[int] = []

    @property
    def held(self) -> int:
        done = self.done
        return done[FA] + done[FB] - done[WB] - done[WA]

    def arrival(self, kind: int) -> float:
        """From when the next pass of a kind can run, as far as it is known."""
        ready, at = self.ready[kind], self.done[kind]
        return ready[at] if at < len(ready) else inf

    def choose(self, now: float) -> int | None:
        """The pass to run now, taken off what is to do."""
        due = inf
        if self.word:
            kind = self.word[0]
            due = self.arrival(kind)
            if due <= now:
                if kind > FB or self.held < self.limit:
                    return self.word.popleft()
            elif self.policy.reorder and (early := self.early(now, due)) is not None:
                self.word.remove(early)
                return early
        if self.late and not now < due < now + self.policy.patience * self.times[self.late[0]]:
            return self.late.popleft()
        return None

    def early(self, now: float, due: float) -> int | None:
        """A later pass of the word that can run, if it takes no memory that the passes before it need."""
        balance, peak, seen = self.done[FA] + self.done[FB] - self.done[IB] - self.done[IA], 0, 0
        for kind in self.word:
            if not seen >> kind & 1:
                seen |= 1 << kind
                room = kind > FB or max(peak, self.held) < self.limit
                if room and self.arrival(kind) <= now and due >= now + self.policy.patience * self.times[kind]:
                    return kind
                if seen == 0b1111:
                    break
            balance += 1 if kind < IB else -1
            peak = max(peak, balance)
        return None

    def run(self, kind: int, now: float) -> float:
        """When the pass ends."""
        self.order.append(kind)
        self.done[kind] += 1
        self.began, self.free = min(self.began, now), now + self.times[kind]
        if kind in (IB, IA):
            self.ready[kind + 2].append(self.free)
            if self.fill:
                self.late.append(kind + 2)
        return self.free


def squeeze(words: Words, work: Work, limit: float, policy: Fill = KEEP) -> tuple[float, Words]:
    """The cost (the largest span of a rank), and the words with what was put into their gaps.

    Words without weight gradients get them where the rank would wait, or needs the room; others are kept.
    """
    ranks = [_Rank(word, times, limit, policy) for word, times in zip(words, work.times, strict=True)]
    ranks[0].ready[FA] = [0.0] * words[0].count(FA)
    wires = [[0.0, 0.0] for _ in ranks]  # until when bytes are under way from a rank, down and up
    events = [(0.0, 0)]
    while events:
        now, at = heappop(events)
        rank = ranks[at]
        if rank.free > now or (kind := rank.choose(now)) is None:
            continue
        end = rank.run(kind, now)
        heappush(events, (end, at))
        if hop := work.hops[at][kind]:
            if hop.rank != at:
                wires[at][kind % 2] = end = max(end, wires[at][kind % 2]) + hop.wire
                heappush(events, (end + hop.latency, hop.rank))
            ranks[hop.rank].ready[hop.kind].append(end + hop.latency)
    return max(rank.free - rank.began for rank in ranks), [rank.order for rank in ranks]


# Of some hundred shapes, tried under limits for p = 4 to 14 at equal and unequal costs: those that between them come
# nearly as close to the lower bound as all do.
SHAPES = (
    Shape((0, 0, 0, 0), (0, 0, 0)),
    Shape((0, 0, 0, 0), (1, 0, 0)),
    Shape((0, 0, 0, 0), (0, 2, 0)),  # V-Min, unless p = 1 mod 3, which is the first
    Shape((1, 0, 1, 0), (0, 0, 1)),  # V-Half, p odd
    Shape((0, 1, 0, 0), (0, 2, 1)),
    Shape((0, 1, 0, 0), (1, 3, 4)),
    Shape((0, 1, 0, 0), (1, 5, 3)),
    Shape((1, 0, 0, 1), (0, 2, 0)),
    Shape((0, 1, 1, 0), (2, 2, 2)),
    Shape((0, 1, 0, 1), (2, 4, 5)),
    Shape((1, 1, 0, 1), (0, 0, 1)),
    Shape((0, 1, 1, 1), (0, 0, 0)),
    Shape((1, 1, 1, 1), (1, 1, 0)),
    Shape((0, 3, 1, 0), (2, 2, 0)),
    Shape((0, 2, 0, 1), (3, 3, 5)),
    Shape((1, 0, 2, 0), (4, 4, 2)),
    Shape((2, 1, 0, 1), (3, 0, 1)),
    Shape((3, 1, 2, 0), (1, 5, 5)),
)
STRETCHES = [quarters / 4 for quarters in range(24, -1, -1)]

Make = Callable[[int], Words]  # microbatches -> words


def fitting(ranks: int, limit: int) -> list[Make]:
    """The words of every shape, stretched as far as the limit allows; the period grows until one fits at all."""
    for period in count(6):
        found: dict[str, Make] = {}
        for shape in SHAPES:
            tries = (block(ranks, shape, stretch, period) for stretch in STRETCHES)
            if (fit := next((slots for slots in tries if in_flight(slots, period) <= limit), None)) is not None:
                found[repr(fit)] = partial(repeat, fit, period)
        if found:
            return list(found.values())
    raise AssertionError("one microbatch at a time fits in two chunks")


def best_words(plan: Plan, costs: Costs, limit: int, orders: Sequence[Make]) -> Words:
    """The fastest words with at most so many chunks in flight on a rank: one of the orders given, or out of blocks.

    All are tried on as many microbatches as show a warm-up, a steady phase and a cool-down, the best few on all.
    """
    work, few = Work.of(plan, costs), min(plan.microbatches, 2 * plan.ranks + 4)
    makes: list[Make] = [partial(_bare, order) for order in orders]
    makes += [make for most in {min(limit, 2 * plan.ranks), limit} for make in fitting(plan.ranks, most)]
    patience = (0.0,) if work.even else (0.0, 1.0)
    ways = [(make, Fill(reorder, part)) for make in makes for reorder in (False, True) for part in patience]
    ways.sort(key=lambda way: squeeze(way[0](few), work, limit, way[1])[0])
    found = [squeeze(order(plan.microbatches), work, limit) for order in orders]
    found += [squeeze(make(plan.microbatches), work, limit, policy) for make, policy in ways[:4]]
    return min(found, key=lambda result: result[0])[1]


def _bare(order: Make, microbatches: int) -> Words:
    """An order's words without its weight gradients."""
    return [[kind for kind in word if kind <= IA] for word in order(microbatches)]
