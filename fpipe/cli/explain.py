"""The verb that says why a job hangs or has ended, by its flight recorders. No torch."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fpipe.cli.app import CommandError, verb
from fpipe.cli.options import Json
from fpipe.cli.output import print_json, show
from fpipe.flight.explanation import explain as explained
from fpipe.flight.format import SUFFIX, folder_of_flights
from fpipe.flight.reading import Entry, Rank, read
from fpipe.flight.report import as_json as as_json_of
from fpipe.flight.runs import copy

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_SHOWN = 64  # ranks in the table


@verb("fpipe explain", "fpipe explain --last 10", "fpipe explain --logdir runs/mine", "fpipe explain --json")
def explain(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER",
            help="A job's flight, or a folder of flights, of which the newest is taken: by default that of this user.",
        ),
    ] = None,
    last: Annotated[int, typer.Option(min=0, metavar="N", help="Show also the last N records of each rank.")] = 0,
    logdir: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Copy the flight, as it is now, into a run's folder, where the Pipeline tab of TensorBoard shows it.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say which rank a job waits for, or why it has ended.

    Each process of a Distributed handler keeps its last records in a file,
    also when it is killed. The files of a job that ended well are deleted.
    """
    flight, ranks = _newest(folder_of_flights() if folder is None else folder)
    explanation = explained(ranks)
    if logdir is not None:
        _copy(flight, logdir)
    if as_json:
        print_json({"flight": str(flight), **as_json_of(ranks, explanation, last)})
        return
    show(_plain(explanation.text), _table(ranks), *(part for rank in ranks if last for part in _records(rank, last)))


def _newest(folder: Path) -> tuple[Path, list[Rank]]:
    """Return the newest flight in a folder, or the flight that it is."""
    try:
        if any(folder.glob(f"*{SUFFIX}")):
            flights = [folder]
        else:
            flights = sorted((path for path in folder.iterdir() if path.is_dir()), key=_written, reverse=True)
        for flight in flights:
            if ranks := read(flight):
                return flight, ranks
    except FileNotFoundError:
        pass
    except OSError as error:
        raise typer.BadParameter(f"{folder} can't be read: {error.strerror}", param_hint="FOLDER") from None
    raise CommandError(
        f"there is no flight in {folder}: Distributed handlers write one, and delete it when the job has ended well. "
        "Name its folder, or set FPIPE_FLIGHTS as the job did; on several hosts each has its own ranks' files"
    )


def _written(flight: Path) -> float:
    return max((path.stat().st_mtime for path in flight.glob(f"*{SUFFIX}")), default=0.0)


def _copy(flight: Path, logdir: Path) -> None:
    try:
        place = copy(flight, logdir)
    except OSError as error:
        raise typer.BadParameter(f"{logdir} can't be written: {error.strerror}", param_hint="--logdir") from None
    typer.echo(f"copied to {place}", err=True)


def _table(ranks: list[Rank]) -> "Table":
    from fpipe.cli.tables import table

    rows = table(["process", "step"], ["rank", "state", "last record"])
    for rank in ranks[:_SHOWN]:
        state = rank.state if rank.outcome == "open" else rank.outcome
        entry = rank.entries[-1] if rank.entries else None
        step = "" if entry is None else str(entry.step)
        rows.add_row(str(rank.process), step, _plain(rank.name), state, "" if entry is None else _text(entry))
    return rows


def _text(entry: Entry) -> "Text":
    return _plain({"step": "the step begins", "end": "the step has ended"}.get(entry.kind, entry.text))


def _plain(text: str) -> "Text":
    """Return a text that is shown as it is: in a str, brackets are markup."""
    from rich.text import Text

    return Text(text)


def _records(rank: Rank, last: int) -> "tuple[Text, Table]":
    from fpipe.cli.tables import table

    rows = table(["time", "ms"], ["record"])
    for entry in rank.entries[-last:]:
        clock = time.strftime("%H:%M:%S", time.localtime(entry.begin // 10**9)) + f".{entry.begin // 10**3 % 10**6:06}"
        waited = "" if entry.end is None else f"{(entry.end - entry.begin) / 1e6:.3f}"
        rows.add_row(clock, waited, _text(entry))
    return _plain(rank.name), rows
