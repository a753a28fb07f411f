"""The application, and how a function becomes one of its verbs. No torch."""

import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import wraps
from types import TracebackType
from typing import Any, get_type_hints

import typer

from fpipe.errors import ScheduleError

OWN = "own schedule in "  # begins the name of a module that a user's file becomes


class Unusable(Exception):
    """What a verb was given is as it should be named, but can't be used: its text says why."""


app = typer.Typer(
    help="Pipeline schedules: verified, simulated, drawn, compared, searched, exchanged.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # what a user's own schedule raises is his to read, as Python shows it
)


def main() -> None:
    """Run the command line."""
    try:
        try:
            app(prog_name="fpipe")
        finally:
            sys.stdout.flush()
    except OSError as error:  # files are the verbs' to see to: this is stdout, a full disk or a closed pipe
        if error.filename is not None:
            raise
        if not isinstance(error, BrokenPipeError):
            _complain(f"the output can't be written: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still flushes at its end
        sys.exit(1)


def _complain(what: str) -> None:
    typer.echo(f"{typer.style('error:', fg='red', bold=True)} {what}", err=True)


def verb(*examples: str, name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a command. A parameter whose type is a dataclass stands for its fields, as options.

    A `ScheduleError` or `Unusable` ends the command with status 1, and its text on stderr; so does what else a user's
    own file raises, with the traceback from there on.
    """

    def add(function: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(function).parameters
        groups: dict[str, Any] = {p.name: p.annotation for p in parameters.values() if is_dataclass(p.annotation)}

        @wraps(function)
        def command(**given: Any) -> None:
            for parameter, group in groups.items():
                given[parameter] = group(**{field.name: given.pop(field.name) for field in fields(group)})
            try:
                function(**given)
            except (ScheduleError, Unusable) as error:
                _complain(str(error))
                raise typer.Exit(1) from None
            except Exception as error:
                within = _within_own(error.__traceback__)
                if within is None and not isinstance(error, SyntaxError):
                    raise
                typer.echo("".join(traceback.format_exception(error.with_traceback(within))), err=True, nl=False)
                raise typer.Exit(1) from None

        flat = [q for p in parameters.values() for q in (_options(p.annotation) if p.name in groups else [p])]
        flat = [p.replace(kind=p.KEYWORD_ONLY) for p in flat]  # in any order, those without a default too
        command.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in flat}
        epilog = "\n\n".join(("Example:" if len(examples) == 1 else "Examples:", *examples))
        return app.command(name, epilog=epilog)(command)

    return add


def _within_own(at: TracebackType | None) -> TracebackType | None:
    """The traceback from a user's own file on, if it comes there."""
    while at and not str(at.tb_frame.f_globals.get("__name__")).startswith(OWN):
        at = at.tb_next
    return at


def _options(group: type) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for parameter in inspect.signature(group).parameters.values():
        yield parameter.replace(annotation=hints[parameter.name])
