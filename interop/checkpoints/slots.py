"""The files of memory checkpoints, in shared memory of a host: each holds one process's part of one step. No torch.

A process has two or three files, and writes them in turn. A file has a size in advance, a table of what it holds, which
changes seldom, values, and the bytes of tensors.

Invariants:
- a file holds a step from the moment its record is written, last, until the next write begins: the operating system
  keeps what a killed process has written, in its order;
- the record has the checksums of all the rest: what has changed since, or is older than the record, is not loaded;
- a file whose process lives is locked, and no other process removes it or writes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import re
import struct
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO, TypeVar

import numpy as np

T = TypeVar("T")
MAGIC = b"fpipe m1"
SIZES = struct.Struct("<8sqqq")  # magic; bytes of the table, of the room for values, of the tensors
RECORD = struct.Struct("<qqqQI")  # attempt and step; bytes of the values; checksums of the tensors, of all the rest
CRC = struct.Struct("<I")  # of the record
FLOCK = "hhqqi"  # `struct flock` of Linux on 64 bits: type, whence, start, length, process
AT_RECORD, AT_TABLE, PAGE = 64, 4096, 4096
WORD, MODULUS = 8, 1 << 64  # of checksums: bytes that are added as a number, and the numbers that there are
ATTEMPTS = 100  # to make a folder that others remove
GENERATIONS = 3  # files of a process, at most
NAMED = re.compile(r"(\d{6})\.(?:[012]|unfinished)")
LOCKING = 1.0  # seconds within which a process that has ended gives up its locks
MODE, FOLDER_MODE = 0o600, 0o700
ASIDE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # flags to read what may be another user's: no pipe is waited for


def folder_of(shared: Path, checkpoints: Path) -> Path:
    """Return the folder in shared memory for the checkpoints in a folder, by user and by the folder's path."""
    path = str(checkpoints.resolve())
    name = re.sub(r"[^\w.-]", "_", checkpoints.resolve().name)[:40]
    return shared / f"fpipe-{os.getuid()}" / f"{name}-{hashlib.sha256(path.encode()).hexdigest()[:12]}"


def make_private(folder: Path) -> None:
    """Make a folder of this user's, and the one above it, which nobody else can read.

    Raises:
        PermissionError: one of them is another user's, or others can enter it.
    """
    in_private(folder, lambda: None)


def in_private(folder: Path, do: Callable[[], T]) -> T:
    """Return what a function does in a folder of this user's, as of `make_private`.

    It is called again where the folder is gone: another job that ends, and `fpipe checkpoint memory --clear`, remove
    folders that are empty.
    """
    for attempt in range(ATTEMPTS):
        try:
            for path in (folder.parent, folder):
                _make(path)
            return do()
        except FileNotFoundError:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError


def _make(path: Path) -> None:
    with suppress(FileExistsError):
        path.mkdir(FOLDER_MODE)
    stat = path.lstat()
    if stat.st_uid != os.getuid() or stat.st_mode != 0o040000 | FOLDER_MODE:
        raise PermissionError(f"{path} is not a folder that this user alone can enter: remove it")


