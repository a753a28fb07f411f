"""Names as numbers, so that millions of them cost no hashing. No torch.

Of a compute effect the table says the same for every microbatch, save the microbatch itself, as long as no copy
of a stage takes over from another. So it is asked once for each kind, stage and block of microbatches.

A sum of weight gradients has the number of its last microbatch's share: it is there once that one is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import lcm
from typing import Any, NamedTuple

from fpipe.effects import (
    TABLE,
    Activation,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Effect,
    Forward,
    Gradient,
    Name,
    Overlap,
    Recv,
    Reduce,
    Send,
    WeightGradient,
    parts,
)
from fpipe.errors import ScheduleError
from fpipe.plan import Plan

COMPUTE = frozenset({Forward, Backward, BackwardInput, BackwardWeight})
Key = tuple[type, int, int]
Family = tuple[Any, ...]  # a name without its microbatch


class Numbers(NamedTuple):
    """What an effect needs, gives and frees."""

    needs: tuple[int, ...]
    gives: tuple[int, ...]
    frees: tuple[int, ...]


class Numbering:
    """The numbers of one plan's names: all microbatches of a family stand next to each other.

    `block` is how many microbatches, from a multiple of it on, run every stage on the same copies.

    >>> from fpipe import Placement
    >>> numbering = Numbering(Plan(Placement.loop(2), 4))
    >>> numbering.of(Forward(0, 3))
    (Numbers(needs=(), gives=(0, 4), frees=()), 3)
    >>> [numbering.name(0 + 3), numbering.name(4 + 3)]
    [Activation(stage=0, microbatch=3), Residuals(stage=0, microbatch=3)]
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.block = plan.microbatches // lcm(*map(len, plan.placement.holders))
        self._first: dict[Family, int] = {}
        self._rows: dict[Key, Numbers] = {}

    def number(self, name: Any) -> int:
        """A name's number."""
        kind = type(name)
        if kind is Gradient:
            family: Family = kind, name.stage, name.consumer
        elif kind is WeightGradient:
            return self._start((kind, name.stage, name.rank)) + self._last(name)
        else:
            family = kind, name.stage
        first = self._first.get(family)
        return (self._start(family) if first is None else first) + name.microbatch  # type: ignore[no-any-return]

    def name(self, number: int) -> Name:
        """The name that has a number."""
        family, microbatch = divmod(number, self.plan.microbatches)
        kind, *fields = list(self._first)[family]
        found: Name = kind(*fields) if kind is WeightGradient else kind(*fields, microbatch)
        return found

    def key(self, effect: Compute) -> Key:
        """What effects have in common that differ in the microbatch alone."""
        return type(effect), effect.stage, effect.microbatch // self.block

    def of(self, effect: Any) -> tuple[Numbers, int]:
        """The numbers of what an effect needs, gives and frees, and what is still to be added to each."""
        if type(effect) in COMPUTE:
            key = self.key(effect)
            row = self._rows.get(key)
            if row is None:
                row = self._rows[key] = self._numbers(effect, self._base)
            return row, effect.microbatch
        if type(effect) is Overlap:
            both = [_shifted(*self.of(part)) for part in parts(effect)]
            return Numbers(*(first + second for first, second in zip(*both, strict=True))), 0
        if type(effect) is Send or type(effect) is Recv:
            number = (self.number(effect.value),)
            return (Numbers(number, (), ()) if type(effect) is Send else Numbers((), number, ())), 0
        return self._numbers(effect, self.number), 0

    def _numbers(self, effect: Effect, number: Callable[[Name], int]) -> Numbers:
        row = TABLE[type(effect)]
        return Numbers(*(tuple(map(number, names(effect, self.plan))) for names in (row.needs, row.gives, row.frees)))

    def _base(self, name: Name) -> int:
        return self.number(name) // self.plan.microbatches * self.plan.microbatches

    def _start(self, family: Family) -> int:
        return self._first.setdefault(family, len(self._first) * self.plan.microbatches)

    def _last(self, name: WeightGradient) -> int:
        return self.plan.microbatches_of(name.stage, name.rank)[-1]


def _shifted(numbers: Numbers, shift: int) -> Numbers:
    return Numbers(*(tuple(n + shift for n in column) for column in numbers))


def check_names(effects: Iterable[Any], rank: int, plan: Plan) -> None:
    """Refuse what is no effect, and what names stages, microbatches or ranks that the plan doesn't have."""
    stages, microbatches = range(plan.stages), range(plan.microbatches)
    for effect in effects:
        kind, problem = type(effect), ""
        if kind in COMPUTE:
            if not (_in(stages, effect.stage) and _in(microbatches, effect.microbatch)):
                problem = f"there are stages 0 to {stages[-1]} and microbatches 0 to {microbatches[-1]}"
        elif kind is Send or kind is Recv:
            if effect.rank == rank or not _in(range(plan.ranks), effect.rank):
                problem = f"the peer must be another rank, 0 to {plan.ranks - 1}"
            elif not _exists(effect.value, plan, stages, microbatches):
                problem = "the plan has no such value"
        elif kind is Overlap:
            if type(effect.forward) is not Forward or type(effect.backward) not in (Backward, BackwardInput):
                problem = "it overlaps a Forward with a Backward or a BackwardInput"
            else:
                check_names(parts(effect), rank, plan)
        elif kind is Reduce:
            if not _in(stages, effect.stage):
                problem = f"there are stages 0 to {stages[-1]}"
        elif kind not in TABLE:
            raise ScheduleError(f"rank {rank} yields {effect!r}, which is no effect: see fpipe.effects.TABLE")
        if problem:
            raise ScheduleError(f"rank {rank} yields {effect}, but {problem}")


def _exists(value: Any, plan: Plan, stages: range, microbatches: range) -> bool:
    kind = type(value)
    if kind not in (Activation, Gradient, WeightGradient) or not _in(stages, value.stage):
        return False
    if kind is WeightGradient:
        return value.rank in plan.placement.holders[value.stage]
    return _in(microbatches, value.microbatch) and (kind is Activation or value.consumer in plan.consumers(value.stage))


def _in(numbers: range, number: object) -> bool:
    """A range holds 1.0 too, which then is no index."""
    return (type(number) is int or hasattr(number, "__index__")) and number in numbers
