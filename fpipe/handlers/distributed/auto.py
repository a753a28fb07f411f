"""The handler for the way in which a program was started."""

from __future__ import annotations

import atexit
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fpipe.devices import cuda_count, device_of
from fpipe.errors.arguments import checked
from fpipe.handlers.calls import NO_FUNCTIONS, Functions
from fpipe.handlers.distributed.handler import Distributed
from fpipe.handlers.local import Local
from fpipe.store import warn_of_shared_store


@checked()
def auto(
    device: torch.device | str | None = None,
    *,
    timeout: float = 300.0,
    compute_timeout: float = 1800.0,
    functions: Functions = NO_FUNCTIONS,
) -> Distributed | Local:
    """Return `Distributed` where there are several processes: under torchrun, or in torch.distributed; else `Local`.

    Under torchrun, or any launcher that sets RANK and WORLD_SIZE, it calls `torch.distributed.init_process_group` if
    nobody has: with NCCL for a CUDA device, which then is the current one, else with gloo. It destroys this group when
    the process exits, by `sys.exit` too, but not once an exception was uncaught (`sys.last_value`): messages of a
    failed step may never arrive, and NCCL would wait for them. A group that it finds stays as it is. A single process
    (WORLD_SIZE=1, or a group of one) gets `Local`, which runs plans of any number of ranks, and makes no group.
    Call it before the process uses CUDA: it sets CUDA_DEVICE_MAX_CONNECTIONS to 32 if that is not set. It warns where a
    job on several hosts that torchrun may start again would not survive the loss of one, for want of
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.

    Args:
        device: where values are under torchrun; by default of the type of torch's default device. "cuda" is the device
            of this process on its host: LOCAL_RANK, or where the launcher does not set it, RANK modulo the number of
            visible devices. `Local` leaves values where they are.
        timeout, compute_timeout: of `Distributed`.
        functions: of either.

    Raises:
        ValueError: there is no such device; or, with several processes, a time limit is not positive.

    >>> from fpipe import Pipeline, Placement
    >>> handler = auto()
    >>> handler, handler.rank, handler.is_first
    (Local(), 0, True)
    """
    if _processes() == 1:
        if isinstance(device, str):
            _checked_name(device)
        return Local(functions=functions)
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS") != "0":
        warn_of_shared_store()
    if not dist.is_initialized():
        _init(torch.device(device or torch.get_default_device().type))
    return Distributed(device=device, timeout=timeout, compute_timeout=compute_timeout, functions=functions)


def _checked_name(device: str) -> None:
    try:
        torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{device!r} is no device: {error}") from error


def _processes() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else 1


def _init(device: torch.device) -> None:
    if device.type == "cuda":
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        device_of(f"cuda:{_local_rank() if device.index is None else device.index}").use()
    backend = "nccl" if device.type == "cuda" else "gloo"
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts != "0" and os.environ.get("GROUP_WORLD_SIZE") == "1":
        # torchrun keeps its store, with the addresses of dead workers. On several hosts the counts may differ.
        store, rank, size = next(rendezvous("env://"))
        own = PrefixStore(f"restart {restarts}", store)
        dist.init_process_group(backend, store=own, rank=rank, world_size=size)
    else:
        dist.init_process_group(backend)
    atexit.register(_destroy, dist.group.WORLD)


def _local_rank() -> int:
    """Return the number of this process on its host; consecutive ranks share a host, with a device for each."""
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    return int(os.environ["RANK"]) % max(1, cuda_count())


def _destroy(group: dist.ProcessGroup | None) -> None:
    if dist.group.WORLD is group and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()
