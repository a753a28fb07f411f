"""The candidates of a search: schedules of the catalogue, each with several placements of one model. No torch.

The costs are those of the plan's own stages. The same model is compared in three ways: split evenly into another number
of stages (`recut`), as the stages are, or in stages that are made of neighbouring ones, which are then layers
(`layouts`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil, inf
from typing import NamedTuple

from fpipe._format import sized
from fpipe.costs import Costs
from fpipe.effects import Backward, Forward
from fpipe.errors import ScheduleError
from fpipe.plan import Placement, Plan, Schedule
from fpipe.programs.footprint import RankBytes, footprint
from fpipe.programs.lowering import lower
from fpipe.programs.program import Programs, plan_of
from fpipe.programs.residence import residence
from fpipe.schedules.annealing import check_effort
from fpipe.schedules.bounds import bound_in_any_order, lower_bound
from fpipe.schedules.catalogue import CATALOGUE, CatalogueEntry, named
from fpipe.schedules.cuts import existing, recut_for, recut_trained
from fpipe.schedules.found import Found, best_of
from fpipe.schedules.grouping import Grouping, times_of
from fpipe.schedules.partitions import Partition, balanced, blocks, even, levelled
from fpipe.schedules.slice_costs import of_each_slice
from fpipe.timelines.simulator import simulate_programs
from fpipe.timelines.timeline import Timeline

Played = tuple[Timeline, int | None, tuple[RankBytes, ...]]
Place = int | Placement | Partition
CHUNKS = (1, 2, 3, 4, 6, 8)  # the numbers of stages on a rank to try
QUICK = 0.1  # of the effort, until the best places are known
MOST_LIMITED = 4  # the most for schedules that order under a limit, because these are slow for many stages
FEW_LIMITED = 2  # the most for them where cuts are searched too


class Cut(NamedTuple):
    """The model in the stages of a plan; `layers` says how many of which each has, where it is made of some."""

    plan: Plan
    costs: Costs
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Space:
    """What is searched: schedules of the catalogue, each with several placements of one model.

    Args:
        any_order: whether bounds hold in any order of the microbatches, not only in that of the costs.
        copies: whether stages may have copies.
        effort: of schedules that order under a limit, as of `zb_auto`.
    """

    plan: Plan
    costs: Costs
    entries: Sequence[CatalogueEntry]
    chunks: Sequence[int]
    recut: bool
    layouts: bool
    host: float
    progress: Callable[[str], None] | None
    any_order: bool = False
    copies: bool = True
    effort: float = 1.0

    @property
    def units(self) -> float:
        """How many times a step takes the time of a layer's passes for a microbatch: by the microbatches' factors."""
        return sum(self.costs.scale) or self.plan.microbatches

    @property
    def quick(self) -> Space:
        """The space with a part of the effort, for schedules that order in many places."""
        return replace(self, effort=QUICK * self.effort)

    def report(self, name: str) -> None:
        """Report a candidate by the name of its schedule."""
        if self.progress:
            self.progress(name)

    @classmethod
    def of(
        cls,
        plan: Plan,
        costs: Costs,
        memory_limit: float | None,
        chunks: Sequence[int],
        recut: bool = True,
        layouts: bool = False,
        host: float = 0.0,
        names: Sequence[str] | None = None,
        progress: Callable[[str], None] | None = None,
        any_order: bool = False,
        copies: bool = True,
        effort: float = 1.0,
    ) -> Space:
        """Check the arguments of a search."""
        costs.check(plan)
        check_effort(effort)
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
        if not recut and any(len(ranks) > 1 for ranks in plan.placement.holders):
            raise ScheduleError(
                f"recut=False places each stage on one rank, and stages of {plan.placement} have copies: leave "
                "recut=False out, or order the plan as it is by schedules.zb_auto(plan, costs)"
            )
        if not (recut and copies):
            entries = _without_copies(entries, "recut" if copies else "copies")
        if layouts and not recut:
            raise ScheduleError("layouts are cuts of the plan's stages into others: leave recut=False out")
        if host and not layouts:
            raise ScheduleError("host is the time of a piece beside its layers: give it with layouts=True")
        if not 0 <= host < inf:
            raise ScheduleError(f"host must be a time of at least 0, not {host!r}")
        return cls(plan, costs, entries, chunks, recut, layouts, host, progress, any_order, copies, effort)

    def every(self, memory_limit: float | None, limit_bytes: float | None, *, all_limits: bool = False) -> list[Found]:
        """Return all candidates; those that order under a limit also at lower limits in microbatches.

        Args:
            all_limits: at many of these; otherwise from the largest down, until one keeps to the limit in bytes.
        """
        by_place = list(self._by_place(memory_limit))
        every = [result for *_, results in by_place for result in results]
        below = [limit for limit in _limits(best_of(every).peak) if memory_limit is None or limit < memory_limit]
        if all_limits:
            for limit in below:
                with suppress(ScheduleError):
                    every += self.candidates(limit, limited=[True])
        elif limit_bytes is not None:
            for entry, place, results in by_place:
                if entry.limited:
                    every += self._falling(entry, place, results, below, limit_bytes)
        if limit_bytes is None:
            return every
        with suppress(ScheduleError):  # none takes this limit
            every += self.candidates(memory_limit, limit_bytes, limited=[True])
        bounds = {
            plan: self.bound(plan, costs, memory_limit, limit_bytes)
            for plan, costs in {each.plan: each.costs for each in every}.items()
        }
        return [replace(each, lower_bound=bounds[each.plan]) for each in every]

    def _falling(
        self, entry: CatalogueEntry, place: Place, results: Sequence[Found], limits: Sequence[float], limit_bytes: float
    ) -> Iterator[Found]:
        """Yield results under lower and lower limits, until one keeps to bytes with each number of whole stages.

        Args:
            results: those under a higher limit.
        """
        within = {result.resident for result in results if result.is_within(None, limit_bytes)}
        for limit in reversed(limits):
            if results and all(result.resident in within for result in results):
                return
            with suppress(ScheduleError):
                results = self.results(entry, place, limit, None)
                yield from (result for result in results if result.resident not in within)
                within |= {result.resident for result in results if result.is_within(None, limit_bytes)}

    def bound(self, plan: Plan, costs: Costs, limit: float | None, limit_bytes: float | None) -> float:
        """Return a lower bound of the cost within limits, in microbatches of 1/ranks of the model and in bytes."""
        bound = bound_in_any_order if self.any_order else lower_bound
        return bound(plan, costs, limits_of_ranks(plan, limit), memory_limit_bytes=limit_bytes)

    def candidates(
        self, limit: float | None, limit_bytes: float | None = None, limited: Collection[bool] = (False, True)
    ) -> Iterator[Found]:
        """Yield a result for each entry that takes the plan and the limit; if none does, raise the first error.

        Args:
            limit_bytes: of those that order under a limit.
            limited: whether to try schedules that do not, and those that do.
        """
        for *_, results in self._by_place(limit, limit_bytes, limited):
            yield from results

    def _by_place(
        self, limit: float | None, limit_bytes: float | None = None, limited: Collection[bool] = (False, True)
    ) -> Iterator[tuple[CatalogueEntry, Place, list[Found]]]:
        """Yield the candidates by entry and place; as `candidates`, raise the first error if there are none."""
        count, refused = 0, list[ScheduleError]()
        for entry in self.entries:
            for place in self._places(entry) if entry.limited in limited else ():
                try:
                    results = self.results(entry, place, limit, limit_bytes)
                except ScheduleError as error:
                    refused.append(error)  # it does not take the plan, or the limit
                    continue
                count += len(results)
                yield entry, place, results
        if not count and refused:
            raise refused[0]

    def results(
        self, entry: CatalogueEntry, place: Place, limit: float | None, limit_bytes: float | None
    ) -> list[Found]:
        """Return the results of an entry in one place, one for each number of whole stages.

        Raises:
            ScheduleError: it does not take the plan, or the limit.
        """
        self.report(entry.name)
        plan, costs, layers = self.cut(entry, place)
        played = list(self._played(entry, plan, costs, limit, limit_bytes))
        bound = self.bound(plan, costs, limit, limit_bytes)
        return [
            Found(
                entry.name,
                schedule,
                plan,
                costs,
                timeline,
                bound,
                resident,
                account,
                layers=layers,
                effort=self.effort if entry.limited else 1.0,
                limit=limit,
                limit_bytes=limit_bytes,
            )
            for schedule, (timeline, resident, account) in played
        ]

    def again(self, results: Iterable[Found]) -> list[Found]:
        """Return the results of the same entries in the same places and limits, with the effort of this space."""
        again = list[Found]()
        for found in results:
            place: Place = found.plan.placement
            if found.layers:
                place = Partition(found.plan.placement, found.layers)
            elif self.recut:
                place = max(1, found.plan.stages // found.plan.ranks)
            with suppress(ScheduleError):
                again += self.results(named(found.name), place, found.limit, found.limit_bytes)
        return again

    def _played(
        self, entry: CatalogueEntry, plan: Plan, costs: Costs, limit: float | None, limit_bytes: float | None
    ) -> Iterator[tuple[Schedule, Played]]:
        """Yield schedules and what they give; under a limit in bytes, one for each number of whole stages."""
        limits = limits_of_ranks(plan, limit)
        schedule = partial(entry.schedule, plan, costs, limits, effort=self.effort)
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

    def _places(self, entry: CatalogueEntry) -> Sequence[Place]:
        """Return the placements to try: numbers of stages on a rank for the entry's own, or others that it takes."""
        if not self.recut:
            return self._placements if entry.placement == "any" else (max(1, self.plan.stages // self.plan.ranks),)
        counts: tuple[int, ...] = (entry.chunks,)
        if entry.any_chunks:
            counts = tuple(v for v in self.chunks if v <= MOST_LIMITED or not entry.limited)
        return list(self._partitions(entry, counts)) if self.layouts else counts

    def _partitions(self, entry: CatalogueEntry, counts: Sequence[int]) -> Iterator[Partition]:
        """Yield placements with the layers cut evenly in time, of ranks and of stages, and evenly in number.

        Of schedules that order under a limit, which are slow, only the former two, with few stages on a rank.
        """
        tried = [v for v in counts if v <= FEW_LIMITED or not entry.limited]
        placements = dict.fromkeys(self._own(entry, v).placement for v in tried if self._is_placed(entry, v))
        if entry.limited and entry.any_chunks and 2 in tried:
            placements[Placement.v(self.plan.ranks)] = None
        for placement in placements:
            if placement.stages <= self.plan.stages:
                partitions = self._even(placement)
                if not entry.limited:
                    partitions.append(even(placement, self.plan.stages))
                yield from dict.fromkeys(partitions)

    def _even(self, placement: Placement) -> list[Partition]:
        return [levelled(placement, self.times), balanced(placement, self.times)]

    @cached_property
    def counts_of_copies(self) -> list[int]:
        """The numbers of copies to try of single stages, with two stages at least."""
        takes = self.copies and any(entry.takes_copies for entry in self.entries)
        return [c for c in range(2, self.plan.ranks) if takes and self.plan.microbatches % c == 0]

    def copied(self) -> Iterator[Partition]:
        """Yield placements of a chain in which one stage has copies, with the layers cut evenly in time."""
        for c in self.counts_of_copies:
            stages = self.plan.ranks - c + 1
            for stage in range(stages) if stages <= self.plan.stages else ():
                ranks = iter(range(self.plan.ranks))
                holders = [[next(ranks) for _ in range(c if s == stage else 1)] for s in range(stages)]
                yield from dict.fromkeys(self._even(Placement(holders)))

    def _is_placed(self, entry: CatalogueEntry, chunks: int) -> bool:
        with suppress(ScheduleError):
            return bool(self._own(entry, chunks))
        return False

    def takes(self, entry: CatalogueEntry, placement: Placement) -> bool:
        """Return whether a schedule can order the stages of a placement that the search tries with another schedule."""
        if any(len(ranks) > 1 for ranks in placement.holders):
            return entry.takes_copies
        chunks = max(1, placement.stages // placement.ranks)
        own = self._is_placed(entry, chunks) and self._own(entry, chunks).placement == placement
        return own or entry.placement == "any"

    def _own(self, entry: CatalogueEntry, chunks: int) -> Plan:
        return entry.plan(self.plan.ranks, self.plan.microbatches, chunks, self.plan.slices)

    @cached_property
    def times(self) -> list[float]:
        """The time of each layer for a microbatch with all its slices."""
        factors, each = self.costs.slice_scale, of_each_slice(self.costs)
        times = zip(*(times_of(self.plan, costs) for costs in each), strict=True)
        alike = sum(factors) if isinstance(factors, tuple) and factors else self.plan.slices / len(each)
        return [alike * sum(of_slices) for of_slices in times]

    @cached_property
    def _placements(self) -> Sequence[Placement]:
        """Placements of the stages as they are."""
        p, stages = self.plan.ranks, range(self.plan.stages)
        turns = [s % (2 * p) for s in stages]
        costs = existing(self.costs, self.plan)
        times = [costs.time(Forward(s, 0)) + costs.time(Backward(s, 0)) for s in stages]
        mirrored = [p - 1 - rank for rank in reversed(blocks(times[::-1], [1] * p))]
        ways = [s % p for s in stages], [min(t, 2 * p - 1 - t) for t in turns], blocks(times, [1] * p), mirrored
        return [*dict.fromkeys(map(Placement, ways))]

    def cut(self, entry: CatalogueEntry, place: Place) -> Cut:
        """Return the same model in the stages of a placement."""
        plan, m = self.plan, self.plan.microbatches
        if isinstance(place, Partition):
            grouping = Grouping(plan, place.layers, self.host)
            placed = grouping.placed(place.placement)
            return Cut(placed, grouping.costs(self.costs, placed), place.layers)
        own = Plan(place, m) if isinstance(place, Placement) else self._own(entry, place)
        trained = recut_trained(plan.trained, plan.stages, own.stages)
        candidate = replace(own, replicas=plan.replicas, trained=trained, slices=plan.slices)
        is_plain = plan == Plan(plan.placement, m, replicas=plan.replicas, trained=plan.trained, slices=plan.slices)
        if not (is_plain and self.recut):
            candidate = replace(candidate, edges=plan.edges, ties=plan.ties, cotangents=plan.cotangents)
        return Cut(candidate, recut_for(self.costs, plan, candidate))


def _without_copies(entries: Sequence[CatalogueEntry], option: str) -> list[CatalogueEntry]:
    """Return the entries whose own placement has no copies of stages.

    Raises:
        ScheduleError: there is none; the option is to be left out.
    """
    without = [entry for entry in entries if entry.placement != "both ways"]
    if not without:
        names = ", ".join(entry.name for entry in entries)
        raise ScheduleError(f"{names} has copies of stages: leave {option}=False out, or name others too")
    return without


def _limits(largest: float, most: int = 16) -> list[float]:
    """Return limits from one microbatch up, in steps of at least half a microbatch, so that there are not too many."""
    halves = ceil(2 * largest)
    return [half / 2 for half in range(2, halves, ceil(halves / most))]


def limits_of_ranks(plan: Plan, limit: float | None) -> float | Sequence[float] | None:
    """Return a limit, in microbatches of 1/ranks of the model, in microbatches of what each rank has, at least one."""
    counts = [len(plan.stages_on(rank)) for rank in range(plan.ranks)]
    if limit is None or {plan.ranks * count for count in counts} == {plan.stages}:
        return limit
    return [max(1.0, limit * plan.stages / (plan.ranks * count)) for count in counts]


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
