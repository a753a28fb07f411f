"""The verb for traces of torch.profiler. No torch."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from fpipe._format import counted
from fpipe.cli.app import CommandError, verb
from fpipe.cli.options import Json, known
from fpipe.cli.output import progress
from fpipe.cli.timeline import note, report
from fpipe.interop.torch_traces.clocks import Clocks


def _numbers(text: str) -> tuple[int, ...]:
    numbers = text.split(",")
    if not all(each.strip().isdecimal() and len(each) <= 9 for each in numbers):
        raise typer.BadParameter(f"{text!r} is no list of numbers: give one as 0,2,4,6")
    return tuple(map(int, numbers))


@verb(
    "fpipe import-trace outputs/profile_traces --logdir runs/theirs",
    "fpipe import-trace traces --clocks messages",
    "fpipe import-trace traces --ranks 0,2,4,6 --schedule 1f1b",
    name="import-trace",
)
def import_trace(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder with a trace of each rank, .json or .json.gz.")
    ],
    logdir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the timelines there, for TensorBoard. By default beside the traces."),
    ] = None,
    ranks: Annotated[
        Any,
        typer.Option(
            metavar="RANK,...",
            parser=_numbers,
            help="The job's ranks of one pipeline, in order. By default all, or those of the mesh's dimension pp.",
        ),
    ] = None,
    stages: Annotated[
        Any,
        typer.Option(
            metavar="STAGE,...",
            parser=_numbers,
            help="Each rank's stage, for ScheduleGPipe, whose traces lack it. By default the rank's number.",
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="SCHEDULE", help="Predict this named one. By default the order in the traces.", autocompletion=known
        ),
    ] = None,
    clocks: Annotated[
        Clocks,
        typer.Option(
            help="Which ranks' clocks are one: those of a host; all, the same; all, by estimates from their messages; "
            "none."
        ),
    ] = "host",
    as_json: Json = False,
) -> None:
    """Read torch.profiler's traces of torch.distributed.pipelining or torchtitan.

    Each traced step becomes a timeline as a recorder writes it, with the
    prediction beside it. The last one is shown.
    """
    from fpipe.interop.torch_traces.reading import BadTrace
    from fpipe.interop.torch_traces.traces import from_traces

    place = folder if logdir is None else logdir
    with progress(f"read {folder}") as step:
        try:
            options: dict[str, Any] = {"ranks": ranks, "stages": stages, "schedule": schedule, "clocks": clocks}
            traces = from_traces(folder, **options, progress=lambda file: step(f"read {file}"))
        except BadTrace as error:
            raise CommandError(str(error)) from None
        step(f"write {place}")
        try:
            traces.write(place)
        except OSError as error:
            why = f"{place} can't be written ({error.strerror}): name another folder"
            raise typer.BadParameter(why, param_hint="--logdir") from None
    note(traces.notices)
    report(str(place), traces.steps[-1].step, as_json)
    if not as_json:
        where = shlex.quote(str(place))
        print(
            f"{counted(len(traces.steps), 'step')} in {where}: fpipe timeline {where}, or tensorboard --logdir {where}"
        )
