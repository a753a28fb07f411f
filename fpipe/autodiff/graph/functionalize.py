"""Writes in place, made values: after a write, whatever else is the same memory is read from the new value.

A node that writes stays the operation it was, so that kernels, layouts and draws are eager's, but stands for
the new value of what it writes to; whoever runs it writes to a copy, or to the memory itself where nobody reads
that again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from fpipe.autodiff.graph.aliasing import storage
from fpipe.autodiff.graph.signature import Impure, Untraceable
from fpipe.autodiff.graph.trace import Joint

aten = torch.ops.aten


def written(node: fx.Node) -> list[fx.Node]:
    """What a node writes to."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return []
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    found = [given.get(name) for name in names]
    return [n for x in found for n in (x if isinstance(x, list | tuple) else [x]) if isinstance(n, fx.Node)]


def returns_itself(node: fx.Node) -> bool:
    """Whether a node that writes gives what it wrote to, rather than results of its own."""
    returns = node.target._schema.returns  # type: ignore[union-attr]
    return len(returns) == 1 and returns[0].alias_info is not None and returns[0].alias_info.is_write


def impure(node: fx.Node) -> bool:
    """Whether a node does something besides giving a value."""
    return node.op == "call_function" and not written(node) and node.is_impure(impure_random=False)


class Geometry(NamedTuple):
    """Which part of a memory a tensor is. Symbols are compared as text."""

    size: str
    stride: str
    offset: str
    dtype: torch.dtype
    conj: bool
    neg: bool


def geometry(x: Tensor) -> Geometry:
    sizes = (str(list(x.shape)), str(list(x.stride())), str(x.storage_offset()))
    return Geometry(*sizes, x.dtype, x.is_conj(), x.is_neg())


@dataclass
class _Memory:
    """A memory that is written to.

    Args:
        whole: a node that is all of it, as it was before the pending writes.
        shift: where the memory of `whole` begins in the traced one.
        now: nodes that are parts of it, as they are now.
    """

    whole: fx.Node
    shift: Any
    now: dict[Geometry, fx.Node] = field(default_factory=dict)
    pending: list[tuple[fx.Node, Tensor]] = field(default_factory=list)


def functional(joint: Joint) -> Joint:
    """The same graph, in which a write gives a new value.

    Raises:
        Untraceable: an input, or a tensor that the stage closes over, is written to.
    """
    return _Functional(joint).run() if any(map(written, joint.graph.nodes)) else joint


