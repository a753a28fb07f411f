"""Resolve the name of a schedule to the schedule, its plan, costs and timeline. No torch."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import typer

from fpipe._format import number
from fpipe.cli.app import OWN
from fpipe.cli.options import (
    CostOptions,
    Effort,
    Limit,
    LimitBytes,
    OffloadLimitBytes,
    PlanOptions,
    Recomputing,
    Resident,
    ScheduleArg,
    Size,
    Slower,
    Update,
    check_size,
)
from fpipe.costs import ROUNDING, Costs
from fpipe.effects import Parameters
from fpipe.errors import ScheduleError
from fpipe.plan import Plan, Schedule
from fpipe.programs.footprint import RankBytes, enforce, footprint
from fpipe.programs.lowering import lower
from fpipe.programs.program import Pass
from fpipe.programs.residence import Residence
from fpipe.programs.updates import updating
from fpipe.programs.verifier import check
from fpipe.schedules.catalogue import CatalogueEntry, named
from fpipe.schedules.cuts import of_shares
from fpipe.timelines.offloading import offload
from fpipe.timelines.simulator import simulate_programs
from fpipe.timelines.timeline import Timeline


class Job(NamedTuple):
    """A schedule with its plan and costs."""

    name: str
    schedule: Schedule
    plan: Plan
    costs: Costs
    resident: Residence | int | None = None
    offload: Pass | None = None


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(CostOptions, PlanOptions):
    """A schedule on its plan, with costs, under a memory limit."""

    name: ScheduleArg
    limit: Limit = None
    limit_bytes: LimitBytes = None
    resident: Resident = None
    effort: Effort = 1.0
    offload_limit_bytes: OffloadLimitBytes = None
    slower: Slower = 0.0
    recomputing: Recomputing = False
    update: Update = None

    def resolve(self, steps: int = 1) -> Job:
        """Return the schedule, with the costs of its plan's stages; raise if they do not fit the plan.

        Args:
            steps: how many are to be simulated.
        """
        job = resolve(self.name, self, self.cut, Memory(self.limit, self.limit_bytes, self.resident), self.effort)
        check_size(job.plan.stages * job.plan.slices, job.plan.microbatches, self.any_size, "--steps", steps)
        if self.update is not None:
            job = job._replace(schedule=updating(job.schedule), costs=self._with_update(job))
        if self.offload_limit_bytes is None:
            return job
        moved = offload(self.offload_limit_bytes, job.costs, slower=self.slower, recompute=self.recomputing)
        return job._replace(offload=moved)

    def _with_update(self, job: Job) -> Costs:
        """Return the costs with those of updates; one number is for a rank's share of the model."""
        times = self.update
        if not isinstance(times, tuple):
            times = of_shares(Costs(update=times), job.plan).update
        costs = replace(job.costs, update=times)
        costs.check(job.plan)
        return costs


class Memory(NamedTuple):
    """The memory of a rank.

    Args:
        limit, limit_bytes: in microbatches in flight, and in bytes.
        resident: so many stages, or so many bytes of parameters, are whole at a time.
    """

    limit: float | None = None
    limit_bytes: float | None = None
    resident: int | Size | None = None

    def residence(self, plan: Plan, costs: Costs) -> Residence | int | None:
        if not isinstance(self.resident, Size):
            return self.resident
        sizes = [costs.bytes(Parameters(stage)) for stage in range(plan.stages)]
        if not any(sizes):
            raise typer.BadParameter("bytes are those of the parameters: give --parameters", param_hint="--resident")
        return Residence(self.resident, sizes)

    def limits(self, resident: Residence | int | None) -> dict[str, Any]:
        """Return the arguments of a schedule that orders under limits."""
        return {"memory_limit": self.limit, "memory_limit_bytes": self.limit_bytes, "resident": resident}


