"""Split trees into microbatches, and merge them back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import optree
import torch

from fpipe._format import counted
from fpipe.errors.arguments import checked
from fpipe.stages.pytree import NAMESPACE, describe, short, summary


class Microbatch(NamedTuple):
    """A part of the batch and of the target.

    Args:
        scale: returns the factor of its loss, for which it may wait for a device; None where the caller gave no weight.
    """

    batch: Any
    target: Any
    scale: Callable[[], Any] | None = None


class Microbatches(Sequence[Any]):
    """The microbatches of a step, as trees whose tensors may have other sizes in each: nothing is split.

    Both batch and target are passed so, or one of them is None. A step runs them in this order.

    Args:
        trees: one for each microbatch of the plan, of all replicas that the process plays.

    Raises:
        TypeError: a tensor or a mapping in place of the trees.

    >>> Microbatches([torch.zeros(1, 5), torch.zeros(1, 3)])
    Microbatches([float32[1, 5], float32[1, 3]])
    """

    @checked()
    def __init__(self, trees: Iterable[Any]) -> None:
        if isinstance(trees, torch.Tensor | Mapping | str):
            raise TypeError(f"Microbatches takes a list of trees, one for each, not a {type(trees).__name__}")
        self.trees = tuple(trees)

    def __getitem__(self, at: Any) -> Any:
        return Microbatches(self.trees[at]) if isinstance(at, slice) else self.trees[at]

    def __len__(self) -> int:
        return len(self.trees)

    def __repr__(self) -> str:
        return f"Microbatches([{', '.join(map(summary, self.trees))}])"


optree.register_pytree_node(
    Microbatches, lambda each: (tuple(each), None), lambda _, trees: Microbatches(trees), namespace=NAMESPACE
)


@lru_cache
def sizes_of(rows: int, count: int) -> tuple[int, ...]:
    """Return the rows of each of `count` microbatches: as equal as possible, larger ones first, as `tensor_split`.

    >>> sizes_of(10, 4)
    (3, 3, 2, 2)
    """
    return tuple(rows // count + (m < rows % count) for m in range(count))


def pair_of_axes(in_axes: Any, name: str = "in_axes") -> tuple[Any, Any]:
    """Return the axes of the batch and of the target.

    Raises:
        ValueError: it is a tuple of another length.
    """
    axes = in_axes if isinstance(in_axes, tuple) else (in_axes, in_axes)
    if len(axes) != 2:
        raise ValueError(f"{name} must be one axis, or a pair for batch and target, not {in_axes!r}")
    return axes


def axes_of(tree: Any, axes: Any, what: str) -> list[int | None]:
    """Return the axis of every leaf, from a prefix of the tree as in `torch.vmap`. None: equal in all microbatches."""
    try:
        return optree.broadcast_prefix(axes, tree, none_is_leaf=True, namespace=NAMESPACE)
    except ValueError as error:
        raise ValueError(f"{what} {axes!r} is no prefix of the tree {summary(tree)}") from error


def split(tree: Any, count: int, axes: Any = 0, what: str = "batch") -> tuple[list[Any], int | None]:
    """Split every tensor along its axis into `count` microbatches, as views.

    Of `Microbatches`, return the trees; `samples` counts their rows.

    Args:
        axes: an axis, None (the same for every microbatch), or a prefix tree of these.

    Returns:
        The microbatches, and the number of rows (None if nothing is split).

    Raises:
        ValueError: leaves disagree on their rows, or have too few.

    >>> split({"x": torch.arange(5), "flag": True}, 2)[0][1]
    {'x': tensor([3, 4]), 'flag': True}
    """
    if isinstance(tree, Microbatches):
        if len(tree) != count:
            raise ValueError(f"the {what} has {len(tree)} Microbatches where the step runs {count}: pass one for each")
        return list(tree), None
    names, leaves, spec = optree.tree_flatten_with_path(
        tree, is_leaf=_are_microbatches, none_is_leaf=True, namespace=NAMESPACE
    )
    rows: int | None = None
    columns: list[Sequence[Any]] = []
    for path, leaf, axis in zip(names, leaves, axes_of(tree, axes, f"in_axes of the {what}"), strict=True):
        if isinstance(leaf, Mapping):
            kind = type(leaf).__name__
            raise ValueError(
                f"{what}{short(path)} is a {kind}, which is not a pytree and cannot be split: pass a plain dict"
            )
        if isinstance(leaf, Microbatches):
            raise ValueError(f"{what}{short(path)} is Microbatches: pass Microbatches of whole trees as the {what}")
        if axis is None or not isinstance(leaf, torch.Tensor):
            columns.append([leaf] * count)
            continue
        if not isinstance(axis, int):
            raise TypeError(f"in_axes must be an axis, None, or a tree of them, not {axis!r} for {what}{short(path)}")
        name = f"{what}{short(path)} ({describe(leaf)})"
        if not -leaf.ndim <= axis < leaf.ndim:
            raise ValueError(f"{name} has no axis {axis} to split; in_axes=None gives it to every microbatch whole")
        if rows is not None and leaf.shape[axis] != rows:
            raise ValueError(
                f"{name} has {counted(leaf.shape[axis], 'row')} on axis {axis} where the leaves before it have {rows}"
            )
        rows = leaf.shape[axis]
        if rows < count:
            raise ValueError(f"{name} has {counted(rows, 'row')} on axis {axis}: too few for {count} microbatches")
        columns.append(torch.tensor_split(leaf, count, dim=axis))
    return [spec.unflatten([column[m] for column in columns]) for m in range(count)], rows


def cut(tree: Any, count: int, axes: Any, what: str, row_axes: Any = None) -> tuple[list[Any], int | None]:
    """Cut every tensor of a microbatch along its sequences into `count` slices, as views.

    Args:
        axes: an axis, None (the same for every slice), or a prefix tree of these.
        row_axes: those along which microbatches are split.

    Returns:
        The slices, and the length of the sequences (None if nothing is cut). The first ones are longer where they
        don't divide it.

    Raises:
        ValueError: leaves disagree on their lengths, or are too short; or an axis is that of the rows.

    >>> cut(torch.arange(10).reshape(2, 5), 2, 1, "batch")[0][1]
    tensor([[3, 4],
            [8, 9]])
    """
    names, leaves, spec = optree.tree_flatten_with_path(tree, none_is_leaf=True, namespace=NAMESPACE)
    axis_of = axes_of(tree, axes, f"sequence_axes of the {what}")
    length: int | None = None
    columns: list[Sequence[Any]] = []
    for path, leaf, axis, row_axis in zip(names, leaves, axis_of, axes_of(tree, row_axes, "in_axes"), strict=True):
        if axis is None or not isinstance(leaf, torch.Tensor):
            columns.append([leaf] * count)
            continue
        name = f"{what}{short(path)} ({describe(leaf)})"
        if not -leaf.ndim <= axis < leaf.ndim or (row_axis is not None and axis % leaf.ndim == row_axis % leaf.ndim):
            problem = "is that of the rows" if -leaf.ndim <= axis < leaf.ndim else "does not exist"
            raise ValueError(
                f"{name} can't be cut into slices along axis {axis}, which {problem}: sequence_axes= has the axis of "
                "the sequences, and None for a leaf that every slice reads whole"
            )
        if length is not None and leaf.shape[axis] != length:
            raise ValueError(
                f"{name} has {leaf.shape[axis]} tokens on axis {axis} where the leaves before it have {length}"
            )
        length = leaf.shape[axis]
        if length < count:
            raise ValueError(f"{name} has {counted(length, 'token')} on axis {axis}: too few for {count} slices")
        columns.append(torch.tensor_split(leaf, count, dim=axis))
    return [spec.unflatten([column[t] for column in columns]) for t in range(count)], length


def slices_of(
    data: Sequence[Microbatch], count: int, sequence_axes: Any, in_axes: Any
) -> tuple[list[Microbatch], list[float] | None]:
    """Return the slices of each microbatch, and the share of its sequences that each has; None if none is cut.

    Raises:
        ValueError: a microbatch can't be cut.
    """
    units, lengths = list[Microbatch](), list[float]()
    axes, rows = pair_of_axes(sequence_axes, "sequence_axes"), pair_of_axes(in_axes)
    for each in data:
        batches, tokens = cut(each.batch, count, axes[0], "batch", rows[0])
        targets, of_target = cut(each.target, count, axes[1], "target", rows[1])
        whole = tokens if of_target is None else of_target  # the loss is of the target's tokens
        units += map(Microbatch, batches, targets)
        lengths += [] if whole is None else [size / whole for size in sizes_of(whole, count)]
    return units, lengths or None


def _are_microbatches(tree: Any) -> bool:
    return isinstance(tree, Microbatches)


def samples(trees: Sequence[Any], axes: Any = 0, what: str = "batch") -> tuple[int, ...] | None:
    """Return the rows of each of `Microbatches`, by which a loss is weighed; None if no tensor has any.

    Args:
        axes: the axis of the samples, None for leaves that have none, or a prefix of each tree.

    Raises:
        ValueError: leaves of a microbatch disagree on their rows, or have no such axis.

    >>> samples([{"x": torch.zeros(2, 5)}, {"x": torch.zeros(3, 4)}])
    (2, 3)
    """
    rows = [_samples(tree, axes, f"microbatch {m} of the {what}") for m, tree in enumerate(trees)]
    if all(count is None for count in rows):
        return None
    if None in rows or not any(rows):
        empty = rows.index(None) if None in rows else 0
        raise ValueError(f"microbatch {empty} of the {what} has no samples: {WEIGHING}")
    return tuple(count for count in rows if count is not None)


WEIGHING = "pass weight= or reduction='sum', or in_axes with None for leaves without samples"


def _samples(tree: Any, axes: Any, what: str) -> int | None:
    leaves = optree.tree_leaves(tree, none_is_leaf=True, namespace=NAMESPACE)
    tensors = [
        (leaf, axis)
        for leaf, axis in zip(leaves, axes_of(tree, axes, f"in_axes of {what}"), strict=True)
        if isinstance(leaf, torch.Tensor) and axis is not None
    ]
    for leaf, axis in tensors:
        if not -leaf.ndim <= axis < leaf.ndim:
            raise ValueError(f"{what} has {describe(leaf)}, which has no axis {axis} of samples: {WEIGHING}")
    rows = dict.fromkeys(leaf.shape[axis] for leaf, axis in tensors)
    if len(rows) > 1:
        counts = " and ".join(map(str, rows))
        raise ValueError(f"{what} has leaves of {counts} rows, so the number of its samples is not known: {WEIGHING}")
    return next(iter(rows), None)


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
