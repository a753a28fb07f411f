"""Leave a step's update out where it is to be skipped, selected on the device, in a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fpipe.devices import CaptureError, aside, is_capturing, try_again
from fpipe.devices.tape import storage
from fpipe.stages.pytree import flatten


def on_device(finite: Tensor, old: Any, update: Callable[[], Any], gradients: Any, in_place: bool = True) -> Any:
    """Return the updated tree with the old values where `finite` is false, also in memory that the update reuses.

    Args:
        old: (params, ...).
        gradients: of the params; a parameter without one is not updated.
        in_place: the update may reuse the memory of the old tree, which is then copied before.

    Raises:
        CaptureError: in a graph, the update gives the tree another structure, as the first one of most optimizers.
    """
    leaves, spec = flatten(old)
    unchanged = frozen(old[0], gradients)
    changing = [isinstance(x, Tensor) and id(x) not in unchanged for x in leaves]
    saved = [x.clone() if changes and in_place else x for x, changes in zip(leaves, changing, strict=True)]
    new, new_spec = flatten(update())
    if new_spec != spec:
        return new_spec.unflatten(new) if _read(finite) else spec.unflatten(saved)
    every = zip(leaves, saved, new, changing, strict=True)
    return spec.unflatten([_chosen(finite, *each) if changes else each[-1] for *each, changes in every])


def frozen(params: Any, gradients: Any) -> set[int]:
    """Return the ids of the parameters without a gradient."""
    leaves, spec = flatten(params)
    return {id(x) for x, gradient in zip(leaves, spec.flatten_up_to(gradients), strict=True) if gradient is None}


def _read(finite: Tensor) -> bool:
    if is_capturing():
        raise CaptureError(
            "the optimizer's state has another structure after the update, and a graph can't skip that: pass the state "
            "that an update has returned"
        )
    try_again()  # where it is skipped, the next step has the same arguments, and a graph can't hold both structures
    with aside():
        return bool(finite.item())


def _chosen(finite: Tensor, old: Tensor, saved: Tensor, new: Tensor) -> Tensor:
    chosen = torch.where(finite, new, saved)
    if storage(new) != storage(old):
        return chosen
    with torch.no_grad():  # also where it is the same tensor: fused kernels write to it without counting
        return new.copy_(chosen)
