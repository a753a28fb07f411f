"""Map names to integer ids, so that millions of names need no hashing. No torch.

A row of the table whose columns are `uniform` gives the same names for every microbatch of a block, except for the
microbatch in them. It is read once for each kind, stage and block of microbatches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from itertools import chain
from math import lcm
from operator import attrgetter
from typing import Any

from fpipe.effects import Overlap, Recv, Send, parts
from fpipe.errors import ScheduleError
from fpipe.plan import Plan
from fpipe.programs.names import fits
from fpipe.tables import TABLE, Names, Row, Table, fields_of, is_uniform

Ids = tuple[list[int], list[int], list[int]]
_Column = list[tuple[int, int]]  # ids at microbatch 0, and the step to the next microbatch's: 1, or 0 if it has none


class Interning:
    """The ids of one plan's names. The ids of all microbatches of a family are consecutive.

    `block`: a number of microbatches. Those from one multiple of it to the next run each stage on the same copy.

    >>> from fpipe import Placement
    >>> from fpipe.effects import Forward
    >>> interning = Interning(Plan(Placement.loop(2), 4))
    >>> interning.ids(Forward(0, 3))
    ([], [3, 7], [])
    >>> [interning.name(3), interning.name(7)]
    [Activation(stage=0, microbatch=3), Residuals(stage=0, microbatch=3)]
    """

    def __init__(self, plan: Plan, table: Table = TABLE) -> None:
        self.plan, self.table = plan, table
        self.block = plan.microbatches // lcm(*map(len, plan.placement.holders))
        self._first = defaultdict[type, dict[Any, int]](dict)  # by class, and by the fields other than the microbatch
        self._names: list[Callable[[int], Any]] = []  # by family: microbatch -> name
        self._uniform = {kind for kind, row in table.effects.items() if _is_uniform(kind, row)}
        self._columns: dict[tuple[type, int, int], tuple[_Column, ...]] = {}

    def id(self, name: Any) -> int:
        """Return a name's id."""
        kind: Any = type(name)
        families, others = self._first[kind], _others(kind)(name)
        first = families.get(others)
        if first is None:
            first = families[others] = len(self._names) * self.plan.microbatches
            self._names.append(_at_microbatch(name))
        return first + getattr(name, "microbatch", 0)

    def name(self, id_: int) -> Any:
        """Return the name that has an id."""
        family, microbatch = divmod(id_, self.plan.microbatches)
        return self._names[family](microbatch)

    def ids(self, effect: Any) -> Ids:
        """Return the ids of the names that an effect needs, gives and frees."""
        kind = type(effect)
        if kind in self._uniform:
            (needs, gives, frees), m = self._columns_of(effect), effect.microbatch
            return (
                [first + m * step for first, step in needs],
                [first + m * step for first, step in gives],
                [first + m * step for first, step in frees],
            )
        if kind is Send:
            return [self.id(effect.value)], [], []
        if kind is Recv:
            return [], [self.id(effect.value)], []
        if kind is Overlap:
            one, other = map(self.ids, parts(effect))
            return one[0] + other[0], one[1] + other[1], one[2] + other[2]
        names = self._names_of(effect)
        return list(map(self.id, names[0])), list(map(self.id, names[1])), list(map(self.id, names[2]))

    def needs(self, effect: Any) -> list[int]:
        """Return the ids of the names that an effect needs, faster than `ids` does."""
        return self._column(effect, 0)

    def gives(self, effect: Any) -> list[int]:
        """Return the ids of the names that an effect gives, faster than `ids` does."""
        return self._column(effect, 1)

    def _column(self, effect: Any, at: int) -> list[int]:
        if type(effect) in self._uniform:
            m = effect.microbatch
            return [first + m * step for first, step in self._columns_of(effect)[at]]
        return self.ids(effect)[at]

    def _columns_of(self, effect: Any) -> tuple[_Column, ...]:
        m = effect.microbatch
        key = type(effect), effect.stage, m // self.block
        columns = self._columns.get(key)
        if columns is None:
            columns = self._columns[key] = tuple(
                [(self.id(n) - m * step, step) for n in names for step in [int(hasattr(n, "microbatch"))]]
                for names in self._names_of(effect)
            )
        return columns

    def _names_of(self, effect: Any) -> tuple[Names, Names, Names]:
        row, plan = self.table.effects[type(effect)], self.plan
        columns = row.needs(effect, plan), row.gives(effect, plan), row.frees(effect, plan)
        for name in chain(*columns):
            if not fits(name, plan):
                raise ScheduleError(f"the row of {type(effect).__name__} names {name}, which the plan does not have")
        return columns


def _is_uniform(kind: type, row: Row) -> bool:
    columns = row.needs, row.gives, row.frees
    return {"stage", "microbatch"} == set(fields_of(kind)) and all(map(is_uniform, columns))


def _rest(kind: Any) -> list[str]:
    return [field for field in fields_of(kind) if field != "microbatch"]


@cache
def _others(kind: Any) -> Callable[[Any], Any]:
    """Return a function of a name that returns its fields other than the microbatch."""
    others = _rest(kind)
    return attrgetter(*others) if others else lambda name: ()


def _at_microbatch(name: Any) -> Callable[[int], Any]:
    """Return a function of a microbatch that returns the same name for that microbatch."""
    kind: Any = type(name)
    others = {field: getattr(name, field) for field in _rest(kind)}
    if not hasattr(name, "microbatch"):
        return lambda m: name
    last = fields_of(kind)[-1] == "microbatch"
    return partial(kind, *others.values()) if last else lambda m: kind(**others, microbatch=m)
