"""A device and a backend that run over gloo on the CPU, and check the order in which streams use memory.

Streams are ordered as CUDA and NCCL order them: an operation runs on the compute stream; a post of an edge waits for
the compute stream as it is then, and runs on the edge's own stream; a wait makes the compute stream wait for it. The
host orders nothing. Each stream has a vector clock, and each storage remembers who used it last.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from fpipe.devices.tape import Tape
from fpipe.handlers.distributed.backends import FOREVER, NCCL, Gloo

LAG = 0.002  # seconds after which the device has passed an event


@dataclass(eq=False)
class Stream:
    """Work in order; `clock` is how much of each stream comes before what is launched next."""

    name: str
    clock: dict[Stream, int] = field(default_factory=dict)

    def wait_for(self, clock: dict[Stream, int]) -> None:
        for stream, passed in clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), passed)

    def wait_event(self, event: Event) -> None:
        self.wait_for(event.clock)

    def launch(self) -> int:
        self.clock[self] = self.clock.get(self, 0) + 1
        return self.clock[self]


class Event:
    """A point of a stream, which the device passes some time later."""

    def __init__(self, checker: Checker) -> None:
        self.checker, self.clock, self.recorded = checker, {}, 0.0

    def record(self, stream: Stream) -> None:
        self.clock, self.recorded = dict(stream.clock), time.monotonic()

    def query(self) -> bool:
        return time.monotonic() > self.recorded + LAG

    def synchronize(self) -> None:
        self.checker.host_waits.append("event")
        time.sleep(max(0.0, self.recorded + LAG - time.monotonic()))


@dataclass
class Use:
    """The last write of a storage, and the reads since."""

    storage: StorageWeakRef
    write: tuple[Stream, int, str] | None = None
    reads: dict[Stream, tuple[int, str]] = field(default_factory=dict)


class Checker(TorchDispatchMode):
    """While it is entered, every operation of this thread is one of the compute stream.

    Attributes:
        faults: uses that nothing orders after an earlier one; memory that was given up while a transfer uses it.
        host_waits: what made the host wait for the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.compute = Stream("compute")
        self.streams = [self.compute]
        self.uses: dict[int, Use] = {}
        self.faults: list[str] = []
        self.host_waits: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.sweep()
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            self.host_waits.append("item")
        written = {id(x) for a, x in zip(func._schema.arguments, args, strict=False) if writes(a) for x in tensors(x)}
        if func.overloadpacket is torch.ops.aten.set_:  # it says where a tensor is, and touches no memory
            return result
        inputs = tensors((args, kwargs))
        for tensor in inputs:
            self.use(self.compute, tensor, id(tensor) in written, func.__name__)
        for tensor in tensors(result):
            if not any(tensor is x for x in inputs) and not any(a.alias_info for a in func._schema.returns):
                self.use(self.compute, tensor, True, func.__name__)
        return result

    def use(self, stream: Stream, tensor: Tensor, write: bool, what: str) -> None:
        """Check a use of a tensor's memory, launched on a stream now."""
        storage = tensor.untyped_storage()
        use = self.uses.setdefault(storage._cdata, Use(StorageWeakRef(storage)))
        now = stream.launch()
        if use.write is not None:
            other, then, by = use.write
            if stream.clock.get(other, 0) < then:
                self.faults.append(f"{what} on {stream.name} is not after {by} on {other.name}, which writes")
        if write:
            for other, (then, by) in use.reads.items():
                if stream.clock.get(other, 0) < then:
                    self.faults.append(f"{what} on {stream.name} writes, not after {by} on {other.name}, which reads")
            use.write, use.reads = (stream, now, what), {}
        else:
            use.reads[stream] = now, what

    def sweep(self) -> None:
        """Check the memory that has been given up: the compute stream may use it again from now on."""
        for key, use in list(self.uses.items()):
            if not use.storage.expired() or self.uses.pop(key, None) is None:  # another thread sweeps too
                continue
            last = [use.write] if use.write else []
            for stream, then, by in [*last, *((s, t, by) for s, (t, by) in use.reads.items())]:
                if self.compute.clock.get(stream, 0) < then:
                    self.faults.append(f"memory is given up before {by} on {stream.name} is done")


def writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if type(x) in (Tensor, torch.nn.Parameter)]


@dataclass
class Lane:
    """Copies on a stream of their own, after what the compute stream has launched."""

    checker: Checker
    stream: Stream

    def copy(self, copies: Any) -> Callable[[], None]:
        self.stream.wait_for(self.checker.compute.clock)
        for source, target in copies:
            with _disable_current_modes():
                target.copy_(source)
            self.checker.use(self.stream, source, False, "copy")
            self.checker.use(self.stream, target, True, "copy")
        done = dict(self.stream.clock)
        return lambda: self.checker.compute.wait_for(done)


