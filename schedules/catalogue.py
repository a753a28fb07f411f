"""The named schedules as data: placement, factory, peak memory, idea and source of each. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from fpipe.costs import Costs, PerStage
from fpipe.effects import Effect
from fpipe.errors import ScheduleError
from fpipe.plan import Placement, Plan, Schedule
from fpipe.schedules.controllable_memory import v_auto, v_half, v_min
from fpipe.schedules.dualpipe import dualpipe, dualpipe_v
from fpipe.schedules.gpipe import gpipe
from fpipe.schedules.interleaved import interleaved_1f1b
from fpipe.schedules.interleaved_zb import interleaved_zb
from fpipe.schedules.looped_bfs import looped_bfs
from fpipe.schedules.one_f_one_b import one_f_one_b
from fpipe.schedules.zb_auto import zb_auto
from fpipe.schedules.zb_v import zb_v
from fpipe.schedules.zero_bubble import zb_h1, zb_h2
from fpipe.timelines.timeline import Timeline

Make = Callable[[Plan, Costs, float | None], Schedule]
PlacementFactory = Callable[[int, int], Placement]


@dataclass(frozen=True)
class CatalogueEntry:
    """A named schedule.

    Args:
        make: (plan, costs, memory limit in microbatches of a whole rank) -> schedule. Most ignore the last two.
        place: (ranks, chunks) -> placement; `placement` is its name.
        chunks: stages on each rank by default; with `any_chunks`, a plan may have another number.
        peak: the peak in flight, in microbatches of a rank's share of the model, at equal costs and m large enough:
            p ranks, v chunks, m microbatches.
        limited: whether it orders under the memory limit.
    """

    name: str
    make: Make
    place: PlacementFactory
    placement: str
    chunks: int
    any_chunks: bool
    peak: str
    idea: str
    source: str
    limited: bool = False

    def plan(self, ranks: int, microbatches: int, chunks: int | None = None) -> Plan:
        """Return the plan with the schedule's own placement.

        Raises:
            ScheduleError: chunks, ranks or microbatches that the placement does not allow.

        >>> CATALOGUE["1f1b"].plan(ranks=2, microbatches=4, chunks=2)
        Traceback (most recent call last):
        fpipe.errors.ScheduleError: 1f1b has 1 stage on each rank, not 2
        """
        if chunks not in (None, self.chunks) and not self.any_chunks:
            stages = "stage" if self.chunks == 1 else "stages"
            raise ScheduleError(f"{self.name} has {self.chunks} {stages} on each rank, not {chunks}")
        return Plan(self.place(ranks, self.chunks if chunks is None else chunks), microbatches)

    def schedule(self, plan: Plan, costs: Costs = Costs(), memory_limit: float | None = None) -> Schedule:
        """Return the schedule for a plan; those that order by costs or under a memory limit use these.

        Raises:
            ScheduleError: no order fits the limit or the costs. A wrong plan raises when the schedule runs.
        """
        return self.make(plan, costs, memory_limit)


def _always(schedule: Schedule) -> Make:
    return lambda plan, costs, limit: schedule


def _by_costs(schedule: Callable[..., Iterator[Effect]]) -> Make:
    return lambda plan, costs, limit: partial(schedule, costs=costs)


def _v(ranks: int, chunks: int) -> Placement:
    return Placement.v(ranks)


def _both_ways(ranks: int, chunks: int) -> Placement:
    return Placement.both_ways(ranks)


_ANY = (Placement.loop, "any", 1, True)
_CHAIN = (Placement.loop, "chain", 1, False)
_LOOP = (Placement.loop, "loop", 2, True)
_V = (_v, "V", 2, False)
_BOTH_WAYS = (_both_ways, "both ways", 2, False)

CATALOGUE: dict[str, CatalogueEntry] = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            "gpipe",
            _always(gpipe),
            *_ANY,
            peak="m",
            idea="all forwards, then all backwards",
            source="Huang et al. 2019",
        ),
        CatalogueEntry(
            "1f1b",
            _always(one_f_one_b),
            *_CHAIN,
            peak="p",
            idea="a forward and a backward in turn",
            source="Narayanan et al. 2019",
        ),
        CatalogueEntry(
            "interleaved-1f1b",
            _always(interleaved_1f1b),
            *_LOOP,
            peak="p + (p-1)/v",
            idea="1F1B over several chunks of a rank",
            source="Narayanan et al. 2021",
        ),
        CatalogueEntry(
            "looped-bfs",
            _always(looped_bfs),
            *_LOOP,
            peak="m",
            idea="every chunk takes all microbatches at a time",
            source="Lamy-Poirier 2023",
        ),
        CatalogueEntry(
            "zb-h1",
            _always(zb_h1),
            *_CHAIN,
            peak="p",
            idea="1F1B, its weight gradients in the bubble",
            source="Qi et al. 2024, zero bubble",
        ),
        CatalogueEntry(
            "zb-h2",
            _always(zb_h2),
            *_CHAIN,
            peak="2*p - 1",
            idea="ZB-H1 with more forwards ahead: no bubble",
            source="Qi et al. 2024, zero bubble",
        ),
        CatalogueEntry(
            "zb-auto",
            zb_auto,
            *_ANY,
            peak="the limit",
            idea="the best order found for the costs and the limit",
            source="Qi et al. 2024, zero bubble",
            limited=True,
        ),
        CatalogueEntry(
            "interleaved-zb",
            _always(interleaved_zb),
            *_LOOP,
            peak="p",
            idea="interleaved 1F1B, its weight gradients in the bubble",
            source="after ZB-H1",
        ),
        CatalogueEntry(
            "zb-v",
            _by_costs(zb_v),
            *_V,
            peak="p",
            idea="no bubble with the memory of 1F1B, over a V",
            source="Qi et al. 2024, zero bubble",
        ),
        CatalogueEntry(
            "v-half",
            _by_costs(v_half),
            *_V,
            peak="(p + 2) // 2",
            idea="about half of that memory, over a V",
            source="Qi et al. 2024, controllable memory",
        ),
        CatalogueEntry(
            "v-min",
            _by_costs(v_min),
            *_V,
            peak="(p + 4) // 3",
            idea="about a third of that memory, over a V",
            source="Qi et al. 2024, controllable memory",
        ),
        CatalogueEntry(
            "v-auto",
            v_auto,
            *_V,
            peak="the limit",
            idea="the best order found for the costs and the limit, over a V",
            source="Qi et al. 2024, controllable memory",
            limited=True,
        ),
        CatalogueEntry(
            "dualpipe-v",
            _always(dualpipe_v),
            *_V,
            peak="p + 1/2",
            idea="DualPipe folded into a V, without copies",
            source="DualPipe repository 2025",
        ),
        CatalogueEntry(
            "dualpipe",
            _always(dualpipe),
            *_BOTH_WAYS,
            peak="p + 1",
            idea="microbatches from both ends, through two copies of each stage",
            source="DeepSeek-V3 2024",
        ),
    )
}


def recut(costs: Costs, stages: int, into: int) -> Costs:
    """The costs of the same model, when it is cut into another number of equal stages.

    Times and what is kept are spread evenly over a stage; what goes out of a stage is as large as before. What stages
    share and read of each other is not known of another cut.

    Args:
        costs: of a cut into `stages`.
        into: the stages of the new cut.

    >>> recut(Costs(forward=2, activation=8), stages=4, into=8).forward
    1.0
    >>> recut(Costs(forward=[1, 2, 3, 6]), stages=4, into=2).forward
    (3.0, 9.0)
    """
    kept = ("forward", "backward_input", "backward_weight", "backward", "overlap", "residuals", "deferred")
    given = {name: getattr(costs, name) for name in kept}
    spread: dict[str, Any] = {name: _spread(cost, stages, into) for name, cost in given.items() if cost is not None}
    if into != stages:
        costs = replace(costs, shared=(), reads=())
    return replace(costs, activation=_at_ends(costs.activation, stages, into), **spread)


def shares(timeline: Timeline) -> list[float]:
    """Each rank's peak in flight, where a stage counts as the part that it is of 1/ranks of the model.

    This compares memory between plans: with copies of stages, a rank's two stages are twice its share.

    >>> from fpipe import simulate
    >>> shares(simulate(interleaved_1f1b, Plan(Placement.loop(2, chunks=2), 4)))
    [2.5, 1.5]
    """
    plan = timeline.plan
    shared = plan.ranks / plan.stages
    return [peak * len(plan.stages_on(rank)) * shared for rank, peak in enumerate(timeline.peak_in_flight)]


def _spread(cost: PerStage, stages: int, into: int) -> PerStage:
    if isinstance(cost, float | int):
        return cost * stages / into
    ends = sorted({s * into for s in range(stages + 1)} | {s * stages for s in range(into + 1)})
    found = [0.0] * into
    for begin, end in pairwise(ends):
        found[begin // stages] += cost[begin // into] * (end - begin) / into
    return tuple(found)


def _at_ends(size: PerStage, stages: int, into: int) -> PerStage:
    if isinstance(size, float | int):
        return size
    return tuple(size[((s + 1) * stages - 1) // into] for s in range(into))
