"""Orders on the V placement: building blocks, repeated, squeezed and reordered under a memory limit. No torch.

A rank runs six kinds of passes, each in microbatch order, so its order is a word of kinds: the number of equal kinds
before it gives the microbatch. A building block is the passes of one microbatch, each in a slot of its rank, such that
a microbatch can follow the one before it after a period (Qi et al. 2024, "Pipeline Parallelism with Controllable
Memory", arXiv 2405.15362). Invariants:

- The words of all ranks come from one timeline, so ranks that follow their words never deadlock. A pass runs before its
  turn only when all its inputs are there.
- After its next pass, and after all passes of its word, a rank is within the limit if it runs its weight gradients in
  time; so it never waits for memory that no pass frees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import count
from math import inf
from typing import NamedTuple

from fpipe.costs import ROUNDING, Costs
from fpipe.effects import Effect
from fpipe.plan import Plan
from fpipe.schedules import work as passes_of
from fpipe.schedules.filling import Filled, Filling
from fpipe.schedules.list_scheduling import ListScheduler, follow
from fpipe.schedules.requirements import a_v
from fpipe.schedules.work import Room, Words, Work

# A microbatch passes down the ranks through their chunks a, up through their chunks b, and back; then weight gradients.
FA, FB, IB, IA, WB, WA = range(6)
CHUNK = (0, 1, 1, 0, 1, 0)

Word = Sequence[int]
Block = list[list[float]]  # when a rank starts each of the first four kinds


def effects(word: Word, rank: int, plan: Plan) -> Iterator[Effect]:
    """Return the effects of a word."""
    numbers = passes(rank, plan)
    return passes_of.effects((numbers[kind] for kind in word), plan.stages)


def passes(rank: int, plan: Plan) -> list[int]:
    """Return the scheduler's numbers of a rank's passes, by kind."""
    stages = plan.stages_on(rank)
    return [kind // 2 * plan.stages + stages[chunk] for kind, chunk in enumerate(CHUNK)]


class Shape(NamedTuple):
    """The slots that a building block waits more than it has to, at each hop of its four ways and at its three turns.

    The waits at hops are relative; `block` multiplies them by its stretch.
    """

    hops: tuple[int, int, int, int]
    turns: tuple[int, int, int]


def block(ranks: int, shape: Shape, stretch: float = 1.0, period: int = 6) -> Block:
    """Return the earliest slots of a microbatch that leave room for the same block every period (modulo scheduling).

    >>> block(ranks=2, shape=Shape((0, 0, 0, 0), (0, 0, 0)))
    [[0.0, 3.0, 4.0, 7.0], [1.0, 2.0, 5.0, 6.0]]
    """
    slots: Block = [[] for _ in range(ranks)]
    time = 0.0
    for kind in (FA, FB, IB, IA):
        down = kind in (FA, IB)
        for n, rank in enumerate(range(ranks) if down else reversed(range(ranks))):
            if n:
                time += stretch * shape.hops[kind]
            elif kind:
                time += shape.turns[kind - 1]
            time = _slot(time, slots[rank], period)
            slots[rank].append(time)
            time += 1
    return slots


def _slot(time: float, taken: Iterable[float], period: int) -> float:
    """Return the earliest slot from `time` that overlaps no taken slot in any period. Three taken slots leave one."""
    for other in taken:
        after = (time - other) % period
        if not 1 <= after <= period - 1:
            return _slot(time + (1 - after) % period, taken, period)
    return time


def in_flight(slots: Block, period: int) -> int:
    """Return the most chunks between forward and input gradient on a rank, if a block is repeated without end."""
    return max(
        sum(int((now - f) // period - (now - i) // period) for f, i in ((fa, ia), (fb, ib)))
        for fa, fb, ib, ia in slots
        for now in (fa, fb)
    )


def repeat(slots: Block, period: int, microbatches: int) -> Words:
    """Return the words of a repeated block, without weight gradients."""
    passes = [
        [(t + period * m, kind) for kind, t in enumerate(starts) for m in range(microbatches)] for starts in slots
    ]
    return [[kind for _, kind in sorted(times)] for times in passes]


class Fill(NamedTuple):
    """The use of the time in which the next pass of a rank's word can't run.

    Args:
        reorder: run a later pass of the word that can.
        patience: run no other pass, a weight gradient for example, if the next pass is known to become ready within
            this part of the other pass's time.
    """

    reorder: bool = False
    patience: float = 0.0


KEEP = Fill()


class _Follower:
    """One rank that follows its word.

    Args:
        passes: by kind, the scheduler's number of the pass.
        late: weight gradients to run, if the word has none.
        order: the kinds that it has run.
    """

    def __init__(self, state: ListScheduler, rank: int, word: Word, limit: float, fill: Fill) -> None:
        self.state, self.rank, self.word, self.limit, self.fill = state, rank, deque(word), limit, fill
        self.passes = passes(rank, state.plan)
        self.times = [state.work.times[at] for at in self.passes]
        self.adds_weights = not any(kind > IA for kind in word)
        self.late, self.order = deque[int](), list[int]()

    def choose(self, now: float) -> int | None:
        """Return the pass to run now, and take it off the word."""
        due = self._arrival(self.word[0]) if self.word else inf
        kind = self._next(now, due)
        if kind is None:
            return None
        if kind in (IB, IA) and self.adds_weights:
            self.late.append(kind + 2)
        self.order.append(kind)
        return self.passes[kind]

    def _next(self, now: float, due: float) -> int | None:
        if due <= now:
            if self.word[0] > FB or self.state.live[self.rank] < self.limit:
                return self.word.popleft()
        elif self.word and self.fill.reorder and (early := self._early(now, due)) is not None:
            self.word.remove(early)
            return early
        if self.late and not now < due < now + self.fill.patience * self.times[self.late[0]]:
            return self.late.popleft()
        return None

    def _arrival(self, kind: int) -> float:
        return self.state.arrival(self.passes[kind])

    def _early(self, now: float, due: float) -> int | None:
        """Return a later pass of the word that can run, if it takes no memory that the passes before it need."""
        (fa, fb, ib, ia, *_), done = self.passes, self.state.done
        live = self.state.live[self.rank]
        balance, peak, seen = done[fa] + done[fb] - done[ib] - done[ia], 0, 0
        for kind in self.word:
            if not seen >> kind & 1:
                seen |= 1 << kind
                room = kind > FB or max(peak, live) < self.limit
                if room and self._arrival(kind) <= now and due >= now + self.fill.patience * self.times[kind]:
                    return kind
                if seen == 0b1111:
                    break
            balance += 1 if kind < IB else -1
            peak = max(peak, balance)
        return None


def squeeze(words: Words, work: Work, limit: float, fill: Fill = KEEP) -> tuple[float, Words]:
    """Return the cost (the largest span of a rank), and the words with the passes that fill their gaps.

    Words without weight gradients get them where the rank would wait, or needs the room; others are kept.
    """
    state = ListScheduler(work, words[0].count(FA))
    ranks = [_Follower(state, rank, word, limit, fill) for rank, word in enumerate(words)]
    cost = state.run(lambda rank, now: ranks[rank].choose(now))
    return cost, [follower.order for follower in ranks]


# About a hundred shapes were tried under limits for p = 4 to 14, at equal and unequal costs. These come nearly as close
# to the lower bound as all of them.
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
Order = Callable[[int, int], Words]  # ranks, microbatches -> words


def fitting(ranks: int, limit: int) -> list[Make]:
    """Return the words of every shape, stretched as far as the limit allows; the period grows until one shape fits."""
    for period in count(6):
        makes: dict[str, Make] = {}
        for shape in SHAPES:
            blocks = (block(ranks, shape, stretch, period) for stretch in STRETCHES)
            if (fit := next((slots for slots in blocks if in_flight(slots, period) <= limit), None)) is not None:
                makes[repr(fit)] = partial(repeat, fit, period)
        if makes:
            return list(makes.values())
    raise AssertionError("one microbatch at a time fits in two chunks")


def ordered(
    schedule: str, rank: int, plan: Plan, costs: Costs | None, order: Order, limit: int, orders: tuple[Order, ...]
) -> Iterator[Effect]:
    """Yield a rank's effects: in a named order if all passes take the same time, else in the best order for the costs.

    Raises:
        ScheduleError: the placement is not `Placement.v(ranks)`.
    """
    a_v(schedule, plan)
    if costs is None or Work.of(plan, costs).even:
        words = order(plan.ranks, plan.microbatches)
    else:
        words = best_words(plan, costs, limit, orders)
    yield from effects(words[rank], rank, plan)


@lru_cache(maxsize=8)
def best_words(plan: Plan, costs: Costs, limit: int, orders: tuple[Order, ...]) -> Words:
    """Return the fastest words with at most `limit` chunks in flight on a rank: of the given orders, or from blocks.

    All are tried on as many microbatches as show a warm-up, a steady phase and a cool-down, the best few on all.
    """
    work, few = Work.of(plan, costs), min(plan.microbatches, 2 * plan.ranks + 4)
    named = [partial(order, plan.ranks) for order in orders]
    makes: list[Make] = [partial(_without_weights, make) for make in named]
    makes += [make for most in {min(limit, 2 * plan.ranks), limit} for make in fitting(plan.ranks, most)]
    patience = (0.0,) if work.even else (0.0, 1.0)
    ways = [(make, Fill(reorder, part)) for make in makes for reorder in (False, True) for part in patience]
    ways.sort(key=lambda way: squeeze(way[0](few), work, limit, way[1])[0])
    results = [squeeze(make(plan.microbatches), work, limit) for make in named]
    results += [squeeze(make(plan.microbatches), work, limit, fill) for make, fill in ways[:4]]
    return min(results, key=lambda result: result[0])[1]


def filled_blocks(work: Work, room: Room, chunks: int, words: Words) -> Words:
    """Return the fastest of words of passes, and of blocks whose weight gradients are filled in within a room.

    Args:
        chunks: in flight on a rank, each until its input gradient.
        words: that fit the room, with weight gradients.
    """
    plan, filling = work.plan, Filling(work, room)
    best, least = Filled(follow(words, work), words), max(filling.busy) * (1 + ROUNDING)
    for make in fitting(plan.ranks, chunks) if chunks > 1 else ():
        kinds = make(plan.microbatches)
        blocks = [[passes(rank, plan)[kind] for kind in word] for rank, word in enumerate(kinds)]
        sequence = filling.sequence(blocks) or []
        for target in (least, best.cost, inf):
            if best.cost > least and filling.cost(sequence, target) < best.cost * (1 - ROUNDING):
                best = filling.fill(blocks, target)
    return best.words


def _without_weights(make: Make, microbatches: int) -> Words:
    return [[kind for kind in word if kind <= IA] for word in make(microbatches)]
