"""V-Min, V-Half, and the best order on the V placement under any memory limit."""

from collections.abc import Iterator
from math import inf

from fpipe.costs import ROUNDING, Costs
from fpipe.effects import Effect
from fpipe.errors import ScheduleError
from fpipe.plan import Plan, Schedule
from fpipe.programs.residence import Residence
from fpipe.schedules.annealing import check_effort
from fpipe.schedules.requirements import a_v
from fpipe.schedules.table import from_table
from fpipe.schedules.v_orders import half, half_orders, min_orders, third
from fpipe.schedules.v_search import annealed_blocks, best_order, ordered
from fpipe.schedules.within_bytes import whole_microbatches, within_bytes
from fpipe.schedules.work import Room, Words, Work, table


def v_half(rank: int, plan: Plan, *, costs: Costs | None = None) -> Iterator[Effect]:
    """V-Half on `Placement.v(ranks)` (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory").

    Args:
        costs: order for these; by default all passes take the same time, and transfers take none.

    Half the memory of 1F1B and of ZB-V: peak (p+2)//2 microbatches, or m. Cost where F = B = W = 1 for each chunk,
    c = 0 and m > p: the lower bound for this peak (figure 13), max(6m, 6m + 6p - 6((p+2)//2) - 1). Under other costs
    the order is at least as fast as the default order, within the same peak.

    Raises:
        ScheduleError: another placement.

    >>> from fpipe import Placement, Plan, draw
    >>> print(draw(v_half, Plan(Placement.v(3), 3)))
    rank 0  F0a F1a .   .   .   F0b I0b F2a W0b F1b I1b W1b I0a W0a .   F2b I2b I1a W2b W1a .   I2a W2a
    rank 1  .   F0a .   .   F0b F1a .   I0b F1b W0b F2a I0a I1b W0a F2b W1b I1a I2b W1a W2b I2a W2a
    rank 2  .   .   F0a F0b .   .   F1a F1b I0b I0a W0b F2a W0a F2b I1b I1a W1b W1a I2b I2a W2b W2a
    """
    return ordered("v_half", rank, plan, costs, half_orders, half(plan.ranks))


def v_min(rank: int, plan: Plan, *, costs: Costs | None = None) -> Iterator[Effect]:
    """V-Min on `Placement.v(ranks)` (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory").

    Args:
        costs: order for these; by default all passes take the same time, and transfers take none.

    A third of the memory of 1F1B and of ZB-V: peak (p+4)//3 microbatches, or m. Cost where F = B = W = 1 for each
    chunk, c = 0 and m > p: the lower bound for this peak (figure 13), max(6m, 6m + 6p - 6((p+4)//3) - 1). Where passes
    differ, ranks wait for each other throughout; V-Half suffers less. Under other costs the order is at least as fast
    as the default order, within the same peak.

    Raises:
        ScheduleError: another placement.

    >>> from fpipe import Placement, Plan, draw
    >>> print(draw(v_min, Plan(Placement.v(3), 3)))
    rank 0  F0a F1a F2a .   .   F0b I0b W0b .   .   F1b I0a I1b W0a W1b F2b I2b I1a W2b W1a .   I2a W2a
    rank 1  .   F0a F1a F2a F0b .   .   I0b W0b F1b I0a W0a .   I1b F2b W1b I1a I2b W1a W2b I2a W2a
    rank 2  .   .   F0a F0b F1a F1b .   .   I0b I0a W0b F2a W0a F2b I1b I1a W1b W1a I2b I2a W2b W2a
    """
    return ordered("v_min", rank, plan, costs, min_orders, third(plan.ranks))


def v_auto(
    plan: Plan,
    costs: Costs = Costs(),
    memory_limit: float | None = None,
    *,
    memory_limit_bytes: float | None = None,
    resident: Residence | int | None = None,
    effort: float = 1.0,
) -> Schedule:
    """Return the best order found on the V placement under a memory limit, annealed from blocks and named ones.

    Up to eight ranks, and to ZB-V's memory of p microbatches, all lower limits are searched too, whose orders may be as
    fast: it may take seconds.

    Args:
        costs: of stages and transfers.
        memory_limit: the most microbatches in flight on a rank, where a chunk counts half; by default no limit.
        memory_limit_bytes, resident, effort: as of `zb_auto`.

    Raises:
        ScheduleError: another placement, or a limit of less than one microbatch, or in bytes one that no order keeps
            to.

    >>> from fpipe import Placement, Plan, simulate
    >>> plan = Plan(Placement.v(4), 12)
    >>> for limit in 2, 3, 4:
    ...     timeline = simulate(v_auto(plan, memory_limit=limit), plan)
    ...     print(max(timeline.peak_in_flight), timeline.cost)
    2.0 83.0
    3.0 77.0
    4.0 72.0
    """
    a_v("v_auto", plan)
    check_effort(effort)
    limit = inf if memory_limit is None else memory_limit
    if not limit >= 1:
        raise ScheduleError(f"a microbatch that is in flight on both chunks of a rank counts 1: no order holds {limit}")
    if memory_limit_bytes is None:
        return from_table(table(best_order(plan, costs, _chunks(plan, limit), effort).words, plan))

    def order(room: Room) -> Words:
        chunks = _chunks(plan, min(limit, *whole_microbatches(plan, room)))
        whole = best_order(plan, costs, chunks, effort).words
        if memory_limit is not None or room.deferred == room.residuals:
            return whole
        chunks = min(2 * plan.microbatches, *room.fitting(plan, room.residuals))
        return annealed_blocks(Work.of(plan, costs), room, chunks, whole)

    def least() -> Words:
        return best_order(plan, costs, _chunks(plan, 1), effort).words

    return within_bytes(plan, costs, memory_limit_bytes, resident, order, least)


def _chunks(plan: Plan, limit: float) -> int:
    return int(min(2 * limit, 2 * plan.microbatches) + ROUNDING)
