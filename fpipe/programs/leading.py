"""The values that may travel before all ranks have begun a step. No torch.

The last rank of a pipeline ends a step late, by the forwards that it waited for at the beginning, and begins the next
one as late. The ranks before it run these forwards meanwhile, so that it has its first values when it comes.
"""

from __future__ import annotations

from collections.abc import Iterator

from fpipe.effects import Send, Value, parts
from fpipe.programs.program import Program, Programs, plan_of
from fpipe.tables import BACKWARD, WEIGHT

Edge = tuple[int, int]


def leading(programs: Programs) -> frozenset[tuple[Value, Edge]]:
    """Return the values that may travel before all ranks have begun a step, with their edges.

    They are the first ones on each edge that are sent before their rank runs a backward, at most as many as the rank
    can run while the last one is late. Programs without weight gradients have none, nor those that gather params: all
    replicas of a rank have to be there for that, before its first forward.

    >>> from fpipe import Placement, Plan, lower, schedules
    >>> for value, edge in sorted(leading(lower(schedules.one_f_one_b, Plan(Placement.loop(3), 4))), key=str):
    ...     print(value, edge)
    Activation(stage=0, microbatch=0) (0, 1)
    Activation(stage=0, microbatch=1) (0, 1)
    Activation(stage=1, microbatch=0) (1, 2)
    Activation(stage=1, microbatch=1) (1, 2)
    """
    plan = plan_of(programs)
    trains = any(_work(program, part) & WEIGHT for program in programs.values() for e in program for part in parts(e))
    if plan.gathered or not trains:
        return frozenset()
    return frozenset(each for program in programs.values() for each in _of_rank(program))


def _of_rank(program: Program) -> Iterator[tuple[Value, Edge]]:
    plan, counts = program.plan, dict[int, int]()
    most = (plan.ranks - 1) * max(len(plan.stages_on(rank)) for rank in range(plan.ranks)) * plan.slices
    for effect in program:
        if any(_work(program, part) & BACKWARD for part in parts(effect)):
            return
        if isinstance(effect, Send):
            counts[effect.rank] = counts.get(effect.rank, 0) + 1
            if counts[effect.rank] <= most:
                yield effect.value, (program.rank, effect.rank)


def _work(program: Program, effect: object) -> int:
    return program.table.effects[type(effect)].work
