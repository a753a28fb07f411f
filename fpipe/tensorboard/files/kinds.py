"""Convert effects to rows of numbers, and back. No torch.

The header of a file describes each kind of effect: its fields and how it is drawn. A process that never imported the
effect's class can show it: it makes a dataclass of the same name and fields. Where a plan has no slices, effects and
values have no field of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass, make_dataclass
from functools import lru_cache
from operator import attrgetter, index
from typing import Any, NamedTuple

from fpipe.errors import ScheduleError
from fpipe.tables import TABLE, Row, Table, ValueRow, fields_of

COLUMNS = ("stage", "microbatch", "other", "second", "peer")
"""The columns of an effect's numbers. `peer` is the rank of a send or receive; further numbers use the free columns."""

LIMITS = {"stage": "stages", "consumer": "stages", "microbatch": "microbatches", "slice": "slices"}
LIMITS |= {"token": "tokens", "rank": "ranks"}
"""Field -> the attribute of `Plan` that its numbers must be less than."""

_MAX_CHARACTERS = 64  # of a name, a label or a letter


class Field(NamedTuple):
    """A field of an effect: a number, or a value or an effect whose numbers replace it.

    Args:
        cls: the class of the value or the effect; None for a number.
        columns: number -> its column; for a number its own name.
    """

    name: str
    cls: Any
    columns: Mapping[str, str]


class Kind(NamedTuple):
    """The format of one kind of effect: its class, and its fields in order."""

    cls: Any
    fields: tuple[Field, ...]

    @property
    def nested(self) -> list[Field]:
        """The fields that are values or effects."""
        return [field for field in self.fields if field.cls]

    @property
    def numbers(self) -> list[tuple[str, str]]:
        """The name and the column of each number, in order."""
        return [number for field in self.fields for number in field.columns.items()]

    def getter(self) -> Callable[[Any], tuple[int, ...]]:
        """Return a function from an effect to its numbers, in the order of `numbers`."""
        paths = [f"{field.name}.{name}" if field.cls else name for field in self.fields for name in field.columns]
        if not paths:
            return lambda effect: ()
        get: Callable[[Any], Any] = attrgetter(*paths)
        return get if len(paths) > 1 else lambda effect: (get(effect),)

    def maker(self) -> Callable[[Sequence[int]], Any]:
        """Return a function from a row of `COLUMNS` to the effect with these numbers."""
        arguments = [(field.cls, [COLUMNS.index(column) for column in field.columns.values()]) for field in self.fields]
        if not self.nested:
            places = [place for _, (place,) in arguments]
            return lambda row: self.cls(*[row[place] for place in places])
        return lambda row: self.cls(
            *[cls(*[row[place] for place in places]) if cls else row[places[0]] for cls, places in arguments]
        )


def rows_of(effects: Sequence[Any], slices: int = 1) -> tuple[list[Kind], list[int], list[tuple[int, ...]]]:
    """Return the kinds of the effects; and per effect the index of its kind and its row of `COLUMNS`, 0 in unused ones.

    Args:
        slices: of the plan.

    Raises:
        ScheduleError: an effect has more numbers than there are columns, or one that is negative or not an int.
    """
    kinds: dict[tuple[type, ...], tuple[int, Kind, Callable[[Any], tuple[int, ...]], list[int]]] = {}
    nested: dict[type, tuple[str, ...]] = {}
    codes, rows = [], []
    for effect in effects:
        cls: Any = type(effect)
        if cls not in nested:
            nested[cls] = tuple(name for name in fields_of(cls) if is_dataclass(getattr(effect, name)))
        key = (cls, *[type(getattr(effect, name)) for name in nested[cls]])
        if key not in kinds:
            kind = kind_of(cls, dict(zip(nested[cls], key[1:], strict=True)), slices)
            kinds[key] = len(kinds), kind, kind.getter(), [COLUMNS.index(column) for _, column in kind.numbers]
        code, _, get, at = kinds[key]
        row = [0] * len(COLUMNS)
        for place, number in zip(at, get(effect), strict=True):
            if not hasattr(number, "__index__") or number < 0:
                raise ScheduleError(f"{effect} has {number!r}: an event file holds whole numbers of at least 0")
            row[place] = index(number)
        codes.append(code)
        rows.append(tuple(row))
    return [kind for _, kind, _, _ in kinds.values()], codes, rows


