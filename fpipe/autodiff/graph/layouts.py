"""What only moves data: views and copies, what their strides are known to be, and in which order they have elements.

The strides of a fake may differ from the real ones: a node is sure where they can't. What views make of a tensor is
found by taking one without memory through them, which torch's own kernels lay out as the real one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

aten = torch.ops.aten
RESHAPES = {aten.view.default, aten._unsafe_view.default}
TRANSPOSES = {aten.t.default, aten.transpose.int, aten.permute.default}
SQUEEZES = {aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default}
VIEWS = {*RESHAPES, *TRANSPOSES, *SQUEEZES, aten.select.int, aten.slice.Tensor, aten.expand.default}
SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}
CONTIGUOUS = {aten.mm.default, aten.addmm.default, aten.sum.dim_IntList}
"""Their result is contiguous, whatever they are given."""
NORMS = {aten.native_layer_norm.default, aten.native_layer_norm_backward.default}
"""The first of their results is contiguous."""


# Nodes


def note(nodes: Iterable[fx.Node], sure: bool = False) -> None:
    """Tell each node, in order, what is asked of it below."""
    for node in nodes:
        if "sure" not in node.meta:
            node.meta["plain"] = _is_plain(node.meta.get("val"))
            node.meta["sure"] = sure or (is_plain(node) and _is_sure(node))
            node.meta["row"] = is_sure(node) and is_contiguous(node.meta["val"])


def is_plain(node: Any) -> bool:
    """Whether a node's value is a tensor of known sizes, with elements, and in memory as they are."""
    return isinstance(node, fx.Node) and bool(node.meta["plain"])


def has_symbols(node: fx.Node) -> bool:
    """Whether a node's value is a size, or a tensor of sizes, that differs from call to call."""
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt) or (
        isinstance(value, Tensor) and any(type(n) is not int for n in (*value.shape, *value.stride()))
    )


def is_sure(node: fx.Node) -> bool:
    """Whether a node's strides are surely those that were traced."""
    return bool(node.meta["sure"])


def is_row(node: fx.Node) -> bool:
    """Whether a node's elements surely lie in memory one after the other."""
    return bool(node.meta["row"])


def is_copy(node: fx.Node) -> bool:
    """Whether a node copies, to contiguous memory."""
    row = node.kwargs.get("memory_format") is torch.contiguous_format
    return node.target is aten.clone.default and row and is_plain(node) and is_plain(node.args[0])


def is_view(node: fx.Node) -> bool:
    """Whether a node is part of its source's elements; an item of a split is a view of what was split."""
    item = node.target is operator.getitem and args_of(node)[0].target in SPLITS
    alone = len(node.all_input_nodes) == 1 and (item or node.target in VIEWS)
    return alone and is_plain(node) and is_plain(source_of(node))


def is_move(node: fx.Node) -> bool:
    return is_view(node) or is_copy(node)


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element of a result comes from those at the same place alone."""
    tags = getattr(node.target, "tags", ())
    random = torch.Tag.nondeterministic_seeded in tags
    return torch.Tag.pointwise in tags and not random and not is_copy(node) and not _nodes(node.kwargs)


def _is_plain(x: Any) -> bool:
    if not isinstance(x, FakeTensor) or x.layout is not torch.strided or x.is_conj() or x.is_neg():
        return False
    return all(type(n) is int for n in (*x.shape, *x.stride())) and x.numel() > 0


def _is_sure(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op == "placeholder"
    x, given = node.meta["val"], node.all_input_nodes
    if is_view(node):
        source = source_of(node)
        view = moved([node], empty(shape_of(source), source.meta["val"].stride()))
        return is_sure(source) and view is not None and view.stride() == x.stride()
    if node.meta.get("view_of") is not None or not is_contiguous(x):
        return False
    if node.target in CONTIGUOUS or is_copy(node):
        return True
    if node.target is operator.getitem:
        return given[0].target in NORMS and bool(node.args[1] == 0)
    same = [shape_of(n) == shape_of(node) for n in given if is_row(n)]
    return is_pointwise(node) and len(same) == len(given) and any(same) and (all(same) or 1 not in x.shape)


def args_of(node: fx.Node) -> Any:
    return node.args


def _nodes(arg: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(arg, found.append)
    return found


def shape_of(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


# Chains


def source_of(node: fx.Node) -> fx.Node:
    """What a move moves."""
    given: fx.Node = args_of(node)[0]
    return source_of(given) if given.target in SPLITS else given


def chain_to(end: fx.Node, inside: Callable[[fx.Node], bool], shared: bool = False) -> list[fx.Node]:
    """The source of a node's moves, and these: each is used by the next alone, if they are not `shared`."""
    chain = [end]
    while inside(chain[0]) and (shared or chain[0] is end or len(chain[0].users) == 1):
        chain.insert(0, source_of(chain[0]))
    return chain


