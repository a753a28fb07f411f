"""Check the schedule that a caller passes, a function or the name of one. No torch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from fpipe.costs import Costs
from fpipe.errors import ScheduleError
from fpipe.plan import Plan, Schedule

_MOST_SEARCHED = 512  # stages times microbatches of a plan for which an order is searched


def as_schedule(schedule: Any) -> Schedule:
    """Return the schedule that a caller passed, looked up if it is a name.

    Raises:
        ScheduleError: no schedule has that name, or it is no schedule.
    """
    if isinstance(schedule, str):
        # Late: the library of schedules is built on this package, and only names need it.
        from fpipe.schedules.catalogue import get

        return get(schedule)
    if inspect.isgenerator(schedule):
        raise ScheduleError(
            f"this is one rank's effects, which {schedule.__name__}(rank, plan) returned: pass the schedule itself, "
            f"{schedule.__name__}"
        )
    if isinstance(schedule, type) and not hasattr(schedule, "__iter__"):
        raise ScheduleError(
            f"{schedule.__name__} is a class: pass a function (rank, plan) that yields effects, or an instance that is "
            "called so"
        )
    if not callable(schedule):
        raise ScheduleError(
            "a schedule is a function (rank, plan) that yields effects, or the name of one, such as '1f1b', not "
            f"{schedule!r}"
        )
    if _first_parameter(schedule) == "plan":
        name = getattr(schedule, "__name__", "it")
        raise ScheduleError(f"{name} makes a schedule of a plan: pass its result, {name}(plan, ...)")
    result: Schedule = schedule
    return result


def named_schedules(
    plan: Plan, costs: Costs, memory_limit: float | None, *, searched: bool = True
) -> Iterator[tuple[str, Schedule]]:
    """Yield the named schedules, those that order by costs or under a limit (in microbatches) for these.

    Whether one fits the plan shows when it is lowered.

    Args:
        searched: whether to search orders too, which have the halves of backwards; of a large plan none is.
    """
    from fpipe.schedules.catalogue import CATALOGUE  # late, as above

    searched = searched and plan.stages * plan.microbatches <= _MOST_SEARCHED
    for name, entry in CATALOGUE.items():
        if entry.limited and not searched:
            continue
        try:
            yield name, entry.schedule(plan, costs, memory_limit)
        except ScheduleError:
            continue


def peaked(lengths: Sequence[float]) -> list[int]:
    """Return the numbers of microbatches with the shortest at both ends, and the longest in the middle.

    Sorted by length, every second one comes in ascending order, then the others descending.
    """
    ascending = sorted(range(len(lengths)), key=lengths.__getitem__)
    return ascending[::2] + ascending[1::2][::-1]


def _first_parameter(function: Any) -> str | None:
    try:
        return next(iter(inspect.signature(function).parameters), None)
    except ValueError:  # a callable that is not written in Python
        return None
