"""The channels of one program on one rank: a route for each value that travels, made when the program is compiled.

Invariants:
- a receive buffer is made when its receive is posted, and belongs to its value alone;
- a send's buffer is kept until a value received from that peer acknowledges it (fpipe/programs/completions.py), or
  until the step ends;
- in a step of unknown signatures, each value's signature travels before it on the control group, and its receive is
  posted when it is first used; in later steps receives are posted where the program has them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from fpipe import effects as fx
from fpipe.autodiff.interface import Leaves
from fpipe.errors import StageError
from fpipe.handlers.calls import Step
from fpipe.handlers.distributed.connections import Connections, InFlight
from fpipe.handlers.distributed.handshake import REMEMBERED, Handshake
from fpipe.handlers.distributed.replicas import ReplicaChannels
from fpipe.handlers.distributed.signature import Signature, TensorSpec, decode, encode, signature_of
from fpipe.handlers.distributed.wire import Payload, PayloadCodec
from fpipe.handlers.protocol import Inputs


@dataclass(eq=False, slots=True)
class RecvRoute:
    """A value that is received from a rank; `arriving` are the messages and their works, once posted."""

    value: fx.Value
    source: int
    arriving: tuple[list[torch.Tensor], list[dist.Work]] | None = None


@dataclass
class KnownStep:
    """The signatures that have travelled in steps of one name: in its first step, those of the values so far.

    Args:
        sent: by value and the rank that it is sent to.
        received: by value.
        gathered: of outputs, by microbatch.
        is_compared: whether the replicas have compared their params.
    """

    sent: dict[tuple[fx.Value, int], PayloadCodec] = field(default_factory=dict)
    received: dict[fx.Value, PayloadCodec] = field(default_factory=dict)
    gathered: dict[int, PayloadCodec] = field(default_factory=dict)
    loss_dtype: torch.dtype | None = None
    is_compared: bool = False


@dataclass
class _Sent:
    """The sends to one rank that are not acknowledged, in order, and how many of this step's are complete."""

    in_flight: deque[InFlight] = field(default_factory=deque)
    complete: int = 0


