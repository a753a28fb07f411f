"""The interface of devices: streams, events, generators, memory, graphs.

A stream runs what is launched on it in order. An event marks a point of a stream, which another stream or the host can
wait for. Nothing else orders two streams.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from traceback import StackSummary
from typing import Any, Protocol

import torch
from torch import Tensor


class CaptureError(RuntimeError):
    """A function does what a graph can't hold. The message says what, as a sentence about "it".

    Args:
        traced: where the function did it when it was traced; else the error's own traceback has the line.
    """

    def __init__(self, message: str, traced: StackSummary | None = None) -> None:
        super().__init__(message)
        self.traced = traced


class GraphReset(RuntimeError):
    """A graph was reset before this replay."""


class Stream(Protocol):
    """A queue of work; nothing here waits on the host."""

    def wait_event(self, event: Any) -> None:
        """Let what is launched later wait for the event."""


class Event(Protocol):
    """A point of a stream."""

    def record(self, stream: Any) -> None:
        """Move the event to the end of what is launched on a stream now."""

    def query(self) -> bool:
        """Return whether the device has passed the event."""

    def synchronize(self) -> None:
        """Wait on the host until the device has passed the event."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds between two events that the device has passed; both were made with `timed`."""


class Graph(Protocol):
    """The work of a function on a device, captured once and replayed on the same memory without its Python code."""

    def capture(self) -> AbstractContextManager[None]:
        """Capture the work that is launched inside, once. What it computes is there only after a replay."""

    def seeded(self, key: Hashable) -> AbstractContextManager[None]:
        """Let draws inside, while the graph is captured, follow the seed that a replay has for this key."""

    def replay(self, seeds: Mapping[Hashable, int]) -> None:
        """Launch the work again, on the current stream.

        Args:
            seeds: for every key under which something was drawn.

        Raises:
            GraphReset: the work has been given up.
        """

    def reset(self) -> None:
        """Give up the work. Any thread may call it."""


class Lane(Protocol):
    """A queue beside a device's compute, on which copies run one after another."""

    def copy(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """Post copies, each of a tensor into the second one, after what the current stream has launched so far.

        Both must live until the returned function was called: it lets the current stream wait for the copies.
        """


class Device(Protocol):
    """A CPU or a GPU.

    Args:
        torch_device: with its index where it has one.
        asynchronous: whether an operation returns before the device has run it.
    """

    torch_device: torch.device
    asynchronous: bool

    def current_stream(self) -> Any:
        """Return the stream on which operations run now."""

    def new_stream(self) -> Any:
        """Return a stream on which nothing else runs, as far as the device has them."""

    def event(self, timed: bool = False) -> Any:
        """Return a new event, `timed` if its time is asked for later."""

    def use(self) -> None:
        """Make it the current device of this thread."""

    def synchronize(self) -> None:
        """Wait on the host until the device has run everything."""

    def generators(self) -> list[torch.Generator]:
        """Return the global generators that operations on this device, and on the host, draw from."""

    def host_memory(self, like: Tensor) -> Tensor:
        """Return empty memory on the host for a tensor's copy, which the device can write while the host goes on."""

    def available_bytes(self) -> int | None:
        """Return the bytes of memory that new tensors may take now; None if the device does not tell."""

    def host_bytes(self, count: int) -> Tensor:
        """Return empty memory on the host, of so many bytes, for copies by a lane; it is none of the device's."""

    def new_lane(self) -> Lane:
        """Return a lane on which nothing else runs."""

    def peak_bytes(self) -> int | None:
        """Return the most bytes that the device's allocator gave out; None if it does not count them."""

    def requested_peak(self, call: Callable[[], object]) -> int | None:
        """Run a call, and return the most bytes that tensors requested of the allocator, beyond those before it.

        None, without running the call, if the allocator does not count them.
        """

    def new_graph(self, tensors: Sequence[Tensor], keys: Sequence[Hashable]) -> Graph:
        """Return an empty graph.

        Args:
            tensors: those from outside that the captured function may write to.
            keys: those under which it draws random numbers.
        """
