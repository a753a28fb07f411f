"""The channels of one program on one rank: a route for each value that travels, found when it is compiled.

Invariants:
- a receive buffer is made when posted, and belongs to its value; a send is held until it is complete, which
  the values that come back tell (fpipe/programs/completions.py), else the end of the step;
- while signatures are unknown, each value is preceded by its own on the control group, and its receive is
  posted only when it is used; afterwards receives are posted where the program says.
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
from fpipe.handlers.distributed.connections import Held, Links
from fpipe.handlers.distributed.handshake import REMEMBERED, Agreement
from fpipe.handlers.distributed.signature import Signature, TensorSpec, decode, encode, signature_of
from fpipe.handlers.distributed.wire import Payload, Wire
from fpipe.handlers.protocol import Inputs


@dataclass(eq=False, slots=True)
class Outgoing:
    """A value on its way to a rank; `wire` is None while its signature is unknown."""

    value: fx.Value
    target: int
    wire: Wire | None = None


@dataclass(eq=False, slots=True)
class Incoming:
    """A value that comes from a rank.

    Args:
        receipt: how many values sent to that rank are complete once it is there.
        arriving: the messages and their works, once posted.
    """

    value: fx.Value
    source: int
    receipt: int
    purpose: str
    wire: Wire | None = None
    arriving: tuple[list[torch.Tensor], list[dist.Work]] | None = None


@dataclass
class Remembered:
    """What a step of known signatures needs no word about.

    Args:
        wires: of each outgoing value, then of each incoming one.
    """

    wires: list[Wire | None]
    loss_dtype: torch.dtype | None


@dataclass
class _Sent:
    """What has been sent to one rank, in order, as far as it is not known to be complete."""

    held: deque[Held] = field(default_factory=deque)
    complete: int = 0


class Routes:
    """Values over links. The ranks agree on what travels before the first one does.

    Args:
        receipts: for each value received, how many of this rank's values to its sender are then complete.
    """

    def __init__(self, links: Links, agreement: Agreement, receipts: Mapping[fx.Value, int]) -> None:
        self.links, self.agreement, self.receipts = links, agreement, receipts
        self.outgoing: list[Outgoing] = []
        self.incoming: list[Incoming] = []
        self.by_value: dict[fx.Value, Incoming] = {}
        self.steps: OrderedDict[tuple[int, int], Remembered] = OrderedDict()
        self.loss_dtype: torch.dtype | None = None
        self.laid: Remembered | None = None
        self.sent: defaultdict[int, _Sent] = defaultdict(_Sent)
        self.unposted: defaultdict[int, deque[Incoming]] = defaultdict(deque)
        self.early: list[Incoming] | None = []
        self.told: list[tuple[int, Held]] = []
        self.learning = False

    @property
    def routes(self) -> list[Outgoing | Incoming]:
        return [*self.outgoing, *self.incoming]

    # Compiling

    def sender(self, value: fx.Value, source: int, target: int) -> Callable[[Any], None]:
        """A function that posts the value's payload."""
        route = Outgoing(value, target)
        self.outgoing.append(route)
        sent = self.sent[target]

        def send(payload: Payload) -> None:
            if self.early is not None:
                self.agree()
            wire = route.wire
            if wire is None:
                wire = self._announce(route, payload)
            messages = wire.messages(payload)
            if messages is None:
                raise self._unlike(route, wire, payload)
            for message in messages:
                if message.device.type != self.links.device.type:
                    raise self._elsewhere(route, message)
            sent.held.append((self.links.send(messages, target), messages))

        return send

    def receiver(
        self, value: fx.Value, source: int, target: int, by: fx.Effect
    ) -> tuple[Callable[[], None], Callable[[], Payload]]:
        """Functions that post the value's receive, and that wait for it where `by` needs it."""
        purpose = f"waiting for {value} from rank {source}, which {by} needs"
        route = Incoming(value, source, self.receipts.get(value, 0), purpose)
        self.incoming.append(route)
        self.by_value[value] = route
        sent = self.sent[source]

        def post() -> None:
            if self.early is not None:
                self.early.append(route)
            elif route.wire is None:
                self.unposted[source].append(route)
            else:
                self._post(route, route.wire)

        def take() -> Payload:
            if self.early is not None:
                self.agree()
            while route.arriving is None:
                self._hear(source, purpose)
            assert route.wire is not None
            messages, works = route.arriving
            self.links.wait(works, source, purpose)
            route.arriving = None
            if route.receipt > sent.complete:
                self._release(source, sent, route.receipt)
            return route.wire.payload(messages)

        return post, take

    # A step

    def begin(self, inputs: Inputs) -> None:
        """Say what this rank brings to the step; nothing is waited for."""
        self._clear()
        self.agreement.begin(inputs)

    def agree(self) -> None:
        """Wait for what all ranks said, once a step."""
        if self.early is None:
            return
        early, self.early = self.early, None
        self.agreement.wait()
        name = self.agreement.name
        if name in self.steps:
            self.steps.move_to_end(name)
        known = self.steps.get(name)
        self.learning = known is None
        self._lay(known or Remembered([None] * len(self.routes), None))
        for route in early:
            if route.wire is None:
                self.unposted[route.source].append(route)
            else:
                self._post(route, route.wire)

    def _lay(self, step: Remembered) -> None:
        """Give each route its wire."""
        self.loss_dtype = step.loss_dtype
        if step is not self.laid:
            for route, wire in zip(self.routes, step.wires, strict=True):
                route.wire = wire
        self.laid = step

    def end(self) -> None:
        """Finish a step: all sends are complete, and its signatures are known from now on."""
        for peer, (works, _) in self.told:
            self.links.wait(works, peer, f"telling rank {peer} what comes")
        for peer, sent in self.sent.items():
            self._release(peer, sent, sent.complete + len(sent.held))
        if self.learning:
            wires = [route.wire for route in self.routes]
            self.steps[self.agreement.name] = self.laid = Remembered(wires, self.loss_dtype)
            if len(self.steps) > REMEMBERED:
                self.steps.popitem(last=False)

    def clear(self) -> None:
        """Give up what a step that failed has left: a pending work would keep its connection open."""
        self.agreement.works = []
        self._clear()

    def _clear(self) -> None:
        self.early, self.told, self.learning = [], [], False
        self.unposted.clear()
        for route in self.incoming:
            route.arriving = None
        for sent in self.sent.values():
            sent.held.clear()
            sent.complete = 0

    def _post(self, route: Incoming, wire: Wire) -> None:
        messages = wire.buffers()
        route.arriving = messages, self.links.receive(messages, route.source)

    def _release(self, peer: int, sent: _Sent, count: int) -> None:
        """Give up the first `count` values sent to a peer in this step."""
        while sent.held and sent.complete < count:
            sent.complete += 1
            works, _ = sent.held.popleft()
            self.links.wait(works, peer, f"finishing a send to rank {peer}")

    # While signatures are unknown

    def _announce(self, route: Outgoing, payload: Payload) -> Wire:
        """Tell the receiver what will come."""
        value, target = route.value, route.target
        signature = self._wanted(value, signature_of(payload))
        try:
            text = encode(signature)
        except TypeError as error:
            raise StageError(f"its output can't travel: {error}", rank=self.links.rank, stage=value.stage) from error
        self.told.append((target, self.links.tell(text, target)))
        route.wire = Wire(signature, self.links.device)
        return route.wire

    def _hear(self, source: int, purpose: str) -> None:
        """Receive what comes next from a rank: its signature, then the value."""
        route = self.unposted[source].popleft()
        try:
            signature = decode(self.links.hear(source, purpose))
        except TypeError as error:
            raise StageError(
                f"a value from rank {source} can't be understood here: {error}", rank=self.links.rank
            ) from error
        route.wire = Wire(signature, self.links.device)
        self._post(route, route.wire)

    def _wanted(self, value: fx.Value, signature: Signature) -> Signature:
        """A gradient's signature with what its activation wants and no reader gave: it may be given later.

        An expanded gradient is sent whole, since another step's may be dense.
        """
        if not isinstance(value, fx.Gradient):
            return signature
        signature = Signature(None, tuple(map(_whole, signature.leaves)))
        source = fx.Activation(value.stage, value.microbatch)
        route = self.by_value.get(source)
        activation = None if route is None else route.wire
        if activation is None:
            return signature
        leaves = activation.signature.leaves
        wants = [spec if isinstance(spec, TensorSpec) and spec.requires_grad else None for spec in leaves]
        pairs = list(zip(signature.leaves, wants, strict=True))
        optional = tuple(i for i, (leaf, want) in enumerate(pairs) if leaf is None and want is not None)
        filled = tuple(
            want._replace(requires_grad=False, strides=None) if leaf is None and want is not None else leaf
            for leaf, want in pairs
        )
        return Signature(None, filled, optional)

    # What is wrong with a value

    def _unlike(self, route: Outgoing, wire: Wire, payload: Payload) -> StageError:
        value = route.value
        return StageError(
            f"{value} is {signature_of(payload).text()}, where equal inputs gave {wire.signature.text()} before: what "
            "a stage puts out may depend on its inputs' shapes and plain values, not on their data",
            rank=self.links.rank,
            stage=value.stage,
            microbatch=getattr(value, "microbatch", None),
        )

    def _elsewhere(self, route: Outgoing, message: torch.Tensor) -> StageError:
        return StageError(
            f"{route.value} is on {message.device}, and this handler moves values on {self.links.device}",
            rank=self.links.rank,
            stage=route.value.stage,
        )


def _whole(spec: Any) -> Any:
    return spec._replace(strides=None) if isinstance(spec, TensorSpec) and 0 in (spec.strides or ()) else spec
