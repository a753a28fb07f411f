"""Gradients of the batch and of the target: put together from those of the stages that read them.

The gradients of a leaf that several stages read are added from the highest stage down. Then the microbatches are
concatenated as they were split; of a leaf that all of them share, they are added in their order, in float32 if they are
narrower.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from typing import Any

import optree
import torch
from torch import Tensor

from fpipe.autodiff.interface import is_differentiable
from fpipe.handlers.gradients import copied, unscaled
from fpipe.stages.microbatch import Microbatches, axes_of
from fpipe.stages.precision import OWN_DTYPES
from fpipe.stages.pytree import NAMESPACE, short

Gradients = Mapping[str, Tensor]
"""Of one microbatch, by the path of the leaf in `(batch, target)`."""


def added(parts: Sequence[Gradients]) -> Gradients:
    """Return the sum of stages' gradients, in their order."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, gradient in part.items():
            total[name] = total[name] + gradient.to(total[name].device) if name in total else gradient
    return total


def joined(
    trees: Sequence[Any],
    at: int,
    axes: Any,
    apart: bool,
    gradients: Sequence[Gradients],
    read: Sequence[Collection[str]],
    loss_scale: Tensor | None,
) -> Any:
    """Return the gradients of the batch or of the target, in its tree; None for leaves that have none.

    Args:
        trees: the microbatches of it.
        at: 0 for the batch, 1 for the target.
        axes: along which it was split.
        apart: it came as `Microbatches`.
        read: of each microbatch, the paths of the leaves that this process's stages read.
        loss_scale: divides them; None for 1.
    """
    if all(tree is None for tree in trees):
        return None
    columns = [_leaves(tree, at, g, names) for tree, g, names in zip(trees, gradients, read, strict=True)]
    specs = [optree.tree_structure(tree, none_is_leaf=True, namespace=NAMESPACE) for tree in trees]
    if apart:
        each = [[_sum(leaf, [gradient], loss_scale) for leaf, gradient in column] for column in columns]
        return Microbatches(spec.unflatten(leaves) for spec, leaves in zip(specs, each, strict=True))
    by_leaf = zip(zip(*columns, strict=True), axes_of(trees[0], axes, "in_axes"), strict=True)
    return specs[0].unflatten([_join(column, axis, loss_scale) for column, axis in by_leaf])


def _leaves(
    tree: Any, at: int, gradients: Gradients, read: Collection[str]
) -> list[tuple[Tensor | None, Tensor | None]]:
    """Return each leaf that gets a gradient, else None, with its gradient: None if the loss does not depend on it."""
    paths, leaves, _ = optree.tree_flatten_with_path(tree, none_is_leaf=True, namespace=NAMESPACE)
    names = [short((at, *path)) for path in paths]
    return [
        (x, gradients.get(name)) if name in read and is_differentiable(x) else (None, None)
        for x, name in zip(leaves, names, strict=True)
    ]


def _join(
    column: Sequence[tuple[Tensor | None, Tensor | None]], axis: int | None, loss_scale: Tensor | None
) -> Tensor | None:
    first, _ = column[0]
    if first is None or axis is None:
        return _sum(first, [gradient for _, gradient in column], loss_scale)
    return torch.cat([_sum(leaf, [gradient], loss_scale) for leaf, gradient in column], dim=axis)  # type: ignore[misc]


def _sum(leaf: Tensor | None, terms: Sequence[Tensor | None], loss_scale: Tensor | None) -> Tensor | None:
    """Return the sum of the terms, on the leaf's device, in memory of its own; -0.0 if there is none."""
    if leaf is None:
        return None
    present = [term.to(leaf.device) for term in terms if term is not None]
    if not present:
        return torch.full_like(leaf, -0.0)  # the sum of no terms, as of params
    if len(present) == 1 and loss_scale is None:
        return copied(present[0])  # type: ignore[no-any-return]
    total: Tensor = unscaled(reduce(torch.add, map(OWN_DTYPES.term, present)), loss_scale)
    return total.to(leaf.dtype)
