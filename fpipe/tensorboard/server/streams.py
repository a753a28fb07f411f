"""One long answer at a time: made as the client takes it, and given up when the client does. No torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from math import inf

from werkzeug.exceptions import Conflict

STALLED = 30.0  # seconds after which a client that takes nothing loses its turn


class Turns:
    """Lets one stream run at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: Stream | None = None

    def begin(self, pieces: Iterator[bytes]) -> Stream:
        """Return the pieces as the one stream that runs.

        Raises:
            Conflict: another one runs, whose client takes it.
        """
        with self._lock:
            running = self._running
            if running is not None and not running.ended and time.monotonic() - running.taken < STALLED:
                raise Conflict("another export is being made: wait until it has ended, or cancel it")
            if running is not None:
                running.ended = True
            self._running = Stream(pieces)
            return self._running


class Stream(Iterator[bytes]):
    """An answer in pieces. The server closes it when all of it is sent, and when the client is gone.

    Attributes:
        taken: when the client took the last piece, by the monotonic clock; infinite while the next one is made.
        ended: whether it runs no more.
    """

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self.taken, self.ended = pieces, time.monotonic(), False

    def __next__(self) -> bytes:
        if self.ended:
            raise ConnectionAbortedError("another export has begun, since nothing was taken of this one")
        self.taken = inf
        try:
            return next(self._pieces)
        finally:
            self.taken = time.monotonic()

    def close(self) -> None:
        self.ended = True
