"""Groups of gloo: processes that exchange tensors of the CPU."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

CUT_TAG = 1 << 20  # of a receive that nobody sends for; messages have the tag 0
MOMENT = timedelta(milliseconds=1)


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


def cut(group: Any) -> None:
    """End all that a group waits for. gloo's own `abort` wakes no wait; a receive that times out fails all of them."""
    others = (other for other in range(group.size()) if other != group.rank())
    any(_times_out(group, other) for other in others)  # a receive from a rank that is gone fails at once


def _times_out(group: Any, other: int) -> bool:
    """Receive from a rank that sends nothing; return whether that timed out."""
    try:
        group.recv([torch.empty(1)], other, CUT_TAG).wait(MOMENT)
    except RuntimeError as error:
        return "imed out" in str(error)
    return False


@functools.cache
def gloo_devices() -> list[Any]:
    """Return the devices of gloo's groups, as torch chooses them. Each has a thread, which wakes every 10 ms."""
    make, interfaces = dist.ProcessGroupGloo, os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not interfaces:
        return [make.create_default_device()]
    return [make.create_device(interface=name) for name in interfaces.split(",")]
