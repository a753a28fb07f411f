"""Memory checkpoints: the training state of the last steps in shared memory, which outlives the processes of a job.

Source: GEMINI (Wang et al., SOSP 2023): checkpoints in the memory of hosts, and of their neighbours, each step.

Invariants:
- a process writes all that it holds; of several on a host that hold the same, the first one does;
- a step is whole once all its parts are there, and a part of one start of the job goes with those of no other;
- the step before stays until all processes have written this one: no process is two steps behind another;
- nothing is loaded that a later state on disk does not continue: what is on disk decides which run it is.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optree
import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fpipe._format import format_bytes
from fpipe.errors.arguments import checked_class
from fpipe.errors.tracebacks import warn
from fpipe.handlers.contents import fingerprint
from fpipe.handlers.protocol import Handler
from fpipe.interop.checkpoints.chunks import Chunk, chunks_of
from fpipe.interop.checkpoints.manifest import NUMBERED, CheckpointError
from fpipe.interop.checkpoints.names import Entry, Name, below, dotted, entries, flat, storable
from fpipe.interop.checkpoints.neighbours import (
    Copy,
    Sender,
    Transfer,
    connected,
    fetches,
    neighbours,
    receive_all,
    send,
)
from fpipe.interop.checkpoints.slots import (
    LOCKING,
    Lock,
    Slot,
    Stored,
    checksum,
    file_of,
    files_of,
    folder_of,
    host_of,
    lock_of,
    make_private,
    part_of,
    stored_in,
)
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.sharding import layout_key, local
from fpipe.store import LIMIT

log = logging.getLogger("fpipe.checkpoints")
JOB = ".memory"  # the file, beside the checkpoints, with the name of the job and the last one that it has saved
ALIGNED = 64  # bytes
ROOM = 4096  # bytes for values, at least
EMPTY = 2  # tensors like a parameter that an optimizer without values will keep for it, as Adam does


@checked_class()
@dataclass(frozen=True)
class Memory:
    """Checkpoints of a run's last steps in shared memory, `Checkpoints(..., memory=Memory())`; see `resume`.

    They outlive the processes of a job, but not its hosts: a job that is started again after a process was killed loses
    no step. Each host has two of them, so that one is whole whenever a process is killed. They are files that this user
    alone can read, in a folder named after the user and the folder of the checkpoints, and are removed when the run
    ends.

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


class Choice(NamedTuple):
    """The memory checkpoints that a start of a job may load, by the reports of all its processes.

    Args:
        job: its name.
        start: a name of this start.
        saved: the number of the last checkpoint on disk; 0 if there is none.
        attempt: the number of this start, which is greater than those of all before, and of no other that a host lost.
        steps: attempt and step of each, the newest first.
        parts: how many a step has.
        writes: whether this process has a part.
        neighbours: where each process that has a part sends it, if asked to.
    """

    job: str
    start: str
    saved: int
    attempt: int
    steps: list[tuple[int, int]]
    parts: int
    writes: bool
    neighbours: list[Transfer]


Report = Mapping[str, Any]
"""A process's report, in plain Python types: its host, what it holds, and the parts of steps that it sees."""


def choice_of(reports: Sequence[Report], number: int) -> Choice:
    """Return the choice of all processes; `number` is that of this one.

    Raises:
        CheckpointError: they have different options.
    """
    if len({each["options"] for each in reports}) > 1:
        raise CheckpointError("the ranks have different Memory(every=, neighbour=): every rank makes the same")
    job, start, saved, saved_step = next(each["first"] for each in reports if each["first"] is not None)
    parts, counts, attempts = defaultdict[tuple[int, int], set[int]](set), dict[tuple[int, int], int](), [0]
    for of, attempt, step, holds, count, _ in (row for each in reports for row in each["parts"]):
        if of == job:
            attempts.append(attempt)
            parts[attempt, step].add(holds)
            counts[attempt, step] = count
    whole = [each for each, there in parts.items() if len(there) == counts[each] and each[1] >= saved_step]
    first = {(each["host"], each["holds"]): i for i, each in reversed([*enumerate(reports)])}
    return Choice(
        job=job,
        start=start,
        saved=saved,
        attempt=((max(attempts) >> 32) + 1 << 32) | int(start[:8], 16),
        steps=sorted(whole, reverse=True),
        parts=len({each["holds"] for each in reports}),
        writes=number in first.values(),
        neighbours=neighbours(reports, sorted(first.values())),
    )


