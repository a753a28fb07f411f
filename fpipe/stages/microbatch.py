"""Split trees into microbatches, and merge them back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch

from fpipe.stages.pytree import NAMESPACE, describe, short, summary


class Microbatch(NamedTuple):
    """A part of the batch and of the target.

    Args:
        scale: returns the factor of its loss, for which it may wait for a device; None where the caller gave no weight.
    """

    batch: Any
    target: Any
    scale: Callable[[], Any] | None = None


def size(rows: int, count: int, m: int) -> int:
    """Return the number of rows of microbatch m of `count`: as equal as possible, larger ones first, as `tensor_split`.

    >>> [size(10, 4, m) for m in range(4)]
    [3, 3, 2, 2]
    """
    return rows // count + (m < rows % count)


def axes_of(tree: Any, axes: Any, what: str) -> list[int | None]:
    """Return the axis of every leaf, from a prefix of the tree as in `torch.vmap`. None: equal in all microbatches."""
    try:
        return optree.broadcast_prefix(axes, tree, none_is_leaf=True, namespace=NAMESPACE)
    except ValueError as error:
        raise ValueError(f"{what} {axes!r} is no prefix of the tree {summary(tree)}") from error


def split(tree: Any, count: int, axes: Any = 0, what: str = "batch") -> tuple[list[Any], int | None]:
    """Split every tensor along its axis into `count` microbatches, as views.

    Args:
        axes: an axis, None (the same for every microbatch), or a prefix tree of these.

    Returns:
        The microbatches, and the number of rows (None if nothing is split).

    Raises:
        ValueError: leaves disagree on their rows, or have too few.

    >>> split({"x": torch.arange(5), "flag": True}, 2)[0][1]
    {'x': tensor([3, 4]), 'flag': True}
    """
    names, leaves, spec = optree.tree_flatten_with_path(tree, none_is_leaf=True, namespace=NAMESPACE)
    rows: int | None = None
    columns: list[Sequence[Any]] = []
    for path, leaf, axis in zip(names, leaves, axes_of(tree, axes, f"in_axes of the {what}"), strict=True):
        if isinstance(leaf, Mapping):
            kind = type(leaf).__name__
            raise ValueError(
                f"{what}{short(path)} is a {kind}, which is not a pytree and cannot be split: pass a plain dict"
            )
        if axis is None or not isinstance(leaf, torch.Tensor):
            columns.append([leaf] * count)
            continue
        name = f"{what}{short(path)} ({describe(leaf)})"
        if not -leaf.ndim <= axis < leaf.ndim:
            raise ValueError(f"{name} has no axis {axis} to split; in_axes=None gives it to every microbatch whole")
        if rows is not None and leaf.shape[axis] != rows:
            raise ValueError(
                f"{name} has {leaf.shape[axis]} rows on axis {axis} where the leaves before it have {rows}"
            )
        rows = leaf.shape[axis]
        if rows < count:
            raise ValueError(f"{name} has {rows} rows on axis {axis}: too few for {count} microbatches")
        columns.append(torch.tensor_split(leaf, count, dim=axis))
    return [spec.unflatten([column[m] for column in columns]) for m in range(count)], rows


def merge(trees: Sequence[Any], axes: Any = 0) -> Any:
    """Merge microbatches: concatenate tensors along their axis; stack scalars, and numbers that differ.

    Args:
        axes: an axis, None (equal in all: take the first), or a prefix tree of these.

    Raises:
        ValueError: microbatches of different structure, or plain values that differ.

    >>> merge([{"x": torch.zeros(2, 3), "n": torch.tensor(1)}] * 2)["n"]
    tensor([1, 1])
    """
    (first, spec), *rest = (optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE) for tree in trees)
    for m, (_, other) in enumerate(rest, 1):
        if other != spec:
            raise ValueError(f"microbatches 0 and {m} have different structures: {spec} and {other}")
    columns = zip(first, *(leaves for leaves, _ in rest), strict=True)
    joined = zip(columns, axes_of(trees[0], axes, "out_axes"), spec.paths(), strict=True)
    return spec.unflatten([_join(column, axis, name) for column, axis, name in joined])


def _join(column: tuple[Any, ...], axis: int | None, path: Any) -> Any:
    first = column[0]
    if isinstance(first, torch.Tensor) and axis is not None:
        return torch.stack(column) if first.ndim == 0 else torch.cat(column, dim=axis)
    if isinstance(first, torch.Tensor) or all(other is first or other == first for other in column):
        return first
    if all(type(x) in (int, float) for x in column):
        return torch.tensor(column)
    raise ValueError(f"the plain value at {short(path) or 'the root'} differs between microbatches: {list(column)}")
