"""One thread that does what would keep a step waiting, in order. No torch."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

WAITING = 4  # tasks that may wait


class Background:
    """A first failure is told, once, and what follows is left out: whoever gives the tasks goes on."""

    def __init__(self) -> None:
        self.failed = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="fpipe recorder")
        self._under_way: deque[Future[None]] = deque()

    def do(self, task: Callable[[], None]) -> None:
        """Do it after what came before; waits where that is too much."""
        while self._under_way and (self._under_way[0].done() or len(self._under_way) >= WAITING):
            self._settle()
        if not self.failed:
            self._under_way.append(self._pool.submit(task))

    def wait(self) -> None:
        """Wait until all is done."""
        while self._under_way:
            self._settle()

    def close(self) -> None:
        """Wait, and end the thread."""
        self.wait()
        self._pool.shutdown()

    def fail(self, error: Exception) -> None:
        """Tell what failed, and do nothing more."""
        if not self.failed:
            self.failed = True
            warnings.warn(f"nothing more is recorded ({type(error).__name__}: {error}); training goes on", stacklevel=6)

    def _settle(self) -> None:
        try:
            self._under_way.popleft().result()
        except Exception as error:
            self.fail(error)
