"""The verbs' options, in groups: plans, models and costs; and their parsers. No torch."""

from dataclasses import dataclass, fields, replace
from functools import partial
from math import inf, nan
from typing import Annotated, Any

import typer

from fpipe._format import format_bytes, number
from fpipe.costs import Costs, Edge, Link, PerStage
from fpipe.errors import ScheduleError
from fpipe.plan import Placement, Plan
from fpipe.schedules.catalogue import CATALOGUE, PLACES, CatalogueEntry
from fpipe.schedules.cuts import of_shares, recut_for, recut_trained
from fpipe.schedules.slice_costs import of_slice


def _per_stage(text: str | float) -> PerStage:
    numbers = tuple(_number(part) for part in str(text).split(","))
    return numbers if len(numbers) > 1 else numbers[0]


def _number(text: str, example: str = "0.5, or one a stage as 1,1,2,1") -> float:
    try:
        value = float(text)
    except ValueError:
        value = nan
    if not 0 <= value < inf:
        raise typer.BadParameter(f"{text!r} is no number of at least 0: give one as {example}")
    return value


def byte_count(text: str | float) -> float:
    """Parse 8e9, 80GiB or 512 MB.

    >>> byte_count("8e9"), byte_count("1.5KiB"), byte_count("2 MB")
    (8000000000.0, 1536.0, 2000000.0)
    """
    whole = str(text).strip()
    unit = next((unit for unit in UNITS if whole.lower().endswith(unit.lower())), "")
    return _number(whole.removesuffix(whole[len(whole) - len(unit) :]) or "none", "8e9 or 80GiB") * UNITS.get(unit, 1)


def _bytes_per_stage(text: str | float) -> PerStage:
    sizes = tuple(byte_count(part) for part in str(text).split(","))
    return sizes if len(sizes) > 1 else sizes[0]


class Size(float):
    """A limit in bytes, where a whole number would count stages."""


def _stages_or_bytes(option: str | int) -> int | Size:
    """Parse 2, or 4GiB.

    >>> _stages_or_bytes("2"), _stages_or_bytes("2kB")
    (2, 2000.0)
    """
    text = str(option).strip()
    if text[-1:].isalpha():
        return Size(byte_count(text))
    if text.isdecimal() and int(text):
        return int(text)
    raise typer.BadParameter(f"{text!r} is neither a number of stages, as 2, nor a number of bytes, as 4GiB")


def _time_or_link(option: str | float) -> PerStage | Link:
    """Parse 0.1, one time a stage as 0.1,0.2, or a latency and a bandwidth as 0.01:1e9."""
    text = str(option)
    if ":" not in text:
        return _per_stage(text)
    try:
        return _transfer(text)  # a Link
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is no time: give one as 0.1, one a stage as 0.1,0.2, or a latency and a bandwidth (more than 0) "
            "as 0.01:1e9"
        ) from None


def _transfers(option: str | float) -> float | Link | dict[Edge, float | Link]:
    """Parse 0.1, 0.01:1e9, or either for each edge, as 0-1=0.1,1-0=0.2."""
    text = str(option)
    try:
        if "=" not in text:
            return _transfer(text)
        pairs = (part.split("=") for part in text.split(","))
        return {_edge(edge): _transfer(transfer) for edge, transfer in pairs}
    except ValueError:  # also the ScheduleErrors of `Link` and `Costs`
        raise typer.BadParameter(
            f"{text!r} is no transfer: give a time as 0.1, a latency and a bandwidth (more than 0) as 0.01:1e9, or "
            "either for every edge between two ranks as 0-1=0.1,1-0=0.2"
        ) from None


def _transfer(text: str) -> float | Link:
    latency, colon, bandwidth = text.partition(":")
    link = Link(float(latency), float(bandwidth) if colon else inf)
    return link if colon else link.latency


def link(option: str | Link) -> Link:
    """Parse a latency and a bandwidth, as 3e-6:450e9."""
    text = str(option)
    try:
        latency, bandwidth = map(float, text.split(":"))
        return Link(latency, bandwidth)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is no link: give seconds of latency and bytes a second (more than 0), as 3e-6:450e9"
        ) from None