class _Functional:
    def __init__(self, joint: Joint) -> None:
        self.joint, self.graph = joint, joint.graph
        self.traced = {node: node.meta.get("val") for node in joint.graph.nodes}
        self.given: dict[fx.Node, list[fx.Node]] = {}
        self.first: dict[int, fx.Node] = {}
        self.memories: dict[int, _Memory] = {}

    def run(self) -> Joint:
        ends: dict[fx.Node, fx.Node] = {}
        for node in list(self.graph.nodes):
            into, given = written(node), node.all_input_nodes
            self.given[node] = given
            with self.graph.inserting_before(node):
                node.args = fx.map_arg(node.args, self._now(node))
                node.kwargs = fx.map_arg(node.kwargs, self._now(node))
            if node.op == "output":
                break
            if torch.Tag.inplace_view in getattr(node.target, "tags", ()):
                self._view(node, into[0])
                self._note(node, given)
            elif into:
                self._write(node, into)
            else:
                self._note(node, given)
        moved = self._now(node)

        def now(leaves: list[Any]) -> list[Any]:
            with self.graph.inserting_before(node):
                return [ends.setdefault(x, moved(x)) if isinstance(x, fx.Node) else x for x in leaves]

        joint = self.joint
        return replace(
            joint,
            outputs=now(joint.outputs),
            state=now(joint.state),
            weights=now(joint.weights),
            gradients=now(joint.gradients),
        )

    def _note(self, node: fx.Node, given: list[fx.Node]) -> None:
        value = self.traced[node]
        if not isinstance(value, Tensor):
            return
        self.first.setdefault(storage(value), node)
        if storage(value) in self.memories:
            memory = self.memories[storage(value)]
            of = self._viewed(value, given)
            before, now = self.traced[of], memory.now[geometry(self.traced[of])].meta["val"]
            shift = value.storage_offset() - before.storage_offset() + now.storage_offset()
            node.meta["val"] = _part_of(now, value, shift)
            memory.now[geometry(value)] = node

    def _viewed(self, value: Tensor, given: list[fx.Node]) -> fx.Node:
        """Which of the nodes that were given a value is part of, maybe by way of one with several results."""
        for n in given:
            before = self.traced.get(n)
            if isinstance(before, Tensor) and storage(before) == storage(value):
                return n
            if isinstance(before, list | tuple):
                return self._viewed(value, self.given[n])
        raise Untraceable("it reads memory that was written to in a way that a graph does not show")

    def _write(self, node: fx.Node, into: list[fx.Node]) -> None:
        if node.target in (aten.set_.source_Tensor, aten.resize_.default):
            raise Untraceable(f"{node.target} changes a tensor's memory")
        made = [node] if returns_itself(node) else list(self._results(node, len(into)))
        for old, new in zip(into, made, strict=True):
            before = self.traced[old]
            memory = self._memory(before)
            new.meta = {**node.meta, "val": _like(before)} if new is node else _result(node, _like(before))
            memory.pending.append((new, before))
            memory.now = {geometry(before): new}

    def _results(self, node: fx.Node, count: int) -> Iterator[fx.Node]:
        """What a node with results of its own leaves in what it writes to: these come after its results."""
        results = len(node.target._schema.returns)  # type: ignore[union-attr]
        with self.graph.inserting_after(node):
            if results == 1:
                alone = self.graph.call_function(getitem, (node, 0))
                alone.meta, self.traced[alone] = _result(node, node.meta["val"]), self.traced[node]
                node.meta["val"] = None  # it stands for all results now
                node.replace_all_uses_with(alone, delete_user_cb=lambda user: user is not alone)
            for k in range(count):
                yield self.graph.call_function(getitem, (node, results + k))

    def _memory(self, x: Tensor) -> _Memory:
        if storage(x) not in self.memories:
            first = self.first[storage(x)]
            if first.op == "placeholder":
                raise Impure(
                    "it writes in place to what it is given, which nobody else would expect: write to a clone of it"
                )
            if first.op == "get_attr":
                raise Untraceable("it writes in place to a tensor that it closes over")
            self.memories[storage(x)] = _Memory(first, first.meta["val"].storage_offset())
        return self.memories[storage(x)]

    def _view(self, node: fx.Node, of: fx.Node) -> None:
        """A view that a tensor becomes in place: the same view of its value."""
        value = self.traced[node]
        shift = value.storage_offset() - self.traced[of].storage_offset()
        node.target, node.kwargs = aten.as_strided.default, {}
        now = node.args[0].meta["val"]  # type: ignore[union-attr]
        node.args = (node.args[0], list(value.shape), list(value.stride()), now.storage_offset() + shift)

    def _now(self, user: fx.Node) -> Any:
        def now(node: fx.Node) -> fx.Node:
            value = self.traced.get(node)
            if not isinstance(value, Tensor) or storage(value) not in self.memories:
                return node
            memory = self.memories[storage(value)]
            key = geometry(value)
            if key not in memory.now:
                memory.now[key] = self._part(memory, value, user)
            return memory.now[key]

        return now

    def _part(self, memory: _Memory, x: Tensor, user: fx.Node) -> fx.Node:
        """Part of a memory as it is after all writes."""
        for new, before in memory.pending:
            if before.numel() == memory.whole.meta["val"].numel():
                memory.whole, memory.shift = new, before.storage_offset()
            else:
                memory.whole = self._scattered(memory, new, before, user)
        memory.pending.clear()
        at = x.storage_offset() - memory.shift
        if any(isinstance(n, torch.SymInt) for n in (*x.shape, *x.stride(), at)):
            raise Untraceable("it writes in place to part of a tensor whose sizes are symbols")
        args = (memory.whole, list(x.shape), list(x.stride()), at)
        return self._made(user, aten.as_strided.default, args, _part_of(memory.whole.meta["val"], x, at))

    def _scattered(self, memory: _Memory, new: fx.Node, before: Tensor, user: fx.Node) -> fx.Node:
        whole = memory.whole.meta["val"]
        if before.dtype != whole.dtype or before.is_conj() or before.is_neg():
            raise Untraceable("it writes in place to memory that it reads as another type")
        if any(isinstance(n, torch.SymInt) for n in (*before.shape, *before.stride(), before.storage_offset())):
            raise Untraceable("it writes in place to part of a tensor whose sizes are symbols")
        where = (list(before.shape), list(before.stride()), before.storage_offset() - memory.shift)
        return self._made(user, aten.as_strided_scatter.default, (memory.whole, new, *where), _like(whole))

    def _made(self, user: fx.Node, target: Any, args: tuple[Any, ...], value: Tensor) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta = {"val": value, "forward": user.meta.get("forward", False)}
        return node


def _result(node: fx.Node, value: Any) -> dict[str, Any]:
    """What is known of one of several results."""
    return {"val": value, "forward": node.meta["forward"]}


def _part_of(whole: Tensor, like: Tensor, at: Any) -> Tensor:
    """A fake that is laid out like another, in the memory of a whole."""
    if like.dtype != whole.dtype or like.is_conj() or like.is_neg():
        raise Untraceable("it writes in place to memory that it reads as another type")
    with whole.fake_mode:  # type: ignore[attr-defined]
        return whole.as_strided(like.shape, like.stride(), at)


def _like(x: Tensor) -> Tensor:
    """A fake of the same layout, with a memory of its own."""
    assert isinstance(x, FakeTensor)
    with x.fake_mode:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
