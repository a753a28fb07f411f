"""How a failure on one rank becomes a reason on all: through the job's store, then by broken connections."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from torch.distributed.distributed_c10d import Store

from fpipe.errors import StageError, TransportError
from fpipe.handlers.distributed.connections import Links, Lost

log = logging.getLogger("fpipe.transport")

T = TypeVar("T")
PATIENCE = 2.0  # seconds for an answer of the job's store


class Failures:
    """What failed, told through the job's store: the first reason stays."""

    def __init__(self, rank: int, store: Store) -> None:
        self.rank, self.store = rank, store
        self.ended: str | None = None
        self.steps = 0  # that any program on this handler has begun, on every rank the same

    def check(self) -> None:
        if self.ended is not None:
            raise TransportError(f"this handler ended with an earlier failure: {self.ended}; make a new one")

    def tell(self, reason: str, key: str = "failed") -> None:
        """Leave the reason, unless there is one already."""
        within(PATIENCE, lambda: self.store.compare_set(key, "", reason))

    def told(self, seconds: float, key: str = "failed") -> str | None:
        """The reason that a rank has left, looked for for a little while."""
        return within(seconds + PATIENCE, lambda: self._look(seconds, key))

    def _look(self, seconds: float, key: str) -> str | None:
        until = time.monotonic() + seconds
        while not self.store.check([key]):
            if time.monotonic() > until:
                return None
            time.sleep(0.02)
        return str(self.store.get(key), "utf-8")

    def of_peer(self, links: Links, lost: Lost) -> TransportError:
        """The error for a peer that can't be reached; ends this handler."""
        known = lost.peer if lost.peer != self.rank else None  # what goes to all is lost to nobody in particular
        if known is None and links.size == 2:
            known = 1 - self.rank
        peer = "a peer" if known is None else f"rank {known}"
        reason = self.told(0.2)  # a rank that fails leaves its reason before it breaks its connections
        if reason is None:
            reason = f"{peer} did not say why: did its script end, or was its process killed?"
            self.tell(f"rank {self.rank} lost {peer} while {lost}. {reason}")
        self.ended = reason
        links.abort()
        return TransportError(f"rank {self.rank} lost {peer} while {lost}. {reason}")

    def of_own(self, links: Links, error: BaseException) -> None:
        """Tell the peers that this rank failed; ends this handler."""
        placed = isinstance(error, StageError) and error.rank is not None
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self.ended = str(error) if placed else f"rank {self.rank}: {text}"
        self.tell(self.ended)
        links.abort()


class Watch(threading.Thread):
    """On CUDA, where the host does not wait: looks into the store once a second, as long as the handler lives.

    When a peer has failed, it breaks the connections, so that kernels that wait for the peer end.
    """

    def __init__(self, failures: Failures, links: Links) -> None:
        super().__init__(daemon=True, name="fpipe-watch")
        self.failures, self.links = weakref.ref(failures), weakref.ref(links)

    def run(self) -> None:
        while True:
            time.sleep(1.0)
            failures, links = self.failures(), self.links()
            if failures is None or links is None or failures.ended is not None:
                return
            reason = failures.told(0.0)
            if reason is not None:
                failures.ended = reason
                links.cut()
                return
            del failures, links


def within(seconds: float, ask: Callable[[], T]) -> T | None:
    """The job's store's answer, if it can be reached and it comes in time.

    A store whose host is gone without a word is waited for without end.
    """
    answers: queue.SimpleQueue[T | None] = queue.SimpleQueue()

    def answer() -> None:
        try:
            answers.put(ask())
        except RuntimeError as error:
            log.debug("the job's store can't be reached: %s", error)
            answers.put(None)

    threading.Thread(target=answer, daemon=True, name="fpipe-store").start()
    with contextlib.suppress(queue.Empty):
        return answers.get(timeout=seconds)
    return None
