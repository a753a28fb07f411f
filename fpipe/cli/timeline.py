"""The verb for timelines that were written for TensorBoard, measured or predicted. No torch."""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from fpipe._format import counted, format_bytes, number, percent, scale_of
from fpipe.cli.app import CommandError, verb
from fpipe.cli.options import Json, ToFile, counts
from fpipe.cli.output import attributes, print_json, progress, replacing, show
from fpipe.errors import ScheduleError
from fpipe.timelines.comparison import Difference, path_segments, path_shares

if TYPE_CHECKING:
    from fpipe.tensorboard.files.captures import Capture
    from fpipe.tensorboard.files.reader import CaptureId, Listing

_SUFFIXES = (".html", ".json", ".svg", ".png", ".pdf", ".csv")
_MOST_CHARACTERS = 200  # shown of a name
_MOST_OF_A_NOTICE = 2000  # characters
_MOST_STEPS = 4  # suggested in place of a missing one
_MOST_REPLICAS = 8  # whose makespans are shown
Kind = Literal["measured", "predicted"]


class Run(NamedTuple):
    """A capture, and the name that the user gave."""

    name: str
    capture: "Capture"
    listing: "Listing"
    key: "CaptureId"

    @property
    def title(self) -> str:
        return f"{self.name} {self.capture.kind}, step {self.capture.step}, {plain(self.capture.schedule)}"