def resolve(
    name: str, asked: PlanOptions, costs_of: Callable[[Plan], Costs], memory: Memory, effort: float = 1.0
) -> Job:
    """Return the schedule that a name stands for.

    Args:
        costs_of: plan -> costs, for schedules that order by them.
        effort: of schedules that order under a limit, as of `zb_auto`.
    """
    if name.endswith(".csv"):
        from fpipe.interop.torch_csv import from_csv

        schedule, plan = from_csv(read(name), replicas=asked.replicas)
        plan, costs = asked.check_consistent(plan, name), costs_of(plan)
        return Job(name, schedule, plan, costs, memory.residence(plan, costs))
    if name.endswith(".py") or ".py:" in name:
        plan = asked.plan(None)
        costs = costs_of(plan)
        resident = memory.residence(plan, costs)
        limits = memory.limits(resident)
        return Job(name, _own(name, plan, {"costs": costs, **limits, "effort": effort}), plan, costs, resident)
    entry = _entry(name)
    plan = asked.plan(entry)
    costs = costs_of(plan)
    resident = memory.residence(plan, costs)
    schedule = entry.schedule(plan, costs, **memory.limits(resident), effort=effort)
    return Job(entry.name, schedule, plan, costs, resident)


def _own(name: str, plan: Plan, options: Mapping[str, Any]) -> Schedule:
    """Return the schedule in a user's file: its function, or the result of one whose first parameter is `plan`.

    Args:
        options: the arguments for parameters of these names.
    """
    function = _load(name)
    parameters = list(inspect.signature(function).parameters)
    taken = {option: options[option] for option in parameters if option in options}
    if parameters[:1] != ["plan"]:
        return partial(function, **taken)
    schedule = function(plan, **taken)
    if not callable(schedule):
        raise ScheduleError(
            f"{name} begins with plan, so it makes a schedule, (rank, plan) -> effects; it made {schedule!r}"
        )
    return cast(Schedule, schedule)


def _entry(name: str) -> CatalogueEntry:
    try:
        return named(name)
    except ScheduleError as error:
        message = f"{error}{'' if str(error).endswith('?') else '.'} One of your own is FILE.py:FUNCTION."
        raise typer.BadParameter(message, param_hint="SCHEDULE") from None


def _load(name: str) -> Callable[..., Any]:
    """Load the function of FILE.py:FUNCTION. Like a script, the file can import modules from its folder."""
    file, _, function = name.partition(".py:") if ".py:" in name else (name.removesuffix(".py"), "", "")
    path = Path(file + ".py")
    if not path.is_file():
        raise typer.BadParameter(f"there is no file {path}", param_hint="SCHEDULE")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(OWN + path.name, path)
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result = getattr(module, function, None) if function else None
    if not callable(result):
        own = [f.__name__ for f in vars(module).values() if inspect.isfunction(f) and f.__module__ == spec.name]
        wanted = f"{path} has no function {function!r}" if function else f"name a function of {path}, as in {path}:NAME"
        raise typer.BadParameter(f"{wanted}; it has {', '.join(own) or 'none'}", param_hint="SCHEDULE")
    return cast(Callable[..., Any], result)


def read(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file} can't be read: {error}") from None


class Played(NamedTuple):
    """A simulated schedule: its timeline, and the account of each rank's bytes."""

    timeline: Timeline
    footprint: tuple[RankBytes, ...]


def played(
    job: Job, step: Callable[[str], None] = lambda what: None, limit_bytes: float | None = None, steps: int = 1
) -> Played:
    """Verify a schedule, with any order of microbatches, and simulate it; raise if a rank needs more bytes."""
    programs = lower(job.schedule, job.plan, resident=job.resident, offload=job.offload)
    step(f"verify {job.name}")
    check(programs, ordered=False)
    accounts = footprint(programs, job.costs)
    if limit_bytes is not None:
        enforce(accounts, limit_bytes, job.costs)
    step(f"simulate {job.name}")
    return Played(simulate_programs(programs, job.costs, steps), accounts)


def enforce_limit(peaks: Sequence[float], limit: float | None) -> None:
    """Raise ScheduleError if a rank exceeds the memory limit."""
    peak = max(peaks)
    if limit is not None and not limit >= 0:
        raise ScheduleError(f"the memory limit must be a number of microbatches, not {limit!r}")
    if limit is not None and peak > limit * (1 + ROUNDING):
        raise ScheduleError(
            f"rank {list(peaks).index(peak)} has {number(peak)} microbatches in flight, {number(peak - limit)} more "
            f"than the limit of {number(limit)} (fpipe search --memory-limit finds what keeps to it)"
        )
