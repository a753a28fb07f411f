"""Memory checkpoints that are in the shared memory of this host, whoever wrote them. No torch."""

from __future__ import annotations

import pwd
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fpipe.interop.checkpoints.slots import (
    Lock,
    files_of,
    folder_of,
    lock_of,
    part_of,
    stored_in,
)


@dataclass(frozen=True)
class Leftover:
    """The memory checkpoints of a job on this host.

    Args:
        checkpoints: the folder of those on disk; None where no step is whole in a file.
        step: the newest in any file; None likewise.
        processes: the numbers of those that have the files and live; 0 for one of another container.
    """

    folder: Path
    user: str
    checkpoints: str | None
    job: str | None
    step: int | None
    bytes: int
    processes: list[int]

    @classmethod
    def of(cls, folder: Path) -> Leftover:
        steps = sorted(stored_in(folder), key=lambda stored: stored.number)
        table = steps[-1].table if steps else {}
        owners = [owner for part in _parts(folder) if (owner := Lock.owner(lock_of(folder, part))) is not None]
        return cls(
            folder=folder,
            user=_user(folder),
            checkpoints=table.get("checkpoints"),
            job=table.get("job"),
            step=steps[-1].step if steps else None,
            bytes=sum(path.stat().st_size for path in files_of(folder)),
            processes=sorted({*owners}),
        )

    def remove(self) -> bool:
        """Remove the files, unless a process that lives has any; return whether they are gone."""
        locks = [Lock(lock_of(self.folder, part)) for part in _parts(self.folder)]
        try:
            if not all(lock.take() for lock in locks):
                return False
            for path in files_of(self.folder):
                path.unlink(missing_ok=True)
        finally:
            for lock in locks:
                lock.remove()
        with suppress(OSError):  # another job has begun
            self.folder.rmdir()
            self.folder.parent.rmdir()
        return True


def leftovers(shared: Path, checkpoints: Path | None = None) -> Iterator[Leftover]:
    """Iterate over the memory checkpoints in a folder of shared memory that this user can see; root sees all.

    Args:
        checkpoints: only those that belong to the checkpoints on disk in this folder.
    """
    for folder in sorted(shared.glob("fpipe-*/*")):
        if not folder.is_dir() or folder.is_symlink() or folder.parent.is_symlink():  # to another user's
            continue
        if checkpoints is None or folder.name == folder_of(shared, checkpoints).name:
            with suppress(PermissionError, FileNotFoundError):  # another user's; removed meanwhile
                yield Leftover.of(folder)


def _parts(folder: Path) -> list[int]:
    return sorted({part_of(path) for path in files_of(folder)})


def _user(folder: Path) -> str:
    number = folder.stat().st_uid
    with suppress(KeyError):
        return pwd.getpwuid(number).pw_name
    return str(number)
