"""The two tables: one row for each kind of effect, and one for each kind of value. No torch.

Lowering, verifier, simulator, memory, drawings, exports and the Pipeline tab read these tables. An effect of your own
needs a row, passed as `effects=TABLE.extended({Load: Row(...)})`, and a function of the handler. Modules name kinds of
fpipe's own only where they do more than a row says: communication, sums, and the shards of replicas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from fpipe.effects import (
    Activation,
    Backward,
    BackwardInput,
    BackwardWeight,
    Cached,
    Carry,
    CarryGradient,
    Compute,
    Decode,
    Deferred,
    Discard,
    Fetch,
    Forward,
    Gather,
    Gradient,
    Hidden,
    Offload,
    Offloaded,
    Overlap,
    Parameters,
    Partials,
    Prefill,
    Recompute,
    Recv,
    Reduce,
    Release,
    Residuals,
    Scatter,
    Send,
    Token,
    Update,
    WeightGradient,
    parts,
)

FORWARD, INPUT, WEIGHT = 1, 2, 4
"""The work of one stage on one microbatch, in bits: its forward, its input gradients, its weight gradients."""
BACKWARD = INPUT | WEIGHT

# The colours are Okabe and Ito's, which the colour-blind can distinguish; black text is legible on each.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, GREY = "#56b4e9", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#9e9e9e"
YELLOW, LIGHT, LIME = "#f0e442", "#c8c8c8", "#b3de69"
DEEP_BLUE, PALE_GREEN = "#2684bd", "#7fcfb9"  # their second blue and their green, lighter
LANES = ("gather", "scatter", "offload", "fetch")
"""Tracks on which effects run beside the rank's compute, one after another; what needs their values waits for them."""
TRACKS = ("compute", "send", "receive", *LANES, "host")
COLOUR = re.compile(r"#[0-9a-fA-F]{6}")
Names = tuple[Any, ...]


