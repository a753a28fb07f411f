"""The search of whole layouts: cuts of layers into stages, placements, orders, and residuals that are moved. No torch.

Every schedule in a fixed order starts on each of its placements with the layers cut evenly in number and evenly in
time; one that orders for the costs, which takes longer, evenly in time and with few stages on a rank. From the best of
these, layers move from stage to stage while that makes the simulated step faster, or needs less memory where it exceeds
a limit; the most promising take most of the time. Where few cuts exist, all are tried, as long as that takes not too
long. Chains in which one stage has copies start too, where no rank alone takes longer than a result that is known.
Schedules that order under limits then order on the best cuts, and those that take any placement on some that have no
name (`scattering`). What is fast but needs too much memory has residuals moved to the host, or recomputed; and from
there layers move on, with residuals moved anew on each cut.

Invariants:
- The result is never worse than any of those that it starts from.
- It depends on the arguments alone: what ends the search is a number of simulated effects, not time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any

from fpipe._format import counted, sized
from fpipe.costs import ROUNDING, Link, PerStage
from fpipe.errors import ScheduleError
from fpipe.plan import Schedule
from fpipe.programs.footprint import footprint
from fpipe.programs.lowering import lower
from fpipe.programs.program import Programs
from fpipe.schedules.bounds import lower_bound
from fpipe.schedules.catalogue import CatalogueEntry, named
from fpipe.schedules.found import Found, Key, best_of_each, fastest
from fpipe.schedules.partitions import FEW, Partition
from fpipe.schedules.scattering import scattered
from fpipe.schedules.space import FEW_LIMITED, Cut, Space, limits_of_ranks
from fpipe.timelines.offloading import Offloading
from fpipe.timelines.simulator import simulate_programs

SIMULATED = 3_000_000  # effects
MOVING = 600_000  # effects that are simulated while layers and residuals move
REPEATED = 8  # effects that are simulated in the time of moving an effect's residuals
ORDERED = 200  # effects that are simulated in the time of ordering a stage's pass of one microbatch by costs
SEEDS, ON_CUTS = 6, 3  # results from which layers move, and cuts on which schedules order under a limit
PROMISING = 1.1  # times the cost of the best of these
TRIES = 32  # cuts that are tried until one is better, where there are many
SLOWER = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5)  # shares of a step, for moving residuals


class Layouts:
    """The layouts of a space, under limits in microbatches in flight and in bytes on a rank."""

    def __init__(self, space: Space, limit: float | None, limit_bytes: float | None) -> None:
        self.full, self.space = space, space.quick
        self.limit, self.limit_bytes = limit, limit_bytes
        self.left = float(SIMULATED)
        self.programs = dict[tuple[object, ...], Programs]()
        self.refused: ScheduleError | None = None  # the first reason why schedules can't begin

    def results(self) -> list[Found]:
        """Return all layouts that were found, within the limits or not.

        Raises:
            ScheduleError: no schedule takes the layers.
        """
        fixed, ordered = self._candidates(False), self._candidates(True)
        fixed += self._copied([*fixed, *ordered])
        if not fixed and not ordered:
            if self.refused is not None:
                raise self.refused
            names = ", ".join(entry.name for entry in self.space.entries)
            raise ScheduleError(
                f"{names}: no stages are made of {counted(self.space.plan.stages, 'layer')} on "
                f"{counted(self.space.plan.ranks, 'rank')}: each stage has at least one; try fewer chunks, other "
                "schedules, or finer layers"
            )
        keys = [self._within, *([fastest] if self.limit_bytes is not None else [])]
        for done, key in enumerate(keys):
            fixed += self._descended(self._seeds(fixed, key), key, self.left / (len(keys) + 1 - done))
        ordered += self._scattered([*fixed, *ordered])
        ordered += self._reordered([*fixed, *ordered])
        ordered += self._descended(self._seeds(ordered, self._within), self._within, self.left)
        results = [*fixed, *self._annealed(ordered), *ordered]  # of equal ones, the first
        if self.limit_bytes is not None:
            moved = [*self._moved(results)]
            self.left = MOVING
            results += [*moved, *self._descended(self._seeds(moved, self._within), self._within, MOVING, moves=True)]
        bound = self.bound()
        return [replace(result, lower_bound=bound) for result in results]

    def bound(self) -> float:
        """Return what no layout costs less than: the work of all ranks evenly, or that of the largest layer.

        Copies of a stage share its microbatches.
        """
        plan, times = self.space.plan, self.space.times
        if self.space.costs.overlap is not None:
            return 0.0
        of_two = [2 for entry in self.space.entries if entry.placement == "both ways"]
        most = max([1, *self.space.counts_of_copies, *of_two])
        return self.space.units * max(sum(times) / plan.ranks, max(times) / most)

    def _candidates(self, limited: bool) -> list[Found]:
        """Return the results to start from: of schedules in a fixed order, or of those that order under the limits."""
        try:
            return list(self.space.candidates(self.limit, self.limit_bytes, limited=[limited]))
        except ScheduleError as error:  # none takes the plan, or the limits
            self.refused = self.refused or error
            return []

    def _within(self, found: Found) -> tuple[float, ...]:
        """Return what is least for the best result: by how much it exceeds the limits, and its cost."""
        over = 0.0 if self.limit is None else found.peak / self.limit
        over = max(over, 0.0 if self.limit_bytes is None else found.bytes / self.limit_bytes)
        return max(0.0, over - 1 - ROUNDING), *fastest(found)

    def _seeds(self, results: Iterable[Found], key: Key) -> list[Found]:
        """Return the best results that are promising, of each schedule on each placement one."""
        best = best_of_each(results, key)[:SEEDS]
        return [found for found in best if found.timeline.cost <= PROMISING * best[0].timeline.cost]

    def _descended(self, seeds: Sequence[Found], key: Key, effects: float, *, moves: bool = False) -> list[Found]:
        """Return the best results that moving layers leads to, from each seed; with residuals moved, if that is asked.

        In each of some rounds all simulate as many effects, and the better half of them go on (successive halving:
        Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization", AISTATS 2016).
        What is left then goes to those that were stopped, the best first.
        """
        best, end = [*seeds], self.left - effects
        unfinished = {n: self._descent(seed, key, moves) for n, seed in enumerate(seeds)}

        def by_promise(numbers: Iterable[int]) -> list[int]:
            return sorted((n for n in numbers if n in unfinished), key=lambda n: key(best[n]))

        def go_on(n: int, until: float) -> None:
            while self.left > until and n in unfinished:
                if (found := next(unfinished[n], None)) is None:
                    del unfinished[n]
                else:
                    best[n] = found

        going = [*unfinished]
        for rounds in range(len(seeds).bit_length(), 0, -1):
            share = (self.left - end) / (rounds * max(1, len(going)))
            for n in going:
                go_on(n, self.left - share)
            going = by_promise(going)[: (len(going) + 1) // 2]
        for n in by_promise(unfinished):
            go_on(n, end)
        return best

    def _descent(self, found: Found, key: Key, moves: bool) -> Iterator[Found]:
        """Yield the best result so far after each cut that is tried, as long as moving layers leads to better ones."""
        entry, tried, is_better = named(found.name), set[Partition](), True
        while is_better:
            is_better, cuts = False, [cut for cut in self._near(found) if cut not in tried]
            for cut in cuts if len(tried) + len(cuts) < FEW else cuts[:TRIES]:
                if self._is_hopeless(cut, found, key):
                    break
                tried.add(cut)
                result = self._result(entry, cut, found, key, moves)
                is_better = result is not None and key(result) < key(found)
                found = result if result is not None and is_better else found
                yield found
                if is_better:
                    break

    def _near(self, found: Found) -> list[Partition]:
        return Partition(found.plan.placement, found.layers).near(self.space.times)

    def _is_hopeless(self, cut: Partition, found: Found, key: Key) -> bool:
        """Whether the busiest rank alone takes longer than a result that is within the limits."""
        costs, (*over, cost, _) = self.space.costs, key(found)
        work = self.space.units * max(cut.loads(self.space.times))
        return not any(over) and costs.overlap is None and work >= cost * (1 - ROUNDING)

    def _result(self, entry: CatalogueEntry, partition: Partition, like: Found, key: Key, moves: bool) -> Found | None:
        """Return the result of another cut, with as many whole stages; None if it is not better, or not taken."""
        self.space.report(entry.name)
        cut = self.space.cut(entry, partition)
        *over, cost, _ = key(like)
        if _orders(entry) and not any(over) and self._bound_of(cut, moves) >= cost * (1 - ROUNDING):
            return None
        try:
            schedule, programs = self._programs(entry, cut, like)
        except ScheduleError:
            return None
        self.left -= sum(map(len, programs.values()))
        timeline = simulate_programs(programs, cut.costs)
        if not any(over) and timeline.cost >= cost * (1 - ROUNDING):
            return None
        account = footprint(programs, cut.costs) if sized(cut.costs) else like.footprint
        result = replace(
            like,
            schedule=schedule,
            plan=cut.plan,
            costs=cut.costs,
            timeline=timeline,
            footprint=account,
            layers=cut.layers,
            offload=None,
        )
        return self._kept(result, cost) if moves and any(self._within(result)[:-2]) else result

    def _bound_of(self, cut: Cut, moves: bool) -> float:
        limits, limit_bytes = limits_of_ranks(cut.plan, self.limit), None if moves else self.limit_bytes
        return lower_bound(cut.plan, cut.costs, limits, memory_limit_bytes=limit_bytes)

    def _programs(self, entry: CatalogueEntry, cut: Cut, like: Found) -> tuple[Schedule, Programs]:
        """Return a schedule and its programs, which do not depend on the cut where the schedule does not on costs."""
        by_costs = _orders(entry)
        key = entry.name, cut.plan, like.resident
        if not by_costs and key in self.programs:
            return like.schedule, self.programs[key]
        limits: dict[str, Any] = {}
        if by_costs:
            self.left -= ORDERED * like.plan.microbatches * like.plan.stages
        if entry.limited:
            limits = {"memory_limit_bytes": self.limit_bytes, "resident": like.resident, "effort": self.space.effort}
        schedule = entry.schedule(cut.plan, cut.costs, limits_of_ranks(cut.plan, self.limit), **limits)
        programs = lower(schedule, cut.plan, resident=like.resident)
        if not by_costs:
            self.programs[key] = programs
        return schedule, programs

    def _least(self, results: Iterable[Found]) -> float:
        """Return the cost of the best result that is within the limits."""
        return min((found.timeline.cost for found in results if not any(self._within(found)[:-2])), default=inf)

    def _copied(self, results: Sequence[Found]) -> list[Found]:
        """Return the results on placements in which one stage has copies, and no rank takes as long as the best result.

        Schedules that order under the limits follow on the best cuts. Without others they start, where the busiest rank
        has least to do.
        """
        least, copied = self._least(results) * (1 - ROUNDING), list[Found]()
        loads = {each: self.space.units * max(each.loads(self.space.times)) for each in self.space.copied()}
        some = sorted((each for each in loads if loads[each] < least), key=lambda each: loads[each])
        entries = [entry for entry in self.space.entries if entry.takes_copies]
        fixed = [entry for entry in entries if not entry.limited]
        for entry in fixed or entries:
            for partition in some[: None if fixed else ON_CUTS]:
                with suppress(ScheduleError):
                    copied += self.space.results(entry, partition, self.limit, self.limit_bytes)
        return copied

    def _scattered(self, results: Sequence[Found]) -> list[Found]:
        """Return the results of schedules that order under the limits, on placements that have no name."""
        ordered, plan = list[Found](), self.space.plan
        if plan.ranks == 1 or plan.slices > 1 or plan.stages < plan.ranks:
            return ordered
        least = self._least(results)
        for entry in self.space.entries:
            if entry.limited and entry.placement == "any" and least > self.bound() * (1 + ROUNDING):
                limits = self.limit, self.limit_bytes
                for partition in scattered(self.space, entry.name, least, *limits, ON_CUTS):
                    with suppress(ScheduleError):
                        ordered += self.space.results(entry, partition, self.limit, self.limit_bytes)
        return ordered

    def _reordered(self, results: Sequence[Found]) -> list[Found]:
        """Return the results of schedules that order under the limits, on the best cuts of others."""
        ordered, seeds = list[Found](), self._seeds(results, self._within)[:ON_CUTS]
        copied = [found for found in results if found.plan.cycle > 1 and named(found.name).takes_copies]
        seeds += [found for found in self._seeds(copied, self._within)[:ON_CUTS] if found not in seeds]
        for best in seeds:
            partition = Partition(best.plan.placement, best.layers)
            if len(best.layers) > FEW_LIMITED * best.plan.ranks:
                continue
            for entry in self.space.entries:
                if entry.limited and entry.name != best.name and self.space.takes(entry, partition.placement):
                    with suppress(ScheduleError):
                        ordered += self.space.results(entry, partition, self.limit, self.limit_bytes)
        return ordered

    def _annealed(self, results: Sequence[Found]) -> list[Found]:
        """Return the results of schedules that order under the limits on their best cuts, with all of the effort."""
        limited = [found for found in results if named(found.name).limited]
        return self.full.again(self._seeds(limited, self._within)[:ON_CUTS])

    def _moved(self, results: Iterable[Found]) -> Iterator[Found]:
        """Yield the fastest results beyond the limit in bytes, with residuals moved so that they keep to it.

        Where nothing else is within the limits, each schedule's fastest result and its smallest are tried until one is.
        """
        best = self._least(results)
        in_flight = inf if self.limit is None else self.limit * (1 + ROUNDING)
        some = (found for found in results if any(self._within(found)[:-2]) and found.peak <= in_flight)
        beyond = [found for found in some if found.timeline.cost < best]
        seeds = (
            self._seeds(beyond, fastest)
            if best < inf
            else [*best_of_each(beyond, fastest), *best_of_each(beyond, _smallest)]
        )
        for found in seeds:
            if found.timeline.cost < best and (moved := self._kept(found)) is not None:
                best = min(best, moved.timeline.cost)
                yield moved

    def _kept(self, found: Found, most: float = inf) -> Found | None:
        """Return a result with residuals moved, or recomputed, as little slower as keeps it to the limit in bytes.

        One that costs no less than `most` may be left out.
        """
        assert self.limit_bytes is not None
        costs = found.costs
        if not (_takes_time(costs.offload) and _takes_time(costs.fetch)):  # not known, rather than free
            never = Link(found.timeline.makespan * 2)
            costs = replace(costs, offload=never, fetch=never)
        for slower, refused in zip(SLOWER, (0.0, *SLOWER), strict=False):
            if (1 + refused) * found.timeline.cost >= most:
                return None
            self.left -= REPEATED * len(found.timeline.spans)
            offload = Offloading(self.limit_bytes, costs, slower, recompute=True)
            with suppress(ScheduleError):
                programs = lower(found.schedule, found.plan, resident=found.resident, offload=offload)
                timeline, account = simulate_programs(programs, found.costs), footprint(programs, found.costs)
                return replace(found, timeline=timeline, footprint=account, offload=offload)
        return None


def _orders(entry: CatalogueEntry) -> bool:
    """Whether a schedule orders for the costs, which takes longer than to simulate the order."""
    return entry.by_costs or entry.limited


def _smallest(found: Found) -> tuple[float, ...]:
    return found.bytes, found.timeline.cost


def _takes_time(copy: PerStage | Link) -> bool:
    return isinstance(copy, Link) or (any(copy) if isinstance(copy, Sequence) else bool(copy))
