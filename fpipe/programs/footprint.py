"""The account of all bytes that a rank has in a step. No torch.

On a rank there are, for the stages that are on it:

- its parameters: the whole ones, or where they are sharded over D replicas a D-th of them; tied ones once, also where
  the stage that has them is on another rank; and where they are cast, as much for each stage in the dtype in which it
  computes;
- the state of the optimizer, in proportion to the former, for the stages that are trained;
- the sums of weight gradients: each is as large as the whole parameters, in the dtype of sums, from the stage's first
  weight gradient to its scatter, and then a D-th of this where the parameters are sharded. A stage has a sum of the
  tied parameters that it uses. A sum that comes from another rank counts from its receive on: of a copy of a stage all,
  else that of the tied parameters which stages of both ranks use;
- the live values (`fpipe.programs.memory`): activations, residuals, deferred values, gradients, the whole parameters of
  sharded stages from their gather to their release, and what stages prepare of their parameters.

The peak is the largest sum of these at the end of an effect, in the order of the program. Not counted are the batch,
temporaries inside a piece, buffers of communication, and the memory of the process itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import sub
from typing import Any, NamedTuple

from fpipe._format import format_bytes, sized
from fpipe.costs import ROUNDING, Costs
from fpipe.effects import Parameters, Recv, Scatter, WeightGradient, parts
from fpipe.errors import ScheduleError
from fpipe.errors.arguments import checked
from fpipe.plan import Plan
from fpipe.programs.interning import Interning
from fpipe.programs.memory import live_bytes
from fpipe.programs.program import Program, Programs, plan_of, table_of
from fpipe.tables import WEIGHT


class RankBytes(NamedTuple):
    """The bytes on a rank when they are most."""

    parameters: float
    optimizer: float
    gradients: float
    live: float

    @property
    def total(self) -> float:
        return sum(self)

    def __str__(self) -> str:
        named = (f"{format_bytes(size)} of {name}" for name, size in self._asdict().items() if size)
        return ", ".join(named).replace("of live", "of live values").replace("of optimizer", "of optimizer state")


@checked()
def footprint(programs: Programs, costs: Costs) -> tuple[RankBytes, ...]:
    """Return the account of each rank at its peak, from the sizes in the costs.

    >>> from fpipe import Costs, Placement, Plan, lower, schedules
    >>> plan = Plan(Placement.loop(ranks=1, chunks=2), microbatches=1, replicas=2)
    >>> costs = Costs(parameters=100, residuals=5)
    >>> footprint(lower(schedules.gpipe, plan, resident=1), costs)
    (RankBytes(parameters=100.0, optimizer=200.0, gradients=150.0, live=100.0),)
    >>> footprint(lower(schedules.gpipe, plan), costs)
    (RankBytes(parameters=200.0, optimizer=400.0, gradients=200.0, live=0.0),)
    """
    lives = live_bytes(programs, costs, Interning(plan_of(programs), table_of(programs)))
    return tuple(_peak(programs[rank], live, costs) for rank, live in enumerate(lives))


def _peak(program: Program, live: Sequence[float], costs: Costs) -> RankBytes:
    parameters, optimizer, gradients = _accounts(program, costs)
    at = max(range(len(live)), key=lambda at: live[at] + gradients[at], default=0)
    return RankBytes(parameters, optimizer, gradients[at] if gradients else 0.0, live[at] if live else 0.0)


def bytes_at_ends(program: Program, live: Iterable[float], costs: Costs) -> list[float]:
    """Return a rank's bytes of all kinds at the end of each effect, from those of its live values."""
    parameters, optimizer, gradients = _accounts(program, costs)
    return [parameters + optimizer + sums + values for sums, values in zip(gradients, live, strict=True)]


def sums_at_ends(program: Program, costs: Costs) -> list[float]:
    """Return the bytes of a rank's sums of weight gradients at the end of each effect."""
    return _accounts(program, costs)[2]


def least_bytes(plan: Plan, costs: Costs) -> list[float]:
    """Return by rank what every program that trains a plan needs, with parameters whole on each replica or sharded.

    It is no more than the account of any of them: of live values it counts gathered parameters alone.
    """
    return [min(_least(way, rank, costs) for way in _ways(plan)) for rank in range(plan.ranks)]


def lasting_bytes(plan: Plan, costs: Costs) -> list[float]:
    """Return by rank the parameters and the optimizer's state, which are there at all times in every such program."""
    trained = [stage for stage in range(plan.stages) if plan.is_trained(stage)]
    return [min(sum(_of_parameters(way, rank, trained, costs)) for way in _ways(plan)) for rank in range(plan.ranks)]


def _ways(plan: Plan) -> list[Plan]:
    """Return the plan with parameters as they are, and with all of them sharded where there are replicas."""
    gathered = replace(plan, gathered=frozenset(range(plan.stages)))
    return [plan, gathered] if plan.replicas > 1 else [plan]


