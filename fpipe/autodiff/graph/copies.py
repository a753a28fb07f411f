"""A block with fewer operations for what only moves data, which changes no bit of what it computes.

Invariants:
- what computes is given the same values, in the same shapes and strides; only a pointwise operation may run in another
  shape, where all that it reads and gives is contiguous, and so one row of elements either way;
- what is copied is told by the order of its elements, which follows from shapes; a view of views is made at once where
  its strides are sure to be the same;
- no memory lives longer than what it takes the place of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from fpipe.autodiff.graph.aliasing import memory, root, size
from fpipe.autodiff.graph.block import Block
from fpipe.autodiff.graph.functionalize import written
from fpipe.autodiff.graph.layouts import (
    RESHAPES,
    TRANSPOSES,
    Order,
    args_of,
    as_it_is,
    chain_to,
    empty,
    has_symbols,
    is_coarser,
    is_contiguous,
    is_copy,
    is_move,
    is_plain,
    is_pointwise,
    is_row,
    is_sorted,
    is_sure,
    is_view,
    like,
    moved,
    note,
    order_of,
    shape_of,
    source_of,
    split,
)

aten = torch.ops.aten
PARTS = {aten.select_backward.default, aten.slice_backward.default}


def with_fewer_copies(block: Block) -> Block:
    """The same block by fewer operations; one that writes in place stays as it is."""
    return block if any(map(written, block.body)) else _Moves(block).run()


def stacked(parts: list[Tensor], dim: int) -> Tensor:
    """The sum of tensors that are zero but for one of the parts each: -0.0 becomes 0.0."""
    return torch.stack(parts, dim).contiguous().add_(0.0)


def joined(parts: list[Tensor], dim: int) -> Tensor:
    """As `stacked`, along a dim that the parts have."""
    return torch.cat(parts, dim).contiguous().add_(0.0)


class _Moves:
    """A block's nodes, copied into a graph of their own that is changed."""

    def __init__(self, block: Block) -> None:
        self.given, self.graph = block, fx.Graph()
        self.mine: dict[fx.Node, fx.Node] = {}
        given = {node: name for name, values in block.inputs.items() for node in values if node is not None}
        for graph in {node.graph for node in given}:
            note(graph.nodes)
        for node in given:
            self.mine[node] = self.graph.placeholder(node.name)
        laid_out = not any(
            has_symbols(node) for node in given
        )  # as traced are cotangents, but for a trace of many sizes
        for node, name in given.items():
            sure = is_sure(node) or (name == "c" and laid_out and is_plain(node))
            self._know(node, sure=sure, row=sure and is_contiguous(node.meta["val"]))
        for node in block.body:
            self.mine[node] = self.graph.node_copy(node, self.mine.__getitem__)
            self._know(node)
        ends = [x for values in block.outputs for x in values if isinstance(x, fx.Node)]
        self.output = self.graph.output(tuple(self.mine[x] for x in ends))
        note(self.graph.nodes)
        self.rows: dict[fx.Node, list[fx.Node]] = {}
        for node in map(self.mine.__getitem__, given):
            if is_row(node):
                self.rows.setdefault(root(node), []).append(node)

    def _know(self, node: fx.Node, **known: Any) -> None:
        of = node.meta.get("view_of")
        meta = {key: node.meta.get(key) for key in ("val", "forward", "plain")}
        self.mine[node].meta = {**meta, "view_of": of and self.mine.get(of, of), **known}

    def run(self) -> Block:
        for rule in (self._sum, self._pointwise, self._parts, self._copy, self._view):
            for node in list(reversed(self.graph.nodes)):
                if not node._erased and node.op == "call_function" and is_plain(node):
                    rule(node)
        ends: Any = self.output.args[0]
        left = iter(ends)
        inputs = {name: [n and self.mine[n] for n in values] for name, values in self.given.inputs.items()}
        outputs = [[next(left) if isinstance(x, fx.Node) else x for x in values] for values in self.given.outputs]
        body = [n for n in self.graph.nodes if n.op not in ("placeholder", "output")]
        return replace(self.given, inputs=inputs, body=body, outputs=outputs)

    # Rules

    def _sum(self, node: fx.Node) -> None:
        """A sum whose dims are dropped afterwards drops them itself."""
        end, args = _only_user(node), args_of(node)
        if node.target != aten.sum.dim_IntList or end is None or end.target not in RESHAPES or not any(args[2:]):
            return
        sizes = shape_of(args[0])
        gone = {d % len(sizes) for d in args[1] or range(len(sizes))}
        shape = tuple(n for i, n in enumerate(sizes) if i not in gone)
        if is_plain(end) and shape_of(end) == shape:
            value = like(node.meta["val"], shape)
            self._instead(end, self._make(node, node.target, args[:2], value, kwargs=node.kwargs))

    def _pointwise(self, node: fx.Node) -> None:
        """What is reshaped for a pointwise operation alone, and back after it, stays as it was."""
        ends, given = [n for n in node.users if n.target in RESHAPES], node.all_input_nodes
        shapes = set(map(shape_of, ends))
        rows = all(is_row(n) and shape_of(n) == shape_of(node) for n in (node, *given))
        if len(shapes) != 1 or not rows or not is_pointwise(node):
            return
        value = like(node.meta["val"], shapes.pop())
        shape = list(value.shape)
        there = {n: self._reshaped(n, shape, node) for n in given}
        spared = len(ends) + sum(n.target in RESHAPES and len(n.users) == 1 for n in given)
        if spared <= sum(n is None for n in there.values()) + (len(node.users) > len(ends)):
            return
        rows_there = {n: x or self._make(node, aten.view.default, (n, shape), value, n) for n, x in there.items()}
        args = fx.map_arg(node.args, rows_there.__getitem__)
        new = self._make(node, node.target, args, value, kwargs=node.kwargs)
        back = self._make(node, aten.view.default, (new, list(shape_of(node))), node.meta["val"], new)
        for end in ends:
            self._instead(end, new)
        if not node._erased:
            self._instead(node, back)
        self._drop(back)

    def _reshaped(self, node: fx.Node, shape: Sequence[int], user: fx.Node) -> fx.Node | None:
        """What has a row's elements in another shape, and is there before its user."""
        whole = args_of(node)[0] if node.target in RESHAPES else node
        if is_row(whole) and shape_of(whole) == tuple(shape):
            return whole
        near = [*whole.users, *self.rows.get(root(node), ())]
        fit = (n for n in near if n < user and is_row(n) and shape_of(n) == tuple(shape))
        return next((n for n in fit if _is_all_of_one_memory(n, node)), None)

    def _parts(self, node: fx.Node) -> None:
        """The sum of tensors that are zero but for one part each is the parts side by side, plus zero."""
        terms, whole = _terms(node), node.meta["val"]
        if len(terms) < 2 or whole.is_complex() or not is_contiguous(whole):  # complex sums spread NaN
            return
        target, dim = terms[0].target, args_of(terms[0])[2] % whole.dim()
        if any(
            n.target != target or shape_of(n) != shape_of(node) or args_of(n)[2] % whole.dim() != dim for n in terms
        ):
            return
        along = list(range(whole.shape[dim]))
        places = sorted((along[_place(n)], args_of(n)[0]) for n in terms)
        parts = [n for _, n in places]
        plain = all(is_plain(n) and n.meta["val"].dtype == whole.dtype for n in parts)
        if not plain or [k for place, _ in places for k in place] != along:
            return
        if target == aten.select_backward.default:
            self._stack(node, parts, dim)
        elif 1 not in whole.shape and _fit(parts, whole):
            self._instead(node, self._make(node, joined, (parts, dim), whole, sure=True))

    def _stack(self, node: fx.Node, parts: list[fx.Node], dim: int) -> None:
        """Stack parts as they were before they were copied, in the order in which the stack is copied afterwards."""
        whole, end = node.meta["val"], node
        found = list(map(_uncopied, parts))
        if len({tuple(order.shape) for _, order in found}) > 1 or not _fit([n for n, _ in found], whole):
            found = [(n, as_it_is(n)) for n in parts]
        if not _fit([n for n, _ in found], whole):
            return
        shape = found[0][1].shape
        to = next(k for k in range(len(shape) + 1) if prod(shape[:k]) == prod(whole.shape[:dim]))
        shape.insert(to, len(parts))
        chain = _until_copied(node)
        order = order_of(shape, moved(chain[1:], empty(whole.shape))) if chain else None
        if order is not None and order.pieces == shape and is_sorted([i for i in order.order if i != to]):
            end, shape, to = chain[-1], order.shape, order.order.index(to)
        given = [self._ordered(node, n, order) for n, order in found]
        new = self._make(node, stacked, (given, to), like(whole, shape), sure=True)
        self._instead(end, self._as_shape(node, new, end))

    def _copy(self, node: fx.Node) -> None:
        """Copies of copies, with views between them, are one copy of one view."""
        if not is_copy(node):
            return
        tail = [node]
        while (after := _only_user(tail[-1])) is not None and after.target in RESHAPES and is_view(after):
            tail.append(after)
        chain, end = chain_to(node, is_move), tail[-1]
        for k, source in enumerate(chain[:-1]):
            order = order_of(shape_of(source), moved(chain[k + 1 :], empty(shape_of(source))))
            if order is None:
                continue
            at_once = _copied_by_reshape(source, order, end)
            shape = tuple(order.shape) if order.moved else shape_of(source)
            steps = (_steps(source, order) if order.moved else 0) + 1 + (not at_once and shape != shape_of(end))
            if steps < len(chain) - 1 - k + len(tail) - 1:
                first = next(n for n in chain[k + 1 :] if is_copy(n))
                self._copied(first, source, order, end, at_once)
                return

    def _copied(self, at: fx.Node, source: fx.Node, order: Order, end: fx.Node, at_once: bool) -> None:
        view = self._ordered(at, source, order) if order.moved else source
        x = view.meta["val"]
        if at_once:
            args = (view, list(shape_of(end)))
            self._instead(end, self._make(at, torch.reshape, args, like(x, shape_of(end)), sure=True))
            return
        kwargs = {"memory_format": torch.contiguous_format}
        copy = self._make(at, aten.clone.default, (view,), like(x, x.shape), kwargs=kwargs)
        self._instead(end, self._as_shape(at, copy, end))

    def _view(self, node: fx.Node) -> None:
        """Views of views are one view."""
        after = _only_user(node)
        if not is_view(node) or (after is not None and is_view(after)):
            return
        source, *views = chain_to(node, is_view)
        if len(views) < 2:
            return
        for chain in (chain_to(node, is_view, shared=True), [source, *views]):
            x, sure = chain[0].meta["val"], is_sure(chain[0])
            view = moved(chain[1:], empty(x.shape, x.stride())) if sure else None
            if view is not None and (view.storage_offset() == 0 or _is_fresh(chain[0])):
                self._instead(node, self._strided(node, chain[0], view))
                return
        value = node.meta["val"]
        if all(n.target in TRANSPOSES for n in views):
            numbered = moved(views, empty(range(1, value.dim() + 1)))
            assert numbered is not None
            dims = [n - 1 for n in numbered.shape]
            self._instead(node, self._make(node, aten.permute.default, (source, dims), value, source))
        elif node.target in RESHAPES and views[-2].target in RESHAPES and is_coarser(node, views[-2]):
            before = source_of(views[-2])
            self._instead(node, self._make(node, aten.view.default, (before, list(value.shape)), value, before))

    # Nodes

    def _ordered(self, at: fx.Node, source: fx.Node, order: Order) -> fx.Node:
        """A source in another order, as a view."""
        x, view = source.meta["val"], order.of(source.meta["val"])
        if order.moved and is_sure(source) and list(x.shape) != order.pieces:
            return self._strided(at, source, view)
        if list(x.shape) != order.pieces:
            pieces = empty(x.shape, x.stride()).view(order.pieces)
            value = like(x, pieces.shape, pieces.stride())
            source = self._make(at, aten.view.default, (source, order.pieces), value, source)
        if order.moved:
            value = like(x, view.shape, view.stride())
            source = self._make(at, aten.permute.default, (source, order.order), value, source)
        return source

    def _strided(self, at: fx.Node, source: fx.Node, view: Tensor) -> fx.Node:
        """A view of a source; without an offset of its own it keeps the source's, whatever that is."""
        offset = [view.storage_offset()] if view.storage_offset() else []
        args = (source, list(view.shape), list(view.stride()), *offset)
        value = like(source.meta["val"], view.shape, view.stride())
        return self._make(at, aten.as_strided.default, args, value, source, sure=True)

    def _as_shape(self, at: fx.Node, node: fx.Node, end: fx.Node) -> fx.Node:
        """A contiguous node in another's shape."""
        if shape_of(node) == shape_of(end):
            return node
        value = like(node.meta["val"], shape_of(end))
        return self._make(at, aten.view.default, (node, list(shape_of(end))), value, node)

    def _make(
        self,
        at: fx.Node,
        target: Any,
        args: Any,
        value: Tensor,
        of: fx.Node | None = None,
        kwargs: Mapping[str, Any] | None = None,
        sure: bool = False,
    ) -> fx.Node:
        with self.graph.inserting_before(at):
            node = self.graph.call_function(target, args, dict(kwargs or {}))
        node.meta = {"val": value, "view_of": of, "forward": at.meta.get("forward", False)}
        note([node], sure)
        return node

    def _instead(self, old: fx.Node, new: fx.Node) -> None:
        old.replace_all_uses_with(new)
        self._drop(old)

    def _drop(self, node: fx.Node) -> None:
        """Drop a node that nothing uses, and what nothing else used."""
        todo = [node]
        while todo:
            node = todo.pop()
            if node.op == "call_function" and not node.users and not node._erased:
                todo += node.all_input_nodes
                self.graph.erase_node(node)


