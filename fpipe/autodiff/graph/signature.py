"""The signature of a call of a stage.

Calls with the same signature run the same graph. A signature holds no tensor. Strides are a part of it, because
kernels, and so bits, depend on them.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fpipe.autodiff.graph.notices import digest
from fpipe.devices import autocasts
from fpipe.stages.pytree import PLAIN, Absent, describe
from fpipe.stages.sharding import Placed

TENSORS = (Tensor, nn.Parameter, nn.Buffer)
NOT_PLACED: Mapping[int, Placed] = {}


class Untraceable(Exception):
    """A stage cannot be traced. The message gives the reason."""


class Impure(Exception):
    """A stage is not a pure function. The message gives the reason."""


class Spec(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    wanted: bool  # whether it requires a gradient
    conj: bool
    neg: bool
    placed: Placed | None = None  # of a tensor that is this process's piece of a larger one: how that is placed


class Static(NamedTuple):
    """A leaf that is not a tensor. A graph is valid for this value only."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._key == other._key

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> Hashable:
        """NaN equals NaN; 1, True and 1.0 differ."""
        plain = type(self.value) in PLAIN
        return type(self.value), repr(self.value) if plain else id(self.value)


Leaf = Spec | Static


class Tree(NamedTuple):
    """A flattened tree of specs."""

    leaves: tuple[Leaf, ...]
    spec: optree.PyTreeSpec

    @classmethod
    def of(
        cls,
        leaves: Sequence[Any],
        spec: optree.PyTreeSpec,
        wanted: Collection[int] = (),
        placed: Mapping[int, Placed] = NOT_PLACED,
    ) -> Tree:
        """Return the tree of values.

        Args:
            wanted: numbers of those that require gradients.
            placed: by number, the placements of those that are pieces.
        """
        return cls(tuple(leaf(x, i in wanted, placed.get(i)) for i, x in enumerate(leaves)), spec)


class Ambient(NamedTuple):
    """The settings of torch that decide which operations a stage runs."""

    autocast: tuple[tuple[str, torch.dtype], ...]
    dtype: torch.dtype
    device: torch.device
    inference: bool
    deterministic: bool
    kernels: tuple[bool, ...]


class Signature(NamedTuple):
    """The specs of a call's arguments, and the settings of torch.

    Args:
        trained: numbers of the params that get gradients.
        sources: outputs of other stages that the stage reads, in the order of their numbers.
        data: the parts of the microbatch that the stage reads.
        keep: whether the call is differentiated.
        whole: whether its outputs are whole on every process that computes the stage, as those of the last stage are.
    """

    params: Tree
    trained: tuple[int, ...]
    state: Tree
    sources: tuple[Tree, ...]
    data: Tree
    keep: bool
    ambient: Ambient
    whole: bool = True

    @property
    def placed(self) -> list[Placed]:
        """Return the placements of the params, and of the outputs of other stages, that are pieces."""
        leaves = (x for tree in (self.params, *self.sources) for x in tree.leaves)
        return [x.placed for x in leaves if isinstance(x, Spec) and x.placed is not None]

    @property
    def digest(self) -> str:
        """A digest of the shapes, dtypes and plain values, and of what gets gradients: equal on other devices.

        A piece counts as the whole, for the pieces of other processes may be smaller.
        """
        texts = (
            f"{[*(x.shape if x.placed is None else x.placed.shape)]} {x.dtype}"
            if isinstance(x, Spec)
            else repr(x.value)
            for x in self._leaves
        )
        return digest([*texts, repr((self.trained, self.keep))])

    @property
    def _leaves(self) -> tuple[Leaf, ...]:
        return (*self.params.leaves, *self.inputs)

    @property
    def inputs(self) -> tuple[Leaf, ...]:
        """Return all leaves except those of the params."""
        return (*self.state.leaves, *(x for tree in self.sources for x in tree.leaves), *self.data.leaves)


def leaf(x: Any, wanted: bool = False, placed: Placed | None = None) -> Leaf:
    """Return a leaf of a signature.

    Raises:
        Untraceable: the value is neither a plain tensor nor a plain value.
    """
    if isinstance(x, Tensor):
        if type(x) not in TENSORS or x.layout != torch.strided:
            raise Untraceable(f"{describe(x)} is a {type(x).__qualname__} of layout {x.layout}, not a plain tensor")
        return Spec(tuple(x.shape), x.stride(), x.dtype, x.device, wanted, x.is_conj(), x.is_neg(), placed)
    if type(x) not in PLAIN and not isinstance(x, Absent):
        raise Untraceable(f"a value of type {type(x).__module__}.{type(x).__qualname__} is neither a tensor nor plain")
    return Static(x)


def leaf_key(x: Any) -> Hashable:
    """Return a key that is equal for equal leaves of signatures, and faster to compute than the leaf."""
    if type(x) in TENSORS and x.layout is torch.strided:
        return x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_conj(), x.is_neg()
    return leaf(x)


def ambient() -> Ambient:
    """Return the current settings."""
    sdp, cuda = torch.backends.cuda, torch.backends.cudnn
    return Ambient(
        autocasts(),
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
