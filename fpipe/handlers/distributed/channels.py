"""The channels of one program on one rank: a route for each value that travels, made when the program is compiled.

Invariants:
- a receive buffer is made when its receive is posted, and belongs to its value alone;
- a send's buffer is kept until a value received from that peer acknowledges it (fpipe/programs/completions.py), or
  until the step ends;
- in a step of unknown signatures, each value's signature travels before it on the control group, and its receive is
  posted when it is first used; in later steps receives are posted where the program has them.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fpipe import effects as fx
from fpipe.errors import StageError
from fpipe.handlers.distributed.connections import Connections, InFlight
from fpipe.handlers.distributed.handshake import REMEMBERED, Handshake
from fpipe.handlers.distributed.signature import Signature, TensorSpec, decode, encode, signature_of
from fpipe.handlers.distributed.wire import Payload, PayloadCodec
from fpipe.handlers.protocol import Inputs


@dataclass(eq=False, slots=True)
class SendRoute:
    """A value that is sent to a rank; `codec` is None while its signature is unknown."""

    value: fx.Value
    target: int
    codec: PayloadCodec | None = None


@dataclass(eq=False, slots=True)
class RecvRoute:
    """A value that is received from a rank.

    Args:
        receipt: how many values sent to that rank are complete when this one has arrived.
        arriving: the messages and their works, once posted.
    """

    value: fx.Value
    source: int
    receipt: int
    purpose: str
    codec: PayloadCodec | None = None
    arriving: tuple[list[torch.Tensor], list[dist.Work]] | None = None


@dataclass
class KnownStep:
    """What the ranks know of a step whose signatures have travelled once.

    Args:
        codecs: of each route: first the sends, then the receives.
    """

    codecs: list[PayloadCodec | None]
    loss_dtype: torch.dtype | None


@dataclass
class _Sent:
    """The sends to one rank that are not acknowledged, in order, and how many of this step's are complete."""

    in_flight: deque[InFlight] = field(default_factory=deque)
    complete: int = 0


