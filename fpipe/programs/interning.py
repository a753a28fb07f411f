"""Map names to integer ids, so that millions of names need no hashing. No torch.

A row of the table whose columns are `uniform` gives the same names for every microbatch of a block, except for the
microbatch in them. It is read once for each kind, stage and block of microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import lcm
from operator import attrgetter
from typing import Any, NamedTuple

from fpipe.effects import Name, Overlap, parts
from fpipe.plan import Plan
from fpipe.tables import TABLE, Row, Table, fields_of, is_uniform

Family = tuple[type, Any]  # a value's class, and its fields other than the microbatch: one, or a tuple


class Ids(NamedTuple):
    """The ids of the names that an effect needs, gives and frees."""

    needs: list[int]
    gives: list[int]
    frees: list[int]


_Column = tuple[list[int], list[int]]  # ids at microbatch 0; ids of names without a microbatch


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
        self._families: list[Family] = []
        self._uniform = {kind for kind, row in table.effects.items() if _is_uniform(kind, row)}
        self._columns: dict[tuple[type, int, int], tuple[_Column, _Column, _Column]] = {}

    def id(self, name: Any) -> int:
        """Return a name's id."""
        kind: Any = type(name)
        family, microbatch = _split(kind)(name)
        first = self._first.get(family)
        if first is None:
            first = self._first[family] = len(self._families) * self.plan.microbatches
            self._families.append(family)
        return first + microbatch

    def name(self, id_: int) -> Name:
        """Return the name that has an id."""
        family, microbatch = divmod(id_, self.plan.microbatches)
        kind, rest = self._families[family]
        fields = dict(zip(_rest(kind), rest if isinstance(rest, tuple) else (rest,), strict=True))
        return kind(**fields, **({"microbatch": microbatch} if "microbatch" in fields_of(kind) else {}))  # type: ignore[no-any-return]

    def uniform_key(self, effect: Any) -> tuple[type, int, int] | None:
        """Return the key of effects that differ only in a microbatch of one block; None for one that is not uniform."""
        kind = type(effect)
        return (kind, effect.stage, effect.microbatch // self.block) if kind in self._uniform else None

    def ids(self, effect: Any) -> Ids:
        """Return the ids of the names that an effect needs, gives and frees."""
        key = self.uniform_key(effect)
        if key is not None:
            columns = self._columns.get(key)
            if columns is None:
                columns = self._columns[key] = self._at_zero(effect)
            m = effect.microbatch
            (needs, fixed_needs), (gives, fixed_gives), (frees, fixed_frees) = columns
            return Ids(
                [n + m for n in needs] + fixed_needs,
                [n + m for n in gives] + fixed_gives,
                [n + m for n in frees] + fixed_frees,
            )
        if type(effect) is Overlap:
            first, second = map(self.ids, parts(effect))
            return Ids(*(a + b for a, b in zip(first, second, strict=True)))
        return Ids(*(list(map(self.id, names)) for names in self._names(effect)))

    def _names(self, effect: Any) -> list[tuple[Any, ...]]:
        row = self.table.effects[type(effect)]
        return [names(effect, self.plan) for names in (row.needs, row.gives, row.frees)]

    def _at_zero(self, effect: Any) -> tuple[_Column, _Column, _Column]:
        needs, gives, frees = (
            (
                [self.id(n) - effect.microbatch for n in names if hasattr(n, "microbatch")],
                [self.id(n) for n in names if not hasattr(n, "microbatch")],
            )
            for names in self._names(effect)
        )
        return needs, gives, frees


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
