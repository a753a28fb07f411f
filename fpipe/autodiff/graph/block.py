"""A part of a graph that becomes one function, and the sink that may take its gradients early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor, fx

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Block:
    """A part of a graph.

    Args:
        inputs: by argument of the function, the values in its list.
        body: the nodes to run, in order.
        outputs: lists of results, each a node or a plain value.
        empties: the argument whose list the function clears before it computes, so that values can be released.
        large: numbers of results in `outputs[0]` that the function offers to a sink as soon as they are computed, so
            that not all of them are alive at once. None: the function takes no sink.
        donated: how many of the first inputs `x` are given up, so that the function may write to their memory.
    """

    name: str
    inputs: Mapping[str, Sequence[fx.Node | None]]
    body: Sequence[fx.Node]
    outputs: Sequence[Sequence[Any]]
    empties: str | None = None
    large: frozenset[int] | None = None
    donated: int = 0

    @cached_property
    def results(self) -> set[fx.Node]:
        """The nodes among the outputs."""
        return {x for values in self.outputs for x in values if isinstance(x, fx.Node)}

    @property
    def given_up(self) -> set[fx.Node]:
        """The inputs to whose memory the function may write."""
        return {node for node in self.inputs.get("x", ())[: self.donated] if node is not None}


class Parts(NamedTuple):
    """The weight gradients of which each process that computes the stage has a part of the sum.

    Args:
        leaves: their numbers.
        mesh: of the processes; None without any.
    """

    leaves: frozenset[int]
    mesh: DeviceMesh | None


NO_PARTS = Parts(frozenset(), None)


class Sink(Protocol):
    """Takes weight gradients as soon as they are computed."""

    def expect(self, parts: Parts) -> None:
        """Take the next microbatch's gradients as such: parts of sums, and whole ones."""

    def take(self, i: int, gradient: Tensor) -> bool:
        """Add the i-th gradient in place if possible. Return whether it was added."""
