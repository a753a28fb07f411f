"""The application, and the decorator that makes a function one of its verbs. No torch."""

import codecs
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import typer

from fpipe._version import VERSION
from fpipe.errors import ScheduleError

OWN = "own schedule in "  # prefix of the module name of a user's file


class CommandError(Exception):
    """An argument has the right form but can't be used. The text gives the reason."""


app = typer.Typer(
    help="Pipeline schedules: verified, simulated, drawn, compared, searched, exchanged.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # an exception of a user's schedule is shown as Python shows it
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"fpipe {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version, and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    codecs.register_error("fpipe.plain", _plain)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115  # until the process ends
        elif "utf" not in stream.encoding.lower():
            stream.reconfigure(errors="fpipe.plain")
    try:
        try:
            app(prog_name="fpipe")
        finally:
            sys.stdout.flush()
    except OSError as error:  # verbs handle errors of files; this one is of stdout: a full disk or a closed pipe
        if error.filename is not None:
            raise
        if not isinstance(error, BrokenPipeError):
            _complain(f"the output can't be written: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more when it exits
        sys.exit(1)


_PLAIN = {"\N{MICRO SIGN}": "u", "\N{HORIZONTAL ELLIPSIS}": "...", "\N{EM DASH}": "-"}


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Return ASCII for characters that the terminal's encoding lacks."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(_PLAIN.get(character, "?") for character in lacking), error.end


def _complain(message: str) -> None:
    typer.echo(f"{typer.style('error:', fg='red', bold=True)} {message}", err=True)


def verb(
    *examples: str, name: str | None = None, group: typer.Typer = app
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a command. A parameter whose type is a dataclass stands for its fields, as options.

    A `ScheduleError` or `CommandError` ends the command with status 1, and its text on stderr. So does any other
    exception from a user's file, with the traceback from that file on.
    """

    def add(function: Callable[..., None]) -> Callable[..., None]:
        epilog = "\n\n".join(("Example:" if len(examples) == 1 else "Examples:", *examples))
        return group.command(name, epilog=epilog)(_reporting(_with_options(function)))

    return add


def on_command_line(context: typer.Context) -> set[str]:
    """Return the names of a verb's options that are given, and not by default."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def _reporting(function: Callable[..., None]) -> Callable[..., None]:
    """Report errors of the arguments and of a user's file, and exit with status 1."""

    @wraps(function)
    def command(**arguments: Any) -> None:
        try:
            function(**arguments)
        except (ScheduleError, CommandError) as error:
            _complain(str(error))
            raise typer.Exit(1) from None
        except Exception as error:
            within = _within_own(error.__traceback__)
            if within is None and not isinstance(error, SyntaxError):
                raise
            typer.echo("".join(traceback.format_exception(error.with_traceback(within))), err=True, nl=False)
            raise typer.Exit(1) from None

    return command


def _within_own(at: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the user's file on, or None if it has no such frame."""
    while at and not str(at.tb_frame.f_globals.get("__name__")).startswith(OWN):
        at = at.tb_next
    return at


def _with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of a dataclass type by the fields of the dataclass; typer reads `__signature__`."""
    parameters = inspect.signature(function).parameters.values()
    groups: dict[str, Any] = {p.name: p.annotation for p in parameters if is_dataclass(p.annotation)}

    @wraps(function)
    def command(**arguments: Any) -> None:
        for name, group in groups.items():
            arguments[name] = group(**{field.name: arguments.pop(field.name) for field in fields(group)})
        function(**arguments)

    options = {name: inspect.signature(group).parameters.values() for name, group in groups.items()}
    flat = [q for p in parameters for q in options.get(p.name, [p])]
    flat = [p.replace(kind=p.KEYWORD_ONLY) for p in flat]  # then those without a default may come last
    command.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in flat}
    return command
