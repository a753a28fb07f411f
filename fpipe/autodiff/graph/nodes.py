"""Questions about nodes: what they write to, whether they draw random numbers, and which nodes they depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

from fpipe.devices.operators import draws, written_arguments


def written(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a node writes to."""
    if node.op != "call_function":
        return []
    return [x for x in written_arguments(node.target, node.args, node.kwargs) if isinstance(x, fx.Node)]


def returns_itself(node: fx.Node) -> bool:
    """Return whether a node that writes returns what it wrote to, rather than other results."""
    returns = node.target._schema.returns  # type: ignore[union-attr]
    return len(returns) == 1 and returns[0].alias_info is not None and returns[0].alias_info.is_write


def is_impure(node: fx.Node) -> bool:
    """Return whether a node does more than compute a value or write to one."""
    return node.op == "call_function" and not written(node) and node.is_impure(impure_random=False)


def is_random(node: fx.Node) -> bool:
    """Return whether a node draws random numbers."""
    return node.op == "call_function" and draws(node.target, node.args, node.kwargs)


def nodes_in(tree: Any) -> list[fx.Node]:
    """Return the nodes in nested arguments."""
    nodes: list[fx.Node] = []
    fx.map_arg(tree, nodes.append)
    return nodes


def ancestors(
    ends: Iterable[Any],
    inside: Callable[[fx.Node], bool],
    inputs: Callable[[fx.Node], Iterable[fx.Node]] = lambda node: node.all_input_nodes,
) -> dict[fx.Node, None]:
    """Return the ends and all nodes that they depend on, as far as these are inside."""
    visited: dict[fx.Node, None] = {}
    todo = [x for x in ends if isinstance(x, fx.Node)]
    while todo:
        node = todo.pop()
        if node not in visited and inside(node):
            visited[node] = None
            todo.extend(inputs(node))
    return visited
