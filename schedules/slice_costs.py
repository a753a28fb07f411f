"""The costs of the slices of microbatches, each by itself and all as one. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from statistics import fmean
from typing import Any, cast

from fpipe.costs import COLLECTIVES_OF, NOT_BY_STAGE, OF_SLICES, OVER_HOST_LINK, Costs, Link, PerStage, relative


def of_each_slice(costs: Costs) -> list[Costs]:
    """Return the costs of each slice by itself; the costs as they are where slices have no costs of their own.

    >>> [each.forward for each in of_each_slice(Costs(forward=[1, 3], slice_scale={"forward": [[1, 1], [0.5, 1.5]]}))]
    [(1.0, 1.5), (1.0, 4.5)]
    """
    by_cost: Any = costs.slice_scale if isinstance(costs.slice_scale, Mapping) else {}
    rows = [row for factors in by_cost.values() for row in ([factors] if _are_of_all(factors) else factors)]

    def at(cost: Any, name: str, t: int) -> Any:
        factors: Any = by_cost.get(name, ())
        if _are_of_all(factors):
            return _times(cost, factors[t] if factors else 1.0)
        listed = cost if isinstance(cost, Sequence) else [cost] * len(factors)
        return tuple(
            _times(each, of_stage[t] if of_stage else 1.0) for each, of_stage in zip(listed, factors, strict=True)
        )

    def alone(t: int) -> Costs:
        spread = {name: at(cost, name, t) for name in by_cost if (cost := getattr(costs, name, None)) is not None}
        waits = {kind: at(cost, COLLECTIVES_OF.get(kind, ""), t) for kind, cost in costs.collectives.items()}
        return replace(costs, slice_scale=(), collectives=waits, **spread)

    return [alone(t) for t in range(max(map(len, rows), default=0))] or [costs]


def over_slices(each: Sequence[Costs], like: Costs) -> Costs:
    """Return the costs of which `of_each_slice` returns these: means, with the factors of each slice.

    Args:
        like: the costs whose names have factors, also where slices are equal.

    >>> costs = Costs(forward=[1, 3], slice_scale={"forward": [[1, 1], [0.5, 1.5]]})
    >>> over_slices(of_each_slice(costs), costs) == costs
    True
    """
    first, scale, names = each[0], dict[str, Any](), {*cast(Any, like.slice_scale)}
    if len(each) == 1:
        return replace(first, slice_scale=like.slice_scale)

    def mean(name: str, costs: Sequence[Any]) -> Any:
        if name not in names and len({*costs}) == 1:
            return costs[0]
        is_by_stage = isinstance(costs[0], Sequence)
        rows = [*zip(*costs, strict=True)] if is_by_stage else [costs]
        means = [*map(fmean, rows)]
        factors = [*map(relative, rows, means)]
        if name in OF_SLICES:
            scale[name] = factors if is_by_stage else factors[0]
        return means if is_by_stage else means[0]

    by_stage = [field.name for field in fields(first) if field.name not in NOT_BY_STAGE]
    merged: dict[str, Any] = {
        name: mean(name, [getattr(costs, name) for costs in each])
        for name in by_stage
        if isinstance(getattr(first, name), float | tuple)
    }
    waits = {
        kind: mean(COLLECTIVES_OF.get(kind, ""), [costs.collectives[kind] for costs in each])
        for kind in first.collectives
    }
    return replace(first, collectives=waits, slice_scale=scale, **merged)


def of_slice(costs: Costs, slices: int) -> Costs:
    """Return the costs of one of equal slices, of those of a whole microbatch.

    Times, activations, residuals and deferred values are spread evenly over the slices; what a stage carries stays.

    >>> of_slice(Costs(forward=[1, 3], backward=8, activation=8, recompute=2), slices=2)
    Costs(forward=(0.5, 1.5), backward_input=0.5, backward_weight=0.5, backward=4.0, activation=4.0, recompute=1.0)
    """
    if slices == 1:
        return costs
    each = {name: getattr(costs, name) for name in _OF_SLICE}
    spread = {
        name: _divided(cost, slices) for name, cost in each.items() if cost is not None and not isinstance(cost, Link)
    }
    collectives = {kind: _divided(cost, slices) for kind, cost in costs.collectives.items()}
    shared = [each._replace(bytes=each.bytes / slices) for each in costs.shared]
    reads = {edge: size / slices for edge, size in costs.reads.items()}
    return replace(costs, collectives=collectives, shared=shared, reads=reads, **spread)


_OF_SLICE = (
    *("forward", "backward_input", "backward_weight", "backward", "overlap", "recompute", *OVER_HOST_LINK),
    *("activation", "residuals", "deferred"),
)


def _divided(cost: PerStage, by: int) -> Any:
    return tuple(each / by for each in cost) if isinstance(cost, Sequence) else cost / by


def _are_of_all(factors: Sequence[Any]) -> bool:
    """Whether factors of slices are those of all stages."""
    return not factors or not isinstance(factors[0], tuple)


def _times(cost: Any, factor: float) -> Any:
    return tuple(each * factor for each in cost) if isinstance(cost, Sequence) else cost * factor
