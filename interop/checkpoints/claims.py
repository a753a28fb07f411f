"""The unfinished folders of saves: each belongs to one save, and one whose process was killed is removed by the next.

A save holds a lock of the operating system on a file beside its folder, which ends with its process.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

from fpipe.interop.checkpoints.manifest import NUMBERED, number_of

UNFINISHED, LOCK = ".unfinished-", ".lock-"
CLAIM = re.compile(rf"({re.escape(UNFINISHED)}|{re.escape(LOCK)})({NUMBERED.pattern})")
DAY = 86400.0  # seconds after which a folder is left behind where the file system has no locks


class Claim:
    """The folder that one save fills, on rank 0; a context that gives it up at its end."""

    def __init__(self) -> None:
        self._lock: int | None = None
        self._file = Path()

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock is not None:
            self._file.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def begin(self, folder: Path, step: int | None) -> Path:
        """Make a new folder to be filled, and remove those that earlier saves left unfinished.

        Raises:
            OSError: it can't be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        _remove_left(folder)
        taken = [path.name.removeprefix(UNFINISHED) for path in folder.iterdir()]
        number = max((number_of(Path(name)) for name in taken), default=0)
        while True:
            number += 1
            unfinished = folder / f"{UNFINISHED}{number:06d}{'' if step is None else f'-step-{step}'}"
            self._file = folder / f"{LOCK}{number:06d}"  # of the number, whatever the step
            lock = os.open(self._file, os.O_CREAT | os.O_RDWR, 0o666)
            is_free = _locked(lock)
            if is_free is False or not os.fstat(lock).st_nlink:  # another job has it, or has just given it up
                os.close(lock)
                number -= is_free is not False
                continue
            self._lock = lock
            unfinished.mkdir()
            return unfinished


def remove(path: Path) -> None:
    """Remove a folder, which another job may do as well."""
    with suppress(FileNotFoundError):
        shutil.rmtree(path)


def _remove_left(folder: Path) -> None:
    """Remove the folders of saves that were killed, and their locks."""
    for path in list(folder.iterdir()):
        claim = CLAIM.fullmatch(path.name)
        if claim is None or path.is_symlink() or path.is_dir() != (claim[1] == UNFINISHED):
            continue  # not ours
        if _is_left(folder / f"{LOCK}{claim[3]}", path):
            remove(path) if path.is_dir() else path.unlink(missing_ok=True)


def _is_left(file: Path, folder: Path) -> bool:
    """Return whether no process holds the lock of an unfinished folder."""
    try:
        lock = os.open(file, os.O_RDWR)
    except OSError:  # it was removed while the folder was
        return True
    try:
        is_free = _locked(lock)
    finally:
        os.close(lock)
    with suppress(FileNotFoundError):
        return time.time() > folder.stat().st_mtime + DAY if is_free is None else is_free
    return False


def _locked(lock: int) -> bool | None:
    """Lock a file; return False if another process has it, None if the file system has no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
