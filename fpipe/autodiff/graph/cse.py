"""A traced graph with each value once, which changes no bit of what it computes.

A backward that repeats a forward, as a checkpointed block's does, stays as it is: only the draws in it become
the forward's.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from fpipe.autodiff.graph.aliasing import note_views, storage
from fpipe.autodiff.graph.functionalize import geometry, impure
from fpipe.autodiff.graph.signature import Untraceable
from fpipe.autodiff.graph.trace import Joint, draws


def random(node: fx.Node) -> bool:
    """Whether a node draws."""
    return node.op == "call_function" and draws(node.target, node.args, node.kwargs)


def simplified(joint: Joint) -> Joint:
    """The same graph with each value once: in place of views that come back to a tensor, that tensor."""
    same: dict[fx.Node, fx.Node] = {}
    seen: dict[Hashable, fx.Node] = {}
    draws: dict[Any, fx.Node] = {}
    note_views(joint.graph)
    for node in joint.graph.nodes:
        if node.op == "output":
            continue
        node.args = fx.map_arg(node.args, lambda n: same.get(n, n))
        node.kwargs = fx.map_arg(node.kwargs, lambda n: same.get(n, n))
        if (of := node.meta.get("view_of")) is not None:
            node.meta["view_of"] = same.get(of, of)
        twin = _twin(node, seen, draws, joint)
        if twin is not None:
            same[node] = twin
            twin.meta["names"] = {*twin.meta.get("names", ()), *node.meta.get("names", ())}

    def kept(leaves: list[Any]) -> list[Any]:
        return [same.get(x, x) if isinstance(x, fx.Node) else x for x in leaves]

    return replace(
        joint,
        outputs=kept(joint.outputs),
        state=kept(joint.state),
        weights=kept(joint.weights),
        gradients=kept(joint.gradients),
    )


def _twin(node: fx.Node, seen: dict[Hashable, fx.Node], draws: dict[Any, fx.Node], joint: Joint) -> fx.Node | None:
    """An earlier node with the same value; None makes this the one to be found later."""
    if "draw" in node.meta:
        first = draws.setdefault((node.meta["draw"], node.target), node)
        if first is node and not node.meta["forward"]:
            raise Untraceable("its backward draws random numbers that its forward did not draw")
        return None if first is node else first
    if node in joint.cotangents:
        seen.setdefault((storage(node.meta["val"]), geometry(node.meta["val"])), node)
        return None
    for key in _keys(node):
        if key in seen:
            return seen[key]
    for key in _keys(node):
        seen[key] = node
    return None


def _keys(node: fx.Node) -> Iterator[Hashable]:
    """By any of these a node may be known to equal an earlier one."""
    value = node.meta.get("val")
    if isinstance(value, FakeTensor):
        yield (storage(value), geometry(value))
    if node.op == "call_function" and not random(node) and not impure(node):
        yield node.meta["forward"], expression(node)
    if node.op == "get_attr":
        yield node.target


def expression(node: fx.Node) -> Hashable:
    """Equal for nodes that compute the same."""
    return node.target, _hashable(node.args), _hashable(node.kwargs)


def _hashable(arg: Any) -> Hashable:
    """Equal for equal arguments: 1, 1.0 and True are not."""
    if isinstance(arg, list | tuple):
        return type(arg), tuple(map(_hashable, arg))
    if isinstance(arg, dict):
        return tuple((key, _hashable(value)) for key, value in sorted(arg.items()))
    if isinstance(arg, slice):
        return slice, _hashable((arg.start, arg.stop, arg.step))
    return arg if isinstance(arg, fx.Node) else (type(arg), repr(arg))
