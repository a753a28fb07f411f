"""Effects, and the values that effects name. No torch.

Both are names: frozen, hashable, without tensors. The handler owns the tensors. `fpipe.tables` defines what each one
means.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Activation:
    """The output of a stage for one microbatch."""

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Gradient:
    """The cotangent of a stage's output that one of its consumers computes.

    With cotangents by rank, it is the sum over the consumers on this one's rank, from the highest down to this one.
    """

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
    """The values that a forward saves for its backward; they never leave their rank."""

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Deferred:
    """The values that an input gradient saves for its weight gradient; they never leave their rank."""

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Parameters:
    """The whole parameters of a stage, put together from the shards of all replicas; they never leave their rank."""

    stage: int


@dataclass(frozen=True, slots=True)
class Partials:
    """The part of a stage's weight gradients that one replica computed on a rank; they never leave their rank."""

    stage: int
    rank: int


Value = Activation | Gradient | WeightGradient
Name = Value | Residuals | Deferred | Parameters | Partials


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the stage and save its residuals."""

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Compute input gradients and weight gradients at once."""

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class BackwardInput:
    """Compute the input gradients, and save the values that the weight gradients need."""

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """Compute the weight gradients, and add them to the stage's sum."""

    stage: int
    microbatch: int


Compute = Forward | Backward | BackwardInput | BackwardWeight


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two effects that the handler may interleave; neither may need a value of the other."""

    forward: Forward
    backward: Backward | BackwardInput | BackwardWeight


@dataclass(frozen=True, slots=True)
class Send:
    """Post the send of a value to a rank, without waiting."""

    value: Value
    rank: int


@dataclass(frozen=True, slots=True)
class Recv:
    """Post the receive of a value from a rank, without waiting; the first use of the value waits."""

    value: Value
    rank: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """The gradient sums of a stage are final: add those of its copies, then those of its ties, in order."""

    stage: int


@dataclass(frozen=True, slots=True)
class Gather:
    """Post the gathering of a stage's parameters from all replicas, without waiting; the first use waits."""

    stage: int


@dataclass(frozen=True, slots=True)
class Release:
    """Give up the whole parameters of a stage; the shard of this replica stays."""

    stage: int


@dataclass(frozen=True, slots=True)
class Scatter:
    """Post the sum over all replicas of a stage's weight gradients on a rank; each replica gets those of its shard."""

    stage: int
    rank: int


Effect = Compute | Overlap | Send | Recv | Reduce | Gather | Release | Scatter


def parts(effect: Effect) -> tuple[Effect, ...]:
    """Return the parts of an effect: two for an overlap, otherwise the effect itself."""
    return (effect.forward, effect.backward) if isinstance(effect, Overlap) else (effect,)
