"""Search all named schedules for the fastest under a memory limit, with a lower bound of the cost. No torch.

Costs are given for the plan's own stages. A schedule with another number of stages on a rank gets the costs of the same
model split that way (`recut`), so that all schedules are compared on the same work. Where the stages have to stay, they
are placed on the ranks in several ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from math import ceil, inf
from random import Random
from typing import Literal

from fpipe._format import counted, extent, format_bytes, number, sized
from fpipe.costs import Costs
from fpipe.effects import (
    Backward,
    Forward,
)
from fpipe.errors import ScheduleError
from fpipe.errors.arguments import checked
from fpipe.plan import Placement, Plan, Schedule
from fpipe.programs.footprint import RankBytes, check_limit, footprint
from fpipe.programs.lowering import lower
from fpipe.programs.program import Programs, plan_of
from fpipe.programs.residence import residence
from fpipe.schedules.bounds import lower_bound
from fpipe.schedules.catalogue import CATALOGUE, CatalogueEntry, named, shares
from fpipe.schedules.cuts import existing, recut_for, recut_trained
from fpipe.schedules.lengths import by_length
from fpipe.timelines.simulator import simulate_programs
from fpipe.timelines.timeline import Timeline

Order = Literal["drawn", "peak", "search"]
EXCHANGED = 60_000  # effects that are simulated to exchange microbatches
Played = tuple[Timeline, int | None, tuple[RankBytes, ...]]
CHUNKS = (1, 2, 3, 4, 6, 8)  # the numbers of stages on a rank to try
MOST_LIMITED = 4  # the most for schedules that order under a limit, because these are slow for many stages
ROUNDING = 1e-9


@dataclass(frozen=True)
class Found:
    """A schedule with its plan, costs and predicted timeline.

    Args:
        name: in `CATALOGUE`.
        schedule, plan, costs: run it by `value_and_grad(pipeline, schedule, plan, resident=resident)`, or simulate it
            again.
        lower_bound: no program on any of the tried plans has a lower cost.
        resident: the number of stages that are whole on a rank at a time; None where parameters are not sharded.
        footprint: the account of each rank's bytes.
        order: the microbatches' numbers in the order in which they run; the costs are in that order.
    """

    name: str
    schedule: Schedule
    plan: Plan
    costs: Costs
    timeline: Timeline
    lower_bound: float
    resident: int | None = None
    footprint: tuple[RankBytes, ...] = ()
    order: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"<Found: {self.name}, {extent(self.plan)}, cost {number(self.timeline.cost)}, peak {number(self.peak)}>"

    @property
    def peak(self) -> float:
        """The most in flight on a rank, in microbatches of a rank's share of the model (1/ranks of it)."""
        return max(shares(self.timeline))

    @property
    def bytes(self) -> float:
        """The most bytes on a rank, as `fpipe.footprint` counts them."""
        return max(account.total for account in self.footprint)