def moved(moves: Sequence[fx.Node], x: Tensor) -> Tensor | None:
    """A tensor without memory, taken through moves; a copy changes no order. None where a view would have to copy."""
    try:
        for node in moves:
            if node.target is operator.getitem:
                x = _view_of(args_of(node)[0], x)[args_of(node)[1]]
            elif not is_copy(node):
                x = _view_of(node, x)
    except RuntimeError:
        return None
    return x


def _view_of(node: fx.Node, x: Tensor) -> Any:
    target: Any = node.target
    return target(x, *node.args[1:], **node.kwargs)


# Orders


class Order(NamedTuple):
    """An order of a tensor's elements: its sizes split into pieces, and in which order these come."""

    pieces: list[int]
    order: list[int]

    @property
    def shape(self) -> list[int]:
        return [self.pieces[i] for i in self.order]

    @property
    def moved(self) -> bool:
        return not is_sorted(self.order)

    def of(self, x: Tensor) -> Tensor:
        """How a view in this order of a tensor laid out like this one would be laid out."""
        return empty(x.shape, x.stride()).view(self.pieces).permute(self.order)


def order_of(sizes: Sequence[int], view: Tensor | None) -> Order | None:
    """How a contiguous tensor of these sizes comes to a view of it; None if that isn't each element once."""
    if view is None or view.storage_offset():
        return None
    dims = [(stride, n) for n, stride in zip(view.shape, view.stride(), strict=True) if n > 1]
    count = 1
    for stride, n in sorted(dims):
        if stride != count:
            return None
        count *= n
    edges = sorted({1, *(prod(sizes[i:]) for i in range(len(sizes))), *(stride for stride, _ in dims)}, reverse=True)
    if count != edges[0] or any(a % b for a, b in pairwise(edges)):
        return None
    order = [i for stride, n in dims for i, inner in enumerate(edges[1:]) if stride <= inner < stride * n]
    return Order([a // b for a, b in pairwise(edges)], order)


def as_it_is(node: fx.Node) -> Order:
    pieces = [n for n in shape_of(node) if n > 1]
    return Order(pieces, list(range(len(pieces))))


def split(order: Order, shape: Sequence[int]) -> Order | None:
    """The same order by pieces so small that they make up the dims of another shape as well."""
    both = order_of(order.shape, empty(shape))
    if both is None:
        return None
    left, parts = iter(both.pieces), dict[int, list[int]]()
    for i in order.order:
        parts[i] = []
        while prod(parts[i]) < order.pieces[i]:
            parts[i].append(next(left))
    begins = [sum(len(parts[j]) for j in range(i)) for i in range(len(parts))]
    return Order(
        [n for i in range(len(parts)) for n in parts[i]],
        [begins[i] + k for i in order.order for k in range(len(parts[i]))],
    )


def is_coarser(node: fx.Node, than: fx.Node) -> bool:
    """Whether a shape merges dims of another: then a tensor that can be viewed in it can be viewed in the other."""
    shape, other = shape_of(node), shape_of(than)
    order = order_of(shape, empty(other))
    return order is not None and order.pieces == list(other) and 1 not in shape


def is_sorted(numbers: list[int]) -> bool:
    return numbers == sorted(numbers)


# Tensors


def empty(shape: Iterable[int], strides: Sequence[int] | None = None) -> Tensor:
    """A tensor without memory, contiguous if nothing else is said."""
    sizes = tuple(shape)
    return torch.empty_strided(sizes, strides or contiguous(sizes), device="meta")


def like(x: Tensor, shape: Sequence[int], strides: Sequence[int] | None = None) -> Tensor:
    """A fake of the same kind, contiguous if nothing else is said."""
    with x.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_strided(tuple(shape), strides or contiguous(shape), dtype=x.dtype, device=x.device)


def is_contiguous(x: Tensor) -> bool:
    return x.stride() == contiguous(x.shape)


def contiguous(shape: Iterable[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    sizes = list(shape)
    return tuple(prod(sizes[i + 1 :]) for i in range(len(sizes)))
