"""Views and copies: which strides are known, and in which order they put a tensor's elements.

A fake's strides may differ from the real tensor's. A node's strides are "known" if they cannot differ. The layout of
views is found by applying them to a tensor on the meta device, which torch's own kernels lay out as the real one.
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

from fpipe.autodiff.graph.nodes import nodes_in

aten = torch.ops.aten
RESHAPES = {aten.view.default, aten._unsafe_view.default}
TRANSPOSES = {aten.t.default, aten.transpose.int, aten.permute.default}
SQUEEZES = {aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default}
VIEWS = {*RESHAPES, *TRANSPOSES, *SQUEEZES, aten.select.int, aten.slice.Tensor, aten.expand.default}
SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}
CONTIGUOUS_RESULT = {aten.mm.default, aten.addmm.default, aten.sum.dim_IntList}
NORMS = {aten.native_layer_norm.default, aten.native_layer_norm_backward.default}  # the first result is contiguous


def annotate(nodes: Iterable[fx.Node], known: bool = False) -> None:
    """Set, in order, what the functions below return: `meta["static"]`, `meta["known"]` and `meta["contiguous"]`."""
    for node in nodes:
        if "known" not in node.meta:
            node.meta["static"] = _is_static(node.meta.get("val"))
            node.meta["known"] = known or (is_static(node) and _has_known_strides(node))
            node.meta["contiguous"] = has_known_strides(node) and is_contiguous(node.meta["val"])


def is_static(node: Any) -> bool:
    """Return whether a node is a strided tensor with elements, whose sizes are numbers."""
    return isinstance(node, fx.Node) and bool(node.meta["static"])


def has_known_strides(node: fx.Node) -> bool:
    """Return whether the real strides are certainly those of the trace."""
    return bool(node.meta["known"])


def is_known_contiguous(node: fx.Node) -> bool:
    return bool(node.meta["contiguous"])


def is_copy(node: fx.Node) -> bool:
    """Return whether a node copies to contiguous memory."""
    contiguous = node.kwargs.get("memory_format") is torch.contiguous_format
    return node.target is aten.clone.default and contiguous and is_static(node) and is_static(node.args[0])


def is_view(node: fx.Node) -> bool:
    """Return whether a node is a view of one tensor. An item of a split is a view of the tensor that was split."""
    is_item = node.target is operator.getitem and args_of(node)[0].target in SPLITS
    one_input = len(node.all_input_nodes) == 1 and (is_item or node.target in VIEWS)
    return one_input and is_static(node) and is_static(source_of(node))


def is_move(node: fx.Node) -> bool:
    return is_view(node) or is_copy(node)


def is_pointwise(node: fx.Node) -> bool:
    """Return whether each element of the result depends only on the inputs' elements at the same place."""
    tags = getattr(node.target, "tags", ())
    random = torch.Tag.nondeterministic_seeded in tags
    return torch.Tag.pointwise in tags and not random and not is_copy(node) and not nodes_in(node.kwargs)


def _is_static(x: Any) -> bool:
    if not isinstance(x, FakeTensor) or x.layout is not torch.strided or x.is_conj() or x.is_neg():
        return False
    return all(type(n) is int for n in (*x.shape, *x.stride())) and x.numel() > 0


