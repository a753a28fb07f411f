"""Autodiff of a stage by eager `torch.autograd.grad`. A split backward walks autograd's graph once for each half."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fpipe.autodiff.graph.block import Sink
from fpipe.autodiff.graph.collectives import Communicates, RefusingCollectives
from fpipe.autodiff.graph.input_writes import PARAMETER_WRITTEN, refusing_writes
from fpipe.autodiff.graph.lost_gradients import EagerLeaves
from fpipe.autodiff.interface import (
    DATA,
    PARAMS,
    Argument,
    Leaves,
    Prepared,
    WeightGradients,
    detached,
    detached_tree,
    differentiated,
    differentiates_data,
    prepared,
)
from fpipe.devices import without_autocast
from fpipe.errors import StageError
from fpipe.stages.microbatch import Microbatch
from fpipe.stages.pytree import Flat, alias_leaves, flatten
from fpipe.stages.stage import Stage


@dataclass(frozen=True, slots=True)
class SavedTape:
    """The graph that autograd recorded, by its edges. It keeps only the tensors that autograd's nodes saved.

    Args:
        roots: an edge for each leaf of the outputs; None without a gradient.
        inputs: the same for the leaves of each source stage's output, and of what the stage reads of the microbatch.
        trained: edges of the trained parameters.
    """

    roots: list[GradientEdge | None]
    inputs: dict[int, list[GradientEdge | None]]
    trained: list[GradientEdge]


@dataclass(frozen=True, slots=True)
class DeferredTape:
    residuals: SavedTape
    cotangents: Leaves


@dataclass(frozen=True)
class Eager:
    """Autodiff of a stage by eager autograd.

    Args:
        whole: autograd can walk the stage's graph only once, as with selective checkpointing. `backward_input` then
            computes the weight gradients as well.
        argnums: the arguments of the step that are differentiated.
    """

    stage: Stage
    whole: bool = False
    leaves: EagerLeaves = field(default_factory=EagerLeaves, compare=False)
    argnums: frozenset[Argument] = PARAMS

    @cached_property
    def differentiates_data(self) -> bool:
        return differentiates_data(self.stage, self.argnums)

    def prepare(self, params: Any) -> Prepared:
        return prepared(self.stage, params, self.argnums)

    def forward(
        self, prepared: Prepared, state: Any, sources: Mapping[int, Flat], data: Microbatch, keep: bool
    ) -> tuple[Flat, SavedTape | None, Any]:
        inputs = {source: [detached(x, keep) for x in value.leaves] for source, value in sources.items()}
        outputs = {source: sources[source].spec.unflatten(leaves) for source, leaves in inputs.items()}
        parts = self.stage.given(data)
        if keep and self.differentiates_data:
            parts = differentiated(self.stage, data, self.argnums)
            inputs[DATA] = flatten(parts).leaves
        with torch.set_grad_enabled(keep):
            if keep:  # autocast caches a leaf's cast, an activation's not
                outputs = {source: alias_leaves(tree) for source, tree in outputs.items()}
            arguments = self.stage.arguments(outputs, parts)
            with refusing_writes(arguments), refusing_writes(prepared.own, PARAMETER_WRITTEN), self._checked():
                tree, new = self.stage(prepared.tree, state, arguments)
            leaves, spec = flatten(alias_leaves(tree))
            if keep and Eager not in prepared.computed:  # once a step
                self._refuse_lost(leaves, prepared, state, arguments, inputs)
        output = Flat([detached(x, keep) for x in leaves], spec)
        if not keep:
            return output, None, detached_tree(new)
        if Eager not in prepared.computed:
            prepared.computed[Eager] = [get_gradient_edge(prepared.own[i]) for i in prepared.trained]
        edges = {source: list(map(_edge, values)) for source, values in inputs.items()}
        residuals = SavedTape(list(map(_edge, leaves)), edges, prepared.computed[Eager])
        return output, residuals, detached_tree(new)

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """Refuse collectives in the first call. Without process groups there are none to refuse."""
        if self.leaves.ran or not dist.is_initialized():
            yield
            return
        try:
            with RefusingCollectives():  # type: ignore[no-untyped-call]
                yield
        except Communicates as error:
            raise StageError(str(error)) from None
        except Exception as error:
            RefusingCollectives.trim(error)
            raise
        self.leaves.ran = True

    def _refuse_lost(
        self, outputs: Leaves, prepared: Prepared, state: Any, arguments: Any, inputs: Mapping[int, Leaves]
    ) -> None:
        """Raise StageError if a gradient would go to a tensor from outside."""

        def again() -> Leaves:
            return flatten(alias_leaves(self.stage(prepared.tree, state, arguments)[0])).leaves

        self.leaves.check(outputs, [*prepared.own, *flatten((state, arguments, dict(inputs))).leaves], again)

    def backward(
        self, residuals: SavedTape, cotangents: Leaves, sink: Sink | None = None
    ) -> tuple[WeightGradients, dict[int, Leaves]]:
        count = len(residuals.trained)
        gradients = _gradients(residuals, cotangents, [*residuals.trained, *_wanted(residuals)], retain=False)
        return WeightGradients(gradients[:count]), _by_source(residuals, gradients[count:])

    def backward_input(
        self, residuals: SavedTape, cotangents: Leaves
    ) -> tuple[dict[int, Leaves], DeferredTape | WeightGradients]:
        if self.whole:
            weights, inputs = self.backward(residuals, cotangents)
            return inputs, weights
        gradients = _gradients(residuals, cotangents, _wanted(residuals), retain=True)
        return _by_source(residuals, gradients), DeferredTape(residuals, cotangents)

    def backward_weight(self, deferred: DeferredTape | WeightGradients, sink: Sink | None = None) -> WeightGradients:
        if isinstance(deferred, WeightGradients):
            return deferred
        residuals = deferred.residuals
        return WeightGradients(_gradients(residuals, deferred.cotangents, residuals.trained, retain=False))


def _edge(x: Any) -> GradientEdge | None:
    return get_gradient_edge(x) if isinstance(x, Tensor) and x.requires_grad else None


def _wanted(residuals: SavedTape) -> list[GradientEdge]:
    """Return the edges of the input leaves that require a gradient."""
    return [edge for edges in residuals.inputs.values() for edge in edges if edge is not None]


def _by_source(residuals: SavedTape, gradients: Leaves) -> dict[int, Leaves]:
    """Return the gradients of `_wanted` by source, with None for the other leaves."""
    rest = iter(gradients)
    return {
        source: [None if edge is None else next(rest) for edge in edges] for source, edges in residuals.inputs.items()
    }


def _gradients(residuals: SavedTape, cotangents: Leaves, wrt: Sequence[GradientEdge], retain: bool) -> Leaves:
    pairs = [
        (root, cotangent)
        for root, cotangent in zip(residuals.roots, cotangents, strict=True)
        if cotangent is not None and root is not None
    ]
    if not pairs or not wrt:
        return [None] * len(wrt)
    roots, seeds = zip(*pairs, strict=True)
    try:
        with without_autocast():
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
    """Return whether autograd failed because of a reentrant checkpoint."""
    text = str(error)
    return isinstance(error, RuntimeError) and "heckpoint" in text and ".grad()" in text
