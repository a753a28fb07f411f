"""Search all named schedules for the fastest under a memory limit, with a lower bound of the cost. No torch.

Costs are given for the plan's own stages. A schedule with another number of stages on a rank gets the costs of the same
model split that way (`recut`), so that all schedules are compared on the same work. Where the stages have to stay, they
are placed on the ranks in several ways. Where they are layers, of which stages are made, the cuts are searched too
(`layouts`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from random import Random
from typing import Literal

from fpipe._format import format_bytes, sized
from fpipe.costs import ROUNDING, Costs
from fpipe.errors import ScheduleError
from fpipe.errors.arguments import checked
from fpipe.plan import Plan
from fpipe.programs.footprint import check_limit, footprint
from fpipe.programs.lowering import lower
from fpipe.schedules.catalogue import named
from fpipe.schedules.descent import Layouts
from fpipe.schedules.found import Found, best_of, best_of_each, describe_chunks, fastest, has_parameters
from fpipe.schedules.lengths import by_length
from fpipe.schedules.space import CHUNKS, Space
from fpipe.timelines.simulator import simulate_programs

Order = Literal["drawn", "peak", "search"]
EXCHANGED = 60_000  # effects that are simulated to exchange microbatches
FINALISTS = 3  # results of schedules that order under limits, which then have all of the effort
LEAST_EXCHANGES, MOST_EXCHANGES = 4, 8  # for each microbatch at least, and for each pair of them at most


@checked()
def search(
    plan: Plan,
    costs: Costs = Costs(),
    memory_limit: float | None = None,
    *,
    memory_limit_bytes: float | None = None,
    chunks: Sequence[int] = CHUNKS,
    recut: bool = True,
    layouts: bool = False,
    copies: bool = True,
    host: float = 0.0,
    names: Sequence[str] | None = None,
    order: Order = "drawn",
    effort: float = 1.0,
    progress: Callable[[str], None] | None = None,
) -> Found:
    """Return the named schedule of least cost within a memory limit, each at its best number of chunks.

    With replicas, parameters that are whole on each of them are tried, and shards, with several numbers of stages that
    are whole at a time.

    Args:
        plan: ranks, microbatches, replicas and the stages of the costs. A chain is split anew for a schedule with
            another number of stages; with other edges or with ties, only schedules with as many stages are tried. Of
            the halves of backwards, those that exist by `plan.trained` cost time and memory.
        memory_limit: microbatches in flight on a rank, of its share of the model (1/ranks of it).
        memory_limit_bytes: bytes on a rank, of all that `fpipe.footprint` counts from the sizes in the costs.
        chunks: the numbers of stages on a rank to try, if the model can be split that way.
        recut: False if the stages stay as they are, each on one rank. Schedules that take any placement then have them
            in a loop, down the ranks and back up, and in blocks of neighbours, so that the number of ranks need not
            divide that of the stages; `chunks` is not used.
        layouts: whether the plan's stages are layers: their number of ranks counts, not where they are. Each stage is
            then made of neighbouring layers, and the cuts are searched with the placement and the schedule. Where a
            limit in bytes is exceeded, residuals are moved to the host, if the costs say what a copy takes, or
            recomputed, if that is faster than what fits without. The result has `layers`, `cuts` and `offload`.
        copies: False if no stage may have copies on several ranks, as where one is stateful. With layers, one stage of
            a chain may have copies, if their number divides that of the microbatches; without, DualPipe alone has some.
        host: with layers, the time that each piece of a stage takes beside those of its layers: to find values, to call
            the piece, to post sends and receives. It weighs against many stages, and against backwards in halves. Like
            the times of layers it goes with the lengths of microbatches; the bound does not have it.
        names: of the schedules to try; by default all.
        order: of microbatches with `costs.scale`: "drawn", as they are; "peak", that of `fpipe.by_length`; or "search",
            the better of the two, improved by exchanging microbatches under the best schedule. A schedule by costs then
            orders anew for the order that was found, but not on layouts. That is no search of all orders: of many
            microbatches, few exchanges are tried. The result has `order`, and costs in that order. The bound is one for
            that order; of "search", for any.
        effort: of `zb_auto` and `v_auto`, in times of the usual. Each placement and cut has a part of it, and the best
            results all, unless they cost no more than the bound. The result has the `effort` of its schedule.
        progress: called with the name of each candidate.

    Of equal costs the lower peak wins: in bytes if the costs have parameters, else in microbatches.

    Raises:
        ScheduleError: the costs do not fit the plan, or have no sizes to compare with a limit in bytes, or no schedule
            fits the limit; the message gives the least that would.

    >>> from fpipe import Placement
    >>> result = search(Plan(Placement.loop(4), 8), memory_limit=4, chunks=(1, 2))
    >>> result.name, result.plan.placement, result.timeline.cost, result.lower_bound
    ('zb-v', Placement((0, 1, 2, 3, 3, 2, 1, 0)), 24.0, 24.0)
    >>> costs = Costs(parameters=100, residuals=10, gather=0.25, scatter=0.5)
    >>> result = search(Plan(Placement.loop(2), 4, replicas=4), costs, memory_limit_bytes=270, chunks=(1, 2))
    >>> result.name, result.resident, result.bytes
    ('zb-auto', 2, 245.0)
    >>> result = search(Plan(Placement([0, 0, 1, 2]), 8), memory_limit=3, recut=False)  # four stages on three ranks
    >>> result.name, result.plan.placement, result.timeline.cost, result.lower_bound
    ('zb-auto', Placement((0, 1, 2, 0)), 48.0, 48.0)
    >>> layers = Plan(Placement([0, 0, 0, 0, 1, 1]), 8)  # six layers on two ranks
    >>> result = search(layers, Costs(*[[1, 1, 1, 1, 1, 3]] * 3), layouts=True, names=["1f1b", "zb-h1"])
    >>> result.name, result.layers, result.timeline.cost, result.lower_bound
    ('zb-h1', (4, 2), 100.0, 96.0)
    """
    check_limit(memory_limit_bytes, costs)
    costs.check(plan)
    drawn, peak = [*range(plan.microbatches)], by_length(costs.scale)
    tried = {"drawn": [drawn], "peak": [peak or drawn], "search": [drawn, peak] if peak else [drawn]}
    any_order = order == "search" and bool(peak)

    def in_order(numbers: Sequence[int], names: Sequence[str] | None) -> Found:
        ordered = reordered(costs, numbers)
        space = Space.of(
            plan,
            ordered,
            memory_limit,
            chunks,
            recut,
            layouts,
            host,
            names,
            progress,
            any_order=any_order,
            copies=copies,
            effort=effort,
        )
        return replace(_search(space, memory_limit, memory_limit_bytes), order=tuple(numbers))

    results = [in_order(numbers, names) for numbers in tried[order]]
    best = replace(best_of(results), lower_bound=min(result.lower_bound for result in results))
    if not any_order:
        return best
    exchanged, entry = _exchanged(best, memory_limit_bytes), named(best.name)
    if (entry.limited or entry.by_costs) and not layouts and exchanged.order != best.order:
        with suppress(ScheduleError):  # such as where the limit in bytes is not kept by what is found
            again = replace(in_order(exchanged.order, [best.name]), lower_bound=best.lower_bound)
            return best_of([exchanged, again])
    return exchanged


def reordered(costs: Costs, order: Sequence[int]) -> Costs:
    """Return costs with the factors of microbatches in another order.

    >>> reordered(Costs(scale=[1, 2, 3]), [0, 2, 1]).scale
    (1.0, 3.0, 2.0)
    """
    if not costs.scale and not costs.sizes:
        return costs
    scale, sizes = ([factors[m] for m in order] if factors else () for factors in (costs.scale, costs.sizes))
    return replace(costs, scale=scale, sizes=sizes)


def _exchanged(found: Found, limit_bytes: float | None) -> Found:
    """Return the result with pairs of microbatches exchanged, wherever that makes its programs cost less.

    One in two exchanges is one of neighbours, which is better where the order is good already.
    """
    plan, programs = found.plan, lower(found.schedule, found.plan, resident=found.resident, offload=found.offload)
    rng, count = Random(0), plan.microbatches
    tries = max(LEAST_EXCHANGES * count, EXCHANGED // sum(map(len, programs.values())))
    for n in range(min(tries, MOST_EXCHANGES * count**2) if count > 1 else 0):
        a, b = rng.sample(range(count), 2)
        if n % 2:
            b = a - 1 if a else 1
        numbers = [*range(count)]
        numbers[a], numbers[b] = b, a
        costs = reordered(found.costs, numbers)
        timeline = simulate_programs(programs, costs)
        if timeline.cost >= found.timeline.cost * (1 - ROUNDING):
            continue
        account = footprint(programs, costs) if found.footprint and sized(costs) else found.footprint
        if limit_bytes is None or max(each.total for each in account) <= limit_bytes * (1 + ROUNDING):
            order = tuple(found.order[m] for m in numbers)
            found = replace(found, costs=costs, timeline=timeline, footprint=account, order=order)
    return found


def _search(space: Space, memory_limit: float | None, memory_limit_bytes: float | None) -> Found:
    """Return the best result for one order of microbatches."""
    if space.layouts:
        candidates = Layouts(space, memory_limit, memory_limit_bytes).results()
    else:
        candidates = _candidates(space, memory_limit, memory_limit_bytes)
    within = [result for result in candidates if result.is_within(memory_limit, memory_limit_bytes)]
    if not within:
        raise _too_small(space, memory_limit, memory_limit_bytes, candidates)
    bound = min(result.lower_bound for result in candidates)
    return replace(best_of(within), lower_bound=bound)


def _candidates(space: Space, limit: float | None, limit_bytes: float | None) -> list[Found]:
    """Return all results, where schedules that order under limits have a part of the effort, and the best ones all.

    Those whose bound is not below the best result are left out of the second round.
    """
    quick = space.quick
    results = list(quick.candidates(limit)) if limit_bytes is None else quick.every(limit, limit_bytes)
    within = [result for result in results if result.is_within(limit, limit_bytes)]
    least = min((result.timeline.cost for result in within), default=inf) * (1 - ROUNDING)
    limited = [result for result in within if named(result.name).limited and result.lower_bound < least]
    again = space.again(best_of_each(limited, fastest)[:FINALISTS])
    names = [entry.name for entry in space.entries]
    return sorted([*again, *results], key=lambda result: names.index(result.name))


def _too_small(
    space: Space, memory_limit: float | None, memory_limit_bytes: float | None, candidates: Sequence[Found]
) -> ScheduleError:
    if memory_limit_bytes is not None:
        least = min(candidates, key=lambda result: result.bytes)
        how = f"{least.name} with {describe_chunks(least)}"
        return ScheduleError(
            f"no schedule that is known keeps to {format_bytes(memory_limit_bytes)} on a rank"
            + ("" if memory_limit is None else f" and to {memory_limit:g} microbatches in flight")
            + f": the least is {format_bytes(least.bytes)}, of {how}; more replicas or ranks need less"
        )
    lowest = min(result.peak for result in space.quick.candidates(max(1.0, memory_limit or 1.0)))
    return ScheduleError(
        f"no schedule that is known keeps to {memory_limit:g} microbatches in flight: the least is {lowest:g}"
    )


@checked()
def pareto(
    plan: Plan,
    costs: Costs = Costs(),
    *,
    memory_limit_bytes: float | None = None,
    chunks: Sequence[int] = CHUNKS,
    copies: bool = True,
    effort: float = 1.0,
    progress: Callable[[str], None] | None = None,
) -> list[Found]:
    """Return the Pareto front of cost and peak memory, smallest peak first.

    Memory is in bytes if the costs have parameters or there is a limit in bytes, else in microbatches in flight. The
    bound of each result is one in as much memory as it has itself.

    Args:
        chunks, copies, effort, progress: as of `search`.
    """
    check_limit(memory_limit_bytes, costs)
    space = Space.of(plan, costs, None, chunks, progress=progress, copies=copies, effort=effort)
    every = space.quick.every(None, memory_limit_bytes, all_limits=True)
    by_bytes = has_parameters(costs) or memory_limit_bytes is not None
    if memory_limit_bytes is not None:
        within = [result for result in every if result.is_within(None, memory_limit_bytes)]
        if not within:
            raise _too_small(space, None, memory_limit_bytes, every)
        every = within

    def memory(result: Found) -> float:
        return result.bytes if by_bytes else result.peak

    again = space.again(
        result
        for result in _front(every, memory)
        if named(result.name).limited and result.timeline.cost > result.lower_bound * (1 + ROUNDING)
    )
    every = [*(result for result in again if result.is_within(None, memory_limit_bytes)), *every]
    front = _front(every, memory)
    models = {result.plan: result.costs for result in every}

    def bound(result: Found) -> float:
        limits = (None, result.bytes) if by_bytes else (result.peak, None)
        return min(space.bound(plan, costs, *limits) for plan, costs in models.items())

    return [replace(result, lower_bound=bound(result)) for result in front]


def _front(results: Sequence[Found], memory: Callable[[Found], float]) -> list[Found]:
    front: list[Found] = []
    for result in sorted(results, key=lambda result: (memory(result), *fastest(result))):
        if not front or result.timeline.cost < front[-1].timeline.cost * (1 - ROUNDING):
            front.append(result)
    return front
