"""An asynchronous device on the CPU: events and copies to the host pass when its clock comes to them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class FakeStream:
    """A queue of work; each task ends `lag` seconds after it was launched."""

    lag: float
    tasks: list[tuple[float, Callable[[], object]]] = field(default_factory=list)

    def launch(self, device: FakeDevice, task: Callable[[], object]) -> float:
        ends = device.now + self.lag
        self.tasks.append((ends, task))
        device.settle()
        return ends

    def settle(self, now: float) -> None:
        while self.tasks and self.tasks[0][0] <= now:
            self.tasks.pop(0)[1]()


class FakeEvent:
    def __init__(self, device: FakeDevice, timed: bool) -> None:
        self.device, self.timed, self.passes = device, timed, math.inf

    def record(self, stream: FakeStream) -> None:
        self.device.now += 1e-6
        self.passes = stream.launch(self.device, lambda: None)

    def query(self) -> bool:
        self.device.settle()
        return self.device.now >= self.passes

    def synchronize(self) -> None:
        if not self.query():
            self.device.waits.append(self.passes - self.device.now)
        self.device.now = max(self.device.now, self.passes) + self.device.round_trip
        self.device.settle()

    def elapsed_time(self, end_event: FakeEvent) -> float:
        for event in (self, end_event):
            assert event.timed, "made without timed=True"
            assert event.query(), "asked before the device passed it"
        return 1e3 * (end_event.passes - self.passes)


class FakeDevice:
    """Tensors are the CPU's; only what the host reads of them comes late.

    Args:
        lag: seconds by which the device's current stream is behind the host.
        round_trip: seconds that a synchronization takes.
        now: seconds on its clock, which stands still between two calls; None for the host's own time.
        waits: seconds of each wait of the host.
        memory: the sizes of the memory that was asked for.
    """

    torch_device = torch.device("cpu")
    asynchronous = True

    def __init__(self, lag: float = 2.0, round_trip: float = 1e-7, now: float | None = None) -> None:
        self._now, self.round_trip = now, round_trip
        self.stream, self.waits, self.memory = FakeStream(lag), list[float](), list[tuple[int, ...]]()
        self.drawn = torch.Generator()

    @property
    def now(self) -> float:
        return time.perf_counter() if self._now is None else self._now

    @now.setter
    def now(self, seconds: float) -> None:
        if self._now is None:
            time.sleep(max(0.0, seconds - time.perf_counter()))
        else:
            self._now = seconds

    def clock(self) -> float:
        """Return the host's time; each reading takes a moment."""
        self.now += 1e-7
        return self.now

    def settle(self) -> None:
        """Run what the device has come to."""
        self.stream.settle(self.now)

    def current_stream(self) -> FakeStream:
        return self.stream

    def new_stream(self) -> FakeStream:
        return FakeStream(0.0)

    def event(self, timed: bool = False) -> FakeEvent:
        return FakeEvent(self, timed)

    def synchronize(self) -> None:
        event = self.event()
        event.record(self.stream)
        event.synchronize()

    def generators(self) -> list[torch.Generator]:
        return [torch.default_generator, self.drawn]

    def host_memory(self, like: Tensor) -> Tensor:
        self.memory.append(tuple(like.shape))
        return torch.empty_like(like).fill_(math.nan).as_subclass(_late(self))

    def available_bytes(self) -> int | None:
        return None

    def peak_bytes(self) -> int | None:
        return 12345

    def requested_peak(self, call: Callable[[], object]) -> int | None:
        call()
        return 54321


def _late(device: FakeDevice) -> type[Tensor]:
    """Return a class of tensors into which the device copies when it comes to it."""

    class HostMemory(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.copy_ and (kwargs or {}).get("non_blocking"):
                target, source = args[0].as_subclass(Tensor), args[1].clone()
                device.stream.launch(device, lambda: target.copy_(source))
                return args[0]
            return super().__torch_function__(func, types, args, kwargs or {})

    return HostMemory
