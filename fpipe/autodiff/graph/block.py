"""A part of a graph that becomes one function, and what that function may hand gradients to early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, fx


@dataclass(frozen=True)
class Block:
    """Part of a graph.

    Args:
        inputs: by the function's arguments, in which order a list has which values.
        body: what runs, in order.
        outputs: lists of values, each a node, or what it is.
        empties: the argument whose list is emptied before anything runs, so that values can be given up.
        large: which of the first outputs, by number, a sink is offered as soon as they are there, so that they needn't
            all live at once; None where the function takes no sink.
    """

    name: str
    inputs: Mapping[str, Sequence[fx.Node | None]]
    body: Sequence[fx.Node]
    outputs: Sequence[Sequence[Any]]
    empties: str | None = None
    large: frozenset[int] | None = None


class Sink(Protocol):
    """Takes weight gradients as soon as they are there."""

    def take(self, i: int, gradient: Tensor) -> bool:
        """Add the i-th gradient now, if that can be done in place; whether it was."""
