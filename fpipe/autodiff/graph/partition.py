"""Partition a joint graph into blocks.

`prepare` computes values that depend on parameters alone. `forward` computes the outputs and the residuals, `backward`
the gradients. A split backward is `backward_input`, which computes the input gradients, and `backward_weight`, which
computes the rest, so that no value is computed twice. A block saves for a later one each memory that the later one
reads. A value that the policy does not save is recomputed in the backward, before its first use.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from fpipe.autodiff.graph.aliasing import nbytes, root
from fpipe.autodiff.graph.block import Block
from fpipe.autodiff.graph.collectives import is_collective, overlapped
from fpipe.autodiff.graph.cse import expression
from fpipe.autodiff.graph.guards import hint
from fpipe.autodiff.graph.nodes import ancestors, is_impure, is_random
from fpipe.autodiff.graph.rematerialise import worth_keeping
from fpipe.autodiff.graph.trace import Cotangent, Cotangents, Joint
from fpipe.errors import StageError
from fpipe.policies import Policy, Value

Part = TypeVar("Part")
KEEP = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
LARGE = 1 << 13
"""Bytes. A weight gradient of this size or more is accumulated by itself, smaller ones together by one kernel."""
aten = torch.ops.aten


class NotKept(Exception):
    """A backward needs a value that an earlier forward did not save."""


@dataclass(frozen=True, eq=False)
class Backward(Generic[Part]):
    """The backward for one layout of the cotangents, in blocks or in functions.

    Args:
        expected: the layouts of the cotangents, by output leaf.
        prepare: params -> `v`, the values that depend on params alone.
        fused: v, residuals, cotangents, sink -> weight gradients, input gradients.
        input: v, residuals, cotangents -> input gradients, deferred.
        weight: v, deferred, sink -> weight gradients.
        fresh: numbers of the weight gradients that share memory with no other value.
        reads: numbers of the values in `v` that `weight` reads.
    """

    expected: Cotangents
    prepare: Part
    fused: Part
    input: Part
    weight: Part
    fresh: frozenset[int]
    reads: frozenset[int]

    @property
    def pieces(self) -> tuple[Part, Part, Part]:
        return self.fused, self.input, self.weight


@dataclass(frozen=True)
class Blocks:
    """A stage's blocks for one signature.

    Args:
        prepare: params -> `v`, the values that depend on params alone.
        forward: v, inputs -> outputs, state, residuals.
        kept: the residuals, by their positions in the trace.
        digest: the forward's operations. Another trace of a pure function has the same.
        fresh: for each output, then each leaf of the state, whether it shares memory with no other value.
    """

    prepare: Block
    forward: Block
    backward: Backward[Block]
    kept: tuple[int, ...]
    digest: tuple[str, ...]
    fresh: tuple[bool, ...]


def partition(joint: Joint, policy: Policy, kept: Sequence[int] | None = None) -> Blocks:
    """Partition a graph without writes in place and duplicates. The graph is changed.

    Args:
        kept: the residuals of a forward that has already run, to make a backward for another layout of its cotangents.

    Raises:
        NotKept: the backward needs other values.
        StageError: the policy returned something else than True, False or None.
    """
    saved = None if kept is None else dict.fromkeys(kept)  # in order, and fast to look up
    return _Partitioner(joint, policy, saved, {node: i for i, node in enumerate(joint.graph.nodes)}).partition()


@dataclass
class _Partitioner:
    """Writes the backward, and then forms the blocks.

    Args:
        kept: positions of the values that a forward has saved; None if this is the first partition.
        order: each node's position in the joint graph.
        saved: the residuals.
        stands_for: the node that has a node's value in the backward.
        halves: convolutions' backwards, in two operations.
        backward: the backward's nodes, in order.
        seen: the backward's nodes by expression.
    """

    joint: Joint
    policy: Policy
    kept: Collection[int] | None
    order: dict[fx.Node, int]
    saved: list[fx.Node] = field(default_factory=list)
    stands_for: dict[fx.Node, fx.Node] = field(default_factory=dict)
    halves: dict[fx.Node, tuple[fx.Node, fx.Node]] = field(default_factory=dict)
    backward: list[fx.Node] = field(default_factory=list)
    seen: dict[Hashable, fx.Node] = field(default_factory=dict)

    def partition(self) -> Blocks:
        joint, order = self.joint, self.order
        self._write_backward()
        weights, gradients = self._resolved(joint.weights), self._resolved(joint.gradients)
        by_position = {order[node]: node for node in self.saved}
        positions = tuple(by_position if self.kept is None else self.kept)
        residuals = [by_position.get(at) for at in positions]
        ends = [*joint.outputs, *joint.state, *self.saved]
        pinned = [n for n in order if n.meta["forward"] and _is_pinned(n)]
        body = sorted(ancestors([*ends, *pinned], self._runs_forward), key=order.__getitem__)
        v, prepare = self._prepared([*body, *self.backward], [*ends, *weights, *gradients])
        results = [joint.outputs, joint.state, residuals]
        return Blocks(
            prepare,
            Block("forward", {"v": v, "x": joint.inputs}, overlapped(body), results, donated=joint.donated),
            self._backward(v, prepare, residuals, weights, gradients),
            positions,
            tuple(str(n.target) for n in order if n.meta["forward"] and n.op == "call_function"),
            self._unshared([*joint.outputs, *joint.state], self.saved),
        )

    # Phases

    @cached_property
    def constant(self) -> set[fx.Node]:
        """The nodes that depend on parameters alone."""
        constant = {node for node in self.joint.params if node is not None}
        for node in self.joint.graph.nodes:
            pure = node.op == "call_function" and not is_random(node)
            pure = pure and (is_collective(node.target) or not is_impure(node))
            if node.op == "get_attr" or (
                pure and node not in self.cotangents and constant.issuperset(node.all_input_nodes)
            ):
                constant.add(node)
        return constant

    @cached_property
    def cotangents(self) -> set[fx.Node]:
        return {node for node in self.joint.cotangents if node is not None}

    def _runs_forward(self, node: fx.Node) -> bool:
        return node not in self.constant and node.op == "call_function"

    def _runs_backward(self, node: fx.Node) -> bool:
        return not (node in self.constant or node in self.cotangents or node.meta["forward"])

    # The backward, with the values that it recomputes

    def _write_backward(self) -> None:
        """Collect the backward's nodes, in order."""
        self.stands_for |= {node: node for node in (*self.constant, *self.cotangents)}
        needed = ancestors([*self.joint.weights, *self.joint.gradients], self._runs_backward)
        for node in list(self.joint.graph.nodes):
            if node in needed:
                with self.joint.graph.inserting_before(node):
                    self._add(node)

    def _add(self, node: fx.Node) -> None:
        if node.target == aten.convolution_backward.default:
            mask: Any = node.args[10]
            if mask[0] and any(mask[1:]):  # it computes the input's gradient and another
                self.halves[node] = self._in_halves(node)
                return
        node.args = fx.map_arg(node.args, lambda n: self._resolve(n, node))
        node.kwargs = fx.map_arg(node.kwargs, lambda n: self._resolve(n, node))
        self._keep_view(node)
        self._append(node)

    def _append(self, node: fx.Node) -> fx.Node:
        """Append a node to the backward, unless a node there has the same value. Return that node."""
        key = expression(node)
        twin = self.seen.setdefault(key, node)
        self.stands_for[node] = twin
        if twin is node:
            self.backward.append(node)
        return twin

    def _in_halves(self, node: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Return a convolution's backward as two operations, as its kernels are: for the input and for the weights."""
        args: Any = fx.map_arg(node.args, lambda n: self._resolve(n, node))
        masks = ([True, False, False], [False, *args[10][1:]])
        target: Any = node.target
        halves = [self.joint.graph.call_function(target, (*args[:10], mask)) for mask in masks]
        for half in halves:
            half.meta = dict(node.meta)
            self.backward.append(half)
        return halves[0], halves[1]

    def _resolved(self, leaves: Iterable[Any]) -> list[Any]:
        return [x if x is None else self._resolve(x, None) for x in leaves]

    def _resolve(self, node: fx.Node, user: fx.Node | None) -> fx.Node:
        """Return the node that has a node's value in the backward."""
        if node in self.halves:
            assert user is not None
            return self.halves[node][user.args[1] != 0]
        if node not in self.stands_for:
            for n in self._unsettled(node):
                if self._is_recomputed(n):
                    self.stands_for[n] = self._recompute(n)
                else:
                    self.stands_for[n] = n
                    self.saved.append(n)
        return self.stands_for[node]

    def _unsettled(self, node: fx.Node) -> list[fx.Node]:
        """Return the node, and all values that must be recomputed for it, in the order of the forward."""

        def inputs(n: fx.Node) -> Iterable[fx.Node]:
            return n.all_input_nodes if self._is_recomputed(n) else ()

        return sorted(ancestors([node], lambda n: n not in self.stands_for, inputs), key=self.order.__getitem__)

    def _is_recomputed(self, node: fx.Node) -> bool:
        if self.kept is not None:
            is_kept = self.order[node] in self.kept
            if not is_kept and not _can_recompute(node):
                raise NotKept(str(node))
            return not is_kept
        if not _can_recompute(node):
            return False
        may_keep = self._may_keep(node)
        return root(node) not in self.worth_keeping if may_keep is None else not may_keep

    def _may_keep(self, node: fx.Node) -> bool | None:
        """Return the policy's answer for a value. A view gets the answer for its root."""
        node = root(node)
        if node.op == "placeholder":
            return True
        marked = _origin(node).meta.get("recompute")
        return self._ask(_value(node)) if marked is None else marked in KEEP

    def _ask(self, value: Value) -> bool | None:
        answer = self.policy(value)
        if answer is not None and not isinstance(answer, bool):
            raise StageError(
                f"its policy {getattr(self.policy, '__name__', self.policy)} returned {answer!r} for {value.op}: a "
                "policy returns True, False or None; does it have to be called first, as save_only('name')?"
            )
        return answer

    @cached_property
    def worth_keeping(self) -> set[fx.Node]:
        """The values to save among those that the policy leaves open."""
        after = ancestors([*self.joint.weights, *self.joint.gradients], self._runs_backward)
        forward = [n for n in self.joint.graph.nodes if n.meta["forward"]]
        needed = {n for node in after for n in node.all_input_nodes}

        def recomputable(node: fx.Node) -> bool:
            return _can_recompute(node) and not self._may_keep(node)

        return worth_keeping(forward, needed, self.constant.__contains__, recomputable)

    def _recompute(self, node: fx.Node) -> fx.Node:
        copy = self.joint.graph.node_copy(node, lambda n: self._resolve(n, node))
        copy.meta = {**node.meta, "forward": False}
        self._keep_view(copy)
        return self._append(copy)

    def _keep_view(self, node: fx.Node) -> None:
        base = node.meta.get("view_of")
        node.meta["view_of"] = base and self.stands_for.get(base, base)

    # Blocks

    def _prepared(self, rest: Sequence[fx.Node], ends: Iterable[Any]) -> tuple[list[fx.Node], Block]:
        """Return `v`, and the block that computes it."""
        used = {n for node in rest for n in node.all_input_nodes} | {x for x in ends if isinstance(x, fx.Node)}
        v = sorted(used & self.constant, key=self.order.__getitem__)
        inner = sorted(ancestors(v, lambda n: n in self.constant), key=self.order.__getitem__)
        body = [n for n in inner if n.op != "placeholder"]
        return v, Block("prepare", {"p": self.joint.params}, overlapped(body), [v])

    def _backward(
        self,
        v: list[fx.Node],
        prepare: Block,
        residuals: list[fx.Node | None],
        weights: list[Any],
        gradients: list[Any],
    ) -> Backward[Block]:
        c = self.joint.cotangents
        nodes = set(self.backward)
        by_input = set(ancestors(gradients, nodes.__contains__))
        by_input |= {n for n in self.backward if is_item(n) and n.args[0] in by_input}  # smaller than the tuple
        first = [n for n in self.backward if n in by_input]
        needed = set(ancestors(weights, nodes.__contains__)) - by_input
        rest = [n for n in self.backward if n in needed]
        whole = [n for n in self.backward if n in by_input or n in needed]
        inputs_of_rest = (n for node in rest for n in node.all_input_nodes)
        read = dict.fromkeys(n for n in [*inputs_of_rest, *weights] if isinstance(n, fx.Node))
        deferred: list[fx.Node | None] = [n for n in read if n not in needed and n not in self.constant]
        inputs: dict[str, Sequence[fx.Node | None]] = {"v": v, "r": residuals, "c": c}
        large = frozenset(i for i, x in enumerate(weights) if x is not None and hint(x.meta["val"].nbytes) >= LARGE)
        return Backward(
            tuple(None if n is None else layout(n.meta["val"]) for n in c),
            prepare,
            Block("backward", inputs, overlapped(whole), [weights, gradients], "r", large),
            Block("backward_input", inputs, overlapped(first), [gradients, deferred], "r"),
            Block("backward_weight", {"v": v, "d": deferred}, overlapped(rest), [weights], "d", large),
            frozenset(i for i, alone in enumerate(self._unshared(weights, [*residuals, *c, *gradients])) if alone),
            frozenset(i for i, x in enumerate(v) if x in read),
        )

    def _unshared(self, values: Sequence[Any], others: Iterable[Any]) -> tuple[bool, ...]:
        """Return, for each value, whether it fills a memory that no other value has."""
        roots = Counter(root(x) for x in values if isinstance(x, fx.Node))
        shared = {root(x) for x in (*self.constant, *self.joint.inputs, *others) if isinstance(x, fx.Node)}
        return tuple(
            isinstance(x, fx.Node) and roots[root(x)] == 1 and root(x) not in shared and _fills(x) for x in values
        )


def _is_pinned(node: fx.Node) -> bool:
    """Return whether a node runs even if nothing reads its value: a peer takes part in a collective."""
    if is_collective(node.target):
        return "merged" not in node.meta
    return is_random(node) or is_impure(node)


def _can_recompute(node: fx.Node) -> bool:
    origin = _origin(node)
    is_single = is_random(origin) or is_impure(origin) or is_collective(origin.target)
    return node.op != "placeholder" and not is_single


def _fills(node: fx.Node) -> bool:
    x = node.meta["val"]
    return isinstance(x, Tensor) and hint(x.numel()) * x.itemsize == nbytes(x)


def layout(x: Tensor) -> Cotangent:
    return tuple(x.shape), x.stride(), x.dtype


def _origin(node: fx.Node) -> fx.Node:
    """Return the operation that computes a value: for an item of a tuple, the operation that returns the tuple."""
    source = node.args[0] if node.args else None
    return _origin(source) if is_item(node) and isinstance(source, fx.Node) else node


def is_item(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _value(node: fx.Node) -> Value:
    origin, value, names = _origin(node), node.meta.get("val"), frozenset(node.meta.get("names", ()))
    if not isinstance(value, Tensor):
        return Value(origin.target, names, (), None)
    return Value(origin.target, names, tuple(value.shape), value.dtype)
