"""Read the files of a flight: who wrote them, what each rank did last, and whether its process is there. No torch."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from fpipe.flight.format import (
    AT_BEAT,
    AT_OUTCOME,
    AT_RECORDS,
    AT_STATE,
    BYTES,
    KINDS,
    NUMBER,
    OUTCOME,
    OUTCOMES,
    RECORD,
    STATE,
    STATES,
    SUFFIX,
    Kind,
    Outcome,
    ProcessState,
    about_of,
    process_state,
    text_of,
)

SILENT = 15e9  # ns after which a process of another host is taken for stopped or gone; it writes every 5 s
FORGOTTEN = 86400e9  # ns
MOST = 1 << 20  # processes of a job
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # characters that a terminal obeys


class Entry(NamedTuple):
    """One record of a rank: an effect, a wait, or the begin or end of a step.

    Args:
        begin, end: ns since the epoch, by its host's clock. A wait that has not ended has no end; nothing else has one.
        step: its number, counted over all steps and set-ups of the handler.
        peer: the process that it waits for; None if that may be any.
        text: the effect, or the purpose of the wait.
        program: the number of an effect's program, among those that the rank keeps; None if that one is not kept.
    """

    begin: int
    end: int | None
    step: int
    peer: int | None
    kind: Kind
    text: str
    program: int | None = None


@dataclass(frozen=True)
class Rank:
    """The recording of one rank.

    Args:
        process, name, processes: its number, its name, and how many there are.
        state: of its process, when the file was read; of a copy, when it was made.
        seen: the time when the process last ran, in ns since the epoch.
        entries: the last ones, in order.
        outcome: whether its handler has ended, or a step failed.
        concluded: the time of that, in ns since the epoch; 0 while it is open.
        reason: of a failure.
        copied: the time of a copy, in ns since the epoch; 0 for the file itself.
        file: the recording.
    """

    process: int
    name: str
    processes: int
    host: str
    pid: int
    state: ProcessState
    seen: int
    entries: Sequence[Entry]
    outcome: Outcome
    concluded: int
    reason: str
    copied: int = 0
    file: Path | None = None

    @property
    def may_run(self) -> bool:
        """Whether the rank's process runs or is stopped; on another host, whether it has written within a day."""
        return self.state in ("runs", "stopped") or (self.state == "silent" and self.seen > time.time_ns() - FORGOTTEN)

    @property
    def wait(self) -> Entry | None:
        """The wait in which it is; None if it does not wait."""
        last = self.entries[-1] if self.entries else None
        return last if last is not None and last.kind == "wait" and last.end is None else None

    @property
    def is_outside(self) -> bool:
        """Whether it is in no step."""
        return not self.entries or self.entries[-1].kind == "end"


def read(folder: Path) -> list[Rank]:
    """Return the ranks of a flight by their numbers; files that are no recordings are left out.

    Raises:
        OSError: the folder can't be read.
    """
    ranks = (read_rank(folder / path.name) for path in sorted(folder.iterdir()) if path.suffix == SUFFIX)
    return [rank for rank in ranks if rank is not None]


def read_rank(path: Path) -> Rank | None:
    """Return the recording in a file; None if it is none, or is gone."""
    try:
        if not path.is_file():  # a pipe would never end
            return None
        with path.open("rb") as file:
            content = file.read(BYTES)
        return None if len(content) < BYTES else _rank(path, content, about_of(content))
    except (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError):
        return None


def _rank(path: Path, content: bytes, about: Mapping[str, Any]) -> Rank:
    process, processes = int(about["process"]), int(about["processes"])
    if not 0 <= process < processes <= MOST:
        raise ValueError(f"there is no process {process} of {processes}")
    (seen,) = NUMBER.unpack_from(content, AT_BEAT)
    concluded, outcome, reason = OUTCOME.unpack_from(content, AT_OUTCOME)
    entries = [entry for _, entry in sorted(_entries(content), key=itemgetter(0))]
    copied, state = STATE.unpack_from(content, AT_STATE)
    seen = max([seen, concluded, *(max(entry.begin, entry.end or 0) for entry in entries[-1:])])
    return Rank(
        process=process,
        name=_shown(about["name"]),
        processes=processes,
        host=_shown(about["host"]),
        pid=int(about["pid"]),
        state=STATES[state] if copied else _state(about, seen),
        seen=seen,
        entries=entries,
        outcome=OUTCOMES[outcome] if concluded else "open",
        concluded=concluded,
        reason=_shown(text_of(reason)),
        copied=copied,
        file=path,
    )


def _shown(text: object) -> str:
    """Return a text as it may be shown on a terminal, which a damaged file must not control."""
    return CONTROL.sub("?", str(text))


def _entries(content: bytes) -> Iterator[tuple[int, Entry]]:
    """Yield the records with their numbers."""
    for number, begin, end, step, where, payload in RECORD.iter_unpack(content[AT_RECORDS:BYTES]):
        if number > 0 and payload[0] < len(KINDS):
            kind, text = KINDS[payload[0]], _shown(text_of(payload[1:]))
            place = None if where < 0 else where
            peer, program = (None, place) if kind == "effect" else (place, None)
            yield number, Entry(begin, end or None, step, peer, kind, text, program)


def _state(about: Mapping[str, Any], seen: int) -> ProcessState:
    if about["host"] != socket.gethostname():
        return "silent" if seen < time.time_ns() - SILENT else "runs"
    state = process_state(int(about["pid"]))
    if state is None or state[1] != about["began"]:
        return "gone"
    return "stopped" if state[0] == "stopped" else "runs"
