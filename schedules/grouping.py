"""Stages that are made of neighbouring layers, each of them whole: their plan, and their costs. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from operator import sub
from statistics import fmean
from typing import Any

from fpipe.costs import OVER_HOST_LINK, OVER_REPLICAS, UNSCALED, Costs, Link, PerStage, Shared, Tied
from fpipe.effects import Activation, BackwardInput, BackwardWeight, Deferred, Forward, Gradient, Residuals
from fpipe.errors import ScheduleError
from fpipe.plan import Edges, Placement, Plan
from fpipe.schedules.cuts import existing
from fpipe.schedules.slice_costs import of_each_slice, over_slices

TIMES = ("forward", "backward_input", "backward_weight", "backward", "overlap", "recompute", "prefill", "decode")
SUMMED = (*TIMES, *OVER_HOST_LINK, *OVER_REPLICAS, "residuals", "deferred", "carry", "carry_gradient", *UNSCALED)
HALVES = (BackwardInput, BackwardWeight)
NEGLIGIBLE = 0.01  # the time of an input gradient that is none, in those of a mean layer's


class Grouping:
    """The stages of some numbers of neighbouring layers.

    Args:
        layers: how many each stage has.
        host: time that each piece of a stage takes beside those of its layers.

    Raises:
        ScheduleError: they are not all layers, or a stage has none.
    """

    def __init__(self, plan: Plan, layers: Sequence[int], host: float = 0.0) -> None:
        if sum(layers) != plan.stages or min(layers) < 1:
            raise ScheduleError(f"stages of {[*layers]} layers are no cut of {plan.stages}: give each at least one")
        self.plan, self.layers, self.host = plan, layers, host
        self.stage_of = [stage for stage, count in enumerate(layers) for _ in range(count)]

    def placed(self, placement: Placement) -> Plan:
        """Return the plan of the stages on their ranks, which is that of the layers otherwise."""
        plan, of = self.plan, self.stage_of
        reads = [set[int]() for _ in self.layers]
        for layer, stage in enumerate(of):
            reads[stage] |= {of[source] for source in plan.sources(layer)} - {stage}
        ties = {tuple(sorted({of[layer] for layer in group})) for group in plan.ties}
        return replace(
            plan,
            placement=placement,
            edges=Edges([sorted(sources) for sources in reads]),
            ties=tuple(sorted(group for group in ties if len(group) > 1)),
            trained=None if plan.trained is None else {of[layer] for layer in plan.trained},
            batch_gradients=frozenset(of[layer] for layer in plan.batch_gradients),
        )

    def costs(self, costs: Costs, placed: Plan) -> Costs:
        """Return the costs of the stages: times and sizes are sums, outputs are what later stages read.

        What layers of a stage have in common counts once. Input gradients that no other stage needs, such as those of a
        stage whose first layer has none, are steps on the way to weight gradients.
        """
        inner = self._inner(_plain(existing(costs, self.plan)))
        slices = [
            self._of_slice(_plain(existing(each, self.plan)), inner, placed, t if costs.has_sizes_of_slices else 0)
            for t, each in enumerate(of_each_slice(costs))
        ]
        return replace(over_slices(slices, costs), scale=costs.scale, sizes=costs.sizes)

    def _of_slice(self, layers: Costs, inner: Sequence[int], placed: Plan, shares_as: int) -> Costs:
        """Return the costs of the stages for one slice.

        Args:
            layers: their costs without factors.
            shares_as: the slice in whose names it shares memory.
        """
        sums: dict[str, Any] = {
            name: self._sums(cost)
            for name in SUMMED
            if (cost := getattr(layers, name)) is not None and not isinstance(cost, Link)
        }
        sums["activation"] = self._outputs(layers)
        shared, twice = self._shared(layers)
        for name, kind in (("activation", Activation), ("residuals", Residuals), ("deferred", Deferred)):
            more = [twice[kind(stage, 0, shares_as)] for stage in range(len(self.layers))]
            sums[name] = [*map(sub, sums[name], more)]
        collectives = {kind: self._sums(cost) for kind, cost in layers.collectives.items()}
        between: dict[str, Any] = {"reads": self._reads(layers), "shared": shared, "tied": self._tied(layers)}
        stages = replace(layers, **sums, **between, collectives=collectives)
        return self._with_host(self._without_unused_inputs(layers, inner, stages, placed))

    def _sums(self, cost: PerStage) -> list[float]:
        sums = [0.0] * len(self.layers)
        for layer, stage in enumerate(self.stage_of):
            sums[stage] += cost[layer] if isinstance(cost, Sequence) else cost
        return sums

    def _leaves(self, layer: int) -> bool:
        """Whether a layer's output leaves its stage."""
        readers = self.plan.consumers(layer)
        return not readers or any(self.stage_of[reader] != self.stage_of[layer] for reader in readers)

    def _outputs(self, costs: Costs) -> list[float]:
        sizes = [costs.bytes(Activation(layer, 0)) * self._leaves(layer) for layer in range(self.plan.stages)]
        return self._sums(sizes)

    def _reads(self, costs: Costs) -> dict[tuple[int, int], float]:
        """Return what stages read of others, where they do not read all: of each layer what all of theirs read.

        Readers of a part may read another part each, so parts add up to at most the whole.
        """
        parts, of = Counter[tuple[int, int]](), self.stage_of
        for reader in range(self.plan.stages):
            for source in self.plan.sources(reader):
                if of[source] != of[reader]:
                    parts[source, of[reader]] += costs.read(source, reader)  # type: ignore[assignment]
        read = Counter[tuple[int, int]]()
        for (source, reader), size in parts.items():
            read[of[source], reader] += min(size, costs.bytes(Activation(source, 0)))  # type: ignore[assignment]
        whole = self._outputs(costs)
        return {edge: size for edge, size in read.items() if size < whole[edge[0]]}

    def _shared(self, costs: Costs) -> tuple[list[Shared], Counter[Any]]:
        """Return the memory that names of stages share, and by how much the sums of each name count it too often."""
        shared, twice = list[Shared](), Counter[Any]()
        for size, names in costs.shared:
            there = [each for each in names if costs.bytes(each)]  # frozen layers have no residuals
            inside = [name for each in there if (name := self._name(each)) is not None]
            for name, count in Counter(inside).items():
                twice[name] += (count - 1) * size  # type: ignore[assignment]
            if len({*inside}) > 1:
                shared.append(Shared(size, tuple(dict.fromkeys(inside))))
        return shared, twice

    def _tied(self, costs: Costs) -> list[Tied]:
        """Return the parameters that several stages use; a stage whose layers share them has them once."""
        tied = [Tied(size, tuple(sorted({self.stage_of[layer] for layer in layers}))) for size, layers in costs.tied]
        return [each for each in tied if len(each.stages) > 1]

    def _name(self, name: Any) -> Any:
        """Return the stage's name of a layer's value; None for one that does not leave its stage."""
        of = self.stage_of
        if isinstance(name, Activation) and not self._leaves(name.stage):
            return None
        if isinstance(name, Gradient):
            stage, consumer = of[name.stage], of[name.consumer]
            return None if stage == consumer else replace(name, stage=stage, consumer=consumer)
        return replace(name, stage=of[name.stage]) if hasattr(name, "stage") else name

    def _without_unused_inputs(self, layers: Costs, inner: Sequence[int], stages: Costs, placed: Plan) -> Costs:
        """Return the costs with the input gradients that no other stage needs as a part of weight gradients.

        Those of a layer behind a root in its stage are steps on the way to the root's weight gradients. All that the
        layer keeps is then deferred.
        """
        inputs, weights = ([stages.time(kind(s, 0)) for s in range(placed.stages)] for kind in HALVES)
        residuals, deferred = (
            [stages.bytes(kind(s, 0)) for s in range(placed.stages)] for kind in (Residuals, Deferred)
        )
        for layer in inner:
            s, own = self.stage_of[layer], layers.time(BackwardInput(layer, 0))
            inputs[s], weights[s] = max(0.0, inputs[s] - own), weights[s] + own
            deferred[s] += max(0.0, layers.bytes(Residuals(layer, 0)) - layers.bytes(Deferred(layer, 0)))
        for s in {self.stage_of[layer] for layer in inner}:
            deferred[s] = min(deferred[s], max(residuals[s], stages.bytes(Deferred(s, 0))))
        return replace(stages, backward_input=inputs, backward_weight=weights, deferred=deferred)

    def _with_host(self, stages: Costs) -> Costs:
        """Return the costs with the host's time in that of each piece, once in a fused backward."""
        count = len(self.layers)
        backward = [stages.at("backward", BackwardInput(stage, 0)) for stage in range(count)]
        costs = {name: getattr(stages, name) for name in TIMES} | {"backward": backward}
        listed = {name: [cost] * count if isinstance(cost, float) else cost for name, cost in costs.items()}
        pieces: dict[str, Any] = {
            name: [time + self.host for time in cost] for name, cost in listed.items() if cost is not None
        }
        return replace(stages, **pieces) if self.host else stages

    def _inner(self, costs: Costs) -> list[int]:
        """Return the layers whose input gradients, if any, end inside their stage.

        A root of an unfrozen model has input gradients by its name. Where they take time, they count as such.
        """
        plan, of = self.plan, self.stage_of
        times = [costs.time(BackwardInput(layer, 0)) for layer in range(plan.stages)]
        reach = set(plan.batch_gradients)  # the layers whose input gradients lead to other stages, or to the batch
        for layer, time in enumerate(times):
            sources = plan.differentiated_sources(layer)
            is_named = plan.trained is None and not plan.sources(layer) and time >= NEGLIGIBLE * fmean(times)
            if is_named or any(of[source] != of[layer] or source in reach for source in sources):
                reach.add(layer)
        return [layer for layer in range(plan.stages) if layer not in reach]


def times_of(plan: Plan, costs: Costs) -> list[float]:
    """Return the time of each layer for a microbatch: of its forward, and of its backward, whole or in halves.

    It is the shorter of the two, so that no stage that has the layer takes less for it.
    """
    costs = _plain(existing(costs, plan))
    times = []
    for layer in range(plan.stages):
        halves = costs.time(BackwardInput(layer, 0)) + costs.time(BackwardWeight(layer, 0))
        whole = halves if costs.backward is None else min(halves, costs.at("backward", BackwardInput(layer, 0)))
        times.append(costs.time(Forward(layer, 0)) + whole)
    return times


def _plain(costs: Costs) -> Costs:
    """Return the costs without the factors of microbatches and slices."""
    return replace(costs, scale=(), sizes=(), slice_scale=())
