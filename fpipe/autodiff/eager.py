"""The pieces by eager `torch.autograd.grad` on the stage's function; the split walks the graph once for each half."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fpipe.autodiff.graph.block import Sink
from fpipe.autodiff.interface import Leaves, Prepared, WeightGradients, detached, detached_tree, prepared
from fpipe.stages.microbatch import Microbatch
from fpipe.stages.pytree import Flat, flatten, viewed
from fpipe.stages.stage import Stage


@dataclass(frozen=True, slots=True)
class Residuals:
    """The graph that autograd recorded, by its edges: no tensor is kept but those that its nodes saved.

    Args:
        roots: an edge for each leaf of the outputs, None where there is no gradient.
        inputs: likewise for the leaves of each source stage's output.
        trained: the parameters.
    """

    roots: list[GradientEdge | None]
    inputs: dict[int, list[GradientEdge | None]]
    trained: list[GradientEdge]


@dataclass(frozen=True, slots=True)
class Deferred:
    residuals: Residuals
    cotangents: Leaves


@dataclass(frozen=True)
class Eager:
    """A stage's pieces by eager autograd.

    Args:
        whole: its graph can be walked once only, as with selective checkpointing: `backward_input` then computes
            the weight gradients as well.
    """

    stage: Stage
    whole: bool = False

    def prepare(self, params: Any) -> Prepared:
        return prepared(self.stage, params)

    def forward(
        self, prepared: Prepared, state: Any, sources: Mapping[int, Flat], data: Microbatch, keep: bool
    ) -> tuple[Flat, Residuals | None, Any]:
        own = {source: [detached(x, keep) for x in value.leaves] for source, value in sources.items()}
        outputs = {source: sources[source].spec.unflatten(leaves) for source, leaves in own.items()}
        with torch.set_grad_enabled(keep):
            tree, new = self.stage(prepared.tree, state, self.stage.arguments(outputs, self.stage.given(data)))
            leaves, spec = flatten(viewed(tree))
        given = Flat([detached(x, keep) for x in leaves], spec)
        if not keep:
            return given, None, detached_tree(new)
        if Eager not in prepared.computed:
            prepared.computed[Eager] = [get_gradient_edge(prepared.own[i]) for i in prepared.trained]
        inputs = {source: list(map(_edge, found)) for source, found in own.items()}
        residuals = Residuals(list(map(_edge, leaves)), inputs, prepared.computed[Eager])
        return given, residuals, detached_tree(new)

    def backward(
        self, residuals: Residuals, cotangents: Leaves, sink: Sink | None = None
    ) -> tuple[WeightGradients, dict[int, Leaves]]:
        count = len(residuals.trained)
        found = _gradients(residuals, cotangents, [*residuals.trained, *_wanted(residuals)], retain=False)
        return WeightGradients(found[:count]), _by_source(residuals, found[count:])

    def backward_input(
        self, residuals: Residuals, cotangents: Leaves
    ) -> tuple[dict[int, Leaves], Deferred | WeightGradients]:
        if self.whole:
            weights, inputs = self.backward(residuals, cotangents)
            return inputs, weights
        found = _gradients(residuals, cotangents, _wanted(residuals), retain=True)
        return _by_source(residuals, found), Deferred(residuals, cotangents)

    def backward_weight(self, deferred: Deferred | WeightGradients, sink: Sink | None = None) -> WeightGradients:
        if isinstance(deferred, WeightGradients):
            return deferred
        residuals = deferred.residuals
        return WeightGradients(_gradients(residuals, deferred.cotangents, residuals.trained, retain=False))


def _edge(x: Any) -> GradientEdge | None:
    return get_gradient_edge(x) if isinstance(x, Tensor) and x.requires_grad else None


def _wanted(residuals: Residuals) -> list[GradientEdge]:
    """The input leaves that want a gradient."""
    return [edge for edges in residuals.inputs.values() for edge in edges if edge is not None]


def _by_source(residuals: Residuals, found: Leaves) -> dict[int, Leaves]:
    """The gradients of `_wanted`, put where their leaves stand."""
    rest = iter(found)
    return {
        source: [None if edge is None else next(rest) for edge in edges] for source, edges in residuals.inputs.items()
    }


def _gradients(residuals: Residuals, cotangents: Leaves, wrt: Sequence[GradientEdge], retain: bool) -> Leaves:
    pairs = [
        (root, cotangent)
        for root, cotangent in zip(residuals.roots, cotangents, strict=True)
        if cotangent is not None and root is not None
    ]
    if not pairs or not wrt:
        return [None] * len(wrt)
    roots, seeds = zip(*pairs, strict=True)
    try:
        return list(torch.autograd.grad(roots, wrt, seeds, allow_unused=True, retain_graph=retain))
    except RuntimeError as error:
        if is_reentrant(error):
            raise RuntimeError(NO_REENTRANT) from error
        if "selective activation checkpoint" in str(error):
            raise RuntimeError(NO_SECOND_WALK) from error
        raise


NO_REENTRANT = (
    "it calls torch.utils.checkpoint with use_reentrant=True, which torch.autograd.grad can't differentiate: pass "
    "use_reentrant=False, or leave it out and give value_and_grad policy=fpipe.policies.nothing_saveable (with graphs)"
)
NO_SECOND_WALK = (
    "it uses selective checkpointing, whose graph eager autograd can walk only once: take a schedule that doesn't "
    "split the backward, or a stage that can be traced"
)


def is_reentrant(error: Exception) -> bool:
    """Whether autograd says that a reentrant checkpoint is in its way."""
    text = str(error)
    return isinstance(error, RuntimeError) and "heckpoint" in text and ".grad()" in text
