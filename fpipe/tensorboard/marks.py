"""A clock of CUDA events: marks on a stream, which become the host's seconds once the device has passed them."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from fpipe.measurement import Columns

TRIES = 8  # comparisons of the device's clock with the host's, of which the closest counts


class Marks:
    """Called, it marks the current stream and gives the mark's number, which `seconds` turns into a time later.

    Nothing waits for the device but `seconds`, and that only until it has passed the marks asked for. The events are
    made once.

    Args:
        device: a CUDA device.
        count: marks that may be unresolved at a time.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self.device, self.on = device, False
        self._events = [_event() for _ in range(count)]
        self._aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._next = 0

    def __call__(self) -> float:
        if not self.on:
            return 0.0
        at, self._next = self._next, (self._next + 1) % len(self._events)
        self._events[at].record(torch.cuda.current_stream(self.device))
        return float(at)

    def seconds(self, columns: Columns) -> tuple[Columns, float]:
        """A step's times on the host's clock (`time.perf_counter`), and by how many seconds they may be off."""
        base = self._events[int(columns.starts[0])]
        self._events[int(columns.ends[-1])].synchronize()
        origin, width = min((self._compared(base) for _ in range(TRIES)), key=lambda found: found[1])
        times = (self._resolved(column, base, origin) for column in columns)
        return Columns(*times), width

    def _compared(self, base: Any) -> tuple[float, float]:
        """When the base was passed, and how far that may be off: by an event on a stream where nothing waits."""
        event = _event()
        before = time.perf_counter()
        event.record(self._aside)
        event.synchronize()
        after = time.perf_counter()
        return (before + after) / 2 - base.elapsed_time(event) / 1e3, (after - before) / 2

    def _resolved(self, marks: Sequence[float], base: Any, origin: float) -> array[float]:
        return array("d", [m if m != m else origin + base.elapsed_time(self._events[int(m)]) / 1e3 for m in marks])


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
