"""A joint graph cut into pieces: by phase, then by need.

`prepare` has what depends on parameters alone, `forward` what the outputs and the residuals need, `backward`
what the gradients need. Of the backward, `backward_input` has what the input gradients need and
`backward_weight` the rest, so that what both need is computed once. What is kept between them is memory that
the later piece reads; of what the policy does not keep, a copy stands in the backward, where it is first used.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from fpipe.autodiff.graph.aliasing import hint, memory, root, size
from fpipe.autodiff.graph.block import Block
from fpipe.autodiff.graph.cse import expression, random
from fpipe.autodiff.graph.functionalize import impure
from fpipe.autodiff.graph.rematerialise import worth_keeping
from fpipe.autodiff.graph.trace import Cotangent, Joint
from fpipe.errors import StageError
from fpipe.policies import Policy, Value

KEEP = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
LARGE = 1 << 15
"""Bytes of a weight gradient from which on it is added up by itself, rather than with others by one kernel."""
aten = torch.ops.aten


class NotKept(Exception):
    """A backward needs a value that an earlier forward did not keep."""


@dataclass(frozen=True)
class BackwardBlocks:
    """The backward pieces of one layout of cotangents.

    Args:
        expected: the cotangents it is made for, by output leaf.
        prepare: params -> `v`, what depends on them alone.
        fused: v, residuals, cotangents -> weight gradients, input gradients.
        input: v, residuals, cotangents -> input gradients, deferred.
        weight: v, deferred -> weight gradients.
        fresh: the weight gradients whose memory nothing else has.
    """

    expected: tuple[Cotangent, ...]
    prepare: Block
    fused: Block
    input: Block
    weight: Block
    fresh: frozenset[int]


@dataclass(frozen=True)
class Cut:
    """A stage's pieces for one signature.

    Args:
        prepare: params -> `v`, what depends on them alone.
        forward: v, inputs -> outputs, state, residuals.
        backward: None where nothing is differentiated.
        kept: the residuals, by their places in the trace.
        digest: the forward's operations, which are the same whenever a pure function is traced.
        fresh: which outputs, then which leaves of the state, are tensors that nothing else is.
    """

    prepare: Block
    forward: Block
    backward: BackwardBlocks | None
    kept: tuple[int, ...]
    digest: tuple[str, ...]
    fresh: tuple[bool, ...]


def cut(joint: Joint, policy: Policy, kept: Sequence[int] | None = None) -> Cut:
    """Cut a graph that is functional and simplified, which is used up.

    Args:
        kept: what a forward that ran already has kept, if this is for another layout of its cotangents.

    Raises:
        NotKept: that is not enough.
    """
    return _Cutter(joint, policy, None if kept is None else set(kept)).cut(kept)


@dataclass
class _Cutter:
    joint: Joint
    policy: Policy
    available: set[int] | None
    saved: dict[fx.Node, None] = field(default_factory=dict)
    stands_for: dict[fx.Node, fx.Node] = field(default_factory=dict)
    halves: dict[fx.Node, tuple[fx.Node, fx.Node]] = field(default_factory=dict)
    backward: list[fx.Node] = field(default_factory=list)
    seen: dict[Hashable, fx.Node] = field(default_factory=dict)
    order: dict[fx.Node, int] = field(default_factory=dict)

    def cut(self, kept: Sequence[int] | None) -> Cut:
        joint = self.joint
        order = self.order = {node: i for i, node in enumerate(joint.graph.nodes)}
        differentiated = bool(self.cotangents)
        self._write_backward()
        weights, gradients = self._resolved(joint.weights), self._resolved(joint.gradients)
        if kept is not None:
            by_place = {node.meta["at"]: node for node in self.saved}
            residuals: list[fx.Node | None] = [by_place.get(at) for at in kept]
        else:
            residuals = list(self.saved)
        ends = [*joint.outputs, *joint.state, *self.saved]
        pinned = [n for n in order if n.meta.get("forward") and (random(n) or impure(n))]
        body = [n for n in ancestors([*ends, *pinned], self._runs_forward) if n.op == "call_function"]
        body.sort(key=order.__getitem__)
        v, prepare = self._prepared(order, [*body, *self.backward], [*ends, *weights, *gradients])
        outputs = [joint.outputs, joint.state, residuals]
        forward = Block("forward", {"v": v, "x": joint.inputs}, body, outputs)
        backward = self._backward(v, prepare, residuals, weights, gradients) if differentiated else None
        return Cut(
            prepare,
            forward,
            backward,
            tuple(n.meta["at"] for n in residuals if n is not None) if kept is None else tuple(kept),
            tuple(str(n.target) for n in order if n.meta.get("forward") and n.op == "call_function"),
            self._fresh(),
        )

    # Phases

    @cached_property
    def constant(self) -> set[fx.Node]:
        """What depends on nothing but parameters."""
        found = {node for node in self.joint.params if node is not None}
        for node in self.joint.graph.nodes:
            alone = node.op == "call_function" and not random(node) and not impure(node)
            if node.op == "get_attr" or (
                alone and node not in self.cotangents and found.issuperset(node.all_input_nodes)
            ):
                found.add(node)
        return found

    @cached_property
    def cotangents(self) -> set[fx.Node]:
        return {node for node in self.joint.cotangents if node is not None}

    def _runs_forward(self, node: fx.Node) -> bool:
        return node not in self.constant and node.op == "call_function"

    def _runs_backward(self, node: fx.Node) -> bool:
        given = node in self.constant or node in self.cotangents
        return not (given or node.meta["forward"] or node.op == "placeholder")

    # The backward, with what is redone in it

    def _write_backward(self) -> None:
        """Put together the backward's nodes, in order."""
        ends = [x for x in (*self.joint.weights, *self.joint.gradients) if x is not None]
        needed = set(ancestors(ends, self._runs_backward))
        for node in list(self.joint.graph.nodes):
            if node in needed:
                with self.joint.graph.inserting_before(node):
                    self._add(node)

    def _add(self, node: fx.Node) -> None:
        if node.target == aten.convolution_backward.default and _is_both(node.args[10]):
            self.halves[node] = self._in_halves(node)
            return
        node.args = fx.map_arg(node.args, lambda n: self._resolve(n, node))
        node.kwargs = fx.map_arg(node.kwargs, lambda n: self._resolve(n, node))
        self._keep_view(node)
        self._append(node)

    def _append(self, node: fx.Node) -> fx.Node:
        """Put a node at the backward's end, unless one there has the same value."""
        key = expression(node)
        twin = self.seen.setdefault(key, node)
        self.stands_for[node] = twin
        if twin is node:
            self.backward.append(node)
        return twin

    def _in_halves(self, node: fx.Node) -> tuple[fx.Node, fx.Node]:
        """A convolution's backward as two operations, as its kernels are: for its input, and for its weights."""
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
        """What stands for a node in the backward."""
        if node in self.halves:
            assert user is not None
            return self.halves[node][user.args[1] != 0]
        if node in self.constant or node in self.cotangents:
            return node
        if node not in self.stands_for:
            for n in self._unsettled(node):
                self.stands_for[n] = self._redone(n) if self._is_redone(n) else self._save(n)
        return self.stands_for[node]

    def _unsettled(self, node: fx.Node) -> list[fx.Node]:
        """The node with all that must be redone for it, in the order of the forward."""

        def open_(n: fx.Node) -> bool:
            return not (n in self.constant or n in self.cotangents or n in self.stands_for)

        found, todo = set[fx.Node](), [node]
        while todo:
            n = todo.pop()
            if n not in found and open_(n):
                found.add(n)
                todo += n.all_input_nodes if self._is_redone(n) else ()
        return sorted(found, key=self.order.__getitem__)

    def _save(self, node: fx.Node) -> fx.Node:
        self.saved[node] = None
        return node

    def _is_redone(self, node: fx.Node) -> bool:
        if self.available is not None and node.meta["at"] in self.available:
            return False
        if node.op == "placeholder" or random(_origin(node)) or impure(_origin(node)):
            if self.available is not None:
                raise NotKept(str(node))
            return False
        if self.available is not None:
            return True
        may_keep = self._may_keep(node)
        return root(node) not in self.worth_keeping if may_keep is None else not may_keep

    def _may_keep(self, node: fx.Node) -> bool | None:
        """What the policy says, of a view as of what it is a view of."""
        node = root(node)
        if node.op == "placeholder":
            return True
        marked = _origin(node).meta.get("recompute")
        return self._ask(_value(node)) if marked is None else marked in KEEP

    def _ask(self, value: Value) -> bool | None:
        says = self.policy(value)
        if says is not None and not isinstance(says, bool):
            raise StageError(
                f"its policy {getattr(self.policy, '__name__', self.policy)} said {says!r} of {value.op}: a policy "
                "says True, False or None; is it to be called first, as save_only('name') is?"
            )
        return says

    @cached_property
    def worth_keeping(self) -> set[fx.Node]:
        """What is kept, where the policy leaves it open."""
        ends = [x for x in (*self.joint.weights, *self.joint.gradients) if x is not None]
        after = ancestors(ends, self._runs_backward)
        forward = [n for n in self.joint.graph.nodes if n.op == "placeholder" or n.meta.get("forward")]
        needed = {n for node in after for n in node.all_input_nodes}

        def redoable(node: fx.Node) -> bool:
            given = node.op == "placeholder" or random(_origin(node)) or impure(_origin(node))
            return not given and not self._may_keep(node)

        return worth_keeping(forward, needed, self.constant.__contains__, redoable)

    def _redone(self, node: fx.Node) -> fx.Node:
        copy = self.joint.graph.node_copy(node, lambda n: self._resolve(n, node))
        copy.meta = {**node.meta, "forward": False}
        self._keep_view(copy)
        return self._append(copy)

    def _keep_view(self, node: fx.Node) -> None:
        of = node.meta.get("view_of")
        node.meta["view_of"] = of and self.stands_for.get(of, of)

    # The pieces

    def _prepared(
        self, order: dict[fx.Node, int], body: Sequence[fx.Node], ends: Iterable[Any]
    ) -> tuple[list[fx.Node], Block]:
        """`v`, and the block that computes it."""
        used = {n for node in body for n in node.all_input_nodes} | {x for x in ends if isinstance(x, fx.Node)}
        v = sorted(used & self.constant, key=order.__getitem__)
        inner = [n for n in ancestors(v, lambda n: n in self.constant) if n.op != "placeholder"]
        inner.sort(key=order.__getitem__)
        return v, Block("prepare", {"p": self.joint.params}, inner, [v])

    def _backward(
        self,
        v: list[fx.Node],
        prepare: Block,
        residuals: list[fx.Node | None],
        weights: list[Any],
        gradients: list[Any],
    ) -> BackwardBlocks:
        c = self.joint.cotangents
        mine = set(self.backward)
        by_input = set(ancestors(gradients, mine.__contains__))
        by_input |= {n for n in self.backward if is_item(n) and n.args[0] in by_input}  # rather than all results of one
        first = [n for n in self.backward if n in by_input]
        needed = set(ancestors(weights, mine.__contains__)) - by_input
        rest = [n for n in self.backward if n in needed]
        whole = [n for n in self.backward if n in by_input or n in needed]
        used = dict.fromkeys(
            n
            for n in [*(n for node in rest for n in node.all_input_nodes), *weights]
            if isinstance(n, fx.Node) and n not in needed and n not in self.constant
        )
        deferred = list(used)
        given: dict[str, Sequence[fx.Node | None]] = {"v": v, "r": residuals, "c": c}
        large = frozenset(i for i, x in enumerate(weights) if x is not None and hint(x.meta["val"].nbytes) >= LARGE)
        return BackwardBlocks(
            tuple(None if n is None else layout(n.meta["val"]) for n in c),
            prepare,
            Block("backward", given, whole, [weights, gradients], "r", large),
            Block("backward_input", given, first, [gradients, deferred], "r"),
            Block("backward_weight", {"v": v, "d": deferred}, rest, [weights], "d", large),
            self._alone(weights, [*residuals, *c, *gradients]),
        )

    def _alone(self, weights: list[Any], others: Iterable[Any]) -> frozenset[int]:
        """The weight gradients that are all of a memory which nothing else has."""
        theirs = memory([*self.constant, *self.joint.inputs, *others])
        roots = Counter(root(x) for x in weights if x is not None)
        return frozenset(
            i
            for i, x in enumerate(weights)
            if x is not None
            and roots[root(x)] == 1
            and root(x) not in theirs
            and hint(x.meta["val"].numel()) * x.meta["val"].itemsize == size(x.meta["val"])
        )

    def _fresh(self) -> tuple[bool, ...]:
        ends = [*self.joint.outputs, *self.joint.state]
        theirs = {*map(root, self.saved), *self.constant}
        roots = Counter(root(x) for x in ends if isinstance(x, fx.Node))
        return tuple(
            isinstance(x, fx.Node) and x.op == "call_function" and roots[root(x)] == 1 and root(x) not in theirs
            for x in ends
        )


