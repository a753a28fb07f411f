"""The application, and how a function becomes one of its verbs. No torch."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

import typer

from fpipe.errors import ScheduleError

app = typer.Typer(
    help="Pipeline schedules: verified, simulated, drawn, compared, searched, exchanged.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # what a user's own schedule raises is his to read, as Python shows it
)


def main() -> None:
    """Run the command line."""
    app(prog_name="fpipe")


def verb(*examples: str, name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a command. A parameter whose type is a dataclass stands for its fields, as options.

    A `ScheduleError` ends the command with status 1, and its text on stderr.
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
            except ScheduleError as error:
                typer.echo(f"{typer.style('error:', fg='red', bold=True)} {error}", err=True)
                raise typer.Exit(1) from None

        flat = [q for p in parameters.values() for q in (_options(p.annotation) if p.name in groups else [p])]
        flat = [p.replace(kind=p.KEYWORD_ONLY) for p in flat]  # in any order, those without a default too
        command.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in flat}
        epilog = "\n\n".join(("Example:" if len(examples) == 1 else "Examples:", *examples))
        return app.command(name, epilog=epilog)(command)

    return add


def _options(group: type) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for parameter in inspect.signature(group).parameters.values():
        yield parameter.replace(annotation=hints[parameter.name])
