"""The named schedules as data: placement, factory, peak memory, idea and source of each. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from itertools import pairwise
from typing import Any

from fpipe.costs import OVER_REPLICAS, UNSCALED, Costs, Link, PerStage
from fpipe.effects import BackwardInput, BackwardWeight
from fpipe.errors import ScheduleError
from fpipe.errors.arguments import checked
from fpipe.plan import Placement, Plan, Schedule
from fpipe.schedules.controllable_memory import v_auto, v_half, v_min
from fpipe.schedules.dualpipe import dualpipe, dualpipe_v
from fpipe.schedules.gpipe import gpipe
from fpipe.schedules.interleaved import interleaved_1f1b, interleaved_1f1b_overlap
from fpipe.schedules.interleaved_zb import interleaved_zb
from fpipe.schedules.looped_bfs import looped_bfs
from fpipe.schedules.one_f_one_b import one_f_one_b
from fpipe.schedules.seq_1f1b import seq_1f1b, seq_zb
from fpipe.schedules.zb_auto import zb_auto
from fpipe.schedules.zb_v import zb_v
from fpipe.schedules.zero_bubble import zb_h1, zb_h2
from fpipe.timelines.timeline import Timeline

PlacementFactory = Callable[[int, int], Placement]


@dataclass(frozen=True)
class CatalogueEntry:
    """A named schedule.

    Args:
        function: the schedule; `(rank, plan, costs=)` with `by_costs`. With `limited`, a function of plan, costs and
            memory limit, in microbatches of a whole rank, that returns one.
        place: (ranks, chunks) -> placement; `placement` is its name.
        chunks: stages on each rank by default; with `any_chunks`, a plan may have another number.
        peak: the peak in flight, in microbatches of a rank's share of the model, at equal costs and m large enough:
            p ranks, v chunks, m microbatches, s slices.
        slices: of each microbatch by default; None for a schedule that takes no slices.
        by_costs: whether it orders by costs.
        limited: whether it orders by costs and under the memory limit.
    """

    name: str
    function: Callable[..., Any]
    place: PlacementFactory
    placement: str
    chunks: int
    any_chunks: bool
    peak: str
    idea: str
    source: str
    by_costs: bool = False
    limited: bool = False
    slices: int | None = None

    def __repr__(self) -> str:
        return f"CATALOGUE[{self.name!r}]"

    def plan(self, ranks: int, microbatches: int, chunks: int | None = None, slices: int | None = None) -> Plan:
        """Return the plan with the schedule's own placement.

        Raises:
            ScheduleError: chunks, ranks or microbatches that the placement does not allow, or slices that the schedule
                does not take.

        >>> CATALOGUE["1f1b"].plan(ranks=2, microbatches=4, chunks=2)
        Traceback (most recent call last):
        fpipe.errors.ScheduleError: 1f1b has 1 stage on each rank, not 2
        """
        if chunks not in (None, self.chunks) and not self.any_chunks:
            stages = "stage" if self.chunks == 1 else "stages"
            raise ScheduleError(f"{self.name} has {self.chunks} {stages} on each rank, not {chunks}")
        placement = self.place(ranks, self.chunks if chunks is None else chunks)
        if self.slices is None and slices not in (None, 1):
            takes = ", ".join(name for name, entry in CATALOGUE.items() if entry.slices)
            raise ScheduleError(f"{self.name} takes no slices: leave them out, or take one of {takes}")
        return Plan(placement, microbatches, slices=slices or self.slices or 1)

    def schedule(
        self, plan: Plan, costs: Costs = Costs(), memory_limit: float | Sequence[float] | None = None
    ) -> Schedule:
        """Return the schedule for a plan; those that order by costs or under a memory limit use these.

        Raises:
            ScheduleError: no order fits the limit or the costs. A wrong plan raises when the schedule runs.
        """
        if self.limited:
            schedule: Schedule = self.function(plan, costs, memory_limit)
            return schedule
        return partial(self.function, costs=costs) if self.by_costs else self.function


def _wave(ranks: int, chunks: int) -> Placement:
    if chunks % 2:
        raise ScheduleError(f"a wave has two stages on each rank: take an even number of them, not {chunks}")
    return Placement.wave(ranks, waves=chunks // 2)


PLACES: dict[str, PlacementFactory] = {
    "loop": Placement.loop,
    "v": lambda ranks, chunks: Placement.v(ranks),
    "wave": _wave,
    "both-ways": lambda ranks, chunks: Placement.both_ways(ranks),
}

# place, placement, chunks, any_chunks
_ANY = (PLACES["loop"], "any", 1, True)
_CHAIN = (PLACES["loop"], "chain", 1, False)
_LOOP = (PLACES["loop"], "loop", 2, True)
_V = (PLACES["v"], "V", 2, False)
_BOTH_WAYS = (PLACES["both-ways"], "both ways", 2, False)

_AUTO = "the best order found for the costs and the limit"
_ZERO_BUBBLE, _CONTROLLABLE = "Qi et al. 2024, zero bubble", "Qi et al. 2024, controllable memory"

# name, function, placement, peak, idea, source
_ENTRIES = (
    CatalogueEntry("gpipe", gpipe, *_ANY, "m", "all forwards, then all backwards", "Huang et al. 2019", slices=1),
    CatalogueEntry("1f1b", one_f_one_b, *_CHAIN, "p", "a forward and a backward in turn", "Narayanan et al. 2019"),
    CatalogueEntry(
        "interleaved-1f1b",
        interleaved_1f1b,
        *_LOOP,
        "p + (p-1)/v",
        "1F1B over several chunks of a rank",
        "Narayanan et al. 2021",
    ),
    CatalogueEntry(
        "interleaved-1f1b-overlap",
        interleaved_1f1b_overlap,
        *_LOOP,
        "p + p/v",
        "interleaved 1F1B, each forward overlapped with a backward",
        "Megatron-LM 2025",
    ),
    CatalogueEntry(
        "looped-bfs",
        looped_bfs,
        *_LOOP,
        "m",
        "every chunk takes all microbatches at a time",
        "Lamy-Poirier 2023",
    ),
    CatalogueEntry("zb-h1", zb_h1, *_CHAIN, "p", "1F1B, its weight gradients in the bubble", _ZERO_BUBBLE),
    CatalogueEntry("zb-h2", zb_h2, *_CHAIN, "2*p - 1", "ZB-H1 with more forwards ahead: no bubble", _ZERO_BUBBLE),
    CatalogueEntry(
        "seq-1f1b",
        seq_1f1b,
        *_CHAIN,
        "1 + (p - 1)/s",
        "1F1B over slices of the sequences, which a stage carries values between",
        "Sun et al. 2024",
        slices=2,
    ),
    CatalogueEntry(
        "seq-zb",
        seq_zb,
        *_CHAIN,
        "1 + (p - 1)/s",
        "the same, its weight gradients in the bubble",
        "after Sun et al. 2024 and ZB-H1",
        slices=2,
    ),
    CatalogueEntry("zb-auto", zb_auto, *_ANY, "the limit", _AUTO, _ZERO_BUBBLE, limited=True),
    CatalogueEntry(
        "interleaved-zb",
        interleaved_zb,
        *_LOOP,
        "p",
        "interleaved 1F1B, its weight gradients in the bubble",
        "after ZB-H1",
    ),
    CatalogueEntry("zb-v", zb_v, *_V, "p", "no bubble with the memory of 1F1B, over a V", _ZERO_BUBBLE, by_costs=True),
    CatalogueEntry(
        "v-half", v_half, *_V, "(p + 2) // 2", "about half of that memory, over a V", _CONTROLLABLE, by_costs=True
    ),
    CatalogueEntry(
        "v-min", v_min, *_V, "(p + 4) // 3", "about a third of that memory, over a V", _CONTROLLABLE, by_costs=True
    ),
    CatalogueEntry("v-auto", v_auto, *_V, "the limit", f"{_AUTO}, over a V", _CONTROLLABLE, limited=True),
    CatalogueEntry(
        "dualpipe-v",
        dualpipe_v,
        *_V,
        "p + 1/2",
        "DualPipe folded into a V, without copies",
        "DualPipe repository 2025",
    ),
    CatalogueEntry(
        "dualpipe",
        dualpipe,
        *_BOTH_WAYS,
        "p + 1",
        "microbatches from both ends, through two copies of each stage",
        "DeepSeek-V3 2024",
    ),
)
CATALOGUE = {entry.name: entry for entry in _ENTRIES}


@checked()
def get(name: str) -> Schedule:
    """Return a schedule of the catalogue. Where a function takes a schedule, it also takes such a name.

    Args:
        name: a key of `CATALOGUE`, or the name of its function; capitals, - and _ make no difference.

    Raises:
        ScheduleError: there is none; or it is not one order, but ordered for a plan and its costs.

    >>> get("zb-v") is zb_v
    True
    """
    entry = named(name)
    if entry.limited:
        function = entry.function.__name__
        raise ScheduleError(
            f"{entry.name} is ordered for a plan and its costs: take schedules.{function}(plan, costs), or "
            f"schedules.{function}(plan, costs, memory_limit)"
        )
    schedule: Schedule = entry.function
    return schedule


def named(name: str) -> CatalogueEntry:
    """Return the entry of a name, as `get` takes it.

    Raises:
        ScheduleError: there is none.
    """
    plain = name.lower().replace("_", "-")
    names = CATALOGUE | {entry.function.__name__.replace("_", "-"): entry for entry in _ENTRIES}
    if plain not in names:
        near = sorted(get_close_matches(plain, CATALOGUE, n=2, cutoff=0.5))
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(CATALOGUE)}"
        raise ScheduleError(f"no schedule is called {name!r}: {hint}")
    return names[plain]


def recut(costs: Costs, stages: int, into: int) -> Costs:
    """Return the costs of the same model, split into another number of equal stages.

    Times, residuals, deferred values, parameters and gradients are spread evenly over a stage; its output stays as
    large. Memory that stages share, and the parts of outputs that they read, are unknown for another cut.

    Args:
        costs: of a cut into `stages`.
        into: the stages of the new cut.

    >>> recut(Costs(forward=2, activation=8), stages=4, into=8).forward
    1.0
    >>> recut(Costs(forward=[1, 2, 3, 6]), stages=4, into=2).forward
    (3.0, 9.0)
    """
    names = ("forward", "backward_input", "backward_weight", "backward", "overlap", "residuals", "deferred")
    per_stage = {name: getattr(costs, name) for name in (*names, *UNSCALED, *OVER_REPLICAS)}
    spread: dict[str, Any] = {
        name: _spread(cost, stages, into)
        for name, cost in per_stage.items()
        if cost is not None and not isinstance(cost, Link)
    }
    if into != stages:
        costs = replace(costs, shared=(), reads={})
    spread["collectives"] = {kind: _spread(cost, stages, into) for kind, cost in costs.collectives.items()}
    return replace(costs, activation=_at_ends(costs.activation, stages, into), **spread)


def of_slice(costs: Costs, slices: int) -> Costs:
    """Return the costs of one of equal slices, of those of a whole microbatch.

    Times, activations, residuals and deferred values are spread evenly over the slices; what a stage carries stays.

    >>> of_slice(Costs(forward=[1, 3], backward=8, activation=8), slices=2).forward
    (0.5, 1.5)
    """
    if slices == 1:
        return costs
    spread = {name: _divided(cost, slices) for name in _OF_SLICE if (cost := getattr(costs, name)) is not None}
    collectives = {kind: _divided(cost, slices) for kind, cost in costs.collectives.items()}
    shared = [each._replace(bytes=each.bytes / slices) for each in costs.shared]
    reads = {edge: size / slices for edge, size in costs.reads.items()}
    return replace(costs, collectives=collectives, shared=shared, reads=reads, **spread)


_OF_SLICE = (
    *("forward", "backward_input", "backward_weight", "backward", "overlap"),
    *("activation", "residuals", "deferred"),
)


def _divided(cost: PerStage, by: int) -> Any:
    return tuple(each / by for each in cost) if isinstance(cost, Sequence) else cost / by


def existing(costs: Costs, plan: Plan) -> Costs:
    """Return the costs of a plan's stages with zeros for the halves of backwards that these do not have.

    So they can be recut for a plan in which a trained part of the model makes a stage with one that is not.

    >>> existing(Costs(backward_weight=3), Plan(Placement.loop(3), 1, trained=[1])).backward_weight
    (0.0, 3.0, 0.0)
    """
    if plan.trained is None:
        return costs
    stages = range(plan.stages)
    has_input, has_weight = [*map(plan.has_input_half, stages)], [*map(plan.is_trained, stages)]
    both = [i and w for i, w in zip(has_input, has_weight, strict=True)]

    def where(has: Sequence[bool], cost: str) -> list[float]:
        per_stage = getattr(costs, cost)
        listed = per_stage if isinstance(per_stage, Sequence) else [per_stage] * plan.stages
        return [number if here else 0.0 for here, number in zip(has, listed, strict=True)]

    inputs, weights = where(has_input, "backward_input"), where(has_weight, "backward_weight")
    backward = costs.backward
    if backward is not None:
        whole = where(both, "backward")
        backward = [whole[s] if both[s] else inputs[s] + weights[s] for s in stages]
    return replace(
        costs,
        backward_input=inputs,
        backward_weight=weights,
        backward=backward,
        residuals=where([*map(plan.is_differentiated, stages)], "residuals"),
        deferred=where(both, "deferred"),
    )


def recut_for(costs: Costs, plan: Plan, candidate: Plan) -> Costs:
    """Return the costs of a plan's stages for another plan of the same model.

    Where the first part of a stage is trained and no stage before it, the input gradients of its later parts are steps
    on the way to its weight gradients.
    """
    costs = recut(existing(costs, plan), plan.stages, candidate.stages)
    if candidate.trained is None or plan.stages == candidate.stages:
        return costs
    stages = range(candidate.stages)
    inputs = [costs.time(BackwardInput(s, 0)) for s in stages]
    within = [0.0 if candidate.has_input_half(s) else inputs[s] for s in stages]
    weights = [costs.time(BackwardWeight(s, 0)) + within[s] for s in stages]
    return replace(costs, backward_input=[a - b for a, b in zip(inputs, within, strict=True)], backward_weight=weights)


def recut_trained(trained: Collection[int] | None, stages: int, into: int) -> frozenset[int] | None:
    """Return the trained stages of the same model, split into another number of stages: those with a trained part.

    >>> sorted(recut_trained([3], stages=4, into=8)), sorted(recut_trained([1], stages=4, into=2))
    ([6, 7], [0])
    """
    if trained is None:
        return None
    return frozenset(
        s for s in range(into) if any(t * into < (s + 1) * stages and s * stages < (t + 1) * into for t in trained)
    )


def shares(timeline: Timeline) -> list[float]:
    """Return each rank's peak in flight, where a stage counts as its part of 1/ranks of the model.

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
    costs = [0.0] * into
    for begin, end in pairwise(ends):
        costs[begin // stages] += cost[begin // into] * (end - begin) / into
    return tuple(costs)


def _at_ends(size: PerStage, stages: int, into: int) -> PerStage:
    if isinstance(size, float | int):
        return size
    return tuple(size[((s + 1) * stages - 1) // into] for s in range(into))
