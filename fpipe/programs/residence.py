"""The pass for sharded parameters: when those of each stage are gathered and released. No torch.

Where the parameters of a stage are sharded over the replicas, they are whole on a rank from a `Gather` to a `Release`.
A rank has room for some stages at a time. Which of them to release when another is needed is the question of paging:
the one that is needed again last (Belady, "A study of replacement algorithms", IBM Systems Journal 1966) takes the
fewest gathers.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf

from fpipe.effects import Effect, Gather, Parameters, Release
from fpipe.errors import ScheduleError
from fpipe.programs.program import Program, Programs, plan_of


def residence(programs: Programs, limit: float | None = None, sizes: Sequence[float] = ()) -> Programs:
    """Add `Gather` and `Release` to complete programs, with the fewest gathers for the room that a rank has.

    A gather is posted as early as there is room, so that it travels beside the compute before its first use. Gathers
    of one rank are posted in the order of their first uses.

    Args:
        limit: how many stages, or with `sizes` how many bytes, may be whole at a time on a rank; None for all. With
            stages of different sizes the number of gathers is not always the least.
        sizes: bytes of each stage's parameters; by default each stage counts 1.

    Raises:
        ScheduleError: one effect needs more than the limit.
    """
    plan = plan_of(programs)
    plan = replace(plan, gathered=frozenset(range(plan.stages)))
    if sizes and len(sizes) != plan.stages:
        raise ScheduleError(f"there are sizes of {len(sizes)} stages, the plan has {plan.stages}")
    gathering = {rank: replace(program, plan=plan) for rank, program in programs.items()}
    return {
        rank: replace(program, effects=tuple(_inserted(program, inf if limit is None else limit, sizes)))
        for rank, program in gathering.items()
    }


def _inserted(program: Program, limit: float, sizes: Sequence[float]) -> Iterator[Effect]:
    before, after = _moves(program, limit, sizes)
    for at, effect in enumerate(program):
        yield from (Gather(stage) for stage in before[at])
        yield effect
        yield from (Release(stage) for stage in after[at])


Moves = Mapping[int, list[int]]
"""The index of an effect -> the stages that are gathered before it, or released after it."""


def _moves(program: Program, limit: float, sizes: Sequence[float]) -> tuple[Moves, Moves]:
    uses = [(at, stages) for at, effect in enumerate(program) if (stages := _stages_read(program, effect))]
    coming = defaultdict[int, deque[int]](deque)
    for at, stages in uses:
        for stage in stages:
            coming[stage].append(at)
    before, after = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    whole, room, free_since = dict[int, int](), limit, 0  # stage -> its last use; the room that is left, and since when

    def size(stage: int) -> float:
        return sizes[stage] if sizes else 1.0

    for at, stages in uses:
        for stage in stages:
            while stage not in whole and room < size(stage):
                others = (other for other in whole if other not in stages)
                last = max(others, key=lambda other: coming[other][0] if coming[other] else inf, default=None)
                if last is None:
                    raise _too_large(program, at, sum(map(size, stages)), limit)
                used = whole.pop(last)
                after[used].append(last)
                room, free_since = room + size(last), max(free_since, used + 1)
            if stage not in whole:
                before[free_since].append(stage)
                room -= size(stage)
        for stage in stages:
            whole[stage] = at
            coming[stage].popleft()
    for stage, used in whole.items():
        after[used].append(stage)
    return before, after


def _stages_read(program: Program, effect: Effect) -> list[int]:
    """Return the stages whose parameters an effect needs."""
    needs = program.table.needs(effect, program.plan)
    return list(dict.fromkeys(name.stage for name in needs if type(name) is Parameters))


def _too_large(program: Program, at: int, needed: float, limit: float) -> ScheduleError:
    return ScheduleError(
        f"rank {program.rank} yields {program.effects[at]}, which needs the parameters of {needed:g} at once, and the "
        f"limit is {limit:g}: allow more, or take a schedule without it"
    )
