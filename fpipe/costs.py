"""The costs of effects: times in seconds, or in any one unit, and sizes in bytes. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from math import inf, isfinite, nan
from operator import mul
from typing import Any, NamedTuple, SupportsFloat, cast

from fpipe.effects import Backward, BackwardInput, BackwardWeight, Forward, Name, Parameters, parts
from fpipe.errors import ScheduleError
from fpipe.errors.arguments import is_whole
from fpipe.plan import Plan, call_of
from fpipe.tables import BACKWARD, TABLE, Table, fields_of, slice_of

PerStage = float | Sequence[float]
Edge = tuple[int, int]  # source rank, target rank; or stage, reader
BY_CLASS = ("extra", "collectives")
BY_PART = ("scale", "sizes", "slice_scale")
NOT_BY_STAGE = {"communication", "shared", "tied", "reads", *BY_CLASS, *BY_PART, "replicas", "shards", "optimizer"}
OVER_REPLICAS = ("gather", "scatter")
OVER_HOST_LINK = ("offload", "fetch")
SIZES = {"activation", "residuals", "deferred", "carry", "carry_gradient"}
PIECES: Mapping[type, str] = {
    Forward: "forward",
    Backward: "backward",
    BackwardInput: "backward_input",
    BackwardWeight: "backward_weight",
}
"""The costs of what runs a stage."""
COLLECTIVES_OF: Mapping[type, str] = {kind: f"collectives of {piece}" for kind, piece in PIECES.items()}
OF_SLICES = {*PIECES.values(), *COLLECTIVES_OF.values(), "recompute", *SIZES - {"activation"}}
"""The costs that have factors of their own for each slice."""
BY_DEFAULT = {
    "backward": ("backward_input", "backward_weight"),
    "recompute": ("forward",),
    "prefill": ("forward",),
    "decode": ("forward",),
    "gathered": ("parameters",),
    "gradients": ("gathered",),
    "carry_gradient": ("carry",),
}
UNSCALED = {"parameters", "gathered", "gradients", "update", "prepared"}  # by the factors of microbatches
ROUNDING = 1e-9
"""The relative difference of times, or of bytes, that are the same: sums of them round."""
WITH_TIED = {"gathered", "gradients"}  # a stage casts, gathers and sums the tied parameters that it uses by itself


@dataclass(frozen=True, slots=True)
class Link:
    """A directed edge between two ranks: a transfer takes latency (seconds) + bytes / bandwidth (bytes a second).

    The bytes of several transfers go one after the other; their latencies overlap.
    """

    latency: float
    bandwidth: float = inf

    def __post_init__(self) -> None:
        object.__setattr__(self, "latency", _number("latency", self.latency))
        bandwidth = _as_float(self.bandwidth)
        if not bandwidth > 0:
            raise ScheduleError(f"a link's bandwidth must be more than 0, not {self.bandwidth!r}")
        object.__setattr__(self, "bandwidth", bandwidth)

    def __repr__(self) -> str:
        return call_of(self)


class _ByKey(Mapping[Any, Any]):
    """A mapping that can't be changed and can be hashed, so that costs can."""

    def __init__(self, items: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = ()) -> None:
        self._items = dict(items)

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self.items()))

    def __repr__(self) -> str:
        return repr(self._items)


class Shared(NamedTuple):
    """Memory of a microbatch that several names share: on a rank it counts once, whichever of them are there.

    Args:
        bytes: its size.
        names: those of microbatch 0: `(Activation(0, 0), Residuals(1, 0))` is output of stage 0 that stage 1 saves.
            Slices share memory as the first one does, each its own; but where `Costs.slice_scale` has sizes of slices,
            names are of their own slice.
    """

    bytes: float
    names: tuple[Name, ...]


class Tied(NamedTuple):
    """Parameters that several stages use: the lowest one's have them, and a rank without that stage has a copy.

    Args:
        bytes: their size, which is a part of the lowest stage's `parameters` and of no other's.
        stages: those that use them, lowest first.
    """

    bytes: float
    stages: tuple[int, ...]


