"""Parallel strategies over a number of ranks: options, table and JSON of `fpipe search --world`. No torch."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fpipe._format import format_bytes, number, percent
from fpipe.cli.options import CostOptions, ModelOptions, at_least_one, byte_count, link
from fpipe.cli.output import progress
from fpipe.schedules.candidates import Strategy
from fpipe.schedules.machines import MACHINES, Machine
from fpipe.schedules.shapes import SHAPES, ModelShape
from fpipe.schedules.strategies import REMAT, ROWS, SCHEDULES, strategies

if TYPE_CHECKING:
    from rich.console import RenderableType

SHAPE = (
    *("layers", "hidden", "heads", "kv_heads", "feed_forward", "vocabulary", "sequence", "gated", "tied"),
    *("experts", "experts_per_token", "capacity_factor"),
)

_ROWS, _SCHEDULES, _REMAT = ",".join(map(str, ROWS)), ",".join(SCHEDULES), ",".join(REMAT)
A_RANK = 8  # sequences of a step for each rank, by default: 4 million tokens on 64 ranks at 8192 a sequence

InWorld = partial(typer.Option, rich_help_panel="Parallel strategies over --world ranks")
InShape = partial(typer.Option, min=1, metavar="N", rich_help_panel="Model, with --world")
InMachine = partial(typer.Option, rich_help_panel="Machine, with --world")
Tried = partial(InWorld, metavar="N,N,...", parser=at_least_one)
BetweenRanks = partial(InMachine, metavar="LATENCY:BANDWIDTH", parser=link)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


@dataclass(frozen=True)
class StrategyOptions:
    """A model, a machine, and the strategies to try."""

    world: Annotated[
        int | None,
        InWorld(min=1, metavar="N", help="How many ranks: pipelines, replicas, tensor, context and expert parallel."),
    ] = None
    batch: Annotated[
        int | None, InWorld(min=1, metavar="N", help=f"Sequences of a step. By default {A_RANK} a rank.")
    ] = None
    batch_tokens: Annotated[
        int | None, InWorld(min=1, metavar="N", help="The same in tokens, in place of --batch.")
    ] = None
    rows: Annotated[Any, Tried(help="Sequences of a microbatch to try.")] = _ROWS
    pp: Annotated[Any, Tried(help="Ranks of a pipeline to try. By default every number.")] = None
    dp: Annotated[Any, Tried(help="Replicas to try.")] = None
    tp: Annotated[Any, Tried(help="Tensor-parallel ranks to try.")] = None
    cp: Annotated[Any, Tried(help="Context-parallel ranks to try.")] = None
    ep: Annotated[Any, Tried(help="Expert-parallel ranks to try.")] = None
    schedules: Annotated[
        Any, InWorld(metavar="NAME,...", parser=_names, help="Schedules to try; their chunks are --loops.")
    ] = _SCHEDULES
    remat: Annotated[
        Any, InWorld(metavar="none,full", parser=_names, help="Keep all activations, or a stage's input only.")
    ] = _REMAT
    sequence_parallel: Annotated[
        bool, InWorld("--sequence-parallel", help="Tensor-parallel ranks share the tokens between products.")
    ] = False
    top: Annotated[int, InWorld(min=1, metavar="N", help="How many strategies to show.")] = 10
    budget: Annotated[float, InWorld(min=0, metavar="SECONDS", help="Stop after so long, with a note.")] = 60
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"{', '.join(SHAPES)}; or give its shape. Options change a named one.",
            rich_help_panel="Model, with --world",
        ),
    ] = None
    layers: Annotated[int | None, InShape(help="Layers.")] = None
    hidden: Annotated[int | None, InShape(help="Width.")] = None
    heads: Annotated[int | None, InShape(help="Heads of attention.")] = None
    kv_heads: Annotated[int | None, InShape(help="Heads of keys and values. By default --heads.")] = None
    feed_forward: Annotated[int | None, InShape(help="Inner width. By default 4 times --hidden.")] = None
    vocabulary: Annotated[int | None, InShape(help="Tokens that the model knows.")] = None
    sequence: Annotated[int | None, InShape(help="Tokens of a sequence.")] = None
    gated: Annotated[
        bool | None, typer.Option("--gated/--not-gated", help="SwiGLU.", rich_help_panel="Model, with --world")
    ] = None
    tied: Annotated[
        bool | None,
        typer.Option("--tied/--not-tied", help="One embedding, head too.", rich_help_panel="Model, with --world"),
    ] = None
    experts: Annotated[int | None, InShape(help="Experts of a layer. By default one network for all tokens.")] = None
    experts_per_token: Annotated[int | None, InShape(help="Experts that a token goes to.")] = None
    capacity_factor: Annotated[
        float | None,
        typer.Option(min=1, help="Slots of experts for each choice.", rich_help_panel="Model, with --world"),
    ] = None
    machine: Annotated[str, InMachine(metavar="NAME", help=f"{', '.join(MACHINES)}. Options change it.")] = "h100"
    dtype: Annotated[
        str | None, InMachine(metavar="DTYPE", help="Of the compute. By default bfloat16 where there is a peak.")
    ] = None
    peak: Annotated[float | None, InMachine(metavar="FLOP/S", help="Peak of a device in that dtype.")] = None
    efficiency: Annotated[float | None, InMachine(metavar="SHARE", help="What pieces reach of the peak.")] = None
    bandwidth: Annotated[Any, InMachine(metavar="BYTES/S", parser=byte_count, help="Of a device's memory.")] = None
    inside: Annotated[Any, BetweenRanks(help="Links inside a host.")] = None
    between: Annotated[Any, BetweenRanks(help="A device's share of the links between hosts.")] = None
    on_host: Annotated[int | None, InMachine(min=1, metavar="N", help="Devices of a host.")] = None

    def refuse(self, size: ModelOptions, costs: CostOptions, **others: object) -> None:
        """Raise for options that have no meaning with --world."""
        refused = {name: True for name, value in others.items() if value is not None}
        for options, default in ((size, ModelOptions()), (costs, CostOptions())):
            names = (
                f.name for f in fields(default) if _plain(getattr(options, f.name)) != _plain(getattr(default, f.name))
            )
            refused |= {f"--{name.replace('_', '-')}": True for name in names}
        if refused:
            raise typer.BadParameter(
                f"{', '.join(refused)} can't be combined with --world, where costs follow from model and machine",
                param_hint="--world",
            )

    @property
    def shape(self) -> ModelShape:
        changes = {name: getattr(self, name) for name in SHAPE if getattr(self, name) is not None}
        if self.model is not None:
            if self.model not in SHAPES:
                raise typer.BadParameter(f"{self.model!r} is not one of {', '.join(SHAPES)}", param_hint="--model")
            return replace(SHAPES[self.model], **changes)
        needed = ("layers", "hidden", "heads", "vocabulary", "sequence")
        if missing := [f"--{name}" for name in needed if name not in changes]:
            raise typer.BadParameter(
                f"a model without a name needs {', '.join(missing)}; the names are {', '.join(SHAPES)}",
                param_hint="--model",
            )
        return ModelShape(**changes)

    @property
    def hosts(self) -> Machine:
        if self.machine not in MACHINES:
            raise typer.BadParameter(f"{self.machine!r} is not one of {', '.join(MACHINES)}", param_hint="--machine")
        machine = MACHINES[self.machine]
        names = ("efficiency", "bandwidth", "inside", "between", "on_host")
        changes: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.peak is not None:
            changes["flops"] = {**machine.flops, self.dtype or machine.dtype: self.peak}
        return replace(machine, **changes)

    def sequences(self, shape: ModelShape) -> int:
        """Return the sequences of a step."""
        if self.batch_tokens is None:
            return self.batch or A_RANK * (self.world or 1)
        if self.batch is not None:
            raise typer.BadParameter("give --batch in sequences, or --batch-tokens, not both", param_hint="--batch")
        sequences, rest = divmod(self.batch_tokens, shape.sequence)
        if rest or not sequences:
            raise typer.BadParameter(
                f"{self.batch_tokens} tokens are no whole number of sequences of {shape.sequence}: take "
                f"{max(1, sequences) * shape.sequence}",
                param_hint="--batch-tokens",
            )
        return sequences

    def strategies(self, chunks: Sequence[int], limit_bytes: float | None) -> list[Strategy]:
        """Return the strategies, fastest first."""
        shape = self.shape
        names = (
            "dtype",
            "rows",
            "pp",
            "dp",
            "tp",
            "cp",
            "ep",
            "schedules",
            "remat",
            "sequence_parallel",
            "top",
            "budget",
        )
        options = {name: getattr(self, name) for name in names}
        options |= {"batch": self.sequences(shape), "chunks": chunks, "memory_limit_bytes": limit_bytes}
        with progress("search") as step, warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            result = strategies(shape, self.world or 1, self.hosts, progress=step, **options)
        for note in notes:
            typer.echo(f"note: {note.message}", err=True)
        return result


def _plain(option: object) -> object:
    """Return an option as a number if it was parsed from one: a default is not."""
    return float(option) if isinstance(option, int | float) else option


def row(strategy: Strategy) -> dict[str, object]:
    """Return a strategy for `--json`. Other programs read this: keep the keys and their order."""
    return {
        **strategy.degrees._asdict(),
        "schedule": strategy.name,
        "chunks": strategy.chunks,
        "resident": strategy.resident,
        "rows": strategy.rows,
        "microbatches": strategy.plan.microbatches,
        "remat": strategy.remat,
        "layers": strategy.layers,
        "step": strategy.step,
        "tokens_per_second": strategy.tokens_per_second,
        "mfu": strategy.mfu,
        "bubble_rate": strategy.timeline.bubble_rate,
        "collectives": strategy.collectives,
        "bytes": strategy.bytes,
        "memory": [
            {**account._asdict(), "working": working, "total": account.total + working}
            for account, working in zip(strategy.footprint, strategy.working, strict=True)
        ],
    }


def ranking(found: Sequence[Strategy]) -> list["RenderableType"]:
    """Return a table of strategies, and notes on it."""
    from rich.text import Text

    from fpipe.cli.tables import table

    degrees = ["pp", "dp", "tp", "cp", *(["ep"] if any(strategy.degrees.ep > 1 for strategy in found) else [])]
    columns = [*degrees, "schedule", "v", "resident", "rows", "remat", "step"]
    shown = table([*columns, "tokens/s", "MFU", "bubble", "inside", "memory"], words=["schedule", "remat"])
    for each in found:
        what = [
            *(str(getattr(each.degrees, name)) for name in degrees),
            each.name,
            str(each.chunks),
            str(each.resident or "-"),
            str(each.rows),
            each.remat,
        ]
        shares = [percent(share) for share in (each.mfu, each.timeline.bubble_rate, each.collectives)]
        shown.add_row(
            *what, f"{number(each.step)} s", number(each.tokens_per_second), *shares, format_bytes(each.bytes)
        )
    uneven = next((strategy.layers for strategy in found if len(set(strategy.layers)) > 1), ())
    notes = [
        "v: stages on a rank   resident: of these, with whole parameters at a time",
        "rows: sequences of a microbatch   memory: on the rank that needs most",
        "inside: share of the compute that collectives inside pieces take",
        *([f"layers of stages are uneven where they do not divide: {' '.join(map(str, uneven))}"] if uneven else []),
    ]
    return [shown, Text("\n".join(notes), "dim")]
