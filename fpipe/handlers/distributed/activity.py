"""Where this process is: what its host waits for, and how far its device is. The watchdog reads it from its own thread.

Invariants:
- writing costs no lock and no wait;
- an asynchronous device is at most `LEAD` effects behind the host, so that memory is what the schedule needs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from fpipe.devices import Device
from fpipe.effects import Effect

LEAD = 6
"""Effects of a rank that the host may launch before the device has run them.

The device is kept busy by the work of one or two; memory of a message that was sent can't be used again until the
device has passed it.
"""

Kind = Literal["absent", "waiting", "computing"]


class State(NamedTuple):
    """A rank's state.

    Args:
        calls: set-ups and steps that it has begun.
        kind: absent: outside of them, with nothing left on the device.
        text: the effect that it computes, or the purpose of its wait.
        seconds: since when.
    """

    calls: int
    kind: Kind
    text: str
    seconds: float


@dataclass
class Activity:
    """The host's and the device's position.

    Args:
        calls: set-ups and steps that have begun; the same on every rank that has come as far.
        inside: whether one of them runs.
        waiting: the purpose for which the host waits, if it does.
        effect: returns the effect that the host runs.
        markers: of the device.
    """

    markers: Markers
    calls: int = 0
    inside: bool = False
    waiting: str | None = None
    effect: Callable[[], Effect | None] = lambda: None
    _seen: tuple[object, ...] = ()
    _since: float = 0.0

    def enter(self, effect: Callable[[], Effect | None] = lambda: None) -> None:
        """Begin a set-up or a step."""
        self.effect, self.waiting, self.inside = effect, None, True
        self.calls += 1

    def leave(self) -> None:
        """End it, as far as the host is concerned."""
        self.inside, self.waiting, self.effect = False, None, lambda: None

    def state(self) -> State:
        """Return the state of this rank; its time counts from the first call that saw it. For one thread alone."""
        marker, waiting, effect = self.markers.oldest(), self.waiting, self.effect()
        kind: Kind
        if self.inside and waiting is None:
            kind, text = "computing", f"{effect}" if effect is not None else "preparing the step"
        elif marker is not None and (not self.inside or waiting == DEVICE):
            kind, text = "waiting" if marker.awaits else "computing", f"{marker.purpose}"
        elif self.inside:
            kind, text = "waiting", f"{waiting}"
        else:
            kind, text = "absent", "its script is elsewhere"
        seen, now = (self.calls, kind, text, self.markers.passed), time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        return State(self.calls, kind, text, now - self._since)


DEVICE = "waiting for the device"


class _Marker(NamedTuple):
    """A point of the compute stream.

    Args:
        awaits: whether the device waits before it for a value of another rank.
        purpose: of that wait, or the effect that is computed before it.
    """

    event: Any
    awaits: bool
    purpose: object


class Markers:
    """The points of the compute stream that the device has not passed, in order. On the CPU there are none.

    Args:
        passed: how many it has passed.
        paused: whether nothing is marked, because what is launched is captured and does not run.
    """

    def __init__(self, device: Device) -> None:
        self.device, self.passed, self.paused = device, 0, False
        self._pending: deque[_Marker] = deque()
        self._free: list[Any] = []
        self._effects = 0

    def add(self, purpose: object, awaits: bool = False) -> None:
        """Mark the compute stream here."""
        if self.paused:
            return
        event = self._free.pop() if self._free else self.device.event()
        event.record(self.device.current_stream())
        self._pending.append(_Marker(event, awaits, purpose))
        self._effects += not awaits

    def oldest(self) -> _Marker | None:
        """Return the first marker that the device has not passed."""
        for marker in list(self._pending):
            if not marker.event.query():
                return marker
        return None

    def keep_up(self) -> None:
        """Wait until the device is at most `LEAD` effects behind."""
        if self.paused:
            return
        if self._effects > LEAD:
            next(marker for marker in self._pending if not marker.awaits).event.synchronize()
        while self._pending and self._pending[0].event.query():
            marker = self._pending.popleft()
            self._free.append(marker.event)
            self._effects -= not marker.awaits
            self.passed += 1

    def drain(self, may_go_on: Callable[[], bool]) -> bool:
        """Wait until the device has passed all markers; return False if `may_go_on` ended the wait."""
        while self.oldest() is not None:
            if not may_go_on():
                return False
            time.sleep(0.001)
        return True
