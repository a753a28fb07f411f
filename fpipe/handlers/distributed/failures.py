"""Turn a failure on one rank into an error of all ranks: a reason in the job's store, then broken connections."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from torch.distributed.distributed_c10d import Store

from fpipe.errors import StageError, TransportError
from fpipe.handlers.distributed.connections import Connections
from fpipe.handlers.distributed.grid import Grid
from fpipe.handlers.protocol import PeerLost

log = logging.getLogger("fpipe.transport")

T = TypeVar("T")
STORE_TIMEOUT = 2.0  # seconds for an answer of the job's store


class Failures:
    """The failures of one handler, which its ranks share through the job's store. The first reason under a key stays.

    Args:
        name: of this process, for messages.
        ended: the reason why this handler can't be used any more.
        calls: how many steps and replays on this handler have begun; the same on every rank.
    """

    def __init__(self, grid: Grid, store: Store) -> None:
        self.grid, self.rank, self.store = grid, grid.number, store
        self.name = grid.name(grid.number)
        self.ended: str | None = None
        self.calls = 0

    def check(self) -> None:
        """Raise TransportError if this handler has failed."""
        if self.ended is not None:
            raise TransportError(f"this handler ended with an earlier failure: {self.ended}; make a new one")

    def post(self, reason: str, key: str = "failed") -> None:
        """Write the reason into the store, unless there is one already."""
        call_with_timeout(STORE_TIMEOUT, lambda: self.store.compare_set(key, "", reason))

    def wait(self, seconds: float, key: str = "failed") -> str | None:
        """Return the reason that a rank wrote; None if there is none after some seconds."""
        return call_with_timeout(seconds + STORE_TIMEOUT, lambda: self._poll(seconds, key))

    def _poll(self, seconds: float, key: str) -> str | None:
        until = time.monotonic() + seconds
        while not (self.store.check([key]) and self.store.get(key)):
            if time.monotonic() > until:
                return None
            time.sleep(0.02)
        return str(self.store.get(key), "utf-8")

    def of_peer(self, connections: Connections, lost: PeerLost) -> TransportError:
        """End this handler because of a peer, and return the error to raise."""
        known = lost.peer if lost.peer != self.rank else None  # a broadcast of this rank's has no particular peer
        if known is None and connections.size == 2:
            known = 1 - self.rank
        peer = "a peer" if known is None else self.grid.name(known)
        # A rank that fails writes its reason before it breaks its connections; so does this rank's watchdog. Of those
        # that have lost a peer, one that knows which comes first.
        reason = self.ended or self._reason_of_others(connections, 1.0 if known is None else 0.2)
        if reason is None:
            reason = f"{peer} did not give a reason: did its script end, or was its process killed?"
            self.post(f"{self.name} lost {peer} while {lost}. {reason}")
        self.ended = reason
        connections.abort()
        return TransportError(f"{self.name} lost {peer} while {lost}. {reason}")

    def _reason_of_others(self, connections: Connections, seconds: float) -> str | None:
        """Return the first reason that a rank wrote, or that the lifeline notices here; None if there is none."""
        until = time.monotonic() + seconds
        while (reason := self.wait(0.05)) is None and time.monotonic() < until:
            if (loss := connections.groups.loss()) is not None:
                self.post(loss)
        return reason

    def of_own(self, connections: Connections, error: BaseException) -> None:
        """End this handler because this rank failed, and give the reason to the other ranks."""
        self.ended = self.reason(error)
        self.post(self.ended)
        connections.abort()

    def reason(self, error: BaseException) -> str:
        """Return why this rank failed, for the others."""
        if isinstance(error, StageError) and error.rank is not None:
            return (f"replica {self.grid.replica}, " if self.grid.replicas > 1 else "") + str(error)
        return f"{self.name}: {type(error).__name__}" + (f": {error}" if str(error) else "")


def call_with_timeout(seconds: float, call: Callable[[], T]) -> T | None:
    """Return the result of a call to the job's store; None if the store fails, or takes longer than `seconds`.

    A call to a store whose host has vanished never returns; its thread is left behind.
    """
    answers: queue.SimpleQueue[T | None] = queue.SimpleQueue()

    def answer() -> None:
        try:
            answers.put(call())
        except RuntimeError as error:
            log.debug("the job's store can't be reached: %s", error)
            answers.put(None)

    threading.Thread(target=answer, daemon=True, name="fpipe-store").start()
    with contextlib.suppress(queue.Empty):
        return answers.get(timeout=seconds)
    return None