def kind_of(cls: Any, nested: Mapping[str, type], slices: int = 1) -> Kind:
    """Return the format of a class of effects; `nested` has the classes of fields that are values or effects.

    Raises:
        ScheduleError: the class has more numbers than a file has columns.
    """
    names = _unsliced(cls) if slices == 1 else fields_of(cls)
    within = {name: _unsliced(each) if slices == 1 else fields_of(each) for name, each in nested.items()}
    groups = {name: within.get(name, (name,)) for name in names}
    numbers = [number for group in groups.values() for number in group]
    posts = {"value", "rank"} <= groups.keys()
    taken = {*numbers} & {"stage", "microbatch"} | ({"peer"} if posts else set())
    free = [column for column in ("other", "second", "peer", "microbatch", "stage") if column not in taken]
    columns: list[str] = []
    for at, number in enumerate(numbers):
        if posts and number == "rank" and at == len(numbers) - 1:
            columns.append("peer")
        elif number in ("stage", "microbatch") and number not in columns:
            columns.append(number)
        elif free:
            columns.append(free.pop(0))
        else:
            raise ScheduleError(
                f"{cls.__name__} has {len(numbers)} numbers, and a file holds {len(COLUMNS)} of an effect"
            )
    rest = iter(columns)
    return Kind(
        cls, tuple(Field(n, nested.get(n), {each: next(rest) for each in group}) for n, group in groups.items())
    )


def _unsliced(cls: Any) -> tuple[str, ...]:
    """Return the fields of a class, without that of a slice which is the first one by default."""
    slice_field = cls.__dataclass_fields__.get("slice")
    return tuple(name for name in fields_of(cls) if name != "slice" or slice_field.default != 0)


def described(kind: Kind, table: Table) -> dict[str, Any]:
    """Return the description of a kind for the header: its fields and how it is drawn."""
    row, nested = table.effects[kind.cls], kind.nested
    types = [kind.cls.__name__, *(field.cls.__name__ for field in nested)]
    fields = {
        name: {"type": cls.__name__, "fields": columns} if cls else columns[name] for name, cls, columns in kind.fields
    }
    description: dict[str, Any] = {"name": " ".join(types), "type": types[0], "fields": fields, "track": row.track}
    description |= {"letter": row.letter, "label": row.label, "colour": row.colour}
    values = [table.values[field.cls] for field in nested if field.cls in table.values]
    if values:
        description["value"] = {"label": values[0].label, "colour": values[0].colour}
    elif row.track == "compute":
        parts = [(field.cls, field.columns) for field in nested] or [(kind.cls, dict(kind.numbers))]
        description["parts"] = [_part(cls, columns, table) for cls, columns in parts]
    return description


def _part(kind: type, fields: Mapping[str, str], table: Table) -> dict[str, Any]:
    """Describe an effect, or one of the two of an overlap; `part_of` and `whole` are those that do more."""
    row, rows = table.effects[kind], table.effects.values()
    more = [each for each in rows if row.work and row.work != each.work and row.work & each.work == row.work]
    letters, labels = [each.letter for each in more], [each.label for each in more]
    columns = {name: fields[name] for name in ("stage", "microbatch", "slice") if name in fields}
    return {"letter": row.letter, "label": row.label, "part_of": letters, "whole": labels, **columns}


def read(descriptions: Sequence[Mapping[str, Any]]) -> tuple[list[Kind], Table]:
    """Return the kinds that a header describes, and the table of their effects.

    Raises:
        ValueError: `described` did not write these descriptions.
    """
    kinds, rows = [], dict[type, Row | ValueRow]()
    for each in descriptions:
        cls = _class(each["type"], tuple(each["fields"]))
        kind = Kind(cls, tuple(_field(name, field) for name, field in each["fields"].items()))
        if any(column not in COLUMNS for _, column in kind.numbers):
            raise ValueError(f"an effect {each['name']!r} with a number in no column")
        kinds.append(kind)
        rows[cls] = TABLE.effects.get(cls, Row())._replace(**_texts(each, "track", "letter", "label", "colour"))
        if "value" in each:
            value = kind.nested[0].cls
            rows[value] = TABLE.values.get(value, ValueRow())._replace(**_texts(each["value"], "label", "colour"))
    return kinds, TABLE.extended(rows)


def _field(name: str, description: Any) -> Field:
    if isinstance(description, str):
        return Field(name, None, {name: description})
    return Field(name, _class(description["type"], tuple(description["fields"])), description["fields"])


def _texts(description: Mapping[str, Any], *names: str) -> dict[str, Any]:
    texts = {name: description[name] for name in names}
    if any(not isinstance(text, str) or len(text) > _MAX_CHARACTERS for text in texts.values()):
        raise ValueError(f"a name of an effect that is not of at most {_MAX_CHARACTERS} characters")
    return texts


def _class(name: str, fields: tuple[str, ...]) -> Any:
    """Return fpipe's class of that name if it has these fields, with or without a slice, else a new dataclass."""
    known = {kind.__name__: kind for kind in (*TABLE.effects, *TABLE.values)}
    if name in known and fields in (fields_of(known[name]), _unsliced(known[name])):
        return known[name]
    if any(len(each) > _MAX_CHARACTERS or each.startswith("_") for each in (name, *fields)):
        raise ValueError("an effect, or a field of one, whose name is none")
    return _foreign(name, fields)


@lru_cache(maxsize=256)
def _foreign(name: str, fields: tuple[str, ...]) -> type:
    return make_dataclass(name, [(field, int) for field in fields], frozen=True, slots=True)
