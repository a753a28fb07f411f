"""Tensors whose gradients a step would lose: a stage reads them, and they are neither its params nor its inputs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from fpipe.devices import all_generators
from fpipe.errors import StageError
from fpipe.stages.pytree import describe
from fpipe.stages.rng import restored


def refuse_lost(outputs: Iterable[Any], leaves: Iterable[Any], is_outside: Callable[[Tensor], bool]) -> None:
    """Check that no gradient of the outputs goes to another leaf of autograd's graph than these.

    Args:
        outputs: as the stage returns them, with their graph.
        leaves: params and inputs.
        is_outside: whether a leaf is from outside of the call, in which a stage may make leaves for its own gradients.

    Raises:
        StageError: one does.
    """
    for leaf in _others(outputs, leaves):
        if is_outside(leaf):
            raise StageError(LOST.format(describe(leaf)))


class EagerLeaves:
    """Refuses lost gradients where a stage runs as it is, and no leaf shows whether the call has made it.

    A leaf that two calls have in their graphs is from outside of both.
    """

    def __init__(self) -> None:
        self.ran = False  # the stage, once
        self.before: list[weakref.ref[Tensor]] | None = None

    def check(self, outputs: Iterable[Any], leaves: Iterable[Any], again: Callable[[], Iterable[Any]]) -> None:
        """Check a call as `refuse_lost` does, by the call before.

        Args:
            again: calls the stage once more. Used for the first call alone, if it has leaves that are to be told apart.

        Raises:
            StageError: the gradient of a leaf from outside would be lost.
        """
        known = list(leaves)
        others = _others(outputs, known)
        if self.before is None and others:
            with restored(all_generators()):
                self.before = list(map(weakref.ref, _others(again(), known)))
        outside = {id(ref()) for ref in self.before or ()}
        self.before = list(map(weakref.ref, others)) if others else self.before
        for leaf in others:
            if id(leaf) in outside:
                raise StageError(LOST.format(describe(leaf)))


def _others(outputs: Iterable[Any], leaves: Iterable[Any]) -> list[Tensor]:
    """Return the leaves in the graph of the outputs that are none of these."""
    known, others = {id(x) for x in leaves if isinstance(x, Tensor)}, []
    nodes = [x.grad_fn for x in outputs if isinstance(x, Tensor) and x.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and id(leaf) not in known:
            others.append(leaf)
        new = {parent for parent, _ in node.next_functions if parent is not None} - seen
        seen |= new
        nodes += new
    return others


LOST = (
    "forward, or the loss, reads a {} that requires a gradient, and that is neither in the stage's params nor an "
    "input, as a parameter that no module registers: its gradient would be lost. Pass it in params; make a loss with "
    "parameters a part of the last stage, which gets the target in the batch. Or detach it, or read it under "
    "torch.no_grad()"
)
CONSTANT_LOSS = (
    "the loss requires no gradient for any microbatch: it depends on no parameter that is trained, and on nothing else "
    "that is differentiated. Compute it of the stages' outputs, without detach or torch.no_grad(); where every "
    "parameter is frozen, pipeline.unfreeze trains some, and argnums='batch' differentiates the batch alone; "
    "evaluate(loss=True) gives the loss"
)
