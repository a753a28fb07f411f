"""Write what a rank did last into a file that outlives the process. No torch.

The records have a fixed size in the file and are mapped into memory: to record is to store some bytes, which the
operating system keeps when the process is killed. The files are deleted when the handlers of all ranks of a host have
ended well.

Invariants:
- a record has its number, so that a reader may come at any time;
- the file's blocks are taken from the disk when it is made: a disk that becomes full later ends no process;
- the programs that the rank runs stand behind the records; where there is no room for them, they are left out;
- no process deletes the files of one that lives;
- after a failure nothing is recorded, so that the last record is what the rank did when it failed.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from time import time_ns
from typing import Any

from fpipe.errors import ScheduleError
from fpipe.flight.format import (
    AT_ABOUT,
    AT_BEAT,
    AT_OUTCOME,
    AT_RECORDS,
    BYTES,
    CAPACITY,
    FOLDER,
    KINDS,
    MAGIC,
    NUMBER,
    OUTCOME,
    OUTCOMES,
    REASON,
    RECORD,
    SUFFIX,
    TEXT,
    UNTIL,
    Kind,
    Outcome,
    cut,
    folder_of_flights,
    process_state,
)
from fpipe.flight.programs import packed
from fpipe.flight.reading import read, read_rank
from fpipe.programs.program import Program
from fpipe.tables import TABLE

log = logging.getLogger("fpipe.flight")

KEPT = 16  # flights of processes that are gone
MOST_PROGRAMS = 64  # of a rank
MOST_EFFECTS = 1 << 17  # of a program that is kept
PACK, SIZE = RECORD.pack_into, RECORD.size


def new_name() -> str:
    """Return a name for a flight: time, host and process."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns() % 1000000:06}"


def record(name: str, about: Mapping[str, Any]) -> Recording | None:
    """Return the recorder of this process in a flight; None where no file can be made.

    Args:
        name: of the flight.
        about: as in `Recording`; its "process" is the number of the file.
    """
    folder = folder_of_flights()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} is another user's")
        _forget(folder)
        (folder / name).mkdir(mode=0o700, exist_ok=True)
        return Recording(folder / name / f"{about['process']:06}{SUFFIX}", about)
    except OSError as error:
        log.warning("there is no flight recorder: %s. The environment variable %s names its folder", error, FOLDER)
        return None


def _forget(folder: Path) -> None:
    """Delete the oldest flights of which no process lives, and nothing else that is in the folder."""
    with suppress(OSError):
        flights = sorted((path for path in folder.iterdir() if _is_flight(path)), key=lambda path: path.name)
        for flight in flights[:-KEPT]:
            ranks = [rank for path in flight.iterdir() if (rank := read_rank(path)) is not None]
            if not any(rank.may_run for rank in ranks):
                _remove(flight)


def _remove(flight: Path) -> None:
    """Delete the files of a flight, and its folder, if it holds nothing else."""
    for path in flight.glob(f"*{SUFFIX}"):
        path.unlink(missing_ok=True)
    flight.rmdir()


def _is_flight(path: Path) -> bool:
    """Return whether a path is a folder that holds recorders' files, and nothing else."""
    if path.is_symlink() or not path.is_dir():
        return False
    files = [*path.iterdir()]
    return bool(files) and all(file.suffix == SUFFIX and file.is_file() and not file.is_symlink() for file in files)


