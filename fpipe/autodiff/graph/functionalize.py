"""Turn writes in place into values: after a write, every view of the memory is read from the new value.

A node that writes keeps its operation, so that kernels, layouts and random draws are eager autograd's. It stands for
the new value of the tensor that it writes to. Generated code writes to a copy, or to the memory itself if nothing
reads it afterwards.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from fpipe.autodiff.graph.aliasing import storage
from fpipe.autodiff.graph.input_writes import INPUT_WRITTEN, PARAMETER_WRITTEN
from fpipe.autodiff.graph.nodes import returns_itself, written
from fpipe.autodiff.graph.signature import Impure, Untraceable
from fpipe.autodiff.graph.trace import Joint

aten = torch.ops.aten


def geometry(x: Tensor) -> Hashable:
    """Return the part of a memory that a tensor covers. Symbols are compared as text."""
    sizes = (str(list(x.shape)), str(list(x.stride())), str(x.storage_offset()))
    return *sizes, x.dtype, x.is_conj(), x.is_neg()


@dataclass
class _Memory:
    """A memory that is written to.

    Args:
        whole: a node with all of it, as before the pending writes.
        shift: the offset of `whole` in the traced memory.
        current: nodes with parts of it, as after all writes so far.
        pending: writes: the new value, and the traced tensor that it replaces.
    """

    whole: fx.Node
    shift: Any
    current: dict[Hashable, fx.Node] = field(default_factory=dict)
    pending: list[tuple[fx.Node, Tensor]] = field(default_factory=list)


def functionalize(joint: Joint) -> Joint:
    """Return the graph with a new value for each write.

    Raises:
        Impure: the stage writes to an input.
        Untraceable: the stage writes to a tensor that it closes over, or in a way that a graph does not show.
    """
    return _Functionalizer(joint).run() if any(map(written, joint.graph.nodes)) else joint


class _Functionalizer:
    """Walks a graph in order.

    Args:
        traced: each node's value in the trace, before this pass changes it.
        inputs: each node's inputs, before this pass changes them.
        first: the first node with each memory.
    """

    def __init__(self, joint: Joint) -> None:
        self.joint, self.graph = joint, joint.graph
        self.traced = {node: node.meta.get("val") for node in joint.graph.nodes}
        self.inputs: dict[fx.Node, list[fx.Node]] = {}
        self.first: dict[int, fx.Node] = {}
        self.memories: dict[int, _Memory] = {}

    def run(self) -> Joint:
        for node in list(self.graph.nodes):
            targets, self.inputs[node] = written(node), node.all_input_nodes
            with self.graph.inserting_before(node):
                node.args = fx.map_arg(node.args, partial(self._current, node))
                node.kwargs = fx.map_arg(node.kwargs, partial(self._current, node))
            if node.op == "output":
                break
            if torch.Tag.inplace_view in getattr(node.target, "tags", ()):
                self._view(node, targets[0])
                self._track(node)
            elif targets:
                self._write(node, targets)
            else:
                self._track(node)
        with self.graph.inserting_before(node):
            return self.joint.map_results(partial(self._current, node))

    def _track(self, node: fx.Node) -> None:
        """Note a node's memory. If that has been written to, the node is a part of it now."""
        value = self.traced[node]
        if not isinstance(value, Tensor):
            return
        self.first.setdefault(storage(value), node)
        if storage(value) in self.memories:
            memory = self.memories[storage(value)]
            base = self._base(value, self.inputs[node])
            before, now = self.traced[base], memory.current[geometry(self.traced[base])].meta["val"]
            shift = value.storage_offset() - before.storage_offset() + now.storage_offset()
            node.meta["val"] = _part_of(now, value, shift)
            memory.current[geometry(value)] = node

    def _base(self, value: Tensor, inputs: list[fx.Node]) -> fx.Node:
        """Return the input that a value is a view of. An item of a tuple is a view of an input of the tuple's node."""
        for n in inputs:
            before = self.traced.get(n)
            if isinstance(before, Tensor) and storage(before) == storage(value):
                return n
            if isinstance(before, list | tuple):
                return self._base(value, self.inputs[n])
        raise Untraceable("it reads memory that was written to in a way that a graph does not show")

    def _write(self, node: fx.Node, targets: list[fx.Node]) -> None:
        if node.target in (aten.set_.source_Tensor, aten.resize_.default):
            raise Untraceable(f"{node.target} changes a tensor's memory")
        results = [node] if returns_itself(node) else list(self._results(node, len(targets)))
        for old, new in zip(targets, results, strict=True):
            before = self.traced[old]
            memory = self._memory(before)
            new.meta = {**node.meta, "val": _like(before)} if new is node else _result(node, _like(before))
            memory.pending.append((new, before))
            memory.current = {geometry(before): new}

    def _results(self, node: fx.Node, count: int) -> Iterator[fx.Node]:
        """Yield nodes for the values that a node writes, which follow the results that it returns."""
        results = len(node.target._schema.returns)  # type: ignore[union-attr]
        with self.graph.inserting_after(node):
            if results == 1:
                alone = self.graph.call_function(getitem, (node, 0))
                alone.meta, self.traced[alone] = _result(node, node.meta["val"]), self.traced[node]
                node.meta["val"] = None  # the node is a tuple of all results now
                node.replace_all_uses_with(alone, delete_user_cb=lambda user: user is not alone)
            for k in range(count):
                yield self.graph.call_function(getitem, (node, results + k))

    def _memory(self, x: Tensor) -> _Memory:
        if storage(x) not in self.memories:
            first = self.first[storage(x)]
            if first.op == "placeholder":
                raise Impure(PARAMETER_WRITTEN if first in self.joint.params else INPUT_WRITTEN)
            if first.op == "get_attr":
                raise Untraceable("it writes in place to a tensor that it closes over")
            self.memories[storage(x)] = _Memory(first, first.meta["val"].storage_offset())
        return self.memories[storage(x)]

    def _view(self, node: fx.Node, of: fx.Node) -> None:
        """Turn a view in place, such as `t_`, into the same view of the tensor's value."""
        value = self.traced[node]
        shift = value.storage_offset() - self.traced[of].storage_offset()
        node.target, node.kwargs = aten.as_strided.default, {}
        now = node.args[0].meta["val"]  # type: ignore[union-attr]
        node.args = (node.args[0], list(value.shape), list(value.stride()), now.storage_offset() + shift)

    def _current(self, user: fx.Node, node: fx.Node) -> fx.Node:
        """Return the node with a node's value as the user sees it, after all writes."""
        value = self.traced.get(node)
        if not isinstance(value, Tensor) or storage(value) not in self.memories:
            return node
        memory = self.memories[storage(value)]
        key = geometry(value)
        if key not in memory.current:
            memory.current[key] = self._part(memory, value, user)
        return memory.current[key]

    def _part(self, memory: _Memory, x: Tensor, user: fx.Node) -> fx.Node:
        """Return a part of a memory, as after all writes."""
        for new, before in memory.pending:
            if before.numel() == memory.whole.meta["val"].numel():
                memory.whole, memory.shift = new, before.storage_offset()
            else:
                memory.whole = self._scattered(memory, new, before, user)
        memory.pending.clear()
        part = _part_of(memory.whole.meta["val"], x, x.storage_offset() - memory.shift)
        return self._insert(user, aten.as_strided.default, (memory.whole,), part, part)

    def _scattered(self, memory: _Memory, new: fx.Node, before: Tensor, user: fx.Node) -> fx.Node:
        whole = memory.whole.meta["val"]
        part = _part_of(whole, before, before.storage_offset() - memory.shift)
        return self._insert(user, aten.as_strided_scatter.default, (memory.whole, new), part, _like(whole))

    def _insert(self, user: fx.Node, target: Any, args: tuple[Any, ...], part: Tensor, value: Tensor) -> fx.Node:
        """Insert an operation on a part of a memory."""
        sizes, strides, offset = list(part.shape), list(part.stride()), part.storage_offset()
        if any(isinstance(n, torch.SymInt) for n in (*sizes, *strides, offset)):
            raise Untraceable("it writes in place to part of a tensor whose sizes are symbols")
        node = self.graph.call_function(target, (*args, sizes, strides, offset))
        node.meta = {"val": value, "forward": user.meta["forward"]}
        return node


def _result(node: fx.Node, value: Any) -> dict[str, Any]:
    """Return the meta of one of several results."""
    return {"val": value, "forward": node.meta["forward"]}


def _part_of(whole: Tensor, like: Tensor, at: Any) -> Tensor:
    """Return a fake with the layout of another, in the memory of a whole."""
    if like.dtype != whole.dtype or like.is_conj() or like.is_neg():
        raise Untraceable("it writes in place to memory that it reads as another type")
    with whole.fake_mode:  # type: ignore[attr-defined]
        return whole.as_strided(like.shape, like.stride(), at)


def _like(x: Tensor) -> Tensor:
    """Return a fake with the same layout and a new memory."""
    assert isinstance(x, FakeTensor)
    with x.fake_mode:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
