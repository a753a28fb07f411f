"""Copies of memory checkpoints on other hosts: sent each step in a thread beside the compute, and fetched at a restart.

A copy is a file like those of the host's own processes, under the number of the process that it is of.

Invariants:
- a connection carries whole files, one after another: the table, the values and the tensors, then the record;
- the record is written last, so that a copy is whole or not there, whoever is killed;
- a process has a copy of its last step before it writes the next: a slow connection slows the steps down;
- what fails here ends the copies, with a warning, and never the training.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from fpipe.errors import TransportError
from fpipe.errors.tracebacks import warn
from fpipe.handlers.distributed.backends import FOREVER, Gloo
from fpipe.handlers.gloo import gloo_group
from fpipe.handlers.protocol import Span
from fpipe.interop.checkpoints.slots import (
    AT_TABLE,
    LOCKING,
    Lock,
    Slot,
    Stored,
    in_private,
    least_useful,
    lock_of,
    unfinished_of,
)
from fpipe.store import LIMIT, JobStore, bounded

SENDER, RECEIVER = 0, 1  # of a connection
Report = Mapping[str, Any]


class Transfer(NamedTuple):
    """A file that one process sends to another.

    Args:
        source, target: the numbers of the processes.
        part: the number of the process that wrote it.
    """

    source: int
    target: int
    part: int


def neighbours(reports: Sequence[Report], writers: Sequence[int]) -> list[Transfer]:
    """Return where each process sends its files: to one of the next host, in turn; empty if there is one host.

    >>> neighbours([{"host": "a"}, {"host": "a"}, {"host": "b"}], writers=[0, 1, 2])
    [Transfer(source=0, target=2, part=0), Transfer(source=1, target=2, part=1), Transfer(source=2, target=0, part=2)]
    """
    hosts = defaultdict[str, list[int]](list)
    for number, report in enumerate(reports):
        hosts[report["host"]].append(number)
    names = [*hosts]
    result = list[Transfer]()
    for at, name in enumerate(names):
        others = hosts[names[(at + 1) % len(names)]]
        own = [number for number in writers if reports[number]["host"] == name]
        result += [Transfer(number, others[i % len(others)], number) for i, number in enumerate(own)]
    return sorted(result) if len(names) > 1 else []


def fetches(reports: Sequence[Report], job: str, step: tuple[int, int]) -> list[Transfer]:
    """Return the files of a step that processes need and their hosts lack, each once for a host.

    A process needs what a process that held the same has written. One that holds something else than any did, as in
    another placement, may need every file.

    >>> there = {"host": "a", "holds": 7, "parts": [("j", 1, 5, 7, 2, 0), ("j", 1, 5, 8, 2, 1)]}
    >>> fetches([there, {"host": "b", "holds": 8, "parts": []}], "j", (1, 5))
    [Transfer(source=0, target=1, part=1)]
    >>> fetches([there, {"host": "b", "holds": 9, "parts": []}], "j", (1, 5))
    [Transfer(source=0, target=1, part=0), Transfer(source=0, target=1, part=1)]
    """
    held = defaultdict[str, dict[int, int]](dict)  # by host: what a process held, and its number
    processes = defaultdict[str, list[int]](list)
    for number, report in enumerate(reports):
        processes[report["host"]].append(number)
        rows = (row for row in report["parts"] if row[0] == job and row[1:3] == step)
        held[report["host"]].update({holds: part for *_, holds, _, part in rows})
    sources = {h: (processes[host][0], part) for host, there in held.items() for h, part in there.items()}
    result = list[Transfer]()
    for host, own in processes.items():
        wanted = {reports[number]["holds"] for number in own}
        missing = sorted((wanted if wanted <= sources.keys() else sources.keys()) - held[host].keys())
        result += [Transfer(sources[h][0], own[i % len(own)], sources[h][1]) for i, h in enumerate(missing)]
    return sorted(result)


def connected(purpose: str, transfers: Sequence[Transfer], number: int, timeout: float | None) -> dict[Transfer, Any]:
    """Connect the two processes of each transfer that this one has a part in. All make the same call.

    Args:
        purpose: of no other call of the job, whose store may outlive processes.

    Raises:
        TransportError: the other process did not come.
    """
    limit, groups = timeout or LIMIT, dict[Transfer, Any]()
    for each in transfers:  # in one order on all: of those that are not connected, the first can be
        if number in each[:2]:
            store = JobStore(None, limit).store
            name = PrefixStore(f"fpipe/memory/{purpose}/{each.source}-{each.target}-{each.part}", store)
            place = SENDER if number == each.source else RECEIVER
            try:
                groups[each] = bounded(partial(gloo_group, name, place, 2, limit), limit)
            except (RuntimeError, TimeoutError) as error:
                raise TransportError(
                    f"process {number} could not connect to process {each[1 - place]} for memory checkpoints: {error}"
                ) from error
    return groups


class Limit:
    """A time limit for several waits together, which begins now."""

    def __init__(self, seconds: float | None) -> None:
        self._until = time.monotonic() + (seconds or LIMIT)

    @property
    def left(self) -> timedelta:
        """What is left, and a moment at least, after which gloo's waits fail."""
        return timedelta(seconds=max(0.001, self._until - time.monotonic()))


