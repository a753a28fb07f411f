"""What a trace is made for: the signature of one call of a stage.

Two calls of one signature run the same graph. A signature holds no tensor; strides are a part of it, since
kernels, and so bits, depend on them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fpipe.stages.pytree import PLAIN, Absent, describe

TENSORS = (Tensor, nn.Parameter, nn.Buffer)


class Untraceable(Exception):
    """A stage can't be traced; the message says why."""


class Impure(Exception):
    """A stage does what a pure function doesn't; the message says what."""


class Spec(NamedTuple):
    """A tensor without its memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    wanted: bool  # whether it gets a gradient
    conj: bool
    neg: bool


class Static(NamedTuple):
    """A leaf that is no tensor: a graph is made for its very value."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._key == other._key

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> Hashable:
        """NaN is NaN, 1 is neither True nor 1.0."""
        plain = type(self.value) in PLAIN
        return type(self.value), repr(self.value) if plain else id(self.value)


Leaf = Spec | Static


class Tree(NamedTuple):
    """A tree of specs, taken apart."""

    leaves: tuple[Leaf, ...]
    spec: optree.PyTreeSpec


class Ambient(NamedTuple):
    """The settings of torch that decide which operations a stage comes to."""

    autocast: tuple[tuple[str, torch.dtype], ...]
    dtype: torch.dtype
    device: torch.device
    inference: bool
    deterministic: bool
    kernels: tuple[bool, ...]


class Call(NamedTuple):
    """A signature.

    Args:
        sources: outputs of other stages that it reads, in the order of their numbers.
        data: what the stage reads of the microbatch.
        keep: whether the call is differentiated.
    """

    params: Tree
    trained: tuple[int, ...]
    state: Tree
    sources: tuple[Tree, ...]
    data: Tree
    keep: bool
    ambient: Ambient

    @property
    def inputs(self) -> tuple[Leaf, ...]:
        """All leaves but those of the params."""
        return (*self.state.leaves, *(x for tree in self.sources for x in tree.leaves), *self.data.leaves)


def leaf(x: Any, wanted: bool = False) -> Leaf:
    """What of a leaf belongs to a signature.

    Raises:
        Untraceable: it is neither a plain tensor nor a plain value.
    """
    if isinstance(x, Tensor):
        if type(x) not in TENSORS or x.layout != torch.strided:
            raise Untraceable(f"{describe(x)} is a {type(x).__qualname__} of layout {x.layout}, not a plain tensor")
        return Spec(tuple(x.shape), x.stride(), x.dtype, x.device, wanted, x.is_conj(), x.is_neg())
    if type(x) not in PLAIN and not isinstance(x, Absent):
        raise Untraceable(f"a value of type {type(x).__module__}.{type(x).__qualname__} is neither a tensor nor plain")
    return Static(x)


def glance(x: Any) -> Hashable:
    """Equal for leaves of equal signatures, and quicker to get."""
    if type(x) in TENSORS and x.layout is torch.strided:
        return x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_conj(), x.is_neg()
    return leaf(x)


def leaves(values: Sequence[Any]) -> tuple[Leaf, ...]:
    """Of values that tell by `requires_grad` whether they want a gradient."""
    return tuple([leaf(x, isinstance(x, Tensor) and x.requires_grad) for x in values])


def ambient() -> Ambient:
    """As it is now."""
    on = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    sdp, cuda = torch.backends.cuda, torch.backends.cudnn
    return Ambient(
        tuple((kind, torch.get_autocast_dtype(kind)) for kind in on),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        (
            sdp.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
            sdp.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]
            sdp.math_sdp_enabled(),  # type: ignore[no-untyped-call]
            sdp.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]
            bool(cuda.enabled),
            bool(torch.backends.mkldnn.enabled),
        ),
    )
