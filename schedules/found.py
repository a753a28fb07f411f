"""The results of a search, and which of them is the best. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from fpipe._format import counted, extent, number
from fpipe.costs import ROUNDING, Costs
from fpipe.plan import Plan, Schedule
from fpipe.programs.footprint import RankBytes
from fpipe.schedules.catalogue import shares
from fpipe.timelines.offloading import Offloading
from fpipe.timelines.timeline import Timeline

Key = Callable[["Found"], tuple[float, ...]]


@dataclass(frozen=True)
class Found:
    """A schedule with its plan, costs and predicted timeline.

    Args:
        name: in `CATALOGUE`.
        schedule, plan, costs: run it by `value_and_grad(pipeline, schedule, plan, resident=resident, offload=offload)`,
            or simulate it again.
        lower_bound: no program within the limits of the search, on any of the tried plans, has a lower cost; of a
            result of `pareto`, none in as much memory as that has. Moved and recomputed residuals are left out, but of
            a search of layouts, where the bound holds with these too.
        resident: the number of stages that are whole on a rank at a time; None where parameters are not sharded.
        footprint: the account of each rank's bytes.
        order: the microbatches' numbers in the order in which they run; the costs are in that order.
        layers: of a search of layouts, the number of layers of each stage.
        offload: the pass that moves residuals, or recomputes them, so that a limit in bytes holds; None where it does
            without.
        effort, limit, limit_bytes: with which `zb_auto` or `v_auto` made the schedule, and under which limits, in
            microbatches of a rank's share of the model and in bytes.
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
    layers: tuple[int, ...] = ()
    offload: Offloading | None = None
    effort: float = 1.0
    limit: float | None = None
    limit_bytes: float | None = None

    def __repr__(self) -> str:
        layers = f", layers {' '.join(map(str, self.layers))}" if self.layers else ""
        moved = ", residuals moved" if self.offload else ""
        figures = f"cost {number(self.timeline.cost)}, peak {number(self.peak)}"
        return f"<Found: {self.name}, {extent(self.plan)}{layers}, {figures}{moved}>"

    @property
    def cuts(self) -> tuple[int, ...]:
        """The layers with which stages begin, but for the first stage."""
        return tuple(accumulate(self.layers[:-1]))

    @property
    def peak(self) -> float:
        """The most in flight on a rank, in microbatches of a rank's share of the model (1/ranks of it)."""
        return max(shares(self.timeline))

    @property
    def bytes(self) -> float:
        """The most bytes on a rank, as `fpipe.footprint` counts them."""
        return max(account.total for account in self.footprint)

    def is_within(self, memory_limit: float | None, limit_bytes: float | None) -> bool:
        """Whether it keeps to limits, in microbatches in flight and in bytes."""
        return (memory_limit is None or self.peak <= memory_limit * (1 + ROUNDING)) and (
            limit_bytes is None or self.bytes <= limit_bytes * (1 + ROUNDING)
        )


def best_of(results: Sequence[Found]) -> Found:
    """Return the result of least cost, then lowest peak, then shortest makespan, then fewest stages."""
    keys: Sequence[Callable[[Found], float]] = (
        lambda result: result.timeline.cost,
        lambda result: result.bytes if has_parameters(result.costs) else result.peak,
        lambda result: result.timeline.makespan,
        lambda result: result.plan.stages,
    )
    for key in keys:
        least = min(map(key, results)) * (1 + ROUNDING)
        results = [result for result in results if key(result) <= least]
    return results[0]


def best_of_each(results: Iterable[Found], key: Key) -> list[Found]:
    """Return the best result of each schedule on each placement, in order, by what is least for the best."""
    each = dict[tuple[object, ...], Found]()
    for found in sorted(results, key=key):
        each.setdefault((found.name, found.plan.placement), found)
    return [*each.values()]


def fastest(found: Found) -> tuple[float, ...]:
    """Return what is least for the fastest result."""
    return found.timeline.cost, found.timeline.makespan


def has_parameters(costs: Costs) -> bool:
    """Whether the bytes of parameters are given."""
    return any(costs.parameters) if isinstance(costs.parameters, tuple) else bool(costs.parameters)


def describe_chunks(result: Found) -> str:
    """Return the number of stages on a rank, and how many of them are whole."""
    count = max(len(result.plan.stages_on(rank)) for rank in range(result.plan.ranks))
    stages = f"{counted(count, 'stage')} on a rank"
    return stages if result.resident is None else f"{stages}, {result.resident} of them whole at a time"
