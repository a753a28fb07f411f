"""Which memory the values of a graph have: that of the node at the root of their views.

A trace tells views by the storages of its fakes. Once nodes are merged or copied these no longer hold, so each
node knows what it is a view of: `node.meta["view_of"]`, which whoever changes a graph keeps true.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx


def storage(x: Tensor) -> int:
    """Which memory a traced tensor has."""
    return int(x.untyped_storage()._cdata)


def note_views(graph: fx.Graph) -> None:
    """Tell each node what it is a view of."""
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta["view_of"] = view_of(node, node.meta.get("val"), {})


def view_of(node: fx.Node, value: Any, traced: dict[fx.Node, Any]) -> fx.Node | None:
    """Which of the nodes that a value is computed from has its memory; `traced` has values other than their own."""
    memories = {storage(x) for x in _tensors(value)}
    for given in node.all_input_nodes:
        of = traced.get(given, given.meta.get("val"))
        if isinstance(of, Tensor) and storage(of) in memories:
            return given
        if isinstance(of, list | tuple) and any(storage(x) in memories for x in _tensors(of)):
            return view_of(given, value, traced)  # one of several results: of what they are computed from
    return None


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in (value if isinstance(value, list | tuple) else [value]) if isinstance(x, Tensor)]


def root(node: fx.Node) -> fx.Node:
    """The node whose memory a node's value is."""
    while (of := node.meta.get("view_of")) is not None:
        node = of
    return node


def memory(nodes: Iterable[Any]) -> dict[fx.Node, int]:
    """The bytes of each memory that the nodes' values have."""
    found = {}
    for node in nodes:
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if isinstance(value, Tensor):
            found[root(node)] = size(value)
    return found


def size(x: Tensor) -> int:
    """Bytes of a tensor's memory; of symbols, those that were traced."""
    return hint(x.untyped_storage().nbytes())


def hint(n: Any) -> int:
    return int(n.node.hint) if isinstance(n, torch.SymInt) else int(n)
