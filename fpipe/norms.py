"""Norms of gradients over the whole pipeline.

Leaves are reduced to squares in float64, stage by stage in the order of the stage's own tree, and the stages' sums are
added in their order on every rank: the bits depend on no schedule, placement or handler. A tied entry counts with the
stage that it lives in, and a stage with copies where its first copy is.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from numbers import Real
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from fpipe.errors import TransportError
from fpipe.handlers.distributed.connections import first_line
from fpipe.handlers.distributed.failures import PATIENCE, within
from fpipe.handlers.protocol import Handler
from fpipe.plan import Plan
from fpipe.stages.pytree import flatten

T = TypeVar("T")

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
        TypeError, ValueError: grads is not what a step gives.
        TransportError: another rank's arguments are wrong; says whose, and why. Or a rank has not come to it within the
            handler's timeout, or is gone: then this handler's ranks have no norms any more.

    With `Distributed` the ranks' sums meet on the CPU, which on CUDA waits for the gradients.

    >>> from fpipe import Placement, handlers
    >>> grads = {0: {"w": torch.tensor([3.0, 0.0])}, 1: {"w": torch.tensor([4.0]), "frozen": None}}
    >>> global_norm(grads, Plan(Placement.loop(ranks=2), microbatches=1), handler=handlers.Local())
    tensor(5., dtype=torch.float64)
    """
    return _norm(lambda: squares(grads, plan, handler.ranks(plan)), handler)


def clip_by_global_norm(
    grads: Mapping[int, Any], max_norm: float | Tensor, plan: Plan, *, handler: Handler
) -> tuple[dict[int, Any], Tensor]:
    """The gradients scaled down to a norm of at most `max_norm`, and the norm that they had. Every rank calls it.

    They are multiplied by `min(1, max_norm / (norm + 1e-6))`, as `torch.nn.utils.clip_grad_norm_` does; the given ones
    stay as they are. Where the norm is not finite, what is returned isn't either: look at `norm.isfinite()`, which is
    the same on every rank, before updating.

    Raises:
        ValueError: max_norm is negative, or no number.
        TypeError, ValueError, TransportError: as by `global_norm`.

    >>> from fpipe import Placement, handlers
    >>> plan = Plan(Placement.loop(ranks=2), microbatches=1)
    >>> clip_by_global_norm({0: torch.tensor([3.0]), 1: torch.tensor([4.0])}, 1.0, plan, handler=handlers.Local())
    ({0: tensor([0.6000]), 1: tensor([0.8000])}, tensor(5., dtype=torch.float64))
    """
    max_norm = max_norm.detach() if isinstance(max_norm, Tensor) else max_norm

    def checked() -> Tensor:
        _check_limit(max_norm)
        return squares(grads, plan, handler.ranks(plan))

    norm = _norm(checked, handler)
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


def _check_limit(max_norm: Any) -> None:
    limit = max_norm.item() if isinstance(max_norm, Tensor) and not max_norm.ndim else max_norm
    if not (isinstance(limit, Real) and float(limit) >= 0):
        raise ValueError(f"max_norm is a number of at least 0, not {max_norm}")


def squares(grads: Mapping[int, Any], plan: Plan, ranks: Collection[int]) -> Tensor:
    """The sum of squares of each stage's gradients, in float64; zero where its first copy is on other ranks."""
    if not isinstance(grads, Mapping):
        raise TypeError(f"grads is {{stage: tree}}, as a step gives it, not a {type(grads).__name__}")
    if unknown := [stage for stage in grads if stage not in range(plan.stages)]:
        raise ValueError(
            f"grads has an entry for {unknown[0]!r}, and the plan has stages 0 to {plan.stages - 1}: grads is "
            "{stage: tree}, as a step gives it"
        )
    holders = plan.placement.holders
    found = {s: _squares(s, tree) for s, tree in sorted(grads.items()) if holders[s][0] in ranks}
    some = next((x for x in found.values() if x is not None), torch.zeros(()))
    zero = torch.zeros((), dtype=torch.float64, device=some.device)
    sums = [found.get(stage) for stage in range(plan.stages)]
    return torch.stack([zero if x is None else x.to(zero.device) for x in sums])


