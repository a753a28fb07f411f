"""Tensors whose gradients a step would lose: a stage reads them, and they are neither its params nor its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from fpipe.errors import StageError
from fpipe.stages.pytree import describe


def refuse_lost(outputs: Iterable[Any], leaves: Iterable[Any], is_outside: Callable[[Tensor], bool]) -> None:
    """Check that no gradient of the outputs goes to another leaf of autograd's graph than these.

    Args:
        outputs: as the stage returns them, with their graph.
        leaves: params and inputs.
        is_outside: whether a leaf is from outside of the call, in which a stage may make leaves for its own gradients.

    Raises:
        StageError: one does.
    """
    known = {id(x) for x in leaves if isinstance(x, Tensor)}
    nodes = [x.grad_fn for x in outputs if isinstance(x, Tensor) and x.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and id(leaf) not in known and is_outside(leaf):
            raise StageError(
                f"forward, or the loss, reads a {describe(leaf)} that requires a gradient, and that is neither in the "
                "stage's params nor an input, as a parameter that no module registers: its gradient would be lost. "
                "Pass it in params; make a loss with parameters a part of the last stage, which gets the target in "
                "the batch. Or detach it, or read it under torch.no_grad()"
            )
        new = {parent for parent, _ in node.next_functions if parent is not None} - seen
        seen |= new
        nodes += new


CONSTANT_LOSS = (
    "the loss requires no gradient for any microbatch: it depends on no parameter that is trained. Compute it of the "
    "stages' outputs, without detach or torch.no_grad(); evaluate(loss=True) gives the loss alone"
)
