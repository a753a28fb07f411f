"""The layers of which a search makes stages: options and JSON of `fpipe search --layouts`. No torch."""

import json
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import typer

from fpipe.cli.options import CostOptions, InPlan, ModelOptions, check_size, required
from fpipe.cli.resolve import read
from fpipe.costs import NOT_BY_STAGE, Costs
from fpipe.errors import ScheduleError
from fpipe.plan import Placement, Plan
from fpipe.schedules.found import Found


@dataclass(frozen=True)
class LayerOptions:
    """The options of `--layouts`: the search cuts layers into stages, with the costs of layers from a file."""

    layouts: Annotated[
        bool, InPlan("--layouts", help="Costs are those of layers: search where to cut them into stages, too.")
    ] = False
    costs_file: Annotated[
        str | None,
        InPlan(
            "--costs", metavar="FILE", help="JSON of Costs.as_json to read; - is stdin. Options that are given win."
        ),
    ] = None

    copies: Annotated[bool, InPlan("--copies/--no-copies", help="Whether stages may have copies on several ranks.")] = (
        True
    )
    host: Annotated[
        float,
        InPlan(
            min=0,
            metavar="TIME",
            help="With --layouts: what each piece of a stage takes beside its layers. The bound leaves it out.",
        ),
    ] = 0.0

    @property
    def given(self) -> dict[str, object]:
        """The options that are given."""
        copies = None if self.copies else False
        return {
            "--layouts": self.layouts or None,
            "--costs": self.costs_file,
            "--no-copies": copies,
            "--host": self.host or None,
        }

    @property
    def searched(self) -> dict[str, Any]:
        """The arguments of a search."""
        if self.host and not self.layouts:
            raise typer.BadParameter("it is beside the time of layers: give it with --layouts", param_hint="--host")
        of_layers = {"layouts": True, "host": self.host} if self.layouts else {}
        return {"copies": self.copies, **of_layers}

    def stages(self, found: Found, plan: Plan) -> int:
        """Return the stages of the cut that a result's costs are for."""
        return found.plan.stages if self.layouts else plan.stages

    def model(self, size: ModelOptions, options: CostOptions, asked: Collection[str]) -> tuple[Plan, Costs]:
        """Return the plan of the stages or layers, and their costs.

        Args:
            asked: the names of the options on the command line.
        """
        costs = options.costs if self.costs_file is None else _changed(_read(self.costs_file), options, asked)
        if self.layouts and "chunks" in asked:
            raise typer.BadParameter(
                "with --layouts costs are those of layers, whatever stages a rank has: leave it out; --loops has the "
                "numbers of stages on a rank to try",
                param_hint="--chunks",
            )
        plan = _of_layers(size, costs, self.copies) if self.layouts else size.plan
        try:
            costs.check(plan)
        except ScheduleError as error:
            raise typer.BadParameter(str(error)) from None
        return plan, costs


def _read(name: str) -> Costs:
    try:
        return Costs.from_json(json.loads(read(name)))
    except ScheduleError as error:
        raise typer.BadParameter(f"{name}: {error}", param_hint="--costs") from None
    except ValueError as error:
        raise typer.BadParameter(f"{name} is no JSON: {error}", param_hint="--costs") from None


def _changed(costs: Costs, options: CostOptions, asked: Collection[str]) -> Costs:
    """Return costs with those of the options that are on the command line, also where these are as by default."""
    own = options.costs
    names = [name for name in asked if name in CostOptions.__dataclass_fields__ and name != "lengths"]
    names += ["scale", "sizes"] if "lengths" in asked else []
    return replace(costs, **{name: getattr(own, name) for name in names})


def _of_layers(size: ModelOptions, costs: Costs, copies: bool) -> Plan:
    """Return the plan of as many layers as the costs have.

    Args:
        copies: whether one stage may have copies, so that ranks are more than layers.
    """
    ranks, microbatches = required(size, "ranks"), required(size, "microbatches")
    listed = (getattr(costs, each.name) for each in fields(costs) if each.name not in NOT_BY_STAGE)
    counts = {len(cost) for cost in listed if isinstance(cost, tuple)}
    count = max(counts, default=0)
    placement = _placement(count, ranks, microbatches if copies else 1)
    if placement is None:
        raise typer.BadParameter(
            f"give costs of at least {ranks} layers, one on each rank, as --forward 1,1,2 or a file with --costs; or "
            "of two or more, if one stage may have copies, and their number divides that of the microbatches",
            param_hint="--layouts",
        )
    check_size(count, microbatches, size.any_size)
    trained = None if size.trained is None else size.trained.numbers
    return Plan(placement, microbatches, replicas=size.replicas, trained=trained)


def _placement(count: int, ranks: int, microbatches: int) -> Placement | None:
    """Return some placement of layers on all ranks, the first one with copies where ranks are more than layers.

    >>> _placement(4, 2, 8), _placement(2, 3, 8), _placement(2, 4, 8)
    (Placement((0, 0, 1, 1)), Placement(((0, 1), 2)), None)
    """
    if count >= ranks:
        return Placement([layer * ranks // count for layer in range(count)])
    for copies in range(ranks - count + 1, ranks) if count > 1 else ():
        if microbatches % copies == 0:
            others = range(copies, ranks)
            of_layers = [others[layer * len(others) // (count - 1)] for layer in range(count - 1)]
            return Placement([tuple(range(copies)), *of_layers])
    return None


def stages_as_json(found: Found) -> dict[str, object]:
    """Return the stages of a result for `--json`."""
    moved = found.offload
    return {
        "placement": found.plan.placement.holders,
        "layers": found.layers,
        "cuts": found.cuts,
        "offload": moved and {"limit_bytes": moved.limit_bytes, "slower": moved.slower, "recompute": moved.recompute},
    }
