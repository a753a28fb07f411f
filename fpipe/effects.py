"""What can happen in a pipeline, and the table of what each effect needs, gives and frees. No torch.

Effects and values are names: frozen, hashable, without tensors. The handler owns what they name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Activation:
    """What a stage puts out for one microbatch."""

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Gradient:
    """The cotangent of a stage's output that one of its consumers gives."""

    stage: int
    consumer: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """The sum of a stage's weight gradients over the microbatches that one rank ran."""

    stage: int
    rank: int


@dataclass(frozen=True, slots=True)
class Residuals:
    """What a forward keeps for its backward; never leaves its rank."""

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Deferred:
    """What an input gradient keeps for its weight gradient; never leaves its rank."""

    stage: int
    microbatch: int


Value = Activation | Gradient | WeightGradient
Name = Value | Residuals | Deferred


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the stage, keep its residuals."""

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Both gradients at once."""

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class BackwardInput:
    """Input gradients; keep what the weight gradients need."""

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """Weight gradients, added to the stage's sum."""

    stage: int
    microbatch: int


Compute = Forward | Backward | BackwardInput | BackwardWeight


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two effects that the handler may interleave; neither may need what the other gives."""

    forward: Forward
    backward: Backward | BackwardInput


@dataclass(frozen=True, slots=True)
class Send:
    """Post a value to a rank; does not wait."""

    value: Value
    rank: int


@dataclass(frozen=True, slots=True)
class Recv:
    """Post the receive of a value from a rank; does not wait, the use of the value does."""

    value: Value
    rank: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """The stage's gradient sums are final: add copies, then ties, in their order."""

    stage: int


Effect = Compute | Overlap | Send | Recv | Reduce


class Topology(Protocol):
    """What the table asks of a plan."""

    def sources(self, stage: int, /) -> tuple[int, ...]: ...
    def consumers(self, stage: int, /) -> tuple[int, ...]: ...
    def rank_of(self, stage: int, microbatch: int, /) -> int: ...
    def sharers(self, stage: int, /) -> tuple[tuple[int, int], ...]: ...


class Row(NamedTuple):
    """One effect's meaning to every reader: names it needs, gives and frees, and its track in a timeline.

    What is freed has had its one use. An activation has as many uses as the DAG says, a sum as it has ties, and what
    is sent may be used here too: these are given up at the last effect that needs them.
    """

    needs: Callable[[Any, Topology], tuple[Name, ...]]
    gives: Callable[[Any, Topology], tuple[Name, ...]]
    frees: Callable[[Any, Topology], tuple[Name, ...]]
    track: str


def _nothing(effect: Effect, plan: Topology) -> tuple[Name, ...]:
    return ()


def _inputs(e: Compute, plan: Topology) -> tuple[Name, ...]:
    return tuple(Activation(s, e.microbatch) for s in plan.sources(e.stage))


def _outputs(e: Compute, plan: Topology) -> tuple[Name, ...]:
    kept = Residuals(e.stage, e.microbatch)
    return (Activation(e.stage, e.microbatch), kept) if plan.consumers(e.stage) else (kept,)


def _cotangents(e: Compute, plan: Topology) -> tuple[Name, ...]:
    given = (Gradient(e.stage, c, e.microbatch) for c in plan.consumers(e.stage))
    return (*given, Residuals(e.stage, e.microbatch))


def _input_gradients(e: Compute, plan: Topology) -> tuple[Name, ...]:
    return tuple(Gradient(s, e.stage, e.microbatch) for s in plan.sources(e.stage))


def _weight_gradient(e: Compute, plan: Topology) -> tuple[Name, ...]:
    return (WeightGradient(e.stage, plan.rank_of(e.stage, e.microbatch)),)


def _deferred(e: Compute, plan: Topology) -> tuple[Name, ...]:
    return (Deferred(e.stage, e.microbatch),)


def _value(e: Send | Recv, plan: Topology) -> tuple[Name, ...]:
    return (e.value,)


def _shared(e: Reduce, plan: Topology) -> tuple[Name, ...]:
    return tuple(WeightGradient(stage, rank) for stage, rank in plan.sharers(e.stage))


def _both(column: Callable[[Row], Any]) -> Callable[[Overlap, Topology], tuple[Name, ...]]:
    def names(e: Overlap, plan: Topology) -> tuple[Name, ...]:
        return tuple(n for part in (e.forward, e.backward) for n in column(TABLE[type(part)])(part, plan))

    return names


def _backward_gives(e: Backward, plan: Topology) -> tuple[Name, ...]:
    return _input_gradients(e, plan) + _weight_gradient(e, plan)


def _backward_input_gives(e: BackwardInput, plan: Topology) -> tuple[Name, ...]:
    return _input_gradients(e, plan) + _deferred(e, plan)


TABLE: dict[type, Row] = {
    Forward: Row(_inputs, _outputs, _nothing, "compute"),
    Backward: Row(_cotangents, _backward_gives, _cotangents, "compute"),
    BackwardInput: Row(_cotangents, _backward_input_gives, _cotangents, "compute"),
    BackwardWeight: Row(_deferred, _weight_gradient, _deferred, "compute"),
    Overlap: Row(_both(lambda r: r.needs), _both(lambda r: r.gives), _both(lambda r: r.frees), "compute"),
    Send: Row(_value, _nothing, _nothing, "send"),
    Recv: Row(_nothing, _value, _nothing, "receive"),
    Reduce: Row(_shared, _nothing, _nothing, "host"),
}


def needs(effect: Effect, plan: Topology) -> tuple[Name, ...]:
    """Names that must be on the rank before the effect can run."""
    return TABLE[type(effect)].needs(effect, plan)


def gives(effect: Effect, plan: Topology) -> tuple[Name, ...]:
    """Names that are on the rank after it (for a receive: once it has arrived)."""
    return TABLE[type(effect)].gives(effect, plan)


def frees(effect: Effect, plan: Topology) -> tuple[Name, ...]:
    """Names that have had their one use."""
    return TABLE[type(effect)].frees(effect, plan)


def parts(effect: Effect) -> tuple[Effect, ...]:
    """The effect's own parts: two for an overlap, itself otherwise."""
    return (effect.forward, effect.backward) if isinstance(effect, Overlap) else (effect,)
