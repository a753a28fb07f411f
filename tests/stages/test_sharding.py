"""Pieces of DTensors: cut and joined as torch does it."""

from dataclasses import replace

import pytest
import torch

from fpipe.stages.sharding import Sharding, is_dtensor, local, locals_of, wrap, wrapped
from tests.support.shards import mesh_of, values

SHAPES = [((7,), 0), ((5, 3), 0), ((5, 3), 1), ((1, 4), 0), ((1, 4), 1), ((8, 2), 0), ((0, 3), 0), ((2, 3, 5), 2)]


def against_torch(rank, size):
    """Cut and join tensors of all shapes, strides and placements; the names of those that differ from torch's."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    meshes = [(mesh_of(size), ())] + ([(mesh_of(2, size // 2), (Replicate(),))] if size == 4 else [])
    wrong, tried = [], 0
    for mesh, outer in meshes:
        for shape, dim in SHAPES:
            for transposed in (False, True):
                x = values(*shape)
                x = x.movedim(0, -1).contiguous().movedim(-1, 0) if transposed else x
                leaf = distribute_tensor(x, mesh, [*outer, Shard(dim)], src_data_rank=None)
                sharding = Sharding.of(leaf, mesh)
                pieces = sharding.pieces(x)
                joined = sharding.joined(torch.cat([*map(sharding.padded, pieces)]))
                again = wrap(pieces[sharding.shard].double(), leaf)
                rows = [*range(x.shape[dim])][sharding.rows.start : sharding.rows.stop]
                checks = {
                    "piece": torch.equal(pieces[sharding.shard], local(leaf)),
                    "rows": torch.equal(x.index_select(dim, torch.tensor(rows, dtype=torch.long)), local(leaf)),
                    "whole": torch.equal(joined, leaf.full_tensor()),
                    "stride": joined.stride() == x.stride() or x.numel() <= max(x.shape),
                    "count": (sharding.dim, sharding.shards) == (dim, mesh.size(-1)),
                    "wrapped": torch.equal(again.full_tensor(), x.double()),
                    "place": (again.placements, again.shape, again.stride()) == (leaf.placements, x.shape, x.stride()),
                    "memory": local(leaf).data_ptr() == leaf.to_local().data_ptr(),
                }
                wrong += [(mesh, shape, dim, name) for name, right in checks.items() if not right]
                tried += 1
    return wrong, tried


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_pieces_are_those_of_torch(pools, size):
    for wrong, tried in pools(size).run(against_torch, size):
        assert wrong == []
        assert tried == 2 * len(SHAPES) * (2 if size == 4 else 1)


def whole_on_each_replica(rank):
    """Shardings of a plain leaf, a replicated one, and one that is cut over another dimension of the mesh."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, scalar, x = mesh_of(2, 2, names=("dp", "tp")), torch.tensor(3.0), values(6, 4)
    leaves = [
        x,
        distribute_tensor(scalar, mesh["dp"], [Replicate()], src_data_rank=None),
        distribute_tensor(x, mesh["tp"], [Shard(0)], src_data_rank=None),
    ]
    again = wrap(torch.tensor(4.0), leaves[1])
    *shardings, cut = (Sharding.of(leaf, mesh["dp"]) for leaf in leaves)
    placed = cut.placed.placements, cut.placed.shape
    return [*shardings, replace(cut, placed=None)], placed, (again.placements == (Replicate(),), again.item())


def test_leaves_that_the_replicas_do_not_cut(pools):
    for shardings, (placements, shape), again in pools(4).run(whole_on_each_replica):
        assert shardings == [
            Sharding(torch.Size([6, 4]), (4, 1), torch.float32),
            Sharding(torch.Size([]), (), torch.float32),
            Sharding(torch.Size([3, 4]), (4, 1), torch.float32),
        ]
        assert [(p.dim, *shape) for p in placements] == [(0, 6, 4)]
        assert again == (True, 4.0)


def beneath_tensor_parallelism(rank):
    """Pieces over the replicas of pieces over tp, along each dimension: joined, these are torch's over tp."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh, x, wrong = mesh_of(2, 2, names=("dp", "tp")), values(8, 6), []
    for tp, dp in ((0, Shard(1)), (1, Shard(0)), (0, _StridedShard(0, split_factor=2))):
        columns = distribute_tensor(x, mesh["tp"], [Shard(tp)], src_data_rank=None).to_local()
        piece = columns.chunk(2, dp.dim)[mesh.get_local_rank("dp")]
        placements = [dp, Shard(tp)]
        leaf = DTensor.from_local(piece.contiguous(), mesh, placements, shape=x.shape, stride=x.stride())
        sharding = Sharding.of(leaf, mesh["dp"])
        whole = sharding.joined(torch.cat([*map(sharding.padded, sharding.pieces(columns))]))
        if not (torch.equal(leaf.full_tensor(), x) and torch.equal(sharding.pieces(columns)[sharding.shard], piece)):
            wrong.append((placements, "piece"))
        if not (torch.equal(whole, columns) and whole.is_contiguous()):
            wrong.append((placements, "whole"))
    return wrong


def test_leaves_that_are_cut_by_tensor_parallelism_too(pools):
    assert pools(4).run(beneath_tensor_parallelism) == [[]] * 4


def refusals(rank):
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    mesh = mesh_of(2, 2)
    leaves = [
        distribute_tensor(values(8), mesh, [Shard(0), Shard(0)], src_data_rank=None),
        DTensor.from_local(values(8), mesh["a"], [Partial()]),
    ]
    for leaf in leaves:
        with pytest.raises(ValueError, match="leaf float32") as caught:
            Sharding.of(leaf, mesh)
        yield str(caught.value)


def refused(rank):
    return [*refusals(rank)]


def test_shardings_that_no_handler_can_gather_are_refused(pools):
    twice, partial = pools(4).run(refused)[0]
    assert "is cut over 2 dimensions of the replicas' mesh, (Shard(dim=0), Shard(dim=0)): cut it over one" in twice
    assert "holds partial sums, (Partial(sum),): redistribute it" in partial


def trees(rank):
    from torch.distributed.tensor import Shard, distribute_tensor

    leaf = distribute_tensor(values(5, 2), mesh_of(2), [Shard(0)], src_data_rank=None)
    tree = {0: {"w": leaf, "b": values(3), "none": None}, 1: {}}
    pieces = locals_of(tree)
    again = wrapped(pieces, tree)
    lone = wrapped({0: {"w": None, "b": None, "none": None}, 1: {}}, tree)
    return (
        [is_dtensor(x) for x in (pieces[0]["w"], again[0]["w"], again[0]["b"])],
        torch.equal(again[0]["w"].full_tensor(), values(5, 2)),
        pieces[0]["w"].shape,
        lone,
    )


def test_trees_keep_leaves_that_are_no_dtensors(pools):
    for rank, (kinds, equal, shape, lone) in enumerate(pools(2).run(trees)):
        assert kinds == [False, True, False]
        assert equal
        assert shape == (3 - rank, 2)
        assert lone == {0: {"w": None, "b": None, "none": None}, 1: {}}
