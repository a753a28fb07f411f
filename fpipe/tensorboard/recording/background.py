"""A thread for work that would slow a step down. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from fpipe.errors.tracebacks import warn

QUEUE_LENGTH = 4  # tasks that may wait


class Background:
    """Runs tasks one after another. The first failure is a warning, and ends it: later tasks are dropped."""

    def __init__(self) -> None:
        self.failed = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="fpipe recorder")
        self._running: deque[Future[None]] = deque()

    def do(self, task: Callable[[], None]) -> None:
        """Run a task after the earlier ones; wait if too many are queued."""
        while self._running and (self._running[0].done() or len(self._running) >= QUEUE_LENGTH):
            self._settle()
        if not self.failed:
            self._running.append(self._pool.submit(task))

    def wait(self) -> None:
        """Wait until every task has ended."""
        while self._running:
            self._settle()

    def close(self) -> None:
        """Wait for every task, and end the thread."""
        self.wait()
        self._pool.shutdown()

    def fail(self, error: Exception) -> None:
        """Warn of an error, and drop all later tasks."""
        if not self.failed:
            self.failed = True
            warn(f"nothing more is recorded ({type(error).__name__}: {error}); training goes on")

    def _settle(self) -> None:
        try:
            self._running.popleft().result()
        except Exception as error:  # of any kind: training goes on
            self.fail(error)
