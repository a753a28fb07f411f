"""Leaves of params that the replicas of a pipeline share: DTensors, of which each process holds a piece.

Nothing here communicates. `torch.distributed.tensor` takes half a second to import; who makes DTensors imports it, and
until then no leaf is one.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeGuard

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.stages.pytree import NAMESPACE, describe, flatten

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


def is_dtensor(leaf: object) -> TypeGuard[DTensor]:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(leaf, getattr(module, "DTensor", ()))


def has_dtensor(types: Sequence[type]) -> bool:
    """Return whether the types of an operation's arguments have DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and getattr(module, "DTensor", None) in types


def placed_alike(leaf: Tensor, other: Tensor) -> bool:
    """Whether two DTensors have one mesh and equal placements; true of two plain tensors."""
    if not (is_dtensor(leaf) and is_dtensor(other)):
        return is_dtensor(leaf) == is_dtensor(other)
    if leaf._spec is other._spec:
        return True
    return leaf.device_mesh == other.device_mesh and leaf.placements == other.placements


def local(leaf: Tensor) -> Tensor:
    """Return this process's piece of a DTensor, in its memory; another tensor as it is."""
    return leaf._local_tensor.detach() if is_dtensor(leaf) else leaf


def sharding_key(leaf: Tensor) -> tuple[object, ...]:
    """Return a key of a leaf: leaves with equal keys have equal shardings over the replicas."""
    if is_dtensor(leaf):
        return leaf.shape, leaf.dtype, leaf.stride(), leaf.placements, leaf.device_mesh
    return leaf.shape, leaf.dtype, leaf.stride()


