"""The job's store, in which all processes of a job write and read texts by key. Every wait for it is bounded.

A call to a store whose host is stopped, or has vanished, never returns. So each call runs in a thread of its own, which
is left behind when the time limit is over. This is the only module that polls the store.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from fpipe.errors import TransportError
from fpipe.errors.tracebacks import warn

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")
FIRST_PAUSE, LAST_PAUSE = 0.001, 0.1  # seconds between two looks into the store
SLICE = 0.2  # seconds of a wait for an answer between two calls of `check`
LIMIT = 300.0  # seconds, where the caller has no time limit of its own
LEAST = 1.0  # seconds for an answer, also to a call at the end of a time limit for several


class StoreError(TransportError):
    """The job's store does not answer in time, or its process has ended."""

    has_ended = False


def _go_on() -> None:
    """Let every wait go on."""


def bounded(call: Callable[[], T], timeout: float | None, check: Callable[[], None] = _go_on) -> T:
    """Return the result of a call that may never return; it runs in a thread, which is left behind after the limit.

    Args:
        timeout: seconds; None: until `check` raises.
        check: raises an error when the wait can't end; called again and again.

    Raises:
        TimeoutError: the call has not returned in time.
    """
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def attempt() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=attempt, daemon=True, name="fpipe-bounded").start()
    until = float("inf") if timeout is None else time.monotonic() + timeout
    while True:
        try:
            result, error = answers.get(timeout=max(0.0, min(SLICE, until - time.monotonic())))
        except queue.Empty:
            check()
            if time.monotonic() >= until:
                raise TimeoutError(f"it did not return within timeout={timeout:g} s") from None
            continue
        if error is not None:
            raise error
        return result  # type: ignore[return-value]


def polls(until: float, check: Callable[[], None], first: float, last: float) -> Iterator[None]:
    """Iterate until a time of `time.monotonic`, and once at least, with pauses that grow.

    Args:
        check: as of `bounded`.
        first, last: the shortest and the longest pause, in seconds.
    """
    yield
    while time.monotonic() < until:
        check()
        time.sleep(first)
        yield
        first = min(2 * first, last)


class JobStore:
    """A client of the job's store.

    Args:
        store: of torch.distributed; by default that of the job.
        timeout: seconds for the answer to one call, and for what other processes write; None: until `check` raises.
        check: as of `bounded`.
        until: the time of `time.monotonic` at which the limit is over for all calls together, if there is one.

    Raises:
        StoreError: (by all methods) the store does not answer in time, or has failed; names its host.
    """

    def __init__(
        self,
        store: Store | None,
        timeout: float | None,
        check: Callable[[], None] = _go_on,
        until: float | None = None,
    ) -> None:
        self.timeout, self.until, self._check = timeout, until, check
        self.store: Any = _default_store() if store is None else store

    def under(self, prefix: str) -> JobStore:
        """Return the same store under a prefix."""
        from torch.distributed.distributed_c10d import PrefixStore

        return JobStore(PrefixStore(prefix, self.store), self.timeout, self._check, self.until)

    def within(self, seconds: float) -> JobStore:
        """Return the same store with another limit, and no check."""
        return JobStore(self.store, seconds)

    def clone(self) -> JobStore:
        """Return a client with a connection of its own, which no other call can block."""
        return JobStore(self._ask(lambda: self.store.clone()), self.timeout, self._check, self.until)

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self.store.set(key, value))

    def append(self, key: str, value: str) -> None:
        self._ask(lambda: self.store.append(key, value))

    def add(self, key: str, number: int) -> int:
        """Add to a number, which begins at 0; return the sum."""
        return self._ask(lambda: int(self.store.add(key, number)))

    def get(self, key: str) -> str:
        """Return the text of a key that is there."""
        return self._ask(lambda: str(self.store.get(key), "utf-8"))

    def multi_get(self, keys: Sequence[str]) -> list[str]:
        """Return the texts of keys that are there."""
        return self._ask(lambda: [str(each, "utf-8") for each in self.store.multi_get([*keys])])

    def has(self, *keys: str) -> bool:
        """Return whether all keys are there."""
        return self._ask(lambda: bool(self.store.check([*keys])))

    def compare_set(self, key: str, expected: str, value: str) -> str:
        """Write a value if the key has the expected one, or is not there and "" is expected; return what it has."""
        return self._ask(lambda: str(self.store.compare_set(key, expected, value), "utf-8"))

    def delete(self, key: str) -> None:
        self._ask(lambda: self.store.delete_key(key))

    def polls(self, until: float | None = None) -> Iterator[None]:
        """Iterate until a time of `time.monotonic`, by default the end of the time limit: see `polls`."""
        return polls(self._end() if until is None else until, self._check, FIRST_PAUSE, LAST_PAUSE)

    def appear(self, *keys: str, until: float | None = None) -> bool:
        """Wait until all keys are there; return False if the time is over before that."""
        return any(self.has(*keys) for _ in self.polls(until))

    def _end(self) -> float:
        if self.until is not None:
            return self.until
        return float("inf") if self.timeout is None else time.monotonic() + self.timeout

    def _ask(self, call: Callable[[], T]) -> T:
        left = None if (end := self._end()) == float("inf") else max(LEAST, end - time.monotonic())
        try:
            return bounded(call, left, self._check)
        except TimeoutError:
            raise StoreError(
                f"the job's store{host_of(self.store)} does not answer within timeout={self.timeout:g} s: is its "
                "process stopped, or can its host not be reached?"
            ) from None
        except TransportError:
            raise
        except RuntimeError as error:
            self._check()
            failure = StoreError(
                f"the job's store{host_of(self.store)} can't be reached ({str(error).strip().splitlines()[0]}): has "
                "its process ended?"
            )
            failure.has_ended = True
            raise failure from error


def lasting_store(timeout: float) -> JobStore | None:
    """Return a client of the store that outlives the workers which torchrun starts again; None where there is none.

    All jobs of a store, and all starts of a job, share its keys.
    """
    if is_hosted_by_rank_0():
        return None
    store = _default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return JobStore(store, timeout)


def host_of(store: Any) -> str:
    """Return a text about the process that hosts a store, if it is known."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if host is None:
        return ""
    by = "the process of rank 0" if is_hosted_by_rank_0() else "torchrun"
    return f" at {host}:{port}, which {by} hosts,"


def is_hosted_by_rank_0() -> bool:
    """Return whether torch makes the job's store in the process of rank 0, and not in that of torchrun."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def warn_of_shared_store() -> None:
    """Warn of a store of torchrun's with which a job on several hosts does not survive the loss of one."""
    if not is_hosted_by_rank_0() and int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
        warn(
            "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, on each host: else, when a host is lost or comes, "
            "the others look for a store that is gone"
        )


def _default_store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
