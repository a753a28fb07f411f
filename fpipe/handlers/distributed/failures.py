"""The failures of a handler: its ranks write them into the job's store, and read those of the others there."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple

from torch.distributed.distributed_c10d import Store

from fpipe.errors import StageError, TransportError
from fpipe.handlers.distributed.grid import Grid
from fpipe.store import JobStore, StoreError, is_hosted_by_rank_0

log = logging.getLogger("fpipe.transport")

LENT = (
    "Pieces of the step had begun collectives, on groups that can't be connected again, so the handler has ended: make "
    "these groups and the handler anew, and go on from a checkpoint"
)
DONATED = (
    "A rank had updated params in place, as the optimizer's donate=True lets it, so the handler has ended: make a new "
    "one, and go on from a checkpoint"
)
STORE_TIMEOUT = 2.0  # seconds for an answer of the job's store


class Failure(NamedTuple):
    """A step that failed on a rank that is still there.

    Args:
        step: its number, counted over all steps and set-ups of the handler.
        reason: why, for the other ranks.
        process: the number of the rank that failed.
        repeatable: running it changed nothing that a rank keeps, as of `evaluate`: ranks that had finished it go on.
    """

    step: int
    reason: str
    process: int
    repeatable: bool = False


class Failures:
    """The failures of one handler. Of those that end it the first one counts.

    Args:
        name: of this process, for messages.
        ended: the reason why this handler can't be used any more.
        epoch: how often the ranks have connected again after a failed step; the same on every rank.
        calls: how many roll calls have begun in this epoch; the same on every rank.
    """

    def __init__(self, grid: Grid, store: Store) -> None:
        self.grid, self.rank, self.store = grid, grid.number, store
        self.jobs = JobStore(store, STORE_TIMEOUT)
        self.name = grid.name(grid.number)
        self.ended: str | None = None
        self.epoch = self.calls = 0

    def check(self) -> None:
        """Raise TransportError if this handler has ended."""
        if self.ended is not None:
            raise TransportError(
                f"this handler ended with an earlier failure: {self.ended}; make a new one, or start again if a rank "
                "is gone"
            )

    # What ends the handler

    def post(self, reason: str, key: str = "failed") -> None:
        """Write the reason into the store, unless there is one already."""
        with self.quietly():
            self.jobs.compare_set(key, "", reason)

    def wait(self, seconds: float, key: str = "failed") -> str | None:
        """Return the reason that a rank wrote; None if there is none after some seconds."""
        with self.quietly():
            for _ in self.jobs.polls(time.monotonic() + seconds):
                if self.jobs.has(key) and (reason := self.jobs.get(key)):
                    return reason
        return None

    @cached_property
    def _pieces(self) -> JobStore:
        """The reasons by group of the job's processes, whichever handler they belong to."""
        return JobStore(None, STORE_TIMEOUT).under("fpipe/pieces")

    def spread(self, groups: Iterable[str]) -> None:
        """Write why this handler ends for the other processes of groups, which may be ranks of other handlers."""
        if (reason := self.ended or self.wait(0.0)) is not None:
            with self.quietly():
                for group in groups:
                    self._pieces.compare_set(group, "", reason)

    def reason_of(self, group: str) -> str | None:
        """Return why a process of a group, of any handler, has ended its collectives; None if none has."""
        with self.quietly():
            if self._pieces.has(group):
                return self._pieces.get(group)
        return None

    def host_failure(self) -> StoreError | None:
        """Return the error of the job's store, where the process of rank 0 hosts it and is stopped or has ended."""
        try:
            self.jobs.has("failed")
        except StoreError as error:
            return error if is_hosted_by_rank_0() else None
        return None

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Go on where the job's store is silent."""
        try:
            yield
        except StoreError as error:
            log.debug("%s", error)

    # Steps that failed

    @property
    def key(self) -> str:
        """The key of this epoch's failed steps, one in a line."""
        return f"failed steps {self.epoch}"

    def begin_epoch(self) -> None:
        """Begin the epoch after a failed step."""
        with self.quietly():
            self.jobs.compare_set(f"failed steps {self.epoch + 1}", "", "")  # before the watchdog asks
        self.epoch, self.calls = self.epoch + 1, 0

    def record(self, failure: Failure) -> None:
        """Write a failed step of this rank."""
        with self.quietly():
            self.jobs.append(self.key, json.dumps(failure) + "\n")

    def read(self) -> tuple[str | None, list[Failure]] | None:
        """Return why the handler has ended, if it has, and this epoch's failed steps; None if the store is silent."""
        answer: list[str] = []
        with self.quietly():
            answer = self.jobs.multi_get(["failed", self.key])
        return (answer[0] or None, failed_steps(answer[1])) if answer else None

    def reason(self, error: BaseException) -> str:
        """Return why this rank failed, for the others."""
        if isinstance(error, StageError) and error.rank is not None:
            return (f"replica {self.grid.replica}, " if self.grid.replicas > 1 else "") + str(error)
        return f"{self.name}: {type(error).__name__}" + (f": {error}" if str(error) else "")


def failed_steps(text: str | bytes) -> list[Failure]:
    """Return the failed steps of the lines that ranks wrote."""
    return [Failure(*json.loads(line)) for line in text.splitlines()]