def send(group: Any, content: Tensor, limit: Limit) -> None:
    """Send a file that does not change meanwhile, until the other process has it; an empty one removes the copies.

    Raises:
        RuntimeError: the other process has ended, or does not answer in time.
    """
    messages = [torch.tensor([content.numel()])]
    if content.numel():
        messages += [content[AT_TABLE:], content[:AT_TABLE]]  # the record last
    for message in messages:
        group.send([message], RECEIVER, 0).wait(limit.left)
    group.recv([torch.empty(1, dtype=torch.uint8)], RECEIVER, 0).wait(limit.left)


def receive(group: Any, memory_of: Callable[[int], memoryview], timeout: float | None, first: timedelta) -> bool:
    """Receive a file; return False if it is empty. `acknowledge` is to follow.

    Args:
        memory_of: returns memory for so many bytes.
        first: how long to wait until it comes.

    Raises:
        RuntimeError: the other process has ended, or is not done in time.
    """
    size = torch.zeros(1, dtype=torch.int64)
    group.recv([size], SENDER, 0).wait(first)
    if size.item():
        limit, head = Limit(timeout), torch.empty(AT_TABLE, dtype=torch.uint8)
        memory = torch.frombuffer(memory_of(int(size)), dtype=torch.uint8)
        group.recv([memory[AT_TABLE:]], SENDER, 0).wait(limit.left)
        group.recv([head], SENDER, 0).wait(limit.left)
        memory[:AT_TABLE].copy_(head)
    return bool(size)


def acknowledge(group: Any, timeout: float | None) -> None:
    group.send([torch.zeros(1, dtype=torch.uint8)], SENDER, 0).wait(Limit(timeout).left)


def fetch(group: Any, folder: Path, part: int, timeout: float | None, useful: Collection[tuple[int, int]]) -> None:
    """Receive a step of a process. Once it is whole, it replaces the least useful that this host has of the process.

    Args:
        useful: steps that may be loaded.

    Raises:
        OSError: another process writes them, there is no room, or it has not the bytes that were written.
        RuntimeError: the other process has ended, or is not done in time.
    """
    lock, unfinished = Lock(lock_of(folder, part)), unfinished_of(folder, part)
    _take(lock)
    unfinished.unlink(missing_ok=True)
    try:
        receive(group, lambda size: Slot(unfinished, size).cleared(size), timeout, Limit(timeout).left)
        stored = Stored.read(unfinished)
        if stored is None or not stored.is_right:
            raise OSError(f"process {part}'s has not the bytes that were written, by their sum")
        unfinished.replace(least_useful(folder, part, useful))
        acknowledge(group, timeout)
    finally:
        unfinished.unlink(missing_ok=True)
        lock.remove()


