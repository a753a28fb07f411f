"""Values over torch.distributed: one two-rank group for each directed edge, and a control group on the CPU.

Invariants:
- posts never wait; the use of a value does, on CUDA by its stream and on the CPU by the host (who also waits on
  CUDA where a gradient's presence varies);
- a channel is first in, first out, and nothing is assumed between two channels;
- a receive buffer is made when posted, and belongs to its value; a send is held until it is complete, which
  the values that come back tell (fpipe/receipts.py), else the end of the step;
- while signatures are unknown, each value is preceded by its own on the control group, and its receive is
  posted only when it is used; afterwards receives are posted where the program says.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from fpipe import effects as fx
from fpipe.errors import StageError
from fpipe.layout import message
from fpipe.signature import (
    Signature,
    TensorSpec,
    buffers,
    decode,
    encode,
    filled,
    restore,
    same,
    signature_of,
    tensors,
)
from fpipe.tree import Flat

log = logging.getLogger("fpipe.transport")

Payload = Flat | list[Any]
Arriving = tuple[list[torch.Tensor], Signature, list[dist.Work]]
Held = list[tuple[dist.Work, torch.Tensor]]
"""The messages of one value that was sent, and the tensors that they must not lose."""
Signatures = dict[tuple[fx.Value, int], Signature]
"""(value, the rank it goes to) -> its signature."""


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
        self._reset()

    @property
    def control(self) -> Any:
        """All ranks, on the CPU."""
        return self.shared["control"]

    # Set-up

    def _group(self, name: str, ranks: list[int], backend: str) -> Any:
        """A group of some ranks, which they alone make.

        `torch.distributed.new_group` would want every rank of the job in the same order, for each pipeline
        that is trained beside this one too, and splits a communicator made with `device_id`.
        """
        store, rank = PrefixStore(name, self.store), ranks.index(self.rank)
        timeout = timedelta(seconds=self.timeout)
        if backend == "gloo":
            return dist.ProcessGroupGloo(store, rank, len(ranks), timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.group_name = f"fpipe {name}"  # type: ignore[assignment]
        options.global_ranks_in_group = ranks
        return dist.ProcessGroupNCCL(store, rank, len(ranks), options)

    def connect(self, edges: Iterable[tuple[int, int]]) -> None:
        """Make the groups that are missing, in sorted order, and pass one message over each."""
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

    # A step

    def _reset(self) -> None:
        self.known: Signatures | None = None
        self.learned: Signatures = {}
        self.unposted: dict[int, deque[fx.Value]] = {}
        self.arriving: dict[fx.Value, Arriving] = {}
        self.held: dict[int, deque[Held]] = {}
        self.complete: dict[int, int] = {}
        self.receipts: Mapping[fx.Value, int] = {}

    def begin(self, known: Signatures | None, receipts: Mapping[fx.Value, int]) -> None:
        """Start a step, with the signatures of all its values where they are known."""
        self._reset()
        self.known, self.receipts = known, receipts

    def send(self, value: fx.Value, source: int, target: int, payload: Payload) -> None:
        self.held.setdefault(target, deque()).append([])
        payload, ahead = self._fitting(value, target, payload)
        for tensor in (*ahead, *tensors(payload)):
            if tensor.device.type != self.device.type:
                raise StageError(
                    f"{value} is on {tensor.device}, and this handler moves values on {self.device}",
                    rank=source,
                    stage=value.stage,
                )
            if tensor.numel():
                self._isend(message(tensor), target, self.edges[source, target], _side(target, source))

    def _fitting(self, value: fx.Value, target: int, payload: Payload) -> tuple[Payload, list[torch.Tensor]]:
        """The payload as its receiver expects it, and what goes ahead; if nothing is known yet, it is told."""
        if self.known is None:
            expected = self._wanted(value, signature_of(payload))
            self.learned[value, target] = expected
            self._announce(value, expected, target)
        else:
            expected = self.known[value, target]
        ahead: list[torch.Tensor] = []
        if isinstance(payload, list) and len(payload) == len(expected.leaves):
            payload, ahead = filled(payload, expected, self.device)
        signature = signature_of(payload)._replace(optional=expected.optional)
        if same(signature, expected):
            return payload, ahead
        raise StageError(
            f"{value} is {signature.text()}, where equal inputs gave {expected.text()} before: what a stage puts out "
            "may depend on its inputs' shapes and plain values, not on their data",
            rank=self.rank,
            stage=value.stage,
            microbatch=getattr(value, "microbatch", None),
        )

    def _wanted(self, value: fx.Value, signature: Signature) -> Signature:
        """A gradient's signature with what its activation wants and no reader gave: it may be given later.

        An expanded gradient is sent whole, since another step's may be dense.
        """
        if isinstance(value, fx.Gradient):
            signature = Signature(None, tuple(map(_whole, signature.leaves)))
        source = fx.Activation(value.stage, value.microbatch) if isinstance(value, fx.Gradient) else None
        activation = self.learned.get((source, self.rank)) if source is not None else None
        if activation is None:
            return signature
        wants = [spec if isinstance(spec, TensorSpec) and spec.requires_grad else None for spec in activation.leaves]
        pairs = list(zip(signature.leaves, wants, strict=True))
        optional = tuple(i for i, (leaf, want) in enumerate(pairs) if leaf is None and want is not None)
        leaves = tuple(
            want._replace(requires_grad=False, strides=None) if leaf is None and want is not None else leaf
            for leaf, want in pairs
        )
        return Signature(None, leaves, optional)

    def _announce(self, value: fx.Value, signature: Signature, target: int) -> None:
        try:
            text = encode(signature)
        except TypeError as error:
            raise StageError(f"its output can't travel: {error}", rank=self.rank, stage=value.stage) from error
        body = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._isend(torch.tensor([len(text)]), target, self.control, target)
        self._isend(body, target, self.control, target)

    def _isend(self, tensor: torch.Tensor, target: int, group: Any, to: int) -> None:
        try:
            work = group.send([tensor], to, 0)
        except RuntimeError as error:
            raise Lost(target, f"could not send to rank {target} ({first_line(error)})") from None
        self.held[target][-1].append((work, tensor))

    def post(self, value: fx.Value, source: int, target: int) -> None:
        if self.known is None:
            self.unposted.setdefault(source, deque()).append(value)
        else:
            self._irecv(value, source, self.known[value, target])

    def _irecv(self, value: fx.Value, source: int, signature: Signature) -> None:
        messages = buffers(signature, self.device)
        group, side = self.edges[source, self.rank], _side(source, self.rank)
        works = [self._recv(t, source, group, side) for t in messages if t.numel()]
        self.arriving[value] = (messages, signature, works)

    def _recv(self, tensor: torch.Tensor, source: int, group: Any, side: int) -> dist.Work:
        try:
            return group.recv([tensor], side, 0)  # type: ignore[no-any-return]
        except RuntimeError as error:
            raise Lost(source, f"could not receive from rank {source} ({first_line(error)})") from None

    def take(self, value: fx.Value, source: int, target: int, by: fx.Effect) -> Payload:
        purpose = f"waiting for {value} from rank {source}, which {by} needs"
        while value not in self.arriving:
            first = self.unposted[source].popleft()
            signature = self._heard(source, purpose)
            self.learned[first, self.rank] = signature
            self._irecv(first, source, signature)
        messages, signature, works = self.arriving.pop(value)
        self.wait(works, source, purpose)
        self._release(source, self.receipts.get(value, 0))
        return restore(messages, signature)

    def _release(self, peer: int, count: int) -> None:
        """Give up the first `count` values sent to a peer in this step."""
        held = self.held.get(peer)
        while held and self.complete.get(peer, 0) < count:
            self.complete[peer] = self.complete.get(peer, 0) + 1
            self.wait([work for work, _ in held.popleft()], peer, f"finishing a send to rank {peer}")

    def _heard(self, source: int, purpose: str) -> Signature:
        size = torch.zeros(1, dtype=torch.int64)
        self.wait([self._recv(size, source, self.control, source)], source, purpose)
        body = torch.empty(int(size), dtype=torch.uint8)
        self.wait([self._recv(body, source, self.control, source)], source, purpose)
        try:
            return decode(body.numpy().tobytes())
        except TypeError as error:
            raise StageError(f"a value from rank {source} can't be understood here: {error}", rank=self.rank) from error

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

    def end(self) -> Signatures:
        """Finish a step: all sends are complete. Returns the signatures of its values."""
        for peer, held in self.held.items():
            self._release(peer, self.complete.get(peer, 0) + len(held))
        return self.known if self.known is not None else self.learned

    def abort(self) -> None:
        """Break all connections, so that peers that wait for this process are told at once.

        Nothing else holds the groups: gloo closes its sockets with the last reference.
        """
        if self.backend == "nccl":
            self.cut()
        self._reset()
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
        messages = buffers(signature, self.device) if payload is None else list(map(message, tensors(payload)))
        for each in messages:
            if each.numel():
                self.broadcast(each.reshape(-1).view(torch.uint8), source, purpose)
        return restore(messages, signature) if payload is None else payload


def _whole(spec: Any) -> Any:
    return spec._replace(strides=None) if isinstance(spec, TensorSpec) and 0 in (spec.strides or ()) else spec


def first_line(error: Exception) -> str:
    """What an error of torch.distributed says, without its stack."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return "the connection closed" if "onnection" in text and ("closed" in text or "reset" in text) else text


def _close(*groups: dict[Any, Any]) -> None:
    for held in groups:
        held.clear()


def _side(rank: int, other: int) -> int:
    """A rank's number in the group of two."""
    return int(rank > other)
