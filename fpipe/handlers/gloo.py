"""Groups of gloo: processes that exchange tensors of the CPU."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store


def gloo_group(store: Store, rank: int, size: int, timeout: float) -> Any:
    """Make a gloo group of some processes.

    Args:
        rank: of this process in the group.
        timeout: seconds that making it, or a wait for it, may take.
    """
    gloo: Any = dist.ProcessGroupGloo  # torch's stub lacks its options
    options = gloo._Options()
    options._devices, options._timeout = gloo_devices(), timedelta(seconds=timeout)
    return gloo(store, rank, size, options)


@functools.cache
def gloo_devices() -> list[Any]:
    """Return the devices of gloo's groups, as torch chooses them. Each has a thread, which wakes every 10 ms."""
    make, interfaces = dist.ProcessGroupGloo, os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not interfaces:
        return [make.create_default_device()]
    return [make.create_device(interface=name) for name in interfaces.split(",")]
