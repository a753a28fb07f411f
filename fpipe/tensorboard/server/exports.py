"""Export a capture to a file for other tools: Perfetto, Chrome's trace viewer, figures, a table. No torch."""

from __future__ import annotations

import csv
import tempfile
import threading
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from fpipe._format import extent, scale_of
from fpipe.effects import parts
from fpipe.tensorboard.files.captures import Capture
from fpipe.tensorboard.files.columns import Columns, Header
from fpipe.timelines.perfetto import Extras, chrome_json
from fpipe.timelines.text import figures

TYPES = {  # format (the file's suffix) -> media type
    "json": "application/json",
    "svg": "image/svg+xml",
    "png": "image/png",
    "pdf": "application/pdf",
    "csv": "text/csv",
}
_COLUMNS = "rank,row,track,kind,stage,microbatch,effect,start,end,waited_rank,waited_row,bytes"
_drawing = threading.Lock()  # matplotlib's settings are global to the process


class MissingPackage(ImportError):
    """The format needs a package that is not installed; the message says how to install it."""


def exported(capture: Capture, form: str) -> bytes:
    """Return the bytes of a file with the capture.

    Args:
        form: one of `TYPES`.

    Raises:
        MissingPackage: a figure needs matplotlib.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"timeline.{form}"
        save(capture, file, f"{capture.kind}, step {capture.step}, {shortened(capture.schedule)}")
        return file.read_bytes()


def save(capture: Capture, file: Path, title: str) -> None:
    """Write a capture to a file, in the format of its suffix.

    Args:
        title: of the figure, for a format that is one.

    Raises:
        MissingPackage: as for `exported`.
    """
    form = file.suffix.lower().removeprefix(".")
    options: dict[str, Any] = {"schedule": capture.schedule, "unit": capture.unit}
    options["extras"] = {rank: extras(columns, capture.headers[rank]) for rank, columns in capture.columns.items()}
    if form == "json":
        with file.open("w") as stream:
            stream.writelines(chrome_json(capture.timeline, **options))
    elif form == "csv":
        with file.open("w", newline="") as stream:
            stream.write(f"{_COLUMNS}\r\n")
            csv.writer(stream).writerows(_rows(capture))
    else:
        _draw(capture, file, title)


def extras(columns: Columns, header: Header) -> Extras:
    """Return the data of a rank that exporters show in addition to the timeline."""
    memory = zip(*(part.tolist() for part in columns.memory), strict=True)
    return Extras(columns.bytes.tolist(), columns.used.tolist(), list(memory), header.host)


def _draw(capture: Capture, file: Path, title: str) -> None:
    try:
        from fpipe.timelines import figure
    except ImportError as error:
        raise MissingPackage("this needs matplotlib: pip install 'fpipe[figures]'") from error
    timeline = capture.timeline
    figured = figures(timeline, scale_of(timeline.makespan, capture.unit))
    with _drawing:
        figure.save(timeline, file, f"{title}: {extent(timeline.plan)}\n{figured}")


def shortened(text: str) -> str:
    """Return a user's name on one line, cut to `_MAX_CHARACTERS`, without control characters.

    >>> shortened("mine\\n" + "x" * 100)
    'mine xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…'
    """
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    return line if len(line) <= _MAX_CHARACTERS else f"{line[: _MAX_CHARACTERS - 1]}…"


_MAX_CHARACTERS = 60


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
