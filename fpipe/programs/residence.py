"""The pass for sharded parameters: when those of each stage are gathered and released. No torch.

Where the parameters of a stage are sharded over the replicas, they are whole on a rank from a `Gather` to a `Release`.
A rank has room for some stages at a time. Which of them to release when another is needed is the question of paging:
the one that is needed again last (Belady, "A study of replacement algorithms", IBM Systems Journal 1966) takes the
fewest gathers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

from fpipe._format import format_bytes
from fpipe.costs import Costs
from fpipe.effects import Effect, Gather, Parameters, Release
from fpipe.errors import ScheduleError
from fpipe.errors.arguments import checked_class
from fpipe.programs.program import Program, Programs, plan_of
from fpipe.tables import LANES


@checked_class()
@dataclass(frozen=True)
class Residence:
    """The room of a rank for sharded stages that are whole, and the time of their gathers.

    Args:
        limit: how many stages, or with `sizes` how many bytes, may be whole at a time; None for all.
        sizes: bytes of each stage's whole parameters; by default each stage counts 1. With stages of different sizes
            the number of gathers is not always the least.
        costs: post a gather as late as still hides it behind the rank's own compute, if these are the times of effects
            and gathers. By default it is posted as early as there is room.

    Raises:
        ScheduleError: the limit is not positive, or a size is no number of bytes.

    >>> Residence(8e9, sizes=[5e9, 2e9, 2e9, 4e9])
    Residence(limit=8000000000.0, sizes=(5000000000.0, 2000000000.0, 2000000000.0, 4000000000.0), costs=None)
    """

    limit: float | None = None
    sizes: Sequence[float] = ()
    costs: Costs | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.sizes))
        if self.limit is not None and not self.limit > 0:
            raise ScheduleError(f"resident must be at least 1 stage, or some bytes, not {self.limit!r}")
        for stage, size in enumerate(self.sizes):
            if not 0 <= size < inf:
                raise ScheduleError(f"the size of stage {stage} must be a number of bytes, not {size!r}")

    def __str__(self) -> str:
        if self.limit is None:
            return "all"
        return format_bytes(self.limit) if self.sizes else f"{self.limit:g}"

    def size(self, stage: int) -> float:
        return self.sizes[stage] if self.sizes else 1.0


def residence(programs: Programs, resident: Residence | int = Residence()) -> Programs:
    """Add `Gather` and `Release` to complete programs, with the fewest gathers for the room that a rank has.

    Gathers of one rank are posted in the order of their first uses, each so early that it travels beside the compute
    before its use.

    Args:
        resident: the room of each rank; a number counts stages.

    Raises:
        ScheduleError: one effect needs more than the limit, or there are not as many sizes as stages.
    """
    resident = resident if isinstance(resident, Residence) else Residence(resident)
    plan = plan_of(programs)
    plan = replace(plan, gathered=frozenset(range(plan.stages)))
    if resident.sizes and len(resident.sizes) != plan.stages:
        raise ScheduleError(f"there are sizes of {len(resident.sizes)} stages, the plan has {plan.stages}")
    if resident.costs is not None:
        resident.costs.check(plan)
        resident = replace(resident, costs=resident.costs.over(plan))
    gathering = {rank: replace(program, plan=plan) for rank, program in programs.items()}
    return {rank: replace(program, effects=tuple(_inserted(program, resident))) for rank, program in gathering.items()}


def _inserted(program: Program, resident: Residence) -> Iterator[Effect]:
    gathers, after = _moves(program, resident)
    before = defaultdict[int, list[int]](list)
    for gather in gathers if resident.costs is None else _ahead(program, gathers, resident.costs):
        before[gather.at].append(gather.stage)
    for at, effect in enumerate(program):
        yield from (Gather(stage) for stage in before[at])
        yield effect
        yield from (Release(stage) for stage in after[at])


@dataclass(frozen=True)
class _Posted:
    """A gather that is posted before effect number `at`, for the effect number `use`."""

    stage: int
    at: int
    use: int


def _ahead(program: Program, gathers: Sequence[_Posted], costs: Costs) -> list[_Posted]:
    """Return the gathers posted as late as hides them, but not before there is room.

    A rank's gathers travel one after the other, so a late one may not hold up those behind it: go backwards. Effects
    with a lane of their own, such as scatters, don't occupy the rank and hide no gather.
    """
    table = program.table
    ends = accumulate(
        0.0 if table.effects[type(effect)].track in LANES else costs.time(effect, table) for effect in program
    )
    starts, posted, free = [0.0, *ends], list[_Posted](), inf
    for gather in reversed(gathers):
        free = min(free, starts[gather.use]) - costs.time(Gather(gather.stage), table)
        latest = min(gather.use, bisect_right(starts, free) - 1)
        posted.append(replace(gather, at=max(gather.at, latest)))
    return posted[::-1]


def _moves(program: Program, resident: Residence) -> tuple[list[_Posted], Mapping[int, list[int]]]:
    """Return the gathers as early as there is room, and after each effect the stages that are released."""
    uses = [(at, stages) for at, effect in enumerate(program) if (stages := _stages_read(program, effect))]
    coming = defaultdict[int, deque[int]](deque)
    for at, stages in uses:
        for stage in stages:
            coming[stage].append(at)
    gathers, after, size = list[_Posted](), defaultdict[int, list[int]](list), resident.size
    limit = inf if resident.limit is None else resident.limit
    whole, room, free_since = dict[int, int](), limit, 0  # stage -> its last use; the room that is left, and since when
    for at, stages in uses:
        for stage in stages:
            while stage not in whole and room < size(stage):
                others = (other for other in whole if other not in stages)
                last = max(others, key=lambda other: coming[other][0] if coming[other] else inf, default=None)
                if last is None:
                    raise _too_large(program, at, sum(map(size, stages)), resident)
                used = whole.pop(last)
                after[used].append(last)
                room, free_since = room + size(last), max(free_since, used + 1)
            if stage not in whole:
                gathers.append(_Posted(stage, free_since, at))
                room -= size(stage)
        for stage in stages:
            whole[stage] = at
            coming[stage].popleft()
    for stage, used in whole.items():
        after[used].append(stage)
    return gathers, after


def _stages_read(program: Program, effect: Effect) -> list[int]:
    """Return the stages whose parameters an effect needs."""
    needs = program.table.needs(effect, program.plan)
    return list(dict.fromkeys(name.stage for name in needs if type(name) is Parameters))


def _too_large(program: Program, at: int, needed: float, resident: Residence) -> ScheduleError:
    size = format_bytes(needed) if resident.sizes else f"the parameters of {needed:g} stages"
    return ScheduleError(
        f"rank {program.rank} yields {program.effects[at]}, which needs {size} whole at once, and the limit is "
        f"{resident}: allow more, or take a schedule without it"
    )
