"""A schedule from a table of each rank's effects."""

from collections.abc import Iterable, Iterator, Mapping

from fpipe.effects import Effect
from fpipe.errors import ScheduleError
from fpipe.plan import Plan, Schedule


def from_table(table: Mapping[int, Iterable[Effect]]) -> Schedule:
    """Return the schedule that yields each rank's row of a table, rank -> effects.

    Raises:
        ScheduleError: (from the schedule) the table's ranks are not the plan's.

    >>> from fpipe import Placement, Plan, draw
    >>> from fpipe.effects import Backward, Forward
    >>> two = from_table({0: [Forward(0, 0), Backward(0, 0)], 1: [Forward(1, 0), Backward(1, 0)]})
    >>> print(draw(two, Plan(Placement.loop(2), 1)))
    rank 0  F0 .  .  B0
    rank 1  .  F0 B0
    """
    rows = {rank: tuple(effects) for rank, effects in table.items()}

    def table_schedule(rank: int, plan: Plan) -> Iterator[Effect]:
        if sorted(rows) != list(range(plan.ranks)):
            raise ScheduleError(f"the table has ranks {sorted(rows)}, the plan has ranks 0 to {plan.ranks - 1}")
        yield from rows[rank]

    return table_schedule