def ancestors(ends: Iterable[Any], inside: Callable[[fx.Node], bool]) -> dict[fx.Node, None]:
    """The nodes that the ends are computed from, themselves among them, as far as they lie inside."""
    found: dict[fx.Node, None] = {}
    todo = [x for x in ends if isinstance(x, fx.Node)]
    while todo:
        node = todo.pop()
        if node not in found and inside(node):
            found[node] = None
            todo.extend(node.all_input_nodes)
    return found


def layout(x: Tensor) -> Cotangent:
    return tuple(x.shape), x.stride(), x.dtype


def _origin(node: fx.Node) -> fx.Node:
    """The operation that makes a value: of one of several results, the one that gives them all."""
    given = node.args[0] if node.args else None
    return _origin(given) if is_item(node) and isinstance(given, fx.Node) else node


def is_item(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _value(node: fx.Node) -> Value:
    made, value, names = _origin(node), node.meta.get("val"), frozenset(node.meta.get("names", ()))
    if not isinstance(value, Tensor):
        return Value(made.target, names, (), None)
    return Value(made.target, names, tuple(value.shape), value.dtype)


def _is_both(mask: Any) -> bool:
    """Whether an output mask asks for the input's gradient and for another."""
    return bool(mask[0] and any(mask[1:]))
