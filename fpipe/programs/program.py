"""The complete effects of one rank, and of all ranks. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from fpipe.effects import Effect
from fpipe.errors import ScheduleError
from fpipe.plan import Plan
from fpipe.tables import TABLE, Table


@dataclass(frozen=True)
class Program:
    """The complete effects of one rank, communication included. Lowering returns it and handlers replay it.

    Args:
        table: the table of its effects and values.
    """

    plan: Plan
    rank: int
    effects: tuple[Effect, ...]
    table: Table = field(default=TABLE, compare=False, repr=False)

    def __repr__(self) -> str:
        return f"<Program: {len(self)} effects of rank {self.rank} of {self.plan.ranks}>"

    def __len__(self) -> int:
        return len(self.effects)

    def __iter__(self) -> Iterator[Effect]:
        return iter(self.effects)


Programs = Mapping[int, Program]
Pass = Callable[[Programs], Programs]


def plan_of(programs: Programs) -> Plan:
    """Return the plan of the programs, one for each rank.

    Raises:
        ScheduleError: a rank's program is missing, or is another rank's or another plan's.
    """
    if not programs:
        raise ScheduleError("there are no programs: give one for each rank")
    plan = next(iter(programs.values())).plan
    if sorted(programs) != list(range(plan.ranks)):
        raise ScheduleError(f"there are programs of ranks {sorted(programs)}, the plan has ranks 0 to {plan.ranks - 1}")
    for rank, program in programs.items():
        if program.rank != rank:
            raise ScheduleError(f"the program of rank {rank} is one of rank {program.rank}")
        if program.plan is not plan and program.plan != plan:
            raise ScheduleError(f"rank {rank} has a program for {program.plan}, others have one for {plan}")
    return plan


def table_of(programs: Programs) -> Table:
    """Return the table of the programs, which is the same for all ranks.

    Raises:
        ScheduleError: programs have different tables.
    """
    table = next(iter(programs.values())).table
    if any(program.table != table for program in programs.values()):
        raise ScheduleError("the ranks' programs have different tables of effects: lower them together")
    return table
