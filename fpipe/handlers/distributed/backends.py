"""The two ways by which values travel: gloo between CPUs, NCCL between GPUs.

Invariants:
- no group ends a process or a wait by a clock of its own: the watchdog of the handler decides (liveness.py);
- making a group is bounded by the handler's time limit;
- `cut` returns within seconds, and ends every wait for these groups in this process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from fpipe.devices import Cuda, Device
from fpipe.errors.arguments import checked_class
from fpipe.handlers.gloo import cut, gloo_group

log = logging.getLogger("fpipe.transport")

Edge = tuple[int, int]
FOREVER = timedelta(days=30)
GATHER_TAG = 2
CUT_LIMIT = 10.0  # seconds that cutting may take
SMALL = 1 << 15  # bytes of all pieces up to which one post with copies costs less than a post for each rank
DEFAULT_CHANNELS = 4
RESULT_CHANNELS = 1  # the losses are small


class Owner(Protocol):
    """The connections of a handler; `closed` is set when they are not used any more."""

    closed: threading.Event


class Backend(Protocol):
    """Makes groups of processes that exchange tensors, as torch's `ProcessGroupGloo` and `ProcessGroupNCCL` do.

    A group has `send([tensor], rank, tag)`, `recv([tensor], rank, tag)`, `broadcast(tensor, root)` and the collectives
    of torch's, which post an operation on the current stream and return a work.

    Args:
        asynchronous: whether a wait for a work makes the device's current stream wait, and not the host.
    """

    asynchronous: bool

    def check(self, device: Device, rank: int, edges: Collection[Edge], lanes: int, owner: Owner) -> str | None:
        """Return why this process can't have these edges; None if it can.

        Args:
            edges: of a handler, all of them; those of this process's other handlers count too.
            lanes: the number of its groups of replicas, which count as edges.
            owner: the handler's connections.
        """

    def group(self, store: Store, name: str, rank: int, ranks: Sequence[int], timeout: float) -> Any:
        """Make a group of some ranks of the job; only these call it. `rank` is this process's number among them."""

    def message(self, tensor: Tensor) -> Tensor:
        """Return a contiguous tensor as one of a dtype that can travel; shares its memory."""

    def all_gather(self, group: Any, whole: Tensor, piece: Tensor) -> list[Any]:
        """Post the gathering of every rank's piece, in their order; return its works. Both tensors are flat bytes."""

    def wait(self, work: Any) -> None:
        """Wait for a work: the host, or the current stream."""

    def cut(self, groups: Sequence[Any]) -> None:
        """End every operation of these groups that is not complete; their waits fail."""

    def close(self, groups: Sequence[Any]) -> None:
        """Close groups whose operations are complete, before the last references to them go."""


@dataclass(frozen=True)
class Gloo:
    """gloo: TCP between processes, tensors on the CPU."""

    asynchronous = False

    def check(self, device: Device, rank: int, edges: Collection[Edge], lanes: int, owner: Owner) -> str | None:
        return None

    def group(self, store: Store, name: str, rank: int, ranks: Sequence[int], timeout: float) -> Any:
        group = gloo_group(store, rank, len(ranks), timeout)
        group._set_default_timeout(FOREVER)
        return group

    def message(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, group: Any, whole: Tensor, piece: Tensor) -> list[Any]:
        """Send the piece to every rank. gloo's own sends twice as many messages, one after the other round a ring."""
        if whole.numel() <= SMALL:
            equal: list[int] = []  # parts
            return [group.alltoall_base(whole, piece.repeat(group.size()), equal, equal)]
        pieces = whole.view(group.size(), -1)
        pieces[group.rank()] = piece
        others = [rank for rank in range(group.size()) if rank != group.rank()]
        receives = [group.recv([pieces[rank]], rank, GATHER_TAG) for rank in others]
        return receives + [group.send([piece], rank, GATHER_TAG) for rank in others]

    def wait(self, work: Any) -> None:
        work.wait(FOREVER)

    def cut(self, groups: Sequence[Any]) -> None:
        for group in groups:
            cut(group)

    def close(self, groups: Sequence[Any]) -> None:
        """Do nothing: sockets close with the last reference."""


