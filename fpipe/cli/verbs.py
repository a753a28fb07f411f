"""The verbs of the command line, one function each. No torch."""

import csv
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import floor
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fpipe._format import counted, extent, number, scale_of, sized
from fpipe.cli.again import again
from fpipe.cli.app import on_command_line, verb
from fpipe.cli.layers import LayerOptions, stages_as_json
from fpipe.cli.options import (
    SCHEDULE_HELP,
    Chunks,
    CostOptions,
    Effort,
    InPlan,
    Json,
    Limit,
    LimitBytes,
    ModelOptions,
    Replicas,
    Resident,
    Size,
    Steps,
    ToFile,
    counts,
    known,
)
from fpipe.cli.output import attributes, console, print_json, progress, replacing, show
from fpipe.cli.resolve import Memory, Played, ScheduleOptions, enforce_limit, played, read, resolve
from fpipe.cli.strategies import StrategyOptions, ranking, row
from fpipe.costs import ROUNDING
from fpipe.effects import Effect, parts
from fpipe.errors import ScheduleError
from fpipe.plan import Placement, Plan, Schedule
from fpipe.programs.footprint import enforce, footprint
from fpipe.programs.lowering import lower
from fpipe.programs.program import Programs
from fpipe.programs.residuals import moves
from fpipe.programs.verifier import check
from fpipe.schedules.annealing import check_effort
from fpipe.schedules.bounds import lower_bound
from fpipe.schedules.catalogue import CATALOGUE, CatalogueEntry, shares
from fpipe.schedules.cuts import splits_vocabulary, stage_shares
from fpipe.schedules.search import Order, pareto
from fpipe.schedules.search import search as find
from fpipe.schedules.space import CHUNKS
from fpipe.tables import TABLE
from fpipe.timelines.labels import drawn_rows
from fpipe.timelines.text import figures
from fpipe.timelines.timeline import Timeline

_CHUNKS = ",".join(map(str, CHUNKS))
_MAX_COLUMNS = 100_000  # of a drawing with --scale


def _simulated(options: ScheduleOptions, steps: int | None) -> tuple[str, Played]:
    with progress(f"lower {options.name}", 3) as step:
        job = options.resolve(steps or 1)
        simulated = played(job, step, options.limit_bytes, steps or 1)
    enforce_limit(simulated.timeline.peak_in_flight, options.limit)
    return job.name, simulated


def result(
    name: str, simulated: Played, resident: int | Size | None = None, stages: int | None = None
) -> dict[str, object]:
    """Return the results of a simulation for `--json`. Other programs read this: keep the keys and their order.

    Args:
        stages: of the cut that one number of the costs is for; by default one on each rank. Where the vocabulary is
            split, each stage has a share of its own.
    """
    timeline, accounts = simulated
    plan = timeline.plan
    figures = attributes(timeline, "makespan", "cost", "bubble_rate", "idle", "peak_in_flight")
    room = f"{resident:.0f} B" if isinstance(resident, Size) else resident
    about = {"replicas": plan.replicas, "resident": room}
    memory = [{**account._asdict(), "total": account.total} for account in accounts]
    share = stage_shares(plan) if splits_vocabulary(plan) else (stages or plan.ranks) / plan.stages
    return {"schedule": name, **counts(plan), **figures, **about, "memory": memory, "stage_share": share}


@verb("fpipe schedules")
def schedules(as_json: Json = False) -> None:
    """List the named schedules."""
    if as_json:
        of_plans = ("placement", "takes_copies", "chunks", "any_chunks", "slices")
        keys = (*of_plans, "peak", "peak_holds", "cost", "holds", "idea", "source")
        print_json({name: attributes(entry, *keys) for name, entry in CATALOGUE.items()})
        return
    from fpipe.cli.tables import table

    columns = ["name", "placement", "peak", "what it does"]
    listing = table(columns, words=columns, folded=columns[-1:])
    for name, entry in CATALOGUE.items():
        listing.add_row(name, entry.placement, entry.peak, f"{entry.idea} [dim]({entry.source})[/dim]")
    units = "Peak: in flight at equal costs, in microbatches of a rank's share of the model; stages' copies change it."
    show(listing, "p ranks, v stages on each, m microbatches of s slices.", units)


