"""Shard params over the processes of a DeviceMesh: leaves become DTensors. Nothing is communicated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from fpipe.errors.arguments import checked
from fpipe.stages.pytree import Path, describe, flatten, paths_of, short
from fpipe.stages.sharding import Sharding, is_dtensor, local, wrap

Rule = Callable[[Path, Tensor], Sequence[Placement]] | Mapping[str, Sequence[Placement]]
"""Placements of each leaf, one for each dimension of the mesh."""


@checked()
def shard(params: Any, mesh: DeviceMesh, rule: Rule) -> Any:
    """Return params whose tensors are DTensors, placed over a mesh by a rule.

    Args:
        params: `{stage: tree}`, with the same values in every process of the mesh, or on the meta device. Leaves that
            are no tensors stay as they are.
        mesh: such as the dimension `mesh["tp"]` of a larger one.
        rule: a function of (path, leaf), as of `(stage, name)` in `{stage: {name: tensor}}`; or placements by pattern
            of the name without the stage, as `"blocks.*.weight"`, or as `styles.megatron` returns them; `"*.head.*"`
            matches `"head.weight"` too. The first pattern that matches counts; where none does, the leaf is replicated.

    The result is on the mesh's type of device and shares no memory with `params`.

    Raises:
        ValueError: a pattern matches no leaf; placements are not one for each dimension of the mesh, cut a dimension
            that the leaf lacks, or are Partial; a leaf is a DTensor already; or this process is not in the mesh.
    """
    _check_member(mesh)
    leaves, spec = flatten(params)
    paths = paths_of(spec)
    choose = _by_pattern(rule, paths, mesh) if isinstance(rule, Mapping) else rule

    def placed(path: Path, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if is_dtensor(leaf):
            raise ValueError(
                f"params{short(path)} is a DTensor over {leaf.device_mesh} already: call shard on plain params, and "
                "fsdp after it"
            )
        placements = list(choose(path, leaf))
        _check_placements(placements, mesh, leaf, path)
        return _distribute(leaf, mesh, placements)

    return spec.unflatten(map(placed, paths, leaves))


@checked()
def fsdp(params: Any, mesh: DeviceMesh, *, dim: int = 0) -> Any:
    """Return params whose tensors are cut along a dimension over the replicas, as of fully sharded data parallelism.

    Args:
        params: `{stage: tree}`, with the same values on every replica, or on the meta device. Leaves that are no
            tensors stay as they are.
        mesh: of the replicas, as `mesh["dp"]`. Over two dimensions, `[Replicate(), Shard(dim)]`: over the first one the
            shards are replicated (hybrid sharding).
        dim: of each leaf; a leaf with fewer dimensions is cut along its last one, and replicated if it has none.

    A dimension that the shards don't divide is cut by the rule of `torch.chunk`: the last shards are smaller or empty.
    A leaf that `shard` has cut over other dimensions of the same mesh is cut further: its mesh then begins with `mesh`.
    If it is cut along `dim` already, and the shards of both don't divide that, it is cut along its first other one, and
    replicated if it has none.

    The result is on the mesh's type of device and shares no memory with `params`.

    Raises:
        ValueError: the mesh has other than one or two dimensions; a leaf is a DTensor over it already, or over a mesh
            that is not a part of the same one; leaves have no such dimension; or this process is not in the mesh.
    """
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fsdp takes a mesh of one dimension, or of two to replicate over the first, not {mesh}")
    _check_member(mesh)
    leaves, spec = flatten(params)

    def placed(path: Path, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if dim < 0 and leaf.ndim and -dim > leaf.ndim:
            raise ValueError(f"params{short(path)} is {describe(leaf)}, which has no dimension {dim}: choose another")
        axis = min(dim, leaf.ndim - 1) if dim >= 0 else dim + leaf.ndim
        cut: Placement = Shard(axis) if leaf.ndim else Replicate()
        placements = [*[Replicate()] * (mesh.ndim - 1), cut]
        return _cut_further(leaf, mesh, placements, path) if is_dtensor(leaf) else _distribute(leaf, mesh, placements)

    return spec.unflatten(map(placed, paths_of(spec), leaves))


def place_like(whole: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor placed like another one: this process's piece of it, in memory of its own.

    Without copies if `like` is no DTensor.

    Raises:
        ValueError: the shapes differ.
    """
    if whole.shape != like.shape:
        raise ValueError(f"it is of shape {[*whole.shape]}, and {[*like.shape]} in like")
    return _distribute(whole, like.device_mesh, like.placements) if is_dtensor(like) else whole


