"""Measure an optimizer's update of each stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fpipe.plan import Plan
from fpipe.profiling.replicas import Seconds
from fpipe.stages.pytree import flatten

Optimizer = tuple[Callable[[Any], Any], Callable[..., tuple[Any, Any]]]
"""`init(params) -> state` and `update(grads, state, params) -> (params, state)`."""
WARM = 2  # updates that are not measured: the first one makes the state


def measure(
    params: Mapping[int, Any], plan: Plan, optimizer: Optimizer, now: Callable[[], float], repeats: int
) -> Seconds:
    """Return the times of the update of each trained stage, with gradients of zero; params do not change.

    Args:
        now: returns the time when the devices have done all their work.
    """
    init, update = optimizer
    seconds: Seconds = {}
    for stage in filter(plan.is_trained, range(plan.stages)):
        own = {stage: _copied(params[stage])}
        state, gradients, times = init(own), {stage: _zeros(own[stage])}, list[float]()
        for _ in range(WARM + repeats):
            start = now()
            own, state = update(gradients, state, own)
            times.append(now() - start)
        seconds["update", stage, 0] = times[WARM:]
    return seconds


def _copied(tree: Any) -> Any:
    leaves, spec = flatten(tree)
    return spec.unflatten([x.detach().clone() if isinstance(x, Tensor) else x for x in leaves])


def _zeros(tree: Any) -> Any:
    leaves, spec = flatten(tree)
    return spec.unflatten([torch.zeros_like(x) if x.is_floating_point() else None for x in leaves])
