"""Connections over torch.distributed: one two-rank group for each directed edge, and a control group on the CPU.

Posts never wait; `wait` does, on CUDA by its stream and on the CPU by the host. A channel is first in, first out, and
nothing is assumed between two channels.
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
from fpipe.handlers.distributed.wire import Payload, Wire

log = logging.getLogger("fpipe.transport")

Held = tuple[list[dist.Work], list[torch.Tensor]]
"""What is under way, and the tensors that it must not lose."""


class Lost(Exception):
    """A peer could not be reached: who, and what for."""

    def __init__(self, peer: int | None, text: str) -> None:
        super().__init__(text)
        self.peer = peer


class Links:
    """The channels of one process.

    Args:
        store: where the ranks find each other, under a name that is this pipeline's own.
        rank, size: this process's place among the ranks.
        device: where values live.
        timeout: seconds that any wait may take.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, timeout: float) -> None:
        self.store, self.rank, self.size, self.device, self.timeout = store, rank, size, device, timeout
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self.edges: dict[tuple[int, int], Any] = {}
        self.shared: dict[str, Any] = {}
        # Also before the interpreter ends: gloo's threads must not outlive it.
        weakref.finalize(self, _close, self.edges, self.shared)
        everyone = list(range(size))
        control = self.shared["control"] = self._group("control", everyone, "gloo")
        self.shared["results"] = control if self.backend == "gloo" else self._group("results", everyone, self.backend)

    @property
    def control(self) -> Any:
        """All ranks, on the CPU."""
        return self.shared["control"]

    def apart(self, name: str, timeout: float) -> Any:
        """All ranks, on the CPU, over connections of their own: what fails there leaves the others alone.

        All ranks call it at once, for the first time.
        """
        if name not in self.shared:
            self.shared[name] = self._group(name, list(range(self.size)), "gloo", timeout)
        return self.shared[name]

    # Set-up

    def _group(self, name: str, ranks: list[int], backend: str, timeout: float | None = None) -> Any:
        """A group of some ranks, which they alone make.

        `torch.distributed.new_group` would want every rank of the job in the same order, for each pipeline
        that is trained beside this one too, and splits a communicator made with `device_id`.
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
        """Make the groups that are missing, in sorted order, and pass one message over each.

        Raises:
            TransportError: they are more than a GPU has queues.
        """
        if self.backend == "nccl":
            for rank in range(self.size):  # so that all refuse alike, before a group is made
                check_queues(rank, {*edges, *self.edges}, os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
        for source, target in sorted(set(edges) - set(self.edges)):
            if self.rank not in (source, target):
                continue
            group = self._group(f"{source}-{target}", sorted((source, target)), self.backend)
            self.edges[source, target] = group
            ping = torch.ones(1, device=self.device)
            peer = target if self.rank == source else source
            work = (
                group.send([ping], _side(target, source), 0)
                if self.rank == source
                else group.recv([ping], _side(source, target), 0)
            )
            self.wait([work], peer, f"connecting rank {source} to rank {target}")
            log.debug("rank %d connected %d -> %d over %s", self.rank, source, target, self.backend)

    # Posts and waits

    def send(self, messages: list[torch.Tensor], target: int) -> list[dist.Work]:
        """Post messages to a rank. They and their works must be held until these are complete."""
        group, side = self.edges[self.rank, target], _side(target, self.rank)
        return self._post(group.send, messages, side, target, "send to")

    def receive(self, messages: list[torch.Tensor], source: int) -> list[dist.Work]:
        """Post receives from a rank."""
        group, side = self.edges[source, self.rank], _side(source, self.rank)
        return self._post(group.recv, messages, side, source, "receive from")

    def tell(self, text: bytes, target: int) -> Held:
        """Post a text to a rank, over the control group."""
        messages = [torch.tensor([len(text)]), torch.frombuffer(bytearray(text), dtype=torch.uint8)]
        return self._post(self.control.send, messages, target, target, "send to"), messages

    def hear(self, source: int, purpose: str) -> bytes:
        """Wait for a text that a rank told."""
        size = torch.zeros(1, dtype=torch.int64)
        self.wait(self._post(self.control.recv, [size], source, source, "receive from"), source, purpose)
        body = torch.empty(int(size), dtype=torch.uint8)
        self.wait(self._post(self.control.recv, [body], source, source, "receive from"), source, purpose)
        return body.numpy().tobytes()

    def _post(
        self, post: Callable[..., dist.Work], messages: list[torch.Tensor], side: int, peer: int, what: str
    ) -> list[dist.Work]:
        try:
            return [post([tensor], side, 0) for tensor in messages]
        except RuntimeError as error:
            raise Lost(peer, f"could not {what} rank {peer} ({first_line(error)})") from None

    def wait(self, works: list[dist.Work], peer: int | None, purpose: str) -> None:
        """Wait for works; on CUDA the stream does. They are popped, so that no traceback keeps them alive."""
        try:
            while works:
                works.pop(0).wait()
        except RuntimeError as error:
            works.clear()
            raise Lost(peer, f"{purpose} ({self._cause(error)})") from None

    def _cause(self, error: RuntimeError) -> str:
        if "imed out" in str(error):
            return f"nothing came within {self.timeout:g} s"
        return first_line(error)

    def abort(self) -> None:
        """Break all connections, so that peers that wait for this process are told at once.

        Nothing else holds the groups: gloo closes its sockets with the last reference.
        """
        if self.backend == "nccl":
            self.cut()
        _close(self.edges, self.shared)

    def cut(self) -> None:
        """End what NCCL has under way."""
        for group in (*self.edges.values(), *self.shared.values()):
            group.abort()

    # Collectives, at the ends of a step

    def collect(self, numbers: list[int], by: Any = dist.ReduceOp.SUM) -> tuple[torch.Tensor, list[dist.Work]]:
        """Post the sum, or the greatest, of whole numbers over all ranks."""
        tensor = torch.tensor(numbers, dtype=torch.int64)
        try:
            return tensor, [self.control.allreduce([tensor], by)]
        except RuntimeError as error:
            raise Lost(None, f"beginning a step ({first_line(error)})") from None

    def broadcast(self, tensor: torch.Tensor, source: int, purpose: str, control: bool = False) -> torch.Tensor:
        """The tensor of rank `source`, on every rank; others bring one to receive into."""
        group = self.shared["control" if control else "results"]
        try:
            works = [group.broadcast(tensor, source)]
        except RuntimeError as error:
            raise Lost(source, f"{purpose} ({first_line(error)})") from None
        self.wait(works, source, purpose)
        return tensor

    def broadcast_payload(self, payload: Payload | None, source: int, purpose: str) -> Payload:
        """The payload of rank `source`, its signature ahead."""
        size = torch.zeros(1, dtype=torch.int64)
        body = torch.empty(0, dtype=torch.uint8)
        if payload is not None:
            try:
                body = torch.frombuffer(bytearray(encode(signature_of(payload))), dtype=torch.uint8)
            except TypeError as error:
                raise StageError(f"{purpose}: they can't travel: {error}", rank=self.rank) from error
            size[0] = len(body)
        self.broadcast(size, source, purpose, control=True)
        body = self.broadcast(body if payload is not None else body.resize_(int(size)), source, purpose, control=True)
        signature = decode(body.numpy().tobytes())
        wire = Wire(signature if payload is None else signature_of(payload), self.device)
        messages = wire.buffers() if payload is None else wire.messages(payload)
        assert messages is not None, "the signature is the payload's own"
        for each in messages:
            self.broadcast(each.reshape(-1).view(torch.uint8), source, purpose)
        return wire.payload(messages) if payload is None else payload


def first_line(error: Exception) -> str:
    """What an error of torch.distributed says, without its stack."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return "the connection closed" if "onnection" in text and ("closed" in text or "reset" in text) else text