@verb("fpipe verify zb-h1 --ranks 4 --microbatches 8 --transport rendezvous")
def verify(
    options: ScheduleOptions,
    transport: Annotated[
        Literal["async", "paired", "rendezvous"], InPlan(help="How messages travel: see fpipe.verify.")
    ] = "async",
    unordered: Annotated[bool, InPlan("--unordered", help="Admit any order of microbatches on a stage.")] = False,
    as_json: Json = False,
) -> None:
    """Check a schedule: complete, in order, free of deadlock."""
    with progress(f"lower {options.name}", 2) as step:
        job = options.resolve()
        programs = lower(job.schedule, job.plan, transport=transport, resident=job.resident, offload=job.offload)
        step(f"verify {options.name}")
        report = check(
            programs, transport=transport, ordered=not unordered, costs=job.costs if sized(job.costs) else None
        )
    enforce_limit(report.peak_in_flight, options.limit)
    accounts = footprint(programs, job.costs)
    if options.limit_bytes is not None:
        enforce(accounts, options.limit_bytes, job.costs)
    if as_json:
        edges = [
            {"from": source, "to": target, "messages": count, "bytes": (report.bytes or {}).get((source, target))}
            for (source, target), count in report.messages.items()
        ]
        checks = {"transport": transport, "ordered": not unordered, "effects": report.effects, "edges": edges}
        peaks = attributes(report, "peak_in_flight", "peak_bytes", "peak_resident")
        peaks["memory"] = [{**account._asdict(), "total": account.total} for account in accounts]
        print_json({"schedule": job.name, **counts(job.plan), **checks, **peaks})
        return
    from fpipe.cli.tables import memory_of, share_of, verdict

    notes = share_of(job.plan) if sized(job.costs) and options.has_shares(job.plan) else []
    show(verdict(job.name, report), *notes, *memory_of(accounts))


