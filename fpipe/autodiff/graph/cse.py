"""Common-subexpression elimination. It changes no bit of the result.

A backward that repeats a forward, as a checkpointed block's does, is not merged with the forward. Only its random
draws become the forward's.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from fpipe.autodiff.graph.aliasing import note_views, storage
from fpipe.autodiff.graph.collectives import is_collective
from fpipe.autodiff.graph.functionalize import geometry
from fpipe.autodiff.graph.nodes import is_impure, is_random
from fpipe.autodiff.graph.signature import Untraceable
from fpipe.autodiff.graph.trace import Joint


def without_duplicates(joint: Joint) -> Joint:
    """Return the graph with each value computed once. A view that equals an earlier tensor becomes that tensor.

    A node that nothing reads any more has `node.meta["merged"]`.

    Raises:
        Untraceable: the backward draws random numbers that the forward did not draw.
    """
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
        twin = _twin(node, seen, draws)
        if twin is not None:
            same[node] = twin
            node.meta["merged"] = True
            twin.meta["names"] = {*twin.meta.get("names", ()), *node.meta.get("names", ())}
    return joint.map_results(lambda node: same.get(node, node))


def _twin(node: fx.Node, seen: dict[Hashable, fx.Node], draws: dict[Any, fx.Node]) -> fx.Node | None:
    """Return an earlier node with the same value. If there is none, remember this one."""
    if "draw" in node.meta:
        first = draws.setdefault((node.meta["draw"], node.target), node)
        if first is node and not node.meta["forward"]:
            raise Untraceable("its backward draws random numbers that its forward did not draw")
        return None if first is node else first
    keys = list(_keys(node))
    twin = next((seen[key] for key in keys if key in seen), None)
    if twin is None:
        seen |= dict.fromkeys(keys, node)
    return twin


def _keys(node: fx.Node) -> Iterator[Hashable]:
    """Yield keys. Two nodes that share one of them have the same value."""
    value = node.meta.get("val")
    if isinstance(value, FakeTensor):
        yield (storage(value), geometry(value))
    mergeable = not is_random(node) and (is_collective(node.target) or not is_impure(node))
    if node.op == "call_function" and mergeable and "cotangent" not in node.meta:
        yield node.meta["forward"], expression(node)
    if node.op == "get_attr":
        yield node.target


def expression(node: fx.Node) -> Hashable:
    """Return a key that is equal for nodes with the same operation and arguments."""
    return node.target, _hashable(node.args), _hashable(node.kwargs)


def _hashable(arg: Any) -> Hashable:
    """Return a key that is equal for equal arguments: 1, 1.0 and True differ."""
    if isinstance(arg, list | tuple):
        return type(arg), tuple(map(_hashable, arg))
    if isinstance(arg, dict):
        return tuple((key, _hashable(value)) for key, value in sorted(arg.items()))
    if isinstance(arg, slice):
        return slice, _hashable((arg.start, arg.stop, arg.step))
    return arg if isinstance(arg, fx.Node) else (type(arg), repr(arg))
