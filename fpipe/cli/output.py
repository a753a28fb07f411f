"""The output of the verbs: tables, JSON, files replaced atomically, and a progress bar."""

import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file that then replaces `path` atomically and keeps its mode.

    A symbolic link is kept, and its target is replaced. A pipe or a device is written to directly.

    Raises:
        typer.BadParameter: the file can't be written.
    """
    target = Path(os.path.realpath(path))
    is_regular = target.is_file() or not target.exists()
    try:
        with tempfile.TemporaryDirectory(prefix=".", dir=target.parent if is_regular else None) as folder:
            unfinished = Path(folder) / path.name
            yield unfinished
            if is_regular:
                if target.exists():
                    unfinished.chmod(stat.S_IMODE(target.stat().st_mode))
                unfinished.replace(target)
            else:
                target.write_bytes(unfinished.read_bytes())
    except OSError as error:
        raise typer.BadParameter(f"{path} can't be written: {error.strerror}", param_hint="--out") from None


@contextmanager
def progress(name: str, steps: int | None = None) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on stderr, if that is a terminal. Yield a function that advances to the next, named step."""
    if not sys.stderr.isatty():
        yield lambda name: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=steps)
        yield lambda name: bar.update(task, description=name, advance=1)


def attributes(of: object, *names: str) -> dict[str, Any]:
    """Return attributes by name, for JSON."""
    return {name: getattr(of, name) for name in names}


def print_json(content: object) -> None:
    print(json.dumps(content))


def console(width: int | None = None) -> "Console":
    from rich.console import Console

    return Console(width=width, highlight=False)


def show(*parts: "RenderableType") -> None:
    console().print(*parts, sep="\n", crop=False)  # do not cut tables that are wider than the terminal
