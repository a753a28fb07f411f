"""Map names to integer ids, so that millions of names need no hashing. No torch.

Microbatches that run on the same copies are a block: each `plan.cycle`-th one. A row of the table whose columns are
`uniform` gives the same names for every microbatch of a block, except for the microbatch in them. It is read once for
each kind, stage, slice and block.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

from fpipe.effects import Overlap, Recv, Send, parts
from fpipe.errors import ScheduleError
from fpipe.plan import Plan
from fpipe.programs.names import fits
from fpipe.tables import TABLE, Names, Row, Table, fields_of, is_uniform, slice_of

Ids = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
_CHUNK = 64  # microbatches whose ids are made at once


class Interning:
    """The ids of one plan's names. The ids of all microbatches of a family are consecutive, block by block.

    `block_size`: the number of microbatches of a block. Ids from one multiple of it to the next are of the same block.

    >>> from fpipe import Placement
    >>> from fpipe.effects import Forward
    >>> interning = Interning(Plan(Placement.loop(2), 4))
    >>> interning.ids(Forward(0, 3))
    ((), (3, 7), ())
    >>> [interning.name(3), interning.name(7)]
    [Activation(stage=0, microbatch=3), Residuals(stage=0, microbatch=3)]
    """

    def __init__(self, plan: Plan, table: Table = TABLE) -> None:
        self.plan, self.table = plan, table
        self.block_size, self._cycle = plan.microbatches // plan.cycle, plan.cycle
        self._families: dict[type, tuple[Callable[[Any], Any], dict[Any, int], bool]] = {}
        self._names: list[Callable[[int], Any]] = []  # by family: microbatch -> name
        uniform = (kind for kind, row in table.effects.items() if _is_uniform(kind, row))
        # Uniform kind -> stage and slice, as one number -> microbatch -> ids, of the chunks of microbatches that were
        # asked for last: two of one block, or one of each, since blocks take turns.
        self._chunks: dict[type, dict[int, dict[int, Ids]]] = {kind: defaultdict(dict) for kind in uniform}

    def id(self, name: Any) -> int:
        """Return a name's id."""
        kind = type(name)
        if kind not in self._families:
            self._families[kind] = _others(kind), {}, hasattr(name, "microbatch")
        others, firsts, moves = self._families[kind]
        first = firsts.get(others(name))
        if first is None:
            first = firsts[others(name)] = len(self._names) * self.plan.microbatches
            self._names.append(_at_microbatch(name))
        if not moves:
            return first
        m: int = name.microbatch
        return first + (m if self._cycle == 1 else m % self._cycle * self.block_size + m // self._cycle)

    def name(self, id_: int) -> Any:
        """Return the name that has an id."""
        family, at = divmod(id_, self.plan.microbatches)
        return self._names[family](at % self.block_size * self._cycle + at // self.block_size)

    def ids(self, effect: Any) -> Ids:
        """Return the ids of the names that an effect needs, gives and frees."""
        kind = type(effect)
        chunks = self._chunks.get(kind)
        if chunks is not None:
            at = effect.stage if self.plan.slices == 1 else effect.stage * self.plan.slices + slice_of(effect)
            ids = chunks[at].get(effect.microbatch)
            return self._chunk(chunks[at], effect) if ids is None else ids
        if kind is Send:
            return (self.id(effect.value),), (), ()
        if kind is Recv:
            return (), (self.id(effect.value),), ()
        if kind is Overlap:
            one, other = map(self.ids, parts(effect))
            return one[0] + other[0], one[1] + other[1], one[2] + other[2]
        needs, gives, frees = self._names_of(effect)
        return tuple(map(self.id, needs)), tuple(map(self.id, gives)), tuple(map(self.id, frees))

    def _chunk(self, ids: dict[int, Ids], effect: Any) -> Ids:
        """Make the ids of the chunk of microbatches, within a block, that has the effect's."""
        cycle = self._cycle
        at = effect.microbatch // cycle % _CHUNK
        first = effect.microbatch - at * cycle
        count = min(_CHUNK, self.block_size - first // cycle)
        columns = ([self._consecutive(name, at, count) for name in names] for names in self._names_of(effect))
        rows = [zip(*column, strict=True) if column else repeat((), count) for column in columns]
        if len(ids) > _CHUNK * max(1, cycle - 1):
            ids.clear()
        ids.update(zip(range(first, first + count * cycle, cycle), zip(*rows, strict=True), strict=True))
        return ids[effect.microbatch]

    def _consecutive(self, name: Any, at: int, count: int) -> Iterable[int]:
        """Return the ids of a name for consecutive microbatches of a block, among which its own is number `at`."""
        id_ = self.id(name)
        return range(id_ - at, id_ - at + count) if hasattr(name, "microbatch") else repeat(id_, count)

    def _names_of(self, effect: Any) -> tuple[Names, Names, Names]:
        row, plan = self.table.effects[type(effect)], self.plan
        columns = row.needs(effect, plan), row.gives(effect, plan), row.frees(effect, plan)
        for name in chain(*columns):
            if not fits(name, plan):
                raise ScheduleError(f"the row of {type(effect).__name__} names {name}, which the plan does not have")
        return columns


def _is_uniform(kind: type, row: Row) -> bool:
    columns = row.needs, row.gives, row.frees
    return {"stage", "microbatch"} == {*fields_of(kind)} - {"slice"} and all(map(is_uniform, columns))


def _rest(kind: Any) -> list[str]:
    return [field for field in fields_of(kind) if field != "microbatch"]


def _others(kind: Any) -> Callable[[Any], Any]:
    """Return a function of a name that returns its fields other than the microbatch."""
    others = _rest(kind)
    return attrgetter(*others) if others else lambda name: ()


def _at_microbatch(name: Any) -> Callable[[int], Any]:
    """Return a function of a microbatch that returns the same name for that microbatch."""
    kind: Any = type(name)
    if not hasattr(name, "microbatch"):
        return lambda m: name
    fields = fields_of(kind)
    at = fields.index("microbatch")
    before, after = ([getattr(name, field) for field in part] for part in (fields[:at], fields[at + 1 :]))
    is_first = fields[at + 1 :] == ("slice",) and not slice_of(name) and kind.__dataclass_fields__["slice"].default == 0
    return partial(kind, *before) if is_first or not after else lambda m: kind(*before, m, *after)