@verb(
    "fpipe simulate zb-v --ranks 4 --microbatches 8 --logdir runs/zb-v",
    "fpipe simulate 1f1b --ranks 4 --microbatches 8 --logdir runs/1f1b",
    "fpipe timeline runs/zb-v",
    "fpipe timeline runs/zb-v --out zb-v.json",
    "fpipe timeline --diff runs/1f1b runs/zb-v@0",
    "fpipe timeline --what-if runs/1f1b",
)
def timeline(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="A run's folder, as DIR, DIR@STEP or DIR/predicted; two of them are compared. The first replica of a "
            "pipeline is in DIR, the second in DIR/replica1.",
        ),
    ],
    diff: Annotated[
        bool, typer.Option("--diff", help="Compare two runs, or one run's measurement with its prediction.")
    ] = False,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Say what would help most, and how much time it would win.")
    ] = False,
    step: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="The captured step. By default the last one.")
    ] = None,
    kind: Annotated[
        Kind | None, typer.Option("--kind", help="Which timeline. By default what was measured, if anything was.")
    ] = None,
    out: Annotated[
        Path | None,
        ToFile(
            help="Write it: .html, the Pipeline tab with it and its prediction in one file, to be opened without a "
            "server; .json for Perfetto and Chrome's trace viewer; .svg, .png or .pdf (need matplotlib); .csv, "
            "a line for each effect."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a recorded step took, and why; or compare two.

    Folders are those that were written for TensorBoard: by a recorder while a
    model trained, or by simulate --logdir.
    """
    _check_arguments(runs, diff, what_if, out)
    if what_if:
        _what_if(_opened(runs[0], kind, step), as_json)
    elif len(runs) == 2:
        _compare(_opened(runs[0], kind, step), _opened(runs[1], kind, step), as_json)
    elif diff:
        _compare(*_measured_and_predicted(runs[0], step), as_json)
    else:
        _report(_opened(runs[0], kind, step), out, as_json)


def _check_arguments(runs: list[str], diff: bool, what_if: bool, out: Path | None) -> None:
    if what_if and (len(runs) > 1 or diff or out):
        raise typer.BadParameter("it is about one run: name one, without --diff and --out", param_hint="--what-if")
    if len(runs) > 2:
        raise typer.BadParameter(f"two runs can be compared, not {len(runs)}", param_hint="RUN")
    if out and out.suffix.lower() not in _SUFFIXES:
        known = f"{', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}"
        raise typer.BadParameter(f"{out} ends in no known format: take {known}", param_hint="--out")
    if out and (diff or len(runs) == 2):
        raise typer.BadParameter("one timeline is written: name one run, without --diff", param_hint="--out")


def report(name: str, step: int | None = None, as_json: bool = False) -> None:
    """Show the captured step of a folder: as tables, or JSON."""
    _report(_opened(name, None, step), None, as_json)


def _report(run: Run, out: Path | None, as_json: bool) -> None:
    """Write one run's timeline to a file, or show it beside its prediction, as tables or JSON."""
    note([*run.listing.notices, *run.capture.notices])
    try:
        predicted = _prediction(run)
    except CommandError as error:  # the measurement is still worth showing
        predicted = None
        note([str(error)])
    if out:
        _write(out, run, predicted)
    if as_json:
        print_json(_as_json(run, predicted))
    elif not out:
        _show(run, predicted)


def _show(run: Run, predicted: Run | None) -> None:
    from rich.text import Text

    from fpipe.cli.tables import account, headline, path

    line = run.capture.timeline
    scale = scale_of(line.makespan, run.capture.unit)
    peaks = [run.capture.peak_memory(rank) for rank in range(line.plan.ranks)]
    table, links = account(line, scale, peaks), path(path_segments(line), path_shares(line), line, scale)
    show(headline(run.title, line, scale), table, *map(Text, _remarks(run, predicted)), links)


def _remarks(run: Run, predicted: Run | None) -> Iterator[str]:
    """Yield the allocators' peak, the uncertainty of the clocks, and the prediction."""
    line, capture = run.capture.timeline, run.capture
    if peaks := _allocator_peaks(capture):
        most = max(peaks, key=lambda rank: peaks[rank][0])
        yield f"peak memory: {format_bytes(peaks[most][0])} on rank {most} ({plain(peaks[most][1])})"
    if len(capture.headers) > 1 and (apart := uncertainty(capture)):
        yield f"clocks agree within {number(apart * 1e6)} µs"
    if makespans := capture.header.makespans:
        scale = scale_of(line.makespan, capture.unit)
        listed = ", ".join(map(scale.full, makespans[:_MOST_REPLICAS])) + ", …" * (len(makespans) > _MOST_REPLICAS)
        slowest = makespans.index(max(makespans))
        yield f"makespans of the replicas: {listed} (this is replica {capture.header.replica}, the slowest {slowest})"
    if predicted is None:
        return
    if reason := _why_incomparable(run, predicted):
        yield f"there is a prediction too, but {reason}"
        return
    what, says = ("makespan", "says where it lies") if line.steps == 1 else ("period", "compares the makespans")
    measured, expected = line.period, predicted.capture.timeline.period  # of one step, the makespan
    ratio = expected / measured - 1 if measured else 0.0
    how = f"{percent(abs(ratio))} {'more' if ratio > 0 else 'less'} than measured"
    shown = scale_of(line.makespan, capture.unit).full(expected)
    yield f"predicted {what} {shown}, {how}: fpipe timeline --diff {shlex.quote(run.name)} {says}"


def _why_incomparable(run: Run, predicted: Run) -> str:
    """Say why the times of a run and its prediction can't be compared, if they can't."""
    if predicted.capture.unit != run.capture.unit:
        return "its times have another unit"
    steps = predicted.capture.timeline.steps
    return "" if steps == run.capture.timeline.steps else f"it is of {counted(steps, 'step')}"


def plain(text: str, most: int = _MOST_CHARACTERS) -> str:
    """Return a foreign name without control characters, cut to a bounded length."""
    shown = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text[:most])
    return shown + "…" * (len(text) > most)


def note(notices: Iterable[str]) -> None:
    """Show notices on stderr."""
    for notice in notices:
        typer.echo(f"{typer.style('note:', fg='yellow', bold=True)} {plain(notice, _MOST_OF_A_NOTICE)}", err=True)


def _opened(name: str, kind: Kind | None, step: int | None) -> Run:
    """Open the capture that DIR, DIR@STEP or DIR/kind names."""
    at_step = None if Path(name).is_dir() else re.fullmatch(r"(.+)@(\d{1,18})", name, re.DOTALL)
    folder, step = (at_step[1], int(at_step[2])) if at_step else (name, step)
    listing = _listed(folder)
    kinds = {key.kind for key in listing.captures}
    if kind is None:
        kind = "measured" if "measured" in kinds else "predicted"
    if kind not in kinds:
        raise typer.BadParameter(f"{plain(folder)} has nothing {kind}, only {kinds.pop()}", param_hint="--kind")
    steps = listing.steps(_experiments(listing)[0], kind)
    if step is not None and step not in steps:
        near = sorted(sorted(steps, key=lambda each: abs(each - step))[:_MOST_STEPS])
        known = ", ".join(map(str, near))
        which = "it has" if len(near) == len(steps) else f"of its {len(steps)} the nearest are"
        raise typer.BadParameter(
            f"{plain(folder)} has no step {step} that was {kind}: {which} {known}", param_hint="--step"
        )
    return _read(folder, listing, kind, steps[-1] if step is None else step)


def _listed(folder: str) -> "Listing":
    """List the captures of the one run in a folder."""
    from fpipe.tensorboard.files.reader import find

    try:
        listing = find(folder)
    except NotADirectoryError:
        raise typer.BadParameter(f"there is no folder {plain(folder)}", param_hint="RUN") from None
    if not listing.captures:
        note(listing.notices)
        raise CommandError(
            f"no step was captured below {plain(folder)}: record some with fpipe.tensorboard.Recorder, or write a "
            "simulation with fpipe simulate --logdir"
        )
    if len(experiments := _experiments(listing)) > 1:
        known = ", ".join(plain(name) or "." for name in experiments[:20])
        more = ", …" if len(experiments) > 20 else ""
        raise typer.BadParameter(
            f"{plain(folder)} holds several runs, {known}{more}: name one of them", param_hint="RUN"
        )
    return listing


def _experiments(listing: "Listing") -> list[str]:
    """Return the runs of a folder; the later replicas of a pipeline, in folders of their own, belong to the first."""
    names = listing.experiments
    return [
        name
        for name in names
        if not (replica := re.fullmatch(r"(?:(.*)/)?replica\d+", name, re.DOTALL)) or (replica[1] or "") not in names
    ]


def _read(name: str, listing: "Listing", kind: Kind, step: int) -> Run:
    from fpipe.tensorboard.files.captures import BadCapture
    from fpipe.tensorboard.files.reader import CaptureId

    key = CaptureId(_experiments(listing)[0], kind, step)
    try:
        capture = listing.read(key)
    except BadCapture as error:
        raise CommandError(plain(str(error), _MOST_OF_A_NOTICE)) from None
    return Run(plain(name), capture, listing, key)


def _measured_and_predicted(name: str, step: int | None) -> tuple[Run, Run]:
    """Open the measurement and the prediction of one folder."""
    measured = _opened(name, "measured", step)
    predicted = _prediction(measured)
    if predicted is None:
        raise typer.BadParameter(f"{measured.name} has no prediction: name a second run", param_hint="--diff")
    return measured, predicted


def _prediction(run: Run) -> Run | None:
    """Open the prediction for a measurement: of its step, else the last step before it, else the first."""
    steps = run.listing.steps(run.key.experiment, "predicted")
    if run.key.kind == "predicted" or not steps:
        return None
    before = [step for step in steps if step <= run.key.step]
    return _read(run.name, run.listing, "predicted", before[-1] if before else steps[0])


def _as_json(run: Run, predicted: Run | None) -> dict[str, object]:
    """Return a run as JSON: times in its unit, memory in bytes."""
    capture, line = run.capture, run.capture.timeline
    ranks, peaks = range(line.plan.ranks), _allocator_peaks(capture)
    other = None if predicted is None or _why_incomparable(run, predicted) else predicted.capture.timeline
    period = other.period if other else None
    return {
        **_which(run),
        **counts(line.plan),
        **attributes(line, "makespan", "cost", "bubble_rate", "busy", "idle", "causes", "peak_in_flight"),
        **({} if line.steps == 1 else {**attributes(line, "steps", "period"), "predicted_period": period}),
        "peak_memory": [capture.peak_memory(rank) for rank in ranks],
        "allocator_peak": [peaks[rank][0] if rank in peaks else None for rank in ranks],
        "clock_uncertainty": uncertainty(capture),
        "critical_path": [segment._asdict() for segment in path_segments(line)],
        "shares": path_shares(line),
        "replicas": line.plan.replicas,
        **attributes(capture.header, "replica", "makespans"),
        "predicted_makespan": other.makespan if other else None,
        "notices": [*run.listing.notices, *capture.notices],
    }


def _allocator_peaks(capture: "Capture") -> "dict[int, tuple[float, str]]":
    """Return rank -> peak bytes, and whether an allocator or the process counted them."""
    return {rank: header.peak for rank, header in capture.headers.items() if header.peak}


def _which(run: Run) -> dict[str, object]:
    return {"run": run.name, **attributes(run.capture, "kind", "step", "schedule", "unit")}


def uncertainty(capture: "Capture") -> float | None:
    """Return the most by which a rank's clock may differ from rank 0's; None if they were not compared."""
    clocks = [header.clock for header in capture.headers.values()]
    known = [clock.uncertainty for clock in clocks if clock]
    return max(known) if len(known) == len(clocks) else None


def _compare(a: Run, b: Run, as_json: bool) -> None:
    difference = Difference(a.capture.timeline, b.capture.timeline)
    notices = [notice for run in (a, b) for notice in (*run.listing.notices, *run.capture.notices)]
    if a.capture.unit != b.capture.unit:
        seconds, other = (a, b) if a.capture.unit == "s" else (b, a)
        notices.append(f"times of {seconds.title} are in seconds, those of {other.title} in units of the costs")
    notices = [*dict.fromkeys(notices), *difference.notices]
    if as_json:
        print_json({"runs": [_which(a), _which(b)], **difference.as_json(), "notices": notices})
        return
    from fpipe.cli import tables

    note(notices)
    same = a.capture.unit == b.capture.unit
    scale = scale_of(difference.makespan[0], a.capture.unit if same else "")
    show(tables.difference(difference, (a.title, b.title), scale))


def _what_if(run: Run, as_json: bool) -> None:
    from fpipe.timelines.what_if import what_if

    line, unit = run.capture.timeline, run.capture.unit
    if run.capture.unrelated:
        raise CommandError(f"what would help is not known: {run.capture.unrelated}")
    notices = [*run.listing.notices, *run.capture.notices]
    try:
        result = what_if(line, schedule=run.capture.schedule or None)
    except ScheduleError as error:
        raise CommandError(str(error)) from None
    if as_json:
        answer = result.as_json()
        headline = result.headline(scale_of(line.makespan, unit))
        print_json({**_which(run), "headline": headline, **answer, "notices": [*notices, *answer["notices"]]})
        return
    from fpipe.cli import tables

    note([*notices, *result.notices])
    scale = scale_of(line.makespan, unit)
    show(tables.headline(run.title, line, scale), tables.what_if(result, scale))


def _write(out: Path, run: Run, predicted: Run | None) -> None:
    from fpipe.tensorboard.server.exports import LINES_PER_CALL, CantExport, save

    if out.suffix.lower() == ".html":
        _write_page(out, [run] if predicted is None else [run, predicted])
        return
    name = f"write {out}"
    try:
        with replacing(out) as file, progress(name, len(run.capture.timeline.spans) // LINES_PER_CALL) as advance:
            save(run.capture, file, run.title, lambda: advance(name))
    except CantExport as error:
        raise typer.BadParameter(str(error), param_hint="--out") from None


def _write_page(out: Path, runs: Sequence[Run]) -> None:
    from fpipe.tensorboard.server.standalone import Shown, standalone

    shown = [Shown(f"{_experiment(run)}/{run.key.kind}", run.capture) for run in runs]
    with progress(f"write {out}"), replacing(out) as file:
        text = standalone(shown, plain(runs[0].title))
        file.write_text(text, encoding="utf-8")
    typer.echo(f"{out}: {format_bytes(len(text.encode()))}, to be opened in a browser", err=True)


def _experiment(run: Run) -> str:
    """Return the name of an experiment: the path below the folder that the user named, else the folder's own name."""
    return run.key.experiment or run.listing.folder.resolve().name or "run"
