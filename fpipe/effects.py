"""Effects, and the values that they name. No torch.

Both are names: frozen, hashable, without tensors, which the handler owns. `fpipe.tables` says what each one means.
"""

from __future__ import annotations

from dataclasses import dataclass


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


def parts(effect: Effect) -> tuple[Effect, ...]:
    """The effect's own parts: two for an overlap, itself otherwise."""
    return (effect.forward, effect.backward) if isinstance(effect, Overlap) else (effect,)