class Topology(Protocol):
    """The part of a plan that the tables read."""

    @property
    def ranks(self) -> int: ...
    @property
    def stages(self) -> int: ...
    @property
    def replicas(self) -> int: ...
    @property
    def slices(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def prefills(self) -> int: ...
    @property
    def gathered(self) -> Collection[int]: ...
    @property
    def batch_gradients(self) -> Collection[int]: ...
    def sources(self, stage: int, /) -> tuple[int, ...]: ...
    def consumers(self, stage: int, /) -> tuple[int, ...]: ...
    def terms(self, stage: int, microbatch: int, /) -> tuple[int, ...]: ...
    def added_to(self, stage: int, consumer: int, microbatch: int, /) -> int | None: ...
    def rank_of(self, stage: int, microbatch: int, /) -> int: ...
    def ranks_of(self, stage: int, /) -> tuple[int, ...]: ...
    def sharers(self, stage: int, /) -> tuple[tuple[int, int], ...]: ...
    def is_trained(self, stage: int, /) -> bool: ...
    def is_differentiated(self, stage: int, /) -> bool: ...
    def differentiated_sources(self, stage: int, /) -> tuple[int, ...]: ...
    def has_input_half(self, stage: int, /) -> bool: ...


class Prices(Protocol):
    """The part of the costs that the tables read, for the stage and the microbatch that an effect or a value names."""

    @property
    def scale(self) -> Sequence[float]: ...
    @property
    def sizes(self) -> Sequence[float]: ...

    def at(self, cost: str, of: Any, /) -> float: ...
    def replica_transfer(self, cost: str, stage: int, /) -> float: ...
    def host_transfer(self, cost: str, of: Any, /) -> float: ...
    def read(self, stage: int, reader: int, microbatch: int, /) -> float: ...
    def sum_bytes(self, stage: int, rank: int, plan: Any, /) -> float: ...
    def lasting(self, size: float, stage: int, plan: Any, /) -> float: ...
    def extra_of(self, of: Any, factors: Sequence[float], /) -> float: ...


_Function = TypeVar("_Function", bound=Callable[..., Any])


def uniform(function: _Function) -> _Function:
    """Mark a column whose result is the same for every microbatch of a slice, except for the microbatch in the names.

    Programs have millions of effects, so a marked column is called once for all microbatches that run on the same
    ranks. An unmarked column is called for each effect.
    """
    function.uniform = True  # type: ignore[attr-defined]
    return function


def is_uniform(function: Callable[..., Any] | None) -> bool:
    """Whether a column is marked by `uniform`."""
    return getattr(function, "uniform", False)


def halves(stage: int, plan: Topology) -> int:
    """Return the halves that a stage's backward has, as the bits `INPUT` and `WEIGHT`."""
    return INPUT * plan.has_input_half(stage) | WEIGHT * plan.is_trained(stage)


def last_half(stage: int, plan: Topology) -> int:
    """Return the half that ends a stage's backward, as a bit; 0 if it has none."""
    return WEIGHT if plan.is_trained(stage) else halves(stage, plan)


@uniform
def nothing(effect: Any, plan: Topology) -> Names:
    """Return no names."""
    return ()


def home(effect: Any, plan: Topology) -> tuple[int, ...]:
    """Return the ranks of the effect's stage; with a microbatch, the one that runs it; without a stage, all ranks."""
    if not hasattr(effect, "stage"):
        return tuple(range(plan.ranks))
    if not hasattr(effect, "microbatch"):
        return plan.ranks_of(effect.stage)
    return (plan.rank_of(effect.stage, effect.microbatch),)


def _extra_time(effect: Any, costs: Prices) -> float:
    return costs.extra_of(effect, costs.scale)


def _extra_bytes(value: Any, costs: Prices, plan: Topology | None, rank: int) -> float:
    return costs.extra_of(value, costs.sizes)


Bytes = Callable[[Any, Prices, Topology | None, int], float]


class Row(NamedTuple):
    """The meaning of one kind of effect. The effect's class is a frozen dataclass of numbers, values and effects.

    Args:
        needs: names that must be on the rank before the effect can run.
        gives: names that are on the rank after it; for a receive, once it has arrived.
        frees: names whose only use this effect is. Other names live until the last effect that needs them.
        where: the ranks that may run the effect.
        time: seconds, or the unit of the costs, for which it occupies its rank; by default `Costs(extra={kind: time})`.
        work: the bits of `FORWARD | INPUT | WEIGHT` that it does for its stage and microbatch.
        track: its lane in a timeline: "compute", "send", "receive", "host"; or one of `LANES`, such as "gather": it
            then occupies this lane, and not the rank.
        ordered: whether a stage runs it in microbatch order, as one microbatch passes its state to the next.
        letter, label, colour: its letter in drawings, its name in legends, and its colour ("#rrggbb").
    """

    needs: Callable[[Any, Topology], Names] = nothing
    gives: Callable[[Any, Topology], Names] = nothing
    frees: Callable[[Any, Topology], Names] = nothing
    where: Callable[[Any, Topology], tuple[int, ...]] = home
    time: Callable[[Any, Prices], float] = _extra_time
    work: int = 0
    ordered: bool = True
    track: str = "compute"
    letter: str = "?"
    label: str = "effect"
    colour: str = GREY


def _always(value: Any, plan: Topology) -> bool:
    return True


class ValueRow(NamedTuple):
    """The meaning of one kind of value. The value's class is a frozen dataclass of numbers.

    Args:
        producer: the rank that computes it and may send it; None for a value that never leaves its rank.
        readers: the ranks that use it; the producer may be among them.
        bytes: its size on a rank, of (value, costs, plan, rank); without a plan, its whole size. By default
            `Costs(extra={kind: bytes})`.
        exists: whether the plan has the value; called only if its stage, microbatch and rank are in the plan.
        label: its name.
        colour: the colour of the sends and receives that carry it.
        sums: whether several effects add to it. It is then final after the last of them. Lowering sends fpipe's own
            sums at the end; a schedule sends yours.
        backward: whether only the backward pass has it.
        message: its size when it is sent to a rank, of the same arguments; by default its size there.
    """

    producer: Callable[[Any, Topology], int] | None = None
    readers: Callable[[Any, Topology], Iterable[int]] = nothing
    bytes: Bytes = _extra_bytes
    label: str = "value"
    colour: str = GREY
    sums: bool = False
    backward: bool = False
    exists: Callable[[Any, Topology], bool] = _always
    message: Bytes | None = None


class _Rows(dict[type, Any]):
    """The rows by class; a class without a row is an error."""

    def __missing__(self, kind: type) -> Any:
        name = kind.__name__
        raise TypeError(f"the table has no row for {name}: extend it, as in TABLE.extended({{{name}: ...}})")


@dataclass(frozen=True, repr=False)
class Table:
    """The two tables: effect class -> `Row`, value class -> `ValueRow`.

    >>> sorted(kind.__name__ for kind in TABLE.effects)
    ['Backward', 'BackwardInput', 'BackwardWeight', 'Decode', 'Discard', 'Fetch', 'Forward', 'Gather', 'Offload', \
'Overlap', 'Prefill', 'Recompute', 'Recv', 'Reduce', 'Release', 'Scatter', 'Send', 'Update']
    """

    effects: Mapping[type, Row]
    values: Mapping[type, ValueRow]

    def __post_init__(self) -> None:
        object.__setattr__(self, "effects", _Rows(self.effects))
        object.__setattr__(self, "values", _Rows(self.values))

    def __repr__(self) -> str:
        return "TABLE" if self is TABLE else f"<table of {len(self.effects)} effects and {len(self.values)} values>"

    def __reduce__(self) -> Any:
        return "TABLE" if self is TABLE else (Table, (self.effects, self.values))

    def extended(self, rows: Mapping[type, Row | ValueRow]) -> Table:
        """Return a table with more rows, or with other rows for the same classes.

        Raises:
            TypeError: a class is not a frozen dataclass, a row is neither a `Row` nor a `ValueRow`, or the effects lack
                a field: those with `work` name a stage and a microbatch, those that send or receive a value and a rank.
            ValueError: a colour, track or letter is none.
        """
        for kind, row in rows.items():
            if not isinstance(row, Row | ValueRow) or not _is_frozen(kind):
                raise TypeError(f"the table maps frozen dataclasses to Row or ValueRow, not {kind!r} to {row!r}")
            if isinstance(row, Row):
                _check_fields(kind, row)
            if not COLOUR.fullmatch(row.colour) or (isinstance(row, Row) and row.track not in TRACKS):
                raise ValueError(
                    f"the row of {kind.__name__} has a colour that is not #rrggbb, {row.colour!r}, or a track that is "
                    f"none of {', '.join(TRACKS)}"
                )
            if isinstance(row, Row) and len(row.letter) != 1:
                raise ValueError(f"the row of {kind.__name__} needs one letter for drawings, not {row.letter!r}")
        effects = {kind: row for kind, row in rows.items() if isinstance(row, Row)}
        values = {kind: row for kind, row in rows.items() if isinstance(row, ValueRow)}
        return self.joined(Table(effects, values))

    def joined(self, other: Table) -> Table:
        """Return a table with the rows of both; for a class that both have, the other's row."""
        return Table({**self.effects, **other.effects}, {**self.values, **other.values})

    def needs(self, effect: Any, plan: Topology) -> Names:
        """Return the names that must be on the rank before the effect can run."""
        return tuple(n for part in parts(effect) for n in self.effects[type(part)].needs(part, plan))

    def gives(self, effect: Any, plan: Topology) -> Names:
        """Return the names that are on the rank after it (for a receive: once it has arrived)."""
        return tuple(n for part in parts(effect) for n in self.effects[type(part)].gives(part, plan))

    def frees(self, effect: Any, plan: Topology) -> Names:
        """Return the names whose only use the effect is."""
        return tuple(n for part in parts(effect) for n in self.effects[type(part)].frees(part, plan))

    def producer(self, value: Any, plan: Topology) -> int | None:
        """Return the rank that computes a value; None for a value that never leaves its rank."""
        producer = self.values[type(value)].producer
        return None if producer is None else producer(value, plan)

    def readers(self, value: Any, plan: Topology) -> tuple[int, ...]:
        """Return the ranks that receive a value, lowest first: all its readers except its producer."""
        row = self.values[type(value)]
        if row.producer is None:
            return ()
        return tuple(sorted(set(row.readers(value, plan)) - {row.producer(value, plan)}))

    def travels(self, name: Any) -> bool:
        """Whether a value is sent to other ranks as soon as it is computed."""
        row = self.values[type(name)]
        return row.producer is not None and not row.sums

    def message_bytes(self, value: Any, costs: Prices, plan: Topology | None, rank: int) -> float:
        """Return the size of a value when it is sent to a rank; without a plan, that of the whole value."""
        row = self.values[type(value)]
        return (row.message or row.bytes)(value, costs, plan, rank)

    def backward(self, effect: Any, plan: Topology) -> bool:
        """Whether an effect belongs to the backward pass: it needs or gives a value that only the backward pass has."""
        names = (*self.needs(effect, plan), *self.gives(effect, plan))
        return any(self.values[type(name)].backward for name in names)

    def text(self, effect: Any) -> str:
        """Return the name of an effect: its label, and its value or its stage and microbatch.

        >>> TABLE.text(Send(Activation(0, 3), 1)), TABLE.text(Reduce(2)), TABLE.text(Forward(0, 3))
        ('send activation 3', 'reduce stage 2', 'forward stage 0, microbatch 3')
        """
        label = self.effects[type(effect)].label
        return f"{label} {self.value_text(effect.value)}" if hasattr(effect, "value") else f"{label}{_where(effect)}"

    def value_text(self, value: Any) -> str:
        """Return the name of a value on a rank: its label, and its microbatch or its stage.

        >>> TABLE.value_text(Gradient(0, 1, 3)), TABLE.value_text(WeightGradient(2, 0))
        ('gradient 3', 'weight gradient of stage 2')
        """
        label = self.values[type(value)].label
        if hasattr(value, "microbatch"):
            return f"{label} {_numbers(value)}"
        return f"{label} of stage {value.stage}" if hasattr(value, "stage") else label


def _is_frozen(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


def _check_fields(kind: type, row: Row) -> None:
    wanted = {"stage", "microbatch"} if row.work else {"value", "rank"} if row.track in ("send", "receive") else set()
    if missing := sorted(wanted - {*fields_of(kind)}):
        what = "has work" if row.work else f"is on the track {row.track!r}"
        raise TypeError(f"the row of {kind.__name__} {what}, and its effects have no {' and no '.join(missing)}")


def _numbers(value: Any) -> str:
    """Return the number of a microbatch, and of its slice if that is not the first."""
    return f"{value.microbatch}.{number}" if (number := slice_of(value)) else str(value.microbatch)


def _where(effect: Any) -> str:
    names = ("stage", "microbatch", *["slice"] * bool(slice_of(effect)))
    fields = [(name, getattr(effect, name)) for name in names if hasattr(effect, name)]
    return "".join(f"{', ' if i else ' '}{name} {number}" for i, (name, number) in enumerate(fields))


def fields_of(kind: Any) -> tuple[str, ...]:
    """Return the names of a class's fields, in the order of its arguments."""
    return tuple(kind.__dataclass_fields__)


def slice_of(named: Any) -> int:
    """Return the slice that an effect or a value names; 0 for one of your own that names none."""
    number: int = getattr(named, "slice", 0)
    return number


# What effects need, give and free


def _parameters(e: Compute | Recompute | Gather | Release, plan: Topology) -> Names:
    return (Parameters(e.stage),) if e.stage in plan.gathered else ()


@uniform
def _inputs(e: Forward | Recompute, plan: Topology) -> Names:
    m, t = _part(e)
    carry = (Carry(e.stage, m, t - 1),) if t > 0 else ()
    return (*(Activation(s, m, t) for s in plan.sources(e.stage)), *carry, *_parameters(e, plan))


@uniform
def _residuals(e: Forward | Offload | Discard | Fetch | Recompute, plan: Topology) -> Names:
    return (Residuals(e.stage, *_part(e)),) if plan.is_differentiated(e.stage) else ()


@uniform
def _offloaded(e: Offload | Discard | Fetch, plan: Topology) -> Names:
    return (Offloaded(e.stage, *_part(e)),) if plan.is_differentiated(e.stage) else ()


@uniform
def _outputs(e: Forward, plan: Topology) -> Names:
    m, t = _part(e)
    activation = (Activation(e.stage, m, t),) if plan.consumers(e.stage) else ()
    carry = (Carry(e.stage, m, t),) if t < plan.slices - 1 else ()
    return (*activation, *carry, *_residuals(e, plan))


def _part(e: Compute | Recompute | Offload | Discard | Fetch) -> tuple[int, int]:
    return e.microbatch, slice_of(e)


@uniform
def _cotangents(e: Compute, plan: Topology) -> Names:
    """With cotangents by rank: the ranks' sums, and those of this rank to which the stage adds its own gradients."""
    m, t = _part(e)
    gradients = (Gradient(e.stage, c, m, t) for c in plan.terms(e.stage, m))
    higher = ((s, plan.added_to(s, e.stage, m)) for s in plan.differentiated_sources(e.stage))
    sums = (Gradient(s, c, m, t) for s, c in higher if c is not None)
    carry = (CarryGradient(e.stage, m, t),) if t < plan.slices - 1 else ()
    return (*gradients, *sums, *carry, Residuals(e.stage, m, t))


@uniform
def _cotangents_and_parameters(e: Compute, plan: Topology) -> Names:
    return _cotangents(e, plan) + _parameters(e, plan)


@uniform
def _cotangents_for_inputs(e: Compute, plan: Topology) -> Names:
    """A stage without input gradients has all of its backward in the other half."""
    return _cotangents(e, plan) + (_parameters(e, plan) if _has_input_gradients(e, plan) else ())


@uniform
def _saved_for_weights(e: Compute, plan: Topology) -> Names:
    """The weight gradients come from deferred values; without input gradients, from the cotangents themselves."""
    return _deferred(e, plan) if plan.has_input_half(e.stage) else _cotangents(e, plan)


@uniform
def _saved_and_parameters(e: Compute, plan: Topology) -> Names:
    alone = not (plan.has_input_half(e.stage) and _has_input_gradients(e, plan))
    return _saved_for_weights(e, plan) + (_parameters(e, plan) if alone else ())


def _has_input_gradients(e: Compute, plan: Topology) -> bool:
    return bool(plan.sources(e.stage)) or e.stage in plan.batch_gradients or plan.slices > 1


@uniform
def _input_gradients(e: Compute, plan: Topology) -> Names:
    m, t = _part(e)
    carry = (CarryGradient(e.stage, m, t - 1),) if t > 0 else ()
    return (*(Gradient(s, e.stage, m, t) for s in plan.differentiated_sources(e.stage)), *carry)


@uniform
def _weight_gradient(e: Compute, plan: Topology) -> Names:
    kind = Partials if plan.replicas > 1 else WeightGradient
    return (kind(e.stage, plan.rank_of(e.stage, e.microbatch)),)


@uniform
def _deferred(e: Compute, plan: Topology) -> Names:
    return (Deferred(e.stage, *_part(e)),)


@uniform
def _both_gradients(e: Compute, plan: Topology) -> Names:
    return _input_gradients(e, plan) + _weight_gradient(e, plan)


@uniform
def _inputs_and_deferred(e: Compute, plan: Topology) -> Names:
    return _input_gradients(e, plan) + (_deferred(e, plan) if plan.is_trained(e.stage) else ())


@uniform
def _hidden(e: Prefill | Decode, plan: Topology) -> Names:
    """Of stages that the stage reads; the first stage of a token reads the one before it, number 0 the batch.

    A slice of prompts reads the batch, and the cache of the slice before.
    """
    sources, before = plan.sources(e.stage), e.token - 1
    fed = (Token(e.microbatch, before),) if e.token >= plan.prefills and not sources else ()
    cache = (Cached(e.stage, e.microbatch, before),) if 0 < e.token < plan.prefills else ()
    return (*(Hidden(s, e.microbatch, e.token) for s in sources), *fed, *cache)


@uniform
def _next_hidden(e: Prefill | Decode, plan: Topology) -> Names:
    is_last = e.token + 1 >= plan.prefills
    cache = () if is_last else (Cached(e.stage, e.microbatch, e.token),)
    if plan.consumers(e.stage):
        return (Hidden(e.stage, e.microbatch, e.token), *cache)
    return (Token(e.microbatch, e.token),) if is_last and e.token + 1 < plan.tokens else cache


def _value(e: Send | Recv, plan: Topology) -> Names:
    return (e.value,)


def _sums(e: Reduce | Update, plan: Topology) -> Names:
    return tuple(WeightGradient(stage, rank) for stage, rank in plan.sharers(e.stage))


def _whole(e: Gather | Release, plan: Topology) -> Names:
    return (Parameters(e.stage),)


def _partials(e: Scatter, plan: Topology) -> Names:
    return (Partials(e.stage, e.rank),)


def _scattered(e: Scatter, plan: Topology) -> Names:
    return (WeightGradient(e.stage, e.rank),)


def _of_rank(e: Scatter, plan: Topology) -> tuple[int, ...]:
    return (e.rank,)


# Times and sizes


def _at(name: str, of: Any, costs: Prices, *at: Any) -> float:
    return costs.at(name, of)


def _cost(name: str) -> Callable[..., float]:
    """Return a column that reads one of the costs. It can be pickled, so that tables can be pickled."""
    return uniform(partial(_at, name))


def _over_replicas(cost: str, e: Gather | Scatter, costs: Prices) -> float:
    return costs.replica_transfer(cost, e.stage)


def _over_host_link(cost: str, e: Offload | Fetch, costs: Prices) -> float:
    return costs.host_transfer(cost, e)


@uniform
def _free(*args: Any) -> float:
    return 0.0


@uniform
def _activation_bytes(v: Activation | Hidden, costs: Prices, plan: Topology | None, rank: int) -> float:
    if plan is None or rank == plan.rank_of(v.stage, v.microbatch):
        return costs.at("activation", v)
    return _read(v, costs, plan, rank)


@uniform
def _gradient_bytes(v: Gradient, costs: Prices, plan: Topology | None, rank: int) -> float:
    m, consumer = v.microbatch, v.consumer
    size = costs.read(v.stage, consumer, m)
    if plan is None:
        return size
    here = plan.rank_of(consumer, m)
    if _is_sent(v, plan) and here != plan.rank_of(v.stage, m):
        return _read(v, costs, plan, here)
    while (higher := plan.added_to(v.stage, consumer, m)) is not None:  # the sum has the leaves of all of these
        size, consumer = max(size, costs.read(v.stage, higher, m)), higher
    return size


def _sum_message(v: WeightGradient, costs: Prices, plan: Topology | None, rank: int) -> float:
    return costs.lasting(costs.sum_bytes(v.stage, rank, plan), v.stage, plan) if plan else costs.at("gradients", v)


def _is_sent(v: Gradient, plan: Topology) -> bool:
    """Return whether a gradient is sent to its stage's rank. With cotangents by rank, a rank's lowest stage sends."""
    return v.consumer in plan.terms(v.stage, v.microbatch)


def _read(v: Activation | Hidden | Gradient, costs: Prices, plan: Topology, rank: int) -> float:
    """Return the bytes of a stage's output that the stages of another rank read; their gradients have the same size."""
    m = v.microbatch
    return max(costs.read(v.stage, c, m) for c in plan.consumers(v.stage) if plan.rank_of(c, m) == rank)


# Producers and readers of values


@uniform
def _activation_producer(v: Activation | Hidden, plan: Topology) -> int:
    return plan.rank_of(v.stage, v.microbatch)


@uniform
def _activation_readers(v: Activation | Hidden, plan: Topology) -> list[int]:
    return [plan.rank_of(consumer, v.microbatch) for consumer in plan.consumers(v.stage)]


@uniform
def _token_producer(v: Token, plan: Topology) -> int:
    return plan.rank_of(plan.stages - 1, v.microbatch)


@uniform
def _token_readers(v: Token, plan: Topology) -> list[int]:
    return [plan.rank_of(stage, v.microbatch) for stage in range(plan.stages) if not plan.sources(stage)]


def _is_fed(v: Token, plan: Topology) -> bool:
    return plan.prefills <= v.token + 1 < plan.tokens


@uniform
def _gradient_producer(v: Gradient, plan: Topology) -> int:
    return plan.rank_of(v.consumer, v.microbatch)


@uniform
def _gradient_readers(v: Gradient, plan: Topology) -> list[int]:
    return [plan.rank_of(v.stage if _is_sent(v, plan) else v.consumer, v.microbatch)]


def _has_edge(v: Gradient, plan: Topology) -> bool:
    return v.consumer in plan.consumers(v.stage) and plan.is_differentiated(v.stage)


def _sum_producer(v: WeightGradient, plan: Topology) -> int:
    return v.rank


def _sum_readers(v: WeightGradient, plan: Topology) -> list[int]:
    return [rank for _, rank in plan.sharers(v.stage)]


def _has_copy(v: WeightGradient | Partials, plan: Topology) -> bool:
    return v.rank in plan.ranks_of(v.stage) and plan.is_trained(v.stage)


def _compute(names: tuple[Any, Any, Any], cost: str, work: int, letter: str, label: str, colour: str) -> Row:
    return Row(*names, time=_cost(cost), work=work, letter=letter, label=label, colour=colour)


TABLE = Table(
    {
        Forward: _compute((_inputs, _outputs, nothing), "forward", FORWARD, "F", "forward", BLUE),
        BackwardInput: _compute(
            (_cotangents_for_inputs, _inputs_and_deferred, _cotangents),
            *("backward_input", INPUT, "I", "input gradient", ORANGE),
        ),
        BackwardWeight: _compute(
            (_saved_and_parameters, _weight_gradient, _saved_for_weights),
            *("backward_weight", WEIGHT, "W", "weight gradient", GREEN),
        ),
        Backward: _compute(
            (_cotangents_and_parameters, _both_gradients, _cotangents),
            *("backward", INPUT | WEIGHT, "B", "backward", VERMILION),
        ),
        Prefill: Row(
            *(_hidden, _next_hidden),
            time=_cost("prefill"),
            work=FORWARD,
            ordered=False,
            letter="P",
            label="prefill",
            colour=PALE_GREEN,
        ),
        Decode: Row(
            *(_hidden, _next_hidden),
            time=_cost("decode"),
            work=FORWARD,
            ordered=False,
            letter="D",
            label="decode",
            colour=DEEP_BLUE,
        ),
        # An overlap needs, gives and frees the names of its two parts.
        Overlap: Row(time=_cost("overlap"), letter="&", label="overlap", colour=PURPLE),
        Send: Row(needs=_value, time=_free, track="send", letter="S", label="send"),
        Recv: Row(gives=_value, time=_free, track="receive", letter="R", label="receive"),
        Reduce: Row(needs=_sums, time=_free, track="host", letter="R", label="reduce"),
        Update: Row(needs=_sums, time=partial(_at, "update"), letter="U", label="update", colour=YELLOW),
        Gather: Row(
            gives=_whole,
            time=partial(_over_replicas, "gather"),
            track="gather",
            letter="G",
            label="gather",
            colour=YELLOW,
        ),
        Release: Row(needs=_whole, frees=_whole, time=_free, track="host", letter="L", label="release"),
        Scatter: Row(
            needs=_partials,
            gives=_scattered,
            frees=_partials,
            where=_of_rank,
            time=partial(_over_replicas, "scatter"),
            track="scatter",
            letter="C",
            label="scatter",
            colour=PURPLE,
        ),
        Offload: Row(
            needs=_residuals,
            gives=_offloaded,
            time=partial(_over_host_link, "offload"),
            track="offload",
            letter="O",
            label="offload",
        ),
        Discard: Row(needs=_offloaded, frees=_residuals, time=_free, track="host", letter="D", label="discard"),
        Fetch: Row(
            needs=_offloaded,
            gives=_residuals,
            time=partial(_over_host_link, "fetch"),
            track="fetch",
            letter="H",
            label="fetch",
            colour=LIGHT,
        ),
        Recompute: Row(
            needs=_inputs, gives=_residuals, time=_cost("recompute"), letter="R", label="recompute", colour=LIME
        ),
    },
    {
        Activation: ValueRow(_activation_producer, _activation_readers, _activation_bytes, "activation", BLUE),
        Gradient: ValueRow(
            _gradient_producer,
            _gradient_readers,
            _gradient_bytes,
            "gradient",
            VERMILION,
            backward=True,
            exists=_has_edge,
        ),
        Hidden: ValueRow(_activation_producer, _activation_readers, _activation_bytes, "hidden state", BLUE),
        Token: ValueRow(_token_producer, _token_readers, _free, "token", ORANGE, exists=_is_fed),
        # A sum lives for the whole step.
        WeightGradient: ValueRow(
            *(_sum_producer, _sum_readers, _free),
            label="weight gradient",
            colour=GREEN,
            sums=True,
            backward=True,
            exists=_has_copy,
            message=_sum_message,
        ),
        Residuals: ValueRow(bytes=_cost("residuals"), label="residuals"),
        Deferred: ValueRow(bytes=_cost("deferred"), label="deferred", backward=True),
        Carry: ValueRow(bytes=_cost("carry"), label="carry"),
        CarryGradient: ValueRow(bytes=_cost("carry_gradient"), label="carry gradient", backward=True),
        # A cache has all its places from the first token on, and is the caller's.
        Cached: ValueRow(bytes=_free, label="cache"),
        Parameters: ValueRow(bytes=_cost("gathered"), label="parameters", colour=YELLOW),
        Partials: ValueRow(
            bytes=_free, label="gradient sum", colour=PURPLE, sums=True, backward=True, exists=_has_copy
        ),
        # It is on the host, whose memory is not the rank's.
        Offloaded: ValueRow(bytes=_free, label="offloaded residuals", backward=True),
    },
)
