"""The costs of one model under another cut into stages. No torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from fpipe.costs import OVER_HOST_LINK, OVER_REPLICAS, UNSCALED, Costs, Link, PerStage
from fpipe.effects import BackwardInput, BackwardWeight
from fpipe.errors import ScheduleError
from fpipe.plan import Edges, Placement, Plan
from fpipe.schedules.slice_costs import of_each_slice, over_slices


def recut(costs: Costs, stages: int, into: int) -> Costs:
    """Return the costs of the same model, split into another number of equal stages.

    Times, residuals, deferred values, parameters and gradients are spread evenly over a stage; its output stays as
    large. Tied parameters are taken to be in the first part of the lowest stage that uses them, and in the last part of
    each other one, as an embedding and an output layer are. Memory that stages share is unknown for another cut, and so
    are the parts of outputs that they read.

    Args:
        costs: of a cut into `stages`.
        into: the stages of the new cut.

    >>> recut(Costs(forward=2, activation=8), stages=4, into=8).forward
    1.0
    >>> recut(Costs(forward=[1, 2, 3, 6]), stages=4, into=2).forward
    (3.0, 9.0)
    """
    if into == stages:
        return costs
    return over_slices([_recut(each, stages, into) for each in of_each_slice(costs)], costs)


def _recut(costs: Costs, stages: int, into: int) -> Costs:
    spread: dict[str, Any] = {name: _spread(cost, stages, into) for name, cost in _spreadable(costs).items()}
    spread |= _spread_tied(costs, stages, into)
    spread["collectives"] = {kind: _spread(cost, stages, into) for kind, cost in costs.collectives.items()}
    return replace(costs, activation=_at_ends(costs.activation, stages, into), shared=(), reads={}, **spread)


def _spreadable(costs: Costs) -> dict[str, Any]:
    """Return the times and sizes that the parts of a stage have their shares of, by name."""
    backward = ("backward_input", "backward_weight", "backward", "overlap")
    times = ("forward", *backward, "recompute", "prefill", "decode", *OVER_HOST_LINK)
    names = (*times, "residuals", "deferred", "carry", "carry_gradient", *UNSCALED, *OVER_REPLICAS)
    each = {name: getattr(costs, name) for name in names}
    return {name: cost for name, cost in each.items() if cost is not None and not isinstance(cost, Link)}


def splits_vocabulary(plan: Plan) -> bool:
    """Whether the stages are those of a vocabulary that is split over ranks; on one rank, these are like any others."""
    is_placed = plan.ranks > 1 and plan.placement == Placement.vocabulary(plan.ranks)
    return is_placed and plan.edges == Edges.vocabulary(plan.ranks)


def stage_shares(plan: Plan) -> tuple[float, ...]:
    """Return the part of a rank's share of the model that each stage is.

    Stages are equal. But where the vocabulary is split, a block is two thirds and a part of the output layer one third,
    as in a model whose output layer is a third of the work; parts of the embedding and the loss count as nothing.

    >>> stage_shares(Plan(Placement.v(ranks=2), microbatches=4))
    (0.5, 0.5, 0.5, 0.5)
    >>> [round(share, 2) for share in stage_shares(Plan(Placement.vocabulary(2), 4, Edges.vocabulary(2)))]
    [0.0, 0.0, 0.67, 0.67, 0.33, 0.33, 0.0]
    """
    if not splits_vocabulary(plan):
        return (plan.ranks / plan.stages,) * plan.stages
    return (*[0.0] * plan.ranks, *[2 / 3] * plan.ranks, *[1 / 3] * plan.ranks, 0.0)


def of_shares(costs: Costs, plan: Plan) -> Costs:
    """Return the costs of a plan's stages, from those of a rank's share of the model: one number each.

    A part of the output layer computes its input gradient in its forward (`schedules.vocabulary_1f1b`).

    >>> of_shares(Costs(forward=3, backward_input=3), Plan(Placement.vocabulary(2), 4, Edges.vocabulary(2))).forward
    (0.0, 0.0, 2.0, 2.0, 2.0, 2.0, 0.0)
    """
    if not splits_vocabulary(plan):
        return recut(costs, plan.ranks, plan.stages)
    shares = stage_shares(plan)

    def shared(cost: Any) -> list[float]:
        return [share * cost for share in shares]

    spread: dict[str, Any] = {name: shared(cost) for name, cost in _spreadable(costs).items()}
    for head in range(2 * plan.ranks, 3 * plan.ranks):
        spread["forward"][head] += spread["backward_input"][head]
        spread["backward_input"][head] = 0.0
    spread["collectives"] = {kind: shared(cost) for kind, cost in costs.collectives.items()}
    return replace(costs, **spread)


def existing(costs: Costs, plan: Plan) -> Costs:
    """Return the costs of a plan's stages with zeros for the halves of backwards that these do not have.

    So they can be recut for a plan in which a trained part of the model makes a stage with one that is not.

    >>> from fpipe import Placement
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

    Raises:
        ScheduleError: the other plan's stages are no equal parts of the model.
    """
    if candidate.edges not in (plan.edges, Edges.chain(candidate.stages)):
        raise ScheduleError(
            "its stages are not equal parts of a chain of layers, so that their costs do not follow from those of "
            "others: simulate it with costs of its own, one a stage"
        )
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


def _spread(cost: PerStage, stages: int, into: int) -> PerStage:
    return cost * stages / into if isinstance(cost, float | int) else _parts(cost, stages, into)


def _parts(cost: Sequence[float], stages: int, into: int) -> tuple[float, ...]:
    ends = sorted({s * into for s in range(stages + 1)} | {s * stages for s in range(into + 1)})
    costs = [0.0] * into
    for begin, end in pairwise(ends):
        costs[begin // stages] += cost[begin // into] * (end - begin) / into
    return tuple(costs)


def _spread_tied(costs: Costs, stages: int, into: int) -> dict[str, Any]:
    """Return the tied parameters under another cut, and the sizes of which they are a part, where there are some."""
    sizes: dict[str, Any] = {}
    for name in ("parameters", "gathered", "gradients") if costs.tied else ():
        if (size := getattr(costs, name)) is not None:
            others: list[float] = list(size) if isinstance(size, Sequence) else [size] * stages
            lowest = [0.0] * into
            for each in costs.tied:
                own = min(costs.tied_bytes(name, each), others[each.stages[0]])
                others[each.stages[0]] -= own
                lowest[each.stages[0] * into // stages] += own
            sizes[name] = [a + b for a, b in zip(lowest, _parts(others, stages, into), strict=True)]
    users = [
        {first * into // stages, *(((s + 1) * into - 1) // stages for s in rest)}
        for first, *rest in (each.stages for each in costs.tied)
    ]
    tied = [each._replace(stages=tuple(sorted(of))) for each, of in zip(costs.tied, users, strict=True) if len(of) > 1]
    return {"tied": tied, **sizes}


def _at_ends(size: PerStage, stages: int, into: int) -> PerStage:
    if isinstance(size, float | int):
        return size
    return tuple(size[((s + 1) * stages - 1) // into] for s in range(into))
