"""Check the placement that a schedule needs; the errors suggest one that fits. No torch."""

from fpipe.errors import ScheduleError
from fpipe.plan import Placement, Plan


def one_stage(schedule: str, rank: int, plan: Plan, otherwise: str, *, takes_copies: bool = False) -> int:
    """Return the only stage of a rank.

    Args:
        otherwise: schedules for several chunks, for the error.
        takes_copies: whether the stage may have copies.

    Raises:
        ScheduleError: the rank has several stages, or the stage has copies where it may have none.
    """
    stage, *more = plan.stages_on(rank)
    if more or (len(plan.ranks_of(stage)) > 1 and not takes_copies):
        raise ScheduleError(
            f"{schedule} wants one stage on each rank{'' if takes_copies else ' and no copies'}, not {plan.placement}: "
            f"take Placement.loop({plan.ranks}), or {otherwise} for several chunks"
        )
    return stage


def a_loop(schedule: str, plan: Plan) -> None:
    """Raise ScheduleError unless the placement is `Placement.loop(ranks, chunks)`."""
    if plan.placement != Placement.loop(plan.ranks, chunks=len(plan.stages_on(0))):
        raise ScheduleError(f"{schedule} wants Placement.loop({plan.ranks}, chunks), not {plan.placement}")


def a_v(schedule: str, plan: Plan) -> None:
    """Raise ScheduleError unless the placement is `Placement.v(ranks)`."""
    if plan.placement != Placement.v(plan.ranks):
        raise ScheduleError(
            f"{schedule} wants two stages on each rank, down the ranks and back up, not {plan.placement}: "
            f"take Placement.v({plan.ranks})"
        )
