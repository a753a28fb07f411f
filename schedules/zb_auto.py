"""The automatic zero-bubble schedule: an order for the costs at hand, under a memory limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from operator import le

from fpipe.costs import ROUNDING, Costs
from fpipe.effects import Forward
from fpipe.errors import ScheduleError
from fpipe.plan import Plan, Schedule
from fpipe.programs.residence import Residence
from fpipe.schedules.annealing import LONG, USUAL, check_effort, multistart
from fpipe.schedules.bounds import Chain, is_chain
from fpipe.schedules.filling import Filled, Filling
from fpipe.schedules.list_scheduling import follow, greedy
from fpipe.schedules.modulo import repeated
from fpipe.schedules.one_f_one_b import one_f_one_b
from fpipe.schedules.table import from_table
from fpipe.schedules.wave import near, wave
from fpipe.schedules.within_bytes import whole_microbatches, within_bytes
from fpipe.schedules.work import INPUT, WEIGHT, Room, Words, Work, by_rank, peaks, table
from fpipe.schedules.zero_bubble import in_rounds


def zb_auto(
    plan: Plan,
    costs: Costs = Costs(),
    memory_limit: float | Sequence[float] | None = None,
    *,
    memory_limit_bytes: float | None = None,
    resident: Residence | int | None = None,
    effort: float = 1.0,
) -> Schedule:
    """Return the order of least cost (the largest span of a rank) that a search finds for these costs and this limit.

    After Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 3.1: forwards ahead up to the limit, then
    input gradients and forwards in turn, and weight gradients where a rank would wait or its memory is full. With one
    stage on each rank, how far each rank runs ahead is searched, ZB-H1 and ZB-H2 included. At unit costs, c = 0 and
    p <= limit <= m the cost is 3m + max(0, 2p - 1 - limit).

    It also takes several stages on a rank, on any placement, where it tries rules of list scheduling, and building
    blocks that repeat, found by software pipelining; `interleaved_zb` and `zb_v` are orders by formula. With copies of
    stages, it tries 1F1B in halves in place of building blocks.

    Args:
        costs: of stages and transfers; with factors by microbatch, for microbatches in that order.
        memory_limit: the most microbatches in flight on a rank, or on each; a chunk of v counts 1/v, from its forward
            to its weight gradient. None: no limit.
        memory_limit_bytes: bytes on a rank, of all that `fpipe.footprint` counts from the sizes in the costs. An input
            gradient frees residuals, and keeps deferred values for its weight gradient.
        resident: as in `fpipe.lower`, for the account of bytes.
        effort: how long an order is annealed, in times of the usual: from 2 on so often, with other random numbers.

    Raises:
        ScheduleError: a limit under 1, or in bytes one that no order keeps to; costs or limits that don't fit the plan,
            or an effort of 0.

    >>> from fpipe import Placement, draw
    >>> plan = Plan(Placement.loop(3), 6)
    >>> print(draw(zb_auto(plan, Costs(), memory_limit=4), plan))
    rank 0  F0 F1 F2 F3 .  I0 W0 F4 I1 W1 F5 I2 I3 W2 W3 I4 W4 I5 W5
    rank 1  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
    rank 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5
    """
    limits, work = _limits(plan, memory_limit), Work.of(plan, costs)
    check_effort(effort)
    if memory_limit_bytes is None:
        return from_table(table(_best(work, Room.counted(plan, limits), limits, effort).words, plan))

    def order(room: Room) -> Words:
        whole = [*map(min, limits, whole_microbatches(plan, room))]
        words = _best(work, room, whole, effort).words
        if memory_limit is None or all(map(le, peaks(words, work), [limit * (1 + ROUNDING) for limit in limits])):
            return words
        return _best(work, Room.counted(plan, whole), whole, effort).words

    def least() -> Words:
        ones = [1.0] * plan.ranks
        return _best(work, Room.counted(plan, ones), ones, effort).words

    return within_bytes(plan, costs, memory_limit_bytes, resident, order, least)


def _limits(plan: Plan, limit: float | Sequence[float] | None) -> list[float]:
    """Return the most microbatches in flight, for each rank."""
    limits = by_rank(plan, limit)
    for rank, most in enumerate(limits):
        if not most >= 1:
            raise ScheduleError(f"memory_limit is {most} on rank {rank}: at least 1, one whole microbatch in flight")
    return [min(most, plan.microbatches) for most in limits]


def _best(work: Work, room: Room, whole: Sequence[float], effort: float) -> Filled:
    """Return the fastest order that fits the room.

    Args:
        whole: by rank, how many microbatches may be in flight.
    """
    plan, filling = work.plan, Filling(work, room)
    if is_chain(plan):
        chain = Chain(work, room)
        first, bound = wave(filling, chain), chain.bound()
        if first.cost <= bound * near(plan):
            return first
        others = [_by_rules(filling, whole, bound), *_by_formula(work, min(whole))]
    else:
        bound = max(filling.busy)
        first, others = _by_rules(filling, whole, bound), []
        if first.cost > bound * (1 + ROUNDING):
            others = [repeated(filling)] if plan.cycle == 1 else [*_in_turn(work, whole)]
    fastest = min([first, *others], key=lambda filled: filled.cost)
    # On a chain moves may lead further from the order of forwards ahead than from a faster one of rules; if it is the
    # fastest, it is annealed twice.
    starts, settings = ([fastest, first], USUAL) if is_chain(plan) else ([fastest], LONG)
    return multistart(filling, starts, bound, effort, settings)


def _by_formula(work: Work, limit: float) -> Iterator[Filled]:
    """Yield ZB-H1, and the member of its family (up to ZB-H2) that uses all of the memory."""
    plan, low, high = work.plan, work.plan.ranks, 2 * work.plan.ranks - 1
    most = high if limit >= plan.microbatches else int(min(limit, high))
    for peak in sorted({low, most}) if low <= most else ():
        words = [[work.pass_of(effect) for effect in in_rounds(rank, plan, peak)] for rank in range(plan.ranks)]
        yield Filled(follow(words, work), words)


def _in_turn(work: Work, whole: Sequence[float]) -> Iterator[Filled]:
    """Yield 1F1B, each backward in halves, where a rank has one stage and room for it."""
    plan = work.plan
    if any(len(plan.stages_on(rank)) > 1 for rank in range(plan.ranks)):
        return
    words = []
    for rank in range(plan.ranks):
        (place,) = work.on(rank)
        forward, *halves = range(place, len(work.times), work.count)
        effects = one_f_one_b(rank, plan)
        words.append([at for e in effects for at in ([forward] if isinstance(e, Forward) else halves)])
    if all(map(le, peaks(words, work), whole)):
        yield Filled(follow(words, work), words)


def _by_rules(filling: Filling, whole: Sequence[float], bound: float) -> Filled:
    """Return the fastest order that rules lead to, with their own weight gradients or filled in anew."""
    work, room, best = filling.work, filling.room, Filled(inf, [])
    least = bound * (1 + ROUNDING)
    frees_early = any(d < r for d, r in zip(room.deferred, room.residuals, strict=True))
    for until in (WEIGHT, INPUT) if frees_early else (WEIGHT,):
        for filled in greedy(work, whole, until=until):
            if until == WEIGHT and filled.cost < best.cost:
                best = filled
            words = [[at for at in word if at < filling.count] for word in filled.words]
            if best.cost > least:
                cost, target = filling.best(words, (least, min(best.cost, filled.cost), inf))
                if cost < best.cost * (1 - ROUNDING):
                    best = filling.fill(words, target)
            if best.cost <= least:
                return best
    return best
