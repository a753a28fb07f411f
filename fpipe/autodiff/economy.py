"""What a forward needn't keep, where its policy leaves the choice: what comes from the rest that is kept.

Dropping a value never makes the rest larger, and what is dropped is computed from kept values through operations
that the policy lets be redone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, fx

from fpipe.autodiff.functional import storage


def worth_keeping(
    needed: Iterable[fx.Node], free: Callable[[fx.Node], bool], redoable: Callable[[fx.Node], bool]
) -> set[fx.Node]:
    """The values among those that the backward needs from which the others can be computed.

    Args:
        needed: in the order of the forward.
        free: whether a value is there anyway.
        redoable: whether a value may be computed again.
    """
    bases = list(dict.fromkeys(map(base, needed)))
    choice = _Choice(free, redoable, set(bases))
    for node in reversed(bases):
        if redoable(node):
            choice.kept.discard(node)
            choice.known.clear()
            if not choice.comes_from_kept(node):
                choice.kept.add(node)
    return choice.kept


@dataclass
class _Choice:
    free: Callable[[fx.Node], bool]
    redoable: Callable[[fx.Node], bool]
    kept: set[fx.Node]

    def __post_init__(self) -> None:
        self.known: dict[fx.Node, bool] = {}

    def comes_from_kept(self, node: fx.Node) -> bool:
        """Whether it can be computed from what is kept; nodes are asked after at most once for each choice."""
        return all(map(self._there, node.all_input_nodes))

    def _there(self, node: fx.Node) -> bool:
        node = base(node)
        if node not in self.known:
            self.known[node] = False
            self.known[node] = (
                self.free(node) or node in self.kept or (self.redoable(node) and self.comes_from_kept(node))
            )
        return self.known[node]


def base(node: fx.Node) -> fx.Node:
    """The value that a view is of."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor):
        return node
    for given in node.all_input_nodes:
        of = given.meta.get("val")
        if isinstance(of, Tensor) and storage(of) == storage(value):
            return base(given)
    return node
