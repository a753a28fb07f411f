"""ZB-V: zero bubble on two chunks of each rank, with the memory of 1F1B."""

from collections.abc import Iterator

from fpipe.costs import Costs
from fpipe.effects import Effect
from fpipe.plan import Plan
from fpipe.schedules.v_orders import zb_v_orders
from fpipe.schedules.v_search import ordered


def zb_v(rank: int, plan: Plan, *, costs: Costs | None = None) -> Iterator[Effect]:
    """ZB-V on `Placement.v(ranks)` (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 6).

    Args:
        costs: order for these; by default all passes take the same time, and transfers take none.

    Cost under the default costs, where m >= 2p - 1: 6m, without a bubble. Peak: p microbatches. Under other costs the
    order is at least as fast as the default order, within the same peak.

    Raises:
        ScheduleError: another placement.

    >>> from fpipe import Placement, Plan, draw
    >>> print(draw(zb_v, Plan(Placement.v(2), 4)))
    rank 0  F0a F1a F2a F0b I0b W0b F1b I1b W1b F3a I0a W0a F2b I2b W2b I1a W1a F3b I3b W3b I2a W2a I3a W3a
    rank 1  .   F0a F0b F1a F1b I0b W0b F2a I0a W0a F2b I1b W1b F3a I1a W1a F3b I2b W2b I2a I3b I3a W2a W3b W3a
    """
    return ordered("zb_v", rank, plan, costs, zb_v_orders, 2 * plan.ranks)