class RecordedDevice:
    """The CPU, as if it ran behind the host."""

    torch_device = torch.device("cpu")
    asynchronous = True

    def __init__(self, checker: Checker) -> None:
        self.checker = checker

    def current_stream(self) -> Stream:
        return self.checker.compute

    def new_stream(self) -> Stream:
        self.checker.streams.append(stream := Stream(f"stream {len(self.checker.streams)}"))
        return stream

    def event(self, timed: bool = False) -> Event:
        return Event(self.checker)

    def use(self) -> None:
        """One device."""

    def synchronize(self) -> None:
        self.checker.host_waits.append("device")

    def generators(self) -> list[torch.Generator]:
        return [torch.default_generator]

    def host_memory(self, like: Tensor) -> Tensor:
        return torch.empty_like(like)

    def host_bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8)

    def new_lane(self) -> Lane:
        return Lane(self.checker, self.new_stream())

    def new_graph(self, tensors: Any, keys: Any) -> Tape:
        return Tape(tensors)

    def available_bytes(self) -> int | None:
        return None

    def peak_bytes(self) -> int | None:
        return None


class RecordedNCCL(NCCL):
    """NCCL's groups, their data over gloo. `joins=False` leaves the waits of streams out."""

    def __init__(self, checker: Checker, joins: bool = True) -> None:
        object.__setattr__(self, "checker", checker)
        object.__setattr__(self, "joins", joins)

    def check(self, device, rank, edges, lanes, owner):
        return None

    def group(self, store, name, rank, ranks, timeout):
        self.checker.streams.append(stream := Stream(f"edge {name}"))
        return Group(self, Gloo().group(store, name, rank, ranks, timeout), stream)

    def wait(self, work):
        work.wait()

    def cut(self, groups):
        Gloo().cut([group.group for group in groups])

    def close(self, groups):
        """Sockets close with the last reference."""


class Group:
    """A communicator; a post runs on its stream, after the compute stream as it is at the post."""

    def __init__(self, backend: RecordedNCCL, group: Any, stream: Stream) -> None:
        self.backend, self.group, self.stream, self.sending = backend, group, stream, []

    def send(self, tensors, rank, tag):
        message = self.read(tensors[0], "send")
        self.sending.append((message, self.group.send([message], rank, tag)))
        return Work(self, None, None, None)

    def recv(self, tensors, rank, tag):
        return self.write(tensors[0], "receive", lambda message: self.group.recv([message], rank, tag))

    def broadcast(self, tensor, root):
        if self.group.rank() == root:
            message = self.read(tensor, "broadcast")
            self.sending.append((message, self.group.broadcast(message, root)))
            return Work(self, None, None, None)
        return self.write(tensor, "broadcast", lambda message: self.group.broadcast(message, root))

    def allreduce(self, tensors, by):
        def post(message):
            with torch.utils._python_dispatch._disable_current_modes():
                message.copy_(value)
            return self.group.allreduce([message], by)

        value = self.read(tensors[0], "all-reduce")
        return self.write(tensors[0], "all-reduce", post)

    def _allgather_base(self, whole, piece):
        return self.both(whole, piece, "all-gather", self.group._allgather_base)

    def alltoall_base(self, received, sent, *sizes):
        return self.both(
            received, sent, "all-to-all", lambda target, source: self.group.alltoall_base(target, source, *sizes)
        )

    def both(self, written: Tensor, read: Tensor, what: str, post: Any) -> Work:
        message = self.read(read, what)
        work = self.write(written, what, lambda received: post(received, message))
        self.sending.append((message, work.work))
        return work

    def read(self, tensor: Tensor, what: str) -> Tensor:
        checker = self.backend.checker
        checker.sweep()
        self.stream.wait_for(checker.compute.clock)
        checker.use(self.stream, tensor, False, what)
        with torch.utils._python_dispatch._disable_current_modes():
            return tensor.clone()

    def write(self, tensor: Tensor, what: str, post: Any) -> Work:
        checker = self.backend.checker
        checker.sweep()
        self.stream.wait_for(checker.compute.clock)
        checker.use(self.stream, tensor, True, what)
        with torch.utils._python_dispatch._disable_current_modes():
            message = torch.empty_like(tensor)
            memory = tensor.detach()
            memory.view(torch.uint8).fill_(7) if memory.dim() else memory.fill_(0)  # until it has come
        return Work(self, again(tensor), message, post(message))

    def abort(self):
        Gloo().cut([self.group])


def again(tensor: Tensor) -> Callable[[], Tensor | None]:
    """A function that returns the tensor, or None when nothing else keeps its memory."""
    place = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
    memory = StorageWeakRef(tensor.untyped_storage())

    def target() -> Tensor | None:
        storage, (dtype, *where) = torch.UntypedStorage._new_with_weak_ptr(memory.cdata), place
        return None if storage is None else torch.empty(0, dtype=dtype).set_(storage, *where)

    return target


class Work:
    def __init__(self, group: Group, target: Any, message: Tensor | None, work: Any) -> None:
        self.group, self.target, self.message, self.work = group, target, message, work
        self.end = dict(group.stream.clock)

    def wait(self) -> None:
        backend = self.group.backend
        backend.checker.sweep()
        if self.work is not None:
            self.work.wait(FOREVER)
            with torch.utils._python_dispatch._disable_current_modes():
                if (tensor := self.target()) is not None:
                    tensor.detach().copy_(self.message)
        if backend.joins:
            backend.checker.compute.wait_for(self.end)
