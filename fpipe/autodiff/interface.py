"""What every way to differentiate a stage has in common.

Leaves are plain lists in flattening order, in which None stands where there is no gradient; trees are put
together only for the stage's own function. What a piece hands on is detached, and tells by `requires_grad`
whether it wants a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import optree
import torch
from torch import Tensor

from fpipe.autodiff.graph.block import Sink
from fpipe.stages.microbatch import Microbatch
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.pytree import HOW_TO_REGISTER, PLAIN, Flat, Path, as_path, flatten, indices, paths_of, short
from fpipe.stages.stage import Stage

Leaves = list[Any]
"""Tensors in flattening order; None where there is nothing."""


class WeightGradients(list[Any]):
    """Leaves of which `fresh` says, by number, which have memory that nothing else has."""

    def __init__(self, leaves: Leaves, fresh: Collection[int] = ()) -> None:
        super().__init__(leaves)
        self.fresh = fresh


class Piece(Protocol):
    """One stage's forward and backward functions, behind which eager and traced autodiff are alike."""

    @property
    def stage(self) -> Stage: ...

    def prepare(self, params: Any) -> Prepared:
        """The parameters, for one step; what depends on them alone is computed at most once."""

    def forward(
        self, prepared: Prepared, state: Any, sources: Mapping[int, Flat], data: Microbatch, keep: bool
    ) -> tuple[Flat, Any, Any]:
        """`(outputs, residuals, new state)`; residuals are None unless kept."""

    def backward(
        self, residuals: Any, cotangents: Leaves, sink: Sink | None = None
    ) -> tuple[WeightGradients, dict[int, Leaves]]:
        """`(weight gradients, input gradients by source stage)`. Residuals are used up, here and below.

        What the sink has taken is None among the weight gradients.
        """

    def backward_input(self, residuals: Any, cotangents: Leaves) -> tuple[dict[int, Leaves], Any]:
        """`(input gradients by source stage, deferred)`."""

    def backward_weight(self, deferred: Any, sink: Sink | None = None) -> WeightGradients:
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


@dataclass(frozen=True)
class Prepared:
    """A stage's params for one step.

    Args:
        leaves: in flattening order, without their graphs.
        trained: numbers of the leaves that get gradients, in the order of the weight gradients.
        paths: their paths.
        computed: what pieces keep here of what depends on the params alone.
    """

    leaves: Leaves
    spec: optree.PyTreeSpec
    trained: tuple[int, ...]
    paths: tuple[Path, ...]
    computed: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def own(self) -> Leaves:
        """Leaves of our own for autograd, of which the trained ones want a gradient."""
        own = [x.detach() if isinstance(x, Tensor) else x for x in self.leaves]
        for i in self.trained:
            own[i].requires_grad_()
        return own

    @property
    def tree(self) -> Any:
        return self.spec.unflatten(self.own)


def prepared(stage: Stage, params: Any) -> Prepared:
    """A stage's params, taken apart.

    Raises:
        TypeError: a leaf that is neither a tensor nor plain.
    """
    leaves, spec = flatten(params)
    names = paths_of(spec)
    frozen = {i for entry in stage.frozen for i in indices(params, as_path(entry))}
    trained = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if i not in frozen and (leaf.is_floating_point() or leaf.is_complex()):
                trained.append(i)
        elif type(leaf) not in PLAIN:
            raise TypeError(f"{short(names[i]) or 'the tree'} is a {type(leaf).__qualname__}: {HOW_TO_REGISTER}")
    own = [x.detach() if isinstance(x, Tensor) and (x.requires_grad or type(x) is not Tensor) else x for x in leaves]
    return Prepared(own, spec, tuple(trained), tuple(names[i] for i in trained))


def detached(x: Any, keep: bool = False) -> Any:
    """The same tensor without its graph; with `keep`, marked if it wants a gradient."""
    if not isinstance(x, Tensor):
        return x
    return x.detach().requires_grad_(keep and x.requires_grad)


def detached_tree(tree: Any) -> Any:
    leaves, spec = flatten(tree)
    return spec.unflatten([detached(x) for x in leaves])


def seed(loss: Tensor, scale: Any) -> Tensor:
    """The loss's cotangent: what its microbatch weighs, in its own dtype."""
    if isinstance(scale, Tensor):
        return scale.to(loss).detach()
    return torch.full((), 1.0 if scale is None else scale, dtype=loss.dtype, device=loss.device)


def counts(scale: Any) -> bool:
    """Whether a microbatch's loss counts: one of weight 0 doesn't, even where it is NaN, as the mean of nothing is."""
    return scale is None or bool(scale != 0)


def weighed(loss: Tensor, cotangent: Tensor, scale: Any) -> Tensor:
    """The microbatch's part of the loss of all."""
    return loss.detach() * cotangent if counts(scale) else torch.zeros_like(cotangent)


def discounted(weights: WeightGradients, inputs: Mapping[int, Leaves]) -> tuple[WeightGradients, dict[int, Leaves]]:
    """What the last stage gives of a loss that doesn't count: 0 times NaN would be NaN."""
    return WeightGradients([None] * len(weights)), zeros(inputs)


def zeros(inputs: Mapping[int, Leaves]) -> dict[int, Leaves]:
    """Zeros for input gradients, which others wait for."""
    return {s: [None if x is None else torch.zeros_like(x) for x in leaves] for s, leaves in inputs.items()}
