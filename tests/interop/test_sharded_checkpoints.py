"""Checkpoints of shards: saved by all replicas, each shard once, and loaded by any number of them, sharded or whole."""

import os
from dataclasses import replace
from math import prod

import optree
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fpipe import Pipeline, Placement, TransportError, handlers, interop, peak_bytes
from fpipe.interop import CheckpointError
from fpipe.interop.checkpoints.safetensors import DTYPES
from fpipe.interop.checkpoints.slots import stored_in
from fpipe.stages.sharding import is_dtensor, local, placed_alike
from tests.support import cases
from tests.support.combinations import few, one_in, thorough
from tests.support.jobs import differences
from tests.support.shards import Replicated, mesh_of, values, whole

adamw = interop.optimizer(torch.optim.AdamW, lr=0.05)


class Layers:
    """A stage of a module that was split, under the module's own names."""

    qualified = True

    def __call__(self, params, x):
        return x


def everything():
    """The training state after an update, of two stages: rows that no number of replicas divides, few rows, none."""
    params = {
        0: {"a.w": values(7, 3), "a.b": values(5, seed=1), "scale": torch.tensor(2.0)},
        1: {"few": values(1, 4, seed=2), "none": torch.empty(0, 3), "turned": values(4, 6, seed=3).t()},
    }
    params, optimizer = adamw.update(params, adamw.init(params), params)
    return {"params": params, "optimizer": optimizer, "state": {1: {"mean": values(3)}}, "step": 3, "seed": (1, "x")}


def part(kept, stages):
    return {k: {s: v[s] for s in stages if s in v} if isinstance(v, dict) else v for k, v in kept.items()}


def sharded(kept, mesh):
    """A training state with its params and the optimizer's values for them over a mesh."""
    params = interop.fsdp(kept["params"], mesh)
    optimizer = optree.tree_map_with_path(
        lambda path, x: x if path[-1] == "step" else interop.fsdp(x, mesh), kept["optimizer"]
    )
    return {**kept, "params": params, "optimizer": optimizer}


def zeros(tree):
    return optree.tree_map(lambda x: torch.zeros_like(x) if isinstance(x, torch.Tensor) else type(x)(), tree)


