"""Effects, and the values that effects name. No torch.

Both are names: frozen, hashable, without tensors. The handler owns the tensors. `fpipe.tables` defines what each one
means. Where a microbatch is cut into slices of its sequences, they name a slice, the first by default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


def _repr(named: Any) -> str:
    """Return the call that makes an effect or a value, without the first slice."""
    fields = [(name, getattr(named, name)) for name in named.__dataclass_fields__]
    arguments = (f"{name}={value!r}" for name, value in fields if name != "slice" or value)
    return f"{type(named).__name__}({', '.join(arguments)})"


@dataclass(frozen=True, slots=True)
class Activation:
    """The output of a stage for one microbatch."""

    stage: int
    microbatch: int
    slice: int = 0

    __repr__ = _repr


@dataclass(frozen=True, slots=True)
class Gradient:
    """The cotangent of a stage's output that one of its consumers computes.

    With cotangents by rank, it is the sum over the consumers on this one's rank, from the highest down to this one.
    """

    stage: int
    consumer: int
    microbatch: int
    slice: int = 0

    __repr__ = _repr


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
    slice: int = 0

    __repr__ = _repr


@dataclass(frozen=True, slots=True)
class Deferred:
    """The values that an input gradient saves for its weight gradient; they never leave their rank."""

    stage: int
    microbatch: int
    slice: int = 0

    __repr__ = _repr


@dataclass(frozen=True, slots=True)
class Carry:
    """The values that a stage passes from one slice of a microbatch to the next, such as keys and values.

    They never leave their rank. The forward of the slice gives them, that of the next slice needs them.
    """

    stage: int
    microbatch: int
    slice: int


@dataclass(frozen=True, slots=True)
class CarryGradient:
    """The cotangent of a `Carry`, which never leaves its rank: the backward of the next slice gives it."""

    stage: int
    microbatch: int
    slice: int


@dataclass(frozen=True, slots=True)
class Parameters:
    """The whole parameters of a stage, put together from the shards of all replicas; they never leave their rank."""

    stage: int


@dataclass(frozen=True, slots=True)
class Partials:
    """The part of a stage's weight gradients that one replica computed on a rank; they never leave their rank."""

    stage: int
    rank: int


@dataclass(frozen=True, slots=True)
class Hidden:
    """The output of a stage for one token of each prompt of a microbatch, or for a slice of the prompts.

    The first numbers, `plan.prefills` of them, are those of the slices.
    """

    stage: int
    microbatch: int
    token: int


@dataclass(frozen=True, slots=True)
class Cached:
    """The keys and values of a slice of the prompts in the cache of a stage, which never leave their rank.

    The prefill of the slice gives them, that of the next slice needs them.
    """

    stage: int
    microbatch: int
    token: int


@dataclass(frozen=True, slots=True)
class Token:
    """The tokens that the last stage has chosen, one for each prompt of a microbatch: number `token` of the program.

    The first of them are chosen after the last slice of the prompts, and have its number.
    """

    microbatch: int
    token: int


@dataclass(frozen=True, slots=True)
class Offloaded:
    """A copy on the host of the values that a forward saved; it never leaves its rank."""

    stage: int
    microbatch: int
    slice: int = 0

    __repr__ = _repr


Value = Activation | Gradient | WeightGradient | Hidden | Token
Name = Value | Residuals | Deferred | Carry | CarryGradient | Cached | Parameters | Partials | Offloaded


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the stage and save its residuals."""

    stage: int
    microbatch: int
    slice: int = 0

    __repr__ = _repr


@dataclass(frozen=True, slots=True)
class Backward:
    """Compute input gradients and weight gradients at once."""

    stage: int
    microbatch: int
    slice: int = 0

    __repr__ = _repr


@dataclass(frozen=True, slots=True)
class BackwardInput:
    """Compute the input gradients, and save the values that the weight gradients need."""

    stage: int
    microbatch: int
    slice: int = 0

    __repr__ = _repr


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """Compute the weight gradients, and add them to the stage's sum."""

    stage: int
    microbatch: int
    slice: int = 0

    __repr__ = _repr


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


@dataclass(frozen=True, slots=True)
class Update:
    """Update a stage's parameters by the optimizer: their gradients are final, and nothing of the stage comes after."""

    stage: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """Run the stage on a slice of the prompts of a microbatch, and fill its cache: one for each of `plan.prefills`.

    After the last slice, the last stage chooses the first tokens. By default there is one slice, the whole prompts.
    """

    stage: int
    microbatch: int
    token: int = 0


@dataclass(frozen=True, slots=True)
class Decode:
    """Run the stage on the last token of each prompt of a microbatch; the last stage chooses number `token`.

    Token 0 is chosen after the tokens that the batch has, and every other after the one before it.
    """

    stage: int
    microbatch: int
    token: int


@dataclass(frozen=True, slots=True)
class Offload:
    """Post a copy to the host of the values that a forward saved, without waiting."""

    stage: int
    microbatch: int
    slice: int = 0

    __repr__ = _repr


@dataclass(frozen=True, slots=True)
class Discard:
    """Give up the values that a forward saved, once their copy is on the host; waits for it."""

    stage: int
    microbatch: int
    slice: int = 0

    __repr__ = _repr


@dataclass(frozen=True, slots=True)
class Fetch:
    """Post the copy back of values that were offloaded, without waiting; the backward waits."""

    stage: int
    microbatch: int
    slice: int = 0

    __repr__ = _repr


@dataclass(frozen=True, slots=True)
class Recompute:
    """Run the stage's forward again for the values that its backward needs; the first forward then saves none."""

    stage: int
    microbatch: int
    slice: int = 0

    __repr__ = _repr


Move = Offload | Discard | Fetch | Recompute
Effect = Compute | Overlap | Send | Recv | Reduce | Gather | Release | Scatter | Update | Prefill | Decode | Move


def parts(effect: Effect) -> tuple[Effect, ...]:
    """Return the parts of an effect: two for an overlap, otherwise the effect itself."""
    return (effect.forward, effect.backward) if isinstance(effect, Overlap) else (effect,)
