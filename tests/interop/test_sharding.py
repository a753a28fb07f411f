"""Params over a mesh: each process has its piece, in memory of its own, and the pieces are the whole."""

import re

import optree
import pytest
import torch
from torch import nn

from fpipe import interop, peak_bytes
from fpipe.stages.sharding import local, locals_of
from tests.support.combinations import thorough
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
    params[0] |= {"odd": values(5, 3), "few": values(3)}
    placed = interop.shard(params, mesh["tp"], {"row": [Shard(1)], "norm": [Replicate()], "*": [Shard(0)]})
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
            "odd": "(Shard(dim=1), Shard(dim=0))",  # 2 x 2 shards don't divide its rows
            "few": "(Replicate(), Shard(dim=0))",
        }
        assert names == {("dp", "tp")}
        assert piece
        assert norm


def wrong_calls(rank):
    from torch.distributed.tensor import Partial, Shard

    mesh, params = mesh_of(2, 2), {0: {"w": values(6, 4), "b": values(3)}}
    sharded = interop.fsdp(params, mesh["b"])
    calls = {
        "three dimensions": lambda: interop.fsdp(params, mesh_of(2, 2, 1)),
        "again": lambda: interop.fsdp(sharded, mesh["b"]),
        "over both": lambda: interop.fsdp(sharded, mesh),
        "another mesh": lambda: interop.fsdp(sharded, mesh_of(4, names=("other",))),
        "no dimension": lambda: interop.fsdp(params, mesh["a"], dim=-2),
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
    "sharded": "params[0]['b'] is a DTensor over DeviceMesh((b=2), 'cpu', stride=(1,)) already: call shard",
    "pattern": "no leaf matches 'q_proj'; names are like b, w: call shard on the params of all stages, before",
    "count": "params[0]['w'] has 1 placements for the 2 dimensions of DeviceMesh((a=2, b=2)",
    "dim": "params[0]['b'] is float32[3] and can't be placed as S(1)",
    "partial": "params[0]['b'] is float32[3] and can't be placed as P(sum)",
}


def test_wrong_arguments_say_so(pools):
    for texts in pools(4).run(wrong_calls):
        assert [name for name in WRONG if not re.match(re.escape(WRONG[name]), texts[name])] == [], texts


def into_modules(rank):
    modules = [nn.Linear(3, 4)]
    before = [x.clone() for x in modules[0].parameters()]
    shards = interop.fsdp({0: {"weight": values(4, 3), "bias": values(4)}}, mesh_of(2))
    with pytest.raises(TypeError, match="weight of stage 0 is a DTensor: pass its full_tensor"):
        interop.into_modules(modules, shards)
    unchanged = differences([x.detach() for x in modules[0].parameters()], [x.detach() for x in before])
    interop.into_modules(modules, whole(shards))
    return unchanged, torch.equal(modules[0].weight, values(4, 3))


def test_modules_take_whole_tensors(pools):
    assert pools(2).run(into_modules) == [([], True)] * 2


# Without the whole model in any process


class Deep(nn.Module):
    """A model whose largest submodule is a small part of it, with a tie and buffers."""

    def __init__(self, layers=8, width=64):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.norm = nn.BatchNorm1d(width)
        self.layers[layers - 1].weight = self.layers[0].weight

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x)


def on_the_meta_device(mesh):
    """A pipeline of two stages, and its params without values, placed over a mesh."""
    with torch.device("meta"):
        module = Deep()
    pipeline, params = interop.split(module, at=["layers.4"], example=torch.randn(4, 64))
    assert pipeline.entries
    return pipeline, interop.fsdp(params, mesh)


def made(rank):
    """Differences from the unsharded tensors, whether all are placed, peak bytes, stored bytes, stages of one stage."""
    pipeline, like = on_the_meta_device(mesh_of(4))
    expected, states = interop.materialise(pipeline, seed=3)
    results = []
    here = peak_bytes(lambda: results.append(interop.materialise(pipeline, seed=3, like=like)), torch.device("cpu"))
    params, state = results[0]
    own, _ = interop.materialise(pipeline, [1], seed=3, like=like)
    wrong = differences([whole(params), state], [expected, states])
    wrong += differences(whole(own), {s: {n: expected[s][n] for n in tensors} for s, tensors in own.items()})
    places = optree.tree_map(lambda x, y: x.placements == y.placements, params, like)
    stored = sum(local(x).untyped_storage().nbytes() for x in optree.tree_leaves(params))
    return wrong, all(optree.tree_leaves(places)), here, stored, {*own}


@thorough
def test_a_model_that_no_process_could_hold_is_made_in_shards(pools):
    layer = 4 * (64 * 64 + 64)
    for wrong, placed, peak, stored, own in pools(4).run(made):
        assert wrong == []
        assert placed
        assert own == {0, 1}  # stage 1 shares an entry of stage 0
        assert stored == pytest.approx(7 * layer / 4, rel=0.05)
        assert stored < peak < stored + 1.5 * layer
        assert peak < 7 * layer / 2


def loaded(rank, folder):
    """Differences of tensors read in shards from whole ones, from a state_dict and Hugging Face's files."""
    from transformers import GPT2Config, GPT2LMHeadModel

    pipeline, like = on_the_meta_device(mesh_of(2))
    torch.manual_seed(0)
    tensors = Deep().state_dict()
    expected = interop.from_state_dict(pipeline, tensors)
    found = interop.from_state_dict(pipeline, tensors, like=like)
    wrong = differences([whole(found[0]), found[1]], list(expected))
    stored = [local(x).untyped_storage().nbytes() == local(x).nbytes for x in optree.tree_leaves(found[0])]

    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 6, "vocab_size": 11}
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
    example = {"input_ids": torch.randint(11, (2, 6))}
    pipeline, params = interop.transformers.split(model, example=example, at=["transformer.h.1"])
    theirs, _ = interop.transformers.load(folder, pipeline, [rank])
    ours, _ = interop.transformers.load(folder, pipeline, [rank], like=interop.fsdp(params, mesh_of(2)))
    rows = optree.tree_map(lambda x: x[: -(-len(x) // 2)] if rank == 0 else x[-(-len(x) // 2) :], theirs)
    return wrong + differences(locals_of(ours), rows), all(stored)


@thorough
def test_each_process_keeps_its_rows_of_a_state_dict_and_of_a_folder(pools, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 6, "vocab_size": 11}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path)
    assert pools(2).run(loaded, str(tmp_path)) == [([], True)] * 2


def test_params_to_be_like_must_have_every_tensor():
    pipeline, params = interop.split(Deep(), at=["layers.4"], example=torch.randn(4, 64))
    for make in (
        lambda like: interop.materialise(pipeline, like=like),
        lambda like: interop.from_state_dict(pipeline, Deep().state_dict(), like=like),
    ):
        with pytest.raises(ValueError, match=r"like lacks layers\.4\.weight: pass the params of all these stages"):
            make({0: params[0]})
        with pytest.raises(ValueError, match=r"layers\.0\.weight: it is of shape \[64, 64\], and \[2\] in like"):
            make({0: {**params[0], "layers.0.weight": torch.ones(2)}, 1: params[1]})
        found, _ = make(params)
        assert found.keys() == params.keys()