def _has_known_strides(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op == "placeholder"
    x, inputs = node.meta["val"], node.all_input_nodes
    if is_view(node):
        source = source_of(node)
        view = apply([node], meta_tensor(shape_of(source), source.meta["val"].stride()))
        return has_known_strides(source) and view is not None and view.stride() == x.stride()
    if node.meta.get("view_of") is not None or not is_contiguous(x):
        return False
    if node.target in CONTIGUOUS_RESULT or is_copy(node):
        return True
    if node.target is operator.getitem:
        return inputs[0].target in NORMS and bool(node.args[1] == 0)
    same = [shape_of(n) == shape_of(node) for n in inputs if is_known_contiguous(n)]
    return is_pointwise(node) and len(same) == len(inputs) and any(same) and (all(same) or 1 not in x.shape)


def args_of(node: fx.Node) -> Any:
    return node.args


def shape_of(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def source_of(node: fx.Node) -> fx.Node:
    """Return the tensor that a view or copy reads."""
    source: fx.Node = args_of(node)[0]
    return source_of(source) if source.target in SPLITS else source


def chain_to(end: fx.Node, inside: Callable[[fx.Node], bool], shared: bool = False) -> list[fx.Node]:
    """Return a source and the moves from it to `end`. Unless `shared`, each is read by the next alone."""
    chain = [end]
    while inside(chain[0]) and (shared or chain[0] is end or len(chain[0].users) == 1):
        chain.insert(0, source_of(chain[0]))
    return chain


def apply(moves: Sequence[fx.Node], x: Tensor) -> Tensor | None:
    """Apply views to a meta tensor, and skip copies. Return None if a view is impossible without a copy."""
    try:
        for node in moves:
            if node.target is operator.getitem:
                x = _call(args_of(node)[0], x)[args_of(node)[1]]
            elif not is_copy(node):
                x = _call(node, x)
    except RuntimeError:
        return None
    return x


def _call(node: fx.Node, x: Tensor) -> Any:
    target: Any = node.target
    return target(x, *node.args[1:], **node.kwargs)


class Order(NamedTuple):
    """An order of a tensor's elements: `view(pieces).permute(order)`."""

    pieces: list[int]
    order: list[int]

    @property
    def shape(self) -> list[int]:
        return [self.pieces[i] for i in self.order]

    @property
    def permutes(self) -> bool:
        return self.order != sorted(self.order)

    def steps(self, source: fx.Node) -> int:
        """Return how many operations put a source into this order: one if views of it can be merged."""
        if self.permutes and has_known_strides(source):
            return 1
        return (self.pieces != list(shape_of(source))) + self.permutes

    def view_of(self, x: Tensor) -> Tensor:
        """Return a meta tensor with the layout of a tensor's view in this order."""
        return meta_tensor(x.shape, x.stride()).view(self.pieces).permute(self.order)

    def split(self, shape: Sequence[int]) -> Order | None:
        """Return the same order in smaller pieces, which also make up the dims of another shape."""
        both = order_of(self.shape, meta_tensor(shape))
        if both is None:
            return None
        rest, parts = iter(both.pieces), dict[int, list[int]]()
        for i in self.order:
            parts[i] = []
            while prod(parts[i]) < self.pieces[i]:
                parts[i].append(next(rest))
        begins = [sum(len(parts[j]) for j in range(i)) for i in range(len(parts))]
        order = [begins[i] + k for i in self.order for k in range(len(parts[i]))]
        return Order([n for i in range(len(parts)) for n in parts[i]], order)


def order_of(sizes: Sequence[int], view: Tensor | None) -> Order | None:
    """Return the order that leads from a contiguous tensor to its view; None unless that has each element once."""
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


def merges_dims_of(node: fx.Node, other: fx.Node) -> bool:
    """Return whether a node's shape merges dims of another's. Every tensor that has a view in it has one in both."""
    shape = shape_of(node)
    order = order_of(shape, meta_tensor(shape_of(other)))
    return order is not None and order.pieces == list(shape_of(other)) and 1 not in shape


def meta_tensor(shape: Iterable[int], strides: Sequence[int] | None = None) -> Tensor:
    """Return a tensor without memory, contiguous unless strides are given."""
    sizes = tuple(shape)
    return torch.empty_strided(sizes, strides or contiguous(sizes), device="meta")


def fake_like(x: Tensor, shape: Sequence[int], strides: Sequence[int] | None = None) -> Tensor:
    """Return a fake of the same dtype and device, contiguous unless strides are given."""
    with x.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_strided(tuple(shape), strides or contiguous(shape), dtype=x.dtype, device=x.device)


def is_contiguous(x: Tensor) -> bool:
    return x.stride() == contiguous(x.shape)


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
