"""Export a capture to a file for other tools: Perfetto, Chrome's trace viewer, figures, a table. No torch."""

from __future__ import annotations

import csv
import io
import tempfile
import threading
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fpipe._format import extent, scale_of
from fpipe.effects import parts
from fpipe.tensorboard.files.captures import Capture
from fpipe.tensorboard.files.columns import Columns, Header
from fpipe.timelines.perfetto import Extras, TooLong, chrome_json
from fpipe.timelines.text import figures

TYPES = {  # format (the file's suffix) -> media type
    "json": "application/json",
    "svg": "image/svg+xml",
    "png": "image/png",
    "pdf": "application/pdf",
    "csv": "text/csv",
}
LINES_PER_CALL = 1000
LINED = ("json", "csv")  # those with a line for each effect
_COLUMNS = "rank,row,track,kind,stage,microbatch,effect,start,end,waited_rank,waited_row,bytes"
_PIECE_BYTES = 1 << 16  # at least so many are sent at once
MOST_DRAWN = 200_000  # effects of a figure
_drawing = threading.Lock()  # matplotlib's settings are global to the process


class CantExport(ValueError):
    """A format can't hold a capture, or needs a package that is not installed. The message has a way out."""


def streamed(capture: Capture, form: str, title: str) -> Iterator[str | bytes]:
    """Return a file with the capture, in pieces that are made as they are taken.

    Args:
        form: one of `TYPES`. JSON and CSV have a line for each effect, and few others.
        title: of a figure.

    Raises:
        CantExport: the format can't hold it, or needs a package that is missing.
    """
    if form == "json":
        options: dict[str, Any] = {"schedule": capture.schedule, "unit": capture.unit}
        options["extras"] = {rank: extras(columns, capture.headers[rank]) for rank, columns in capture.columns.items()}
        try:
            return chrome_json(capture.timeline, **options)
        except TooLong as error:
            raise CantExport(f"a trace can't hold this step: {error}") from None
    return _csv(capture) if form == "csv" else _drawn(capture, form, title)


def save(capture: Capture, file: Path, title: str, advance: Callable[[], object] = int) -> None:
    """Write a capture to a file, in the format of its suffix.

    Args:
        title: of a figure.
        advance: called after each `LINES_PER_CALL` lines.

    Raises:
        CantExport: as for `streamed`.
    """
    with file.open("wb") as out:
        for line, piece in enumerate(streamed(capture, file.suffix.lower().removeprefix("."), title), 1):
            out.write(piece.encode() if isinstance(piece, str) else piece)
            if line % LINES_PER_CALL == 0:
                advance()


def sendable(pieces: Iterable[str | bytes], *, gzip: bool) -> Iterator[bytes]:
    """Yield a file in pieces that are worth sending."""
    pack = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS | 16) if gzip else None
    waiting = bytearray()
    for piece in pieces:
        data = piece.encode() if isinstance(piece, str) else piece
        waiting += data if pack is None else pack.compress(data)
        if len(waiting) > _PIECE_BYTES:
            yield bytes(waiting)
            waiting.clear()
    yield bytes(waiting) + (b"" if pack is None else pack.flush())


def extras(columns: Columns, header: Header) -> Extras:
    """Return the data of a rank that exporters show in addition to the timeline."""
    sizes, used, times, live = (_packed(column) for column in (columns.bytes, columns.used, *columns.memory))
    return Extras(sizes, used, (times, live), header.host)


def _packed(column: NDArray[np.float64]) -> array[float]:
    return array("d", np.asarray(column, np.float64).tobytes())


def _drawn(capture: Capture, form: str, title: str) -> Iterator[bytes]:
    timeline = capture.timeline
    if len(timeline.spans) > MOST_DRAWN:
        raise CantExport(
            f"a figure of {len(timeline.spans)} effects can't be read, at most {MOST_DRAWN}: save a trace or CSV"
        )
    try:
        from fpipe.timelines import figure
    except ImportError as error:
        raise CantExport("this needs matplotlib: pip install 'fpipe[figures]'") from error
    figured = figures(timeline, scale_of(timeline.makespan, capture.unit))

    def drawn() -> Iterator[bytes]:
        with tempfile.TemporaryDirectory() as folder, _drawing:
            file = Path(folder) / f"timeline.{form}"
            figure.save(timeline, file, f"{title}: {extent(timeline.plan)}\n{figured}")
            yield file.read_bytes()

    return drawn()


def shortened(text: str) -> str:
    """Return a user's name on one line, cut to `_MAX_CHARACTERS`, without control characters.

    >>> shortened("mine\\n" + "x" * 100)
    'mine xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…'
    """
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    return line if len(line) <= _MAX_CHARACTERS else f"{line[: _MAX_CHARACTERS - 1]}…"


_MAX_CHARACTERS = 60


def _csv(capture: Capture) -> Iterator[str]:
    yield f"{_COLUMNS}\r\n"
    line = io.StringIO(newline="")
    writer = csv.writer(line)
    for row in _rows(capture):
        writer.writerow(row)
        yield line.getvalue()
        line.seek(0)
        line.truncate()


def _rows(capture: Capture) -> Iterator[Sequence[object]]:
    """Yield a row of `_COLUMNS` for each effect. Times are in the capture's unit; `waited_*` name the cause."""
    for at, span in enumerate(capture.timeline.spans):
        rank, row = capture.place(at)
        subject: Any = getattr(span.effect, "value", parts(span.effect)[0])
        names = type(span.effect).__name__, getattr(subject, "stage", ""), getattr(subject, "microbatch", "")
        waited = ("", "") if span.waited_for is None else capture.place(span.waited_for)
        sizes = capture.columns[rank].bytes
        size = sizes[row] if row < len(sizes) and isfinite(sizes[row]) else ""
        yield rank, row, span.track, *names, repr(span.effect), span.start, span.end, *waited, size