def _edge(text: str) -> Edge:
    source, target = map(int, text.split("-"))
    return source, target


UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def at_least_one(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(map(int, text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"{text!r} is no list of counts: give one as 2,4")
    return numbers


def known(incomplete: str) -> list[str]:
    return [name for name in CATALOGUE if name.startswith(incomplete)]


SCHEDULE_HELP = (
    "A name that `fpipe schedules` lists; FILE.py:FUNCTION, a schedule (rank, plan) or a factory of one (plan, ...); "
    "or FILE.csv as torch writes it."
)
ScheduleArg = Annotated[str, typer.Argument(metavar="SCHEDULE", help=SCHEDULE_HELP, autocompletion=known)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_OF = ": one number, which the stages of a rank share, or one a stage"
PerStageOption = partial(typer.Option, parser=_per_stage)
Time = partial(PerStageOption, metavar="TIME", rich_help_panel=f"Costs{_OF}")
Bytes = partial(
    typer.Option,
    parser=_bytes_per_stage,
    show_default=False,
    metavar="BYTES",
    rich_help_panel=f"Sizes, as 8e9 or 80GiB{_OF}",
)
TimeOrLink = partial(typer.Option, parser=_time_or_link, metavar="TIME|LATENCY:BANDWIDTH", rich_help_panel="Transfers")
InPlan = partial(typer.Option, rich_help_panel="Plan")
Count = partial(InPlan, min=1, metavar="N")
Chunks = partial(InPlan, metavar="V,V,...", parser=at_least_one)
ToFile = partial(typer.Option, metavar="FILE")
Limit = Annotated[
    float | None,
    InPlan("--memory-limit", min=0, metavar="K", help="Most microbatches of a whole rank in flight on it."),
]
LimitBytes = Annotated[
    Any,
    InPlan(
        "--memory-limit-bytes",
        metavar="BYTES",
        parser=byte_count,
        help="Bytes that a rank has for parameters, gradients, optimizer state and live values, as 80GiB.",
    ),
]
Effort = Annotated[
    float,
    InPlan("--effort", min=0, metavar="TIMES", help="How long zb-auto and v-auto search, in times of the usual."),
]
Resident = Annotated[
    Any,
    InPlan(
        metavar="N|BYTES",
        parser=_stages_or_bytes,
        help="Shard the parameters over the replicas; so many stages, or of their --parameters so many bytes as 4GiB, "
        "are whole on a rank at a time.",
    ),
]
OffloadLimitBytes = Annotated[
    Any,
    InPlan(
        "--offload-limit-bytes",
        metavar="BYTES",
        parser=byte_count,
        help="Move residuals to the host and back, so that no rank has more bytes; --offload and --fetch are what a "
        "copy costs.",
    ),
]
Slower = Annotated[
    float, InPlan(min=0, metavar="SHARE", help="How much slower the step may get by that: 0.05 for 5 %.")
]
Recomputing = Annotated[
    bool, InPlan("--recomputing", help="Let it also recompute residuals, first where a rank waits.")
]
Update = Annotated[
    Any,
    Time(
        help="The optimizer's update of a stage, as soon as its gradients are final. By default there is none.",
        show_default=False,
    ),
]
Steps = Annotated[
    int | None,
    Count(help="Steps that follow each other without a barrier; their period is the time of one in the long run."),
]
Replicas = Annotated[int, Count(help="How many replicas of the pipeline.")]
AnySize = Annotated[bool, InPlan("--any-size", help="Do not refuse what takes very long.")]


@dataclass(frozen=True)
class TrainedStages:
    """The stages with trained parameters, of a plan's own or of another cut of the model."""

    numbers: frozenset[int]
    stages: int | None = None

    def of(self, plan: Plan) -> frozenset[int] | None:
        return self.numbers if self.stages is None else recut_trained(self.numbers, self.stages, plan.stages)


def _trained(text: str) -> TrainedStages:
    """Parse stages as 3 or 0,4-7; "none" is no stage."""
    numbers: set[int] = set()
    try:
        for part in text.split(",") if text != "none" else ():
            first, _, last = part.partition("-")
            numbers |= {*range(int(first), int(last or first) + 1)}
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of stages: give one as 3 or 0,4-7, or none") from None
    return TrainedStages(frozenset(numbers))


Trained = Annotated[
    Any,
    InPlan(
        "--trained",
        metavar="STAGE,...",
        parser=_trained,
        help="The stages with trained parameters, as 3 or 0,4-7: halves of backwards that these do not need are left "
        "out. By default every stage has both halves.",
    ),
]

CHUNKS = {"v": 2, "wave": 4}
"""Stages on each rank of a placement that is named without them; one for others."""
LARGE = 2_000_000  # forwards
SECONDS, BYTES = 150e-6, 3000  # that lowering, verifying and simulating a forward takes with its backward, in CPython


def is_large(forwards: int) -> bool:
    """Return whether the command refuses a plan with so many forwards, unless --any-size is given."""
    return forwards > LARGE


def check_size(stages: int, microbatches: int, any_size: bool, option: str = "--ranks", steps: int = 1) -> None:
    """Raise typer.BadParameter for a plan that would take very long, before anything of that size is made."""
    count = stages * microbatches * steps
    if is_large(count) and not any_size:
        loop = f", {steps} steps" if steps > 1 else ""
        raise typer.BadParameter(
            f"{number(count)} forwards ({stages} stages, {microbatches} microbatches{loop}) take about "
            f"{number(count * SECONDS / 60)} minutes and {format_bytes(count * BYTES)} for one schedule: take fewer, "
            "or --any-size",
            param_hint=option,
        )


def required(options: object, option: str) -> int:
    """Return an option; raise typer.BadParameter if it is missing."""
    count: int | None = getattr(options, option)
    if count is None:
        raise typer.BadParameter(f"missing: give a number, as in --{option} 8", param_hint=f"--{option}")
    return count


@dataclass(frozen=True)
class PlanOptions:
    """The plan of one schedule."""

    ranks: Annotated[int | None, Count(help="How many ranks.")] = None
    microbatches: Annotated[int | None, Count(help="How many microbatches.")] = None
    chunks: Annotated[int | None, Count(help="Stages on each rank. By default the schedule's own.")] = None
    slices: Annotated[int | None, Count(help="Slices of each microbatch. By default the schedule's own.")] = None
    placement: Annotated[
        str | None,
        InPlan(
            metavar="PLACE",
            help="loop, v, wave, both-ways, or ranks by stage as 0,1,1,0 (copies: 0+1,1+0). By default the schedule's "
            "own.",
        ),
    ] = None
    replicas: Replicas = 1
    trained: Trained = None
    any_size: AnySize = False

    def plan(self, entry: CatalogueEntry | None) -> Plan:
        """Return the plan of a named schedule, or of a schedule without a placement of its own."""
        return self._completed(self._plan(entry))

    def _completed(self, plan: Plan) -> Plan:
        trained = None if self.trained is None else self.trained.of(plan)
        return replace(plan, replicas=self.replicas, trained=trained)

    def _plan(self, entry: CatalogueEntry | None) -> Plan:
        if self.placement and self.placement not in PLACES:
            placement, microbatches = _listed(self.placement), required(self, "microbatches")
            check_size(placement.stages, microbatches, self.any_size, option="--microbatches")
            return self.check_consistent(self._sliced(Plan(placement, microbatches), entry), self.placement)
        ranks, microbatches = required(self, "ranks"), required(self, "microbatches")
        own = entry.chunks if entry and not self.placement else CHUNKS.get(self.placement or "loop", 1)
        chunks = self.chunks or own
        if self.placement == "both-ways" or (entry and not self.placement and entry.place is PLACES["both-ways"]):
            chunks = 1  # the copies of a stage share its microbatches: forwards are those of one stage on each rank
        slices = self.slices or (entry and entry.slices) or 1
        check_size(ranks * chunks * slices, microbatches, self.any_size)
        if entry and not self.placement:
            return entry.plan(ranks, microbatches, self.chunks, self.slices)
        place = self.placement or "loop"
        try:
            placement = PLACES[place](ranks, chunks)
        except ScheduleError as error:
            raise typer.BadParameter(str(error), param_hint="--placement") from None
        return self.check_consistent(self._sliced(Plan(placement, microbatches), entry), place)

    def _sliced(self, plan: Plan, entry: CatalogueEntry | None) -> Plan:
        """Return a plan of a placement that is not the schedule's own, with slices as the schedule has them."""
        return replace(plan, slices=self.slices or (entry and entry.slices) or 1)

    def check_consistent(self, plan: Plan, source: str) -> Plan:
        """Return a plan from elsewhere; raise if an option contradicts it."""
        for option, has in (counts(plan) | {"slices": plan.slices}).items():
            if getattr(self, option) not in (None, has):
                raise typer.BadParameter(f"{source} has {has}, not {getattr(self, option)}", param_hint=f"--{option}")
        return self._completed(plan)


def counts(plan: Plan) -> dict[str, int]:
    """Return the values that a plan has for the options of `PlanOptions`."""
    chunks = max(len(plan.stages_on(rank)) for rank in range(plan.ranks))
    sizes = {"ranks": plan.ranks, "microbatches": plan.microbatches, "chunks": chunks}
    return sizes | ({"slices": plan.slices} if plan.slices > 1 else {})


def _listed(text: str) -> Placement:
    try:
        return Placement([tuple(map(int, held.split("+"))) for held in text.split(",")])
    except ScheduleError as error:
        raise typer.BadParameter(str(error), param_hint="--placement") from None
    except ValueError:
        known = f"give {', '.join(PLACES)}, or ranks as 0,1,1,0"
        raise typer.BadParameter(f"{text!r} is no placement: {known}", param_hint="--placement") from None


@dataclass(frozen=True)
class ModelOptions:
    """A model on a number of ranks, for any schedule."""

    ranks: Annotated[int | None, Count(help="How many ranks.")] = None
    microbatches: Annotated[int | None, Count(help="How many microbatches.")] = None
    chunks: Annotated[
        int, Count(help="Costs are those of a stage when a rank has so many; other cuts take their share of them.")
    ] = 1
    replicas: Replicas = 1
    trained: Trained = None
    any_size: AnySize = False

    @property
    def plan(self) -> Plan:
        """The plan of the costs."""
        ranks, microbatches = required(self, "ranks"), required(self, "microbatches")
        check_size(ranks * self.chunks, microbatches, self.any_size)
        placement = Placement.loop(ranks, self.chunks)
        trained = None if self.trained is None else self.trained.numbers
        return Plan(placement, microbatches, replicas=self.replicas, trained=trained)

    def of_cut(self, chunks: int | None) -> PlanOptions:
        """Return the options of a plan of the same model with another number of stages on a rank."""
        trained = self.trained and replace(self.trained, stages=self.plan.stages)
        return PlanOptions(
            self.ranks, self.microbatches, chunks, replicas=self.replicas, trained=trained, any_size=self.any_size
        )


def _each_cost(options: "CostOptions") -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in fields(CostOptions) if field.name != "lengths"}


@dataclass(frozen=True)
class CostOptions:
    """The fields of `Costs`. Their type is `PerStage`, a union, which typer does not support."""

    forward: Annotated[Any, Time(help="Forward.")] = 1
    backward_input: Annotated[Any, Time(help="Input gradient.")] = 1
    backward_weight: Annotated[Any, Time(help="Weight gradient.")] = 1
    backward: Annotated[Any, Time(help="Fused backward. By default the two gradients together.")] = None
    overlap: Annotated[Any, Time(help="Overlapped pair. By default its two parts together.")] = None
    communication: Annotated[
        Any,
        typer.Option(
            metavar="TIME|LATENCY:BANDWIDTH",
            parser=_transfers,
            help="A transfer between two ranks; either for every edge as 0-1=0.1,1-0=0.2.",
            rich_help_panel="Transfers",
        ),
    ] = 0
    activation: Annotated[Any, Bytes(help="What a stage puts out for a microbatch.")] = 0
    residuals: Annotated[Any, Bytes(help="What a forward keeps for its backward.")] = 0
    deferred: Annotated[Any, Bytes(help="What an input gradient keeps for its weight gradient.")] = 0
    parameters: Annotated[Any, Bytes(help="The whole parameters of a stage.")] = 0
    gathered: Annotated[Any, Bytes(help="The parameters in the dtype of the stage, where it casts them.")] = None
    gradients: Annotated[Any, Bytes(help="A stage's whole sum of gradients. By default as large.")] = None
    optimizer: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="RATIO",
            help="State of the optimizer: bytes for each byte of parameters. Adam's two moments are 2.",
            rich_help_panel=f"Sizes, as 8e9 or 80GiB{_OF}",
        ),
    ] = 2.0
    gather: Annotated[
        Any, TimeOrLink(help="The gathering of a stage's parameters from all replicas; times may be one a stage.")
    ] = 0
    scatter: Annotated[Any, TimeOrLink(help="The sum of a stage's gradients over all replicas.")] = 0
    offload: Annotated[
        Any, TimeOrLink(help="The copy of a microbatch's residuals to the host; times may be one a stage.")
    ] = 0
    fetch: Annotated[Any, TimeOrLink(help="The copy back.")] = 0
    recompute: Annotated[Any, Time(help="Residuals made again. By default as a forward.")] = None

    lengths: Annotated[
        Any,
        typer.Option(
            metavar="LENGTH,...",
            parser=_per_stage,
            help="Of each microbatch, in any unit: costs are those of one of the mean length.",
            rich_help_panel="Plan",
        ),
    ] = None

    @property
    def costs(self) -> Costs:
        return Costs(**_each_cost(self), scale=self.factors)

    @property
    def factors(self) -> tuple[float, ...]:
        """The factors of microbatches."""
        lengths = self.lengths if isinstance(self.lengths, tuple) else () if self.lengths is None else (self.lengths,)
        if lengths and not sum(lengths):
            raise typer.BadParameter("all are 0: give one length for each microbatch", param_hint="--lengths")
        return tuple(length * len(lengths) / sum(lengths) for length in lengths)

    def has_shares(self, plan: Plan) -> bool:
        """Return whether `of_shares` divides a cost, one number for each rank, among the stages of a plan."""
        costs = self._without_lists
        return of_shares(costs, plan) != costs

    @property
    def _without_lists(self) -> Costs:
        """The costs with zeros for those that are listed by stage."""
        listed = [name for name in _each_cost(self) if isinstance(getattr(self.costs, name), tuple)]
        none: dict[str, Any] = dict.fromkeys(listed, 0.0)
        return replace(self.costs, **none)

    def validated(self, plan: Plan) -> Costs:
        """Return the costs; raise if they do not fit the plan."""
        try:
            self.costs.check(plan)
        except ScheduleError as error:
            raise typer.BadParameter(str(error)) from None
        return self.costs

    def recut(self, model: ModelOptions, plan: Plan) -> Costs:
        """Return the costs of the same model under a plan with another number of stages."""
        return of_slice(recut_for(self.validated(model.plan), model.plan, plan), plan.slices)

    def cut(self, plan: Plan) -> Costs:
        """Return the costs of a plan's stages, of numbers for a rank's share of the model and of lists for stages."""
        costs = self.validated(plan)
        listed: dict[str, Any] = {
            name: cost for name in _each_cost(self) if isinstance(cost := getattr(costs, name), tuple)
        }
        return of_slice(replace(of_shares(self._without_lists, plan), **listed), plan.slices)
