"""Convert effects to rows of numbers, and back. No torch.

The header of a file describes each kind of effect: its fields and how it is drawn. A process that never imported the
effect's class can show it: it makes a dataclass of the same name and fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass, make_dataclass
from functools import lru_cache
from operator import attrgetter, index
from typing import Any, NamedTuple

from fpipe.errors import ScheduleError
from fpipe.tables import COLOUR, TABLE, TRACKS, Row, Table, ValueRow, fields_of

COLUMNS = ("stage", "microbatch", "other", "second", "peer")
"""The columns of an effect's numbers. `peer` is the rank of a send or receive; further numbers use the free columns."""

LIMITS = {"stage": "stages", "consumer": "stages", "microbatch": "microbatches", "rank": "ranks"}
"""Field -> the attribute of `Plan` that its numbers must be less than."""

_MAX_CHARACTERS = 64  # of a name, a label or a letter


class Number(NamedTuple):
    """A number of an effect: its field and its column."""

    field: str
    column: str


class Kind(NamedTuple):
    """The format of one kind of effect: its class, the classes of nested values and effects, and its numbers.

    Args:
        cls: the effect's class.
        nested: field -> class, for each field that is a value or an effect; its numbers replace the field.
        numbers: in the order of the fields.
    """

    cls: Any
    nested: Mapping[str, type]
    numbers: tuple[Number, ...]

    def getter(self) -> Callable[[Any], tuple[int, ...]]:
        """Return a function from an effect to its numbers, in the order of `numbers`."""
        paths = []
        for name in fields_of(self.cls):
            nested = self.nested.get(name)
            paths += [f"{name}.{field}" for field in fields_of(nested)] if nested else [name]
        if not paths:
            return lambda effect: ()
        get: Callable[[Any], Any] = attrgetter(*paths)
        return get if len(paths) > 1 else lambda effect: (get(effect),)

    def maker(self) -> Callable[[Sequence[int]], Any]:
        """Return a function from a row of `COLUMNS` to the effect with these numbers."""
        at = [COLUMNS.index(number.column) for number in self.numbers]
        if not self.nested:
            return lambda row: self.cls(*[row[i] for i in at])
        arguments: list[tuple[Any, list[int]]] = []
        for name in fields_of(self.cls):
            nested = self.nested.get(name)
            count = len(fields_of(nested)) if nested else 1
            arguments.append((nested, at[:count]))
            at = at[count:]
        return lambda row: self.cls(
            *[cls(*[row[i] for i in places]) if cls else row[places[0]] for cls, places in arguments]
        )