def _distribute(leaf: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    placed = distribute_tensor(leaf.detach(), mesh, placements, src_data_rank=None)
    return wrap(local(placed).clone(), placed)  # a view would keep the whole alive: the caller's, or its copy on a GPU


def _cut_further(leaf: DTensor, mesh: DeviceMesh, placements: list[Placement], path: Path) -> Tensor:
    """Return a DTensor that is cut over another mesh as well, which comes first."""
    whole = _joined_mesh(mesh, leaf, path)
    axis = getattr(placements[-1], "dim", None)
    if axis is not None:
        axes = [axis, *(at for at in range(leaf.ndim) if at != axis)]
        cuts = {at: _shards_along(leaf, at) for at in axes}
        is_fused = any(isinstance(placement, _StridedShard) for placement in leaf.placements)
        axis = next((at for at in axes if cuts[at] == 1 or (_divides(mesh, cuts[at], leaf, at) and not is_fused)), None)
        if axis is None:
            placements[-1] = Replicate()
        else:
            placements[-1] = Shard(axis) if cuts[axis] == 1 else _StridedShard(axis, split_factor=cuts[axis])
    piece = local(leaf)
    if axis is not None:
        shards = Sharding(piece.shape, piece.stride(), piece.dtype, axis, mesh.size(-1))
        piece = shards.pieces(piece)[mesh.get_local_rank(mesh.ndim - 1)]
    with torch.no_grad():
        return DTensor.from_local(
            piece.clone(),
            whole,
            [*placements, *leaf.placements],
            run_check=False,
            shape=leaf.shape,
            stride=leaf.stride(),
        )


def _divides(mesh: DeviceMesh, cuts: int, leaf: DTensor, dim: int) -> bool:
    return not leaf.shape[dim] % (cuts * mesh.size(-1))


def _shards_along(leaf: DTensor, dim: int) -> int:
    """Return the number of shards into which a dimension of a leaf is cut."""
    sizes = zip(leaf.placements, leaf.device_mesh.shape, strict=True)
    return prod(size for placement, size in sizes if getattr(placement, "dim", None) == dim)


def _joined_mesh(mesh: DeviceMesh, leaf: DTensor, path: Path) -> DeviceMesh:
    """Return the mesh whose dimensions are those of a mesh and then those of a leaf's."""
    there = leaf.device_mesh
    if shared := {*(mesh.mesh_dim_names or ())} & {*(there.mesh_dim_names or ())}:
        raise ValueError(f"params{short(path)} is a DTensor over {', '.join(sorted(shared))} already, {there}")
    if not (mesh.mesh_dim_names and there.mesh_dim_names):
        raise ValueError(f"params{short(path)} is a DTensor over {there}, and one of the meshes has no names")
    try:
        return DeviceMesh._concatenate([mesh, there])
    except RuntimeError as error:
        raise ValueError(
            f"params{short(path)} is a DTensor over {there}, which can't be joined with {mesh} ({error}): take both "
            "meshes from one, as mesh['dp'] and mesh['tp']"
        ) from error


def _by_pattern(
    rule: Mapping[str, Sequence[Placement]], paths: Sequence[Path], mesh: DeviceMesh
) -> Callable[[Path, Tensor], Sequence[Placement]]:
    names = {path: ".".join(map(str, path[1:])) for path in paths}
    for pattern in rule:
        if not any(_matches(name, pattern) for name in names.values()):
            raise ValueError(
                f"no leaf matches {pattern!r}; names are like {', '.join([*names.values()][:3])}: call shard on the "
                "params of all stages, before pipeline.params_on selects those of a rank"
            )

    def choose(path: Path, leaf: Tensor) -> Sequence[Placement]:
        matching = (placements for pattern, placements in rule.items() if _matches(names[path], pattern))
        return next(matching, [Replicate()] * mesh.ndim)

    return choose


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(f".{name}", pattern)


def _check_placements(placements: Sequence[Placement], mesh: DeviceMesh, leaf: Tensor, path: Path) -> None:
    dims = range(-leaf.ndim, leaf.ndim)
    wrong = [p for p in placements if not (isinstance(p, Replicate) or getattr(p, "dim", None) in dims)]
    if wrong:
        raise ValueError(f"params{short(path)} is {describe(leaf)} and can't be placed as {wrong[0]}")
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"params{short(path)} has {len(placements)} placements for the {mesh.ndim} dimensions of {mesh}: give one "
            "for each"
        )


def _check_member(mesh: DeviceMesh) -> None:
    if mesh.get_coordinate() is None:
        raise ValueError(f"this process is not in {mesh}: call it on the mesh's processes only")
