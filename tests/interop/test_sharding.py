"""Params over a mesh: each process has its piece, in memory of its own, and the pieces are the whole."""

import re

import optree
import pytest
import torch

from fpipe import interop
from fpipe.stages.sharding import local, locals_of
from tests.support.jobs import differences
from tests.support.shards import mesh_of, values, whole


def tree():
    return {
        0: {"w": values(7, 3), "b": values(5, seed=1), "scale": torch.tensor(2.0), "none": None, "name": "first"},
        1: {"w": values(4, 6).t(), "few": values(1, 4)},
    }


def fully_sharded(rank, shape, dim):
    """Differences of the joined pieces from the params, placements by name, and shapes of the pieces."""
    params, mesh = tree(), mesh_of(*shape)
    shards = interop.fsdp(params, mesh, dim=dim)
    leaves = {(s, n): x for s, tensors in shards.items() for n, x in tensors.items() if isinstance(x, torch.Tensor)}
    places = {path: str(x.placements) for path, x in leaves.items()}
    stored = all(local(x).untyped_storage().nbytes() == local(x).nbytes for x in leaves.values())
    pieces = {path: tuple(local(x).shape) for path, x in leaves.items()}
    rest = shards[0]["none"], shards[0]["name"]
    strides = all(x.stride() == params[s][n].stride() for (s, n), x in leaves.items())
    return differences(whole(shards), params), places, pieces, stored, rest, strides


def test_fully_sharded_params_are_cut_along_rows(pools):
    for rank, (wrong, places, pieces, *others) in enumerate(pools(4).run(fully_sharded, (4,), 0)):
        assert wrong == []
        assert places == dict.fromkeys(places, "(Shard(dim=0),)") | {(0, "scale"): "(Replicate(),)"}
        assert pieces[0, "w"] == ((2, 2, 2, 1)[rank], 3)
        assert pieces[0, "b"] == ((2, 2, 1, 0)[rank],)
        assert pieces[1, "few"] == ((1, 0, 0, 0)[rank], 4)
        assert others == [True, (None, "first"), True]


@pytest.mark.parametrize("dim", [1, -1])
def test_leaves_of_fewer_dimensions_are_cut_along_their_last_one(pools, dim):
    for rank, (wrong, places, pieces, *_) in enumerate(pools(2).run(fully_sharded, (2,), dim)):
        assert wrong == []
        assert places[0, "w"] == "(Shard(dim=1),)"
        assert places[0, "b"] == "(Shard(dim=0),)"
        assert pieces[0, "w"] == (7, 2 - rank)


def test_over_two_dimensions_shards_are_replicated_over_the_first(pools):
    for rank, (wrong, places, pieces, *_) in enumerate(pools(4).run(fully_sharded, (2, 2), 0)):
        assert wrong == []
        assert places[0, "w"] == "(Replicate(), Shard(dim=0))"
        assert places[0, "scale"] == "(Replicate(), Replicate())"
        assert pieces[0, "w"] == (4 - rank % 2, 3)


def on_meta(rank):
    shards = interop.fsdp(
        optree.tree_map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, tree()), mesh_of(3)
    )
    return local(shards[0]["w"]).is_meta, tuple(local(shards[0]["w"]).shape), shards[0]["w"].shape


def test_params_without_values_are_placed_too(pools):
    assert [found[1] for found in pools(3).run(on_meta)] == [(3, 3), (3, 3), (1, 3)]
    assert {found[::2] for found in pools(3).run(on_meta)} == {(True, torch.Size([7, 3]))}


def memory(rank):
    """Whether a change of the params shows in what was made of them, over one process and over several."""
    seen = []
    for mesh in (mesh_of(2), mesh_of(2, 1)["b"]):
        params = tree()
        from torch.distributed.tensor import Replicate

        results = [interop.fsdp(params, mesh), interop.shard(params, mesh, lambda path, x: [Replicate()])]
        before = [
            optree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, locals_of(r)) for r in results
        ]
        for x in optree.tree_leaves(params):
            if isinstance(x, torch.Tensor):
                x.zero_()
        seen += differences(locals_of(results), before)
    return seen


def test_shards_share_no_memory_with_the_params(pools):
    assert pools(2).run(memory) == [[], []]


def by_rule(rank):
    """Params placed by patterns and by a function: placements by name, and differences of what they make."""
    from torch.distributed.tensor import Replicate, Shard

    mesh, params = mesh_of(2, 2), tree()
    patterns = interop.shard(params, mesh, {"w": [Shard(0), Shard(1)], "?": [Replicate(), Shard(-1)]})
    function = interop.shard(
        params, mesh, lambda path, x: [Shard(1), Replicate()] if path == (1, "w") else [Replicate()] * 2
    )
    names = [(0, "w"), (0, "b"), (0, "scale"), (1, "w"), (1, "few")]
    places = [[str(found[s][n].placements) for s, n in names] for found in (patterns, function)]
    return places, differences([whole(patterns), whole(function)], [params, params])


