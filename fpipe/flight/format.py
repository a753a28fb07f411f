"""The file of one rank: a header, and a ring of records of equal size. No torch."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

FOLDER = "FPIPE_FLIGHTS"  # the environment variable that names the folder of all flights
SUFFIX = ".flight"

Kind = Literal["step", "effect", "wait", "replay", "end"]
"""step: a step or a set-up begins. replay: a captured part of one is replayed. end: it has ended on this rank."""
KINDS: tuple[Kind, ...] = get_args(Kind)

Outcome = Literal["open", "ended", "lost", "failed"]
"""ended: its handler is used no more. lost: a step can't be finished, for a peer can't. failed: this rank can't."""
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

ProcessState = Literal["runs", "stopped", "gone", "silent"]
"""silent: on another host, and it has not written for a while."""
STATES: tuple[ProcessState, ...] = get_args(ProcessState)

MAGIC = b"fpipe 1\0"
CAPACITY = 512  # records
NUMBER = struct.Struct("<q")
OUTCOME = struct.Struct("<qB503s")  # its time in ns or 0, which, the reason
# number from 1; begin, and end of a wait or 0, in ns; step; peer of a wait, program of an effect, or -1; kind and text
RECORD = struct.Struct("<qqqii224s")
UNTIL = 16  # where the end of a wait is in a record
STATE = struct.Struct("<qB")  # of a copy: its time in ns, and the state of the process then
AT_BEAT, AT_STATE, AT_OUTCOME, AT_ABOUT, AT_RECORDS = 8, 16, 32, 544, 2048
BYTES = AT_RECORDS + CAPACITY * RECORD.size
TEXT, REASON = 223, 503  # bytes


def folder_of_flights() -> Path:
    """Return the folder of this user's flights: the environment variable FPIPE_FLIGHTS, or one for temporary files."""
    named = os.environ.get(FOLDER)
    return Path(named) if named else Path(tempfile.gettempdir()) / f"fpipe-{os.getuid()}" / "flights"


def cut(text: str, limit: int) -> bytes:
    """Return the first bytes of a text, with no half character at their end.

    >>> cut("größer", 3)
    b'gr'
    """
    return text.encode(errors="replace")[:limit].decode(errors="ignore").encode()


def text_of(content: bytes) -> str:
    """Return the text before the first zero byte."""
    return content.partition(b"\0")[0].decode(errors="replace")


def about_of(content: bytes) -> dict[str, Any]:
    """Return who writes a file.

    Raises:
        ValueError: it is no recording.
    """
    if content[: len(MAGIC)] != MAGIC or len(content) < AT_RECORDS:
        raise ValueError("it is no recording of this version")
    about: dict[str, Any] = json.loads(text_of(content[AT_ABOUT:AT_RECORDS]))
    return about


def process_state(pid: int) -> tuple[str, int] | None:
    """Return "runs" or "stopped" for a process of this host, and when it began, in ticks; None if it is gone.

    Where the system has no /proc, a process that is there runs, and began at 0.
    """
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] in "ZX":
            return None
        return "stopped" if fields[0] in "Tt" else "runs", int(fields[19])
    if Path("/proc/self/stat").exists():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return "runs", 0
