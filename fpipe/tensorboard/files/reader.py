"""Captures in event files, found and read without a TensorBoard server. No torch.

Listing reads every record's tag and remembers where the record lies; what it holds is read for the capture asked for.
The checksums of records are left alone: without TensorFlow they take 0.2 s for a megabyte, and the gzip within has its
own. What follows a record that is cut short or broken is lost, and a notice says so.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event

from fpipe.tensorboard.files.captures import Capture, assemble, parsed, placed

_HEADER, _FOOTER = 12, 4  # bytes around a record: its length and the checksum of that, and its own checksum


class Key(NamedTuple):
    """Which capture: the experiment's folder, from the one that was listed on, measured or predicted, and the step."""

    experiment: str
    kind: str
    step: int


class Part(NamedTuple):
    """Where a record lies that holds a capture, or a part of one."""

    file: Path
    at: int
    length: int


@dataclass(frozen=True)
class Listing:
    """What there is below a folder.

    Args:
        captures: by experiment, kind and step; of each rank that has it, the records in their order.
        notices: what couldn't be read.
    """

    folder: Path
    captures: Mapping[Key, Mapping[int, Sequence[Part]]]
    notices: Sequence[str] = ()

    @property
    def experiments(self) -> list[str]:
        return sorted({key.experiment for key in self.captures})

    def steps(self, experiment: str, kind: str) -> list[int]:
        """The steps that were captured, the first one first."""
        return sorted(key.step for key in self.captures if (key.experiment, key.kind) == (experiment, kind))

    def read(self, key: Key) -> Capture:
        """A capture of all ranks that have it.

        Raises:
            KeyError: there is none such.
            BadColumns: no rank's can be read.
        """
        return assemble({rank: _blob(parts) for rank, parts in self.captures[key].items()})


def find(folder: Path | str) -> Listing:
    """The captures below a folder: one for several experiments, an experiment's, its measured or predicted one, or one
    of a single rank's.

    Raises:
        NotADirectoryError: it is no folder.
    """
    root = Path(folder)
    if not root.is_dir():
        raise NotADirectoryError(f"{folder} is no folder")
    captures: dict[Key, dict[int, Sequence[Part]]] = defaultdict(dict)
    notices: list[str] = []
    for within, files in _folders(root.absolute(), notices):
        place = placed(within.as_posix())
        if place is None:
            continue
        experiment = _below(root.absolute(), Path(place.experiment or "/"))
        for file in files:
            for step, parts in _records(file, notices).items():
                captures[Key(experiment, place.kind, step)][place.rank] = parts
    return Listing(root, captures, tuple(notices))


def _below(root: Path, folder: Path) -> str:
    """The path from one folder to another below it; "" for that itself, and for what it lies in."""
    return "" if root.is_relative_to(folder) else folder.relative_to(root).as_posix()


def _folders(root: Path, notices: list[str]) -> Iterator[tuple[Path, list[Path]]]:
    """Every folder with event files, once, and these, the oldest first. Links are followed, but never in a loop."""
    seen: set[str] = set()
    walk = os.walk(root, onerror=lambda error: notices.append(_unread(error)), followlinks=True)
    for within, folders, names in walk:
        real = os.path.realpath(within)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        files = [path for name in names if "tfevents" in name and (path := Path(within, name)).is_file()]
        if files:
            yield Path(within), sorted(files, key=_age)


def _age(file: Path) -> tuple[list[int], str]:
    """Files were begun in this order: a name has the second, the host, the process, and a count in that."""
    within = file.name.partition("tfevents")[2]
    return [int(number) for number in re.findall(r"\d+", within)], file.name


def _unread(error: OSError) -> str:
    return f"{error.filename} can't be read: {error.strerror}"


def _records(file: Path, notices: list[str]) -> dict[int, Sequence[Part]]:
    """Step -> where its parts are in a file. Of a step that was captured twice, the later one."""
    found: dict[int, list[Part]] = {}
    try:
        for at, event in _events(file):
            for value in event.summary.value:
                if step_part := parsed(value.tag):
                    step, part = step_part
                    if part == 0:
                        found[step] = []
                    found.setdefault(step, []).append(at)
    except _Broken as error:
        notices.append(f"{file} {error}: what stands before is read")
    except OSError as error:
        notices.append(_unread(error))
    return dict(found)


class _Broken(Exception):
    """A file that doesn't go on as event files do."""


def _events(file: Path) -> Iterator[tuple[Part, Event]]:
    """The records of a file and where they are.

    Raises:
        _Broken: after what is whole.
    """
    size, at = file.stat().st_size, 0
    with file.open("rb") as stream:
        while at < size:
            length = int.from_bytes(stream.read(_HEADER)[:8], "little")
            if at + _HEADER + length + _FOOTER > size:
                raise _Broken(f"is cut short or broken at byte {at}")
            part = Part(file, at + _HEADER, length)
            yield part, _event(stream.read(length), part)
            stream.seek(_FOOTER, os.SEEK_CUR)
            at += _HEADER + length + _FOOTER


def _event(data: bytes, part: Part) -> Event:
    try:
        return Event.FromString(data)
    except DecodeError:
        raise _Broken(f"is broken at byte {part.at}") from None


def _blob(parts: Sequence[Part]) -> bytes:
    """What the records hold, one after the other; nothing where they can't be read any more."""
    pieces = []
    for part in parts:
        try:
            with part.file.open("rb") as stream:
                stream.seek(part.at)
                values = _event(stream.read(part.length), part).summary.value
        except (OSError, _Broken):
            return b""
        pieces += [piece for value in values if parsed(value.tag) for piece in value.tensor.string_val]
    return b"".join(pieces)