def test_a_rule_gives_placements_by_pattern_or_by_function(pools):
    replicated = "(Replicate(), Replicate())"
    twice = "(Shard(dim=0), Shard(dim=1))"
    for (patterns, function), wrong in pools(4).run(by_rule):
        assert wrong == []
        assert patterns == [twice, "(Replicate(), Shard(dim=0))", replicated, twice, replicated]
        assert function == [replicated] * 3 + ["(Shard(dim=1), Replicate())", replicated]


def over_tensor_parallelism(rank):
    """Params placed over tp, then over dp: placements of the weights, differences, and the piece over tp."""
    from torch.distributed.tensor import Replicate, Shard

    mesh = mesh_of(2, 2, names=("dp", "tp"))
    params = {0: {"column": values(8, 6), "row": values(8, 4, seed=1), "norm": values(5)}}
    placed = interop.shard(params, mesh["tp"], {"column": [Shard(0)], "row": [Shard(1)]})
    shards = interop.fsdp(placed, mesh["dp"])
    column = shards[0]["column"]
    rows = values(8, 6).chunk(2)[mesh.get_local_rank("tp")].chunk(2)[mesh.get_local_rank("dp")]
    places = {name: str(x.placements) for name, x in shards[0].items()}
    names = {x.device_mesh.mesh_dim_names for x in shards[0].values()}
    along = interop.fsdp(placed, mesh["dp"], dim=1)
    wrong = differences([whole(shards), whole(along)], [params, params])
    return wrong, places, names, torch.equal(local(column), rows), Replicate() in shards[0]["norm"].placements


def test_what_tensor_parallelism_cuts_is_cut_further(pools):
    for wrong, places, names, piece, norm in pools(4).run(over_tensor_parallelism):
        assert wrong == []
        assert places == {
            "column": "(_StridedShard(dim=0, sf=2), Shard(dim=0))",
            "row": "(Shard(dim=0), Shard(dim=1))",
            "norm": "(Shard(dim=0), Replicate())",
        }
        assert names == {("dp", "tp")}
        assert piece
        assert norm


def wrong_calls(rank):
    from torch.distributed.tensor import Partial, Replicate, Shard

    mesh, params = mesh_of(2, 2), {0: {"w": values(6, 4), "b": values(3)}}
    sharded = interop.fsdp(params, mesh["b"])
    columns = interop.shard(params, mesh["a"], lambda path, x: [Shard(0)] if x.ndim > 1 else [Replicate()])
    calls = {
        "three dimensions": lambda: interop.fsdp(params, mesh_of(2, 2, 1)),
        "again": lambda: interop.fsdp(sharded, mesh["b"]),
        "over both": lambda: interop.fsdp(sharded, mesh),
        "another mesh": lambda: interop.fsdp(sharded, mesh_of(4, names=("other",))),
        "no dimension": lambda: interop.fsdp(params, mesh["a"], dim=-2),
        "uneven": lambda: interop.fsdp(columns, mesh["b"]),
        "sharded": lambda: interop.shard(sharded, mesh["a"], {"w": [Shard(0)]}),
        "pattern": lambda: interop.shard(params, mesh["a"], {"q_proj": [Shard(0)]}),
        "count": lambda: interop.shard(params, mesh, {"w": [Shard(0)]}),
        "dim": lambda: interop.shard(params, mesh["a"], {"b": [Shard(1)]}),
        "partial": lambda: interop.shard(params, mesh["a"], {"b": [Partial()]}),
    }
    texts = {}
    for name, call in calls.items():
        with pytest.raises(ValueError, match=r"params|mesh|leaf") as caught:
            call()
        texts[name] = str(caught.value)
    return texts


WRONG = {
    "three dimensions": "fsdp takes a mesh of one dimension, or of two to replicate over the first, not DeviceMesh((",
    "again": "params[0]['b'] is a DTensor over b already",
    "over both": "params[0]['b'] is a DTensor over b already",
    "another mesh": "params[0]['b'] is a DTensor over DeviceMesh((b=2), 'cpu', stride=(1,)), which can't be joined",
    "no dimension": "params[0]['b'] is float32[3], which has no dimension -2: choose another",
    "uneven": "params[0]['w'] is float32[6, 4], of which 2 x 2 shards don't divide dimension 0: cut it",
    "sharded": "params[0]['b'] is a DTensor over DeviceMesh((b=2), 'cpu', stride=(1,)) already: call shard",
    "pattern": "no leaf matches 'q_proj'; names are like b, w: call shard on the params of all stages, before",
    "count": "params[0]['w'] has 1 placements for the 2 dimensions of DeviceMesh((a=2, b=2)",
    "dim": "params[0]['b'] is float32[3] and can't be placed as S(1)",
    "partial": "params[0]['b'] is float32[3] and can't be placed as P(sum)",
}


def test_wrong_arguments_say_so(pools):
    for texts in pools(4).run(wrong_calls):
        assert [name for name in WRONG if not re.match(re.escape(WRONG[name]), texts[name])] == [], texts
