"""Choose what to save where the policy leaves it open: drop every value that can be recomputed from the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

from fpipe.autodiff.graph.aliasing import root


def worth_keeping(
    forward: Iterable[fx.Node],
    needed: set[fx.Node],
    free: Callable[[fx.Node], bool],
    recomputable: Callable[[fx.Node], bool],
) -> set[fx.Node]:
    """Return the values to keep, out of which all others that the backward needs can be recomputed.

    A value is dropped if all its inputs are available: kept, free, or recomputable from such values. This depends on
    earlier values alone. One pass in the order of the forward therefore decides each value for good, and dropping one
    value never makes another necessary.

    Args:
        forward: the forward's nodes, in order.
        needed: nodes whose memory the backward reads, views or not.
        free: whether a value is available in any case.
        recomputable: whether a value may be recomputed.
    """
    wanted, kept, available = set(map(root, needed)), set[fx.Node](), set[fx.Node]()
    for node in forward:
        dropped = recomputable(node) and all(root(n) in available or free(root(n)) for n in node.all_input_nodes)
        if not dropped and node in wanted:
            kept.add(node)
        if dropped or node in wanted:
            available.add(node)
    return kept