class Recording:
    """The recorder of one rank.

    Args:
        path: of the file, in a folder that exists.
        about: who writes it: "process", its number; "name", of the process for people; "processes", how many there are.

    Attributes:
        step: the number of the running step.

    Raises:
        OSError: the file can't be made.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path, self.step, self._number, self._is_open = path, 0, 0, True
        self._programs = 0
        self._error_before = _last_error()
        state = process_state(os.getpid())
        process = {"host": socket.gethostname(), "pid": os.getpid(), "began": 0 if state is None else state[1]}
        text = json.dumps({**about, **process}).encode()
        if len(text) >= AT_RECORDS - AT_ABOUT:
            raise OSError(f"{len(text)} bytes about a rank are too many")
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(file, 0, BYTES)
            self._bytes = mmap.mmap(file, BYTES)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(file)
        self._bytes[AT_ABOUT : AT_ABOUT + len(text)] = text
        self.beat()
        self._bytes[: len(MAGIC)] = MAGIC

    def begin(self, step: int) -> None:
        """Record that a step or a set-up begins."""
        self.step = step
        self._write(_payload("step", ""), -1)

    def end(self) -> None:
        """Record that it has ended."""
        self._write(_payload("end", ""), -1)

    def program(self, program: Program) -> int | None:
        """Keep a program that this rank will run; return its number among those that are kept.

        Returns: None where it is not: there is no room, it has more than `MOST_EFFECTS`, or effects of the user's own.
        """
        if self._programs == MOST_PROGRAMS or len(program) > MOST_EFFECTS or program.table != TABLE:
            return None
        try:
            content = packed(program)
            with self.path.open("ab") as file:
                file.write(content)
        except (OSError, ScheduleError) as error:
            log.debug("a program is not kept: %s", error)
            self._programs = MOST_PROGRAMS  # a part of it may stand there
            return None
        self._programs += 1
        return self._programs - 1

    def writer(self, kind: Kind, text: str, program: int | None = None) -> Callable[[], object]:
        """Return a function that writes this record.

        Args:
            program: the number of the one that an effect is of.
        """
        return partial(self._write, _payload(kind, text), -1 if program is None else program)

    def waits(self, text: str, peer: int | None) -> int:
        """Record that the rank begins to wait; return the record's place, for `arrived`.

        Args:
            peer: the number of the process that it waits for; None if that may be any.
        """
        return self._write(_payload("wait", text), -1 if peer is None else peer)

    def arrived(self, place: int) -> None:
        """Record that the wait at this place has ended."""
        if self._is_open:
            NUMBER.pack_into(self._bytes, place + UNTIL, time_ns())

    def beat(self) -> None:
        """Record that the process runs."""
        NUMBER.pack_into(self._bytes, AT_BEAT, time_ns())

    def conclude(self, outcome: Outcome, reason: str) -> None:
        """Record why the step can't be finished, or that the handler has ended. The first outcome counts."""
        if self._is_open:
            self._is_open = False
            content = OUTCOMES.index(outcome), cut(reason, REASON)
            OUTCOME.pack_into(self._bytes, AT_OUTCOME, time_ns(), *content)

    def recover(self) -> None:
        """Record that the ranks have connected again after a failure."""
        OUTCOME.pack_into(self._bytes, AT_OUTCOME, 0, 0, b"")
        self._is_open = True

    def close(self) -> None:
        """Record that the handler has ended. Where all ranks of this host have ended well, delete their files."""
        error = _last_error()
        if error is not None and error is not self._error_before:  # else it is of an earlier cell of a notebook
            self.conclude("failed", f"its script raised {type(error).__name__}: {error}")
        self.conclude("ended", "")
        with suppress(OSError):
            if all(rank.outcome == "ended" for rank in read(self.path.parent)):
                _remove(self.path.parent)

    def _write(self, payload: bytes, where: int) -> int:
        number = self._number
        place = AT_RECORDS + number % CAPACITY * SIZE
        if self._is_open:
            self._number = number + 1
            PACK(self._bytes, place, number + 1, time_ns(), 0, self.step, where, payload)
        return place


def _last_error() -> BaseException | None:
    """Return the exception that has ended the script, when the interpreter exits; in a notebook, that of a cell."""
    error: BaseException | None = getattr(sys, "last_value", None)
    return error


@lru_cache(4096)
def _payload(kind: Kind, text: str) -> bytes:
    return bytes([KINDS.index(kind)]) + cut(text, TEXT)