def _least(plan: Plan, rank: int, costs: Costs) -> float:
    """Return the larger of a rank's bytes in the forward of a stage, and at the end of its last weight gradient.

    A sharded stage is whole in the former; at the latter its sum is, and those of others may have been scattered.
    """
    stages = plan.stages_on(rank)
    trained = [stage for stage in stages if plan.is_trained(stage)]
    sums = [costs.at("gradients", Parameters(stage)) for stage in trained]
    scattered = [costs.lasting(size, stage, plan) for stage, size in zip(trained, sums, strict=True)]
    at_end = sum(scattered) + min(map(sub, sums, scattered), default=0.0)
    whole = max((costs.at("gathered", Parameters(stage)) for stage in stages if stage in plan.gathered), default=0.0)
    return sum(_of_parameters(plan, rank, trained, costs)) + max(at_end, whole)


def _accounts(program: Program, costs: Costs) -> tuple[float, float, list[float]]:
    """Return the bytes of a rank's parameters, of its optimizer's state, and of its sums at the end of each effect."""
    plan, gradients, total = program.plan, dict[tuple[int, int], float](), list[float]()
    for change in _sums(program):
        if change is not None:
            stage, rank, is_scattered = change
            whole = costs.sum_bytes(stage, program.rank, plan)
            gradients[stage, rank] = costs.lasting(whole, stage, plan) if is_scattered else whole
        total.append(sum(gradients.values()))
    trained = {stage for stage, rank in gradients if rank == program.rank}
    return *_of_parameters(plan, program.rank, trained, costs), total


def _of_parameters(plan: Plan, rank: int, trained: Collection[int], costs: Costs) -> tuple[float, float]:
    """Return the bytes of a rank's parameters, and of the optimizer's state of its trained stages."""
    stages = plan.stages_on(rank)
    own = [(stage, costs.lasting(costs.at("parameters", Parameters(stage)), stage, plan)) for stage in stages]
    own += [(stage, costs.lasting(size, stage, plan)) for stage, size in _copies(costs, stages)]
    casts = () if costs.gathered is None else stages
    cast = sum(costs.lasting(costs.at("gathered", Parameters(stage)), stage, plan) for stage in casts)
    optimizer = costs.optimizer * sum(size for stage, size in own if stage in trained)
    return sum(size for _, size in own) + cast, optimizer


def _copies(costs: Costs, stages: Sequence[int]) -> Iterator[tuple[int, float]]:
    """Yield the bytes of tied parameters of which a rank has a copy, with the lowest of its stages that uses them."""
    for tied in costs.tied:
        users = [stage for stage in stages if stage in tied.stages]
        if users and users[0] != tied.stages[0]:
            yield users[0], tied.bytes


def _sums(program: Program) -> Iterator[tuple[int, int, bool] | None]:
    """Yield for each effect the stage and the rank of the sum that it begins, adds to or scatters, and whether it does
    the latter."""
    effects, scatters = program.table.effects, program.plan.replicas > 1
    for effect in program:
        if isinstance(effect, Recv) and isinstance(effect.value, WeightGradient):
            yield effect.value.stage, effect.value.rank, scatters
        elif isinstance(effect, Scatter):
            yield effect.stage, effect.rank, True
        else:
            adding: list[Any] = [part for part in parts(effect) if effects[type(part)].work & WEIGHT]
            yield (adding[0].stage, program.rank, False) if adding else None


def check_limit(limit: float | None, costs: Costs | None = None) -> None:
    """Raise ScheduleError if a limit in bytes is not positive, or the costs have no sizes to compare with it."""
    if limit is None:
        return
    if not limit > 0:
        raise ScheduleError(f"memory_limit_bytes must be more than 0 bytes, not {limit!r}")
    if costs is not None and not sized(costs):
        raise ScheduleError(
            "memory_limit_bytes needs costs with sizes: pass costs=, such as those of fpipe.profile, or "
            "Costs(parameters=, residuals=); on the command line --parameters and --residuals"
        )


def enforce(footprints: Sequence[RankBytes], limit: float, costs: Costs) -> None:
    """Raise ScheduleError if a rank needs more than a limit in bytes, or the costs have no sizes."""
    check_limit(limit, costs)
    rank = max(range(len(footprints)), key=lambda rank: footprints[rank].total)
    needed = footprints[rank]
    if needed.total > limit * (1 + ROUNDING):
        raise ScheduleError(
            f"rank {rank} needs {format_bytes(needed.total)}, {format_bytes(needed.total - limit)} more than the limit "
            f"of {format_bytes(limit)}: {needed}; more replicas with sharded parameters, fewer resident stages, or "
            "another schedule (fpipe search --memory-limit-bytes) need less"
        )