@dataclass(frozen=True)
class Costs:
    """The cost of each effect. A cost of stages is one number for all stages, or a sequence of one for each.

    Where a plan has slices, they are the costs of one slice of a microbatch.

    Args:
        forward, backward_input, backward_weight: times of a forward and of the two halves of its backward.
        backward: time of a fused backward; by default the two halves together.
        overlap: time of an `Overlap` with a whole backward, by the stage that runs forward; by default, and with one
            half of a backward, its two parts together.
        communication: the cost of a transfer: a time, a `Link` of latency and bandwidth, or a mapping
            {(source rank, target rank): either}.
        activation: bytes of a stage's output for one microbatch; its gradients have the same size.
        residuals: bytes that a forward saves for its backward.
        deferred: bytes that an input gradient saves for its weight gradient.
        shared: memory that these have in common. By default none: an output that residuals contain counts twice.
        parameters: bytes of a stage's whole parameters, of tied ones those of the lowest stage that uses them.
        tied: pairs (bytes, stages that use them, lowest first): the sizes of `Plan.ties`. Each stage that uses such
            parameters has sums of their gradients, and casts and gathers them, by itself; they are no part of the other
            stages' `parameters`, `gathered` and `gradients`. By default no copy of tied parameters counts.
        gathered: bytes of a stage's whole parameters in the dtype in which it computes, where they are cast
            (`Precision(compute=...)`); by default they are not.
        gradients: bytes of a stage's whole sum of gradients; by default those of the parameters with which it computes.
            Sums of narrower gradients are float32: twice these bytes for bfloat16.
        gather, scatter: the cost of a `Gather`, and of a `Scatter`: a time, as of the others, or a `Link`, over which a
            rank gets (replicas - 1) / replicas of the bytes, or (shards - 1) / shards in a `Gather` of fewer shards. A
            `Scatter` of parameters that are not sharded travels twice, because every replica needs the whole sum.
        offload, fetch: the cost of an `Offload`, a copy of a microbatch's residuals to the host, and of a `Fetch`, the
            copy back: a time, or a `Link`, over which their bytes go.
        recompute: time of a `Recompute`; by default that of a forward.
        prefill, decode: times of a `Prefill`, of the prompts of a microbatch or of one slice of these, and of a
            `Decode`, of one token of each; by default that of a forward.
        replicas: how many there are, for a `Link` of `gather` or `scatter`; by default those of the plan.
        shards: over how many of them parameters are sharded, if these are fewer, as where others have other experts.
        update: time of an optimizer's update of a stage's parameters.
        optimizer: bytes of the optimizer's state for each byte of a parameter: 2 for Adam in the parameters' dtype.
        reads: {(stage, reader): bytes} where a stage reads only a part of another's output: the bytes that its rank
            receives, and the size of the gradient that it computes.
        collectives: {class: seconds}: the part of an effect's time that collectives inside its piece take, as those of
            tensor parallelism: `{Forward: 0.2, BackwardInput: 0.2}`. That of a whole backward is by default that of its
            two halves, and no part is more than the time. A timeline adds them up; they change no time.
        extra: {class: cost} of effects and values that you define: the time of an effect, the bytes of a value.
            By default 0.
        scale: one factor for each microbatch, for the times of its effects; by default 1. The time of an overlap
            is scaled by the mean of its two microbatches' factors.
        sizes: one factor for each microbatch, for the bytes of its values and so of its transfers; by default `scale`.
        carry: bytes that a stage passes from one slice of a microbatch to the next.
        carry_gradient: bytes of its gradient; by default the same. A gradient that is a view of a larger tensor has
            the memory of that.
        prepared: bytes that a stage computes of its parameters alone, or of nothing, such as masks: once a step, and
            live until its end.
        slice_scale: one factor for each slice of a microbatch, for the times of its effects; by default 1. With causal
            attention a later slice takes longer. Or a mapping {name of a time, or of `residuals`, `deferred`, `carry`,
            `carry_gradient`, or "collectives of forward" and so on: one factor for each slice, or such a sequence for
            each stage}.

    Raises:
        ScheduleError: a number that is negative or not finite.

    >>> from fpipe.effects import Backward, Forward
    >>> costs = Costs(forward=[1, 2], communication={(0, 1): Link(latency=0.1, bandwidth=100)}, activation=50)
    >>> costs.time(Forward(1, 0)), costs.time(Backward(1, 0)), costs.link(0, 1)
    (2.0, 2.0, Link(latency=0.1, bandwidth=100.0))
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    backward: PerStage | None = None
    overlap: PerStage | None = None
    communication: float | Link | Mapping[Edge, float | Link] = 0.0
    activation: PerStage = 0.0
    residuals: PerStage = 0.0
    deferred: PerStage = 0.0
    parameters: PerStage = 0.0
    gather: PerStage | Link = 0.0
    scatter: PerStage | Link = 0.0
    offload: PerStage | Link = 0.0
    fetch: PerStage | Link = 0.0
    recompute: PerStage | None = None
    replicas: int = 1
    shards: int | None = None
    optimizer: float = 2.0
    update: PerStage = 0.0
    gathered: PerStage | None = None
    gradients: PerStage | None = None
    shared: Sequence[Shared] = ()
    tied: Sequence[Tied] = ()
    reads: Mapping[Edge, float] = _ByKey()
    extra: Mapping[type, PerStage] = _ByKey()
    collectives: Mapping[type, PerStage] = _ByKey()
    scale: Sequence[float] = ()
    sizes: Sequence[float] = ()
    carry: PerStage = 0.0
    carry_gradient: PerStage | None = None
    prepared: PerStage = 0.0
    slice_scale: Sequence[float] | Mapping[str, Sequence[float] | Sequence[Sequence[float]]] = ()
    prefill: PerStage | None = None
    decode: PerStage | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            try:
                normal = _NORMAL.get(field.name, _per_stage)(field.name, value)
            except ScheduleError:
                raise
            except (TypeError, ValueError) as error:  # of a value of another kind
                raise ScheduleError(f"{field.name} must be {field.type}, not {value!r}") from error
            object.__setattr__(self, field.name, normal)
        object.__setattr__(self, "sizes", self.sizes or self.scale)

    def __repr__(self) -> str:
        return call_of(self, **({"sizes": ()} if self.sizes == self.scale else {}))

    def time(self, effect: Any, table: Table = TABLE) -> float:
        """Return how long an effect keeps its rank.

        Raises:
            ScheduleError: a row has a time that is no length of time.
        """
        both = parts(effect)
        works = [table.effects[type(part)].work for part in both] if len(both) > 1 else []
        if works and (self.overlap is None or BACKWARD not in works):
            return sum(self.time(part, table) for part in both)
        took = table.effects[type(effect)].time(effect, self)
        if not 0.0 <= took < inf:
            raise ScheduleError(f"the time of {effect} is {took!r}: the row of {type(effect).__name__} is wrong")
        return took

    def at(self, cost: str, of: Any) -> float:
        """Return a cost by its name, for the stage and the microbatch that an effect or a value names."""
        own = self._at(cost, of)
        if not self.tied or cost not in WITH_TIED:
            return own
        return own + sum(self.tied_bytes(cost, each) for each in self.tied if of.stage in each.stages[1:])

    def tied_bytes(self, cost: str, tied: Tied) -> float:
        """Return the bytes of tied parameters in the dtype of `parameters`, `gathered` or `gradients`."""
        whole = self._at("parameters", lowest := Parameters(tied.stages[0]))
        return tied.bytes * self._at(cost, lowest) / whole if whole else tied.bytes

    def _at(self, cost: str, of: Any) -> float:
        per_stage = getattr(self, cost)
        both: Any = parts(of)
        if per_stage is None:
            halves = BY_DEFAULT.get(cost, ())
            return sum(self._at(half, of) for half in halves) if halves else sum(map(self.time, both))
        if cost in UNSCALED:
            return _at(per_stage, both[0].stage)
        return _at(per_stage, both[0].stage) * (sum(self._factor(cost, part) for part in both) / len(both))

    def _factor(self, cost: str, named: Any) -> float:
        """Return the factor of a cost for the microbatch, and for the slice, that an effect or a value names."""
        by_microbatch = self.sizes if cost in SIZES else self.scale
        factor = by_microbatch[named.microbatch] if by_microbatch else 1.0
        by_slice = self.of_slices(cost, named.stage)
        return factor * by_slice[slice_of(named)] if by_slice else factor

    def of_slices(self, cost: str, stage: int) -> Sequence[float]:
        """Return the factors of a cost for the slices of a stage; none where all are 1."""
        if isinstance(self.slice_scale, tuple):
            return () if cost in SIZES else self.slice_scale
        factors: Any = cast(Any, self.slice_scale).get(cost, ())
        of_stage: Sequence[float] = factors[stage] if factors and isinstance(factors[0], tuple) else factors
        return of_stage

    @property
    def has_sizes_of_slices(self) -> bool:
        """Each slice has sizes of its own, and each name in `shared` is of one slice."""
        return isinstance(self.slice_scale, Mapping) and not SIZES.isdisjoint(self.slice_scale)

    def collective(self, effect: Any, table: Table = TABLE) -> float:
        """Return how much of an effect's time collectives inside its piece take."""
        return min(sum(self._collective(part, table) for part in parts(effect)), self.time(effect, table))

    def _collective(self, effect: Any, table: Table) -> float:
        if not self.collectives:
            return 0.0
        kind, rows = type(effect), table.effects
        halves = [half for half in self.collectives if rows[half].work and not rows[half].work & ~rows[kind].work]
        kinds = [kind] if kind in self.collectives else halves
        factors = (self._factor(COLLECTIVES_OF.get(each, "collectives"), effect) for each in kinds)
        times = (_at(self.collectives[each], effect.stage) for each in kinds)
        return float(sum(map(mul, times, factors)))

    def replica_transfer(self, cost: str, stage: int) -> float:
        """Return the time of a `gather`, or of a `scatter` to shards, of a stage."""
        price = getattr(self, cost)
        if not isinstance(price, Link):
            return _at(price, stage)
        count = self.shards or self.replicas if cost == "gather" else self.replicas
        share = (count - 1) / count
        size = self.at("gathered" if cost == "gather" else "gradients", Parameters(stage))
        return price.latency + share * size / price.bandwidth

    def host_transfer(self, cost: str, of: Any) -> float:
        """Return the time of an `offload`, or of a `fetch`, of the residuals of a stage and a microbatch."""
        price = getattr(self, cost)
        if not isinstance(price, Link):
            return self.at(cost, of)
        return price.latency + self.at("residuals", of) / price.bandwidth

    def over(self, plan: Plan) -> Costs:
        """Return the costs with the links of gathers and scatters as times, for the plan's replicas and its shards.

        Raises:
            ScheduleError: the costs have another number of replicas.
        """
        if self.replicas not in (1, plan.replicas):
            raise ScheduleError(
                f"the costs are those of {self.replicas} replicas, the plan has {plan.replicas}: leave "
                "Costs(replicas=...) out"
            )
        if not any(isinstance(getattr(self, cost), Link) for cost in OVER_REPLICAS):
            return self
        costs, stages = replace(self, replicas=plan.replicas), range(plan.stages)
        both_ways = [2 if isinstance(self.scatter, Link) and s not in plan.gathered else 1 for s in stages]
        return replace(
            costs,
            gather=[costs.replica_transfer("gather", s) for s in stages],
            scatter=[times * costs.replica_transfer("scatter", s) for s, times in zip(stages, both_ways, strict=True)],
        )

    def extra_of(self, of: Any, factors: Sequence[float]) -> float:
        """Return the cost in `extra` of an effect's or a value's class, times the factor of its microbatch."""
        cost = self.extra.get(type(of), 0.0)
        if isinstance(cost, Sequence):
            cost = cost[of.stage]
        return cost * (factors[of.microbatch] if factors and hasattr(of, "microbatch") else 1.0)

    def link(self, source: int, target: int) -> Link:
        """Return the cost of a transfer from one rank to another."""
        if isinstance(self.communication, Link):
            return self.communication
        if not isinstance(self.communication, Mapping):
            return Link(self.communication)
        link = self.communication.get((source, target))
        if not isinstance(link, Link):
            raise ScheduleError(
                f"communication has no entry for the edge from rank {source} to rank {target}: it has those for "
                f"{', '.join(map(str, self.communication)) or 'none'}"
            )
        return link

    def bytes(self, name: Any, table: Table = TABLE) -> float:
        """Return the size of a value on a rank; 0 for sums of weight gradients, which live for the whole step."""
        return table.values[type(name)].bytes(name, self, None, 0)

    def sum_bytes(self, stage: int, rank: int, plan: Plan) -> float:
        """Return the bytes that a rank has, or receives, of the whole sum of a stage's gradients.

        That is all of it on a rank with a copy of the stage, and elsewhere the part that is tied, if its size is known.
        """
        if rank in plan.ranks_of(stage) or not self.tied:
            return self.at("gradients", Parameters(stage))
        here = {*plan.stages_on(rank)}
        both = [tied for tied in self.tied if stage in tied.stages and not here.isdisjoint(tied.stages)]
        return sum(self.tied_bytes("gradients", tied) for tied in both)

    def lasting(self, size: float, stage: int, plan: Plan) -> float:
        """Return the part of so many bytes of a stage that a rank has all the time: all, or its shard."""
        return size / ((self.shards or plan.replicas) if stage in plan.gathered else 1)

    def read(self, stage: int, reader: int, microbatch: int = 0) -> float:
        """Return how many bytes of a stage's output another stage reads."""
        whole = self.reads.get((stage, reader), _at(self.activation, stage))
        return whole * (self.sizes[microbatch] if self.sizes else 1.0)

    def as_json(self) -> dict[str, Any]:
        """Return JSON values, without the costs that are as by default.

        Raises:
            ScheduleError: `extra` or `collectives` has a class of your own.

        >>> Costs(forward=[1, 2], communication=Link(0.5)).as_json()
        {'forward': [1.0, 2.0], 'communication': {'Link': [0.5, inf]}}
        """
        default, values = Costs(), {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: _as_json(each) for name, each in values.items() if each != getattr(default, name)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Costs:
        """Return the costs of `as_json`.

        Raises:
            ScheduleError: it is not from there.

        >>> Costs.from_json({'forward': [1.0, 2.0], 'communication': {'Link': [0.5, 8.0]}})
        Costs(forward=(1.0, 2.0), communication=Link(latency=0.5, bandwidth=8.0))
        """
        try:
            return cls(**{name: _from_json(each) for name, each in content.items()})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ScheduleError(f"these are no costs as of Costs.as_json: {error}") from error

    def check(self, plan: Plan) -> None:
        """Raise ScheduleError for a sequence whose length is not the plan's number of stages or of microbatches."""
        for field in fields(self):
            cost = getattr(self, field.name)
            if field.name in NOT_BY_STAGE:
                continue
            if isinstance(cost, tuple) and len(cost) != plan.stages:
                raise ScheduleError(
                    f"{field.name} has {len(cost)} entries, the plan {plan.stages} stages: give one number for all "
                    "stages, or one for each"
                )
        for name, kind, cost in ((field, *item) for field in BY_CLASS for item in getattr(self, field).items()):
            if isinstance(cost, tuple) and (len(cost) != plan.stages or "stage" not in fields_of(kind)):
                raise ScheduleError(
                    f"{name} has {len(cost)} entries for {kind.__name__}: give one number, or, where it names a stage, "
                    f"one for each of the plan's {plan.stages} stages"
                )
        if unknown := [each.stages for each in self.tied if not each.stages or max(each.stages) >= plan.stages]:
            raise ScheduleError(f"tied names stages {unknown[0]}: give some of the plan's {plan.stages}, lowest first")
        self._check_factors(plan)

    def _check_factors(self, plan: Plan) -> None:
        lists = [("scale", self.scale, plan.microbatches), ("sizes", self.sizes, plan.microbatches)]
        by_cost: Any = self.slice_scale if isinstance(self.slice_scale, Mapping) else {"": self.slice_scale}
        for cost, factors in by_cost.items():
            name = f"slice_scale of {cost}" if cost else "slice_scale"
            is_by_stage = bool(factors) and isinstance(factors[0], tuple)
            if is_by_stage and len(factors) != plan.stages:
                raise ScheduleError(
                    f"{name} has factors of {len(factors)} stages, the plan {plan.stages}: give them for each stage, "
                    "or the same ones for all"
                )
            lists += [(name, of_stage, plan.slices) for of_stage in (factors if is_by_stage else [factors])]
        for name, factors, expected in lists:
            if (count := len(factors)) not in (0, expected):
                noun = "slices" if name.startswith("slice_scale") else "microbatches"
                raise ScheduleError(f"{name} has {count} entries, the plan {expected} {noun}: give one factor for each")


def relative(values: Sequence[float], mean: float) -> list[float]:
    """Return values over their mean, as `slice_scale` has them; 1 for each where it is 0."""
    return [value / mean if mean else 1.0 for value in values]


_CLASSES = {kind.__name__: kind for kind in (Link, Shared, Tied, *TABLE.effects, *TABLE.values)}


def _as_json(value: Any) -> Any:
    """Return a value as JSON: a class by its name, an instance as `{class: fields}`, a mapping as a list of items."""
    if isinstance(value, type):
        return {"class": _name_of(value)}
    if isinstance(value, Mapping):
        return {"items": [[_as_json(key), _as_json(each)] for key, each in value.items()]}
    if is_dataclass(value) or isinstance(value, Shared | Tied):
        names = value._fields if isinstance(value, Shared | Tied) else [field.name for field in fields(value)]
        return {_name_of(type(value)): [_as_json(getattr(value, name)) for name in names]}
    return [*map(_as_json, value)] if isinstance(value, tuple) else value


def _name_of(kind: type) -> str:
    if _CLASSES.get(kind.__name__) is not kind:
        raise ScheduleError(f"costs of {kind.__qualname__}, which is not fpipe's own, can't be written as JSON")
    return kind.__name__


def _from_json(content: Any) -> Any:
    if isinstance(content, list):
        return tuple(map(_from_json, content))
    if not isinstance(content, dict):
        return content
    ((name, value),) = content.items()
    if name == "class":
        return _CLASSES[value]
    values = _from_json(value)
    return dict(values) if name == "items" else _CLASSES[name](*values)


def _at(cost: PerStage, stage: int) -> float:
    return cost[stage] if isinstance(cost, Sequence) else cost


def _per_stage(name: str, cost: Any) -> PerStage:
    """Return a float, or a tuple of floats, so that costs can be hashed."""
    listed = cost.tolist() if hasattr(cost, "tolist") else cost  # arrays and tensors of measured times
    if isinstance(listed, Sequence) and not isinstance(listed, str | bytes):
        return tuple(_number(name, number) for number in listed)
    return _number(name, listed)


def _factors(name: str, factors: Any) -> tuple[float, ...]:
    normal = _per_stage(name, factors)
    if not isinstance(normal, tuple):
        raise ScheduleError(f"{name} has one factor for each microbatch, not {factors!r} for all")
    return normal


def _factors_of_slices(name: str, factors: Any) -> tuple[float, ...] | _ByKey:
    if not isinstance(factors, Mapping):
        return _factors(name, factors)
    if unknown := [cost for cost in factors if cost not in OF_SLICES]:
        raise ScheduleError(f"{name} has factors of {unknown[0]!r}: it takes those of {', '.join(sorted(OF_SLICES))}")

    def by_stage(each: Any) -> tuple[Any, ...]:
        listed = each.tolist() if hasattr(each, "tolist") else each
        is_nested = bool(listed) and isinstance(listed[0], Sequence)
        return tuple(_factors(name, of_stage) for of_stage in listed) if is_nested else _factors(name, listed)

    return _ByKey((cost, by_stage(each)) for cost, each in sorted(factors.items()))


def _time_or_link(name: str, cost: Any) -> PerStage | Link:
    return cost if isinstance(cost, Link) else _per_stage(name, cost)


def _links(name: str, communication: Any) -> float | Link | _ByKey:
    if not isinstance(communication, Mapping):
        return communication if isinstance(communication, Link) else _number(name, communication)
    links = _by_edge(name, communication, "(source rank, target rank)")
    return _ByKey((edge, x if isinstance(x, Link) else Link(_number(name, x))) for edge, x in links)


def _reads(name: str, sizes: Any) -> _ByKey:
    return _ByKey((edge, _number(name, size)) for edge, size in _by_edge(name, sizes, "(stage, reader)"))


def _by_edge(name: str, costs: Any, ends: str) -> list[tuple[Edge, Any]]:
    for edge in _mapping(costs):
        if not (isinstance(edge, tuple) and len(edge) == 2 and all(isinstance(end, int) for end in edge)):
            raise ScheduleError(f"{name} has an entry for {edge!r}: an edge is {ends}")
    return sorted(costs.items(), key=lambda item: item[0])


def _by_class(name: str, costs: Any) -> _ByKey:
    if not all(isinstance(kind, type) for kind in _mapping(costs)):
        raise ScheduleError(f"{name} maps classes of effects and values to costs, not {costs!r}")
    known = [kind.__name__ for kind in costs if kind in TABLE.effects or kind in TABLE.values]
    if name == "extra" and known:
        raise ScheduleError(f"extra is for classes of your own: the cost of {known[0]} has an argument of its own")
    return _ByKey((kind, _per_stage(kind.__name__, cost)) for kind, cost in costs.items())


def _mapping(costs: Any) -> Mapping[Any, Any]:
    if not isinstance(costs, Mapping):
        raise TypeError
    return costs


def _shared(name: str, shared: Any) -> tuple[Shared, ...]:
    if not isinstance(shared, Sequence) or isinstance(shared, str | bytes):
        raise TypeError
    return tuple(Shared(_number(name, size), tuple(names)) for size, names in shared)


def _tied(name: str, tied: Any) -> tuple[Tied, ...]:
    if not isinstance(tied, Sequence) or isinstance(tied, str | bytes):
        raise TypeError
    pairs = tuple(Tied(_number(name, size), tuple(sorted({*stages}))) for size, stages in tied)
    wrong = next((each.stages for each in pairs if not all(is_whole(stage, least=0) for stage in each.stages)), None)
    if wrong is not None:
        raise ScheduleError(f"{name} must be pairs (bytes, numbers of stages), and has the stages {wrong}")
    return pairs


def _count(name: str, count: object) -> int:
    if not is_whole(count, least=1):
        raise ScheduleError(f"{name} must be a whole number of at least 1, not {count!r}")
    return count


def _number(name: str, value: object) -> float:
    number = _as_float(value)
    if not (isfinite(number) and number >= 0):
        raise ScheduleError(f"{name} must be a finite number of at least 0, not {value!r}")
    return number


def _as_float(value: object) -> float:
    """Return a number as a float; NaN for anything else, a bool too."""
    if type(value) is float:  # most are, and to ask for a protocol takes long
        return value
    try:
        return float(value) if isinstance(value, SupportsFloat) and not isinstance(value, bool) else nan
    except (TypeError, ValueError, RuntimeError):  # of an array
        return nan


_NORMAL: Mapping[str, Callable[[str, Any], object]] = {
    "communication": _links,
    **dict.fromkeys((*OVER_REPLICAS, *OVER_HOST_LINK), _time_or_link),
    "replicas": _count,
    "shards": _count,
    "optimizer": _number,
    "shared": _shared,
    "tied": _tied,
    "reads": _reads,
    "extra": _by_class,
    "collectives": _by_class,
    "scale": _factors,
    "sizes": _factors,
    "slice_scale": _factors_of_slices,
}
"""Field of `Costs` -> the function that checks its value, and makes it one that can't change; else `_per_stage`."""
