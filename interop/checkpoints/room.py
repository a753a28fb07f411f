"""The room for files in shared memory: what a host's processes want together, and what limits it. No torch."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fpipe._format import format_bytes

MAKE_ROOM = {  # the way out, by what limits the room
    "file system": "give it more (docker run --shm-size, mount -o remount,size=)",
    "machine": "take a machine with more",
    "control group": "raise its limit (docker run --memory, srun --mem)",
}


class Room(NamedTuple):
    """Bytes that are free.

    Args:
        limit: one of `MAKE_ROOM`.
        place: where they are free, in words.
    """

    free: int
    limit: str
    place: str

    def __str__(self) -> str:
        return f"{format_bytes(max(0, self.free))} are free {self.place}"


class Want(NamedTuple):
    """What a process wants, in bytes beyond the files that it has, and the fields of the room that it sees."""

    bytes: int
    free: int
    limit: str
    place: str

    @property
    def room(self) -> Room:
        return Room(self.free, self.limit, self.place)


def room_in(folder: Path, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> Room:
    """Return the room for files in memory: the least of what the file system, the machine and control groups leave."""
    return min(_rooms(folder, proc, groups))


def file_system_room(folder: Path) -> Room:
    stat = os.statvfs(folder)
    return Room(stat.f_bavail * stat.f_frsize, "file system", f"in the file system of {folder}")


def _rooms(folder: Path, proc: Path, groups: Path) -> Iterator[Room]:
    yield file_system_room(folder)
    with suppress(OSError, KeyError):
        yield Room(_table(proc / "meminfo")["MemAvailable:"] * 1024, "machine", "in the machine's memory")
    lines = []
    with suppress(OSError):
        lines = (proc / "self/cgroup").read_text().splitlines()
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if not controllers:  # version 2
            yield from _group_rooms(groups, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            yield from _group_rooms(groups / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _group_rooms(root: Path, path: str, limit: str, usage: str, prefix: str) -> Iterator[Room]:
    """Iterate over the rooms of a control group and of those above it, of which a container sees some."""
    own = root / path.lstrip("/")
    for group in (own, *own.parents):
        if not group.is_relative_to(root):
            return
        with suppress(OSError, ValueError):  # not seen here; or "max"
            whole, used = (int((group / name).read_text()) for name in (limit, usage))
            cached = _table(group / "memory.stat")  # the kernel drops the cache of files before a group is full
            used -= sum(cached.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
            name = f"/{group.relative_to(root)}".rstrip(".")
            yield Room(whole - used, "control group", f"within the memory limit of the control group {name}")


def _table(path: Path) -> dict[str, int]:
    return {words[0]: int(words[1]) for line in path.read_text().splitlines() if len(words := line.split()) > 1}


def check_room(folder: Path, hosts: Sequence[str], wants: Sequence[Want]) -> None:
    """Check that the processes of each host have room together.

    Args:
        hosts, wants: of each process.

    Raises:
        OSError: on a host, there is less than they want.
    """
    for host in dict.fromkeys(hosts):
        there = [number for number, name in enumerate(hosts) if name == host]
        wanted = sum(wants[number].bytes for number in there)
        room = max(wants[number].room for number in there)  # some looked before others had removed what is old
        if wanted > room.free:
            raise no_room(folder, there, wanted, room)


def no_room(folder: Path, processes: Sequence[int], wanted: int, room: Room) -> OSError:
    whose = f"process{'' if len(processes) == 1 else 'es'} {', '.join(map(str, processes))}"
    return OSError(
        errno.ENOSPC,
        f"memory checkpoints want {format_bytes(wanted)} more in {folder}, on the host of {whose}, and {room}: "
        f"{MAKE_ROOM[room.limit]}, take Memory(folder=...) of another file system, or leave memory= out",
    )
