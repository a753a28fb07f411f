"""The memory of a graph's values. A value has the memory of the node at the root of its views.

A trace identifies views by the storages of its fakes. These no longer hold once nodes are merged or copied, so each
node has `node.meta["view_of"]`: the node that it is a view of, or None. Every pass that changes a graph updates it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from fpipe.autodiff.graph.guards import hint


def storage(x: Tensor) -> int:
    """Return a number that identifies a traced tensor's memory.

    Raises:
        NotImplementedError: the tensor has no storage, as a sparse one.
    """
    return int(x.untyped_storage()._cdata)


def note_views(graph: fx.Graph) -> None:
    """Set `view_of` of each node."""
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta["view_of"] = view_of(node, node.meta.get("val"))


def view_of(node: fx.Node, value: Any) -> fx.Node | None:
    """Return the input of a node whose memory the value shares."""
    memories = {storage(x) for x in _tensors(value)}
    for source in node.all_input_nodes:
        of = source.meta.get("val")
        if isinstance(of, Tensor) and storage(of) in memories:
            return source
        if isinstance(of, list | tuple) and any(storage(x) in memories for x in _tensors(of)):
            return view_of(source, value)  # an item of a tuple: look at the inputs of the tuple's node
    return None


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in (value if isinstance(value, list | tuple) else [value]) if isinstance(x, Tensor)]


def root(node: fx.Node) -> fx.Node:
    """Return the node that owns a node's memory."""
    while (of := node.meta.get("view_of")) is not None:
        node = of
    return node


def nbytes(x: Tensor) -> int:
    """Return the bytes of a tensor's memory, for the traced sizes where they are symbols."""
    return int(hint(x.untyped_storage().nbytes()))
