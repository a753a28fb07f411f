"""Times and numbers of an asynchronous device, read later: marks on its stream, and numbers on their way to the host.

Only reading waits for the device, and only until the device has passed the mark that is read.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fpipe.devices import Device, HostCopy
from fpipe.timelines.measurement import Columns

CLOCK_COMPARISONS = 8  # of the device's clock with the host's; the closest counts
NUMBERS = 64  # of a device that can be on their way before more memory is allocated


class Marks:
    """A clock for a `Recording`: a call marks the current stream and returns the mark's number.

    The events are made once, for two steps: one whose times are not read yet, and the next.

    Args:
        count: the most marks of a step.
    """

    def __init__(self, device: Device, count: int) -> None:
        self.device, self.on = device, False
        self._count = count + 1  # the first of a step is its base
        self._events = [device.event(timed=True) for _ in range(2 * self._count)]
        self._aside = device.new_stream()
        self._base = self._next = 0

    def begin(self, on: bool) -> None:
        """Begin a step, with marks or without; it reuses the numbers of a step that was not kept."""
        self.on, self._next = on, self._base
        if on:
            self()

    def __call__(self) -> float:
        if not self.on:
            return 0.0
        at, self._next = self._next, self._next + 1
        self._events[at].record(self.device.current_stream())
        return float(at)

    def keep(self) -> Kept:
        """Return the step's marks, to be read after the next step is launched; their events are not reused until then.

        The clocks are compared now, by events on a stream where nothing waits.
        """
        compared = []
        for _ in range(CLOCK_COMPARISONS):
            event, before = self.device.event(timed=True), time.perf_counter()
            event.record(self._aside)
            event.synchronize()
            compared.append((before, event, time.perf_counter()))
        marks = Kept(self._events, self._base, self._next, compared)
        self._base = self._next = self._count - self._base
        return marks


class Kept:
    """The marks of one step."""

    def __init__(self, events: list[Any], base: int, end: int, compared: list[tuple[float, Any, float]]) -> None:
        self._events, self._base, self._last, self._compared = events, events[base], events[end - 1], compared

    def seconds(self, columns: Mapping[int, Columns]) -> tuple[dict[int, Columns], float]:
        """Return the ranks' times on the host's clock (`time.perf_counter`), and their error in seconds."""
        self._last.synchronize()
        origins = [
            ((before + after) / 2 - self._base.elapsed_time(event) / 1e3, (after - before) / 2)
            for before, event, after in self._compared
        ]
        origin, width = min(origins, key=lambda pair: pair[1])
        times = {rank: Columns(*(self._resolved(marks, origin) for marks in lane)) for rank, lane in columns.items()}
        return times, width

    def _resolved(self, marks: Iterable[float], origin: float) -> array[float]:
        base, events = self._base, self._events
        return array("d", [m if m != m else origin + base.elapsed_time(events[int(m)]) / 1e3 for m in marks])


class Numbers:
    """Numbers of a device on their way to the host, through memory that is allocated once.

    When all of it is in use, as much again is allocated. A number gives its place back when it is read, in any thread.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._places = deque[Tensor]()
        self._count = 0

    def later(self, number: Tensor) -> Later:
        """Start to copy a number to the host, as it is now."""
        number = number.detach().to(torch.float64).reshape(())
        if not self._places:
            self._grow(number)
        place = self._places.popleft()
        return Later(HostCopy(number, self.device, place), place, self._places)

    def _grow(self, like: Tensor) -> None:
        more = max(NUMBERS, self._count)
        self._places.extend(self.device.host_memory(like.new_empty(more)).unbind())
        self._count += more


class Later:
    """A number as it was when it was given; `item` waits until its device has computed it, and is called once."""

    def __init__(self, copy: HostCopy, place: Tensor, free: deque[Tensor]) -> None:
        self._copy, self._place, self._free = copy, place, free

    def item(self) -> float:
        number = float(self._copy.read())
        self._free.append(self._place)
        return number
