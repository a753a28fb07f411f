"""Where this process is: what its host waits for, and how far its device is.

The watchdog reads it from its own thread, and the flight recorder keeps it in a file.

Invariants:
- writing waits for nothing; only the markers of an asynchronous device have a lock, held for a moment;
- an asynchronous device is at most `LEAD` effects behind the host, so that memory is what the schedule needs.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from fpipe.devices import Device
from fpipe.flight.format import Outcome
from fpipe.flight.recording import Recording

LEAD = 6
"""Effects of a rank that the host may launch before the device has run them.

The device is kept busy by the work of one or two; memory of a message that was sent can't be used again until the
device has passed it.
"""

Kind = Literal["absent", "waiting", "computing", "replaying"]


class State(NamedTuple):
    """A rank's state.

    Args:
        calls: set-ups and steps that it has begun.
        kind: absent: outside of them, with nothing left on the device. replaying: in a graph, which waits or computes.
        text: the effect that it computes, or the purpose of its wait.
        seconds: since when.
    """

    calls: int
    kind: Kind
    text: str
    seconds: float


def _nothing() -> None:
    """Run no effect."""


class Activity:
    """The host's and the device's position.

    Args:
        markers: of the device.
        flight: the flight recorder; None where no file could be made.
        calls: set-ups and steps that have begun; the same on every rank that has come as far.
        inside: whether one of them runs.
        thread: that runs them; the object, since the system gives the number of one that has ended to another.
        waiting: the purpose for which the host waits, if it does.
        waits: how many times it has waited.
        effect: returns the effect that the host runs.
    """

    def __init__(self, markers: Markers, flight: Recording | None = None) -> None:
        self.markers, self.flight = markers, flight
        self.calls, self.waits, self.inside, self.thread = 0, 0, False, threading.current_thread()
        self.waiting: str | None = None
        self.effect: Callable[[], object] = _nothing
        self._seen: object = None
        self._since = time.monotonic()
        _activities.add(self)

    def enter(self, effect: Callable[[], object] = _nothing) -> None:
        """Begin a set-up or a step."""
        self.effect, self.waiting, self.inside, self.thread = effect, None, True, threading.current_thread()
        self.calls += 1
        if self.flight is not None:
            self.flight.begin(self.calls)

    @contextmanager
    def runs(self, effect: Callable[[], object]) -> Iterator[None]:
        """Note that the host runs a part of it; `effect` returns the effect that runs."""
        before, self.effect = self.effect, effect
        try:
            yield
        finally:
            self.effect = before

    def leave(self) -> None:
        """End it, as far as the host is concerned."""
        self.inside, self.waiting, self.effect = False, None, _nothing
        if self.flight is not None:
            self.flight.end()

    @contextmanager
    def waits_for(self, purpose: str, peer: int | None = None) -> Iterator[None]:
        """Note that the host waits.

        Args:
            peer: the process for which it waits; None if that may be any of them.
        """
        self.waits += 1
        self.waiting = purpose
        place = None if self.flight is None else self.flight.waits(purpose, peer)
        try:
            yield
        finally:
            self.waiting = None
        if self.flight is not None and place is not None:
            self.flight.arrived(place)

    def replay(self, part: str) -> None:
        """Note in the flight recorder that a captured part of the step is replayed."""
        if self.flight is not None:
            self.flight.writer("replay", part)()

    def conclude(self, outcome: Outcome, reason: str) -> None:
        """Note in the flight recorder that a step can't be finished, or that the handler has ended."""
        if self.flight is not None:
            self.flight.conclude(outcome, reason)

    def recover(self) -> None:
        """Note there that the ranks have connected again."""
        if self.flight is not None:
            self.flight.recover()

    def state(self) -> State:
        """Return the state of this rank; its time counts from the first call that saw it. For one thread alone."""
        kind, text, seen = self._position()
        if kind == "absent":
            others = [other._position() for other in list(_activities) if other is not self]
            if busy := next((other for other in others if other[0] != "absent"), None):
                kind, text, seen = "computing", f"another handler: {busy[1]}", busy[2]
        seen, now = (self.calls, kind, text, seen), time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        return State(self.calls, kind, text, now - self._since)

    def skip(self, seconds: float) -> None:
        """Leave a time out of account, in which this process did not run."""
        self._since += seconds

    def _position(self) -> tuple[Kind, str, object]:
        """Return the kind of the state, its text, and what changes with any progress."""
        marker, waiting = self.markers.oldest(), self.waiting
        if marker is not None:  # the device has not come as far as the host
            return marker.kind, f"{marker.purpose}", marker.number
        if not self.inside:
            return "absent", "its script is elsewhere", None
        if waiting is not None:
            return "waiting", waiting, self.waits
        effect = self.effect()
        return "computing", "preparing the step" if effect is None else f"{effect}", None


_activities: weakref.WeakSet[Activity] = weakref.WeakSet()
"""Of all handlers of this process: a rank that is busy with another one is not absent."""


class _Marker(NamedTuple):
    """A point of the compute stream.

    Args:
        kind: what the device does before it: it waits for a value of another rank, computes, or replays a graph.
        purpose: of that wait, or the effect that is computed.
    """

    event: Any
    kind: Kind
    purpose: object
    number: int


class Markers:
    """The points of the compute stream that the device has not passed, in order. On the CPU there are none.

    Args:
        paused: whether nothing is marked, because what is launched is captured and does not run.
    """

    def __init__(self, device: Device) -> None:
        self.device, self.paused = device, False
        self._pending: deque[_Marker] = deque()
        self._lock = threading.Lock()  # for the watchdog, which reads what the main thread changes
        self._free: list[Any] = []
        self._committed: Any = None  # an event
        self._effects = self._number = 0

    def add(self, purpose: object, kind: Kind = "computing") -> None:
        """Mark the compute stream here."""
        if self.paused:
            return
        event = self._free.pop() if self._free else self.device.event()
        event.record(self.device.current_stream())
        self._number += 1
        with self._lock:
            self._pending.append(_Marker(event, kind, purpose, self._number))
        self._effects += kind != "waiting"

    def oldest(self) -> _Marker | None:
        """Return the first marker that the device has not passed."""
        with self._lock:
            pending = list(self._pending)
        return next((marker for marker in pending if not marker.event.query()), None)

    def keep_up(self) -> None:
        """Wait until the device is at most `LEAD` effects behind."""
        if self.paused:
            return
        if self._effects > LEAD:
            next(marker for marker in self._pending if marker.kind != "waiting").event.synchronize()
        while self._pending and self._pending[0].event.query():
            with self._lock:
                marker = self._pending.popleft()
            self._free.append(marker.event)
            self._effects -= marker.kind != "waiting"

    def commit(self) -> None:
        """Note that all ranks have ended the steps so far: what they launched must be done before groups are cut."""
        if self.device.asynchronous:
            self._committed = self._committed or self.device.event()
            self._committed.record(self.device.current_stream())

    def is_committed(self) -> bool:
        """Return whether the device has done what was launched before the last `commit`."""
        return self._committed is None or self._committed.query()

    def drain(self, may_go_on: Callable[[], bool]) -> bool:
        """Wait until the device has passed all markers; return False if `may_go_on` ended the wait."""
        while self.oldest() is not None:
            if not may_go_on():
                return False
            time.sleep(0.001)
        return True
