"""Connections over torch.distributed: one two-rank group for each directed edge, and a control group on the CPU.

Posts never wait; `wait` does: on CUDA the stream waits, on the CPU the host. Messages of one connection arrive in
order; there is no order between two connections.

Invariants:
- a host's wait is known to the watchdog, which ends it (liveness.py);
- all ranks make the same connections, in one order, or none of them;
- after a failed step the groups are cut on which it has posted something, and made again under names of a new epoch.
"""

from __future__ import annotations

import logging
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from fpipe.devices import Device, aside, launch
from fpipe.errors import StageError, TransportError
from fpipe.flight.recording import Recording
from fpipe.handlers.distributed.activity import Activity, Markers
from fpipe.handlers.distributed.backends import Backend, Edge, as_bytes, rounds
from fpipe.handlers.distributed.grid import Grid
from fpipe.handlers.distributed.groups import GLOO, Groups, Key
from fpipe.handlers.distributed.lifeline import Lifeline
from fpipe.handlers.distributed.signature import decode, encode, signature_of
from fpipe.handlers.distributed.stage_groups import StageGroup
from fpipe.handlers.distributed.wire import PayloadCodec
from fpipe.handlers.gloo import gloo_group
from fpipe.handlers.protocol import PeerLost
from fpipe.stages.pytree import Flat
from fpipe.store import bounded

log = logging.getLogger("fpipe.transport")
WEIGHTS = 1  # the tag of numbers between replicas on the control group, whose other messages have the tag 0
T = TypeVar("T")
NO_LANES: Mapping[str, Sequence[int]] = MappingProxyType({})

Operation = Callable[[Any], list[dist.Work]]
"""Posts an operation of a group."""
InFlight = tuple[list[dist.Work], list[torch.Tensor]]
"""Works that are not complete, and the tensors that must live until they are."""