def check_queues(rank: int, edges: Collection[tuple[int, int]], connections: str | None) -> None:
    """Refuse more streams than the GPU has hardware queues.

    Each edge has a stream of its own, on which a receive waits for its sender. Where two streams share a queue, what
    stands behind such a receive waits too, be it the very compute that its sender waits for. This comes from a model
    of the queues, and was not seen on a GPU.

    Args:
        connections: CUDA_DEVICE_MAX_CONNECTIONS, of which CUDA takes 8 where it is not set, and at most 32.

    Raises:
        TransportError: the edges of this rank, its compute and its collectives are more than the queues.

    >>> check_queues(0, {(0, 1), (1, 0)}, "1")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fpipe.errors.TransportError: rank 0 has 2 edges, ... gives 1 hardware queue, ...: set it to 32 before start
    >>> check_queues(0, {(0, 1), (1, 0)}, None)
    """
    mine = sum(rank in edge for edge in edges)
    queues = min(int(connections), 32) if connections else 8
    if mine + 2 > queues:
        raise TransportError(
            f"rank {rank} has {mine} edges, which with compute and collectives take {mine + 2} streams, and "
            f"CUDA_DEVICE_MAX_CONNECTIONS gives {queues} hardware queue{'s' * (queues != 1)}, in which receives would "
            f"block compute: set it to 32 before start" + (", or take a placement of fewer edges" * (mine > 30))
        )


def _close(*groups: dict[Any, Any]) -> None:
    for held in groups:
        held.clear()


def _side(rank: int, other: int) -> int:
    """A rank's number in the group of two."""
    return int(rank > other)
