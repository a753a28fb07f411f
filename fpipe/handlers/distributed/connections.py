"""Connections over torch.distributed: one two-rank group for each directed edge, and a control group on the CPU.

Posts never wait; `wait` does: on CUDA the stream waits, on the CPU the host. Messages of one connection arrive in
order; there is no order between two connections.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from fpipe.errors import StageError, TransportError
from fpipe.handlers.distributed.signature import decode, encode, signature_of
from fpipe.handlers.distributed.wire import PayloadCodec
from fpipe.stages.pytree import Flat

log = logging.getLogger("fpipe.transport")

InFlight = tuple[list[dist.Work], list[torch.Tensor]]
"""Works that are not complete, and the tensors that must live until they are."""


class PeerLost(Exception):
    """A peer can't be reached; the text is the purpose. `peer` is its rank, None where it may be any of them."""

    def __init__(self, peer: int | None, text: str) -> None:
        super().__init__(text)
        self.peer = peer


class Connections:
    """The connections of one process.

    Args:
        store: through which the ranks find each other; under a prefix that nothing else uses.
        rank, size: of this process, and how many there are.
        device: where values are.
        timeout: seconds that any wait may take.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, timeout: float) -> None:
        self.store, self.rank, self.size, self.device, self.timeout = store, rank, size, device, timeout
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self.edges: dict[tuple[int, int], Any] = {}
        self.shared: dict[str, Any] = {}
        # Also at the interpreter's exit: gloo's threads must not outlive it.
        weakref.finalize(self, _close, self.edges, self.shared)
        everyone = list(range(size))
        control = self.shared["control"] = self._group("control", everyone, "gloo")
        self.shared["results"] = control if self.backend == "gloo" else self._group("results", everyone, self.backend)

    @property
    def control(self) -> Any:
        """All ranks, on the CPU."""
        return self.shared["control"]

    def new_group(self, name: str, timeout: float | None) -> Any:
        """Return a gloo group of all ranks, over separate connections: a failure there does not affect the others.

        The first call for a name connects all ranks: all of them make it at the same time.
        """
        if name not in self.shared:
            self.shared[name] = self._group(name, list(range(self.size)), "gloo", timeout)
        return self.shared[name]

    # Set-up

    def _group(self, name: str, ranks: list[int], backend: str, timeout: float | None = None) -> Any:
        """Make a group of some ranks; only these call it.

        `torch.distributed.new_group` must be called by every rank of the job in the same order, also by those that
        train another pipeline, and it splits a communicator made with `device_id`.
        """
        store, rank = PrefixStore(name, self.store), ranks.index(self.rank)
        limit = timedelta(seconds=self.timeout if timeout is None else timeout)
        if backend == "gloo":
            return dist.ProcessGroupGloo(store, rank, len(ranks), limit)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        options.group_name = f"fpipe {name}"  # type: ignore[assignment]
        options.global_ranks_in_group = ranks
        return dist.ProcessGroupNCCL(store, rank, len(ranks), options)

    def connect(self, edges: Collection[tuple[int, int]]) -> None:
        """Make the groups that are missing, in sorted order, and send one message over each.

        Raises:
            TransportError: there are more edges than a GPU has hardware queues.
        """
        if self.backend == "nccl":
            for rank in range(self.size):  # so that all ranks raise, before a group is made
                check_queues(rank, {*edges, *self.edges}, os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
        for source, target in sorted(set(edges) - set(self.edges)):
            if self.rank not in (source, target):
                continue
            self.edges[source, target] = self._group(f"{source}-{target}", sorted((source, target)), self.backend)
            ping, sends = [torch.ones(1, device=self.device)], self.rank == source
            works = self.send(ping, target) if sends else self.receive(ping, source)
            self.wait(works, target if sends else source, f"connecting rank {source} to rank {target}")
            log.debug("rank %d connected %d -> %d over %s", self.rank, source, target, self.backend)

    # Posts and waits

    def send(self, messages: list[torch.Tensor], target: int) -> list[dist.Work]:
        """Post messages to a rank. The caller keeps them and their works until the works are complete."""
        group, side = self.edges[self.rank, target], _side(target, self.rank)
        return self._post_each(group.send, messages, side, target, "send to")

    def receive(self, messages: list[torch.Tensor], source: int) -> list[dist.Work]:
        """Post receives from a rank."""
        group, side = self.edges[source, self.rank], _side(source, self.rank)
        return self._post_each(group.recv, messages, side, source, "receive from")

    def send_bytes(self, text: bytes, target: int) -> InFlight:
        """Post bytes to a rank, over the control group."""
        messages = [torch.tensor([len(text)]), _as_tensor(text)]
        return self._post_each(self.control.send, messages, target, target, "send to"), messages

    def recv_bytes(self, source: int, purpose: str) -> bytes:
        """Wait for bytes that a rank sent by `send_bytes`."""
        size = torch.zeros(1, dtype=torch.int64)
        self.wait(self._post_each(self.control.recv, [size], source, source, "receive from"), source, purpose)
        body = torch.empty(int(size), dtype=torch.uint8)
        self.wait(self._post_each(self.control.recv, [body], source, source, "receive from"), source, purpose)
        return body.numpy().tobytes()

    def _post_each(
        self, post: Callable[..., dist.Work], messages: list[torch.Tensor], side: int, peer: int, what: str
    ) -> list[dist.Work]:
        return self._post(peer, f"could not {what} rank {peer}", post, [([each], side, 0) for each in messages])

    def _post(
        self, peer: int | None, what: str, post: Callable[..., dist.Work], calls: list[tuple[Any, ...]]
    ) -> list[dist.Work]:
        try:
            return [post(*arguments) for arguments in calls]
        except RuntimeError as error:
            raise PeerLost(peer, f"{what} ({first_line(error)})") from None

    def wait(self, works: list[dist.Work], peer: int | None, purpose: str) -> None:
        """Wait for works; on CUDA the stream waits. They are popped, so that no traceback keeps them alive."""
        try:
            while works:
                works.pop(0).wait()
        except RuntimeError as error:
            works.clear()
            raise PeerLost(peer, f"{purpose} ({cause_of(error, self.timeout)})") from None

    def abort(self) -> None:
        """Break all connections, so that peers that wait for this process get an error at once.

        gloo closes its sockets when the last reference to a group goes: nothing else may keep one.
        """
        if self.backend == "nccl":
            self.cut()
        _close(self.edges, self.shared)

    def cut(self) -> None:
        """Abort the operations of NCCL that are not complete."""
        for group in (*self.edges.values(), *self.shared.values()):
            group.abort()

    # Collectives, at the ends of a step

    def collect(self, numbers: list[int], by: Any = dist.ReduceOp.SUM) -> tuple[torch.Tensor, list[dist.Work]]:
        """Post the reduction of whole numbers over all ranks."""
        tensor = torch.tensor(numbers, dtype=torch.int64)
        return tensor, self._post(None, "beginning a step", self.control.allreduce, [([tensor], by)])

    def broadcast(self, tensor: torch.Tensor, source: int, purpose: str, control: bool = False) -> torch.Tensor:
        """Return the tensor of rank `source`, on every rank; the others pass a tensor to receive into."""
        group = self.shared["control" if control else "results"]
        self.wait(self._post(source, purpose, group.broadcast, [(tensor, source)]), source, purpose)
        return tensor

    def broadcast_payload(self, payload: Flat | None, source: int, purpose: str) -> Flat:
        """Return the payload of rank `source`, on every rank; its signature travels first."""
        text = b""
        if payload is not None:
            signature = signature_of(payload)
            try:
                text = encode(signature)
            except TypeError as error:
                raise StageError(f"{purpose}: they can't be sent: {error}", rank=self.rank) from error
        size = self.broadcast(torch.tensor([len(text)]), source, purpose, control=True)
        body = _as_tensor(text.ljust(int(size), b"\0"))
        self.broadcast(body, source, purpose, control=True)
        codec = PayloadCodec(decode(body.numpy().tobytes()) if payload is None else signature, self.device)
        messages = codec.buffers() if payload is None else codec.messages(payload)
        assert messages is not None, "the signature is the payload's own"
        for each in messages:
            self.broadcast(each.reshape(-1).view(torch.uint8), source, purpose)
        return codec.payload(messages) if payload is None else payload  # type: ignore[return-value]


def _as_tensor(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def cause_of(error: Exception, timeout: float | None) -> str:
    """Return why a wait failed: its time limit, else the error of torch.distributed.

    Args:
        timeout: seconds; None for a process group's own limit.
    """
    if "imed out" in str(error) or "timeout" in str(error):
        return "nothing came within " + ("the group's timeout" if timeout is None else f"{timeout:g} s")
    return first_line(error)


def first_line(error: Exception) -> str:
    """Return the message of an error of torch.distributed, without its stack."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return "the connection closed" if "onnection" in text and ("closed" in text or "reset" in text) else text


