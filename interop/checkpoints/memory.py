"""Memory checkpoints: the training state of the last steps in shared memory, which outlives the processes of a job.

Source: GEMINI (Wang et al., SOSP 2023): checkpoints in the memory of hosts, and of their neighbours, each step.

Invariants:
- a process writes all that it holds; of several on a host that hold the same, the first one does;
- the step before stays until all processes have written this one: no process is two steps behind another;
- with neighbours, the step before that stays too: each process has copies of one when all have written the next.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fpipe.errors.arguments import checked_class
from fpipe.errors.tracebacks import warn
from fpipe.handlers.distributed.backends import Gloo
from fpipe.handlers.protocol import Handler
from fpipe.interop.checkpoints.choice import Choice, Report
from fpipe.interop.checkpoints.layout import ROOM, Layout
from fpipe.interop.checkpoints.manifest import CheckpointError
from fpipe.interop.checkpoints.memory_reader import MemoryReader
from fpipe.interop.checkpoints.names import flat
from fpipe.interop.checkpoints.neighbours import (
    Copy,
    Limit,
    Sender,
    Transfer,
    connected,
    fetch,
    fetches,
    receive_all,
    send,
)
from fpipe.interop.checkpoints.room import Want, check_room, file_system_room, no_room, room_in
from fpipe.interop.checkpoints.slots import (
    GENERATIONS,
    LOCKING,
    Lock,
    Slot,
    Stored,
    checksum,
    files_of,
    folder_of,
    generations_of,
    holds,
    host_of,
    in_private,
    in_turn,
    lock_of,
    make_private,
    part_of,
    stored_in,
    unfinished_of,
)
from fpipe.stages.pipeline import Pipeline

COPIES = 2  # generations of another process's files
LONG = 1.0  # seconds that a step may wait for the copy of the one before until the user is told
REMOVED = (
    "another program has removed {} while the run writes it, and it is made again: with RemoveIPC=yes, systemd removes "
    "a user's files in shared memory once the user has logged out"
)
END = 10.0  # seconds for the neighbours to end, at the end of a run


@checked_class()
@dataclass(frozen=True)
class Memory:
    """Checkpoints of a run's last steps in shared memory, `Checkpoints(..., memory=Memory())`; see `resume`.

    They outlive the processes of a job, but not its hosts: a job that is started again after a process was killed loses
    the step that ran, and no other. Each host has two of them, so that one is whole whenever a process is killed; with
    `neighbour` three, and two of another host's, so that one is whole whenever a host is lost. They are files that this
    user alone can read, in a folder named after the user and the folder of the checkpoints, and are removed when the
    run ends.

    Args:
        every: how many steps from one to the next. A process copies what it holds between two steps.
        neighbour: send each to a process of another host as well, while the next step runs; then a host may be lost.
        folder: of shared memory.

    Raises:
        ValueError: `every` is no number of steps.

    >>> Memory(every=10)
    Memory(every=10, neighbour=False, folder='/dev/shm')
    """

    every: int = 1
    neighbour: bool = False
    folder: str | os.PathLike[str] = "/dev/shm"

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"Memory: every must be a number of steps, at least 1, not {self.every!r}")


class MemoryCheckpoints:
    """The memory checkpoints of this process.

    Args:
        checkpoints: the folder of those on disk.
        number: of this process among all.
        states: how many replicas have a state of their own; 1 where they share it.
    """

    def __init__(
        self,
        options: Memory,
        checkpoints: Path,
        pipeline: Pipeline,
        handler: Handler,
        number: int,
        states: int,
    ) -> None:
        if not Path(options.folder).is_dir():
            raise ValueError(f"there is no folder {options.folder} of shared memory: pass Memory(folder=...)")
        self.every = options.every
        self.folder = folder_of(Path(options.folder), checkpoints)
        self._checkpoints, self._pipeline, self._number, self._states = checkpoints, pipeline, number, states
        self._neighbour, self._spans = options.neighbour, handler.beside
        self._timeout = None if handler.peers is None else handler.peers.timeout
        self._lock = Lock(lock_of(self.folder, number))
        self._sender: Sender | None = None
        self._copies, self._copied = list[Copy](), set[int]()
        self._paths = list[Path]()  # of this process, in turn
        self._turns, self._sizes = dict[int, list[Path]](), dict[int, int]()  # by part
        self._loaded: tuple[int, int] | None = None
        self._slots = list[_Generation | None]()
        self._has_waited = False
        self._choice: Choice | None = None
        self._layout: Layout | None = None
        self._writes = self._next = 0

    def report(self, sections: Mapping[str, Any], first: tuple[str, str, int, int] | None) -> Report:
        """Return this process's report.

        Args:
            first: on the first process, the names of the job and of this start, and number and step of the last
                checkpoint on disk.

        Raises:
            PermissionError: the folder is not this user's alone.
        """
        make_private(self.folder)
        layout = Layout(sections, self._pipeline)
        self._choice, self._held = None, layout.holds
        return {
            "host": host_of(self.folder.parent.parent),
            "holds": self._held,
            "options": (self.every, self._neighbour),
            "bytes": layout.expected + layout.texts,
            "first": first,
            "parts": [
                (each.table["job"], each.attempt, each.step, each.table["holds"], each.table["parts"], each.part)
                for each in stored_in(self.folder)
            ],
        }

    def fetch(self, reports: Sequence[Report], choice: Choice, step: tuple[int, int]) -> Callable[[], None] | None:
        """Return a function that gets the parts of a step that this host needs and lacks; None if no host lacks any.

        All processes call it, if any does.

        Raises:
            CheckpointError: (by it) there is no room for a part, or it can't be sent.
        """
        transfers = fetches(reports, choice.job, step)
        if not transfers:
            return None

        def run() -> None:
            groups: dict[Transfer, Any] = {}
            try:
                groups |= connected(f"{choice.start}/fetch {step}", transfers, self._number, self._timeout)
                for each, group in groups.items():
                    if each.target == self._number:
                        fetch(group, self.folder, each.part, self._timeout, choice.steps)
                        continue
                    (part,) = (one for one in self.reader(step).parts if one.part == each.part)
                    send(group, torch.from_numpy(part.content), Limit(self._timeout))
            except (OSError, RuntimeError) as error:
                Gloo().cut([*groups.values()])  # the other processes wait for no more
                raise CheckpointError(f"its parts can't be fetched from another host: {error}") from error

        return run

    def reader(self, step: tuple[int, int]) -> MemoryReader:
        return MemoryReader(self.folder, step)

    def claim(
        self,
        choice: Choice,
        reports: Sequence[Report],
        loaded: tuple[int, int] | None,
        sections: Mapping[str, Any],
    ) -> Want:
        """Take the files of a run, and remove those that it did not load; return the room that they want.

        Raises:
            CheckpointError: another job writes them.
        """
        self._choice, self._loaded, self._writes, self._next = choice, loaded, 0, 0
        self._layout = Layout(sections, self._pipeline)
        pairs = choice.neighbours if self._neighbour else []
        self._remove(self._kept)
        self._copied = {each.part for each in pairs if each.target == self._number}
        self._sizes = {part: reports[part]["bytes"] for part in self._copied}
        self._turns = {part: in_turn(self.folder, part, COPIES, loaded) for part in self._copied}
        self._copies = [Copy(part, paths) for part, paths in self._turns.items()]
        if choice.writes:
            self._take()
            self._sizes[self._number] = self._layout.expected + self._layout.texts
            self._turns[self._number] = in_turn(self.folder, self._number, GENERATIONS if pairs else 2, loaded)
        self._paths = self._turns.get(self._number, [])
        self._slots = [None] * len(self._paths)
        wanted = sum(max(0, self._sizes[part] - _size(path)) for part, paths in self._turns.items() for path in paths)
        return Want(wanted, *room_in(self.folder))

    def begin(self, reports: Sequence[Report], wants: Sequence[Want]) -> None:
        """Take the room that all processes want, and connect neighbours.

        Raises:
            OSError: there is too little on a host.
            TransportError: a neighbour did not come.
        """
        assert self._choice is not None
        check_room(self.folder, [report["host"] for report in reports], wants)
        try:
            self._reserve()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            room = file_system_room(self.folder)
            raise no_room(self.folder, [self._number], wants[self._number].bytes, room) from error
        self._connect(self._choice.neighbours if self._neighbour else [])

    def withdraw(self) -> None:
        """Give up what was claimed, as when another process was refused. The step that was loaded stays."""
        if self._choice is None:
            return
        if self._sender is not None:
            self._sender.close()
        for copy in self._copies:
            copy.end()
        self._lock.remove()
        self._sender, self._copies, self._copied, self._choice = None, [], set(), None
        self._slots = [None] * len(self._paths)
        self._remove(self._kept)
        self._remove_folder()

    @property
    def _kept(self) -> set[tuple[int, int]]:
        return set() if self._loaded is None else {self._loaded}

    def _connect(self, pairs: Sequence[Transfer]) -> None:
        assert self._choice is not None
        for each, group in connected(self._choice.start, pairs, self._number, self._timeout).items():
            if each.source == self._number:
                self._sender = Sender(group, each.target, self._timeout, self._spans)
                weakref.finalize(self, self._sender.close).atexit = False
            else:
                receive_all(group, next(copy for copy in self._copies if copy.part == each.part), self._timeout)

    def write(self, step: int, sections: Mapping[str, Any]) -> None:
        """Write a training state, if this process has a part of it.

        Raises:
            ValueError: no run has begun.
        """
        if self._choice is None:
            raise ValueError("Checkpoints.resume begins memory checkpoints: call it before the first step")
        if not self._choice.writes:
            return
        leaves, spec = flat(sections)
        if self._layout is None or not self._layout.fits(leaves, spec):
            self._layout = Layout(sections, self._pipeline)
        text = json.dumps({"plain": self._layout.plain(leaves)}).encode()
        self._wait(step)
        try:
            self._take()
            slot = self._slots[self._next]
            if slot is None or not slot.is_there:
                if slot is not None:
                    warn(REMOVED.format(slot.path))
                slot = self._slots[self._next] = _Generation(self._paths[self._next])
            if slot.layout is not self._layout or slot.room < len(text):
                slot.lay_out(self._layout, self._table(), 2 * len(text) + ROOM)
        except (OSError, CheckpointError) as error:
            self._choice = self._choice._replace(writes=False)
            warn(f"no memory checkpoints from step {step} on: {error}; training goes on, with the checkpoints on disk")
            return
        slot.write(self._choice.attempt, step, self._layout.sources(leaves), text)
        if self._sender is not None:
            self._sender.begin(slot.content)
        self._writes, self._next = self._writes + 1, (self._next + 1) % len(self._paths)
        if self._writes == len(self._paths):  # a step before is whole, whichever host is lost
            self._remove(set(), before=self._choice.attempt)

    def _wait(self, step: int) -> None:
        """Wait until the neighbour has the last file."""
        if self._sender is None:
            return
        start = time.monotonic()
        self._sender.wait()
        if (error := self._sender.error) is not None:
            self._sender = None
            warn(f"no memory checkpoints on another host any more: {error}; training goes on, with those of this host")
        elif (seconds := time.monotonic() - start) > LONG and not self._has_waited:
            self._has_waited = True
            warn(
                f"after step {step}, {seconds:.1f} s passed until process {self._sender.target}, on another host, had "
                "the memory checkpoint before: the network is slower than the steps; Memory(every=) sends fewer"
            )

    def clear(self) -> None:
        """Remove the memory checkpoints of a run that has ended. It may go on."""
        limit = min(END, self._timeout or END)
        until = time.monotonic() + limit
        if self._sender is not None:
            self._sender.begin(torch.empty(0, dtype=torch.uint8))
            self._sender.wait(limit)
        with suppress(FileNotFoundError):  # `fpipe checkpoint memory --clear` has removed all
            if self._lock.is_taken and self._lock.take():  # else another start has it, and the files are its own
                for path in self._paths:
                    path.unlink(missing_ok=True)
                self._lock.remove()
        self._slots, self._writes = [None] * len(self._paths), 0
        for copy in self._copies:
            if not copy.removed.wait(max(0.0, until - time.monotonic())):
                warn(
                    f"process {copy.part}, on another host, has not removed its memory checkpoints within {limit:g} s: "
                    f"this one removes their copies in {self.folder}"
                )
            copy.remove()
        self._remove(set())
        self._remove_folder()

    @property
    def job(self) -> str | None:
        """The name of the job; None where no run has begun."""
        return None if self._choice is None else self._choice.job

    def _take(self) -> None:
        """Take the files of this process, if it has not.

        Raises:
            CheckpointError: another job has them.
        """
        if not in_private(self.folder, lambda: self._lock.take(LOCKING)):
            raise CheckpointError(
                f"another job, which runs, has its memory checkpoints in {self.folder}: end it, or take another folder "
                "for the checkpoints of this one"
            )

    def _table(self) -> bytes:
        assert self._choice is not None
        assert self._layout is not None
        table = {
            "checkpoints": str(self._checkpoints.resolve()),
            "job": self._choice.job,
            "process": os.getpid(),
            "holds": self._held,
            "parts": self._choice.parts,
            "states": self._states,
            "tensors": self._layout.tensors,
        }
        return json.dumps(table).encode()

    def _reserve(self) -> None:
        """Take room for the files of each part, of which one may hold the step that was loaded."""
        for part, paths in self._turns.items():
            for i, path in enumerate(paths):
                if not holds(path, self._loaded):
                    slot = _Generation(path, self._sizes[part])
                    if part == self._number:
                        self._slots[i] = slot

    def _remove(self, kept: Collection[tuple[int, int]], before: int = sys.maxsize) -> None:
        """Remove the files of processes that are gone, but those of some steps.

        Args:
            before: the number of a start of the job; files of this one are left too.
        """
        with suppress(FileNotFoundError):  # `fpipe checkpoint memory --clear` has removed all
            for part in sorted({part_of(path) for path in files_of(self.folder)} - self._copied):
                lock = Lock(lock_of(self.folder, part))
                if (lock.path == self._lock.path and self._lock.is_taken) or not lock.take():
                    continue
                unfinished_of(self.folder, part).unlink(missing_ok=True)
                for path in generations_of(self.folder, part):
                    stored = Stored.read(path)
                    if stored is None or ((stored.attempt, stored.step) not in kept and stored.attempt < before):
                        path.unlink(missing_ok=True)
                lock.remove()

    def _remove_folder(self) -> None:
        with suppress(OSError):  # of a process that has not ended yet
            self.folder.rmdir()
            self.folder.parent.rmdir()


class _Generation:
    """A file that this process writes, laid out for its training state."""

    def __init__(self, path: Path, size: int = 0) -> None:
        self.path, self._slot = path, Slot(path, size)
        self.layout: Layout | None = None
        self.room = 0

    def lay_out(self, layout: Layout, table: bytes, room: int) -> None:
        memory = self._slot.lay_out(table, room, layout.size)
        self._runs = layout.runs(torch.frombuffer(memory, dtype=torch.uint8)) if layout.size else []
        self.layout, self.room = layout, room

    def write(self, attempt: int, step: int, tensors: list[Tensor], values: bytes) -> None:
        self._slot.begin()
        total = copied = 0
        with torch.no_grad():
            for places, content in self._runs:
                torch._foreach_copy_(places, tensors[copied : copied + len(places)])
                total, copied = total + checksum(content), copied + len(places)
        self._slot.commit(attempt, step, values, total)

    @property
    def is_there(self) -> bool:
        return self._slot.is_there

    @property
    def content(self) -> Tensor:
        return torch.frombuffer(self._slot.content, dtype=torch.uint8)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
