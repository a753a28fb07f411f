"""Say how a value inside of a stage is placed over the processes that compute the stage together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import optree
import torch
from torch import Tensor

from fpipe.stages.cuts import CONSTRAIN
from fpipe.stages.pytree import NAMESPACE

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

Tree = TypeVar("Tree")


def constrain(x: Tree, placements: Sequence[Placement] | Mapping[str, Placement]) -> Tree:
    """Return a value of a stage, placed as named over the processes that compute the stage together.

    As `jax.lax.with_sharding_constraint`, it changes where numbers are, never which: `Shard(1)` of a tensor that every
    process has takes a piece, of a sum that is not added yet a reduce-scatter; `Replicate()` of pieces is an
    all-gather. The collectives are nodes of the stage's graph. The gradient goes back the other way: that of an
    all-gather is a reduce-scatter, of the sum of the processes' gradients.

    The processes are those over which the stage's params, or its inputs from other stages, are placed. Where there are
    none, `x` is returned as it is: in one process, in `Reference`, under `torch.func`, with plain params.

    Args:
        x: a tensor, or a tree of them, each of which is placed so; its shape stays that of the whole. Other leaves stay
            as they are.
        placements: `Shard(dim)` or `Replicate()` of torch.distributed.tensor: one for each dimension of the mesh, or by
            the name of a dimension, as `{"tp": Shard(1)}`. `Shard` cuts by the rule of `torch.chunk`.

    Raises:
        TypeError: placements are neither a sequence nor a mapping.
        ValueError: placements that don't fit the mesh or a tensor, or are Partial; or a module that calls it is
            exported, as `interop.split` does. From a stage, it is the cause of a `StageError`.

    >>> import torch
    >>> from torch.distributed.tensor import Shard
    >>> constrain(torch.ones(2), [Shard(0)])
    tensor([1., 1.])
    """
    if not isinstance(placements, Sequence | Mapping):
        raise TypeError(f"placements must be one for each dimension, as [Shard(1)], or by its name, not {placements!r}")
    every = placements.values() if isinstance(placements, Mapping) else placements
    if wrong := [each for each in every if each.is_partial()]:
        raise ValueError(f"{wrong[0]} is a sum that is not added: constrain takes Shard(dim) and Replicate()")
    place = CONSTRAIN.get()
    if place is None:
        if torch.compiler.is_exporting():
            raise ValueError(
                "constrain is called in a module that is exported, and the graph would lose it: make the stages by "
                "interop.from_modules, or leave constrain out and call pipeline.sequence_parallel()"
            )
        return x
    return optree.tree_map(  # type: ignore[return-value]
        lambda leaf: place(leaf, placements) if isinstance(leaf, Tensor) else leaf,
        x,  # type: ignore[arg-type]
        namespace=NAMESPACE,
    )
