"""What a forward needn't keep, where its policy leaves the choice: what comes from the rest that is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

from fpipe.autodiff.graph.aliasing import root


def worth_keeping(
    forward: Iterable[fx.Node],
    needed: set[fx.Node],
    free: Callable[[fx.Node], bool],
    redoable: Callable[[fx.Node], bool],
) -> set[fx.Node]:
    """The values, among those that the backward needs, from which the others can be computed.

    A value is dropped if what it is computed from is there: kept, free, or computed from such itself. That depends
    on earlier values alone, so one pass in the order of the forward settles each for good, and dropping one
    never makes another necessary.

    Args:
        forward: its nodes, in order.
        needed: those of which the backward reads the memory, views or not.
        free: whether a value is there anyway.
        redoable: whether a value may be computed again.
    """
    wanted, kept = set(map(root, needed)), set[fx.Node]()
    there: set[fx.Node] = set()
    for node in forward:
        comes_from = redoable(node) and all(root(n) in there or free(root(n)) for n in node.all_input_nodes)
        if not comes_from and node in wanted:
            kept.add(node)
        if comes_from or node in wanted:
            there.add(node)
    return kept
