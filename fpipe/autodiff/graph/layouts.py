"""Views and copies: which strides are known, and in which order they put a tensor's elements.

A fake's strides may differ from the real tensor's. A node's strides are "known" if they cannot differ. The layout of
views is found by applying them to a tensor on the meta device, which torch's own kernels lay out as the real one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
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
NORMS = {aten.native_layer_norm.default, aten.native_layer_norm_backward.default}  # the first result is contiguous


def stacked(parts: list[Tensor], dim: int) -> Tensor:
    """Return the sum of tensors that are zero but for one part each. Adding 0.0 turns -0.0 into 0.0, as a sum does."""
    return torch.stack(parts, dim).contiguous().add_(0.0)


CONTIGUOUS_RESULT = {aten.mm.default, aten.addmm.default, aten.sum.dim_IntList, torch.reshape, stacked}
"""Operations with a contiguous result, if that is no view. A graph has `torch.reshape` only where it copies."""


class Layout(IntEnum):
    """The levels of knowledge about a node's real layout; each includes those before it.

    STATIC: it is a strided tensor with elements, whose sizes are numbers. KNOWN: its strides are those of the trace.
    """

    UNKNOWN = 0
    STATIC = 1
    KNOWN = 2
    CONTIGUOUS = 3


def annotate(nodes: Iterable[fx.Node]) -> None:
    """Set `meta["layout"]` of each node, in order."""
    for node in nodes:
        if "layout" not in node.meta:
            node.meta["layout"] = Layout.STATIC if _is_static(node.meta.get("val")) else Layout.UNKNOWN
            if is_static(node) and _has_known_strides(node):
                node.meta["layout"] = Layout.CONTIGUOUS if is_contiguous(node.meta["val"]) else Layout.KNOWN


def is_static(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.meta["layout"] >= Layout.STATIC


def has_known_strides(node: fx.Node) -> bool:
    return bool(node.meta["layout"] >= Layout.KNOWN)


def is_known_contiguous(node: fx.Node) -> bool:
    return bool(node.meta["layout"] == Layout.CONTIGUOUS)


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
    if node.target is aten.as_strided.default or node.meta.get("cotangent"):
        return True
    x, inputs = node.meta["val"], node.all_input_nodes
    if is_view(node):
        source = source_of(node)
        view = apply([node], meta_like(source.meta["val"]))
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


def chain_from(start: fx.Node, inside: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Return a node and the moves after it. Each is the only user of the one before."""
    chain = [start]
    while (after := only_user(chain[-1])) is not None and inside(after):
        chain.append(after)
    return chain


def only_user(node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].op != "output" else None


def apply(moves: Sequence[fx.Node], x: Tensor) -> Tensor | None:
    """Apply views to a meta tensor, and skip copies. Return None if a view is impossible without a copy."""
    try:
        for node in moves:
            is_item = node.target is operator.getitem
            call: Any = args_of(node)[0] if is_item else node
            if not is_copy(call):
                views = call.target(x, *call.args[1:], **call.kwargs)
                x = views[args_of(node)[1]] if is_item else views
    except RuntimeError:
        return None
    return x


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
        """Return the view of a tensor in this order."""
        return x.view(self.pieces).permute(self.order)

    def split(self, shape: Sequence[int]) -> Order | None:
        """Return the same order in smaller pieces, which also make up the dims of another shape."""
        both = order_of(self.shape, meta_tensor(shape))
        return both and order_of(self.pieces, self.view_of(meta_tensor(self.pieces)).view(both.pieces))


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


def order_after(source: fx.Node, moves: Sequence[fx.Node]) -> Order | None:
    """Return the order into which moves put a source's elements, as if it were contiguous."""
    return order_of(shape_of(source), apply(moves, meta_tensor(shape_of(source))))


def merges_dims_of(node: fx.Node, other: fx.Node) -> bool:
    """Return whether a node's shape merges dims of another's. Every tensor that has a view in it has one in both."""
    shape = shape_of(node)
    order = order_of(shape, meta_tensor(shape_of(other)))
    return order is not None and order.pieces == list(shape_of(other)) and 1 not in shape


def meta_tensor(shape: Iterable[int]) -> Tensor:
    """Return a contiguous tensor without memory."""
    return torch.empty(tuple(shape), device="meta")


def meta_like(x: Tensor) -> Tensor:
    """Return a tensor with the same layout, without memory."""
    return torch.empty_strided(x.shape, x.stride(), device="meta")


def is_contiguous(x: Tensor) -> bool:
    """Return whether the strides are those of a new tensor, for dims of one element as well."""
    return x.stride() == meta_tensor(x.shape).stride()
