"""Observers, and the logs `fpipe.effects` and `fpipe.transport`.

`FPIPE_LOG=effects` prints every effect with its rank and time, `FPIPE_LOG=transport` connections and failures; both,
with a comma. Otherwise Python's logging shows them as it is configured, at level DEBUG.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from fpipe.effects import Effect, Value
from fpipe.errors.tracebacks import warn
from fpipe.handlers.protocol import Handler, Observer, Outcome
from fpipe.programs.program import Programs


def configure() -> None:
    """Print the logs that `FPIPE_LOG` names to standard error."""
    names = [name.strip() for name in os.environ.get("FPIPE_LOG", "").split(",") if name.strip()]
    root = logging.getLogger("fpipe")
    if names and not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(name)s %(message)s"))
        root.addHandler(handler)
        root.propagate = False  # print each line once, however logging is configured
    for name in names:
        logging.getLogger(f"fpipe.{name}").setLevel(logging.DEBUG)


class HostTimed(Observer):
    """Base class of observers that take the host's times. Warns once where a device runs the work later."""

    _has_warned = False

    def on_compile(self, name: str, programs: Programs, handler: Handler) -> None:
        for device in handler.devices or ():
            self._check(device)

    def on_step_end(self, outcome: Outcome) -> None:
        if outcome.loss is not None:
            self._check(outcome.loss.device)

    def _check(self, device: torch.device) -> None:
        if device.type != "cpu" and not self._has_warned:
            self._has_warned = True
            warn(
                f"{type(self).__name__} has the times at which the host launches work on {device}, not those at which "
                f"it runs: fpipe.tensorboard.Recorder(logdir, device='{device}') records these",
            )


class EffectLog(HostTimed):
    """Logs each effect when it ends: milliseconds since the observer was made, rank, effect, duration, wait before."""

    def __init__(self) -> None:
        self.log = logging.getLogger("fpipe.effects")
        self.origin = time.perf_counter()
        self.starts: dict[int, float] = {}
        self.wait_starts: dict[tuple[int, Value], float] = {}
        self.waited: dict[int, float] = {}

    def begin(self, rank: int, effect: Effect) -> None:
        self.starts[rank] = time.perf_counter()

    def end(self, rank: int, effect: Effect) -> None:
        now, start, waited = time.perf_counter(), self.starts[rank], self.waited.pop(rank, None)
        after = "" if waited is None else f"  waited {1e3 * waited:.3f} ms"
        start_ms, took_ms = 1e3 * (start - self.origin), 1e3 * (now - start)
        self.log.debug("%10.3f ms  rank %d  %s  %.3f ms%s", start_ms, rank, effect, took_ms, after)

    def wait(self, rank: int, value: Value) -> None:
        self.wait_starts[rank, value] = time.perf_counter()

    def arrive(self, rank: int, value: Value) -> None:
        waited = time.perf_counter() - self.wait_starts.pop((rank, value))
        self.waited[rank] = self.waited.get(rank, 0.0) + waited


class Several(Observer):
    """Several observers as one. They nest: the first begins first and ends last."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = tuple(observers)
        for name in ("on_compile", "on_store", "on_step_begin", "begin", "wait"):
            setattr(self, name, partial(_call_each, [getattr(each, name) for each in self.observers]))
        for name in ("on_step_end", "end", "arrive"):
            setattr(self, name, partial(_call_each, [getattr(each, name) for each in reversed(self.observers)]))

    @property
    def agreed(self) -> tuple[object, ...]:
        return tuple(each for observer in self.observers for each in observer.agreed)


def _call_each(methods: Sequence[Callable[..., None]], *arguments: object) -> None:
    for method in methods:
        method(*arguments)


def observing(observe: Observer | None) -> Observer | None:
    """Return the caller's observer, together with the log of effects where that is enabled."""
    configure()
    if not logging.getLogger("fpipe.effects").isEnabledFor(logging.DEBUG):
        return observe
    log = EffectLog()
    return log if observe is None else Several([observe, log])


def watches_effects(observer: Observer | None) -> bool:
    """Return whether an observer is to see the effects of a step, or their values, and not only its begin and end."""
    if isinstance(observer, Several):
        return any(map(watches_effects, observer.observers))
    names = ("on_store", "begin", "end", "wait", "arrive")
    return observer is not None and any(getattr(type(observer), name) is not getattr(Observer, name) for name in names)
