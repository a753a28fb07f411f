"""Orders under a limit in bytes, of all that a rank has in memory. No torch.

An engine knows the memory of residuals and deferred values. What else is on a rank (parameters, sums of gradients, the
optimizer's state, values on their way) is read from the account of the order that it makes, and taken off its room.
Where that does not settle, the largest part of the room is found by bisection. Where no part is small enough, the order
with one microbatch in flight is left: no limit that it keeps is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import floor
from typing import NamedTuple

from fpipe._format import format_bytes
from fpipe.costs import ROUNDING, Costs
from fpipe.effects import Compute
from fpipe.errors import ScheduleError
from fpipe.plan import Plan, Schedule
from fpipe.programs.footprint import RankBytes, check_limit, footprint, sums_at_ends
from fpipe.programs.lowering import lower
from fpipe.programs.program import Programs
from fpipe.programs.residence import Residence
from fpipe.schedules.table import from_table
from fpipe.schedules.work import Room, Words, places_of, table

CORRECTIONS, BISECTIONS = 2, 6


def within_bytes(
    plan: Plan,
    costs: Costs,
    limit: float,
    resident: Residence | int | None,
    order: Callable[[Room], Words],
    least: Callable[[], Words],
) -> Schedule:
    """Return the schedule of an engine, so that no rank has more bytes than the limit.

    Args:
        resident: as in `lower`.
        order: the engine.
        least: the same, with one microbatch in flight on a rank.

    Raises:
        ScheduleError: there are no sizes, or no order that keeps to the limit is found.
    """
    check_limit(limit, costs)
    whole = [limit] * plan.ranks
    room = Room.sized(plan, costs, whole)
    _check_residuals_fit(plan, room, limit)
    ones = [sum(held) for held in _held(plan, room)]

    def candidate(words: Words) -> _Candidate:
        schedule = from_table(table(words, plan))
        programs = lower(schedule, plan, resident=resident)
        accounts = footprint(programs, costs)
        return _Candidate(schedule, programs, accounts, [account.total - limit for account in accounts])

    def within(limits: Sequence[float]) -> _Candidate:
        """Return an order within so much of residuals and deferred values."""
        return candidate(order(Room.sized(plan, costs, limits)))

    def keeps(result: _Candidate) -> bool:
        return max(result.excess) <= limit * ROUNDING

    def take_one(limits: Sequence[float]) -> bool:
        return all(one <= most * (1 + ROUNDING) for one, most in zip(ones, limits, strict=True))

    def corrected(result: _Candidate) -> _Candidate | None:
        """Take what orders exceed the limit by off their room, a few times."""
        limits = whole
        for _ in range(CORRECTIONS):
            limits = [most - max(0.0, more) for most, more in zip(limits, result.excess, strict=True)]
            if keeps(result) or not take_one(limits):
                break
            result = within(limits)
        return result if keeps(result) else None

    def bisected(limits: Sequence[float]) -> _Candidate | None:
        """Find the largest part of the room beyond one microbatch."""
        best, low, high = None, 0.0, 1.0
        for _ in range(BISECTIONS):
            part = (low + high) / 2
            result = within([one + part * (most - one) for one, most in zip(ones, limits, strict=True)])
            if keeps(result):
                best, low = result, part
            else:
                high = part
        return best

    best: _Candidate | None = None
    if take_one(whole):
        first = within(whole)
        best, limits = corrected(first), [limit - other for other in first.beside(costs)]
        if best is None and take_one(limits):
            best = bisected(limits)
    last = candidate(least()) if best is None else best
    if not keeps(last):
        rank = last.excess.index(max(last.excess))
        account = last.accounts[rank]
        raise ScheduleError(
            f"no order that was found keeps to {format_bytes(limit)} on a rank: the least one needs "
            f"{format_bytes(account.total)} on rank {rank}: {account}; set memory_limit_bytes to that, or take "
            "more ranks or shard parameters"
        )
    return last.schedule


class _Candidate(NamedTuple):
    """An order with its programs, their account, and by how much it exceeds the limit on each rank."""

    schedule: Schedule
    programs: Programs
    accounts: tuple[RankBytes, ...]
    excess: list[float]

    def beside(self, costs: Costs) -> list[float]:
        """Return by rank the most bytes beside live values while a microbatch is in flight.

        Sums that come from copies may come when none is.
        """
        beside = []
        for rank, account in enumerate(self.accounts):
            program = self.programs[rank]
            last = max((at for at, effect in enumerate(program) if isinstance(effect, Compute)), default=0)
            sums = max(sums_at_ends(program, costs)[:last], default=0.0)
            beside.append(account.parameters + account.optimizer + sums)
        return beside


def _held(plan: Plan, room: Room) -> list[list[float]]:
    """Return the memory of a microbatch on each stage of each rank, if it is as large until its weight gradient."""
    largest, places = max(room.sizes), places_of(plan)
    return [
        [max(room.residuals[n], room.deferred[n]) * largest for n, place in enumerate(places) if place.rank == rank]
        for rank in range(plan.ranks)
    ]


def _check_residuals_fit(plan: Plan, room: Room, limit: float) -> None:
    """Raise ScheduleError if the residuals of a microbatch exceed the limit, so that no order keeps to it."""
    for place, residuals in zip(places_of(plan), room.residuals, strict=True):
        needed = residuals * max(room.sizes[m] for m in plan.microbatches_of(*place))
        if needed > limit * (1 + ROUNDING):
            raise ScheduleError(
                f"memory_limit_bytes is {format_bytes(limit)}: rank {place.rank} needs {format_bytes(needed)} for a "
                f"microbatch; give it more than {format_bytes(needed)}, or take more ranks or shard parameters"
            )


def whole_microbatches(plan: Plan, room: Room) -> list[float]:
    """Return by rank how many microbatches fit the room, whole until their weight gradients; a chunk counts 1/v."""
    counts = []
    for most, held in zip(room.limits, _held(plan, room), strict=True):
        chunks = floor(most * (1 + ROUNDING) / max(held)) if max(held) else plan.microbatches * len(held)
        counts.append(min(plan.microbatches, max(len(held), chunks) / len(held)))
    return counts