class Channels:
    """Sends and receives values. The handshake of a step precedes its first value.

    Args:
        receipts: for each value received, how many of this rank's sends to its sender are then complete.
    """

    def __init__(self, connections: Connections, handshake: Handshake, receipts: Mapping[fx.Value, int]) -> None:
        self.connections, self.handshake, self.receipts = connections, handshake, receipts
        self.sends: list[SendRoute] = []
        self.receives: list[RecvRoute] = []
        self.by_value: dict[fx.Value, RecvRoute] = {}
        self.steps: OrderedDict[tuple[int, int], KnownStep] = OrderedDict()
        self.loss_dtype: torch.dtype | None = None
        self.current: KnownStep | None = None
        self.sent: defaultdict[int, _Sent] = defaultdict(_Sent)
        self.unposted: defaultdict[int, deque[RecvRoute]] = defaultdict(deque)
        self.early: list[RecvRoute] | None = []
        self.signatures: list[tuple[int, InFlight]] = []
        self.learning = False

    @property
    def routes(self) -> list[SendRoute | RecvRoute]:
        return [*self.sends, *self.receives]

    # Compiling

    def sender(self, value: fx.Value, source: int, target: int) -> Callable[[Any], None]:
        """Return a function that posts the value's payload."""
        route = SendRoute(value, target)
        self.sends.append(route)
        sent = self.sent[target]

        def send(payload: Payload) -> None:
            if self.early is not None:
                self.agree()
            codec = route.codec
            if codec is None:
                codec = self._announce(route, payload)
            messages = codec.messages(payload)
            if messages is None:
                raise self._changed(route, codec, payload)
            for message in messages:
                if message.device.type != self.connections.device.type:
                    raise self._misplaced(route, message)
            sent.in_flight.append((self.connections.send(messages, target), messages))

        return send

    def receiver(
        self, value: fx.Value, source: int, target: int, by: fx.Effect
    ) -> tuple[Callable[[], None], Callable[[], Payload]]:
        """Return two functions: one posts the value's receive, the other waits for it where `by` needs it."""
        purpose = f"waiting for {value} from rank {source}, which {by} needs"
        route = RecvRoute(value, source, self.receipts.get(value, 0), purpose)
        self.receives.append(route)
        self.by_value[value] = route
        sent = self.sent[source]

        def post() -> None:
            if self.early is not None:
                self.early.append(route)
            elif route.codec is None:
                self.unposted[source].append(route)
            else:
                self._post(route, route.codec)

        def wait() -> Payload:
            if self.early is not None:
                self.agree()
            while route.arriving is None:
                self._receive_signature(source, purpose)
            assert route.codec is not None
            messages, works = route.arriving
            self.connections.wait(works, source, purpose)
            route.arriving = None
            if route.receipt > sent.complete:
                self._release(source, sent, route.receipt)
            return route.codec.payload(messages)

        return post, wait

    # A step

    def begin(self, inputs: Inputs) -> None:
        """Begin the handshake of a step; does not wait."""
        self._clear()
        self.handshake.begin(inputs)

    def agree(self) -> None:
        """Wait for the handshake; only the first call of a step does anything."""
        if self.early is None:
            return
        early, self.early = self.early, None
        self.handshake.wait()
        name = self.handshake.name
        if name in self.steps:
            self.steps.move_to_end(name)
        known = self.steps.get(name)
        self.learning = known is None
        self._set_codecs(known or KnownStep([None] * len(self.routes), None))
        for route in early:
            if route.codec is None:
                self.unposted[route.source].append(route)
            else:
                self._post(route, route.codec)

    def _set_codecs(self, step: KnownStep) -> None:
        self.loss_dtype = step.loss_dtype
        if step is not self.current:
            for route, codec in zip(self.routes, step.codecs, strict=True):
                route.codec = codec
        self.current = step

    def end(self) -> None:
        """Finish a step: wait for all sends, and remember its signatures."""
        for peer, (works, _) in self.signatures:
            self.connections.wait(works, peer, f"sending a signature to rank {peer}")
        for peer, sent in self.sent.items():
            self._release(peer, sent, sent.complete + len(sent.in_flight))
        if self.learning:
            codecs = [route.codec for route in self.routes]
            self.steps[self.handshake.name] = self.current = KnownStep(codecs, self.loss_dtype)
            if len(self.steps) > REMEMBERED:
                self.steps.popitem(last=False)

    def clear(self) -> None:
        """Drop everything that a failed step left: a pending work would keep its connection open."""
        self.handshake.works = []
        self._clear()

    def _clear(self) -> None:
        self.early, self.signatures, self.learning = [], [], False
        self.unposted.clear()
        for route in self.receives:
            route.arriving = None
        for sent in self.sent.values():
            sent.in_flight.clear()
            sent.complete = 0

    def _post(self, route: RecvRoute, codec: PayloadCodec) -> None:
        messages = codec.buffers()
        route.arriving = messages, self.connections.receive(messages, route.source)

    def _release(self, peer: int, sent: _Sent, count: int) -> None:
        """Release the first `count` values sent to a peer in this step."""
        while sent.in_flight and sent.complete < count:
            sent.complete += 1
            works, _ = sent.in_flight.popleft()
            self.connections.wait(works, peer, f"finishing a send to rank {peer}")

    # While signatures are unknown

    def _announce(self, route: SendRoute, payload: Payload) -> PayloadCodec:
        """Send the value's signature to the receiver."""
        value, target = route.value, route.target
        signature = self._with_optional(value, signature_of(payload))
        try:
            text = encode(signature)
        except TypeError as error:
            raise StageError(
                f"its output can't be sent: {error}", rank=self.connections.rank, stage=getattr(value, "stage", None)
            ) from error
        self.signatures.append((target, self.connections.send_bytes(text, target)))
        route.codec = PayloadCodec(signature, self.connections.device)
        return route.codec

    def _receive_signature(self, source: int, purpose: str) -> None:
        """Receive the signature of the next value of a rank, and post the value's receive."""
        route = self.unposted[source].popleft()
        try:
            signature = decode(self.connections.recv_bytes(source, purpose))
        except TypeError as error:
            raise StageError(
                f"a value from rank {source} can't be decoded here: {error}", rank=self.connections.rank
            ) from error
        route.codec = PayloadCodec(signature, self.connections.device)
        self._post(route, route.codec)

    def _with_optional(self, value: fx.Value, signature: Signature) -> Signature:
        """Return a gradient's signature with the gradients that its activation wants but no reader gave this time.

        These are optional: a later step may give them. An expanded gradient is sent whole: a later one may be dense.
        """
        if not isinstance(value, fx.Gradient):
            return signature
        signature = Signature(None, tuple(map(_dense, signature.leaves)))
        route = self.by_value.get(fx.Activation(value.stage, value.microbatch))
        if route is None or route.codec is None:
            return signature
        optional, leaves = [], list(signature.leaves)
        for i, spec in enumerate(route.codec.signature.leaves):
            if leaves[i] is None and isinstance(spec, TensorSpec) and spec.requires_grad:
                optional.append(i)
                leaves[i] = spec._replace(requires_grad=False, strides=None)
        return Signature(None, tuple(leaves), tuple(optional))

    # Errors

    def _changed(self, route: SendRoute, codec: PayloadCodec, payload: Payload) -> StageError:
        value = route.value
        return StageError(
            f"{value} is {signature_of(payload).text()}, where equal inputs gave {codec.signature.text()} before: the "
            "structure of a stage's output may depend on its inputs' shapes and plain values, not on their data",
            rank=self.connections.rank,
            stage=getattr(value, "stage", None),
            microbatch=getattr(value, "microbatch", None),
        )

    def _misplaced(self, route: SendRoute, message: torch.Tensor) -> StageError:
        return StageError(
            f"{route.value} is on {message.device}, and this handler moves values on {self.connections.device}",
            rank=self.connections.rank,
            stage=getattr(route.value, "stage", None),
        )


def _dense(spec: Any) -> Any:
    return spec._replace(strides=None) if isinstance(spec, TensorSpec) and 0 in (spec.strides or ()) else spec
