"""What verbs print and write: tables, JSON, files that take another's place whole, and a bar while they work."""

import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, which then takes the place of `path`, with its mode: nobody sees half a file.

    A link stays, and what it leads to is replaced. What is no regular file, a pipe or a device, is written to.
    """
    target = Path(os.path.realpath(path))
    plain = target.is_file() or not target.exists()
    try:
        with tempfile.TemporaryDirectory(prefix=".", dir=target.parent if plain else None) as folder:
            unfinished = Path(folder) / path.name
            yield unfinished
            if plain:
                if target.exists():
                    unfinished.chmod(stat.S_IMODE(target.stat().st_mode))
                unfinished.replace(target)
            else:
                target.write_bytes(unfinished.read_bytes())
    except OSError as error:
        raise typer.BadParameter(f"{path} can't be written: {error.strerror}", param_hint="--out") from None


@contextmanager
def progress(doing: str, steps: int | None = None) -> Iterator[Callable[[str], None]]:
    """A bar on stderr while something long runs, if that is a terminal; the function it gives says what comes next."""
    if not sys.stderr.isatty():
        yield lambda what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=steps)
        yield lambda what: bar.update(task, description=what, advance=1)


def print_json(found: object) -> None:
    print(json.dumps(found))


def console(width: int | None = None) -> "Console":
    from rich.console import Console

    return Console(width=width, highlight=False)


def show(*what: "RenderableType") -> None:
    console().print(*what, sep="\n", crop=False)  # a table that is wider than the terminal is shown whole
