"""Map names to integer ids, so that millions of names need no hashing. No torch.

A row of the table whose columns are `uniform` gives the same names for every microbatch of a block, except for the
microbatch in them. It is read once for each kind, stage and block of microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import lcm
from operator import attrgetter
from typing import Any, NamedTuple

from fpipe.effects import Overlap, Recv, Send, parts
from fpipe.plan import Plan
from fpipe.tables import TABLE, Row, Table, fields_of, is_uniform

Family = tuple[type, Any]  # a value's class, and its fields other than the microbatch: one, or a tuple


class Ids(NamedTuple):
    """The ids of the names that an effect needs, gives and frees."""

    needs: list[int]
    gives: list[int]
    frees: list[int]


_Column = list[
    tuple[int, int]
]  # ids at microbatch 0, and the step to the next microbatch: 1, or 0 for names without one


class Interning:
    """The ids of one plan's names. The ids of all microbatches of a family are consecutive.

    `block`: a number of microbatches. Those from one multiple of it to the next run each stage on the same copy.

    >>> from fpipe import Placement
    >>> from fpipe.effects import Forward
    >>> interning = Interning(Plan(Placement.loop(2), 4))
    >>> interning.ids(Forward(0, 3))
    Ids(needs=[], gives=[3, 7], frees=[])
    >>> [interning.name(3), interning.name(7)]
    [Activation(stage=0, microbatch=3), Residuals(stage=0, microbatch=3)]
    """

    def __init__(self, plan: Plan, table: Table = TABLE) -> None:
        self.plan, self.table = plan, table
        self.block = plan.microbatches // lcm(*map(len, plan.placement.holders))
        self._first: dict[Family, int] = {}
        self._names: list[Callable[[int], Any]] = []  # by family: microbatch -> name
        self._uniform = {kind for kind, row in table.effects.items() if _is_uniform(kind, row)}
        self._columns: dict[tuple[type, int, int], tuple[_Column, ...]] = {}

    def id(self, name: Any) -> int:
        """Return a name's id."""
        family, microbatch = _split(type(name))(name)
        first = self._first.get(family)
        if first is None:
            first = self._first[family] = len(self._names) * self.plan.microbatches
            self._names.append(_at_microbatch(name))
        return first + microbatch

    def name(self, id_: int) -> Any:
        """Return the name that has an id."""
        family, microbatch = divmod(id_, self.plan.microbatches)
        return self._names[family](microbatch)

    def ids(self, effect: Any) -> Ids:
        """Return the ids of the names that an effect needs, gives and frees."""
        if type(effect) in self._uniform:
            (needs, gives, frees), m = self._columns_of(effect), effect.microbatch
            return Ids(
                [first + m * step for first, step in needs],
                [first + m * step for first, step in gives],
                [first + m * step for first, step in frees],
            )
        if type(effect) is Send:
            return Ids([self.id(effect.value)], [], [])
        if type(effect) is Recv:
            return Ids([], [self.id(effect.value)], [])
        if type(effect) is Overlap:
            first, second = map(self.ids, parts(effect))
            return Ids(*(a + b for a, b in zip(first, second, strict=True)))
        return Ids(*(list(map(self.id, names)) for names in self._names_of(effect)))

    def needs(self, effect: Any) -> list[int]:
        """Return the first of `ids` alone, which is faster."""
        if type(effect) in self._uniform:
            m = effect.microbatch
            return [first + m * step for first, step in self._columns_of(effect)[0]]
        return self.ids(effect).needs

    def gives(self, effect: Any) -> list[int]:
        """Return the second of `ids` alone, which is faster."""
        if type(effect) in self._uniform:
            m = effect.microbatch
            return [first + m * step for first, step in self._columns_of(effect)[1]]
        return self.ids(effect).gives

    def _names_of(self, effect: Any) -> list[tuple[Any, ...]]:
        row = self.table.effects[type(effect)]
        return [names(effect, self.plan) for names in (row.needs, row.gives, row.frees)]

    def _columns_of(self, effect: Any) -> tuple[_Column, ...]:
        key = type(effect), effect.stage, effect.microbatch // self.block
        if key not in self._columns:
            m = effect.microbatch
            self._columns[key] = tuple(
                [(self.id(n) - m * hasattr(n, "microbatch"), int(hasattr(n, "microbatch"))) for n in names]
                for names in self._names_of(effect)
            )
        return self._columns[key]


def _is_uniform(kind: type, row: Row) -> bool:
    columns = row.needs, row.gives, row.frees
    return {"stage", "microbatch"} == set(fields_of(kind)) and all(map(is_uniform, columns))


def _rest(kind: Any) -> list[str]:
    return [field for field in fields_of(kind) if field != "microbatch"]


@cache
def _split(kind: Any) -> Callable[[Any], tuple[Family, int]]:
    """Return a function that splits a name into its family and its microbatch (0 without one)."""
    rest = _rest(kind)
    family = attrgetter(*rest) if rest else lambda name: ()
    if "microbatch" in fields_of(kind):
        return lambda name: ((kind, family(name)), name.microbatch)
    return lambda name: ((kind, family(name)), 0)


def _at_microbatch(name: Any) -> Callable[[int], Any]:
    """Return a function of a microbatch that returns the same name for that microbatch."""
    kind = type(name)
    others = {field: getattr(name, field) for field in _rest(kind)}
    if not hasattr(name, "microbatch"):
        return lambda m: name
    last = fields_of(kind)[-1] == "microbatch"
    return partial(kind, *others.values()) if last else lambda m: kind(**others, microbatch=m)
