"""One rank's complete effects, and those of all ranks. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fpipe.effects import Effect
from fpipe.errors import ScheduleError
from fpipe.plan import Plan


@dataclass(frozen=True)
class Program:
    """One rank's complete effects, communication included: what lowering returns and handlers replay."""

    plan: Plan
    rank: int
    effects: tuple[Effect, ...]

    def __len__(self) -> int:
        return len(self.effects)

    def __iter__(self) -> Iterator[Effect]:
        return iter(self.effects)


Programs = Mapping[int, Program]


def plan_of(programs: Programs) -> Plan:
    """The plan of one program for each rank.

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