@verb(
    "fpipe simulate zb-h1 --ranks 8 --microbatches 24 --communication 0.1",
    "fpipe simulate zb-v --ranks 4 --microbatches 8 --logdir runs/zb-v",
    "fpipe simulate zb-h2 --ranks 4 --microbatches 8 --steps 20 --update 1.5",
)
def simulate(
    options: ScheduleOptions,
    steps: Steps = None,
    logdir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the timeline there, for TensorBoard's Pipeline tab.")
    ] = None,
    seconds: Annotated[
        bool, typer.Option("--seconds", help="Times are in seconds, so that --logdir's stands beside a measurement.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Simulate a schedule: time, idle time, memory.

    One number for all stages is the cost of a rank's share of the model: with v
    stages on a rank, each takes 1/v of it, as in compare.

    With --steps, all figures are of the steps together, but for the period,
    which is the time of one, and the lower bound.
    """
    name, simulated = _simulated(options, steps)
    timeline = simulated.timeline
    unit = "s" if seconds else ""
    if logdir:
        _write(logdir, name, timeline, unit)
    stays = not moves(timeline.spans.effects)  # a bound in bytes is one of residuals that stay
    limits = {"memory_limit": options.limit, "memory_limit_bytes": options.limit_bytes if stays else None}
    if as_json:
        bound = lower_bound(timeline.plan, timeline.costs, **limits)
        loop = {} if steps is None else attributes(timeline, "steps", "period")
        print_json(result(name, simulated, options.resident) | {"lower_bound": bound} | loop)
        return
    from fpipe.cli.tables import above, account, headline, memory_of, share_of

    scale = scale_of(timeline.makespan, unit)
    notes = share_of(timeline.plan) if options.has_shares(timeline.plan) else []
    if any(limits.values()) and steps is None:
        notes += above(timeline.cost, lower_bound(timeline.plan, timeline.costs, **limits), scale)
    show(headline(name, timeline, scale), *notes, account(timeline, scale), *memory_of(simulated.footprint))
    if logdir:
        print(f"See it in the Pipeline tab of: tensorboard --logdir {shlex.quote(str(logdir))}")


def _write(logdir: Path, name: str, timeline: Timeline, unit: str) -> None:
    from fpipe.tensorboard.files.writer import write

    with progress(f"write {logdir}"):
        try:
            write(logdir, timeline, schedule=name, unit=unit)
        except OSError as error:
            why = error.strerror or error
            raise typer.BadParameter(f"{logdir} can't be written: {why}", param_hint="--logdir") from None


@verb(
    "fpipe draw 1f1b --ranks 4 --microbatches 8 --backward 1.5",
    "fpipe draw zb-v --ranks 4 --microbatches 8 --out zb-v.svg",
)
def draw(
    options: ScheduleOptions,
    steps: Steps = None,
    out: Annotated[Path | None, ToFile(help="Draw into this file: .svg, .png or .pdf (needs matplotlib).")] = None,
    scale: Annotated[
        float | None, typer.Option(min=1e-9, metavar="N", help="Columns for a unit of time; long lanes go on below.")
    ] = None,
    width: Annotated[
        int | None, typer.Option(min=40, max=1000, metavar="N", help="Columns to draw in. By default the terminal's.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw a schedule to scale, here or into a file.

    The lanes of a file are compute, idle ranks by cause, and memory. Costs are
    as in simulate.
    """
    if out and out.suffix.lower() not in (".svg", ".png", ".pdf"):
        raise typer.BadParameter(f"{out} ends in no known format: take .svg, .png or .pdf", param_hint="--out")
    name, simulated = _simulated(options, steps)
    timeline = simulated.timeline
    if scale and scale * timeline.makespan > _MAX_COLUMNS:
        largest = number(floor(1000 * _MAX_COLUMNS / timeline.makespan) / 1000)
        raise typer.BadParameter(
            f"{number(scale)} columns for a unit of time are {number(scale * timeline.makespan)} in all, more than "
            f"{_MAX_COLUMNS}: take {largest} or less, or a file with --out",
            param_hint="--scale",
        )
    if out:
        _draw_into(out, name, timeline)
    if as_json:
        print_json(result(name, simulated, options.resident) | {"spans": list(_computes(timeline))})
    elif not out:
        from fpipe.cli.tables import gantt, headline, share_of

        screen = console(width)
        notes = share_of(timeline.plan) if options.has_shares(timeline.plan) else []
        screen.print(headline(name, timeline), *notes, gantt(timeline, screen, scale), sep="\n")


def _draw_into(out: Path, name: str, timeline: Timeline) -> None:
    try:
        from fpipe.timelines.figure import save
    except ImportError:
        raise typer.BadParameter("a file needs matplotlib: pip install matplotlib", param_hint="--out") from None
    with progress(f"draw {out}"), replacing(out) as file:
        save(timeline, file, f"{name}: {extent(timeline.plan)}\n{figures(timeline)}")


def _computes(timeline: Timeline) -> Iterator[dict[str, object]]:
    """Yield the compute spans, rank by rank."""
    places = ["stage", "microbatch", *["slice"] * (timeline.plan.slices > 1)]
    for rank in range(timeline.plan.ranks):
        for span in timeline.compute(rank):
            runs = [
                {"kind": type(part).__name__, **attributes(part, *(name for name in places if hasattr(part, name)))}
                for part in parts(span.effect)
            ]
            yield {"rank": rank, "start": span.start, "end": span.end, "effects": runs}


@verb(
    "fpipe compare --ranks 4 --microbatches 16 --communication 0.1",
    "fpipe compare 1f1b zb-h1 zb-v --ranks 4 --microbatches 16",
)
def compare(
    model: ModelOptions,
    costs: CostOptions,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCHEDULE]...", help=f"By default every named one. {SCHEDULE_HELP}", autocompletion=known
        ),
    ] = None,
    loops: Annotated[Any, Chunks(help="Chunks to try with schedules that loop.")] = "2,4",
    limit: Limit = None,
    limit_bytes: LimitBytes = None,
    resident: Resident = None,
    effort: Effort = 1.0,
    as_json: Json = False,
) -> None:
    """Compare schedules on one model.

    Each has its own placement. Costs are those of a stage when a rank has
    --chunks of them; with v stages on a rank, each takes chunks/v of that.
    Peaks and the limit count microbatches of a rank's share of the model.
    """
    check_effort(effort)
    entrants: list[tuple[str, Played, float]] = []
    refused: dict[str, str] = {}
    candidates = [(name, chunks) for name in names or CATALOGUE for chunks in _tried(name, loops)]
    with progress("compare", len(candidates)) as step:
        for name, chunks in candidates:
            step(name)
            try:
                memory = Memory(limit, limit_bytes, resident)
                job = resolve(name, model.of_cut(chunks), partial(costs.recut, model), memory, effort)
                simulated = played(job, limit_bytes=limit_bytes)
                peaks = shares(simulated.timeline)
                enforce_limit(peaks, limit)
                entrants.append((job.name, simulated, max(peaks)))
            except ScheduleError as error:
                refused[name if chunks is None else f"{name} ({counted(chunks, 'chunk')})"] = str(error)
    entrants.sort(key=lambda entrant: (entrant[1].timeline.cost, entrant[1].timeline.makespan))
    if as_json:
        rows = [
            result(name, each, resident, model.plan.stages) | {"peak": peak, "causes": each.timeline.causes}
            for name, each, peak in entrants
        ]
        print_json({"schedules": rows, "refused": refused})
    else:
        from fpipe.cli.tables import comparison

        show(comparison([(name, each.timeline, peak) for name, each, peak in entrants], refused))
    if refused and (names or not entrants):
        raise typer.Exit(1)