def _is_fresh(node: fx.Node) -> bool:
    """Whether a sure node begins where its memory does."""
    return node.op == "call_function" and node.meta["view_of"] is None


def _is_all_of_one_memory(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return root(a) is root(b) and x.dtype == y.dtype and x.nbytes == y.nbytes == size(x) == size(y)


def _only_user(node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].op != "output" else None


def _until_copied(node: fx.Node) -> list[fx.Node]:
    """A node and the views of it, each the only use of the one before, up to a copy; empty without one."""
    chain = [node]
    while (after := _only_user(chain[-1])) is not None and is_move(after):
        chain.append(after)
        if is_copy(after):
            return chain
    return []


def _uncopied(node: fx.Node) -> tuple[fx.Node, Order]:
    """What a node that is used once is copied from, and in which order."""
    chain = chain_to(node, is_move) if len(node.users) == 1 else [node]
    end = max((k for k, n in enumerate(chain) if is_copy(n)), default=0)  # only reshapes may come after it
    for k, source in enumerate(chain[:end]):
        if all(n.target in RESHAPES for n in chain[end + 1 :]):
            order = order_of(shape_of(source), moved(chain[k + 1 : end], empty(shape_of(source))))
            fine = order and split(order, shape_of(node))
            if fine and _steps(source, fine) < len(chain) - k:
                return source, fine
    return node, as_it_is(node)


def _steps(source: fx.Node, order: Order) -> int:
    """How many operations it takes to view a source in another order."""
    split = order.pieces != list(shape_of(source))
    return 1 if order.moved and is_sure(source) else split + order.moved


def _copied_by_reshape(source: fx.Node, order: Order, end: fx.Node) -> bool:
    """Whether a reshape to the end's shape surely copies."""
    x = source.meta["val"]
    if not is_sure(source):
        return False
    try:
        (order.of(x) if order.moved else empty(x.shape, x.stride())).view(shape_of(end))
    except RuntimeError:
        return True
    return False


# Sums of parts


def _terms(node: fx.Node) -> list[fx.Node]:
    """What is added up to a node, if that is gradients of parts alone."""
    found, todo = [], [node]
    while todo:
        n = todo.pop()
        if n is not node and len(n.users) > 1:
            return []
        if n.target is aten.add.Tensor and not n.kwargs and all(isinstance(x, fx.Node) for x in n.args):
            todo += args_of(n)
        elif n.target in PARTS and is_plain(n):
            found.append(n)
        else:
            return []
    return found


def _place(node: fx.Node) -> slice:
    """Which part of its dim a node is the gradient of."""
    _, shape, dim, *at = args_of(node)
    k = at[0] % shape[dim]
    return slice(k, k + 1) if node.target is aten.select_backward.default else slice(*at)


def _fit(parts: Sequence[fx.Node], whole: Tensor) -> bool:
    """Whether the memory of parts, which must last until all are there, is no more than the whole's."""
    return sum(memory(parts).values()) <= whole.nbytes
