"""Copies of memory checkpoints on other hosts: sent each step in a thread beside the compute, and fetched at a restart.

A copy is a file like those of the host's own processes, under the number of the process that it is of.

Invariants:
- a connection carries whole files, one after another: the table, the values and the tensors, then the record;
- the record is written last, so that a copy is whole or not there, whoever is killed;
- a file is not written again before it is sent: a slow connection slows the steps down, and its copies are behind;
- what fails here ends the copies, with a warning, and never the training.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
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
from fpipe.interop.checkpoints.slots import AT_TABLE, LOCKING, Lock, Slot, file_of, lock_of, make_private
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


def send(group: Any, content: Tensor, limit: timedelta) -> None:
    """Send a file that does not change meanwhile; an empty one removes the copy."""
    messages = [torch.tensor([content.numel()])]
    if content.numel():
        messages += [content[AT_TABLE:], content[:AT_TABLE]]  # the record last
    for message in messages:
        group.send([message], RECEIVER, 0).wait(limit)


class Copy:
    """The copies of another process's files.

    Args:
        first: the number of the file that is written first.

    Raises:
        OSError: another process has them.
    """

    def __init__(self, folder: Path, part: int, first: int = 0) -> None:
        self.part, self._folder, self._next = part, folder, first
        self._slots: list[Slot | None] = [None, None]
        self._lock = Lock(lock_of(folder, part))
        self.removed = threading.Event()
        self._take()

    def receive(self, group: Any, limit: timedelta) -> bool:
        """Receive a file; return False if the process removes its files instead.

        Raises:
            OSError: another process writes them, or there is no room.
            RuntimeError: the other process has ended.
        """
        size = torch.zeros(1, dtype=torch.int64)
        group.recv([size], SENDER, 0).wait(FOREVER)
        if not size.item():
            return False
        self._take()
        self.removed.clear()
        slot = self._slots[self._next] or Slot(file_of(self._folder, self.part, self._next), int(size))
        self._slots[self._next] = slot
        memory = torch.frombuffer(slot.cleared(int(size)), dtype=torch.uint8)
        group.recv([memory[AT_TABLE:]], SENDER, 0).wait(limit)
        head = torch.empty(AT_TABLE, dtype=torch.uint8)
        group.recv([head], SENDER, 0).wait(limit)
        memory[:AT_TABLE].copy_(head)
        self._next = 1 - self._next
        return True

    def remove(self) -> None:
        if self._lock.is_taken:
            for generation in range(2):
                file_of(self._folder, self.part, generation).unlink(missing_ok=True)
        self.end()
        self.removed.set()

    def _take(self) -> None:
        make_private(self._folder)
        if not self._lock.take(LOCKING):
            raise OSError(f"another process has {self._lock.path}")

    def end(self) -> None:
        """Give the files up, and leave them there."""
        self._slots = [None, None]
        self._lock.remove()


class Sender:
    """Sends the files of this process, in a thread, until one can't be sent.

    Args:
        target: the number of the process that gets them.
        spans: of the timeline.
    """

    def __init__(self, group: Any, target: int, timeout: float | None, spans: deque[Span] | None) -> None:
        self._text, self._spans = f"memory checkpoint to process {target}", spans
        self._group, self._limit = group, timedelta(seconds=timeout or LIMIT)
        self._files: queue.SimpleQueue[tuple[Tensor, threading.Event] | None] = queue.SimpleQueue()
        self._sent = dict[Path, threading.Event]()
        self.error: Exception | None = None
        threading.Thread(target=self._run, daemon=True, name="fpipe-memory-send").start()

    def begin(self, path: Path, content: Tensor) -> None:
        """Begin to send a file."""
        self._sent[path] = sent = threading.Event()
        self._files.put((content, sent))

    def wait(self, path: Path) -> None:
        """Wait until a file is sent, so that it may be written again."""
        if (sent := self._sent.pop(path, None)) is not None:
            sent.wait()

    def close(self) -> None:
        self._files.put(None)

    def _run(self) -> None:
        while (item := self._files.get()) is not None:
            content, sent = item
            span = Span(self._text, time.perf_counter())
            if self._spans is not None:
                self._spans.append(span)
            if self.error is None:
                try:
                    send(self._group, content, self._limit)
                except RuntimeError as error:
                    self.error = error
            span.end = time.perf_counter()
            sent.set()
        Gloo().cut([self._group])


def receive_all(group: Any, copy: Copy, timeout: float | None) -> None:
    """Receive files until the connection ends, in a thread."""
    limit = timedelta(seconds=timeout or LIMIT)

    def run() -> None:
        try:
            while True:
                if not copy.receive(group, limit):
                    copy.remove()
        except OSError as error:
            warn(f"no copies of another host's memory checkpoints: {error}")
        except RuntimeError:  # the other process has ended
            pass
        copy.end()
        copy.removed.set()
        Gloo().cut([group])

    threading.Thread(target=run, daemon=True, name="fpipe-memory-receive").start()
