"""Tensors that processes place, as those of tensor parallelism do, in functions that work over another group.

Such a function computes with this process's pieces, and its result is placed as they are; or with whole tensors, which
each process has. Gradients go back the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import optree
import torch
import torch.distributed as dist
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for

from fpipe.parallel.group import Group, group_of
from fpipe.stages.pytree import NAMESPACE, flatten
from fpipe.stages.sharding import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

P = ParamSpec("P")
T = TypeVar("T")


def mesh_of(*trees: object) -> DeviceMesh | None:
    """Return the mesh over which a leaf of the trees is placed; None where none is."""
    return next((leaf.device_mesh for tree in trees for leaf in flatten(tree).leaves if is_dtensor(leaf)), None)


def check_apart(group: Group, mesh: DeviceMesh) -> None:
    """Check that a group has no other process of a mesh.

    Raises:
        ValueError: it has.
    """
    processes = [] if group is None else dist.get_process_group_ranks(group_of(group))
    beside = {rank for each in mesh.get_all_groups() for rank in dist.get_process_group_ranks(each)}
    if shared := sorted({*processes} & beside - {dist.get_rank()}):
        raise ValueError(
            f"a tensor is placed over {mesh}, and group has processes {shared} of it: its operations have the "
            "collectives over these by themselves, and fpipe.constrain places it otherwise; pass a group of another "
            "dimension"
        )


def is_whole(x: object) -> bool:
    """Return whether each process has all of a leaf."""
    return not is_dtensor(x) or all(placement.is_replicate() for placement in x.placements)


def whole(x: Any) -> Any:
    """Return a tensor of which this process has all; another leaf as it is."""
    return _spread(x).to_local() if is_dtensor(x) else x


def replicated(x: Any, mesh: DeviceMesh) -> Any:
    """Return a tensor that is equal on all processes of a mesh as one that is placed; another leaf as it is."""
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(x, Tensor) or isinstance(x, DTensor):
        return x
    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


def placed_like(piece: Tensor, x: DTensor) -> DTensor:
    """Return the tensor that a piece is of, placed as another one, whose sizes are the same along what is cut."""
    from torch.distributed.tensor import DTensor

    cuts = [(at, each.dim) for at, each in enumerate(x.placements) if each.is_shard()]  # type: ignore[attr-defined]
    if all(x.shape[dim] % x.device_mesh.size(at) == 0 for at, dim in cuts):
        return DTensor.from_local(piece, x.device_mesh, x.placements, run_check=False)
    sizes = {dim: x.shape[dim] for _, dim in cuts}
    shape = torch.Size([sizes.get(dim, size) for dim, size in enumerate(piece.shape)])
    strides = make_contiguous_strides_for(shape)
    piece = piece.contiguous()
    return DTensor.from_local(piece, x.device_mesh, x.placements, run_check=False, shape=shape, stride=strides)


def over_pieces(function: Callable[[Tensor], Tensor], x: Tensor, group: Group, *dims: int) -> Tensor:
    """Apply a function to this process's piece of a tensor; return the tensor that its result is a piece of.

    Args:
        dims: along which the function cuts or joins tensors, so that these are whole.
    """
    if not is_dtensor(x):
        return function(x)
    check_apart(group, x.device_mesh)
    x = cut_apart_from(x, {dim % x.ndim for dim in dims})
    return placed_like(function(x.to_local(grad_placements=x.placements)), x)


def cut_apart_from(x: DTensor, dims: Collection[int]) -> DTensor:
    """Return a tensor that is cut by equal rules along other dimensions than these, or whole on each process."""
    from torch.distributed.tensor import Shard

    can_stay = (each.is_replicate() or (type(each) is Shard and each.dim not in dims) for each in x.placements)
    return x if all(can_stay) else _spread(x)


def on_each(function: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return a decorator's function: each process computes it with whole tensors of its first argument, a tree."""

    @wraps(function)
    def call(first: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        mesh = mesh_of(first)
        if mesh is None:
            return function(first, *args, **kwargs)
        return mapped(lambda x: replicated(x, mesh), function(mapped(whole, first), *args, **kwargs))

    return call


def mapped(function: Callable[[Any], Any], tree: T) -> T:
    return optree.tree_map(function, tree, namespace=NAMESPACE, none_is_leaf=True)  # type: ignore[arg-type, return-value]


def _spread(x: DTensor) -> DTensor:
    from torch.distributed.tensor import Replicate

    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)