@checked_class()
@dataclass(frozen=True)
class NCCL:
    """NCCL, with a communicator for each edge.

    A receive that is posted ahead runs on the GPU until its message comes. It takes `channels` thread blocks, and so as
    many of the GPU's multiprocessors from the compute beside it.

    Args:
        channels: thread blocks of one transfer; each moves some 20 to 25 GB/s over NVLink. All edges of a rank together
            may take a quarter of the GPU.

    Raises:
        ValueError: there are no channels.
    """

    channels: int = DEFAULT_CHANNELS
    asynchronous = True

    def __post_init__(self) -> None:
        if self.channels < 1:
            raise ValueError(f"channels must be at least 1, not {self.channels}")

    def check(self, device: Device, rank: int, edges: Collection[Edge], lanes: int, owner: Owner) -> str | None:
        for name, reason in DEADLOCKING.items():
            if os.environ.get(name, "0") not in ("", "0"):
                return f"{name}={os.environ[name]} {reason}: unset it"
        if device.torch_device.type != "cuda":
            return (
                f"rank {rank}: NCCL moves values between GPUs, and its handler is on {device.torch_device}: pass "
                "Distributed(device='cuda'), or backend=Gloo()"
            )
        current = Cuda().torch_device.index
        if device.torch_device.index != current:
            return (
                f"rank {rank}: its handler is on {device.torch_device}, and the current device is cuda:{current}: call "
                f"torch.cuda.set_device({device.torch_device.index}) first"
            )
        here = [owner for owner, (at, _) in _edges_of.items() if at == current and not owner.closed.is_set()]
        edges_of = {other: _edges_of[other][1] for other in here} | {owner: sum(rank in edge for edge in edges) + lanes}
        units = Cuda(device.torch_device).multiprocessors()
        queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
        why = too_many(sum(edges_of.values()), len(edges_of), self.channels, units, queues)
        if why is not None:
            return f"rank {rank} has {why}"
        _edges_of[owner] = current, edges_of[owner]
        return None

    def group(self, store: Store, name: str, rank: int, ranks: Sequence[int], timeout: float) -> Any:
        is_edge = name != "results"
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=is_edge)
        options._timeout = FOREVER
        options.group_name = f"fpipe {name}"  # type: ignore[assignment]
        options.global_ranks_in_group = list(ranks)
        options.config.max_ctas = self.channels if is_edge else RESULT_CHANNELS
        options.config.min_ctas = 1
        with _environment(WITHOUT_WATCHDOG):
            # A rank that does not come blocks the client of the store.
            return dist.ProcessGroupNCCL(store.clone(), rank, len(ranks), options)  # type: ignore[attr-defined]

    def message(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype in NCCL_DTYPES else as_bytes(tensor)

    def all_gather(self, group: Any, whole: Tensor, piece: Tensor) -> list[Any]:
        return [group._allgather_base(whole, piece)]

    def wait(self, work: Any) -> None:
        work.wait()

    def cut(self, groups: Sequence[Any]) -> None:
        """Abort each group in a thread of its own: an abort waits for the device, which another's kernel may hold."""
        _at_once([group.abort for group in groups])

    def close(self, groups: Sequence[Any]) -> None:
        """Shut each group down; else its end would abort it, with the last messages on their way."""
        _at_once([group.shutdown for group in groups])


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as flat bytes; shares its memory."""
    return tensor.reshape(-1).view(torch.uint8)


NCCL_DTYPES = frozenset(
    {
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.bool,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)
"""Dtypes of which NCCL of every version can send; others travel as bytes."""

DEADLOCKING: Mapping[str, str] = {
    "CUDA_LAUNCH_BLOCKING": "makes the host wait for receives that are posted before their messages are sent",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "makes a send wait for receives that are posted before it on other edges",
}
"""Environment variable -> how it makes ranks wait for each other for ever."""

WITHOUT_WATCHDOG: Mapping[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else torch's watchdog ends the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""What a process group of NCCL reads when it is made, so that a failure stays an error of fpipe's own."""

QUEUES, MOST_QUEUES = 8, 32  # hardware queues of a process: by default, and at most
_edges_of: weakref.WeakKeyDictionary[Owner, tuple[int, int]] = weakref.WeakKeyDictionary()
"""The device of each handler's connections, and how many edges this process has among them."""


def too_many(edges: int, handlers: int, channels: int, units: int, queues: str | None) -> str | None:
    """Return why a GPU can't run this many edges at once; None if it can.

    Each edge has a stream of torch's and one of NCCL's, on which a receive waits for its sender; so has each handler's
    group for results. Compute and the recorder's clock have one each. Where two streams share a hardware queue,
    everything behind such a receive waits too, possibly the compute that its sender waits for. This follows from a
    model of the queues; it was not observed on a GPU.

    Args:
        edges: of this process, over all its handlers.
        channels: thread blocks that a transfer takes.
        units: multiprocessors of the GPU.
        queues: CUDA_DEVICE_MAX_CONNECTIONS; CUDA's default is 8, its maximum 32.

    >>> too_many(2, 1, 4, 132, "1")
    '2 edges, which with compute and results need 8 streams, and CUDA_DEVICE_MAX_CONNECTIONS gives 1 hardware queue, \
in which receives would block compute: set it to 32 before start'
    >>> too_many(4, 1, 4, 132, "32"), too_many(2, 1, 4, 132, None)
    (None, None)
    """
    limit = min(int(queues), MOST_QUEUES) if queues and queues.strip().isdecimal() else 0 if queues else QUEUES
    if not limit:
        return f"CUDA_DEVICE_MAX_CONNECTIONS={queues}, which is no number from 1 to 32: set it to 32 before start"
    streams = 2 * (edges + handlers) + 2
    counted = f"{edges} edges" + (f" in {handlers} handlers" if handlers > 1 else "")
    if streams > limit:
        more = ["set it to 32 before start"] if limit < MOST_QUEUES else []
        fewer = ["use a placement with fewer edges, or fewer handlers"] if streams > MOST_QUEUES else []
        return (
            f"{counted}, which with compute and results need {streams} streams, and CUDA_DEVICE_MAX_CONNECTIONS gives "
            f"{limit} hardware queue{'s' * (limit != 1)}, in which receives would block compute: "
            f"{', and '.join(more + fewer)}"
        )
    if edges * channels > units // 4:
        fit = units // 4 // edges
        return (
            f"{counted} of {channels} channels each, and waiting receives may take at most a quarter of the GPU's "
            f"{units} multiprocessors: "
            + (f"pass backend=NCCL(channels={fit})" if fit else "use a placement with fewer edges, or fewer handlers")
        )
    return None


def _at_once(calls: Sequence[Callable[[], object]]) -> None:
    """Call functions that end communicators, each in a thread, and wait for them for some seconds."""
    threads = [threading.Thread(target=_tried, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    until = time.monotonic() + CUT_LIMIT
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    if stuck := sum(thread.is_alive() for thread in threads):
        log.warning("%d of %d communicators did not end within %g s", stuck, len(threads), CUT_LIMIT)


def _tried(call: Callable[[], object]) -> None:
    try:
        call()
    except RuntimeError as error:
        log.debug("a communicator did not end: %s", error)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def rounds(edges: Collection[Edge]) -> list[list[Edge]]:
    """Return the edges in rounds, in each of which a rank has at most one; the ranks connect a round at a time.

    >>> rounds([(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)])
    [[(0, 1), (2, 3)], [(1, 0), (3, 2)], [(1, 2)], [(2, 1)]]
    """
    ordered: list[list[Edge]] = []
    for edge in sorted(edges):
        free = (each for each in ordered if not any(set(edge) & set(other) for other in each))
        chosen = next(free, None)
        if chosen is None:
            ordered.append(chosen := [])
        chosen.append(edge)
    return ordered
