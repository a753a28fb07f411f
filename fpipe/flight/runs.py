"""Flights in the folder of a run, where the Pipeline tab looks for them: `runs/mine/flights/NAME/3.flight`. No torch.

A file there is a link to one that a recorder writes, or a copy, in which the state of its process no longer changes. A
copy is written under the name `.3.flight.HOST.PID`, and then renamed; the next copy deletes what a killed one left.
"""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fpipe.flight.format import AT_STATE, BYTES, STATE, STATES, SUFFIX, process_state
from fpipe.flight.programs import MOST_BYTES
from fpipe.flight.reading import read_rank

FOLDER = "flights"  # in the folder of a run


def link(file: Path, run: Path) -> None:
    """Link a recorder's file into the folder of a run.

    Raises:
        OSError: the folder can't be written.
    """
    place = _place(file, run)
    place.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        place.symlink_to(file.absolute())


def unlink(file: Path, run: Path) -> None:
    """Remove the link of a recorder's file from the folder of a run, unless a step has failed."""
    place, rank = _place(file, run), read_rank(file)
    if place.is_symlink() and (rank is None or rank.outcome in ("open", "ended")):
        with suppress(OSError):
            place.unlink()
            place.parent.rmdir()
            place.parent.parent.rmdir()


def copy(flight: Path, run: Path) -> Path:
    """Copy the files of a flight into the folder of a run, with the states that the processes have now.

    Returns: the copy's folder.

    Raises:
        OSError: a file can't be read or written.
    """
    target = run / FOLDER / flight.resolve().name
    target.mkdir(parents=True, exist_ok=True)
    _sweep(target)
    is_there = target.samefile(flight)
    for file in sorted(flight.glob(f"*{SUFFIX}")):
        rank = read_rank(file)
        if rank is None or (is_there and not file.is_symlink()):
            continue
        with file.open("rb") as opened:
            content = bytearray(opened.read(BYTES + MOST_BYTES))
        STATE.pack_into(content, AT_STATE, rank.copied or time.time_ns(), STATES.index(rank.state))
        unfinished = target / f".{file.name}.{socket.gethostname()}.{os.getpid()}"
        try:
            unfinished.write_bytes(content)
            unfinished.replace(target / file.name)  # in place of a link too
        finally:
            unfinished.unlink(missing_ok=True)
    return target


def _sweep(folder: Path) -> None:
    """Delete what processes of this host that are gone did not finish to copy."""
    for path in folder.glob(f".*{SUFFIX}.*"):
        name, _, pid = path.name.rpartition(".")
        if name.endswith(f"{SUFFIX}.{socket.gethostname()}") and pid.isdecimal() and process_state(int(pid)) is None:
            path.unlink(missing_ok=True)


def flights(run: Path) -> Iterator[Path]:
    """Yield the flights in the folder of a run that have a file, the newest first."""
    with suppress(OSError):
        for flight in sorted((run / FOLDER).iterdir(), key=lambda path: path.name, reverse=True):
            if written(flight):
                yield flight


def written(flight: Path) -> list[float]:
    """Return when each file of a flight was last written, in seconds since 1970; not of files that can't be read."""
    times = []
    for file in flight.glob(f"*{SUFFIX}"):
        with suppress(OSError):  # a link into a folder of another user, or to a file that is gone
            if stat.S_ISREG((status := file.stat()).st_mode):
                times.append(status.st_mtime)
    return times


def _place(file: Path, run: Path) -> Path:
    return run / FOLDER / file.parent.name / file.name