def _squares(stage: int, tree: Any) -> Tensor | None:
    leaves = flatten(tree).leaves
    if wrong := [leaf for leaf in leaves if not isinstance(leaf, Tensor)]:
        raise TypeError(f"a gradient of stage {stage} is a {type(wrong[0]).__name__}, where it is a tensor or None")
    numbers = [_real(leaf.detach()) for leaf in leaves]
    return torch.stack(torch._foreach_norm(numbers, 2, torch.float64)).square().sum() if numbers else None


def _real(leaf: Tensor) -> Tensor:
    """The numbers of a leaf, where it is sparse or complex."""
    dense = leaf.coalesce().values() if leaf.is_sparse else leaf
    return torch.view_as_real(dense) if dense.is_complex() else dense


def _norm(sums: Callable[[], Tensor], handler: Any) -> Tensor:
    """The norm, out of each stage's sum of squares on the ranks that are played here."""
    if getattr(handler, "size", 1) == 1:
        return sums().sum().sqrt()
    peers = _Peers(handler)
    try:
        found = sums()
    except Exception as error:
        peers.agree(0, f"{type(error).__name__}: {error}")
        raise
    peers.agree(len(found))
    return peers.add(found.cpu()).to(found.device).sum().sqrt()


CALLS = WeakKeyDictionary[Any, int]()
"""How often a handler's ranks have come to their norms."""


class _Peers:
    """All ranks of a handler, come to the same call over connections of their own."""

    def __init__(self, handler: Any) -> None:
        self.handler = handler
        CALLS[handler] = CALLS.get(handler, 0) + 1

    def agree(self, stages: int, reason: str = "") -> None:
        """Tell the others how many stages there are here, or the reason why there is no sum.

        Raises:
            TransportError: another rank has a reason, or other stages.
        """
        text = reason.encode()
        told = self._gathered(torch.tensor([stages, len(text)]))
        longest = max(int(length) for _, length in told)
        if not longest:
            if len(counts := {int(count) for count, _ in told}) > 1:
                raise TransportError(f"the ranks have plans of {sorted(counts)} stages: every rank makes the same plan")
            return
        reasons = self._gathered(torch.tensor(list(text.ljust(longest, b"\0")), dtype=torch.uint8))
        for rank, ((_, length), theirs) in enumerate(zip(told, reasons, strict=True)):
            if length and not reason:
                said = bytes(theirs[: int(length)].tolist()).decode()
                raise TransportError(f"rank {rank} has no norm of its gradients: {said}")

    def add(self, sums: Tensor) -> Tensor:
        """Each stage's sum, which one rank has, on all."""
        self._reaching(lambda: self._group().allreduce([sums]).wait())
        return sums

    def _gathered(self, own: Tensor) -> list[Tensor]:
        shares = [torch.empty_like(own) for _ in range(self.handler.size)]
        self._reaching(lambda: self._group().allgather([shares], [own]).wait())
        return shares

    def _group(self) -> Any:
        return self.handler.apart("norms", self.handler.timeout)

    def _lost(self, rank: int, more: int = 0) -> bool:
        """Whether a rank has waited for others in vain at this call."""
        name = f"fpipe/{self.handler.group.group_name}/norms/{CALLS[self.handler]}/{rank}"
        return bool(_get_default_store().add(name, more))

    def _missing(self) -> list[int]:
        """Who isn't among those that wait in vain, which all do for about as long."""
        deadline = time.monotonic() + PATIENCE / 2
        while missing := [rank for rank in range(self.handler.size) if not self._lost(rank)]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return missing

    def _reaching(self, speak: Callable[[], T]) -> T:
        try:
            return speak()
        except RuntimeError as error:
            if isinstance(error, TransportError):
                raise
            handler = self.handler
            late = "imed out" in str(error) or "timeout" in str(error)
            why = f"nothing came within {handler.timeout:g} s" if late else first_line(error)
            within(PATIENCE, lambda: self._lost(handler.rank, 1))
            if missing := within(PATIENCE, self._missing):
                why += f"; missing: {missing}"
            raise TransportError(
                f"rank {handler.rank} could not add the norms of {handler.size} ranks ({why}): every rank calls "
                "global_norm or clip_by_global_norm, after the same step; after this, make a new handler"
            ) from error
