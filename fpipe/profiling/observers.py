"""Observers, and logging under `fpipe.*`. They see effects begin and end, and values arrive, and change nothing.

`FPIPE_LOG=effects` prints every effect with its rank and time, and `FPIPE_LOG=transport` what connects and
fails; both, with a comma. Without it, Python's logging shows them as it is configured, at level DEBUG.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence

from fpipe.effects import Effect, Value
from fpipe.handlers.protocol import Handler, Observer, Outcome, Store, Witness
from fpipe.programs.program import Programs


def configure() -> None:
    """Show what `FPIPE_LOG` asks for on standard error."""
    names = [name.strip() for name in os.environ.get("FPIPE_LOG", "").split(",") if name.strip()]
    root = logging.getLogger("fpipe")
    if names and not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(name)s %(message)s"))
        root.addHandler(handler)
        root.propagate = False  # shown once, whatever else is configured
    for name in names:
        logging.getLogger(f"fpipe.{name}").setLevel(logging.DEBUG)


class EffectLog:
    """Logs each effect as it ends: milliseconds since the observer was made, rank, effect, duration, waiting before."""

    def __init__(self) -> None:
        self.log = logging.getLogger("fpipe.effects")
        self.origin = time.perf_counter()
        self.begun: dict[int, float] = {}
        self.since: dict[tuple[int, Value], float] = {}
        self.waited: dict[int, float] = {}

    def begin(self, rank: int, effect: Effect) -> None:
        self.begun[rank] = time.perf_counter()

    def end(self, rank: int, effect: Effect) -> None:
        now, begun, waited = time.perf_counter(), self.begun[rank], self.waited.pop(rank, None)
        after = "" if waited is None else f"  waited {1e3 * waited:.3f} ms"
        begun_ms, took_ms = 1e3 * (begun - self.origin), 1e3 * (now - begun)
        self.log.debug("%10.3f ms  rank %d  %s  %.3f ms%s", begun_ms, rank, effect, took_ms, after)

    def wait(self, rank: int, value: Value) -> None:
        self.since[rank, value] = time.perf_counter()

    def arrive(self, rank: int, value: Value) -> None:
        waited = time.perf_counter() - self.since.pop((rank, value))
        self.waited[rank] = self.waited.get(rank, 0.0) + waited


class Several:
    """Several observers as one: the first is the outermost."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = tuple(observers)
        self.witnesses = [observer for observer in observers if isinstance(observer, Witness)]

    @property
    def agreed(self) -> tuple[object, ...]:
        """What the ranks' observers must have in common, as one of them alone would say it."""
        return tuple(each for observer in self.observers for each in getattr(observer, "agreed", ()))

    def begin(self, rank: int, effect: Effect) -> None:
        for observer in self.observers:
            observer.begin(rank, effect)

    def end(self, rank: int, effect: Effect) -> None:
        for observer in reversed(self.observers):
            observer.end(rank, effect)

    def wait(self, rank: int, value: Value) -> None:
        for observer in self.observers:
            observer.wait(rank, value)

    def arrive(self, rank: int, value: Value) -> None:
        for observer in reversed(self.observers):
            observer.arrive(rank, value)

    def prepare(self, name: str, programs: Programs, handler: Handler) -> None:
        for witness in self.witnesses:
            witness.prepare(name, programs, handler)

    def hold(self, rank: int, store: Store) -> None:
        for witness in self.witnesses:
            witness.hold(rank, store)

    def step_begins(self) -> None:
        for witness in self.witnesses:
            witness.step_begins()

    def step_ends(self, outcome: Outcome) -> None:
        for witness in reversed(self.witnesses):
            witness.step_ends(outcome)


def observing(observe: Observer | None) -> Observer | None:
    """The caller's observer, with the log of effects where it is enabled."""
    configure()
    if not logging.getLogger("fpipe.effects").isEnabledFor(logging.DEBUG):
        return observe
    log = EffectLog()
    return log if observe is None else Several([observe, log])
