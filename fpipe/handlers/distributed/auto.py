"""The handler for the way in which a program was started."""

from __future__ import annotations

import atexit
import os
import sys

import torch
import torch.distributed as dist

from fpipe.handlers.calls import NO_FUNCTIONS, Functions
from fpipe.handlers.distributed.handler import Distributed
from fpipe.handlers.local import Local


def auto(
    device: torch.device | str | None = None,
    *,
    timeout: float = 300.0,
    compute_timeout: float = 1800.0,
    functions: Functions = NO_FUNCTIONS,
) -> Distributed | Local:
    """Return `Distributed` under torchrun, or where torch.distributed is initialized; else `Local`.

    Under torchrun, or any launcher that sets RANK and WORLD_SIZE, it calls `torch.distributed.init_process_group` if
    nobody has: with NCCL for a CUDA device, which then is the current one, else with gloo. It destroys this group when
    the process exits, unless by an exception, because the other ranks may then wait. A group that it finds stays as it
    is. Call it before the process uses CUDA: it sets CUDA_DEVICE_MAX_CONNECTIONS to 32 if that is not set.

    Args:
        device: where values are under torchrun; by default of the type of torch's default device. "cuda" is the device
            of this process on its host, LOCAL_RANK. `Local` leaves values where they are.
        timeout, compute_timeout: of `Distributed`.
        functions: of either.

    >>> from fpipe import Pipeline, Placement
    >>> handler = auto()
    >>> handler, handler.rank, handler.is_first
    (Local(), 0, True)
    """
    if not dist.is_initialized():
        if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
            return Local(functions=functions)
        _init(torch.device(device or torch.get_default_device().type))
    return Distributed(device=device, timeout=timeout, compute_timeout=compute_timeout, functions=functions)


def _init(device: torch.device) -> None:
    if device.type == "cuda":
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) if device.index is None else device.index)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    atexit.register(_destroy)


def _destroy() -> None:
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()
