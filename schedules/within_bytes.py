"""Orders under a limit in bytes, of all that a rank has in memory. No torch.

An engine knows the memory of residuals and deferred values. What else is on a rank (parameters, sums of gradients, the
optimizer's state, values on their way) is read from the account of the order that it makes, and taken off its room.
Where that does not settle, the largest part of the room is found by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import floor

from fpipe._format import format_bytes
from fpipe.costs import ROUNDING, Costs
from fpipe.errors import ScheduleError
from fpipe.plan import Plan, Schedule
from fpipe.programs.footprint import RankBytes, check_limit, footprint
from fpipe.programs.lowering import lower
from fpipe.programs.residence import Residence
from fpipe.schedules.table import from_table
from fpipe.schedules.work import Room, Words, places_of, table

CORRECTIONS, BISECTIONS = 2, 6


def within_bytes(
    plan: Plan, costs: Costs, limit: float, resident: Residence | int | None, order: Callable[[Room], Words]
) -> Schedule:
    """Return the schedule of an engine, so that no rank has more bytes than the limit.

    Args:
        resident: as in `lower`.
        order: the engine.

    Raises:
        ScheduleError: there are no sizes, or no order that keeps to the limit is found.
    """
    check_limit(limit, costs)

    def ordered(limits: Sequence[float]) -> tuple[Schedule, tuple[RankBytes, ...], list[float]]:
        """Return an order within so much of residuals and deferred values, its account, and by how much it exceeds."""
        schedule = from_table(table(order(Room.sized(plan, costs, limits)), plan))
        accounts = footprint(lower(schedule, plan, resident=resident), costs)
        return schedule, accounts, [account.total - limit for account in accounts]

    limits = [limit] * plan.ranks
    ones = [sum(held) for held in _held(plan, Room.sized(plan, costs, limits))]
    _check_one_fits(limit, limits, ones)
    schedule, accounts, excess = ordered(limits)
    fixed = [account.total - account.live for account in accounts]
    for tries in range(CORRECTIONS + 1):
        if max(excess) <= limit * ROUNDING:
            return schedule
        limits = [most - max(0.0, more) for most, more in zip(limits, excess, strict=True)]
        if tries == CORRECTIONS or any(most < one for most, one in zip(limits, ones, strict=True)):
            break
        schedule, _, excess = ordered(limits)
    limits = [limit - other for other in fixed]
    _check_one_fits(limit, limits, ones)
    best: Schedule | None = None
    low, high = 0.0, 1.0  # of the room beyond one microbatch
    for _ in range(BISECTIONS):
        part = (low + high) / 2
        schedule, _, excess = ordered([one + part * (most - one) for one, most in zip(ones, limits, strict=True)])
        if max(excess) <= limit * ROUNDING:
            best, low = schedule, part
        else:
            high = part
    if best is None:
        raise ScheduleError(
            f"no order that was found keeps to {format_bytes(limit)} on a rank: the last one needs "
            f"{format_bytes(max(excess))} more; take memory_limit, in microbatches"
        )
    return best


def _held(plan: Plan, room: Room) -> list[list[float]]:
    """Return the memory of a microbatch on each stage of each rank, if it is as large until its weight gradient."""
    largest, places = max(room.sizes), places_of(plan)
    return [
        [max(room.residuals[n], room.deferred[n]) * largest for n, place in enumerate(places) if place.rank == rank]
        for rank in range(plan.ranks)
    ]


def _check_one_fits(limit: float, limits: Sequence[float], ones: Sequence[float]) -> None:
    for rank, (most, one) in enumerate(zip(limits, ones, strict=True)):
        if most <= 0 or most * (1 + ROUNDING) < one:
            other = f", and {format_bytes(limit - most)} for parameters, gradients and the optimizer" * (most < limit)
            raise ScheduleError(
                f"memory_limit_bytes is {format_bytes(limit)}: rank {rank} needs {format_bytes(one)} for a microbatch"
                f"{other}; give it more than {format_bytes(limit - most + one)}, or take more ranks or shard parameters"
            )


def whole_microbatches(plan: Plan, room: Room) -> list[float]:
    """Return by rank how many microbatches fit the room, whole until their weight gradients; a chunk counts 1/v."""
    counts = []
    for most, held in zip(room.limits, _held(plan, room), strict=True):
        chunks = floor(most * (1 + ROUNDING) / max(held)) if max(held) else plan.microbatches * len(held)
        counts.append(min(plan.microbatches, max(len(held), chunks) / len(held)))
    return counts