def wrap(piece: Tensor, like: Tensor) -> Tensor:
    """Return a piece as a DTensor that is placed like another one, in the piece's memory; as it is if that is none.

    The piece may have another dtype.
    """
    if not is_dtensor(like):
        return piece
    kind = type(like)
    if piece.dtype == like.dtype:  # torch's own way inside: ten times as fast as from_local
        return kind(piece.detach(), like._spec, requires_grad=False)
    with torch.no_grad():
        return kind.from_local(
            piece, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def is_first(leaf: Tensor, replica: int, replicas: DeviceMesh | None) -> bool:
    """Return whether no replica before this one holds its piece of a leaf, so that sums over replicas count it once.

    Dimensions of its mesh that are not the replicas', as of tensor parallelism, make no difference.

    Args:
        replica: the number of this process's replica. A leaf that is no DTensor is the same on all.
        replicas: their mesh; None where one process plays all.

    Raises:
        ValueError: the leaf holds partial sums.
    """
    if not is_dtensor(leaf):
        return replica == 0
    _refuse_partial(leaf, range(leaf.device_mesh.ndim))
    if replicas is None:
        return replica == 0
    mesh_dims = _dims_within(replicas, leaf.device_mesh)
    is_empty = local(leaf).numel() == 0  # pieces without rows are all the same
    return all(
        at == 0
        for dim, at in enumerate(replicas.get_coordinate() or ())
        if is_empty or dim not in mesh_dims or leaf.placements[mesh_dims[dim]].is_replicate()
    )


def cut_over(leaf: Tensor, replicas: DeviceMesh | None) -> DeviceMesh | None:
    """Return the mesh of the processes over which a leaf is cut that are no replicas; None if it is not.

    Raises:
        ValueError: see `Placed.of`.
    """
    placed = Placed.of(leaf, replicas)
    return None if placed is None or placed.placements[0].is_replicate() else placed.mesh


def processes_beside(params: Any, processes: Collection[int], replicas: DeviceMesh | None) -> list[tuple[int, ...]]:
    """Return the processes along each dimension over which leaves are placed, with this one; in one order on all.

    Args:
        processes: of the pipelines; a dimension with several of them is left out, and those of the replicas are.
    """
    try:
        leaves = flatten(params).leaves
    except Exception:  # the types of the tree are the caller's
        return []
    groups = set[tuple[int, ...]]()
    for mesh in {leaf.device_mesh for leaf in leaves if is_dtensor(leaf)}:
        if mesh.get_coordinate() is None:
            continue
        taken = set() if replicas is None else {*_dims_within(replicas, mesh).values()}
        along = [tuple(sorted(_processes(mesh, at))) for at in range(mesh.ndim) if at not in taken]
        groups |= {group for group in along if len(group) > 1 and len({*group} & {*processes}) < 2}
    return sorted(groups)


def locals_of(tree: Any) -> Any:
    """Return a tree with the pieces of its DTensors in their place."""
    return optree.tree_map(local, tree, namespace=NAMESPACE)


def wrapped(tree: Any, like: Any) -> Any:
    """Return a tree whose leaves are placed like those of another tree of the same structure. None stays None."""
    return optree.tree_map(
        lambda piece, leaf: None if piece is None else wrap(piece, leaf),
        tree,
        like,
        none_is_leaf=True,
        namespace=NAMESPACE,
    )


class Placed(NamedTuple):
    """The placement of a leaf over processes that compute its stage together, as those of tensor parallelism do.

    Args:
        mesh: of these processes, which has one dimension.
        shape, stride: of the whole leaf.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, leaf: Tensor, replicas: DeviceMesh | None) -> Self | None:
        """Return the placement of a leaf over the dimensions of its mesh that are not the replicas'; None without any.

        Raises:
            ValueError: there are several such dimensions of more than one process, or it holds partial sums.
        """
        if not is_dtensor(leaf):
            return None
        mesh = leaf.device_mesh
        taken = set() if replicas is None else {*_dims_within(replicas, mesh).values()}
        dims = [at for at in range(mesh.ndim) if at not in taken and mesh.size(at) > 1]
        _refuse_partial(leaf, dims)
        if len(dims) > 1:
            raise ValueError(
                f"a leaf {describe(leaf)} is placed over {len(dims)} dimensions of {mesh} that are no replicas: "
                "flatten them to one, and pass those of the replicas to the handler"
            )
        if not dims:
            return None
        (at,) = dims
        return cls(_along(mesh, at, id(mesh)), (leaf.placements[at],), leaf.shape, leaf.stride())


@dataclass(frozen=True)
class Sharding:
    """The part of a leaf that one replica holds, out of the leaf that its stage reads.

    A leaf is cut along one dimension by the rule of `torch.chunk`: pieces of equal numbers of rows, rounded up, of
    which the last ones may be smaller or empty.

    Args:
        shape, stride, dtype: of the leaf that the stage reads, which is dense in memory. If it is cut over other
            dimensions of the mesh too, such as those of tensor parallelism, it is this process's piece over these.
        dim: the dimension along which the replicas cut it; None if each holds all of it.
        shards: the number of pieces.
        shard: the number of this process's piece.
        mesh_dim: the dimension of the replicas' mesh over which it is cut; over the others the piece is replicated.
        placed: the placement over the other dimensions, if it is cut over them.
        is_expert: each process along the dimension of the experts has a leaf of its own: its piece.

    >>> sharding = Sharding(torch.Size([5, 2]), (2, 1), torch.float32, dim=0, shards=4, shard=2, mesh_dim=0)
    >>> sharding.sizes, sharding.rows
    ((2, 2, 1, 0), range(4, 5))
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None = None
    shards: int = 1
    shard: int = 0
    mesh_dim: int | None = None
    placed: Placed | None = None
    is_expert: bool = False

    @classmethod
    def of(cls, leaf: Tensor, replicas: DeviceMesh, experts: int | None = None) -> Sharding:
        """Return the sharding of a leaf over the replicas' mesh. A leaf that is no DTensor is whole on every replica.

        Args:
            experts: the dimension of that mesh over which leaves are experts' if they are cut.

        Raises:
            ValueError: the leaf is cut over two dimensions of that mesh beside that of the experts, or into experts of
                unequal numbers, or over another mesh of replicas, or holds partial sums.
        """
        piece = local(leaf)
        if not is_dtensor(leaf):
            return cls(piece.shape, piece.stride(), piece.dtype)
        mesh = leaf.device_mesh
        mesh_dims = _dims_within(replicas, mesh)
        _refuse_partial(leaf, range(mesh.ndim))
        own = expert_dim(leaf, replicas, experts)
        if own is not None:
            _check_experts(leaf, own)
        cut = [(i, at) for i, at in mesh_dims.items() if not leaf.placements[at].is_replicate() and at != own]
        elsewhere = [at for at, kind in enumerate(leaf.placements) if at not in mesh_dims.values() and kind.is_shard()]
        if any(len({*_processes(mesh, at)} & {*replicas.mesh.flatten().tolist()}) > 1 for at in elsewhere):
            raise ValueError(
                f"a leaf {describe(leaf)} is cut over {mesh}, and the replicas are those of {replicas}: cut it over "
                "the mesh that is passed to the handler"
            )
        placed = Placed.of(leaf, replicas)
        if placed is not None and own is not None:  # the stage reads this process's experts
            at_experts: int = leaf.placements[own].dim  # type: ignore[attr-defined]
            own_shape = [size // (mesh.size(own) if at == at_experts else 1) for at, size in enumerate(leaf.shape)]
            placed = placed._replace(shape=torch.Size(own_shape), stride=_dense(torch.Size(own_shape), leaf.stride()))
        if not cut:
            return cls(
                piece.shape, _dense(piece.shape, leaf.stride()), piece.dtype, placed=placed, is_expert=own is not None
            )
        if len(cut) > 1:
            raise ValueError(
                f"a leaf {describe(leaf)} is cut over {len(cut)} dimensions of the replicas' mesh, {leaf.placements}: "
                "cut it over one, or over one that is flattened from them"
            )
        ((mesh_dim, at),) = cut
        dim: int = leaf.placements[at].dim  # type: ignore[attr-defined]
        sizes = {i: size for i, size in enumerate(leaf.device_mesh.shape) if i != at}
        others = prod(size for i, size in sizes.items() if getattr(leaf.placements[i], "dim", None) == dim)
        shape = torch.Size([*piece.shape[:dim], leaf.shape[dim] // others, *piece.shape[dim + 1 :]])
        shards, shard = replicas.size(mesh_dim), replicas.get_local_rank(mesh_dim)
        is_expert = own is not None
        return cls(
            shape, _dense(shape, leaf.stride()), piece.dtype, dim, shards, shard, mesh_dim, placed, is_expert=is_expert
        )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows of each piece."""
        rows = 1 if self.dim is None else self.shape[self.dim]
        chunk = -(-rows // self.shards)
        return tuple(max(0, min(chunk, rows - chunk * shard)) for shard in range(self.shards))

    @cached_property
    def piece_shape(self) -> torch.Size:
        """The shape of this process's piece."""
        if self.dim is None:
            return self.shape
        return torch.Size([*self.shape[: self.dim], self.sizes[self.shard], *self.shape[self.dim + 1 :]])

    @property
    def rows(self) -> range:
        """The rows of this process's piece."""
        stop = [*accumulate(self.sizes)][self.shard]
        return range(stop - self.sizes[self.shard], stop)

    def pieces(self, whole: Tensor) -> list[Tensor]:
        """Return the pieces of a whole leaf or gradient, as views."""
        return [whole] if self.dim is None else [*whole.split_with_sizes(self.sizes, self.dim)]

    def laid_out(self, x: Tensor) -> Tensor:
        """Return a piece, or the whole, in memory in the order of `stride`; as it is if it is laid out so."""
        stride = _dense(x.shape, self.stride)
        return (
            x if x.stride() == stride else torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)
        )

    def padded(self, piece: Tensor) -> Tensor:
        """Return a piece with its cut dimension first, dense, and with as many rows as the largest piece."""
        assert self.dim is not None
        rows, first = max(self.sizes), piece.movedim(self.dim, 0)
        if first.shape[0] == rows:
            return first.contiguous()
        padded = first.new_zeros(rows, *first.shape[1:])
        padded[: first.shape[0]] = first
        return padded

    def joined(self, padded: Tensor) -> Tensor:
        """Return the whole leaf, out of the padded pieces one after the other: only the last ones are padded."""
        assert self.dim is not None
        return self.laid_out(padded[: self.shape[self.dim]].movedim(0, self.dim))


def expert_dim(leaf: DTensor, replicas: DeviceMesh, experts: int | None) -> int | None:
    """Return the dimension of a leaf's mesh over which it is cut into experts; None if it is not.

    Args:
        experts: the dimension of the replicas' mesh over which experts are spread.
    """
    at = None if experts is None else _dims_within(replicas, leaf.device_mesh).get(experts)
    return at if at is not None and leaf.placements[at].is_shard() else None


def _refuse_partial(leaf: DTensor, dims: Iterable[int]) -> None:
    """Raise ValueError if each process along one of these dimensions has a part of a sum."""
    if any(leaf.placements[at].is_partial() for at in dims):
        raise ValueError(f"a leaf {describe(leaf)} holds partial sums, {leaf.placements}: redistribute it")


def _check_experts(leaf: DTensor, at: int) -> None:
    dim, size = leaf.placements[at].dim, leaf.device_mesh.size(at)  # type: ignore[attr-defined]
    if leaf.shape[dim] % size:
        raise ValueError(
            f"a leaf {describe(leaf)} is cut into experts over {size} processes, which don't divide its dimension "
            f"{dim}: take a multiple of {size} experts, or a dimension of the mesh whose size divides their number"
        )


@lru_cache(maxsize=16)
def _dims_within(replicas: DeviceMesh, mesh: DeviceMesh) -> Mapping[int, int]:
    """Return the dimension of a leaf's mesh for each of the replicas', by the processes along it; for many leaves."""
    if replicas is mesh or replicas == mesh:
        return {i: i for i in range(mesh.ndim)}
    free = {at: _processes(mesh, at) for at in range(mesh.ndim)}
    result = dict[int, int]()
    for i in range(replicas.ndim):
        processes = _processes(replicas, i)
        at = next((at for at, others in free.items() if others == processes), None)
        if at is not None:
            result[i] = at
            del free[at]
    return result


@lru_cache(maxsize=16)
def _along(mesh: DeviceMesh, dim: int, identity: int) -> DeviceMesh:
    """Return the mesh of one dimension; torch takes 0.1 ms to make one, and a step has many leaves.

    Args:
        identity: of the mesh, for equal meshes may have other groups.
    """
    return mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[dim]]


def _processes(mesh: DeviceMesh, dim: int) -> list[int]:
    return dist.get_process_group_ranks(mesh.get_group(dim))


def _dense(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return strides for a shape without gaps, in the order of other strides."""
    order = sorted(range(len(shape)), key=lambda dim: -stride[dim])  # stable: of equal strides, the first is outer
    sizes = [max(shape[dim], 1) for dim in order]
    steps = [prod(sizes[at + 1 :]) for at in range(len(sizes))]
    return tuple(step for _, step in sorted(zip(order, steps, strict=True)))
