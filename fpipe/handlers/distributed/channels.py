"""The channels of one program on one rank: a route for each value that travels, made when the program is compiled.

Invariants:
- a receive buffer is made when its receive is posted, and belongs to its value alone;
- a send's buffer is kept until a value received from that peer acknowledges it (fpipe/programs/completions.py), or
  until the step ends;
- a value's signature travels on the control group, ahead of it, in the first step of its kind of microbatch; where all
  equal microbatches of that step agreed on it, it never travels again, else in each step: the value's sizes depend on
  data. Both ends see the same signatures, and so decide alike;
- of the values of several tokens, the signatures of the first two of a microbatch travel, of the prompts and of one
  token: the later ones have the second one's. Each slice of the prompts has its own;
- a receive is posted where the program has it once the signatures of its value, and of those ahead of it on its edge,
  are known; else when the value is first used;
- a leading value (fpipe/programs/leading.py) has a head: a number before it on its edge. If it was sent before the
  handshake was over, with the signature that it had in the step before, that is the number of its program: the peer may
  have come to another one. Otherwise it is 0. In a graph, and on GPUs, where hosts would wait for them, there are none;
- before a rank exchanges signatures with all others, it sends the next head on each edge, for which others may wait;
- a rank leads where its own arguments have the signatures of the step before. Until the handshake is over it sends and
  receives leading values; it waits for the handshake before anything else travels;
- where the inputs of a step turn out to be wrong once all ranks have begun it, every rank begins it again: on each edge
  with leading values a head says that those before it don't count, and its receiver drops them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from fpipe import effects as fx
from fpipe.autodiff.interface import Leaves
from fpipe.devices import aside, is_capturing
from fpipe.errors import StageError, TransportError
from fpipe.handlers.calls import Step
from fpipe.handlers.distributed.connections import Connections, InFlight
from fpipe.handlers.distributed.handshake import REMEMBERED, Handshake, Names
from fpipe.handlers.distributed.replicas import ReplicaChannels
from fpipe.handlers.distributed.signature import Signature, TensorSpec, decode, encode, same, signature_of
from fpipe.handlers.distributed.wire import Payload, PayloadCodec
from fpipe.handlers.protocol import BegunAgain, Inputs
from fpipe.tables import slice_of

NOT_EARLY = 0  # the head of a value that was sent after the handshake; numbers of programs are at least 1
AGAIN = -1  # a head without a value: nothing before it counts in this step


def _nothing() -> None:
    """Do nothing once the handshake is over."""


@dataclass(eq=False, slots=True)
class RecvRoute:
    """A value that is received.

    Args:
        at, key: the places of its codec in the step.
        is_later: the codec is that of an earlier token.
        leads: it is a leading value.
        codec: in the running step, once known.
        arriving: the messages and their works, once posted. The head is the first of them, unless it was read before.
        head_is_read: in the running step; a head that is not comes with the value.
    """

    at: int
    key: tuple[fx.Value, int]
    is_later: bool = False
    leads: bool = False
    codec: PayloadCodec | None = None
    arriving: tuple[list[torch.Tensor], list[dist.Work]] | None = None
    head_is_read: bool = False

    @property
    def source(self) -> int:
        return self.key[1]


@dataclass
class SharedCodec:
    """The codec of a value of all equal microbatches.

    Args:
        step: the number of the step in which its signature first travelled, as it does for each microbatch there.
        varies: two of them had other signatures.
    """

    codec: PayloadCodec
    step: int
    varies: bool = False


@dataclass
class Codecs:
    """The codecs of values whose signatures have travelled, for all equal microbatches.

    Args:
        sent: by value, as of microbatch 0, and the rank that it is sent to.
        received: likewise, and the rank that it comes from.
    """

    sent: dict[tuple[fx.Value, int], SharedCodec] = field(default_factory=dict)
    received: dict[tuple[fx.Value, int], SharedCodec] = field(default_factory=dict)


@dataclass
class KnownStep:
    """The properties of all steps that differ only in the sizes of their microbatches.

    Args:
        codecs: of values that belong to no microbatch.
        is_compared: whether the replicas have compared their params.
    """

    codecs: Codecs = field(default_factory=Codecs)
    loss_dtype: torch.dtype | None = None
    is_compared: bool = False


@dataclass
class KnownOutput:
    """The codec of the gathered outputs of all equal microbatches, and by stage those of gradients of the batch."""

    codec: PayloadCodec | None = None
    data_gradients: dict[int, PayloadCodec] = field(default_factory=dict)


@dataclass
class _Sent:
    """The sends to one rank that are not acknowledged, in order, and how many of this step's are complete.

    Args:
        leading: how many values to this rank lead in each step.
        led: how many of them were sent in this step.
        head: that of the next one, and its work, if it was sent ahead of its value.
    """

    in_flight: deque[InFlight] = field(default_factory=deque)
    complete: int = 0
    leading: int = 0
    led: int = 0
    head: InFlight | None = None


class Channels:
    """Sends and receives values. The handshake of a step precedes its first value, but for those that lead.

    Args:
        receipts: for each value received, how many of this rank's sends to its sender are then complete.
        stateful: some stage has state, or carries, so that values of a microbatch depend on those before it.
        slices: of each microbatch.
        prefills: slices of the prompts of each.
        leading: the values that may travel before the handshake is over, with their edges.
        replicas: gathers and scatters, where there are replicas.
        digest: returns what every replica must have alike in this step, with values of params or without.
        has_compared_values: a step has compared the values of params.
        agreed: is called once the handshake is over.
        early: receives that came before the end of the handshake, which is when they are posted, unless they lead; None
            after it.
        unposted: by rank, receives that wait for a signature: that of the first one.
        codecs: in the running step, by microbatch, or slice of one; those of values that belong to none are the last.
            Until the handshake is over, those of the step before.
        codecs_before: those of the step before.
        has_heads: leading values have heads in the running step.
        renew: see `Inputs`, of the running step.
        leads: they may travel now.
        void: sends that don't count in the running step, with their ranks.
        taken_back: the ranks that have said so of theirs, until this one has dropped them.
        step: the number of the running step, among those of this program.
        learned: that of the last step that has learned something, among all steps of the handler.
    """

    receives_copies = True

    def __init__(
        self,
        connections: Connections,
        handshake: Handshake,
        receipts: Mapping[fx.Value, int],
        stateful: bool = False,
        slices: int = 1,
        prefills: int = 1,
        replicas: Callable[[Callable[[], None]], ReplicaChannels] | None = None,
        leading: Collection[tuple[fx.Value, tuple[int, int]]] = (),
    ) -> None:
        self.connections, self.handshake, self.receipts = connections, handshake, receipts
        self.process = connections.grid.process
        self.replicas = None if replicas is None else replicas(self.agree)
        self.digest: Callable[[bool], dict[str, str]] = lambda has_values: {}
        self.has_compared_values = False
        self.agreed: Callable[[], None] = _nothing
        self.receives: dict[tuple[fx.Value, int], RecvRoute] = {}
        self.stateful, self.slices, self.prefills, self.leading = stateful, slices, prefills, leading
        self.step, self.leads, self.has_heads = 0, False, False
        self.renew: Callable[[], Mapping[str, Any] | None] = _nothing
        handshake.steps.learners[handshake.program], handshake.before_exchange = self, self._begin_exchange
        self.forget()
        self.sent: defaultdict[int, _Sent] = defaultdict(_Sent)
        self.unposted: defaultdict[int, deque[RecvRoute]] = defaultdict(deque)
        self.early: list[RecvRoute] | None = []
        self.signatures: list[tuple[int, InFlight]] = []
        self.void: list[tuple[int, InFlight]] = []
        self.taken_back: set[int] = set()

    def forget(self) -> None:
        """Forget all signatures."""
        self.handshake.forget()
        # All ranks look up the same entries in the same order, so that they forget the same ones.
        self._step_of = lru_cache(REMEMBERED)(lambda names: KnownStep())
        self._codecs_of = lru_cache(REMEMBERED)(lambda key: Codecs())
        self._output_of = lru_cache(REMEMBERED)(lambda key: KnownOutput())
        self.names: list[Names] = []
        self.known, self.codecs = KnownStep(), list[Codecs]()
        self.codecs_before = self.codecs
        self.learned = 0

    def has_learned(self) -> None:
        """Note that this step learns what a failure makes all ranks forget."""
        self.learned = self.handshake.steps.number

    # Compiling

    def sender(self, value: fx.Value, source: int, target: int) -> Callable[[Any], None]:
        """Return a function that posts the value's payload."""
        sent, (at, key, is_later) = self.sent[target], self._place(value, target)
        process, leads = self.process(target), (value, (source, target)) in self.leading
        sent.leading += leads

        def send(payload: Payload) -> None:
            codec = self._known(self.codecs[at].sent.get(key), is_later) if leads and self._may_lead() else None
            messages = None if codec is None else codec.messages(payload)
            is_early = messages is not None
            if messages is None:
                self.agree()
                codec = self._known(self.codecs[at].sent.get(key), is_later) or self._announce(value, target, payload)
                messages = codec.messages(payload)
            if messages is None:
                assert codec is not None
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
            if leads and self.has_heads and sent.head is None:
                messages = [_head(self.handshake.program if is_early else NOT_EARLY), *messages]
            works = self.connections.send(messages, process)
            if sent.head is not None:
                works[:0], head = sent.head
                messages = [*head, *messages]
            sent.in_flight.append((works, messages))
            sent.led, sent.head = sent.led + leads, None

        return send

    def receiver(
        self, value: fx.Value, source: int, target: int, by: fx.Effect
    ) -> tuple[Callable[[], None], Callable[[], Payload]]:
        """Return two functions: one posts the value's receive, the other waits for it where `by` needs it."""
        purpose = f"waiting for {value} from rank {source}, which {by} needs"
        route = RecvRoute(*self._place(value, source), (value, (source, target)) in self.leading)
        receipt, sent = self.receipts.get(value, 0), self.sent[source]
        self.receives[value, source] = route
        process = self.process(source)

        def post() -> None:
            if self.early is not None:
                self.early.append(route)
            else:
                self._post(route)

        def wait() -> Payload:
            if self.early is not None and route.arriving is None:
                self._lead(route, purpose)
            while route.arriving is None:
                self._advance(source, purpose)
            assert route.codec is not None
            messages, works = route.arriving
            self.connections.wait(works, process, purpose)
            route.arriving = None
            if self._awaits_head(route):
                messages = messages[1:]
            if receipt > sent.complete:
                self._release(source, sent, receipt)
            return route.codec.payload(messages)

        return post, wait

    # A step

    def begin(self, inputs: Inputs, has_loss: bool) -> None:
        """Begin the handshake of a step; does not wait."""
        self._clear()
        steps, self.codecs_before = self.handshake.steps, self.codecs
        self.renew = inputs.renew or _nothing
        self.has_heads = bool(self.leading) and not is_capturing()
        may_lead = self.has_heads and bool(self.names) and steps.follows_a_result
        self.leads = self.handshake.begin(inputs, has_loss, may_lead)

    def scatter(self, stage: int, rank: int) -> tuple[Callable[[Step], None], Callable[[Step], Callable[[], Leaves]]]:
        assert self.replicas is not None
        return self.replicas.scatter(stage, rank)

    def gather(self, stage: int, rank: int) -> tuple[Callable[[Step], Leaves], Callable[[Step], Leaves]] | None:
        return None if self.replicas is None else self.replicas.gather(stage, rank)

    def release(self, stage: int, step: Step) -> None:
        if self.replicas is not None:
            self.replicas.release(stage, step)

    def agree(self) -> None:
        """Wait for the handshake; only the first call of a step does anything.

        Raises:
            BegunAgain: all ranks begin the step again, for which `agreed` is then to be called.
        """
        if self.early is None:
            return
        early, self.early, self.leads = self.early, None, False
        self.step += 1
        self.handshake.wait()
        if self.handshake.names != self.names:
            self._look_up(self.handshake.names)
        if self.replicas is not None and not self.known.is_compared:
            self.handshake.compare(self.digest(not self.has_compared_values))
            self.known.is_compared = self.has_compared_values = True
        if self.handshake.steps.is_provisional and (changes := self.renew()) is not None:
            self._take_back()
            raise BegunAgain(changes)
        for route in early:
            self._post(route)
        self.agreed()

    def _look_up(self, names: list[Names]) -> None:
        """Find the signatures that are known in a step of these names, of each replica."""
        self.has_learned()
        self.names = names
        self.known = self._step_of(tuple(each.step for each in names))
        own = self._keys(self.connections.grid.replica)
        self.codecs = [*map(self._codecs_of, own), self.known.codecs]

    def _keys(self, replica: int) -> Sequence[Hashable]:
        """Return keys of a replica's microbatches, equal where their values have equal signatures."""
        step, microbatches = self.names[replica]
        if self.stateful:
            return list(accumulate(microbatches, lambda *both: hash(both), initial=hash(step)))[1:]
        return [(step, each) for each in microbatches]

    def outputs_of(self, replica: int) -> list[KnownOutput]:
        """Return the known outputs of each microbatch of a replica, for the running step."""
        return list(map(self._output_of, self._keys(replica)))

    def begin_again_after(self, error: Exception) -> None:
        """Begin the step again if all ranks do: this one may have failed for its inputs, which were not the right ones.

        Raises:
            BegunAgain: see `agree`.
            TransportError: the right ones can't be had.
        """
        steps = self.handshake.steps
        if self.early is None or not (steps.has_met and steps.is_provisional):
            return
        try:
            is_over = self.renew() is None
        except TransportError as failed:
            raise failed from error
        if not is_over:
            self.agree()

    def end(self) -> None:
        """Finish a step: wait for all sends."""
        for peer, (works, _) in self.signatures:
            self.connections.wait_for_control(works, self.process(peer), f"sending a signature to rank {peer}")
        for peer, sent in self.sent.items():
            self._release(peer, sent, sent.complete + len(sent.in_flight))
        for peer, (works, _) in self.void:
            self.connections.wait(works, self.process(peer), f"finishing a send to rank {peer} that does not count")

    def clear(self) -> None:
        """Drop everything that refers to a step: a pending work would keep its connection open."""
        self.handshake.clear()
        self.digest = lambda has_values: {}
        if self.replicas is not None:
            self.replicas.clear()
        self._clear()

    def _clear(self) -> None:
        self.early, self.signatures, self.void, self.leads, self.renew = [], [], [], False, _nothing
        self.unposted.clear()
        self._forget_values()

    def _forget_values(self) -> None:
        """Drop what is on its way."""
        self.taken_back.clear()
        for route in self.receives.values():
            route.codec = route.arriving = None
            route.head_is_read = False
        for sent in self.sent.values():
            sent.in_flight.clear()
            sent.complete, sent.led, sent.head = 0, 0, None

    def _post(self, route: RecvRoute) -> None:
        """Post a receive, or put it off until its signature, or one ahead of it, has come."""
        waiting = self.unposted[route.source]
        waiting.append(route)
        if len(waiting) == 1:
            self._post_known(waiting)

    def _post_known(self, waiting: deque[RecvRoute]) -> None:
        """Post the receives up to the first whose signature is not known."""
        while waiting:
            route = waiting[0]
            if self._awaits_head(route) and self.codecs is not self.codecs_before:
                return  # the head says which codec the value has
            shared = self.codecs[route.at].received.get(route.key)
            route.codec = route.codec or self._known(shared, route.is_later)
            if route.codec is None:
                return
            waiting.popleft()
            self._receive(route)

    def _receive(self, route: RecvRoute) -> None:
        """Post the receive of a value whose codec is known, and of its head."""
        assert route.codec is not None
        messages = route.codec.buffers()
        if self._awaits_head(route):
            messages = [_head(), *messages]
        route.arriving = messages, self.connections.receive(messages, self.process(route.source))

    # Before the handshake is over

    def meet(self) -> None:
        """Wait for the handshake after a peer is lost: where a rank refuses the step, it ends the waits of others."""
        if self.leading and self.early is not None:
            self.agree()

    def _begin_exchange(self) -> None:
        """Send the next head on each edge before all ranks exchange signatures: a rank that leads may wait for it."""
        self.has_learned()
        self.handshake.steps.is_led |= self.has_heads  # the step may yet be refused
        for target, sent in self.sent.items():
            if self.has_heads and sent.led < sent.leading and sent.head is None:
                head = [_head()]
                sent.head = self.connections.send(head, self.process(target)), head

    def _awaits_head(self, route: RecvRoute) -> bool:
        """Return whether a value has a head that this rank has not read."""
        return self.has_heads and route.leads and not route.head_is_read

    def _take_back(self) -> None:
        """Take back the values that have led in this step, and drop those of the other ranks."""
        for target, sent in self.sent.items():
            self.void += [(target, each) for each in (*sent.in_flight, *([] if sent.head is None else [sent.head]))]
            if self.has_heads and sent.leading:
                head = [_head(AGAIN)]
                self.void.append((target, (self.connections.send(head, self.process(target)), head)))
        sources = defaultdict[int, list[RecvRoute]](list)
        for route in self.receives.values():  # in the order of the sends of each rank
            if route.leads and self.has_heads:
                sources[route.source].append(route)
        for source, routes in sources.items():
            self._drop_led(source, routes)
        self._forget_values()

    def _drop_led(self, source: int, routes: list[RecvRoute]) -> None:
        """Receive what a rank has sent of leading values before it took them back."""
        purpose, process = f"taking back the values that rank {source} sent first", self.process(source)
        for route in routes:
            if route.arriving is not None:
                self.connections.wait(route.arriving[1], process, purpose)
        unread = deque(route for route in routes if not route.head_is_read)
        while source not in self.taken_back and (head := self._read_head(source, purpose)) != AGAIN:
            if head == NOT_EARLY:
                continue  # sent ahead of a value that does not come
            route = unread.popleft()
            codec = self._known(self.codecs_before[route.at].received.get(route.key), route.is_later)
            assert codec is not None  # or the sender would not have led
            messages = codec.buffers()
            self.connections.wait(self.connections.receive(messages, process), process, purpose)

    def _may_lead(self) -> bool:
        """Return whether this rank sends and receives leading values now: until the numbers of all ranks are there."""
        return self.leads and not self.handshake.is_over

    def _lead(self, route: RecvRoute, purpose: str) -> None:
        """Receive the values of an edge up to one, as long as they are sent early; else wait for the handshake."""
        while self._may_lead() and route.arriving is None:
            assert self.early is not None
            first = next(each for each in self.early if each.source == route.source)
            first.codec = self._known(self.codecs[first.at].received.get(first.key), first.is_later)
            if first.codec is None or not first.leads or not self._is_early(first, purpose):
                first.codec = None
                break
            self.early.remove(first)
            self._receive(first)
        if route.arriving is None:
            self.agree()

    def _is_early(self, route: RecvRoute, purpose: str) -> bool:
        """Wait for the head of a value; return whether it was sent before the end of the handshake."""
        head = self._read_head(route.source, purpose)
        route.head_is_read = True
        if head == AGAIN:
            self.taken_back.add(route.source)
        return head == self.handshake.program

    def _read_head(self, source: int, purpose: str) -> int:
        head, process = _head(), self.process(source)
        self.connections.wait(self.connections.receive([head], process), process, purpose)
        with aside():
            return int(head)

    def _advance(self, source: int, purpose: str) -> None:
        """Receive the head or the signature for which the next value of a rank waits, and post what waits for it."""
        route = self.unposted[source][0]
        if not self._awaits_head(route) or self.codecs is self.codecs_before:
            self._receive_signature(source, purpose)
            return
        if self._is_early(route, purpose):
            shared = self.codecs_before[route.at].received.get(route.key)
            route.codec = self._known(shared, route.is_later)
        self._post_known(self.unposted[source])

    def _release(self, peer: int, sent: _Sent, count: int) -> None:
        """Release the first `count` values sent to a peer in this step."""
        while sent.in_flight and sent.complete < count:
            sent.complete += 1
            works, _ = sent.in_flight.popleft()
            self.connections.wait(works, self.process(peer), f"finishing a send to rank {peer}")

    def _known(self, shared: SharedCodec | None, is_later: bool) -> PayloadCodec | None:
        """Return a codec whose signature does not travel in this step, or not any more."""
        if shared is None or shared.varies or (shared.step == self.step and not is_later):
            return None
        return shared.codec

    # While signatures are unknown

    def _share(self, codecs: dict[tuple[fx.Value, int], SharedCodec], key: Any, signature: Signature) -> PayloadCodec:
        """Return the codec of a signature that travels: the shared one, if it has the same."""
        shared = codecs.get(key)
        if shared is not None and same(shared.codec.signature, signature):
            return shared.codec
        codec = PayloadCodec(signature, self.connections.device.torch_device)
        if shared is None or not shared.varies:
            self.has_learned()
        if shared is None:
            codecs[key] = SharedCodec(codec, self.step)
        else:
            shared.varies = True
        return codec

    def _announce(self, value: fx.Value, target: int, payload: Payload) -> PayloadCodec:
        """Send the value's signature to the receiver."""
        signature = self._with_optional(value, target, signature_of(payload))
        try:
            text = encode(signature)
        except TypeError as error:
            raise self._error(value, f"its output can't be sent: {error}") from error
        self.signatures.append((target, self.connections.send_bytes(text, self.process(target))))
        at, key, _ = self._place(value, target)
        return self._share(self.codecs[at].sent, key, signature)

    def _receive_signature(self, source: int, purpose: str) -> None:
        """Receive the signature of the next value of a rank, and post what waits for it."""
        waiting = self.unposted[source]
        try:
            signature = decode(self.connections.recv_bytes(self.process(source), purpose))
        except TypeError as error:
            raise StageError(
                f"a value from rank {source} can't be decoded here: {error}", rank=self.connections.grid.rank
            ) from error
        route = waiting[0]
        route.codec = self._share(self.codecs[route.at].received, route.key, signature)
        self._post_known(waiting)

    def _with_optional(self, value: fx.Value, target: int, signature: Signature) -> Signature:
        """Return a gradient's signature with the gradients that its activation wants but no reader gave this time.

        These are optional: a later step may give them. An expanded gradient is sent whole: a later one may be dense.
        """
        if not isinstance(value, fx.Gradient):
            return signature
        leaves = list(map(_dense, signature.leaves))
        route = self.receives.get((fx.Activation(value.stage, value.microbatch, value.slice), target))
        activation = None if route is None else route.codec
        optional = []
        for i, spec in enumerate(() if activation is None else activation.signature.leaves):
            if leaves[i] is None and isinstance(spec, TensorSpec) and spec.requires_grad:
                optional.append(i)
                leaves[i] = spec._replace(requires_grad=False, strides=None, cut=None)
        return Signature(None, tuple(leaves), tuple(optional))

    def _place(self, value: fx.Value, rank: int) -> tuple[int, tuple[fx.Value, int], bool]:
        """Return the places of a value's codec: the number of its slice, -1 if it has no microbatch, and the key there.

        The third is whether the codec is that of an earlier token.
        """
        m: int = getattr(value, "microbatch", -1)
        if m < 0:
            return m, (value, rank), False
        token = getattr(value, "token", 0)
        first: dict[str, Any] = {"microbatch": 0} | ({"token": self.prefills} if token > self.prefills else {})
        return m * self.slices + slice_of(value), (replace(value, **first), rank), token > self.prefills

    def _error(self, value: fx.Value, message: str) -> StageError:
        places = {field: getattr(value, field, None) for field in ("stage", "microbatch")}
        return StageError(message, rank=self.connections.grid.rank, **places)


def _head(program: int = NOT_EARLY) -> torch.Tensor:
    with aside():
        return torch.tensor([program])


def _dense(spec: Any) -> Any:
    return spec._replace(strides=None) if isinstance(spec, TensorSpec) and 0 in (spec.strides or ()) else spec
