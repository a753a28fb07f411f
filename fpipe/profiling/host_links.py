"""Measure the copies of residuals to the host's memory and back."""

from __future__ import annotations

import time
from math import inf
from typing import Any

import torch
from torch import Tensor

from fpipe.costs import OVER_HOST_LINK, Link
from fpipe.devices import Device, Lane, device_of
from fpipe.profiling.replicas import Seconds
from fpipe.stages.pytree import flatten

SMALL, LARGE = 64, 2**22  # bytes of the copies that are measured; that of the small one takes the latency alone


def copies(params: Any, repeats: int) -> Seconds:
    """Return the times of copies to the host and back, for the device that has the params.

    The number of bytes stands where pieces have their stage.

    Args:
        repeats: copies that are measured, after an unmeasured one.
    """
    tensors = [leaf for leaf in flatten(dict(params)).leaves if isinstance(leaf, Tensor)]
    device = device_of(tensors[0].device if tensors else "cpu")
    lane, seconds = device.new_lane(), Seconds()
    for count in (SMALL, LARGE):
        here = torch.zeros(count, dtype=torch.uint8, device=device.torch_device)
        host = device.host_bytes(count)
        for cost, source, target in zip(OVER_HOST_LINK, (here, host), (host, here), strict=True):
            seconds[cost, count, 0] = [_seconds(device, lane, source, target) for _ in range(repeats + 1)][1:]
    return seconds


def links(seconds: Seconds) -> dict[str, Any]:
    """Return `Costs.offload` and `Costs.fetch` from the shortest times of copies: the difference of two is small."""
    result = {}
    for cost in OVER_HOST_LINK:
        small, large = (min(seconds[cost, count, 0]) for count in (SMALL, LARGE))
        result[cost] = Link(small, (LARGE - SMALL) / (large - small) if large > small else inf)
    return result


def _seconds(device: Device, lane: Lane, source: Tensor, target: Tensor) -> float:
    device.synchronize()
    start = time.perf_counter()
    lane.copy([(source, target)])()
    device.synchronize()
    return time.perf_counter() - start