@dataclass(frozen=True)
class _Piece:
    """A box of a whole tensor in the memory of a part."""

    part: Stored
    dtype: torch.dtype
    offsets: Sequence[int]
    sizes: Sequence[int]
    at: int

    @property
    def tensor(self) -> Tensor:
        size = prod(self.sizes) * self.dtype.itemsize
        if not size:
            return torch.empty(self.sizes, dtype=self.dtype)
        return torch.from_numpy(self.part.tensors[self.at : self.at + size]).view(self.dtype).view(self.sizes)


class MemoryReader:
    """A memory checkpoint, as far as this host has its parts; see `Reader`.

    Args:
        folder: of the parts.
        step: attempt and step.
    """

    def __init__(self, folder: Path, step: tuple[int, int]) -> None:
        self.path = folder / f"step-{step[1]}"
        self.parts = [part for part in stored_in(folder) if (part.attempt, part.step) == step]
        self.plain: dict[Name, Any] = {}
        self.tensors: dict[Name, TensorStorageMetadata] = {}
        self._pieces = defaultdict[Name, dict[tuple[int, ...], _Piece]](dict)
        for part in self.parts:
            self.plain |= {tuple(name): value for name, value in part.values["plain"]}
            for name, kind, size, offsets, sizes, at in part.table["tensors"]:
                dtype = getattr(torch, kind)
                assert isinstance(dtype, torch.dtype)
                self._pieces[tuple(name)].setdefault(tuple(offsets), _Piece(part, dtype, offsets, sizes, at))
                properties = dcp.TensorProperties(dtype=dtype)
                self.tensors.setdefault(tuple(name), TensorStorageMetadata(properties, torch.Size(size), []))
        self.names = {*self.plain, *self.tensors}
        self.below = below(self.names)
        self.states = next((int(part.table["states"]) for part in self.parts), 1)

    def read(self, into: Mapping[Name, Tensor]) -> None:
        """Read tensors into others of the same shapes; into DTensors, this process's pieces.

        Raises:
            CheckpointError: they have not the bytes that were written, or this host lacks some.
        """
        with torch.no_grad():
            for name, tensor in into.items():
                for chunk in chunks_of(tensor):
                    self._fill(name, chunk, chunk.of(tensor))

    def _fill(self, name: Name, chunk: Chunk, memory: Tensor) -> None:
        missing = prod(chunk.sizes)
        for piece in self._pieces[name].values():
            starts = [*map(max, piece.offsets, chunk.offsets)]
            stops = [
                min(a + n, b + m)
                for a, n, b, m in zip(piece.offsets, piece.sizes, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
                continue
            if not piece.part.is_right:
                raise CheckpointError(f"{piece.part.path} has not the bytes that were written, by their sum")
            target = memory[_box(starts, stops, chunk.offsets)]
            target.copy_(piece.tensor[_box(starts, stops, piece.offsets)])
            missing -= target.numel()
        if missing:
            raise CheckpointError(f"{self.path} lacks {missing} numbers of {dotted(name)} on this host")


def _box(starts: Sequence[int], stops: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start - o, stop - o) for start, stop, o in zip(starts, stops, origin, strict=True))


class _Layout:
    """The places of a training state's leaves in a file.

    Attributes:
        tensors: name, dtype, whole size, offsets and sizes of each box, and where its bytes begin.
        size: the bytes of all.
        holds: a number for what the process holds of its stages: equal for equal entries.
        expected: the bytes of the tensors, with those that an optimizer will keep.
        texts: about as many bytes stand before the tensors.
    """

    def __init__(self, sections: Mapping[str, Any], pipeline: Pipeline) -> None:
        listed, self._spec = entries(sections, pipeline)
        self._keys = [_key(each.leaf) for each in listed]
        self._plain = [(at, each.name) for at, each in enumerate(listed) if each.is_stored and not _is_tensor(each)]
        self._whole: list[tuple[int, Chunk | None]] = []
        self.tensors: list[tuple[Name, str, list[int], list[int], list[int], int]] = []
        self.size, later, holds = 0, 0, []
        for at, each in enumerate(listed):
            if not each.is_stored:
                continue
            chunks: list[Chunk] = []
            if _is_tensor(each):
                if not each.leaf.is_meta:
                    storable(each.name, each.leaf)
                chunks = chunks_of(each.leaf)
                self._whole += [(at, None if chunk.sizes == local(each.leaf).shape else chunk) for chunk in chunks]
                for chunk in chunks:
                    kind = str(each.leaf.dtype).removeprefix("torch.")
                    place = [*each.leaf.shape], [*chunk.offsets], [*chunk.sizes], self.size
                    self.tensors.append((each.name, kind, *place))
                    self.size += _aligned(prod(chunk.sizes) * each.leaf.dtype.itemsize)
            elif each.is_empty and each.parameter is not None:
                later += EMPTY * _aligned(local(each.parameter[1]).nbytes) + ALIGNED
            if each.stage is not None:
                holds.append((each.name, [(*chunk.offsets, *chunk.sizes) for chunk in chunks]))
        self.holds, self.expected = fingerprint(holds), self.size + later
        self.texts = 2 * len(json.dumps(self.tensors)) + 2 * ROOM

    def fits(self, leaves: Sequence[Any], spec: optree.PyTreeSpec) -> bool:
        """Return whether a training state has this layout."""
        return spec == self._spec and list(map(_key, leaves)) == self._keys

    def sources(self, leaves: Sequence[Any]) -> list[Tensor]:
        """Return the tensors to be copied."""
        return [local(leaves[at]) if chunk is None else chunk.of(leaves[at]) for at, chunk in self._whole]

    def plain(self, leaves: Sequence[Any]) -> list[tuple[Name, Any]]:
        """Return the values that are no tensors."""
        return [(name, {} if _is_dict(leaves[at]) else storable(name, leaves[at])) for at, name in self._plain]

    def places(self, memory: Tensor) -> list[Tensor]:
        """Return the memory of each tensor within that of all."""
        result = []
        for _, kind, _, _, sizes, at in self.tensors:
            dtype = getattr(torch, kind)
            result.append(memory[at : at + prod(sizes) * dtype.itemsize].view(dtype).view(sizes))
        return result


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
        self._slots: list[_Generation | None] = [None, None]
        self._choice: Choice | None = None
        self._layout: _Layout | None = None
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
        layout = _Layout(sections, self._pipeline)
        self._held = layout.holds
        return {
            "host": host_of(self.folder),
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
            purpose = f"{choice.start}/fetch {step}"
            limit = timedelta(seconds=self._timeout or LIMIT)
            try:
                for each, group in connected(purpose, transfers, self._number, self._timeout).items():
                    if each.source == self._number:
                        (part,) = (one for one in self.reader(step).parts if one.part == each.part)
                        send(group, torch.from_numpy(part.content), limit)
                    else:
                        copy = Copy(self.folder, each.part)
                        copy.receive(group, limit)
                        copy.end()
            except (OSError, RuntimeError) as error:
                raise CheckpointError(f"its parts can't be fetched from another host: {error}") from error

        return run

    def reader(self, step: tuple[int, int]) -> MemoryReader:
        return MemoryReader(self.folder, step)

    def begin(
        self,
        choice: Choice,
        reports: Sequence[Report],
        loaded: tuple[int, int] | None,
        sections: Mapping[str, Any],
    ) -> None:
        """Take room for the memory checkpoints of a run, remove those that it did not load, and connect neighbours.

        Raises:
            CheckpointError: another job writes them.
            OSError: there is no room for them.
            TransportError: a neighbour did not come.
        """
        self._choice, self._writes, self._next = choice, 0, 0
        self._slots, self._layout = [None, None], _Layout(sections, self._pipeline)
        pairs = choice.neighbours if self._neighbour else []
        self._copied = {each.part for each in pairs if each.target == self._number}
        self._remove({loaded} if loaded is not None else set())
        sizes = {part: reports[part]["bytes"] for part in self._copied}
        self._copies = [Copy(self.folder, part, int(self._has(part, 0, loaded))) for part in sizes]
        if choice.writes:
            self._take()
            sizes[self._number] = self._layout.expected + self._layout.texts
        self._next = int(self._has(self._number, 0, loaded))
        self._reserve(sizes, loaded)
        self._connect(pairs)

    def _has(self, part: int, generation: int, step: tuple[int, int] | None) -> bool:
        stored = Stored.read(file_of(self.folder, part, generation))
        return stored is not None and (stored.attempt, stored.step) == step

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
            self._layout = _Layout(sections, self._pipeline)
        text = json.dumps({"plain": self._layout.plain(leaves)}).encode()
        self._wait(self._paths[self._next])
        try:
            self._take()
            slot = self._slots[self._next] or _Generation(self._paths[self._next])
            self._slots[self._next] = slot
            if slot.layout is not self._layout or slot.room < len(text):
                slot.lay_out(self._layout, self._table(), 2 * len(text) + ROOM)
        except (OSError, CheckpointError) as error:
            self._choice = self._choice._replace(writes=False)
            warn(f"no memory checkpoints from step {step} on: {error}; training goes on, with the checkpoints on disk")
            return
        slot.write(self._choice.attempt, step, self._layout.sources(leaves), text)
        if self._sender is not None:
            self._sender.begin(slot.path, slot.content)
        self._writes, self._next = self._writes + 1, 1 - self._next
        if self._writes == 2:  # every process has written the step before
            self._remove(set(), before=self._choice.attempt)

    def _wait(self, path: Path) -> None:
        """Wait until the neighbour has a file."""
        if self._sender is None:
            return
        self._sender.wait(path)
        if (error := self._sender.error) is not None:
            self._sender = None
            warn(f"no memory checkpoints on another host any more: {error}; training goes on, with those of this host")

    def clear(self) -> None:
        """Remove the memory checkpoints of a run that has ended. It may go on."""
        if self._sender is not None:
            self._sender.begin(self.folder, torch.empty(0, dtype=torch.uint8))
        for path in (*self._paths, self.folder):
            self._wait(path)
        if self._lock.is_taken:
            for path in self._paths:
                path.unlink(missing_ok=True)
            self._lock.remove()
        self._slots, self._writes = [None, None], 0
        for copy in self._copies:
            copy.removed.wait(self._timeout or LIMIT)
        self._remove(set())
        with suppress(OSError):  # of a process that has not ended yet
            self.folder.rmdir()
            self.folder.parent.rmdir()

    @property
    def job(self) -> str | None:
        """The name of the job; None where no run has begun."""
        return None if self._choice is None else self._choice.job

    @property
    def _paths(self) -> list[Path]:
        return [file_of(self.folder, self._number, generation) for generation in range(2)]

    def _take(self) -> None:
        """Take the files of this process, if it has not.

        Raises:
            CheckpointError: another job has them.
        """
        make_private(self.folder)
        if not self._lock.take(LOCKING):
            raise CheckpointError(
                f"another job, which runs, has its memory checkpoints in {self.folder}: end it, or take another folder "
                "for the checkpoints of this one"
            )

    def _table(self) -> bytes:
        assert self._choice is not None
        assert self._layout is not None
        table = {
            "checkpoints": str(self._checkpoints),
            "job": self._choice.job,
            "process": os.getpid(),
            "holds": self._held,
            "parts": self._choice.parts,
            "states": self._states,
            "tensors": self._layout.tensors,
        }
        return json.dumps(table).encode()

    def _reserve(self, sizes: Mapping[int, int], loaded: tuple[int, int] | None) -> None:
        """Take room for two files of each part, of which one may be the step that was loaded."""
        paths = [(file_of(self.folder, part, n), part, n) for part in sizes for n in range(2)]
        present = {path: path.stat().st_size if path.exists() else 0 for path, *_ in paths}
        wanted = sum(max(0, sizes[part] - present[path]) for path, part, _ in paths)
        free = _free(self.folder)
        try:
            if wanted > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            for path, part, generation in paths:
                if not self._has(part, generation, loaded):
                    slot = _Generation(path, sizes[part])
                    if part == self._number:
                        self._slots[generation] = slot
        except OSError as error:
            for path, part, generation in paths:
                if not self._has(part, generation, loaded):
                    path.unlink(missing_ok=True)
            self._lock.remove()
            if error.errno != errno.ENOSPC:
                raise
            raise OSError(
                errno.ENOSPC,
                f"memory checkpoints want {format_bytes(wanted)} more in {self.folder} for process {self._number}, two "
                f"files of each of {', '.join(map(format_bytes, sizes.values()))}, and {format_bytes(free)} are free: "
                "give it more (docker run --shm-size), take Memory(folder=...), or leave memory= out",
            ) from None

    def _remove(self, kept: Collection[tuple[int, int]], before: int = sys.maxsize) -> None:
        """Remove the files of processes that are gone, but those of some steps.

        Args:
            before: the number of a start of the job; files of this one are left too.
        """
        for part in sorted({part_of(path) for path in files_of(self.folder)} - self._copied):
            lock = Lock(lock_of(self.folder, part))
            if (lock.path == self._lock.path and self._lock.is_taken) or not lock.take():
                continue
            for path in (file_of(self.folder, part, generation) for generation in range(2)):
                stored = Stored.read(path)
                if stored is None or ((stored.attempt, stored.step) not in kept and stored.attempt < before):
                    path.unlink(missing_ok=True)
            lock.remove()


class _Generation:
    """A file that this process writes, laid out for its training state."""

    def __init__(self, path: Path, size: int = 0) -> None:
        self.path, self._slot = path, Slot(path, size)
        self.layout: _Layout | None = None
        self.room = 0

    def lay_out(self, layout: _Layout, table: bytes, room: int) -> None:
        self._places, self._bytes = list[Tensor](), np.empty(0, np.uint8)
        memory = self._slot.lay_out(table, room, layout.size)
        if layout.size:
            self._places = layout.places(torch.frombuffer(memory, dtype=torch.uint8))
            self._bytes = np.frombuffer(memory, np.uint8)
        self.layout, self.room = layout, room

    def write(self, attempt: int, step: int, tensors: list[Tensor], values: bytes) -> None:
        self._slot.begin()
        with torch.no_grad():
            torch._foreach_copy_(self._places, tensors)
        self._slot.commit(attempt, step, values, checksum(self._bytes))

    @property
    def content(self) -> Tensor:
        return torch.frombuffer(self._slot.content, dtype=torch.uint8)


def job_of(checkpoints: Path, saved: int) -> str:
    """Return the name of the job that saves into a folder.

    It is new where the folder is, and where its last checkpoint is not the one that the job has saved last: it was
    removed, or something else was saved since. Then what is in memory does not belong to what is on disk.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads((checkpoints / JOB).read_bytes())
        if saved in content["saved"]:
            return str(content["job"])
    checkpoints.mkdir(parents=True, exist_ok=True)
    return note(checkpoints, secrets.token_hex(8), saved)


def note(checkpoints: Path, job: str, *saved: int) -> str:
    """Write the name of a job, and the number of the checkpoint that it has saved last; return the name.

    While one is sealed there are two numbers: a process that is killed then leaves either.
    """
    unfinished = checkpoints / f"{JOB}.unfinished"
    unfinished.write_text(json.dumps({"job": job, "saved": saved}))
    unfinished.replace(checkpoints / JOB)
    return job


def saved_in(checkpoint: Path | None) -> tuple[int, int]:
    """Return number and step of a checkpoint on disk; 0 and -1 where there is none.

    Of one without a step, which no run has saved, the step is later than any.
    """
    match = NUMBERED.fullmatch("" if checkpoint is None else checkpoint.name)
    if match is None:
        return 0, -1
    return int(match[1]), int(match[2].rpartition("-")[2]) if match[2] else sys.maxsize


def _free(folder: Path) -> int:
    """Return the bytes that are free for files in memory."""
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        free = min(free, int(available.split()[1]) * 1024)
    return free


def _is_tensor(entry: Entry) -> bool:
    return isinstance(entry.leaf, Tensor)


def _is_dict(leaf: object) -> bool:
    return isinstance(leaf, dict)


def _key(leaf: Any) -> object:
    return layout_key(leaf) if isinstance(leaf, Tensor) else None


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
