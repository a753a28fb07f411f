"""Read a Chrome trace, as torch.profiler writes it, one event at a time. No torch.

A trace is an object with the list `traceEvents`, or that list alone, in which an event has its phase, `ph`; the file
may be a gzip. Of a file of any size, no more than one piece and one event are in memory.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

EVENTS = "traceEvents"
_PIECE = 1 << 20  # characters
_MOST = 1 << 26  # characters of one event, or of another field
_SPACE = " \t\r\n"


class BadTrace(ValueError):
    """A file is no trace, or a damaged one; or the traces are of no pipeline. The text has the way out."""


def read(file: Path, event: Callable[[dict[str, Any]], None], kept: Callable[[str], bool]) -> dict[str, Any] | None:
    """Read a file, call `event` with each of its events, and return its other fields.

    Args:
        kept: whether a field is returned.

    Returns:
        None for a file of JSON that is no trace.

    Raises:
        BadTrace: the file can't be read, or is damaged.
    """
    try:
        with file.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        opened: Any = gzip.open if packed else open
        with opened(file, "rt", encoding="utf-8-sig", errors="replace") as stream:
            return _read(_Text(stream), event, kept)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadTrace(f"{file} is a damaged gzip ({error}): write the trace again") from None
    except OSError as error:
        raise BadTrace(f"{file} can't be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise BadTrace(f"{file} is cut short, or no JSON ({error}): write the trace again") from None


def _read(text: _Text, event: Callable[[dict[str, Any]], None], kept: Callable[[str], bool]) -> dict[str, Any] | None:
    is_trace = False
    if text.next() == "[":
        for each in text.items():
            if isinstance(each, dict) and "ph" in each:
                is_trace = True
                event(each)
        return {} if is_trace else None
    if text.next() not in ("", "{"):
        text.value()
        return None
    fields = dict[str, Any]()
    for name in text.fields():
        if name == EVENTS:
            is_trace = True
            for each in text.items():
                if isinstance(each, dict):
                    event(each)
        elif kept(name):
            fields[name] = text.value()
        else:
            text.value()
    return fields if is_trace else None


class _Text:
    """The text of a file, of which a part is in memory."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.text, self.at = stream, "", 0
        self._decode = json.JSONDecoder().raw_decode

    def _more(self, pieces: int = 1) -> bool:
        """Read on, and forget what is read already; return whether there was more."""
        piece = self.stream.read(pieces * _PIECE)
        self.text, self.at = self.text[self.at :] + piece, 0
        return bool(piece)

    def next(self) -> str:
        """Return the next character that is no space, without passing it; "" at the end."""
        while True:
            while self.at < len(self.text):
                if self.text[self.at] not in _SPACE:
                    return self.text[self.at]
                self.at += 1
            if not self._more():
                return ""

    def expect(self, characters: str) -> str:
        """Pass the next character, and return it.

        Raises:
            ValueError: it is another one.
        """
        found = self.next()
        if not found or found not in characters:
            raise ValueError(f"{found!r} where {' or '.join(characters)} is due" if found else "it ends early")
        self.at += 1
        return found

    def value(self) -> Any:
        """Return the next value, and pass it.

        Raises:
            ValueError: there is none, or one of more than `_MOST` characters.
        """
        self.next()
        pieces, ended = 1, False
        while True:
            try:
                value, end = self._decode(self.text, self.at)
                if end < len(self.text) or ended:  # else a number may go on
                    self.at = end
                    return value
            except json.JSONDecodeError as error:
                if ended:
                    raise ValueError(error.msg) from None
            if len(self.text) - self.at > _MOST:
                raise ValueError(f"a part of more than {_MOST >> 20} MiB")
            ended = not self._more(pieces)
            pieces *= 2

    def items(self) -> Iterator[Any]:
        """Yield the values of a list."""
        self.expect("[")
        if self.next() == "]":
            self.at += 1
            return
        while True:
            yield self.value()
            if self.expect(",]") == "]":
                return

    def fields(self) -> Iterator[str]:
        """Yield the names of an object's fields; the caller passes each one's value."""
        self.expect("{")
        if self.next() == "}":
            self.at += 1
            return
        while True:
            name = self.value()
            if not isinstance(name, str):
                raise ValueError(f"{name!r} where a name is due")
            self.expect(":")
            yield name
            if self.expect(",}") == "}":
                return
