"""A stage as pieces: prepare, forward, backward, backward_input, backward_weight.

Here by eager `torch.autograd.grad` on the stage's function. Leaves are plain lists in flattening order, in
which None stands where there is no gradient; trees are put together only for the stage's own function.
What a piece hands on is detached, and tells by `requires_grad` whether it wants a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fpipe.microbatch import Microbatch
from fpipe.signature import HOW_TO_REGISTER, PLAIN
from fpipe.stage import Pipeline, Stage
from fpipe.tree import Flat, Path, as_path, flatten, indices, paths, short, viewed

Leaves = list[Any]
"""Tensors in flattening order; None where there is nothing."""


class Piece(Protocol):
    """One stage's forward and backward functions, behind which eager and traced autodiff are alike."""

    @property
    def stage(self) -> Stage: ...

    def prepare(self, params: Any) -> Any:
        """What depends on the parameters alone; once a step."""

    def trained(self, prepared: Any) -> list[Path]:
        """The paths of the parameters that get gradients, in the order of the weight gradients."""

    def forward(
        self, prepared: Any, state: Any, sources: Mapping[int, Flat], data: Microbatch, keep: bool
    ) -> tuple[Flat, Any, Any]:
        """`(outputs, residuals, new state)`; residuals are None unless kept."""

    def backward(self, residuals: Any, cotangents: Leaves | None) -> tuple[Leaves, dict[int, Leaves]]:
        """`(weight gradients, input gradients by source stage)`; without cotangents leaf 0 is the loss."""

    def backward_input(self, residuals: Any, cotangents: Leaves | None) -> tuple[dict[int, Leaves], Any]:
        """`(input gradients by source stage, deferred)`."""

    def backward_weight(self, deferred: Any) -> Leaves:
        """The weight gradients that were left."""


@dataclass(frozen=True)
class Pieces:
    """A pipeline with its stages' pieces: what a handler runs.

    Args:
        loss: the last stage puts out (loss, aux), rather than what evaluate gives.
        gather: its outputs, or the aux, are wanted on every rank.
        merge: puts the outputs, or the aux, of all microbatches together.
    """

    pipeline: Pipeline
    stages: tuple[Piece, ...]
    loss: bool = True
    gather: bool = False
    merge: Callable[[Mapping[int, Any]], Any] = dict


@dataclass(frozen=True, slots=True)
class Prepared:
    """A stage's params with leaves of its own, and those among them that get gradients."""

    tree: Any
    trained: list[Tensor]
    paths: list[Path]
    edges: list[GradientEdge]


@dataclass(frozen=True, slots=True)
class Residuals:
    """The graph that autograd recorded, by its edges: no tensor is kept but those that its nodes saved.

    Args:
        roots: an edge for each leaf of the outputs, None where there is no gradient.
        inputs: likewise for the leaves of each source stage's output.
        trained: the parameters.
        loss: dtype and device of output leaf 0.
    """

    roots: list[GradientEdge | None]
    inputs: dict[int, list[GradientEdge | None]]
    trained: list[GradientEdge]
    loss: tuple[torch.dtype, torch.device]


@dataclass(frozen=True, slots=True)
class Deferred:
    residuals: Residuals
    cotangents: Leaves | None


@dataclass(frozen=True)
class Eager:
    """The pieces by eager autograd; the split walks the graph once for each half."""

    stage: Stage

    def prepare(self, params: Any) -> Prepared:
        leaves, spec = flatten(params)
        names = paths(params)
        frozen = {i for entry in self.stage.frozen for i in indices(params, as_path(entry))}
        own: Leaves = []
        trained: list[Tensor] = []
        trained_paths: list[Path] = []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                leaf = leaf.detach()
                if i not in frozen and (leaf.is_floating_point() or leaf.is_complex()):
                    trained.append(leaf.requires_grad_())
                    trained_paths.append(names[i])
            elif type(leaf) not in PLAIN:
                raise TypeError(f"{short(names[i]) or 'the tree'} is a {type(leaf).__qualname__}: {HOW_TO_REGISTER}")
            own.append(leaf)
        return Prepared(spec.unflatten(own), trained, trained_paths, list(map(get_gradient_edge, trained)))

    def trained(self, prepared: Prepared) -> list[Path]:
        return prepared.paths

    def forward(
        self, prepared: Prepared, state: Any, sources: Mapping[int, Flat], data: Microbatch, keep: bool
    ) -> tuple[Flat, Residuals | None, Any]:
        own = {source: [detached(x, keep) for x in value.leaves] for source, value in sources.items()}
        outputs = {source: sources[source].spec.unflatten(leaves) for source, leaves in own.items()}
        with torch.set_grad_enabled(keep):
            tree, new = self.stage(prepared.tree, state, self.stage.arguments(outputs, data))
            leaves, spec = flatten(viewed(tree))
        given = Flat([detached(x, keep) for x in leaves], spec)
        if not keep:
            return given, None, detached_tree(new)
        loss = (leaves[0].dtype, leaves[0].device) if leaves and isinstance(leaves[0], Tensor) else NO_LOSS
        inputs = {source: list(map(_edge, found)) for source, found in own.items()}
        return given, Residuals(list(map(_edge, leaves)), inputs, prepared.edges, loss), detached_tree(new)

    def backward(self, residuals: Residuals, cotangents: Leaves | None) -> tuple[Leaves, dict[int, Leaves]]:
        count = len(residuals.trained)
        found = _gradients(residuals, cotangents, [*residuals.trained, *_wanted(residuals)], retain=False)
        return found[:count], _by_source(residuals, found[count:])

    def backward_input(self, residuals: Residuals, cotangents: Leaves | None) -> tuple[dict[int, Leaves], Deferred]:
        found = _gradients(residuals, cotangents, _wanted(residuals), retain=True)
        return _by_source(residuals, found), Deferred(residuals, cotangents)

    def backward_weight(self, deferred: Deferred) -> Leaves:
        residuals = deferred.residuals
        return _gradients(residuals, deferred.cotangents, residuals.trained, retain=False)


NO_LOSS = (torch.float32, torch.device("cpu"))


def detached(x: Any, keep: bool = False) -> Any:
    """The same tensor without its graph; with `keep`, marked if it wants a gradient."""
    if not isinstance(x, Tensor):
        return x
    return x.detach().requires_grad_(keep and x.requires_grad)


def detached_tree(tree: Any) -> Any:
    leaves, spec = flatten(tree)
    return spec.unflatten([detached(x) for x in leaves])


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


def _gradients(residuals: Residuals, cotangents: Leaves | None, wrt: Sequence[GradientEdge], retain: bool) -> Leaves:
    if cotangents is None:
        dtype, device = residuals.loss
        cotangents = [torch.ones((), dtype=dtype, device=device), *[None] * (len(residuals.roots) - 1)]
    pairs = [
        (root, cotangent)
        for root, cotangent in zip(residuals.roots, cotangents, strict=True)
        if cotangent is not None and root is not None
    ]
    if not pairs or not wrt:
        return [None] * len(wrt)
    roots, seeds = zip(*pairs, strict=True)
    return list(torch.autograd.grad(roots, wrt, seeds, allow_unused=True, retain_graph=retain))