def _take(lock: Lock) -> None:
    """Take the lock of a process's files.

    Raises:
        OSError: another process has it.
    """
    if not in_private(lock.path.parent, lambda: lock.take(LOCKING)):
        raise OSError(f"another process has {lock.path}")


class Copy:
    """The copies of another process's files.

    Args:
        paths: in the order in which they are written.

    Raises:
        OSError: another process has them.
    """

    def __init__(self, part: int, paths: Sequence[Path]) -> None:
        self.part, self.paths, self._next = part, paths, 0
        self._slots: list[Slot | None] = [None] * len(paths)
        self._lock = Lock(lock_of(paths[0].parent, part))
        self.removed = threading.Event()
        _take(self._lock)

    def receive(self, group: Any, timeout: float | None) -> None:
        """Receive a file; remove all where the process removes its own.

        Raises:
            OSError: another process writes them, or there is no room.
            RuntimeError: the other process has ended.
        """
        if receive(group, self._memory, timeout, FOREVER):
            self._next = (self._next + 1) % len(self.paths)
        else:
            self.remove()
        acknowledge(group, timeout)

    def _memory(self, size: int) -> memoryview:
        _take(self._lock)
        self.removed.clear()
        slot = self._slots[self._next]
        if slot is None or not slot.is_there:
            slot = self._slots[self._next] = Slot(self.paths[self._next], size)
        return slot.cleared(size)

    def remove(self) -> None:
        """Remove the files. The process may send others."""
        if any(path.exists() for path in self.paths) and self._lock.take():
            for path in self.paths:
                path.unlink(missing_ok=True)
        self.end()

    def end(self) -> None:
        """Give the files up, and leave them there."""
        self._slots = [None] * len(self.paths)
        self._lock.remove()
        self.removed.set()


class Sender:
    """Sends the files of this process, in a thread, until one can't be sent.

    Args:
        target: the number of the process that gets them.
        spans: of the timeline.
    """

    def __init__(self, group: Any, target: int, timeout: float | None, spans: deque[Span] | None) -> None:
        self.target, self._spans = target, spans
        self._group, self._timeout = group, timeout
        self._files: queue.SimpleQueue[tuple[Tensor, threading.Event] | None] = queue.SimpleQueue()
        self._sent = threading.Event()
        self._sent.set()
        self.error: Exception | None = None
        threading.Thread(target=self._run, daemon=True, name="fpipe-memory-send").start()

    def begin(self, content: Tensor) -> None:
        """Begin to send a file, once the one before is sent."""
        self._sent = threading.Event()
        self._files.put((content, self._sent))

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the other process has the last file, which may be written again then, or it can't be sent.

        Args:
            seconds: by default, as long as it takes: the handler's timeout at most.

        Returns:
            whether the time was enough.
        """
        return self._sent.wait(seconds)

    def close(self) -> None:
        self._files.put(None)

    def _run(self) -> None:
        while (item := self._files.get()) is not None:
            content, sent = item
            if self.error is None:
                self._send(content)
            sent.set()
        if self.error is None:
            Gloo().cut([self._group])

    def _send(self, content: Tensor) -> None:
        span = Span(f"memory checkpoint to process {self.target}", time.perf_counter())
        if self._spans is not None:
            self._spans.append(span)
        try:
            send(self._group, content, Limit(self._timeout))
        except RuntimeError as error:
            self.error = error
            Gloo().cut([self._group])  # the other process waits for no more of them
        span.end = time.perf_counter()


def receive_all(group: Any, copy: Copy, timeout: float | None) -> None:
    """Receive files until the connection ends, in a thread."""

    def run() -> None:
        try:
            while True:
                copy.receive(group, timeout)
        except OSError as error:
            warn(f"no copies of another host's memory checkpoints: {error}")
        except RuntimeError:  # the other process has ended
            pass
        copy.end()
        Gloo().cut([group])

    threading.Thread(target=run, daemon=True, name="fpipe-memory-receive").start()