@checked()
def search(
    plan: Plan,
    costs: Costs = Costs(),
    memory_limit: float | None = None,
    *,
    memory_limit_bytes: float | None = None,
    chunks: Sequence[int] = CHUNKS,
    recut: bool = True,
    names: Sequence[str] | None = None,
    order: Order = "drawn",
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
        names: of the schedules to try; by default all.
        order: of microbatches with `costs.scale`: "drawn", as they are; "peak", that of `fpipe.by_length`; or "search",
            the better of the two, improved by exchanging microbatches under the best schedule. The result has `order`,
            and costs in that order. The bound is one for that order; of "search", for any: the work of a rank.
        progress: called with the name of each candidate.

    Of equal costs the lower peak wins: in bytes if the costs have parameters, else in microbatches.

    Raises:
        ScheduleError: the costs do not fit the plan, or have no sizes to compare with a limit in bytes, or no schedule
            fits the limit; the message gives the least that would.

    >>> from fpipe import Placement
    >>> result = search(Plan(Placement.loop(4), 8), memory_limit=4)
    >>> result.name, result.plan.placement, result.timeline.cost, result.lower_bound
    ('zb-v', Placement((0, 1, 2, 3, 3, 2, 1, 0)), 24.0, 24.0)
    >>> costs = Costs(parameters=100, residuals=10, gather=0.25, scatter=0.5)
    >>> result = search(Plan(Placement.loop(2), 8, replicas=4), costs, memory_limit_bytes=270, chunks=(1, 2))
    >>> result.name, result.resident, result.bytes
    ('zb-auto', 2, 245.0)
    >>> result = search(Plan(Placement([0, 0, 1, 2]), 8), memory_limit=3, recut=False)  # four stages on three ranks
    >>> result.name, result.plan.placement, result.timeline.cost, result.lower_bound
    ('zb-auto', Placement((0, 1, 2, 0)), 48.0, 48.0)
    """
    check_limit(memory_limit_bytes, costs)
    costs.check(plan)
    drawn, peak = [*range(plan.microbatches)], by_length(costs.scale)
    tried = {"drawn": [drawn], "peak": [peak or drawn], "search": [drawn, peak] if peak else [drawn]}
    best: Found | None = None
    for numbers in tried[order]:
        space = _Space.of(plan, reordered(costs, numbers), memory_limit, chunks, recut, names, progress)
        found = replace(_search(space, memory_limit, memory_limit_bytes), order=tuple(numbers))
        best = found if best is None else _best([best, found])
    assert best is not None
    return _exchanged(best, memory_limit_bytes) if order == "search" and peak else best


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
    """Return the result with pairs of microbatches exchanged, wherever that makes its programs cost less."""
    plan, programs = found.plan, lower(found.schedule, found.plan, resident=found.resident)
    rng = Random(0)
    for _ in range(EXCHANGED // sum(map(len, programs.values()))):
        a, b = rng.sample(range(plan.microbatches), 2) if plan.microbatches > 1 else (0, 0)
        numbers = [*range(plan.microbatches)]
        numbers[a], numbers[b] = b, a
        costs = reordered(found.costs, numbers)
        timeline = simulate_programs(programs, costs)
        if timeline.cost >= found.timeline.cost * (1 - ROUNDING):
            continue
        account = footprint(programs, costs) if found.footprint and sized(costs) else found.footprint
        if limit_bytes is None or max(each.total for each in account) <= limit_bytes * (1 + ROUNDING):
            order = tuple(found.order[m] for m in numbers)
            found = replace(found, costs=costs, timeline=timeline, footprint=account, order=order)
    is_plain = found.costs.backward is None and found.costs.overlap is None
    return replace(found, lower_bound=sum(found.timeline.busy) / plan.ranks if is_plain else 0.0)


def _search(space: _Space, memory_limit: float | None, memory_limit_bytes: float | None) -> Found:
    """Return the best result for one order of microbatches."""
    if memory_limit_bytes is None:
        candidates = list(space.candidates(memory_limit))
    else:
        candidates = space.every(memory_limit, memory_limit_bytes)
    within = [
        result
        for result in candidates
        if (memory_limit is None or result.peak <= memory_limit * (1 + ROUNDING))
        and (memory_limit_bytes is None or result.bytes <= memory_limit_bytes * (1 + ROUNDING))
    ]
    if not within:
        raise _too_small(space, memory_limit, memory_limit_bytes, candidates)
    bound = min(result.lower_bound for result in candidates)
    return replace(_best(within), lower_bound=bound)


def _too_small(
    space: _Space, memory_limit: float | None, memory_limit_bytes: float | None, candidates: Sequence[Found]
) -> ScheduleError:
    if memory_limit_bytes is not None:
        least = min(candidates, key=lambda result: result.bytes)
        how = f"{least.name} with {describe_chunks(least)}"
        return ScheduleError(
            f"no schedule that is known keeps to {format_bytes(memory_limit_bytes)} on a rank"
            + ("" if memory_limit is None else f" and to {memory_limit:g} microbatches in flight")
            + f": the least is {format_bytes(least.bytes)}, of {how}; more replicas or ranks need less"
        )
    lowest = min(result.peak for result in space.candidates(max(1.0, memory_limit or 1.0)))
    return ScheduleError(
        f"no schedule that is known keeps to {memory_limit:g} microbatches in flight: the least is {lowest:g}"
    )


def describe_chunks(result: Found) -> str:
    """Return the number of stages on a rank, and how many of them are whole."""
    count = max(len(result.plan.stages_on(rank)) for rank in range(result.plan.ranks))
    stages = f"{counted(count, 'stage')} on a rank"
    return stages if result.resident is None else f"{stages}, {result.resident} of them whole at a time"


@checked()
def pareto(
    plan: Plan,
    costs: Costs = Costs(),
    *,
    memory_limit_bytes: float | None = None,
    chunks: Sequence[int] = CHUNKS,
    progress: Callable[[str], None] | None = None,
) -> list[Found]:
    """Return the Pareto front of cost and peak memory, smallest peak first.

    Memory is in bytes if the costs have parameters or there is a limit in bytes, else in microbatches in flight.
    """
    check_limit(memory_limit_bytes, costs)
    space = _Space.of(plan, costs, None, chunks, progress=progress)
    every = space.every(None, memory_limit_bytes)
    by_bytes = _has_parameters(costs) or memory_limit_bytes is not None
    if memory_limit_bytes is not None:
        within = [result for result in every if result.bytes <= memory_limit_bytes * (1 + ROUNDING)]
        if not within:
            raise _too_small(space, None, memory_limit_bytes, every)
        every = within

    def memory(result: Found) -> float:
        return result.bytes if by_bytes else result.peak

    front: list[Found] = []
    for result in sorted(every, key=lambda result: (memory(result), result.timeline.cost, result.timeline.makespan)):
        if not front or result.timeline.cost < front[-1].timeline.cost * (1 - ROUNDING):
            front.append(result)
    return front


def _has_parameters(costs: Costs) -> bool:
    return any(costs.parameters) if isinstance(costs.parameters, tuple) else bool(costs.parameters)


def _limits(largest: float, most: int = 16) -> list[float]:
    """Return limits from one microbatch up, in steps of at least half a microbatch, so that there are not too many."""
    halves = ceil(2 * largest)
    return [half / 2 for half in range(2, halves, ceil(halves / most))]


def _best(results: Sequence[Found]) -> Found:
    """Return the result of least cost, then lowest peak, then shortest makespan."""
    enough = min(result.timeline.cost for result in results) * (1 + ROUNDING)
    return min(
        (result for result in results if result.timeline.cost <= enough),
        key=lambda result: (
            result.bytes if _has_parameters(result.costs) else result.peak,
            result.timeline.makespan,
        ),
    )


@dataclass(frozen=True)
class _Space:
    """What is searched: schedules of the catalogue, each with several placements of one model."""

    plan: Plan
    costs: Costs
    entries: Sequence[CatalogueEntry]
    chunks: Sequence[int]
    recut: bool
    progress: Callable[[str], None] | None

    @classmethod
    def of(
        cls,
        plan: Plan,
        costs: Costs,
        memory_limit: float | None,
        chunks: Sequence[int],
        recut: bool = True,
        names: Sequence[str] | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> _Space:
        """Check the arguments of a search."""
        costs.check(plan)
        if memory_limit is not None and not memory_limit > 0:
            raise ScheduleError(f"the memory limit must be more than 0 microbatches, not {memory_limit!r}")
        if not chunks or min(chunks) < 1:
            raise ScheduleError(
                f"chunks must be numbers of stages on a rank, at least one, and each at least 1: {chunks!r}"
            )
        if names is not None and (isinstance(names, str) or not names):
            raise ScheduleError(f"names must be a list of schedules, at least one, such as ['1f1b'], not {names!r}")
        entries = [*CATALOGUE.values()] if names is None else [named(name) for name in names]
        if names is None:  # a model carries values from slice to slice, or it does not
            entries = [entry for entry in entries if entry.slices or plan.slices == 1]
            entries = [entry for entry in entries if plan.slices > 1 or entry.slices in (None, 1)]
        if not recut:
            entries = [entry for entry in entries if entry.placement != "both ways"]  # it has copies of stages
        return cls(plan, costs, entries, chunks, recut, progress)

    def every(self, memory_limit: float | None, limit_bytes: float | None) -> list[Found]:
        """Return all candidates; those that order under a limit also at lower limits than the given one."""
        every = list(self.candidates(memory_limit))
        if limit_bytes is not None:
            with suppress(ScheduleError):  # none takes this limit
                every += self.candidates(memory_limit, limit_bytes, only_limited=True)
        for limit in _limits(_best(every).peak):
            with suppress(ScheduleError):
                every += self.candidates(limit, only_limited=True)
        if limit_bytes is None:
            return every
        bound = partial(lower_bound, memory_limit=memory_limit, memory_limit_bytes=limit_bytes)
        bounds = {plan: bound(plan, costs) for plan, costs in {each.plan: each.costs for each in every}.items()}
        return [replace(each, lower_bound=bounds[each.plan]) for each in every]

    def candidates(
        self, limit: float | None, limit_bytes: float | None = None, only_limited: bool = False
    ) -> Iterator[Found]:
        """Yield a result for each entry that takes the plan and the limit; if none does, raise the first error.

        Args:
            limit_bytes: of those that order under a limit.
            only_limited: leave out what does not order under a limit.
        """
        count, refused = 0, list[ScheduleError]()
        for entry in self.entries:
            for place in self._places(entry) if entry.limited or not only_limited else ():
                if self.progress:
                    self.progress(entry.name)
                try:
                    candidate = self._plan_of(entry, place)
                    scaled = recut_for(self.costs, self.plan, candidate)
                    played = list(self._played(entry, candidate, scaled, limit, limit_bytes))
                except ScheduleError as error:
                    refused.append(error)  # it does not take the plan, or the limit
                    continue
                bound = lower_bound(candidate, scaled, limit, memory_limit_bytes=limit_bytes)
                for schedule, (timeline, resident, account) in played:
                    count += 1
                    yield Found(entry.name, schedule, candidate, scaled, timeline, bound, resident, account)
        if not count and refused:
            raise refused[0]

    def _played(
        self, entry: CatalogueEntry, plan: Plan, costs: Costs, limit: float | None, limit_bytes: float | None
    ) -> Iterator[tuple[Schedule, Played]]:
        """Yield schedules and what they give; under a limit in bytes, one for each number of whole stages."""
        limits = _limits_of_ranks(plan, limit)
        schedule = partial(entry.schedule, plan, costs, limits)
        if limit_bytes is None or not entry.limited:
            whole = schedule()
            for played in _played(lower(whole, plan), costs, _residents(plan)):
                yield whole, played
            return
        refused = list[ScheduleError]()
        for resident in _residents(plan):
            try:
                within = schedule(memory_limit_bytes=limit_bytes, resident=resident)
            except ScheduleError as error:
                refused.append(error)
                continue
            for played in _played(lower(within, plan), costs, [resident]):
                yield within, played
        if len(refused) == len(_residents(plan)):
            raise refused[0]

    def _places(self, entry: CatalogueEntry) -> Sequence[int | Placement]:
        """Return the placements to try: numbers of stages on a rank for the entry's own, or others that it takes."""
        if not self.recut:
            return self._placements if entry.placement == "any" else (max(1, self.plan.stages // self.plan.ranks),)
        if not entry.any_chunks:
            return (entry.chunks,)
        return [v for v in self.chunks if v <= MOST_LIMITED or not entry.limited]

    @cached_property
    def _placements(self) -> Sequence[Placement]:
        """Placements of the stages as they are."""
        p, stages = self.plan.ranks, range(self.plan.stages)
        turns = [s % (2 * p) for s in stages]
        costs = existing(self.costs, self.plan)
        times = [costs.time(Forward(s, 0)) + costs.time(Backward(s, 0)) for s in stages]
        mirrored = [p - 1 - rank for rank in reversed(blocks(times[::-1], p))]
        ways = [s % p for s in stages], [min(t, 2 * p - 1 - t) for t in turns], blocks(times, p), mirrored
        return [*dict.fromkeys(map(Placement, ways))]

    def _plan_of(self, entry: CatalogueEntry, place: int | Placement) -> Plan:
        """Return the plan of a placement for the same model."""
        plan, m = self.plan, self.plan.microbatches
        own = Plan(place, m) if isinstance(place, Placement) else entry.plan(plan.ranks, m, place, plan.slices)
        trained = recut_trained(plan.trained, plan.stages, own.stages)
        candidate = replace(own, replicas=plan.replicas, trained=trained, slices=plan.slices)
        is_plain = plan == Plan(plan.placement, m, replicas=plan.replicas, trained=plan.trained, slices=plan.slices)
        if is_plain and self.recut:
            return candidate
        return replace(candidate, edges=plan.edges, ties=plan.ties, cotangents=plan.cotangents)


def _limits_of_ranks(plan: Plan, limit: float | None) -> float | Sequence[float] | None:
    """Return a limit, in microbatches of 1/ranks of the model, in microbatches of what each rank has, at least one."""
    counts = [len(plan.stages_on(rank)) for rank in range(plan.ranks)]
    if limit is None or len(set(counts)) == 1:
        return limit
    return [max(1.0, limit * plan.stages / (plan.ranks * count)) for count in counts]


def blocks(times: Sequence[float], ranks: int) -> list[int]:
    """Return the rank of each stage, in blocks of neighbours.

    The busiest rank has the least time that it can have, and the first ranks have as many stages as that allows.

    >>> blocks([1, 1, 1, 1], 3), blocks([3, 1, 1, 1], 2)
    ([0, 0, 1, 2], [0, 1, 1, 1])
    """
    count, sums = len(times), [0.0, *accumulate(times)]
    least = sums  # for the first stages on the first ranks
    for rank in range(1, ranks):
        least = [
            min((max(least[n], sums[end] - sums[n]) for n in range(rank, end)), default=inf) for end in range(count + 1)
        ]
    limit = least[count] * (1 + ROUNDING)
    blocks, first = list[int](), 0
    for s in range(count):
        rank = blocks[-1] if blocks else 0
        are_needed = count - s == ranks - 1 - rank  # by the ranks after this one
        if s and (are_needed or sums[s + 1] - sums[first] > limit):
            rank, first = rank + 1, s
        blocks.append(rank)
    return blocks


def _played(programs: Programs, costs: Costs, residents: Sequence[int | None]) -> Iterator[Played]:
    """Yield the timeline of programs, the number of whole stages, and the bytes."""
    plan = plan_of(programs)
    for resident in residents:
        try:
            placed = programs if resident is None else residence(programs, resident)
        except ScheduleError:  # an overlap needs more stages at once
            continue
        bytes_ = footprint(placed, costs) if sized(costs) else (RankBytes(0.0, 0.0, 0.0, 0.0),) * plan.ranks
        yield simulate_programs(placed, costs), resident, bytes_


def _residents(plan: Plan) -> list[int | None]:
    """Return the numbers of whole stages to try: up to eight all, then powers of two, and all of a rank's stages."""
    if plan.replicas == 1:
        return [None]
    most = max(len(plan.stages_on(rank)) for rank in range(plan.ranks))
    return [None, *sorted({n for n in range(1, most) if n <= 8 or n.bit_count() == 1} | {most})]
