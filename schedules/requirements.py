"""The placements that schedules are for: what each refuses, and what would do. No torch."""

from fpipe.errors import ScheduleError
from fpipe.plan import Placement, Plan


def one_stage(schedule: str, rank: int, plan: Plan, otherwise: str) -> int:
    """The only stage of a rank.

    Args:
        otherwise: schedules for several chunks, for the error.
    """
    stage, *more = plan.stages_on(rank)
    if more or len(plan.placement.holders[stage]) > 1:
        raise ScheduleError(
            f"{schedule} wants one stage on each rank and no copies, not {plan.placement}: "
            f"take Placement.loop({plan.ranks}), or {otherwise} for several chunks"
        )
    return stage


def a_loop(schedule: str, plan: Plan) -> None:
    """Refuse another placement than `Placement.loop(ranks, chunks)`."""
    if plan.placement != Placement.loop(plan.ranks, chunks=len(plan.stages_on(0))):
        raise ScheduleError(f"{schedule} wants Placement.loop({plan.ranks}, chunks), not {plan.placement}")


def a_v(schedule: str, plan: Plan) -> None:
    """Refuse another placement than `Placement.v(ranks)`."""
    if plan.placement != Placement.v(plan.ranks):
        raise ScheduleError(
            f"{schedule} wants two stages on each rank, down the ranks and back up, not {plan.placement}: "
            f"take Placement.v({plan.ranks})"
        )