def check_queues(rank: int, edges: Collection[tuple[int, int]], connections: str | None) -> None:
    """Raise if a rank needs more streams than the GPU has hardware queues.

    Each edge has its own stream, on which a receive waits for its sender. Where two streams share a queue, everything
    behind such a receive waits too, possibly the compute that its sender waits for. This follows from a model of the
    queues; it was not observed on a GPU.

    Args:
        connections: CUDA_DEVICE_MAX_CONNECTIONS; CUDA's default is 8, its maximum 32.

    Raises:
        TransportError: the rank's edges, compute and collectives need more streams than there are queues.

    >>> check_queues(0, {(0, 1), (1, 0)}, "1")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fpipe.errors.TransportError: rank 0 has 2 edges, ... gives 1 hardware queue, ...: set it to 32 before start
    >>> check_queues(0, {(0, 1), (1, 0)}, None)
    """
    count = sum(rank in edge for edge in edges)
    queues = min(int(connections), 32) if connections else 8
    if count + 2 > queues:
        raise TransportError(
            f"rank {rank} has {count} edges, which with compute and collectives need {count + 2} streams, and "
            f"CUDA_DEVICE_MAX_CONNECTIONS gives {queues} hardware queue{'s' * (queues != 1)}, in which receives would "
            f"block compute: set it to 32 before start" + (", or use a placement with fewer edges" * (count > 30))
        )


def _close(*groups: dict[Any, Any]) -> None:
    for each in groups:
        each.clear()


def _side(rank: int, other: int) -> int:
    """Return a rank's number in a group of two."""
    return int(rank > other)
