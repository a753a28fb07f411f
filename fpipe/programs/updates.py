"""Add the optimizer's updates to programs. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fpipe.effects import Effect, Reduce, Update
from fpipe.errors.arguments import checked
from fpipe.plan import Plan, Schedule
from fpipe.programs.program import Program, Programs
from fpipe.programs.schedules import as_schedule


@dataclass(frozen=True)
class Updating:
    """A schedule to whose programs lowering adds updates."""

    schedule: Schedule

    def __call__(self, rank: int, plan: Plan) -> Iterator[Effect]:
        return self.schedule(rank, plan)


@checked("schedule")
def updating(schedule: Schedule | str) -> Schedule:
    """Return a schedule with an `Update` of each trained stage, as soon as the stage's gradients are final.

    A rank updates while others may have gradients left. These are the programs of `fpipe.train_step` where an update
    depends on no other rank. Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 4.

    Raises:
        ScheduleError: it is no schedule, nor the name of one.

    >>> from fpipe import Placement, Plan, draw
    >>> print(draw(updating("zb-h1"), Plan(Placement.loop(2), 3)))
    rank 0  F0 F1 .  I0 W0 F2 I1 W1 I2 W2 U
    rank 1  .  F0 I0 F1 I1 W0 F2 I2 W1 W2 U
    """
    return Updating(as_schedule(schedule))


def update(programs: Programs) -> Programs:
    """Add `Update` after each stage's `Reduce`."""
    if any(isinstance(effect, Update) for program in programs.values() for effect in program):
        return programs
    return {rank: replace(program, effects=tuple(_updated(program))) for rank, program in programs.items()}


def _updated(program: Program) -> Iterator[Effect]:
    for effect in program:
        yield effect
        if isinstance(effect, Reduce):
            yield Update(effect.stage)
