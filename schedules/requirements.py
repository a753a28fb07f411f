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
        wanted = f"one stage on each rank{'' if takes_copies else ' and no copies'}"
        raise ScheduleError(
            f"{schedule} wants {wanted}, not {plan.placement}: take Placement.loop({plan.ranks}), or "
            f"{_for_copies(plan) or f'{otherwise} for several chunks'}"
        )
    return stage


def _for_copies(plan: Plan) -> str:
    """Return which schedules take a placement in which stages have copies; nothing where none has."""
    holders = plan.placement.holders
    if all(len(ranks) == 1 for ranks in holders):
        return ""
    if plan.slices > 1:
        return "gpipe for copies and slices"
    if plan.ranks % 2 == 0 and plan.placement == Placement.both_ways(plan.ranks):
        return "dualpipe for both ways"
    alone = all(len(plan.stages_on(rank)) == 1 for rank in range(plan.ranks))
    return "one_f_one_b, gpipe or zb_auto for copies" if alone else "gpipe or zb_auto for copies and several chunks"


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
