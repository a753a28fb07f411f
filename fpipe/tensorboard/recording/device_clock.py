"""Times and numbers of an asynchronous device, read later: marks on its stream, and numbers on their way to the host.

Only reading waits for the device, and only until the device has passed the mark that is read.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from math import isnan
from typing import Any

import torch
from torch import Tensor

from fpipe.devices import Device, HostCopy, device_of
from fpipe.timelines.measurement import Columns

CLOCK_COMPARISONS = 8  # of the device's clock with the host's; the closest counts
PROMPT = 20e-6  # seconds within which a device that has nothing else to run passes a mark that the host makes
NUMBERS = 64  # of a device that can be on their way before more memory is allocated


class Marks:
    """A clock for a `Recording`: a call marks the current stream and returns the mark's number.

    The events are made once, for two steps: one whose times are not read yet, and the next.

    Args:
        count: the most marks of a step.
    """

    def __init__(self, device: torch.device | Device, count: int) -> None:
        self.device, self.on = device_of(device), False
        self._count = count + 1  # the first of a step is its base
        self._events = [self.device.event(timed=True) for _ in range(2 * self._count)]
        self._made = array("d", [0.0]) * len(self._events)
        self._aside = self.device.new_stream()
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
        self._made[at] = time.perf_counter()
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
        marks = Kept(self._events[self._base : self._next], self._made[self._base : self._next], self._base, compared)
        self._base = self._next = self._count - self._base
        return marks


class Kept:
    """The marks of one step.

    Args:
        events: of the marks; the first is the base of the others' times.
        made: when the host made each mark.
        first: the number of the first mark.
        compared: when the host recorded an event, the event, and when the host had waited for it.
    """

    def __init__(
        self, events: Sequence[Any], made: Sequence[float], first: int, compared: Sequence[tuple[float, Any, float]]
    ) -> None:
        self._events, self._made, self._first, self._compared = events, made, first, compared

    @cached_property
    def _passed(self) -> tuple[list[float], float]:
        """When the device passed each mark, on the host's clock, and the error of that."""
        base = self._events[0]
        self._events[-1].synchronize()
        origins = [
            ((before + after) / 2 - base.elapsed_time(event) / 1e3, (after - before) / 2)
            for before, event, after in self._compared
        ]
        origin, width = min(origins, key=lambda pair: pair[1])
        return [origin + base.elapsed_time(event) / 1e3 for event in self._events], width

    def seconds(self, columns: Mapping[int, Columns]) -> tuple[dict[int, Columns], float]:
        """Return the ranks' times on the host's clock (`time.perf_counter`), and their error in seconds.

        Waits until the device has passed the marks.
        """
        passed, width = self._passed

        def time_of(mark: float) -> float:
            return mark if isnan(mark) else passed[int(mark) - self._first]

        times = {rank: Columns(*(array("d", map(time_of, each)) for each in lane)) for rank, lane in columns.items()}
        return times, width

    def launch_bound(self, columns: Mapping[int, Columns]) -> dict[int, float]:
        """Return by rank an upper bound of the seconds in which the device waited for the host's launches.

        They are those between two marks where the device had run out of work at the second one: it passed the mark as
        soon as the host made it.
        """
        passed, width = self._passed
        seconds = [now - before for before, now in pairwise(passed)]
        is_prompt = [now - made < PROMPT + width for now, made in zip(passed, self._made, strict=True)]
        bounds = {}
        for rank, lane in columns.items():
            marks = {int(mark) - self._first for each in lane for mark in each if not isnan(mark)}
            ends = [at for at in marks if at > 1 and is_prompt[at]]  # before mark 1 there is no effect
            bounds[rank] = sum(seconds[at - 1] for at in ends)
        return bounds


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