def _tried(name: str, loops: tuple[int, ...]) -> tuple[int | None, ...]:
    """Return the numbers of chunks to try with a schedule; None is its default."""
    entry = CATALOGUE.get(name)
    if entry is None or not entry.any_chunks:
        return (None,)
    if entry.limited:  # such a schedule is searched, which takes long with many chunks
        return (1, *(chunks for chunks in loops if chunks == 2))
    return loops if entry.chunks > 1 else (None,)


@verb(
    "fpipe search --ranks 4 --microbatches 8 --backward-weight 0.5 --memory-limit 4",
    "fpipe search --ranks 2 --microbatches 4 --replicas 2 --parameters 4GiB --memory-limit-bytes 20GiB",
    "fpipe search --layouts --ranks 2 --microbatches 8 --forward 1,1,1,1,1,3",
    "fpipe search --world 8 --model gpt2 --machine a100 --schedules 1f1b,zb-v --loops 1 --top 3",
)
def search(
    size: ModelOptions,
    costs: CostOptions,
    of_world: StrategyOptions,
    of_layers: LayerOptions,
    context: typer.Context,
    limit: Limit = None,
    limit_bytes: LimitBytes = None,
    loops: Annotated[Any, Chunks(help="Chunks to try with schedules that take any.")] = _CHUNKS,
    order: Annotated[
        Order,
        InPlan(help="Of microbatches with --lengths: as drawn; the longest in the middle; or searched from these."),
    ] = "drawn",
    effort: Effort = 1.0,
    frontier: Annotated[bool, typer.Option("--pareto", help="Show time against peak memory, not the fastest.")] = False,
    out: Annotated[
        Path | None,
        ToFile(help="Write what was found as torch's CSV, which every verb reads; --no-copies goes with it."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Search for the fastest schedule, and a lower bound.

    Costs are those of a stage when a rank has --chunks of them; with v stages
    on a rank, each takes chunks/v of that. Peaks and the limit count
    microbatches of a rank's share of the model. With replicas, it also finds
    whether to shard the parameters, and how many stages are whole at a time.

    With --layouts, costs are those of layers, one a layer: search also where to
    cut them into stages, which stage has copies, and what to move out of memory.
    With --no-copies, and with --out, no stage has copies, as DualPipe's have.

    With --world in place of --ranks, search parallel strategies of a transformer over
    so many ranks: pipelines, replicas, tensor, context and expert parallel.
    """
    if of_world.world is not None:
        others = {"--memory-limit": limit, "--pareto": frontier or None, "--out": out}
        others |= {"--effort": None if effort == 1 else effort}
        of_world.refuse(size, costs, **others, **of_layers.given)
        strategies = of_world.strategies(loops, limit_bytes)
        if as_json:
            print_json([row(strategy) for strategy in strategies])
        else:
            show(*ranking(strategies))
        return
    if frontier and order != "drawn":
        raise typer.BadParameter("the front is that of microbatches as drawn", param_hint="--order")
    if frontier and out:
        raise typer.BadParameter("one schedule is written: take --memory-limit, not --pareto", param_hint="--out")
    if frontier and of_layers.layouts:
        raise typer.BadParameter("the front is that of equal stages: leave one of the two out", param_hint="--pareto")
    parameters = on_command_line(context)
    if out and of_layers.copies and "copies" in parameters:
        raise typer.BadParameter("the file has no copies of stages: leave --copies out", param_hint="--out")
    if out:
        of_layers = replace(of_layers, copies=False)
    plan, stage_costs = of_layers.model(size, costs, parameters)
    with progress("search") as step:
        options: dict[str, Any] = {"chunks": loops, "effort": effort, "progress": step}
        options |= {"memory_limit_bytes": limit_bytes} | of_layers.searched
        results = (
            pareto(plan, stage_costs, **options)
            if frontier
            else [find(plan, stage_costs, limit, order=order, **options)]
        )
    if frontier and limit is not None:
        enforce_limit([min(each.peak for each in results)], limit)
        results = [each for each in results if each.peak <= limit * (1 + ROUNDING)]
    if as_json:
        rows = [
            result(each.name, Played(each.timeline, each.footprint), each.resident, of_layers.stages(each, plan))
            | {"lower_bound": each.lower_bound}
            | (stages_as_json(each) if of_layers.layouts else {})
            | ({"order": each.order} if each.costs.scale else {})
            for each in results
        ]
        print_json(rows if frontier else rows[0])
    else:
        from fpipe.cli.tables import discovery, stages_of

        within = "in as much memory " if frontier else ""
        show(discovery(results, within), *([stages_of(results[0])] if of_layers.layouts else []))
        if of_layers.layouts:
            print(again(results[0], Memory(limit, limit_bytes)))
    if out and results[0].offload:
        raise typer.BadParameter("the file has no effects that move residuals: allow more memory", param_hint="--out")
    if out:
        from fpipe.interop.torch_csv import to_csv

        with replacing(out) as file:
            file.write_text(to_csv(results[0].schedule, results[0].plan, resident=results[0].resident))


@verb("fpipe export zb-v --ranks 4 --microbatches 8 --format torch-csv --out zb-v.csv")
def export(
    options: ScheduleOptions,
    form: Annotated[
        Literal["torch-csv", "torch-csv-compute"],
        typer.Option("--format", help="Actions of torch.distributed.pipelining: all, or without communication."),
    ] = "torch-csv",
    out: Annotated[Path | None, ToFile(help="Write into this file.")] = None,
    as_json: Json = False,
) -> None:
    """Write a schedule for torch.distributed.pipelining."""
    from fpipe.interop.torch_csv import to_csv

    job = options.resolve()
    for option, choice in {"--offload-limit-bytes": job.offload, "--update": options.update}.items():
        if choice is not None:
            raise typer.BadParameter("the file has no effects for it: leave it out", param_hint=option)
    if options.limit is not None:
        enforce_limit(check(lower(job.schedule, job.plan), ordered=False).peak_in_flight, options.limit)
    text = to_csv(job.schedule, job.plan, communication=form == "torch-csv", resident=job.resident)
    if out:
        with replacing(out) as file:
            file.write_text(text)
    if as_json:
        rows = [[cell for cell in row if cell] for row in csv.reader(text.splitlines())]
        print_json({"schedule": job.name, **counts(job.plan), "format": form, "rows": rows})
    elif not out:
        print(text, end="")


@verb(
    "fpipe export zb-v --ranks 4 --microbatches 8 --out zb-v.csv",
    "fpipe import zb-v.csv",
    "fpipe draw zb-v.csv",
    name="import",
)
def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="CSV of torch.distributed.pipelining; - is stdin.")],
    replicas: Replicas = 1,
    as_json: Json = False,
) -> None:
    """Read a schedule of torch.distributed.pipelining, and describe it."""
    from fpipe.interop.torch_csv import from_csv

    schedule, plan = from_csv(read(file), replicas=replicas)
    programs = lower(schedule, plan)
    report = check(programs, ordered=False)
    ordered = _is_ordered(programs)
    same = _same(schedule, plan)
    if as_json:
        properties = {
            "placement": plan.placement.holders,
            "ordered": ordered,
            "same_as": same,
            "effects": report.effects,
        }
        print_json({"schedule": file, **counts(plan), **properties, "peak_in_flight": report.peak_in_flight})
        return
    from fpipe.cli.tables import verdict

    order = "" if ordered else "; microbatches run out of order, so verify and train with it unordered"
    source = f"the compute order of {' and '.join(same)}" if same else "no named schedule's compute order"
    show(verdict(file, report, f"{_placement(plan)}; {source}{order}"))


def _placement(plan: Plan) -> str:
    """Return the expression of a loop, V or wave placement, else all its holders."""
    chunks = counts(plan)["chunks"]
    loop, v = f"Placement.loop({plan.ranks}, chunks={chunks})", f"Placement.v({plan.ranks})"
    named = {loop: Placement.loop(plan.ranks, chunks), v: Placement.v(plan.ranks)}
    if chunks > 1:
        named[f"Placement.wave({plan.ranks}, waves={chunks // 2})"] = Placement.wave(plan.ranks, chunks // 2)
    return next((name for name, placement in named.items() if placement == plan.placement), str(plan.placement))


def _is_ordered(programs: Programs) -> bool:
    try:
        check(programs)
    except ScheduleError:
        return False
    return True


def _same(schedule: Schedule, plan: Plan) -> list[str]:
    """Return the named schedules with the same placement and compute order, at unit costs."""
    order = _order(schedule, plan)
    return [name for name, entry in CATALOGUE.items() if _order_of(entry, plan) == order]


def _order_of(entry: CatalogueEntry, plan: Plan) -> list[list[Effect]] | None:
    try:
        named = entry.plan(**counts(plan))
        return _order(entry.schedule(named), named) if named == plan else None
    except ScheduleError:
        return None


def _order(schedule: Schedule, plan: Plan) -> list[list[Effect]]:
    kinds = drawn_rows(TABLE)
    return [[effect for effect in schedule(rank, plan) if type(effect) in kinds] for rank in range(plan.ranks)]
