"""From what was asked to what runs: the schedule that a name stands for, its plan, costs and timeline. No torch."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import typer

from fpipe.cli.app import OWN
from fpipe.cli.options import PlanOptions
from fpipe.costs import Costs
from fpipe.errors import ScheduleError
from fpipe.plan import Plan, Schedule
from fpipe.programs.lowering import lower
from fpipe.programs.verifier import check
from fpipe.schedules.catalogue import CATALOGUE, Entry
from fpipe.timelines.format import number
from fpipe.timelines.simulator import play
from fpipe.timelines.timeline import Timeline


class Job(NamedTuple):
    """A schedule that was asked for, on its plan, at its costs."""

    name: str
    schedule: Schedule
    plan: Plan
    costs: Costs


def resolve(name: str, asked: PlanOptions, costs: Callable[[Plan], Costs], limit: float | None) -> Job:
    """The schedule that a name stands for.

    Args:
        costs: plan -> the costs that a schedule which orders by them gets.
    """
    if name.endswith(".csv"):
        from fpipe.interop.torch_csv import from_csv

        schedule, plan = from_csv(read(name))
        return Job(name, schedule, asked.agree(plan, name), costs(plan))
    if name.endswith(".py") or ".py:" in name:
        plan = asked.plan(None)
        return Job(name, _own(name, plan, costs(plan), limit), plan, costs(plan))
    entry = _entry(name)
    plan = asked.plan(entry)
    return Job(entry.name, entry.schedule(plan, costs(plan), limit), plan, costs(plan))


def _own(name: str, plan: Plan, costs: Costs, limit: float | None) -> Schedule:
    """What a function in a user's file is, by its first parameter: a schedule, or, where that is `plan`, a factory."""
    function = _load(name)
    parameters = list(inspect.signature(function).parameters)
    options = {"costs": costs, "memory_limit": limit}
    taken = {option: options[option] for option in parameters if option in options}
    if parameters[:1] != ["plan"]:
        return partial(function, **taken)
    made = function(plan, **taken)
    if not callable(made):
        raise ScheduleError(
            f"{name} begins with plan, so it makes a schedule, (rank, plan) -> effects; it made {made!r}"
        )
    return cast(Schedule, made)


def _entry(name: str) -> Entry:
    plain = name.lower().replace("_", "-")
    if plain not in CATALOGUE:
        near = sorted(get_close_matches(plain, CATALOGUE, n=2, cutoff=0.5))
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(CATALOGUE)}."
        raise typer.BadParameter(
            f"no schedule is called {name!r}: {hint} One of your own is FILE.py:FUNCTION.", param_hint="SCHEDULE"
        )
    return CATALOGUE[plain]


def _load(name: str) -> Callable[..., Any]:
    """The function in FILE.py:FUNCTION. The file may import its neighbours, as a script may."""
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
    found = getattr(module, function, None) if function else None
    if not callable(found):
        own = [f.__name__ for f in vars(module).values() if inspect.isfunction(f) and f.__module__ == spec.name]
        wanted = f"{path} has no function {function!r}" if function else f"name a function of {path}, as in {path}:NAME"
        raise typer.BadParameter(f"{wanted}; it has {', '.join(own) or 'none'}", param_hint="SCHEDULE")
    return cast(Callable[..., Any], found)


def read(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file} can't be read: {error}") from None


def played(job: Job, step: Callable[[str], None] = lambda what: None) -> Timeline:
    """The timeline of a schedule, once it was verified, in any order of microbatches."""
    programs = lower(job.schedule, job.plan)
    step(f"verify {job.name}")
    check(programs, ordered=False)
    step(f"simulate {job.name}")
    return play(programs, job.costs)


def keep_to(peaks: Sequence[float], limit: float | None) -> None:
    """Refuse what doesn't keep to the memory limit."""
    peak = max(peaks)
    if limit is not None and peak > limit + 1e-9:
        raise ScheduleError(
            f"rank {list(peaks).index(peak)} has {number(peak)} microbatches in flight, {number(peak - limit)} more "
            f"than the limit of {number(limit)} (fpipe search --memory-limit finds what keeps to it)"
        )
