"""Find and read captures in event files, without a TensorBoard server. No torch.

`find` reads the tag and the position of every record; `Listing.read` then reads the content of one capture. The
checksums of records are not verified: without TensorFlow this takes 0.2 s per megabyte, and the gzip inside has its own
checksum. The records after a truncated or broken one are lost, with a notice.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event

from fpipe.tensorboard.files.captures import Capture, assemble, parse_run, parse_tag

_HEADER, _FOOTER = 12, 4  # bytes: the record's length with a checksum; the checksum of the record


class CaptureId(NamedTuple):
    """The experiment's folder, relative to the listed one; "measured" or "predicted"; and the step."""

    experiment: str
    kind: str
    step: int


class Record(NamedTuple):
    """The position of a record that has a capture or a part of one: first byte and length in bytes."""

    file: Path
    at: int
    length: int


@dataclass(frozen=True)
class Listing:
    """The captures below a folder.

    Args:
        captures: capture -> rank -> its records, in order.
        notices: texts about files that can't be read.
    """

    folder: Path
    captures: Mapping[CaptureId, Mapping[int, Sequence[Record]]]
    notices: Sequence[str] = ()

    @property
    def experiments(self) -> list[str]:
        return sorted({key.experiment for key in self.captures})

    def steps(self, experiment: str, kind: str) -> list[int]:
        """Return the captured steps, in ascending order."""
        return sorted(key.step for key in self.captures if (key.experiment, key.kind) == (experiment, kind))

    def read(self, key: CaptureId) -> Capture:
        """Read a capture of all ranks that have it.

        Raises:
            KeyError: there is no such capture.
            BadCapture: no rank's records can be read.
        """
        ranks = self.captures[key]
        where = {rank: f"step {key.step} in {records[0].file}" for rank, records in ranks.items()}
        return assemble({rank: _blob(records) for rank, records in ranks.items()}, where)


def find(folder: Path | str) -> Listing:
    """List the captures below a folder: of several experiments, of one, of one kind, or of a single rank.

    Raises:
        NotADirectoryError: `folder` is not a directory.
    """
    root = Path(folder)
    if not root.is_dir():
        raise NotADirectoryError(f"{folder} is no folder")
    captures: dict[CaptureId, dict[int, Sequence[Record]]] = defaultdict(dict)
    notices: list[str] = []
    for within, files in _folders(root.absolute(), notices):
        name = parse_run(within.as_posix())
        if name is None:
            continue
        experiment = _below(root.absolute(), Path(name.experiment or "/"))
        for file in files:
            for step, records in _records(file, notices).items():
                captures[CaptureId(experiment, name.kind, step)][name.rank] = records
    return Listing(root, captures, tuple(notices))


def _below(root: Path, folder: Path) -> str:
    """Return the path of `folder` relative to `root`; "" if `folder` is `root` or a parent of it."""
    return "" if root.is_relative_to(folder) else folder.relative_to(root).as_posix()


def _folders(root: Path, notices: list[str]) -> Iterator[tuple[Path, list[Path]]]:
    """Yield every folder with event files once, and its files, oldest first. Follow links, without loops."""
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
    """Return a sort key for the order of creation: a name has the second, the host, the process and a counter."""
    within = file.name.partition("tfevents")[2]
    return [int(number) for number in re.findall(r"\d+", within)], file.name


def _unread(error: OSError) -> str:
    return f"{error.filename} can't be read: {error.strerror}"


def _records(file: Path, notices: list[str]) -> dict[int, Sequence[Record]]:
    """Return step -> its records in a file. If a step was captured twice, the later capture."""
    records: dict[int, list[Record]] = {}
    try:
        for record, data in _contents(file):
            for step, part, _ in _parts(data, record):
                if part == 0:
                    records[step] = []
                records.setdefault(step, []).append(record)
    except _Broken as error:
        notices.append(f"{file} {error}: what stands before is read")
    except OSError as error:
        notices.append(_unread(error))
    return dict(records)


class _Broken(Exception):
    """The file is truncated or is not an event file."""


def _contents(file: Path) -> Iterator[tuple[Record, bytes]]:
    """Yield the records of a file and their bytes.

    Raises:
        _Broken: after the last complete record, if more bytes follow.
    """
    size, at = file.stat().st_size, 0
    with file.open("rb") as stream:
        while at < size:
            length = int.from_bytes(stream.read(_HEADER)[:8], "little")
            if at + _HEADER + length + _FOOTER > size:
                raise _Broken(f"is cut short or broken at byte {at}")
            record = Record(file, at + _HEADER, length)
            yield record, stream.read(length)
            stream.seek(_FOOTER, os.SEEK_CUR)
            at += _HEADER + length + _FOOTER


def _parts(data: bytes, record: Record) -> Iterator[tuple[int, int, Sequence[bytes]]]:
    """Yield the step, the number and the content of each part of a capture in a record's bytes."""
    try:
        event = Event.FromString(data)
    except DecodeError:
        raise _Broken(f"is broken at byte {record.at}") from None
    for value in event.summary.value:
        if step_part := parse_tag(value.tag):
            yield *step_part, value.tensor.string_val


def _blob(records: Sequence[Record]) -> bytes:
    """Return the concatenated contents of the records; b"" if one can't be read any more."""
    pieces: list[bytes] = []
    for record in records:
        try:
            with record.file.open("rb") as stream:
                stream.seek(record.at)
                pieces += chain.from_iterable(part for *_, part in _parts(stream.read(record.length), record))
        except (OSError, _Broken):
            return b""
    return b"".join(pieces)