def rows_of(effects: Sequence[Any]) -> tuple[list[Kind], list[int], list[tuple[int, ...]]]:
    """Return the kinds of the effects; and per effect the index of its kind and its row of `COLUMNS`, 0 in unused ones.

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
            kind = kind_of(cls, dict(zip(nested[cls], key[1:], strict=True)))
            kinds[key] = len(kinds), kind, kind.getter(), [COLUMNS.index(number.column) for number in kind.numbers]
        code, _, get, at = kinds[key]
        row = [0] * len(COLUMNS)
        for place, number in zip(at, get(effect), strict=True):
            if not hasattr(number, "__index__") or number < 0:
                raise ScheduleError(f"{effect} has {number!r}: an event file holds whole numbers of at least 0")
            row[place] = index(number)
        codes.append(code)
        rows.append(tuple(row))
    return [kind for _, kind, _, _ in kinds.values()], codes, rows


def kind_of(cls: Any, nested: Mapping[str, type]) -> Kind:
    """Return the format of a class of effects; `nested` has the classes of fields that are values or effects.

    Raises:
        ScheduleError: the class has more numbers than a file has columns.
    """
    fields = [field for name in fields_of(cls) for field in (fields_of(nested[name]) if name in nested else (name,))]
    posts = {"value", "rank"} <= set(fields_of(cls))
    taken = {*fields} & {"stage", "microbatch"} | ({"peer"} if posts else set())
    free = [column for column in ("other", "second", "peer", "microbatch", "stage") if column not in taken]
    numbers: list[Number] = []
    for at, field in enumerate(fields):
        if posts and field == "rank" and at == len(fields) - 1:
            column = "peer"
        elif field in ("stage", "microbatch") and field not in {number.column for number in numbers}:
            column = field
        elif free:
            column = free.pop(0)
        else:
            raise ScheduleError(
                f"{cls.__name__} has {len(fields)} numbers, and a file holds {len(COLUMNS)} of an effect"
            )
        numbers.append(Number(field, column))
    return Kind(cls, nested, tuple(numbers))


def described(kind: Kind, table: Table) -> dict[str, Any]:
    """Return the description of a kind for the header: its fields and how it is drawn."""
    row = table.effects[kind.cls]
    numbers = iter(kind.numbers)
    fields: dict[str, Any] = {}
    for name in fields_of(kind.cls):
        nested = kind.nested.get(name)
        if nested is None:
            fields[name] = next(numbers).column
        else:
            fields[name] = {"type": nested.__name__, "fields": {f: next(numbers).column for f in fields_of(nested)}}
    names = [kind.cls.__name__, *(nested.__name__ for nested in kind.nested.values())]
    description: dict[str, Any] = {"name": " ".join(names), "type": names[0], "fields": fields, "track": row.track}
    description |= {"letter": row.letter, "label": row.label, "colour": row.colour}
    values = [table.values[nested] for nested in kind.nested.values() if nested in table.values]
    if values:
        description["value"] = {"label": values[0].label, "colour": values[0].colour}
    elif row.track == "compute":
        description["parts"] = [
            _part(nested, fields[name]["fields"], table) for name, nested in kind.nested.items()
        ] or [_part(kind.cls, fields, table)]
    return description


def _part(kind: type, fields: Mapping[str, str], table: Table) -> dict[str, Any]:
    """Describe an effect, or one of the two of an overlap; `part_of` has the letters of those that do more."""
    row, rows = table.effects[kind], table.effects.values()
    whole = [each.letter for each in rows if row.work and row.work != each.work and row.work & each.work == row.work]
    columns = {name: fields[name] for name in ("stage", "microbatch") if name in fields}
    return {"letter": row.letter, "label": row.label, "part_of": whole, **columns}


def read(descriptions: Sequence[Mapping[str, Any]]) -> tuple[list[Kind], Table]:
    """Return the kinds that a header describes, and the table of their effects.

    Raises:
        ValueError: `described` did not write these descriptions.
    """
    kinds, rows = [], dict[type, Row | ValueRow]()
    for each in descriptions:
        nested = {name: field for name, field in each["fields"].items() if not isinstance(field, str)}
        classes = {name: _class(field["type"], tuple(field["fields"])) for name, field in nested.items()}
        kind = _class(each["type"], tuple(each["fields"]))
        numbers = [
            Number(*pair)
            for name, field in each["fields"].items()
            for pair in (field["fields"].items() if name in nested else [(name, field)])
        ]
        if any(number.column not in COLUMNS for number in numbers):
            raise ValueError(f"an effect {each['name']!r} with a number in no column")
        kinds.append(Kind(kind, classes, tuple(numbers)))
        rows[kind] = _row(TABLE.effects.get(kind, Row()), each)
        if "value" in each:
            value = next(iter(classes.values()))
            label, colour = _text(each["value"]["label"]), _colour(each["value"]["colour"])
            rows[value] = TABLE.values.get(value, ValueRow())._replace(label=label, colour=colour)
    return kinds, TABLE.extended(rows)


def _row(row: Row, description: Mapping[str, Any]) -> Row:
    if description["track"] not in TRACKS:
        raise ValueError(f"an effect on a track {description['track']!r}")
    letter, label, colour = _text(description["letter"]), _text(description["label"]), _colour(description["colour"])
    return row._replace(track=description["track"], letter=letter, label=label, colour=colour)


def _text(text: object) -> str:
    if not isinstance(text, str) or len(text) > _MAX_CHARACTERS:
        raise ValueError(f"a name of an effect that is not of at most {_MAX_CHARACTERS} characters")
    return text


def _colour(text: object) -> str:
    if not isinstance(text, str) or not COLOUR.fullmatch(text):
        raise ValueError("a colour that is not #rrggbb")
    return text


def _class(name: str, fields: tuple[str, ...]) -> Any:
    """Return fpipe's class of that name if it has these fields, else a new dataclass."""
    known = {kind.__name__: kind for kind in (*TABLE.effects, *TABLE.values)}
    if name in known and fields_of(known[name]) == fields:
        return known[name]
    if any(len(each) > _MAX_CHARACTERS or each.startswith("_") for each in (name, *fields)):
        raise ValueError("an effect, or a field of one, whose name is none")
    return _foreign(name, fields)


@lru_cache(maxsize=256)
def _foreign(name: str, fields: tuple[str, ...]) -> type:
    return make_dataclass(name, [(field, int) for field in fields], frozen=True, slots=True)
