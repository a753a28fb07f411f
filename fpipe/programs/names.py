"""Check that the stages, microbatches, ranks and values of effects are in the plan. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import Any

from fpipe.effects import Overlap, parts
from fpipe.errors import ScheduleError
from fpipe.plan import Plan
from fpipe.tables import BACKWARD, FORWARD, Table, fields_of


def check_names(effects: Iterable[Any], rank: int, plan: Plan, table: Table) -> None:
    """Raise ScheduleError for a non-effect, or for a stage, microbatch, rank or value outside the plan."""
    for effect in effects:
        kind = type(effect)
        row = table.effects.get(kind)
        if row is None:
            raise ScheduleError(
                f"rank {rank} yields {effect!r}, which is no effect of the table: for one of your own, pass "
                "effects=fpipe.tables.TABLE.extended({its class: Row(...)})"
            )
        if kind is Overlap:
            forward, backward = (table.effects.get(type(part)) for part in parts(effect))
            if not (forward and backward and forward.work == FORWARD and backward.work & BACKWARD):
                raise refused(rank, effect, "it overlaps a Forward with a Backward, or a half of one")
            check_names(parts(effect), rank, plan, table)
        elif row.track in ("send", "receive"):
            if effect.rank == rank or not _in(plan.ranks, effect.rank):
                raise refused(rank, effect, f"the peer must be another rank, 0 to {plan.ranks - 1}")
            if not _exists(effect.value, plan, table):
                raise refused(rank, effect, "the plan has no such value")
        elif not fits(effect, plan):
            limits = (
                f"{name}{'es' if name.endswith('h') else 's'} 0 to {plan.limits[name] - 1}"
                for name in fields_of(kind)
                if name in plan.limits and (name != "slice" or effect.slice or plan.slices > 1)
            )
            raise refused(rank, effect, f"there are {' and '.join(limits)}")


def refused(rank: int, effect: Any, problem: str) -> ScheduleError:
    """Return the error of an effect that a rank must not yield."""
    return ScheduleError(f"rank {rank} yields {effect}, but {problem}")


def _exists(value: Any, plan: Plan, table: Table) -> bool:
    row = table.values.get(type(value))
    return row is not None and row.producer is not None and fits(value, plan) and row.exists(value, plan)


def fits(named: Any, plan: Plan) -> bool:
    """Whether the stages, microbatches and ranks in an effect or a value, and in values within it, are the plan's."""
    limits = plan.limits
    for name in named.__dataclass_fields__:
        part, limit = getattr(named, name), limits.get(name)
        if limit is None:
            if is_dataclass(part) and not fits(part, plan):
                return False
        elif type(part) is int:
            if not 0 <= part < limit:
                return False
        elif not _in(limit, part):
            return False
    return True


def _in(limit: int, number: object) -> bool:
    """Whether a value is an integer index below a limit; a float is not, even if it equals one."""
    return hasattr(number, "__index__") and 0 <= number < limit  # type: ignore[operator]