class Channels:
    """Sends and receives values. The handshake of a step precedes its first value.

    Args:
        receipts: for each value received, how many of this rank's sends to its sender are then complete.
        replicas: gathers and scatters, where there are replicas.
        digest: returns what every replica must have alike in this step.
        early: receives that came before the end of the handshake, which is when they are posted; None after it.
        unposted: by rank, receives whose signatures have not come.
    """

    def __init__(
        self,
        connections: Connections,
        handshake: Handshake,
        receipts: Mapping[fx.Value, int],
        replicas: Callable[[Callable[[], None]], ReplicaChannels] | None = None,
    ) -> None:
        self.connections, self.handshake, self.receipts = connections, handshake, receipts
        self.process = connections.grid.process
        self.replicas = None if replicas is None else replicas(self.agree)
        self.digest: Callable[[], dict[str, str]] = dict
        self.receives: list[RecvRoute] = []
        self.steps = lru_cache(REMEMBERED)(lambda name: KnownStep())  # every rank forgets the same one
        self.known = KnownStep()
        self.sent: defaultdict[int, _Sent] = defaultdict(_Sent)
        self.unposted: defaultdict[int, deque[RecvRoute]] = defaultdict(deque)
        self.early: list[RecvRoute] | None = []
        self.signatures: list[tuple[int, InFlight]] = []

    # Compiling

    def sender(self, value: fx.Value, source: int, target: int) -> Callable[[Any], None]:
        """Return a function that posts the value's payload."""
        sent, key, process = self.sent[target], (value, target), self.process(target)

        def send(payload: Payload) -> None:
            if self.early is not None:
                self.agree()
            codec = self.known.sent.get(key) or self._announce(value, target, payload)
            messages = codec.messages(payload)
            if messages is None:
                raise self._error(
                    value,
                    f"{value} is {signature_of(payload).text()}, where equal inputs gave {codec.signature.text()} "
                    "before: the structure of a stage's output may depend on its inputs' shapes and plain values, not "
                    "on their data",
                )
            for message in messages:
                where = self.connections.device.torch_device
                if message.device.type != where.type:
                    raise self._error(
                        value, f"{value} is on {message.device}, and this handler moves values on {where}"
                    )
            sent.in_flight.append((self.connections.send(messages, process), messages))

        return send

    def receiver(
        self, value: fx.Value, source: int, target: int, by: fx.Effect
    ) -> tuple[Callable[[], None], Callable[[], Payload]]:
        """Return two functions: one posts the value's receive, the other waits for it where `by` needs it."""
        purpose = f"waiting for {value} from rank {source}, which {by} needs"
        route, receipt, sent = RecvRoute(value, source), self.receipts.get(value, 0), self.sent[source]
        self.receives.append(route)
        process = self.process(source)

        def post() -> None:
            if self.early is not None:
                self.early.append(route)
            else:
                self._post(route)

        def wait() -> Payload:
            if self.early is not None:
                self.agree()
            while route.arriving is None:
                self._receive_signature(source, purpose)
            messages, works = route.arriving
            self.connections.wait(works, process, purpose)
            route.arriving = None
            if receipt > sent.complete:
                self._release(source, sent, receipt)
            return self.known.received[value].payload(messages)

        return post, wait

    # A step

    def begin(self, inputs: Inputs) -> None:
        """Begin the handshake of a step; does not wait."""
        self._clear()
        self.handshake.begin(inputs)

    def scatter(self, stage: int, rank: int) -> tuple[Callable[[Step], None], Callable[[Step], Callable[[], Leaves]]]:
        assert self.replicas is not None
        return self.replicas.scatter(stage, rank)

    def gather(self, stage: int, rank: int) -> tuple[Callable[[Step], Leaves], Callable[[Step], Leaves]] | None:
        return None if self.replicas is None else self.replicas.gather(stage, rank)

    def release(self, stage: int, step: Step) -> None:
        if self.replicas is not None:
            self.replicas.release(stage, step)

    def agree(self) -> None:
        """Wait for the handshake; only the first call of a step does anything."""
        if self.early is None:
            return
        early, self.early = self.early, None
        self.handshake.wait()
        self.known = self.steps(self.handshake.name)
        if self.replicas is not None and not self.known.is_compared:
            self.handshake.compare(self.digest())
            self.known.is_compared = True
        for route in early:
            self._post(route)

    def end(self) -> None:
        """Finish a step: wait for all sends."""
        for peer, (works, _) in self.signatures:
            self.connections.wait_for_control(works, self.process(peer), f"sending a signature to rank {peer}")
        for peer, sent in self.sent.items():
            self._release(peer, sent, sent.complete + len(sent.in_flight))

    def clear(self) -> None:
        """Drop everything that a failed step left: a pending work would keep its connection open."""
        self.handshake.clear()
        self._clear()

    def _clear(self) -> None:
        self.early, self.signatures = [], []
        self.unposted.clear()
        for route in self.receives:
            route.arriving = None
        for sent in self.sent.values():
            sent.in_flight.clear()
            sent.complete = 0

    def _post(self, route: RecvRoute) -> None:
        """Post a receive, or put it off until the value's signature has come."""
        codec = self.known.received.get(route.value)
        if codec is None:
            self.unposted[route.source].append(route)
        else:
            messages = codec.buffers()
            route.arriving = messages, self.connections.receive(messages, self.process(route.source))

    def _release(self, peer: int, sent: _Sent, count: int) -> None:
        """Release the first `count` values sent to a peer in this step."""
        while sent.in_flight and sent.complete < count:
            sent.complete += 1
            works, _ = sent.in_flight.popleft()
            self.connections.wait(works, self.process(peer), f"finishing a send to rank {peer}")

    # While signatures are unknown

    def _announce(self, value: fx.Value, target: int, payload: Payload) -> PayloadCodec:
        """Send the value's signature to the receiver."""
        signature = self._with_optional(value, signature_of(payload))
        try:
            text = encode(signature)
        except TypeError as error:
            raise self._error(value, f"its output can't be sent: {error}") from error
        self.signatures.append((target, self.connections.send_bytes(text, self.process(target))))
        codec = self.known.sent[value, target] = PayloadCodec(signature, self.connections.device.torch_device)
        return codec

    def _receive_signature(self, source: int, purpose: str) -> None:
        """Receive the signature of the next value of a rank, and post the value's receive."""
        route = self.unposted[source].popleft()
        try:
            signature = decode(self.connections.recv_bytes(self.process(source), purpose))
        except TypeError as error:
            raise StageError(
                f"a value from rank {source} can't be decoded here: {error}", rank=self.connections.grid.rank
            ) from error
        self.known.received[route.value] = PayloadCodec(signature, self.connections.device.torch_device)
        self._post(route)

    def _with_optional(self, value: fx.Value, signature: Signature) -> Signature:
        """Return a gradient's signature with the gradients that its activation wants but no reader gave this time.

        These are optional: a later step may give them. An expanded gradient is sent whole: a later one may be dense.
        """
        if not isinstance(value, fx.Gradient):
            return signature
        leaves = list(map(_dense, signature.leaves))
        activation = self.known.received.get(fx.Activation(value.stage, value.microbatch))
        optional = []
        for i, spec in enumerate(() if activation is None else activation.signature.leaves):
            if leaves[i] is None and isinstance(spec, TensorSpec) and spec.requires_grad:
                optional.append(i)
                leaves[i] = spec._replace(requires_grad=False, strides=None)
        return Signature(None, tuple(leaves), tuple(optional))

    def _error(self, value: fx.Value, message: str) -> StageError:
        places = {field: getattr(value, field, None) for field in ("stage", "microbatch")}
        return StageError(message, rank=self.connections.grid.rank, **places)


def _dense(spec: Any) -> Any:
    return spec._replace(strides=None) if isinstance(spec, TensorSpec) and 0 in (spec.strides or ()) else spec