class Connections:
    """The connections of one process.

    Args:
        store: through which the ranks find each other; under a prefix that nothing else uses.
        grid: this process among all. Below, a rank is its number.
        device: where values are.
        backend: makes the edges.
        timeout: seconds in which a connection must be made; in which a rank that others wait for must come.
        compute_timeout: seconds that the device may take before the connections are closed.
        flight: the flight recorder; None where there is none.
        closed: is set when the connections are not used any more.
        on_loss: is called with the reason when the process of the next rank ends.
    """

    def __init__(
        self,
        store: Store,
        grid: Grid,
        device: Device,
        backend: Backend,
        timeout: float,
        compute_timeout: float,
        flight: Recording | None = None,
    ) -> None:
        self.store, self.grid, self.timeout = store, grid, timeout
        self.rank, self.size = grid.number, grid.size
        self.device, self.backend = device, backend
        self._until = time.monotonic() + timeout
        self.activity = Activity(Markers(device), flight)
        self.groups = Groups(backend, self.activity.markers, compute_timeout)
        self.edges, self.closed, self.used = self.groups.edges, self.groups.closed, self.groups.used
        self.planned: frozenset[Edge] = frozenset()  # of all ranks
        self.lanes: dict[str, Sequence[int]] = {}  # the processes of each
        self.given_up: set[Edge] = set()  # with messages of a failed step that may come yet
        self.on_loss: Callable[[str], object] = str
        # Also at the interpreter's exit: gloo's threads must not outlive it.
        weakref.finalize(self, self.groups.close)
        if flight is not None:
            weakref.finalize(self, flight.close)
        self._connect_control()

    @property
    def control(self) -> Any:
        """All ranks, on the CPU."""
        return self._shared("control")

    @property
    def results(self) -> Any:
        """All ranks, on the device."""
        return self._shared("results" if self.backend.asynchronous else "control")

    def _shared(self, name: str) -> Any:
        if name not in self.groups.shared:
            raise PeerLost(None, "reaching all ranks")
        self.used.add(name)
        return self.groups.shared[name]

    def new_group(self, name: str, timeout: float | None) -> Any:
        """Return a gloo group of all ranks, over separate connections: a failure there does not affect the others.

        The first call for a name connects all ranks: all of them make it at the same time.

        Args:
            timeout: seconds that one wait may take.

        Raises:
            TimeoutError: they are not connected in time.
        """
        shared = self.groups.shared
        if name not in shared:
            limit, store = self.timeout if timeout is None else timeout, PrefixStore(name, self.store)
            shared[name] = bounded(lambda: gloo_group(store, self.rank, self.size, limit), limit)
        return shared[name]

    # Set-up

    def refusal(self, edges: Collection[Edge], lanes: Collection[str]) -> str | None:
        """Return why this process can't have these edges and lanes beside those that it has; None if it can."""
        count = len({*self.groups.lanes, *lanes})
        return self.backend.check(self.device, self.rank, self.planned | set(edges), count, self)

    def connect(self, edges: Collection[Edge], lanes: Mapping[str, Sequence[int]] = NO_LANES) -> None:
        """Make the groups that are missing, round by round, and send one message over each. Every rank calls it.

        `torch.distributed.new_group` must be called by every rank of the job in the same order, also by those that
        train another pipeline, and it splits a communicator made with `device_id`; so the groups are made without it.

        Args:
            edges: of all ranks, which none of them refuses.
            lanes: the name of a lane -> the ranks of this one's, itself included: some of its replicas, or all.
        """
        new = set(edges) - self.planned
        self.planned |= new  # before they are there: where one can't be made, all ranks make it in the next epoch
        new_lanes = {lane: ranks for lane, ranks in lanes.items() if lane not in self.lanes}
        self.lanes |= new_lanes
        with self._connecting():
            # gloo's errors name the peer of an edge, but not that of a lane, or of all ranks; NCCL's name none.
            if self.groups.lifeline is None and self.size > (1 if self.backend.asynchronous else 2):
                self._within_limit(self._make_lifeline, None, "connecting to the next rank")
            self._connect(new, new_lanes)

    def join(self, processes: tuple[int, ...]) -> None:
        """Meet the processes that compute stages together with this one, if it has not. Each of them calls it.

        Raises:
            TransportError: one of them did not come; names it.
        """
        if any(group.processes == processes for group in self.groups.beside):
            return
        group = StageGroup(processes, self.timeout)
        with self._connecting():
            connect = partial(group.connect, self.on_loss)
            self._within_limit(connect, None, f"connecting to the others of processes {[*processes]}")
        self.groups.beside.append(group)

    def missing(self) -> list[str]:
        """Return the names of the connections that this process should have and has not."""
        lost = [edge for edge in self.planned if edge not in self.edges or edge in self.given_up]
        edges = [_name_of(edge) for edge in lost if self.rank in edge]
        lanes = [_name_of_lane(lane, ranks) for lane, ranks in self.lanes.items() if lane not in self.groups.lanes]
        return edges + lanes + ["results"] * self._lacks_results

    def connect_again(self, names: Collection[str]) -> None:
        """Make the control group and the connections of these names, in the new epoch. Every rank calls it.

        Args:
            names: of all connections that one of the ranks is missing; the others are kept.
        """
        lanes = {lane: ranks for lane, ranks in self.lanes.items() if _name_of_lane(lane, ranks) in names}
        edges = {_edge_of(name) for name in names if name[0].isdigit()}
        self.groups.drop([*edges, *lanes, "control", *({"results"} & set(names))])
        self.planned |= edges
        self.given_up.clear()
        with self._connecting():
            self._connect_control()
            self._connect(edges, lanes)

    @property
    def _lacks_results(self) -> bool:
        return self.backend.asynchronous and self.size > 1 and "results" not in self.groups.shared

    def _connect(self, edges: Collection[Edge], lanes: Mapping[str, Sequence[int]]) -> None:
        if self._lacks_results:
            self._within_limit(self._connect_results, None, "connecting all ranks")
        for edge in (edge for each in rounds(edges) for edge in each):
            if self.rank in edge:
                source, target = edge
                purpose = f"connecting {self.grid.name(source)} to {self.grid.name(target)}"
                peer = target if self.rank == source else source
                self._within_limit(partial(self._connect_edge, edge, purpose), peer, purpose)
        for lane, ranks in lanes.items():
            purpose = f"connecting the replicas of rank {self.grid.rank}"
            self._within_limit(partial(self._connect_lane, lane, ranks, purpose), None, purpose)

    def _store_of(self, name: str) -> Store:
        """Return the store through which the ranks of a new group find each other."""
        return PrefixStore(f"{name} of epoch {self.groups.epoch}", self.store)

    def _connect_control(self) -> None:
        self._within_limit(self._make_control, None, "connecting all ranks")

    def _make_control(self) -> None:
        store, ranks = self._store_of("control"), range(self.size)
        group = GLOO.group(store, "control", self.rank, ranks, self.timeout)
        if not self.closed.is_set():
            self.groups.shared["control"] = group

    def _make_lifeline(self) -> None:
        line = Lifeline(self.store, self.rank, self.size, self.timeout, self.on_loss, self.grid.name)
        if not self.closed.is_set():
            self.groups.lifeline = line

    def _connect_results(self) -> None:
        purpose, ranks = "connecting all ranks", range(self.size)
        group = self.backend.group(self._store_of("results"), "results", self.rank, ranks, self.timeout)
        ping = torch.ones(1, device=self.device.torch_device)
        self.wait(self._post(None, purpose, group.broadcast, [(ping, 0)]), None, purpose)
        pings = as_bytes(ping.new_empty(self.size)), as_bytes(ping)
        self.wait(self.backend.all_gather(group, *pings), None, purpose)
        self.groups.shared["results"] = group

    def _connect_lane(self, lane: str, ranks: Sequence[int], purpose: str) -> None:
        name = _name_of_lane(lane, ranks)
        group = self.backend.group(self._store_of(name), name, ranks.index(self.rank), ranks, self.timeout)
        if self.closed.is_set():  # this thread was left behind
            return
        self.groups.lanes[lane] = group
        ping = torch.ones(1, device=self.device.torch_device)
        pings = ping.new_empty(len(ranks))
        self.wait_on_lane(lane, self.all_gather(lane, pings, ping, purpose), purpose)

    def _connect_edge(self, edge: Edge, purpose: str) -> None:
        source, target = edge
        ranks, name, sends = sorted(edge), _name_of(edge), self.rank == source
        group = self.backend.group(self._store_of(name), name, ranks.index(self.rank), ranks, self.timeout)
        if self.closed.is_set():  # this thread was left behind
            return
        self.edges[edge] = group
        ping = [torch.ones(1, device=self.device.torch_device)]
        works = self.send(ping, target) if sends else self.receive(ping, source)
        self.wait(works, target if sends else source, purpose)
        log.debug("rank %d connected %d -> %d over %s", self.rank, source, target, self.backend)

    def _within_limit(self, connect: Callable[[], None], peer: int | None, purpose: str) -> None:
        """Make a connection in a thread, which is left behind where it has no end: it can't be cut while it is made.

        Raises:
            PeerLost: the time limit of all connections that are made together is over; or another rank has failed.
        """

        def attempt() -> None:
            self.device.use()
            connect()

        def check() -> None:
            if self.groups.is_cut:
                raise PeerLost(peer, purpose)

        try:
            with self.activity.waits_for(purpose, peer):
                bounded(attempt, max(0.0, self._until - time.monotonic()), check)
        except TimeoutError:
            raise PeerLost(peer, f"{purpose} (no connection within timeout={self.timeout:g} s)") from None

    @contextmanager
    def _connecting(self) -> Iterator[None]:
        """Begin the time limit of connections made together; raise PeerLost for errors of torch.distributed."""
        self._until = time.monotonic() + self.timeout
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="An unbatched P2P op")  # it is what an edge is made for
                yield
        except (StageError, TransportError):
            raise
        except RuntimeError as error:
            raise PeerLost(None, f"setting up connections ({error})") from error

    # Posts and waits

    def send(self, messages: list[torch.Tensor], target: int) -> list[dist.Work]:
        """Post messages to a rank. The caller keeps them and their works until the works are complete."""
        return self._launch_on_edge("send", (self.rank, target), messages, target, "sending to")

    def receive(self, messages: list[torch.Tensor], source: int) -> list[dist.Work]:
        """Post receives from a rank."""
        return self._launch_on_edge("recv", (source, self.rank), messages, source, "receiving from")

    def _launch_on_edge(
        self, operation: str, edge: Edge, messages: list[torch.Tensor], peer: int, what: str
    ) -> list[dist.Work]:
        """Post an operation of an edge for each message."""
        sent, side = list(map(self.backend.message, messages)), _side(peer, self.rank)

        def post() -> list[dist.Work]:
            if edge not in self.edges:
                raise PeerLost(peer, f"{what} {self.grid.name(peer)}")
            self.used.add(edge)
            return self._post_each(getattr(self.edges[edge], operation), sent, side, peer, what)

        return _launched(post)

    def send_bytes(self, text: bytes, target: int) -> InFlight:
        """Post bytes to a rank, over the control group."""
        with aside():
            messages = [torch.tensor([len(text)]), _as_tensor(text)]
            return self._post_each(self.control.send, messages, target, target, "sending to"), messages

    def recv_bytes(self, source: int, purpose: str) -> bytes:
        """Wait for bytes that a rank sent by `send_bytes`."""
        with aside():
            size = torch.zeros(1, dtype=torch.int64)
            self._receive_control(size, source, purpose)
            body = torch.empty(int(size), dtype=torch.uint8)
            self._receive_control(body, source, purpose)
            return body.numpy().tobytes()

    def _receive_control(self, message: torch.Tensor, source: int, purpose: str) -> None:
        works = self._post_each(self.control.recv, [message], source, source, "receiving from")
        self.wait_for_control(works, source, purpose)

    def _post_each(
        self, post: Callable[..., dist.Work], messages: list[torch.Tensor], side: int, peer: int, what: str
    ) -> list[dist.Work]:
        return self._post(peer, f"{what} {self.grid.name(peer)}", post, [([each], side, 0) for each in messages])

    def _post(self, peer: int | None, what: str, post: Callable[..., T], calls: Sequence[tuple[Any, ...]]) -> list[T]:
        if self.groups.is_cut:
            raise PeerLost(peer, what)
        try:
            return [post(*arguments) for arguments in calls]
        except RuntimeError as error:
            raise PeerLost(peer, f"{what} ({first_line(error)})") from None

    def wait(self, works: list[dist.Work], peer: int | None, purpose: str) -> None:
        """Wait for works of the edges, or of `results`. They are popped, so that no traceback keeps them alive."""
        launch(lambda: self._wait(works, peer, purpose, self.backend))
        if self.backend.asynchronous:
            self.activity.markers.add(purpose, "waiting")

    def wait_for_control(self, works: list[dist.Work], peer: int | None, purpose: str) -> None:
        """Wait on the host for works of the control group."""
        self._wait(works, peer, purpose, GLOO)

    def _wait(self, works: list[dist.Work], peer: int | None, purpose: str, backend: Backend) -> None:
        try:
            with self.activity.waits_for(purpose, peer):
                while works:
                    backend.wait(works[0])
                    del works[:1]  # now, for an interrupt may end a wait; unless they are dropped already
        except RuntimeError as error:
            works.clear()
            raise PeerLost(peer, purpose if self.groups.is_cut else f"{purpose} ({first_line(error)})") from None

    def keep_up(self) -> None:
        """Wait until the device is at most some effects behind the host.

        Raises:
            StageError: the device has failed.
        """
        try:
            with self.activity.waits_for("waiting for the device"):
                self.activity.markers.keep_up()
        except RuntimeError as error:
            raise StageError(f"its device has failed: {first_line(error)}", rank=self.grid.rank) from error

    def use_all(self) -> None:
        """Note that anything may be posted on any connection, as by a graph that the device replays."""
        self.used.update(self.edges, self.groups.lanes, ["results"])

    def cut_used(self) -> None:
        """Break the connections on which the running step has posted, so that peers that wait get an error at once."""
        self._cut([*self.used, "control"])

    def cut_edges(self) -> None:
        """Break all edges of this rank, so that peers that wait on one get an error at once."""
        self._cut([*self.edges])

    def _cut(self, keys: Collection[Key]) -> None:
        self.groups.cut(keys)
        self.groups.drop(keys)

    def give_up_used(self) -> None:
        """Have the edges on which the running step has posted made again, once all ranks have come to the next one."""
        self.given_up.update(edge for edge in self.edges if edge in self.used)

    def abort(self) -> None:
        """Break all connections, so that peers that wait for this process get an error at once.

        gloo closes its sockets when the last reference to a group goes: nothing else may keep one, and no exchange of
        all ranks may be under way, for which gloo would wait.
        """
        if self.backend.asynchronous:
            self.groups.cut()
        else:
            self.groups.cut_control()
        self.groups.is_cut = True
        self.groups.close()

    # Collectives among the replicas of this rank

    def all_gather(self, lane: str, whole: torch.Tensor, piece: torch.Tensor, purpose: str) -> list[dist.Work]:
        """Post the gathering of the pieces of a lane, in its order. The caller keeps both until it is complete."""
        tensors = as_bytes(whole), as_bytes(piece)
        return self._launch_on_lane(lane, lambda group: self.backend.all_gather(group, *tensors), purpose)

    def exchange(
        self, lane: str, parts: torch.Tensor, exact: bool, purpose: str
    ) -> tuple[list[dist.Work], torch.Tensor]:
        """Post the exchange of equal parts on a lane, one for each process: it gets all parts for it, or their sum.

        Args:
            exact: return the parts, in the order of the lane; else their sum, in an order of the backend's own.
        """
        if exact:
            received = torch.empty_like(parts)
            equal: list[int] = []  # parts
            arguments = as_bytes(received), as_bytes(parts), equal, equal
            return self._launch_on_lane(lane, lambda group: [group.alltoall_base(*arguments)], purpose), received
        sums = parts.new_empty(parts.numel() // len(self.lanes[lane]))
        return self._launch_on_lane(lane, lambda group: [group._reduce_scatter_base(sums, parts)], purpose), sums

    def all_reduce(self, lane: str, tensor: torch.Tensor, purpose: str) -> list[dist.Work]:
        """Post the sum over a lane, in place, in an order of the backend's own."""
        return self._launch_on_lane(lane, lambda group: [group.allreduce([tensor], dist.ReduceOp.SUM)], purpose)

    def wait_on_lane(self, lane: str, works: list[dist.Work], purpose: str, *read: torch.Tensor) -> None:
        """Wait for works of a lane. The tensors that they read are passed too, so that they live until here."""
        others = [process for process in self.lanes[lane] if process != self.rank]
        self.wait(works, others[0] if len(others) == 1 else None, purpose)

    def numbers_of_replicas(self, numbers: list[float]) -> list[float]:
        """Return the numbers of all replicas, in their order; waits for them."""
        with aside():
            grid = self.grid
            mine = torch.tensor(numbers, dtype=torch.float64)
            purpose = "waiting for the weights of the replicas"
            works: list[dist.Work] = []
            sends = []
            every = [torch.empty_like(mine) for _ in range(grid.replicas)]
            for process, theirs in zip(grid.same_rank, every, strict=True):
                if process == self.rank:
                    theirs.copy_(mine)
                    continue
                sends += self._post(process, purpose, self.control.send, [([mine], process, WEIGHTS)])
                works += self._post(process, purpose, self.control.recv, [([theirs], process, WEIGHTS)])
            self.wait_for_control(works, None, purpose)
            self.wait_for_control(sends, None, purpose)
            gathered: list[float] = torch.cat(every).tolist()
            return gathered

    def _launch_on_lane(self, lane: str, operation: Operation, purpose: str) -> list[dist.Work]:
        def post() -> list[dist.Work]:
            if lane not in self.groups.lanes:
                raise PeerLost(None, purpose)
            self.used.add(lane)
            (works,) = self._post(None, purpose, operation, [(self.groups.lanes[lane],)])
            return works

        return _launched(post)

    # Collectives, at the ends of a step

    def collect(self, numbers: list[int]) -> tuple[torch.Tensor, list[dist.Work]]:
        """Post the gathering of every rank's whole numbers: the tensor has a row for each."""
        own = torch.tensor(numbers, dtype=torch.int64)
        rows = own.new_empty(self.size, len(numbers))
        arguments = self.control, as_bytes(rows), as_bytes(own)
        (works,) = self._post(None, "beginning a step", GLOO.all_gather, [arguments])
        return rows, works

    def broadcast(self, tensor: torch.Tensor, source: int, purpose: str, control: bool = False) -> torch.Tensor:
        """Return the tensor of rank `source`, on every rank; the others pass a tensor to receive into."""
        self._run_collective(lambda group: [group.broadcast(tensor, source)], source, purpose, control)
        return tensor

    def add(self, tensor: torch.Tensor, purpose: str) -> torch.Tensor:
        """Return the sum of the tensors of all ranks, in the tensor's own memory."""
        self._run_collective(lambda group: [group.allreduce([tensor], dist.ReduceOp.SUM)], None, purpose)
        return tensor

    def post_gather(self, tensor: torch.Tensor, purpose: str) -> tuple[torch.Tensor, list[dist.Work]]:
        """Post the gathering of the equal tensors of all ranks, in their order along a new first dimension.

        The caller keeps both tensors until it is complete.
        """
        if self.size == 1:
            return tensor.unsqueeze(0), []
        every = tensor.new_empty(self.size, *tensor.shape)
        arguments = as_bytes(every), as_bytes(tensor)
        return every, self._post_collective(lambda group: self.backend.all_gather(group, *arguments), None, purpose)

    def wait_for_all(self, works: list[dist.Work], purpose: str) -> None:
        """Wait for what `post_gather` has posted."""
        if self.size > 1:
            self.wait(works, None, purpose)

    def _run_collective(self, operation: Operation, peer: int | None, purpose: str, control: bool = False) -> None:
        if self.size > 1:
            wait = self.wait_for_control if control else self.wait
            wait(self._post_collective(operation, peer, purpose, control), peer, purpose)

    def _post_collective(
        self, operation: Operation, peer: int | None, purpose: str, control: bool = False
    ) -> list[dist.Work]:
        def post() -> list[dist.Work]:
            if self.groups.is_cut:
                raise PeerLost(peer, purpose)
            group = self.control if control else self.results
            (works,) = self._post(peer, purpose, operation, [(group,)])
            return works

        return _launched(post)

    def broadcast_payload(
        self, payload: Flat | None, source: int, purpose: str, codec: PayloadCodec | None
    ) -> tuple[Flat, PayloadCodec]:
        """Return the payload of rank `source`, on every rank, and its codec.

        Args:
            codec: of the same payload in an earlier step, on every rank or on none; without it, and with plain leaves,
                the signature travels first, for which the host waits.
        """
        if codec is None or not codec.has_tensors_alone:
            with aside():
                codec = self._broadcast_signature(payload, source, purpose)
        messages = codec.buffers() if payload is None else codec.messages(payload)
        if messages is None:
            assert payload is not None
            raise StageError(
                f"{purpose}: they are {signature_of(payload).text()}, where equal inputs gave {codec.signature.text()} "
                "before",
                rank=self.grid.rank,
            )
        for each in messages:
            self.broadcast(as_bytes(each), source, purpose)
        return codec.payload(messages) if payload is None else payload, codec  # type: ignore[return-value]

    def _broadcast_signature(self, payload: Flat | None, source: int, purpose: str) -> PayloadCodec:
        text = b""
        if payload is not None:
            try:
                text = encode(signature_of(payload))
            except TypeError as error:
                raise StageError(f"{purpose}: they can't be sent: {error}", rank=self.grid.rank) from error
        size = self.broadcast(torch.tensor([len(text)]), source, purpose, control=True)
        body = _as_tensor(text.ljust(int(size), b"\0"))
        self.broadcast(body, source, purpose, control=True)
        signature = decode(body.numpy().tobytes()) if payload is None else signature_of(payload)
        return PayloadCodec(signature, self.device.torch_device)


def _launched(post: Callable[[], list[dist.Work]]) -> list[dist.Work]:
    """Return the works of a post that is made now. A graph makes it again, and so the post keeps no group alive."""
    works = list[dist.Work]()
    launch(lambda: works.extend(post()))
    return works


def _as_tensor(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def cause_of(error: Exception, timeout: float | None) -> str:
    """Return why a wait failed: its time limit, else the error of torch.distributed.

    Args:
        timeout: seconds; None for a process group's own limit.
    """
    if isinstance(error, TimeoutError) or "imed out" in str(error) or "timeout" in str(error):
        return "nothing came within " + ("the group's timeout" if timeout is None else f"timeout={timeout:g} s")
    return first_line(error)


def first_line(error: Exception) -> str:
    """Return the message of an error of torch.distributed, without its stack."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return "the connection closed" if "onnection" in text and ("closed" in text or "reset" in text) else text


def _name_of(edge: Edge) -> str:
    return f"{edge[0]}-{edge[1]}"


def _edge_of(name: str) -> Edge:
    source, target = map(int, name.split("-"))
    return source, target


def _name_of_lane(lane: str, ranks: Sequence[int]) -> str:
    return f"{lane} {'-'.join(map(str, ranks))}"


def _side(rank: int, other: int) -> int:
    """Return a rank's number in a group of two."""
    return int(rank > other)
