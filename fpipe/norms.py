"""Norms of gradients over the whole pipeline.

Leaves are reduced to squares in float64, stage by stage in the order of the stage's own tree, and the stages' sums are
added in their order on every rank: the bits depend on no schedule, placement or handler. A tied entry counts with the
stage that it lives in, and a stage with copies where its first copy is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from fpipe.errors import TransportError
from fpipe.handlers.protocol import Handler
from fpipe.program import Plan
from fpipe.tree import flatten

EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def global_norm(grads: Mapping[int, Any], plan: Plan, *, handler: Handler) -> Tensor:
    """The 2-norm of the gradients of the whole pipeline, on every rank. Every rank calls it.

    Args:
        grads: `{stage: tree}` as a step gives it; None, where a parameter is frozen, counts nothing.
        plan, handler: the step's own.

    Returns:
        A float64 tensor without dimensions, where this rank's gradients are. A NaN or an infinity in any gradient
        makes it NaN or infinite.

    Raises:
        TransportError: a rank has not come to it within the handler's timeout, or is gone.

    With `Distributed` the ranks' sums meet on the CPU, which on CUDA waits for the gradients.

    >>> from fpipe import Placement, handlers
    >>> grads = {0: {"w": torch.tensor([3.0, 0.0])}, 1: {"w": torch.tensor([4.0]), "frozen": None}}
    >>> global_norm(grads, Plan(Placement.loop(ranks=2), microbatches=1), handler=handlers.Local())
    tensor(5., dtype=torch.float64)
    """
    ranks = handler.ranks(plan)
    found = squares(grads, plan, ranks)
    if len(ranks) < plan.ranks:
        found = _over_ranks(found.cpu(), handler).to(found.device)
    return found.sum().sqrt()


def clip_by_global_norm(
    grads: Mapping[int, Any], max_norm: float, plan: Plan, *, handler: Handler
) -> tuple[dict[int, Any], Tensor]:
    """The gradients scaled down to a norm of at most `max_norm`, and the norm that they had. Every rank calls it.

    They are multiplied by `min(1, max_norm / (norm + 1e-6))`, as `torch.nn.utils.clip_grad_norm_` does; the given ones
    stay as they are. Where the norm is not finite, what is returned isn't either: look at `norm.isfinite()`, which is
    the same on every rank, before updating.

    Raises:
        ValueError: max_norm is negative, or no number.
        TransportError: as by `global_norm`.

    >>> from fpipe import Placement, handlers
    >>> plan = Plan(Placement.loop(ranks=2), microbatches=1)
    >>> clip_by_global_norm({0: torch.tensor([3.0]), 1: torch.tensor([4.0])}, 1.0, plan, handler=handlers.Local())
    ({0: tensor([0.6000]), 1: tensor([0.8000])}, tensor(5., dtype=torch.float64))
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm is a number of at least 0, not {max_norm}")
    norm = global_norm(grads, plan, handler=handler)
    scale = (max_norm / (norm + EPSILON)).clamp(max=1.0)
    leaves, spec = flatten(dict(grads))
    devices = defaultdict[Any, list[int]](list)
    for i, leaf in enumerate(leaves):
        devices[leaf.device].append(i)
    for device, here in devices.items():
        scaled = torch._foreach_mul([leaves[i] for i in here], scale.to(device))
        for i, leaf in zip(here, scaled, strict=True):
            leaves[i] = leaf
    clipped: dict[int, Any] = spec.unflatten(leaves)  # type: ignore[assignment]
    return clipped, norm


def squares(grads: Mapping[int, Any], plan: Plan, ranks: Collection[int]) -> Tensor:
    """The sum of squares of each stage's gradients, in float64; zero where its first copy is on other ranks."""
    holders = plan.placement.holders
    found = {s: _squares(tree) for s, tree in sorted(grads.items()) if holders[s][0] in ranks}
    some = next((x for x in found.values() if x is not None), torch.zeros(()))
    zero = torch.zeros((), dtype=torch.float64, device=some.device)
    sums = [found.get(stage) for stage in range(plan.stages)]
    return torch.stack([zero if x is None else x.to(zero.device) for x in sums])


def _squares(tree: Any) -> Tensor | None:
    leaves = [_real(leaf.detach()) for leaf in flatten(tree).leaves if isinstance(leaf, Tensor)]
    return torch.stack(torch._foreach_norm(leaves, 2, torch.float64)).square().sum() if leaves else None


def _real(leaf: Tensor) -> Tensor:
    """The numbers of a leaf, where it is sparse or complex."""
    dense = leaf.coalesce().values() if leaf.is_sparse else leaf
    return torch.view_as_real(dense) if dense.is_complex() else dense


def _over_ranks(sums: Tensor, handler: Any) -> Tensor:
    """Each stage's sum, which one rank has, on all."""
    try:
        group = handler.apart("norms", handler.timeout)
        group.allreduce([sums]).wait()
    except RuntimeError as error:
        if isinstance(error, TransportError):
            raise
        raise TransportError(
            f"rank {handler.rank} could not add the norms of {handler.size} ranks ({error}): every rank calls "
            "global_norm or clip_by_global_norm, after the same step"
        ) from error
    return sums
