"""The automatic zero-bubble schedule: an order for the costs at hand, under a memory limit."""

from collections.abc import Iterator, Sequence
from functools import partial

from fpipe.costs import Costs
from fpipe.errors import ScheduleError
from fpipe.plan import Plan, Schedule
from fpipe.schedules.list_scheduling import greedy
from fpipe.schedules.table import from_table
from fpipe.schedules.zero_bubble import in_rounds
from fpipe.timelines.simulator import simulate

ROUNDING = 1e-12


def zb_auto(plan: Plan, costs: Costs = Costs(), memory_limit: float | Sequence[float] | None = None) -> Schedule:
    """Return the order of least cost (the largest span of a rank) that heuristics find for these costs and this limit.

    After Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 3.1: forwards ahead up to the limit, then
    forwards and input gradients in turn, and weight gradients where a rank would wait or its memory is full. Several
    rules are tried, and ZB-H1 and ZB-H2 if the limit allows them: the cost is never more than theirs. At unit costs,
    c = 0 and p <= limit <= m it is 3m + max(0, 2p - 1 - limit). Of equal costs, the lower peak wins.

    It also takes several stages on a rank, on any placement without copies; `interleaved_zb` and `zb_v` are orders by
    formula.

    Args:
        costs: of stages and transfers.
        memory_limit: the most microbatches in flight on a rank, or on each; a chunk of v counts 1/v. None: no limit.

    Raises:
        ScheduleError: a limit under 1, costs or limits that don't fit the plan, or a stage with copies.

    >>> from fpipe import Placement, draw
    >>> plan = Plan(Placement.loop(3), 6)
    >>> print(draw(zb_auto(plan, Costs(), memory_limit=4), plan))
    rank 0  F0 F1 F2 F3 .  I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
    rank 1  .  F0 F1 F2 I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
    rank 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5
    """
    costs.check(plan)
    limits = _limits(plan, memory_limit)
    candidates = [*_by_formula(plan, min(limits)), from_table(greedy(plan, costs, limits))]
    timelines = [simulate(schedule, plan, costs) for schedule in candidates]
    enough = min(timeline.cost for timeline in timelines) * (1 + ROUNDING)
    best = min((max(t.peak_in_flight), at) for at, t in enumerate(timelines) if t.cost <= enough)
    return candidates[best[1]]


def _limits(plan: Plan, limit: float | Sequence[float] | None) -> list[float]:
    """Return the most microbatches in flight, for each rank."""
    if any(len(ranks) > 1 for ranks in plan.placement.holders):
        raise ScheduleError(
            f"zb_auto wants stages without copies, not {plan.placement}: take Placement.loop or Placement.v"
            ", or dualpipe for copies"
        )
    each = plan.microbatches if limit is None else limit
    limits = list(each) if isinstance(each, Sequence) else [each] * plan.ranks
    if len(limits) != plan.ranks:
        raise ScheduleError(
            f"memory_limit has {len(limits)} entries, the plan {plan.ranks} ranks: give one number for all "
            "ranks, or one for each"
        )
    for rank, most in enumerate(limits):
        if not most >= 1:
            raise ScheduleError(f"memory_limit is {most} on rank {rank}: at least 1, one whole microbatch in flight")
    return limits


def _by_formula(plan: Plan, limit: float) -> Iterator[Schedule]:
    """Yield ZB-H1, and the member of its family (up to ZB-H2) that uses all of the memory."""
    low, high = plan.ranks, 2 * plan.ranks - 1
    most = high if limit >= plan.microbatches else int(min(limit, high))
    if plan.stages == plan.ranks and low <= most:
        yield from (partial(in_rounds, limit=peak) for peak in sorted({low, most}))
