"""Questions about nodes: what they write to, whether they draw random numbers, and which nodes they depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx


def arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names in the operation's schema."""
    return dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes to; a list of tensors counts as its items."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    by_name = arguments(func, args, kwargs)
    values = [by_name.get(a.name) for a in schema.arguments if a.is_write]
    return [x for value in values for x in (value if isinstance(value, list | tuple) else [value]) if x is not None]


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


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call draws random numbers: attention, for one, does only with dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    rate = arguments(func, args, kwargs).get("dropout_p", 0.0)
    return not any(a.name == "dropout_p" for a in func._schema.arguments) or bool(rate)


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