def host_of(shared: Path) -> str:
    """Return a name of the host that has a folder of shared memory, or of its part of a host.

    Processes with one name share files. A job's own folder does not tell: it may be another one, made again.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    stat = shared.stat()
    return f"{boot.read_text().strip() if boot.exists() else ''}/{stat.st_dev}/{stat.st_ino}"


def checksum(content: np.ndarray[Any, Any]) -> int:
    """Return the sum of words of 64 bits: any one flipped bit changes it, and it is read at the speed of memory.

    That of several pieces is the sum of theirs, modulo 2**64.

    Args:
        content: bytes, a multiple of `WORD`.
    """
    return int(np.add.reduce(content.view(np.uint64), dtype=np.uint64))


class Lock:
    """The lock of a process's files, which ends with the process.

    It belongs to the process, not to the open file: no child that outlives it has it, and a second run in the same
    process may take it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None

    @property
    def is_taken(self) -> bool:
        """This object has taken it; another program may have removed it since: see `take`."""
        return self._file is not None

    def take(self, patience: float = 0.0) -> bool:
        """Take the lock; return False if another process has it and does not give it up within some seconds.

        An object that had it before in this process has ended it when it is gone: take it again now and then.
        """
        if self._file is not None and self._is_named(self._file):
            with suppress(OSError):
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        self._close()  # another program has removed it
        until = time.monotonic() + patience
        while True:
            file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, MODE), "r+b", buffering=0)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.close()
                if time.monotonic() >= until:
                    return False
                time.sleep(0.02)
                continue
            if self._is_named(file):
                self._file = file
                return True
            file.close()  # its owner has just removed it

    @staticmethod
    def owner(path: Path) -> int | None:
        """Return the number of the process that has a lock, or 0 for one of another container; None if none has."""
        try:
            with os.fdopen(os.open(path, ASIDE), "rb") as file:
                asked = struct.pack(FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
                kind, *_, owner = struct.unpack(FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
        except FileNotFoundError:
            return None
        return None if kind == fcntl.F_UNLCK else int(owner)

    def remove(self) -> None:
        """Give up the lock, and remove its file, unless that is another start's, made after this one was removed."""
        if self._file is not None:
            if self._is_named(self._file):
                self.path.unlink(missing_ok=True)
            self._close()

    def _is_named(self, file: BinaryIO) -> bool:
        """Return whether the path is that of an open file: it may have been removed, and made again by others."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file.fileno()), os.lstat(self.path))
        return False

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True)
class Stored:
    """A step of one process that a file holds.

    Args:
        attempt: the number of the start of the job that wrote it.
        table: of what it holds, see `Slot.lay_out`.
        values: that are no tensors.
        tensors: their bytes, which have this sum.
        content: of the whole file.
    """

    path: Path
    attempt: int
    step: int
    table: Mapping[str, Any]
    values: Mapping[str, Any]
    tensors: np.ndarray[Any, Any]
    sum: int
    content: np.ndarray[Any, Any]

    @classmethod
    def read(cls, path: Path) -> Stored | None:
        """Return the step that a file holds; None if it holds none."""
        try:
            file = os.open(path, ASIDE)
            try:
                content = memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_COPY))
            finally:
                os.close(file)
            magic, table, room, size = SIZES.unpack_from(content)
            record = bytes(content[AT_RECORD : AT_RECORD + RECORD.size])
            attempt, step, values, tensors, rest = RECORD.unpack(record)
            (crc,) = CRC.unpack_from(content, AT_RECORD + RECORD.size)
            texts = [bytes(content[AT_TABLE : AT_TABLE + table]), bytes(content[AT_TABLE + table :][:values])]
            at = _at_tensors(table, room)
            if magic != MAGIC or attempt <= 0 or crc != zlib.crc32(record) or rest != zlib.crc32(b"".join(texts)):
                return None
            place = np.frombuffer(content, np.uint8, size, at)
            whole = np.frombuffer(content, np.uint8, at + size)
            of, plain = json.loads(texts[0]), json.loads(texts[1])
            return cls(path, attempt, step, dict(of), dict(plain), place, tensors, whole)
        except (OSError, ValueError, TypeError, struct.error):
            return None

    @cached_property
    def is_right(self) -> bool:
        """The tensors in the file have the sum that the writer recorded."""
        return checksum(self.tensors) == self.sum

    @property
    def part(self) -> int:
        """The number of the process that wrote it."""
        return part_of(self.path)

    @property
    def number(self) -> tuple[int, int]:
        """Attempt and step."""
        return self.attempt, self.step


def generations_of(folder: Path, part: int) -> list[Path]:
    """Return the files that a process may have."""
    return [folder / f"{part:06}.{generation}" for generation in range(GENERATIONS)]


def in_turn(folder: Path, part: int, count: int, kept: tuple[int, int] | None) -> list[Path]:
    """Return files of a process, so many, in the order in which they are written; last the one that holds a step.

    Args:
        kept: attempt and step that stay as long as possible; None for none.
    """
    paths = generations_of(folder, part)
    last = [path for path in paths if kept is not None and holds(path, kept)][:1]
    return [path for path in paths if path not in last][: count - len(last)] + last


def holds(path: Path, step: tuple[int, int] | None) -> bool:
    """Return whether a file holds a step: attempt and step."""
    stored = Stored.read(path)
    return stored is not None and stored.number == step


def least_useful(folder: Path, part: int, useful: Collection[tuple[int, int]]) -> Path:
    """Return the file of a process that is not there, or holds nothing, or else none of some steps, or the oldest."""

    def order(path: Path) -> tuple[bool, tuple[int, int]]:
        stored = Stored.read(path)
        return (False, (0, 0)) if stored is None else (stored.number in useful, stored.number)

    return min(generations_of(folder, part), key=order)


def unfinished_of(folder: Path, part: int) -> Path:
    """Return the file into which a step of a process is fetched."""
    return folder / f"{part:06}.unfinished"


def lock_of(folder: Path, part: int) -> Path:
    return folder / f"{part:06}.lock"


def part_of(path: Path) -> int:
    match = NAMED.fullmatch(path.name)
    return int(match[1]) if match else -1


def stored_in(folder: Path) -> Iterator[Stored]:
    """Iterate over the steps that the files of a folder hold."""
    for path in files_of(folder):
        if path.suffix != ".unfinished" and (stored := Stored.read(path)) is not None:
            yield stored


def files_of(folder: Path) -> list[Path]:
    """Return the files of all processes in a folder, and nothing else that has such a name."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if NAMED.fullmatch(path.name) and _is_file(path))


def _is_file(path: Path) -> bool:
    with suppress(FileNotFoundError):
        return S_ISREG(path.lstat().st_mode)
    return False


class Slot:
    """A file to be written, mapped into memory.

    Args:
        size: bytes that it has room for, at least.

    Raises:
        OSError: there is no room for it.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self._open(size)

    def _open(self, size: int) -> None:
        with suppress(OSError):
            stat = self.path.lstat()
            if stat.st_size < size or stat.st_uid != os.getuid():
                self.path.unlink()
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, MODE)
        try:
            size = max(size, os.fstat(file).st_size, PAGE)
            os.posix_fallocate(file, 0, size)
            self._inode = os.fstat(file).st_ino
            self._bytes = mmap.mmap(file, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        except OSError:
            self.path.unlink()
            raise
        finally:
            os.close(file)
        self.size, self._texts = size, b""
        self.begin()

    def lay_out(self, table: bytes, room: int, size: int) -> memoryview:
        """Begin to write another table; return the memory for the tensors.

        Args:
            table: JSON; of the keys, `stored_in` reads none.
            room: bytes for the values.
            size: bytes of the tensors.

        Raises:
            OSError: it needs more room than there is.
        """
        at = _at_tensors(len(table), room)
        if at + size > self.size:
            self._open(at + size)
        elif at + size < self.size:
            os.truncate(self.path, at + size)
            self.size = at + size
        self.begin()
        SIZES.pack_into(self._bytes, 0, MAGIC, len(table), room, size)
        self._bytes[AT_TABLE : AT_TABLE + len(table)] = table
        self._table, self._room = table, room
        self.tensors = memoryview(self._bytes)[at : at + size]
        return self.tensors

    def cleared(self, size: int) -> memoryview:
        """Forget the step that the file holds; return the memory for the content of another file.

        Raises:
            OSError: it needs more room than there is.
        """
        if size > self.size:
            self._open(size)
        self.begin()
        return memoryview(self._bytes)[:size]

    @property
    def is_there(self) -> bool:
        """The file has its name. Else another program has removed it, and a start of the job would not see it."""
        try:
            return os.lstat(self.path).st_ino == self._inode
        except FileNotFoundError:
            return False

    @property
    def content(self) -> memoryview:
        """The whole file, as far as it is used."""
        return memoryview(self._bytes)[: self.size]

    def begin(self) -> None:
        """Forget the step that the file holds."""
        self._bytes[AT_RECORD : AT_RECORD + RECORD.size + CRC.size] = bytes(RECORD.size + CRC.size)

    def commit(self, attempt: int, step: int, values: bytes, tensors: int) -> None:
        """Hold a step from now on, whose tensors are written and have this checksum, modulo 2**64."""
        at = AT_TABLE + len(self._table)
        self._bytes[at : at + len(values)] = values
        record = RECORD.pack(attempt, step, len(values), tensors % MODULUS, zlib.crc32(self._table + values))
        self._bytes[AT_RECORD : AT_RECORD + RECORD.size + CRC.size] = record + CRC.pack(zlib.crc32(record))


def _at_tensors(table: int, room: int) -> int:
    return -(-(AT_TABLE + table + room) // PAGE) * PAGE