def job(shape, ranks, folder, mesh_names=("copies", "dp")):
    """Checkpoints over replicas of ranks, the stages of this process, and the mesh of the replicas."""
    names = (*mesh_names[2 - len(shape) :], "pp")
    pipeline = Pipeline([Layers()] * 2, cases.mse)
    plan = pipeline.plan(Placement.loop(ranks, 2 // ranks), 1)
    mesh = mesh_of(*shape, ranks, names=names)[names[:-1]] if prod(shape) * ranks > 1 else None
    own = Replicated(prod(shape), mesh=mesh) if prod(shape) * ranks > 1 else handlers.Local()
    stages = plan.stages_on(own.ranks(plan)[0])
    return interop.Checkpoints(folder, pipeline, plan, handler=own), stages, mesh


def save(rank, shape, ranks, folder, is_sharded, background=False):
    """Save the training state of the replicas; its path."""
    saved, stages, mesh = job(shape, ranks, folder)
    kept = part(everything(), stages)
    kept = sharded(kept, mesh) if is_sharded else kept
    if not background:
        return saved.save(**kept).name
    saving = saved.async_save(**kept)
    for x in optree.tree_leaves((kept["params"], kept["optimizer"])):
        local(x).zero_()
    return saving.wait().name


def test_states_of_replicas_are_saved_and_loaded(tmp_path):
    """Each replica's own; where their number changes, the first one's, with a warning."""
    case, _, plan = cases.make("modules", "zb_v", 2, 2)
    three = [optree.tree_map(lambda x, i=i: x + i, case.state) for i in range(3)]

    def of(replicas):
        own = replace(plan, replicas=replicas)
        return interop.Checkpoints(tmp_path, case.pipeline, own, handler=handlers.Local(), keep=1)

    of(3).save(params=case.params, state=three, step=1)
    assert differences(of(3).load(state=[case.state] * 3, step=0), {"state": three, "step": 1}) == []
    text = r"has the states of 3 replicas, and {} load it: each gets that of the first one; for each its own, load it"
    with pytest.warns(UserWarning, match=text.format(2)):
        assert differences(of(2).load(state=[case.state] * 2)["state"], three[:1] * 2) == []
    with pytest.warns(UserWarning, match=text.format(1)):
        assert differences(of(1).load(state=case.state)["state"], three[0]) == []
    assert of(2).load(step=0) == {"step": 1}
    with pytest.raises(ValueError, match=r"this process plays 3 replicas, .*: pass a list with one \{stage: tree\}"):
        of(3).save(state=case.state)
    with pytest.raises(CheckpointError, match=r"rank 0 holds stage 0, of which state@1 lacks 1.num_batches_tracked"):
        of(3).save(params=case.params, state=[three[0], {}, three[2]])
    of(1).save(params=case.params, state=case.state)
    assert differences(of(3).load(state=three)["state"], [case.state] * 3) == []


def load(rank, shape, ranks, folder, kind):
    """Differences from what was saved; whether all is placed like the params, keeps pieces alone, and is sharded."""
    saved, stages, mesh = job(shape, ranks, folder)
    expected = part(everything(), stages)
    like = zeros(expected)
    if kind == "meta":
        like["params"] = optree.tree_map(lambda x: x.to("meta"), like["params"])
    if kind != "whole":
        like["params"] = interop.fsdp(like["params"], mesh)
    like["optimizer"] = adamw.init(like["params"]) if kind != "whole" else like["optimizer"]
    found = saved.load(**like)
    paths = [(stage, name) for stage in like["params"] for name in like["params"][stage]]
    params = [found["params"][s][n] for s, n in paths]
    averages = [found["optimizer"][s][n]["exp_avg"] for s, n in paths]
    placed = all(placed_alike(x, like["params"][s][n]) for x, (s, n) in zip(params + averages, paths * 2, strict=True))
    fits = all(local(x).untyped_storage().nbytes() == local(x).nbytes for x in params + averages)
    return differences(whole(found), expected), placed, fits, is_dtensor(params[0])


SAVED = [((4,), 1, True), ((2, 2), 1, True), ((2,), 2, True), ((4,), 1, False), ((1,), 1, False)]
LOADED = [((3,), 1, "sharded"), ((2, 2), 1, "meta"), ((2,), 2, "sharded"), ((2,), 1, "whole")]


@one_in(2)
@pytest.mark.parametrize(("shape", "ranks", "is_sharded"), few(SAVED, SAVED[1::2]))
def test_a_checkpoint_is_loaded_over_any_number_of_replicas_and_whole(pools, tmp_path, shape, ranks, is_sharded):
    size = prod(shape) * ranks
    names = (
        {save(0, shape, ranks, str(tmp_path), False)}
        if size == 1
        else {*pools(size).run(save, shape, ranks, str(tmp_path), is_sharded)}
    )
    assert names == {"000001-step-3"}
    for other, ranks_there, kind in LOADED:
        found = pools(prod(other) * ranks_there).run(load, other, ranks_there, str(tmp_path), kind)
        assert found == [([], True, True, kind != "whole")] * len(found)
    alone = job((1,), 1, tmp_path)[0].load(**zeros(everything()))
    assert differences(alone, everything()) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_each_shard_is_written_once_and_torch_reads_it(pools, tmp_path):
    name = {*pools(4).run(save, (2, 2), 1, str(tmp_path), True)}.pop()
    expected, folder = everything()["params"], tmp_path / name
    metadata = dcp.FileSystemReader(folder).read_metadata()
    rows = {
        key: [chunk.sizes[0] for chunk in each.chunks]
        for key, each in metadata.state_dict_metadata.items()
        if each.size
    }
    assert rows["params.a.w"] == [4, 3]
    assert rows["params.few"] == [1]
    assert rows["params.none"] == [0]
    into = {f"params.{n}": torch.zeros_like(x) for tree in expected.values() for n, x in tree.items()}
    dcp.load(into, checkpoint_id=folder, no_dist=True)
    assert differences(into, {f"params.{n}": x for tree in expected.values() for n, x in tree.items()}) == []
    stored = sum(x.nbytes for x in optree.tree_leaves(everything()) if isinstance(x, torch.Tensor))
    assert sum(path.stat().st_size for path in folder.glob("*.distcp")) < 3 * stored + 60_000


def test_a_save_in_the_background_has_the_shards_of_its_call(pools, tmp_path):
    assert pools(3).run(save, (3,), 1, str(tmp_path), True, True) == ["000001-step-3"] * 3
    alone = job((1,), 1, tmp_path)[0].load(**zeros(everything()))
    assert differences(alone, everything()) == []


def wrong_saves(rank, folder):
    """The errors where a replica fails, has another tree, or doesn't shard what another does; and a save after them.

    The two replicas have two ranks each, so that the last error is of shards over as many processes, but the ranks.
    """
    saved, stages, mesh = job((2,), 2, folder)
    kept = sharded(part(everything(), stages), mesh)
    other = sharded(part(everything(), stages), mesh_of(2, 2, names=("dp", "pp"))["pp"])
    rank = saved._replica
    calls = [
        {**kept, "what": object() if rank else 0},
        {**kept, "epoch": rank},
        {**kept, "params": everything()["params"]} if rank else kept,
        {**kept, "params": other["params"]},
    ]
    texts = []
    for call in calls:
        with pytest.raises((CheckpointError, TypeError, ValueError)) as caught:
            saved.save(**call)
        texts.append(f"{caught.type.__name__}: {caught.value}")
    return texts, saved.save(**kept).name


def test_an_error_on_one_replica_is_one_on_all_and_the_next_save_works(pools, tmp_path):
    (first, name), _, (second, too), _ = pools(4).run(wrong_saves, str(tmp_path))
    assert name == too == "000001-step-3"
    assert first[0].startswith("CheckpointError: rank 2 failed at save of the checkpoints in")
    assert second[0].startswith("TypeError: what is a object")
    assert "epoch is 1 on rank 2 and 0 on rank 0" in first[1]
    assert "of which 3 were written: every process passes its piece, over the mesh of the handler's" in first[2]
    assert "placed (Shard(dim=0),) over DeviceMesh((pp=2)" in first[3]
    assert "which is neither of the handler's replicas nor of tensor_parallel=: make all Checkpoints of the" in first[3]
    assert [path.name for path in tmp_path.iterdir()] == ["000001-step-3"]


def die_amid_saving(rank, folder):
    """Replica 1 ends while it writes the second time."""
    from fpipe.interop.checkpoints import checkpoints as checkpoint

    saved, stages, mesh = job((2,), 1, folder)
    kept = sharded(part(everything(), stages), mesh)
    saved.save(**kept)
    if rank:
        checkpoint.written = lambda *args: os._exit(3)
    saved.save(**{**kept, "step": 4})


@thorough
def test_a_replica_that_dies_amid_a_save_leaves_the_last_whole(fresh_pool, tmp_path):
    first, second = fresh_pool(2).outcomes(die_amid_saving, str(tmp_path))
    assert (first.error, second.exitcode) == (TransportError.__name__, 3)
    saved = job((1,), 1, tmp_path)[0]
    found = saved.load(**zeros(everything()))
    assert differences(found, everything()) == []
    saved.save(**found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001-step-3", "000002-step-3"]


def test_weights_are_exported_whole(pools, tmp_path):
    load_file = pytest.importorskip("safetensors.torch", reason="safetensors is not installed").load_file
    pools(4).run(save, (4,), 1, str(tmp_path), True)
    interop.export_safetensors(tmp_path, tmp_path / "model.safetensors")
    expected = {name: x for tree in everything()["params"].values() for name, x in tree.items()}
    assert differences(load_file(tmp_path / "model.safetensors"), {**expected, "mean": values(3)}) == []


def test_an_export_has_one_tensor_at_a_time_in_memory_and_any_dtype(tmp_path):
    torch_file = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    saved, _, _ = job((1,), 1, tmp_path)
    dtypes = [*DTYPES]
    params = {0: {f"{i}.{dtype}": values(64, 64, seed=i).to(dtype) for i, dtype in enumerate(dtypes)}}
    params[1] = {f"more.{i}": values(64, 64, seed=i) for i in range(12)} | {"number": torch.tensor(7)}
    path = saved.save(params=params)
    peak = peak_bytes(lambda: interop.export_safetensors(path, tmp_path / "model.safetensors"), torch.device("cpu"))
    found = torch_file.load_file(tmp_path / "model.safetensors")
    assert differences(found, {**params[0], **params[1]}) == []
    assert 64 * 64 * 8 <= peak < 3 * 64 * 64 * 8  # the tensor, and the piece that it is read from
    path = saved.save(params={**params, 1: {"z": torch.zeros(2, dtype=torch.complex128)}})
    with pytest.raises(CheckpointError, match=r"params\.z of .* is of torch\.complex128, which safetensors can't hold"):
        interop.export_safetensors(path, tmp_path / "model.safetensors")


TENSOR_PARALLEL = {"wte": Shard(0), "qkv": _StridedShard(0, split_factor=3), "down": Shard(1)}


def parts(kept, mesh):
    """A training state in pieces over mesh["tp"], and over mesh["dp"] as well if it has several replicas."""

    def cut(x, name):
        tree = {0: {name: x}}
        tree = interop.shard(tree, mesh["tp"], lambda *_: [TENSOR_PARALLEL.get(name, Replicate())])
        return (interop.fsdp(tree, mesh["dp"]) if mesh["dp"].size() > 1 else tree)[0][name]

    def cut_state(path, x):
        return x if path[-1] == "step" else cut(x, path[1])

    params = {stage: {name: cut(x, name) for name, x in tree.items()} for stage, tree in kept["params"].items()}
    return {**kept, "params": params, "optimizer": optree.tree_map_with_path(cut_state, kept["optimizer"])}


def whole_model():
    """The training state after an update: a vocabulary that no mesh divides, queries, keys and values of one layer."""
    params = {
        0: {"wte": values(7, 4), "qkv": values(36, 4, seed=1), "norm": values(4, seed=2)},
        1: {"down": values(4, 12, seed=3), "scale": torch.tensor(2.0)},
    }
    params, optimizer = adamw.update(params, adamw.init(params), params)
    return {"params": params, "optimizer": optimizer, "step": 3}


def tied_job(shape, folder, **options):
    """Checkpoints over (pp, dp, tp) of two stages that share the embedding."""
    mesh = mesh_of(*shape, names=("pp", "dp", "tp"))
    pipeline = Pipeline([Layers()] * 2, cases.mse, ties={(1, "head"): (0, "wte")})
    plan = pipeline.plan(Placement.loop(shape[0], 2 // shape[0]), 1, replicas=shape[1])
    replicas = mesh["dp"] if shape[1] > 1 else None
    handler = handlers.Distributed(mesh["pp"], replicas=replicas, timeout=20)
    saved = interop.Checkpoints(folder, pipeline, plan, handler=handler, tensor_parallel=mesh["tp"], **options)
    return saved, mesh, pipeline, plan


def own_part(kept, pipeline, plan, saved):
    """The part of a rank: tied entries are under the stage that owns them."""
    params = pipeline.params_on(kept["params"], plan, saved._ranks[0])
    optimizer = {s: {name: kept["optimizer"][s][name] for name in tree} for s, tree in params.items()}
    return {**kept, "params": params, "optimizer": optimizer}


def keep_parts(rank, shape, folder):
    """Keep a training state in memory; return the parts that this process has written."""
    saved, mesh, pipeline, plan = tied_job(shape, folder, memory=interop.Memory(folder=folder))
    kept = parts(own_part(whole_model(), pipeline, plan, saved), mesh)
    like = {**kept, "optimizer": adamw.init(kept["params"])}
    assert saved.resume(**like) is None
    saved.keep_in_memory(**kept)
    return [each.part for each in stored_in(saved._memory.folder) if each.part == saved._number]


def load_kept(rank, shape, folder):
    """Differences of what another mesh loads from memory."""
    saved, mesh, pipeline, plan = tied_job(shape, folder, memory=interop.Memory(folder=folder))
    expected = own_part(whole_model(), pipeline, plan, saved)
    like = parts(zeros(expected), mesh)
    loaded = saved.resume(**like | {"optimizer": adamw.init(like["params"])})
    return differences(whole(loaded), expected)


@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2)], ids=str)
@thorough
def test_pieces_in_memory_are_loaded_over_any_mesh(pools, tmp_path, shape):
    assert sorted(pools(4).run(keep_parts, shape, str(tmp_path))) == [[0], [1], [2], [3]]
    for other in [(1, 2, 2), (1, 1, 3), (2, 1, 2)]:
        assert pools(prod(other)).run(load_kept, other, str(tmp_path)) == [[]] * prod(other)


def keep_replicas(rank, folder):
    """The state of a replica that goes on from memory, and the parts in memory."""
    case, _, plan = cases.make("modules", "zb_v", 1, 2)
    mesh = mesh_of(2, 1, names=("dp", "pp"))
    options = {"handler": Replicated(2, mesh=mesh["dp"]), "memory": interop.Memory(folder=folder)}
    first = interop.Checkpoints(folder, case.pipeline, replace(plan, replicas=2), **options)
    state = optree.tree_map(lambda x: x + rank, case.state)
    assert first.resume(params=case.params, state=state, step=0) is None
    first.keep_in_memory(params=case.params, state=state, step=4)
    again = interop.Checkpoints(folder, case.pipeline, replace(plan, replicas=2), **options)
    loaded = again.resume(params=zeros(case.params), state=zeros(case.state), step=0)
    assert loaded["step"] == 4
    return differences(loaded["state"], state), [each.part for each in stored_in(again._memory.folder)]


def test_replicas_with_a_state_of_their_own_get_it_from_memory(pools, tmp_path):
    for found, written in pools(2).run(keep_replicas, str(tmp_path)):
        assert found == []
        assert written == [0, 1]


def save_parts(rank, shape, folder):
    """The name of a checkpoint of pieces, after the errors of a save in which one process fails."""
    saved, mesh, pipeline, plan = tied_job(shape, folder)
    kept = parts(own_part(whole_model(), pipeline, plan, saved), mesh)
    with pytest.raises((CheckpointError, TypeError)) as caught:
        saved.save(**kept, what=object() if rank == 3 else 0)
    saving = saved.async_save(**kept)
    for x in optree.tree_leaves((kept["params"], kept["optimizer"])):
        local(x).zero_()
    return saving.wait().name, str(caught.value)


def load_parts(rank, shape, folder):
    """Differences of what another mesh loads, and whether it is placed like the params, in memory of its own."""
    saved, mesh, pipeline, plan = tied_job(shape, folder)
    expected = own_part(whole_model(), pipeline, plan, saved)
    like = parts(zeros(expected), mesh)
    like["optimizer"] = adamw.init(like["params"])
    loaded = saved.load(**like)
    pairs = [(x, like["params"][s][n]) for s, tree in loaded["params"].items() for n, x in tree.items()]
    placed = all(placed_alike(x, other) for x, other in pairs)
    fits = all(local(x).untyped_storage().nbytes() == local(x).nbytes for x, _ in pairs)
    return differences(whole(loaded), expected), placed, fits


@one_in(2)
@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2)], ids=str)
def test_tensor_parallel_checkpoints_are_loaded_over_any_mesh_and_whole(pools, tmp_path, shape):
    """Where one process fails, all do, and nothing is left; a save in the background has the pieces of its call."""
    outcomes = pools(4).run(save_parts, shape, str(tmp_path))
    assert {name for name, _ in outcomes} == {"000001-step-3"}
    assert outcomes[3][1].startswith("what is a object")
    assert all("failed at save of the checkpoints in" in text for _, text in outcomes[:3])
    assert [path.name for path in tmp_path.iterdir()] == ["000001-step-3"]
    for other in [(1, 1, 3), (2, 1, 2), (1, 2, 2)]:
        assert pools(prod(other)).run(load_parts, other, str(tmp_path)) == [([], True, True)] * prod(other)
    pipeline = Pipeline([Layers()] * 2, cases.mse, ties={(1, "head"): (0, "wte")})
    plan = pipeline.plan(Placement.loop(1, 2), 1)
    alone = interop.Checkpoints(tmp_path, pipeline, plan, handler=handlers.Local())
    assert differences(alone.load(**zeros(whole_model())), whole_model()) == []
    interop.export_safetensors(tmp_path, tmp_path / "model.safetensors")
    stored = pytest.importorskip("safetensors.torch", reason="safetensors is not installed").load_file
    names = {name: x for tree in whole_model()["params"].values() for name, x in tree.items()}
    assert differences(stored(tmp_path / "model.safetensors"), names) == []


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2, n_positions=6, vocab_size=11)).eval()


def save_gpt2(rank, folder):
    """Save a Hugging Face model in shards."""
    pipeline, params = interop.transformers.split(gpt2(), example={"input_ids": torch.zeros(2, 6).long()}, stages=2)
    plan = pipeline.plan(Placement.loop(1, 2), 1)
    saved = interop.Checkpoints(folder, pipeline, plan, handler=Replicated(2, mesh=mesh_of(2)))
    saved.save(params=interop.fsdp(params, mesh_of(2)))


@thorough
def test_hugging_face_reads_what_was_sharded(pools, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pools(2).run(save_gpt2, str(tmp_path / "checkpoints"))
    gpt2().config.save_pretrained(tmp_path / "model")
    interop.export_safetensors(tmp_path / "checkpoints", tmp_path / "model" / "model.safetensors")
    found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "model")
    assert differences(dict(found.state_dict()), dict(gpt2().state_dict())) == []
