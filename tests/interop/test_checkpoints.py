"""Checkpoints: whole after any kill, loaded by any number of ranks, with the same bits."""

import copy
import functools
import json
import operator
import os
import pickle
import random
import re
import select
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import optree
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import metadata as dcp

import fpipe
from fpipe import Pipeline, Placement, Stage, TransportError, handlers, interop, schedules
from fpipe.interop import CheckpointError
from fpipe.interop.checkpoints.storage import unpickled
from tests.support import cases, models
from tests.support.combinations import ALL, LEVEL, few, one_in, sample, thorough
from tests.support.forked import CONTEXT
from tests.support.jobs import differences, handler
from tests.support.shards import Replicated, mesh_of

init, update = interop.optimizer(torch.optim.AdamW, lr=0.05)


class Blocks:
    """A stage of a module that was split, of which it has some layers under the module's own names."""

    qualified = True

    def __init__(self, layers):
        self.layers = layers

    def __call__(self, params, x):
        for i in self.layers:
            x = torch.tanh(x @ params[f"layers.{i}.weight"] + params[f"layers.{i}.bias"])
        return x


def blocks(cuts):
    """Four layers in stages, and their params."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(5, 5, generator=generator) for _ in range(4)]
    stages = [range(*cut) for cut in zip(cuts, [*cuts[1:], 4], strict=True)]
    params = {
        s: {f"layers.{i}.{n}": x for i in layers for n, x in (("weight", weights[i]), ("bias", weights[i][0].clone()))}
        for s, layers in enumerate(stages)
    }
    return Pipeline([Blocks(layers) for layers in stages], cases.mse), params


def checkpoints_of(folder, cuts):
    """Checkpoints of these layers in one process, and their params."""
    pipeline, params = blocks(cuts)
    plan = pipeline.plan(Placement.loop(len(cuts)), 1)
    return interop.Checkpoints(folder, pipeline, plan, handler=handlers.Local()), params


def small(folder, **options):
    """One process with two stages of plain functions."""
    pipeline = Pipeline([lambda p, x: x * p["w"], lambda p, x: x + p["b"]])
    plan = pipeline.plan(Placement.loop(2), 1)
    tree = {"params": {0: {"w": torch.arange(3.0)}, 1: {"b": torch.ones(2, 2)}}, "step": 1}
    return interop.Checkpoints(folder, pipeline, plan, handler=handlers.Local(), **options), tree


def zeros(tree):
    return optree.tree_map(lambda x: torch.zeros_like(x) if isinstance(x, torch.Tensor) else type(x)(), tree)


def trained(case, schedule, plan, handler, kept, steps):
    """A training state after some steps; each has a seed and a learning rate of its own."""
    step = fpipe.value_and_grad(case.pipeline, schedule, plan, handler=handler, **case.options)
    ranks = handler.ranks(plan)
    batch, target = (case.batch, case.target) if len(ranks) > 1 else cases.own(case, plan, *ranks)[1:3]
    for _ in range(steps):
        i = kept["step"]
        state = kept.get("state")
        _, grads, *new = step(kept["params"], batch, target, state=state, rng=(kept["seed"], i))
        grads, _ = fpipe.clip_by_global_norm(grads, 1.0, plan, handler=handler)
        params, optimizer = update(grads, kept["optimizer"], kept["params"], lr=0.1 / (i + 1))
        kept = {**kept, "params": params, "optimizer": optimizer, "step": i + 1}
        kept |= {"state": new[0]} if new else {}
    return kept


def beginning(case, params=None, state=None):
    params, state = (case.params, case.state) if params is None else (params, state)
    kept = {"params": params, "optimizer": init(params), "step": 0, "seed": 7}
    return kept if state is None else {**kept, "state": state}


def placed(name, schedule, ranks):
    """A case, its plan, and what a rank of it begins with."""
    case, generator, plan = cases.make(name, schedule, ranks, 4)

    def like(rank):
        params, _, _, state = cases.own(case, plan, rank)
        return beginning(case, params, state)

    return case, generator, plan, like


def part(kept, like):
    """What a rank has of a whole training state."""
    return {
        key: {s: {n: value[s][n] for n in tree} for s, tree in like[key].items()} if isinstance(value, dict) else value
        for key, value in kept.items()
    }


# Ranks


def train_and_save(rank, folder, name, schedule, ranks, steps):
    """Train and save, going on from what is there; the training state then."""
    case, generator, plan, like = placed(name, schedule, ranks)
    saved = interop.Checkpoints(folder, case.pipeline, plan, handler=handler())
    kept = saved.load(**like(rank)) if saved.latest() else like(rank)
    kept = trained(case, generator, plan, handler(), kept, steps)
    return saved.save(**kept).name, kept


@pytest.mark.parametrize("name", sample(["tied", "modules", "dropout"], ["modules"]))
def test_training_goes_on_with_the_same_bits_on_four_ranks_on_two_and_in_one_process(pools, tmp_path, name):
    case, generator, plan, like = placed(name, "one_f_one_b", 4)
    straight = trained(case, generator, plan, handlers.Local(), beginning(case), 6)

    names = {name for name, _ in pools(4).run(train_and_save, str(tmp_path), name, "one_f_one_b", 4, 2)}
    assert names == {"000001-step-2"}
    names = {name for name, _ in pools(2).run(train_and_save, str(tmp_path), name, "zb_v", 2, 2)}
    assert names == {"000002-step-4"}

    saved = interop.Checkpoints(tmp_path, case.pipeline, plan, handler=handlers.Local())
    kept = saved.load(**beginning(case))
    assert kept["step"] == 4
    kept = trained(case, generator, plan, handlers.Local(), kept, 2)
    assert differences(kept, straight) == []

    saved.save(**kept)
    for rank, (_, own) in enumerate(pools(4).run(train_and_save, str(tmp_path), name, "one_f_one_b", 4, 0)):
        assert differences(own, part(straight, like(rank))) == []


def test_copies_of_a_stage_are_saved_once_and_loaded_by_each(pools, tmp_path):
    found = pools(2).run(train_and_save, str(tmp_path), "linear", "dualpipe", 2, 1)
    again = pools(2).run(train_and_save, str(tmp_path), "linear", "dualpipe", 2, 0)
    assert differences([kept for _, kept in again], [kept for _, kept in found]) == []
    case, _, plan, _ = placed("linear", "gpipe", 2)
    alone = interop.Checkpoints(tmp_path, case.pipeline, plan, handler=handlers.Local()).load(**beginning(case))
    assert differences(alone, found[0][1]) == []


@pytest.mark.parametrize("cuts", [[0], [0, 1], [0, 2, 3]])
def test_what_a_split_module_has_is_loaded_into_other_cuts(tmp_path, cuts):
    saved, params = checkpoints_of(tmp_path, [0, 1, 2, 3])
    grads = optree.tree_map(torch.ones_like, params)
    params, state = update(grads, init(params), params)
    saved.save(params=params, optimizer=state)
    other, like = checkpoints_of(tmp_path, cuts)
    found = other.load(params=zeros(like), optimizer=init(like))
    for key, expected in (("params", params), ("optimizer", state)):
        whole = {name: x for tree in expected.values() for name, x in tree.items()}
        assert found[key].keys() == set(range(len(cuts)))
        assert differences({n: x for tree in found[key].values() for n, x in tree.items()}, whole) == []


@thorough
def test_a_split_model_with_ties_and_buffers_is_loaded_into_other_cuts_and_back_into_the_module(tmp_path):
    torch.manual_seed(0)
    module, tokens = models.TiedGPT(layers=2), torch.randint(0, 11, (4, 6))

    def split(stages):
        pipeline, params = interop.split(module, stages=stages, example=(tokens,), loss=cases.nll)
        plan = pipeline.plan(Placement.loop(stages), 2)
        case = cases.Case(pipeline, params, tokens, tokens)
        return case, plan, interop.Checkpoints(tmp_path, pipeline, plan, handler=handlers.Local())

    case, plan, saved = split(3)
    assert case.pipeline.entries
    kept = trained(case, schedules.one_f_one_b, plan, handlers.Local(), beginning(case), 2)
    saved.save(**kept)
    case, plan, other = split(2)
    found = other.load(**beginning(case))
    whole = {name: x for tree in kept["params"].values() for name, x in tree.items()}
    assert differences({n: x for tree in found["params"].values() for n, x in tree.items()}, whole) == []
    kept = trained(case, schedules.one_f_one_b, plan, handlers.Local(), found, 2)
    assert kept["step"] == 4
    module.load_state_dict(interop.to_state_dict(case.pipeline, kept["params"]))
    with torch.no_grad():
        expected = cases.nll(module(tokens), tokens)
    torch.testing.assert_close(case.pipeline(kept["params"], tokens, tokens), expected)


# At any moment


def keep_saving(folder, ready, steps=None):
    """Save states of which every number is the step's; say each that is whole."""
    saved, tree = small(folder, keep=2)
    kept = saved.load(**zeros(tree)) if saved.latest() else zeros(tree)
    while steps is None or steps:
        kept, steps = optree.tree_map(lambda x: x + 1, kept), steps and steps - 1
        saved.save(**kept)
        os.write(ready, kept["step"].to_bytes(4, "little"))


def save_as_rank(rank, folder, ready, replicas):
    """One of two processes that save such states together; the first says each that is whole, from what is there on.

    Args:
        replicas: 1 if the processes are ranks; 2 if they are replicas, over which the params are sharded.
    """
    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=2)
    alone, tree = small(folder)
    ours = Replicated(2, timeout=30, mesh=mesh_of(2)) if replicas == 2 else handlers.Distributed(timeout=30)
    plan = alone.pipeline.plan(Placement.loop(2 // replicas, replicas), 1)
    saved = interop.Checkpoints(folder, alone.pipeline, plan, handler=ours, keep=2)
    params = interop.fsdp(tree["params"], mesh_of(2)) if replicas == 2 else {rank: tree["params"][rank]}
    kept = saved.load(**zeros({**tree, "params": params}))
    while True:
        if rank == 0:
            os.write(ready, kept["step"].to_bytes(4, "little"))
        kept = optree.tree_map(lambda x: x + 1, kept)
        saved.save(**kept)


def loaded_step(folder):
    saved, tree = small(folder)
    found = saved.load(**zeros(tree))
    for leaf in optree.tree_leaves(found["params"]):
        assert (leaf == found["step"]).all()
    return found["step"]


def forked(child):
    """A child's process id; it has nothing of ours to clean up."""
    pid = os.fork()
    if pid == 0:
        try:
            child()
        finally:
            os._exit(1)
    return pid


def acknowledged(reading):
    content = reading.read() or b""
    return [int.from_bytes(content[i : i + 4], "little") for i in range(0, len(content), 4)]


def kill_at_random(folder, kills):
    """Kill a process that saves, again and again: how often a save was under way, or what went wrong.

    Every second time it is as soon as a save is seen, else at any moment.
    """
    torch.set_num_threads(1)
    rng, amid = random.Random(0), 0
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    with open(ours, "rb", buffering=0) as reading:
        start = time.perf_counter()
        keep_saving(folder, theirs, steps=10)
        took = (time.perf_counter() - start) / 10
        whole = acknowledged(reading)[-1]
        for kill in range(kills):
            pid = forked(lambda: keep_saving(folder, theirs))
            wait_to_kill(folder, kill, rng.uniform(0, 3) * took)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            whole = max([whole, *acknowledged(reading)])
            left = list(Path(folder).glob(".unfinished-*"))
            amid += bool(left)
            for path in left:
                shutil.rmtree(path)
            found = loaded_step(folder)
            if found not in (whole, whole + 1):
                return f"step {found} was loaded, and {whole} the last that was whole"
            whole = found
    return amid


def seen(condition, seconds=30):
    """Wait until something is so."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until


def wait_to_kill(folder, kill, seconds):
    """Wait for a save, before every second kill; else for some time."""
    if kill % 2:
        seen(lambda: any(Path(folder).glob(".unfinished-*")))
    else:
        time.sleep(seconds)


def kill_ranks_at_random(folder, kills, replicas):
    """Kill two processes that save together, again and again: how often a save was under way, or what went wrong.

    Every second time it is as soon as a save is seen, else at any moment.
    """
    torch.set_num_threads(1)
    rng, amid = random.Random(0), 0
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    with open(ours, "rb", buffering=0) as reading:
        keep_saving(folder, theirs, steps=1)
        whole = acknowledged(reading)[-1]
        for kill in range(kills):
            Path(f"{folder}.store").unlink(missing_ok=True)
            pids = [forked(lambda rank=rank: save_as_rank(rank, folder, theirs, replicas)) for rank in (0, 1)]
            select.select([ours], [], [], 30)
            wait_to_kill(folder, kill, rng.uniform(0, 0.1))
            for pid in rng.sample(pids, 2):
                os.kill(pid, signal.SIGKILL)
                time.sleep(rng.choice([0, 0.01]))  # the second has noticed, or not
            for pid in pids:
                os.waitpid(pid, 0)
            begun, *_, said = acknowledged(reading) * 2 or [None]
            amid += any(Path(folder).glob(".unfinished-*"))
            found = loaded_step(folder)
            if begun != whole or found not in (said, said + 1):
                return f"begun at {begun} after {whole}, {found} was loaded, and {said} the last that was whole"
            whole = found
    return amid


def kill_at_each_event(folder):
    """Kill a process at each call of the operating system's that a save makes: how many there were."""
    torch.set_num_threads(1)
    for step in range(1, 4):
        keep_saving(folder, os.open(os.devnull, os.O_WRONLY), steps=1)
        assert loaded_step(folder) == step
    count = 0
    while True:
        copy = f"{folder}-{count}"
        shutil.copytree(folder, copy)
        pid = forked(lambda copy=copy, count=count: killed_at(count, copy))
        _, status = os.waitpid(pid, 0)
        assert loaded_step(copy) in (3, 4)
        keep_saving(copy, os.open(os.devnull, os.O_WRONLY), steps=1)
        assert not list(Path(copy).glob(".unfinished-*"))
        assert len(list(Path(copy).iterdir())) == 2
        shutil.rmtree(copy)
        if os.WIFEXITED(status):
            return count
        count += 1


def killed_at(count, folder):
    left = [count]

    def hook(event, args):
        if event in EVENTS:
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

    sys.addaudithook(hook)
    keep_saving(folder, os.open(os.devnull, os.O_WRONLY), steps=1)
    left[0] = -1
    os._exit(0)


EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"}


def elsewhere(job, *args):
    """What a job returns in a process of its own, which may fork."""
    with CONTEXT.Pool(1) as pool:
        return pool.apply(job, args)


@thorough
def test_kills_at_random_moments_leave_the_last_or_the_next_whole(tmp_path):
    kills = (12, 25, 200)[LEVEL]
    amid = elsewhere(kill_at_random, str(tmp_path / "saved"), kills)
    assert isinstance(amid, int), amid
    assert amid > kills // 4  # so many were killed within a save


@thorough
@pytest.mark.parametrize("replicas", few([1, 2], [2]))
def test_kills_of_two_ranks_at_random_moments_leave_the_last_or_the_next_whole(tmp_path, replicas):
    amid = elsewhere(kill_ranks_at_random, str(tmp_path / "saved"), 15 if ALL else 8, replicas)
    assert isinstance(amid, int), amid
    assert amid > (3 if ALL else 0)


@thorough
def test_a_kill_at_any_call_of_the_operating_systems_leaves_one_whole(tmp_path):
    assert elsewhere(kill_at_each_event, str(tmp_path / "saved")) > 20


def die_amid_saving(rank, folder):
    """Rank 1 ends while it writes the second time."""
    from fpipe.interop.checkpoints import checkpoints as checkpoint

    pipeline, params = blocks([0, 2])
    plan = pipeline.plan(Placement.loop(2), 1)
    saved = interop.Checkpoints(folder, pipeline, plan, handler=handlers.Distributed(timeout=20))
    saved.save(params={rank: params[rank]}, step=1)
    if rank:
        checkpoint.written = lambda *args: os._exit(3)
    saved.save(params={rank: params[rank]}, step=2)


def test_a_rank_that_dies_amid_a_save_is_an_error_on_the_others_and_leaves_the_last_whole(fresh_pool, tmp_path):
    first, second = fresh_pool(2).outcomes(die_amid_saving, str(tmp_path))
    assert (first.error, second.exitcode) == (TransportError.__name__, 3)
    assert "could not reach the other ranks" in first.text
    pipeline, params = blocks([0])
    alone = interop.Checkpoints(tmp_path, pipeline, pipeline.plan(Placement.loop(1), 1), handler=handlers.Local())
    found = alone.load(params=zeros(params), step=0)
    assert differences(found, {"params": params, "step": 1}) == []
    assert [path.name for path in tmp_path.glob(".unfinished-*")] == [".unfinished-000002-step-2"]
    alone.save(**found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001-step-1", "000002-step-1"]


# Errors on one rank, and on all


def wrong_on_one_rank(rank, folder):
    """What each of these says on every rank, and whether all goes on."""
    pipeline, params = blocks([0, 2])
    plan = pipeline.plan(Placement.loop(2), 1)
    saved = interop.Checkpoints(folder, pipeline, plan, handler=handler())
    own = {"params": {rank: params[rank]}}
    said = []

    def catch(call):
        try:
            call()
        except (CheckpointError, TypeError) as error:
            said.append(f"{type(error).__name__}: {error}")

    catch(lambda: saved.load(**own))
    catch(lambda: saved.save(**{**own, "what": {1: object()} if rank else {}}))
    catch(lambda: saved.async_save(**own, what=object() if rank else 0).wait())
    catch(lambda: saved.save(**own, epoch=rank))
    saved.save(**own)
    bad = {name: torch.zeros(2) if "3.weight" in name else x for name, x in params[rank].items()}
    catch(lambda: saved.load(params={rank: bad}))
    return said, differences(saved.load(**own), own)


def test_an_error_on_one_rank_is_one_on_all_and_the_next_call_works(pools, tmp_path):
    (first, same), (second, too) = pools(2).run(wrong_on_one_rank, str(tmp_path))
    assert same == too == []
    assert [text.split(":")[0] for text in first] == ["CheckpointError"] * 5
    assert [text.split(":")[0] for text in second] == [
        "CheckpointError",
        "TypeError",
        "TypeError",
        "CheckpointError",
        "CheckpointError",
    ]
    nothing, unknown, again, epoch, other = first
    assert nothing == f"CheckpointError: there is no checkpoint in {tmp_path}: was it saved to another folder?"
    assert "rank 1 failed at save of the checkpoints in" in unknown
    assert "what.stages.1" not in unknown
    assert "is a object, and a checkpoint holds tensors, numbers and texts" in unknown
    assert "rank 1 failed" in again
    assert "epoch is 1 on rank 1 and 0 on rank 0" in epoch
    assert "of other shapes are params.layers.3.weight ([5, 5] there, [2] here)" in other
    assert "nobody asks for" not in other
    assert second[4] == other


def not_common(rank, folder):
    """The error for buffers in a section that is not by stage."""
    pipeline, params = blocks([0, 2])
    saved = interop.Checkpoints(folder, pipeline, pipeline.plan(Placement.loop(2), 1), handler=handler())
    kept = {"params": {rank: params[rank]}, "buffers": {rank: {"mean": torch.ones(3)}}}
    with pytest.raises(CheckpointError) as caught:
        saved.save(**kept)
    saved.save(params=kept["params"], state=kept["buffers"], rate=np.float64(0.5))
    found = saved.load(**zeros({"state": kept["buffers"], "rate": 0.5}))
    return str(caught.value), differences(found, {"state": kept["buffers"], "rate": 0.5})


def test_what_only_some_ranks_have_by_no_stage_is_told(pools, tmp_path):
    (first, same), (second, too) = pools(2).run(not_common, str(tmp_path))
    assert same == too == []
    assert re.match(
        r"buffers\.([01])\.mean is (float32\[3\] on rank 1 and missing|missing on rank 1 and float32\[3\]) on", first
    )
    assert first.endswith("only params, state and optimizer may differ between ranks, as {stage: tree}")
    assert first in second


def latest_apart(rank, folder):
    """The last one, where each rank sees a folder of its own, and each one of the other calls at the same time."""
    pipeline = blocks([0, 2])[0]
    plan = pipeline.plan(Placement.loop(2), 1)
    os.makedirs(f"{folder}/{rank}/saved")
    if rank == 0:
        os.mkdir(f"{folder}/{rank}/saved/000007-step-3")
    before = os.getcwd()
    os.chdir(f"{folder}/{rank}")
    try:
        saved = interop.Checkpoints("saved", pipeline, plan, handler=handler())
        found = [saved.latest()]
        with pytest.raises(CheckpointError) as caught:
            saved.load(params={}) if rank else saved.latest()
        return [*found, str(caught.value), saved.latest()]
    finally:
        os.chdir(before)


def test_rank_0_says_which_one_is_the_last_and_ranks_at_different_calls_are_told(pools, tmp_path):
    path = Path("saved/000007-step-3")
    (one, first, again), (other, second, too) = pools(2).run(latest_apart, str(tmp_path))
    assert one == other == again == too == path
    assert first.startswith("rank 1 is at load of the checkpoints in saved, and this one at latest: every rank calls")
    assert second.startswith("rank 0 is at latest of the checkpoints in saved, and this one at load: every rank calls")


def come_alone(rank, folder):
    """What rank 0 is told when rank 1 does not come: over connections that there are, and over new ones."""
    pipeline, params = blocks([0, 2])
    plan, handler, said = pipeline.plan(Placement.loop(2), 1), handlers.Distributed(timeout=2), []
    known, new = (interop.Checkpoints(f"{folder}/{i}", pipeline, plan, handler=handler) for i in range(2))
    known.save(params={rank: params[rank]})
    for saved in () if rank else (known, new):
        with pytest.raises(TransportError) as caught:
            saved.latest()
        said.append(str(caught.value))
    dist.barrier()  # rank 1 is there all the while
    return said


def test_a_rank_that_does_not_come_is_named(fresh_pool, tmp_path):
    said, _ = fresh_pool(2).run(come_alone, str(tmp_path))
    for i, text in enumerate(said):
        assert text == (
            f"rank 0 could not reach the other ranks at latest of the checkpoints in {tmp_path}/{i} (nothing came "
            "within timeout=2 s; missing: [1]): every rank calls latest, save and load, in the same order and with the "
            "same folder"
        )
    assert len(said) == 2


def save_without_a_stage(rank, folder):
    """What is said of states in which a rank has not what it holds, and what is there then."""
    pipeline, params = blocks([0, 2])
    plan, said = pipeline.plan(Placement.loop(2), 1), []
    saved = interop.Checkpoints(folder, pipeline, plan, handler=handler(), keep=1)
    own = {"params": {rank: params[rank]}, "step": 1}
    saved.save(**own)
    first = pipeline.params_on(params, plan, 0)
    for bad in ({"params": first, "step": 2}, {"step": 2} if rank else {**own, "step": 2}):
        for save in (saved.save, lambda **tree: saved.async_save(**tree).wait()):
            with pytest.raises(CheckpointError) as caught:
                save(**bad)
            said.append(str(caught.value))
    return said, saved.latest().name, differences(saved.load(**own), own)


def test_a_state_that_lacks_a_ranks_stage_is_refused_and_the_last_one_stays(pools, tmp_path):
    (first, *there), (second, *too) = pools(2).run(save_without_a_stage, str(tmp_path))
    assert there == too == ["000001-step-1", []]
    text = (
        "rank 1 holds stage 1, of which params has nothing: pipeline.params_on(params, plan, rank) and "
        "pipeline.state_on(state, plan, rank) return what a rank needs"
    )
    assert first == second == [text] * 4


PARTS = {
    "stage": ([("params", 1)], r"rank 1 holds stage 1, of which params lacks 1\.0\.bias, 1\.1\.bias, 1\.1\.weight: "),
    "entry": (
        [("params", 3, "3.1.bias")],
        r"rank 3 holds stage 3, of which params lacks 3\.1\.bias: pipeline\.params_on",
    ),
    "buffer": (
        [("state", 0, "0.1.running_var")],
        r"rank 0 holds stage 0, of which state lacks 0\.1\.running_var: pipeline\.params_on",
    ),
    "more": ([("params", 3), ("state", 0)], r"3\.1\.weight; rank 0 holds stage 0, of which state lacks 0\.1\.n"),
    "nothing": ([("state",), ("params", 2)], None),
}


@pytest.mark.parametrize(("lost", "message"), PARTS.values(), ids=PARTS)
def test_what_stages_say_that_they_hold_is_saved_whole(tmp_path, lost, message):
    normed = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(3)]
    module = nn.Sequential(*normed[:2], nn.ReLU(), normed[2])
    module[1][0].weight = module[0][0].weight
    pipeline, params = interop.from_modules(module, at=[1, 2, 3])
    plan = pipeline.plan(Placement.loop(4), 1)
    saved = interop.Checkpoints(tmp_path, pipeline, plan, handler=handlers.Local(), keep=1)
    kept = {"params": params, "state": interop.buffers(pipeline, module)}
    saved.save(**kept)
    partial = optree.tree_map(lambda x: x, kept)
    for *outer, key in lost:
        del functools.reduce(operator.getitem, outer, partial)[key]
    if message is None:
        assert saved.save(**partial).name == "000002"
    else:
        with pytest.raises(CheckpointError, match=message):
            saved.save(**partial)
        assert saved.latest().name == "000001"
    assert differences(saved.load(**(zeros(kept) if message else zeros(partial))), kept if message else partial) == []


@pytest.mark.parametrize(("section", "stage"), [("params", 1), ("state", 0)])
def test_plain_functions_have_an_entry_for_each_stage(tmp_path, section, stage):
    pipeline = Pipeline([Stage(lambda p, s, x: (x, s), stateful=True), lambda p, x: x])
    plan = pipeline.plan(Placement.loop(2), 1)
    saved = interop.Checkpoints(tmp_path, pipeline, plan, handler=handlers.Local(), keep=1)
    kept = {"params": {0: {"w": torch.ones(2)}, 1: {}}, "state": {0: {"seen": 1}}}
    saved.save(**kept)
    del kept[section][stage]
    with pytest.raises(CheckpointError, match=f"rank {stage} holds stage {stage}, of which {section} has nothing"):
        saved.save(**kept)
    saved.save(params={0: {}, 1: {}})
    saved.save(step=3)


def load_less_on_rank_0(rank, folder):
    """What is said of a part that only rank 1 asks for, and not for all of it."""
    pipeline, params = blocks([0, 2])
    saved = interop.Checkpoints(folder, pipeline, pipeline.plan(Placement.loop(2), 1), handler=handler())
    own = {"params": {rank: params[rank]}}
    saved.save(**{**own, **({"state": {1: {"mean": torch.ones(1), "seen": 1}}} if rank else {})})
    with pytest.raises(CheckpointError) as caught:
        saved.load(**{**own, **({"state": {1: {"mean": torch.ones(1)}}} if rank else {})})
    return str(caught.value), differences(saved.load(**own), own)


def test_what_is_wrong_with_a_part_that_one_rank_asks_for_is_told_on_all(pools, tmp_path):
    (first, same), (second, too) = pools(2).run(load_less_on_rank_0, str(tmp_path))
    assert same == too == []
    assert first == second
    assert first.endswith("is of another model or has another state: nobody asks for state.seen")


def save_apart(rank, folder):
    """Each rank has a folder of its own under one name."""
    pipeline, params = blocks([0, 2])
    plan = pipeline.plan(Placement.loop(2), 1)
    before = os.getcwd()
    os.makedirs(f"{folder}/{rank}")
    os.chdir(f"{folder}/{rank}")
    try:
        interop.Checkpoints("saved", pipeline, plan, handler=handler()).save(params={rank: params[rank]})
    except CheckpointError as error:
        return str(error)
    finally:
        os.chdir(before)


def test_a_folder_that_ranks_do_not_share_is_told(pools, tmp_path):
    first, second = pools(2).run(save_apart, str(tmp_path))
    assert first == "__1_0.distcp not visible from rank 0, though written: saved must be a folder that all ranks share"
    assert second == f"rank 0 failed at save of the checkpoints in saved: {first}"


def test_a_checkpoint_of_another_model(tmp_path):
    saved, tree = small(tmp_path)
    saved.save(**tree, other=3)
    like = {"params": {0: {"v": torch.zeros(3)}, 1: {"b": torch.zeros(2)}}, "epoch": 0}
    with pytest.raises(CheckpointError) as caught:
        saved.load(**like)
    assert str(caught.value) == (
        f"{tmp_path}/000001-step-1 is of another model or has another state: it lacks epoch, params.stages.0.v (has "
        "params.stages.0.w); nobody asks for params.stages.0.w; of other shapes are params.stages.1.b ([2, 2] there, "
        "[2] here)"
    )


@pytest.mark.parametrize(("kept", "has"), [({"opt": None}, " (has opt)"), ({"ema": 0.5}, ""), ({}, "")])
def test_an_optimizer_that_was_not_saved_is_missing(tmp_path, kept, has):
    saved, tree = small(tmp_path)
    _, state = update(tree["params"], init(tree["params"]), tree["params"])
    saved.save(**(tree | {name: state if value is None else value for name, value in kept.items()}))
    with pytest.raises(CheckpointError) as caught:
        saved.load(**tree, optimizer=init(tree["params"]))
    assert str(caught.value).endswith(f"is of another model or has another state: it lacks optimizer{has}")


def test_what_an_optimizer_keeps_is_missing_where_it_was_not_saved(tmp_path):
    saved, tree = small(tmp_path)
    _, state = update(tree["params"], init(tree["params"]), tree["params"])
    saved.save(**{**tree, "optimizer": {0: state[0]}})
    with pytest.raises(CheckpointError, match=r"it lacks optimizer\.stages\.1\.b$"):
        saved.load(params=tree["params"], optimizer=init(tree["params"]))


def test_an_optimizer_that_keeps_nothing_is_loaded_as_it_was_saved(tmp_path):
    pipeline, params = blocks([0, 2])
    init, update = interop.optimizer(torch.optim.SGD, lr=0.1)
    saved = interop.Checkpoints(tmp_path, pipeline, pipeline.plan(Placement.loop(2), 1), handler=handlers.Local())
    whole, like = blocks([0])
    alone = interop.Checkpoints(tmp_path, whole, whole.plan(Placement.loop(1), 1), handler=handlers.Local())
    for state in (init(params), update(params, init(params), params)[1]):
        saved.save(params=params, optimizer=state, metrics={})
        assert saved.load(params=params, optimizer=init(params))["optimizer"] == state
        found = alone.load(params=like, optimizer=init(like), metrics={})
        assert (found["optimizer"], found["metrics"]) == (init(like), {})


def test_empty_lists_are_loaded_as_they_are(tmp_path):
    saved, _ = small(tmp_path)
    saved.save(metrics=[], lists={"a": [], "b": ()})
    assert saved.load(metrics=[], lists={"a": [], "b": ()}) == {"metrics": [], "lists": {"a": [], "b": ()}}


def test_parameters_are_exported_under_a_hook_that_renames_them(tmp_path):
    def rename(module, state_dict, prefix, metadata):
        for name in [*state_dict]:
            state_dict[f"old.{name}"] = state_dict.pop(name)

    module = nn.Linear(2, 2)
    module._register_state_dict_hook(rename)
    pipeline, params = interop.from_modules([module])
    saved = interop.Checkpoints(tmp_path, pipeline, pipeline.plan(Placement.loop(1), 1), handler=handlers.Local())
    path = saved.save(params=params)
    manifest = json.loads((path / "fpipe.json").read_text())
    assert not manifest["nonpersistent"]


def test_a_part_that_was_empty_here_and_not_saved_is_missing(tmp_path):
    saved, tree = small(tmp_path)
    saved.save(**tree, metric=0.5)
    with pytest.raises(CheckpointError, match=r"it lacks metrics \(has metric\)$"):
        saved.load(**{**tree, "metrics": {}})


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("__0_0.distcp", Path.unlink, "its __0_0.distcp is missing; 000001-step-1 is the one before it"),
        ("__0_0.distcp", cut_short, "its __0_0.distcp has .* of .* bytes; 000001-step-1 is the one before"),
        (".metadata", cut_short, "its .metadata has .* of .* bytes"),
        ("fpipe.json", cut_short, "its fpipe.json can't be read"),
        ("fpipe.json", Path.unlink, "its fpipe.json can't be read"),
    ],
)
def test_a_damaged_checkpoint_says_what_is_wrong(tmp_path, file, damage, message):
    saved, tree = small(tmp_path)
    before = saved.save(**tree)
    damage(saved.save(**tree) / file)
    with pytest.raises(CheckpointError, match=f"000002-step-1 is damaged: {message}"):
        saved.load(**tree)
    assert differences(saved.load(before, **zeros(tree)), tree) == []


@pytest.mark.parametrize("load", [True, False])
def test_another_format(tmp_path, load):
    saved, tree = small(tmp_path)
    manifest = saved.save(**tree) / "fpipe.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 3}))
    with pytest.raises(CheckpointError, match="is a fpipe checkpoint of version 3, not of version 2"):
        saved.load(**tree) if load else interop.export_safetensors(tmp_path, tmp_path / "x")


def test_nothing_there(tmp_path):
    saved, tree = small(tmp_path / "nowhere")
    assert saved.latest() is None
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        saved.load(**tree)


class Evil:
    def __reduce__(self):
        return os.mkdir, (str(Path(os.environ["EVIL"])),)


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_loading_runs_nothing_out_of_a_checkpoint(tmp_path, monkeypatch, file):
    saved, tree = small(tmp_path / "saved")
    path = saved.save(**tree)
    monkeypatch.setenv("EVIL", str(tmp_path / "made"))
    if file == ".metadata":
        (path / file).write_bytes(pickle.dumps(Evil()))
    else:
        torch.save(Evil(), path / file)
    manifest = json.loads((path / "fpipe.json").read_text())
    manifest["files"][file] = (path / file).stat().st_size
    (path / "fpipe.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="can't be read"):
        saved.load(**tree, verify=False)
    assert not (tmp_path / "made").exists()


class Attribute:
    def __init__(self, *of):
        self.of = of

    def __reduce__(self):
        return getattr, self.of


def test_members_of_enums_are_read_as_python_pickles_them_before_3_11_4():
    member = dcp._MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST
    assert unpickled(pickle.dumps(Attribute(type(member), member.name))) is member
    for of in ((torch.Size, "numel"), (type(member), "__members__"), (member, "__class__")):
        with pytest.raises(pickle.UnpicklingError, match="which describes no tensor"):
            unpickled(pickle.dumps(Attribute(*of)))


def test_two_entries_of_one_name_are_refused(tmp_path):
    pipeline = Pipeline([lambda p, x: x])
    saved = interop.Checkpoints(tmp_path, pipeline, pipeline.plan(Placement.loop(1), 1), handler=handlers.Local())
    with pytest.raises(ValueError, match=r"2 entries are called params\.stages\.0\.a\.b"):
        saved.save(params={0: {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}})


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="keep must be at least 1"):
        small(tmp_path, keep=0)


# Asynchronous


def test_what_is_donated_meanwhile_is_saved_as_it_was(tmp_path, monkeypatch):
    from fpipe.interop.checkpoints import checkpoints as checkpoint

    written, order = checkpoint.written, []

    def slowly(*args):
        time.sleep(0.1)
        order.append("written")
        return written(*args)

    monkeypatch.setattr(checkpoint, "written", slowly)
    saved, tree = small(tmp_path)
    expected = optree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, tree)
    handle = saved.async_save(**tree)
    assert not handle.done()
    for leaf in optree.tree_leaves(tree["params"]):
        leaf.zero_()
    order.append("changed")
    saved.save(**{**tree, "step": 2})
    assert handle.done()
    assert order == ["changed", "written", "written"]
    assert handle.wait().name == "000001-step-1"
    assert differences(saved.load(handle.wait(), **zeros(tree)), expected) == []
    assert differences(saved.load(**zeros(expected)), {**tree, "step": 2}) == []


def train_while_saving(rank, folder):
    """Four steps, of which each is saved while the next one runs: where what was loaded differs."""
    case, generator, plan, like = placed("dropout", "one_f_one_b", 2)
    saved = interop.Checkpoints(folder, case.pipeline, plan, handler=handler())
    kept, steps = like(rank), []
    for _ in range(4):
        kept = trained(case, generator, plan, handler(), kept, 1)
        steps.append((saved.async_save(**kept), kept))
    return [differences(saved.load(handle.wait(), **like(rank)), kept) for handle, kept in steps]


@thorough
def test_ranks_train_on_while_a_save_is_under_way(pools, tmp_path):
    assert pools(2).run(train_while_saving, str(tmp_path)) == [[[]] * 4] * 2
    assert [path.name[-6:] for path in sorted(tmp_path.iterdir())] == [f"step-{i}" for i in (1, 2, 3, 4)]


def test_what_went_wrong_while_training_went_on_is_raised_by_the_next_call(tmp_path):
    saved, tree = small(tmp_path)
    saved.async_save(**tree, what=object())
    with pytest.raises(TypeError, match="what is a object"):
        saved.save(**tree)
    assert saved.save(**tree).name == "000001-step-1"


# What is in them


def test_nothing_is_saved_after_a_peer_has_failed(tmp_path, monkeypatch):
    """On a GPU a step returns before it is done: what it computes after a failure is no result."""
    saved, tree = small(tmp_path)
    first = saved.save(**tree)

    def failed():
        raise TransportError("rank 1 lost rank 0")

    monkeypatch.setattr(handlers.Local, "check", lambda local: failed())
    with pytest.raises(TransportError, match="rank 1 lost rank 0"):
        saved.save(**tree)
    with pytest.raises(TransportError, match="rank 1 lost rank 0"):
        saved.async_save(**tree).wait()
    assert saved.latest() == first


def test_only_the_last_are_kept(tmp_path):
    saved, tree = small(tmp_path, keep=2)
    for step in (5, 9, 2):  # an earlier one again, after going back
        saved.save(**{**tree, "step": step})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000002-step-9", "000003-step-2"]
    assert saved.load(**zeros(tree))["step"] == 2


def test_parts_are_loaded_and_the_meta_device_stands_for_the_handlers(tmp_path):
    saved, tree = small(tmp_path)
    saved.save(**tree, rng=(3, 4), note="é", rate=0.1, done=True)
    like = {"params": optree.tree_map(lambda x: x.to("meta").to(torch.float64), tree["params"]), "rng": (0, 0)}
    found = saved.load(**like)
    assert found.keys() == {"params", "rng"}
    assert found["rng"] == (3, 4)
    assert differences(found["params"], optree.tree_map(torch.Tensor.double, tree["params"])) == []
    rest = saved.load(note="", rate=0.0, done=False)
    assert rest == {"note": "é", "rate": 0.1, "done": True}


NUMPYS = {
    "lr": np.float64(0.1),
    "count": np.int64(3),
    "done": np.bool_(True),
    "f": np.float32(0.5),
    "name": np.str_("é"),
}


def test_numpys_numbers_are_saved_as_pythons(tmp_path):
    saved, tree = small(tmp_path)
    assert saved.save(**{**tree, **NUMPYS, "step": np.int64(7)}).name == "000001-step-7"
    found = saved.load(**{**NUMPYS, "step": 0})
    assert found == {**NUMPYS, "step": 7}
    assert {type(value) for value in found.values()} == {float, int, bool, str}


@pytest.mark.parametrize("value", [np.zeros(2), np.complex64(1), object()])
def test_what_can_not_be_saved_is_refused_with_its_place(tmp_path, value):
    saved, tree = small(tmp_path)
    with pytest.raises(TypeError, match=rf"^rates\.0\.one is a {type(value).__name__.removesuffix('64')}"):
        saved.save(**{**tree, "rates": [{"one": value}]})


UNSTORABLE = {
    "torch.sparse_coo": lambda: torch.eye(2).to_sparse(),
    "torch.sparse_csr": lambda: torch.eye(2).to_sparse_csr(),
    "torch.jagged": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", UNSTORABLE)
def test_tensors_that_are_not_dense_are_refused_with_their_place(tmp_path, layout):
    saved, tree = small(tmp_path)
    grads = {0: {"w": UNSTORABLE[layout]()}, 1: {"b": torch.ones(2, 2)}}
    message = rf"^grads\.0\.w is a tensor of layout {layout}, and a checkpoint holds dense ones: .*to_dense\(\)"
    with pytest.raises(TypeError, match=message):
        saved.save(**tree, grads=grads)
    saved.save(**{**tree, "grads": {0: {"w": torch.eye(2)}, 1: {"b": torch.ones(2, 2)}}})
    with pytest.raises(TypeError, match=message):
        saved.load(params=tree["params"], grads=grads)


def test_a_tensor_without_memory_is_refused_with_its_place(tmp_path):
    saved, tree = small(tmp_path)
    with pytest.raises(TypeError, match=r"^params\.stages\.0\.w has no values, because it is on the meta device: "):
        saved.save(params={**tree["params"], 0: {"w": torch.ones(3, device="meta")}})


def test_none_is_saved_too(tmp_path):
    saved, tree = small(tmp_path)
    kept = {**tree, "best": None, "grads": {0: {"w": None}, 1: {"b": torch.ones(2, 2)}}, "history": [0.5, None]}
    saved.save(**kept)
    assert differences(saved.load(**zeros({**kept, "best": None})), kept) == []
    later = {**kept, "best": 0.25, "history": [None, torch.ones(3)]}
    saved.save(**later)  # where training began with none
    assert (
        differences(saved.load(**{**zeros(tree), "best": None, "grads": kept["grads"], "history": [0, None]}), later)
        == []
    )
    with pytest.raises(CheckpointError, match=r"of other shapes are grads\.0\.w \(None there, \[3\] here\)"):
        saved.load(grads={0: {"w": torch.zeros(3)}, 1: {"b": torch.zeros(2, 2)}})


@pytest.mark.parametrize(
    "losses", [{0: 0.5, 1: 0.25}, {0: torch.ones(2), 1: torch.ones(3)}, {0: {"a": 1}, 1: {"a": 2}}]
)
def test_numbers_as_keys_do_not_make_a_dict_one_of_stages(tmp_path, losses):
    saved, params = checkpoints_of(tmp_path, [0, 1, 2, 3])
    saved.save(params=params, losses=losses)
    other, like = checkpoints_of(tmp_path, [0])
    assert differences(other.load(params=zeros(like), losses=zeros(losses))["losses"], losses) == []
    assert differences(saved.load(losses=zeros(losses)), {"losses": losses}) == []


def test_whatever_is_kept_for_stages_beside_the_optimizers_state_is_loaded_into_other_cuts(tmp_path):
    saved, params = checkpoints_of(tmp_path, [0, 2])
    _, adam = update(params, init(params), params)
    kept = {s: {"adam": adam[s], "average": tree, "count": torch.tensor(s)} for s, tree in params.items()}
    saved.save(params=params, optimizer=kept)
    assert differences(saved.load(params=params, optimizer=kept)["optimizer"], kept) == []
    other, whole = checkpoints_of(tmp_path, [0, 1])
    like = {s: {"adam": init(tree), "average": zeros(tree), "count": torch.tensor(9)} for s, tree in whole.items()}
    found = other.load(params=whole, optimizer=like)["optimizer"]
    for part, expected in (("adam", adam), ("average", params)):
        assert differences({**found[0][part], **found[1][part]}, {**expected[0], **expected[1]}) == []
    assert [found[s]["count"].item() for s in range(2)] == [0, 1]


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ([torch.ones(1)], TypeError, r"params must be \{stage: tree\}, not a list"),
        ({"w": torch.ones(1)}, ValueError, r"params has an entry for 'w', and the pipeline has stages 0 to 1"),
        ({2: torch.ones(1)}, ValueError, r"params has an entry for 2, and the pipeline has stages 0 to 1"),
    ],
)
def test_a_section_that_is_not_by_stage_is_refused(tmp_path, params, error, message):
    saved, _ = small(tmp_path)
    for call in (saved.save, saved.load):
        with pytest.raises(error, match=message):
            call(params=params) if call == saved.save else call(tmp_path, params=params)


@pytest.mark.parametrize(
    ("kind", "scalars"), [(torch.optim.AdamW, ["step"]), (torch.optim.NAdam, ["mu_product", "step"])]
)
def test_what_an_optimizer_keeps_has_its_parameters_dtype_and_scalars_their_own(tmp_path, kind, scalars):
    saved, tree = small(tmp_path)
    init, update = interop.optimizer(kind)
    double = optree.tree_map(torch.Tensor.double, tree["params"])
    saved.save(params=double, optimizer=update(double, init(double), double)[1])
    expected = update(tree["params"], init(tree["params"]), tree["params"])[1]
    for like in (tree["params"], optree.tree_map(lambda x: x.to("meta"), tree["params"])):
        found = saved.load(params=like, optimizer=init(like))
        dtypes = optree.tree_map(lambda x: x.dtype, found["optimizer"])
        assert dtypes == optree.tree_map(lambda x: x.dtype, expected)
    wide = {**update(double, init(double), double)[1][0]["w"], "exp_avg": torch.ones(3, dtype=torch.float16)}
    saved.save(params=double, optimizer={0: {"w": wide}, 1: {"b": {}}})
    found = saved.load(params=tree["params"], optimizer=init(tree["params"]))["optimizer"][0]["w"]
    assert found["exp_avg"].dtype == torch.float16  # which was no parameter's
    assert sorted(name for name, x in found.items() if x.ndim == 0) == scalars


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


@one_in(2)
@pytest.mark.parametrize("training", [True, False])
def test_a_checkpoint_of_the_other_mode_names_the_way_out(tmp_path, training):
    def split(training):
        module = Normed().train(training)
        pipeline, params = interop.split(module, at=["second"], example=torch.randn(4, 3), loss=cases.mse)
        plan = pipeline.plan(Placement.loop(2), 1)
        state = {"state": interop.buffers(pipeline, module)} if training else {}
        return interop.Checkpoints(tmp_path, pipeline, plan, handler=handlers.Local()), {"params": params, **state}

    saved, kept = split(training)
    saved.save(**kept)
    other, like = split(not training)
    with pytest.raises(CheckpointError) as caught:
        other.load(**like)
    there, here = ("state", "params") if training else ("params", "state")
    assert f"norm.running_mean, norm.running_var are {there} there and {here} here" in str(caught.value)
    assert "interop.eval_mode" in str(caught.value)


def test_layouts_in_memory_stay(tmp_path):
    saved, _ = small(tmp_path)
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    params = {0: {"w": image, "t": torch.randn(3, 4).T, "h": torch.randn(3).bfloat16()}, 1: {}}
    _, state = update(params, init(params), params)
    saved.save(params=params, optimizer=state)
    found = saved.load(params=params, optimizer=init(params))
    assert differences(found, {"params": params, "optimizer": state}) == []
    pairs = zip(*(optree.tree_leaves(x) for x in (found, {"params": params, "optimizer": state})), strict=True)
    assert all(a.stride() == b.stride() and a.dtype == b.dtype for a, b in pairs)


def test_what_torchopt_keeps_is_saved_too(tmp_path):
    torchopt = pytest.importorskip("torchopt", reason="the package torchopt is not installed")
    adam = torchopt.adam(lr=0.1)
    saved, tree = small(tmp_path)
    params = tree["params"]
    states = {s: adam.update(tree, adam.init(tree), inplace=False)[1] for s, tree in params.items()}
    saved.save(params=params, optimizer=states)
    found = saved.load(params=params, optimizer={s: adam.init(tree) for s, tree in params.items()})
    assert differences(found["optimizer"], states) == []


def test_it_is_a_checkpoint_of_torchs(tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    pipeline, params = blocks([0, 2])
    plan = pipeline.plan(Placement.loop(2), 1)
    saved = interop.Checkpoints(tmp_path, pipeline, plan, handler=handlers.Local())
    dcp_to_torch_save(saved.save(params=params, step=3), tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt")
    assert differences(found, {"params": {**params[0], **params[1]}}) == []


@pytest.mark.parametrize("last", [True, False])
def test_weights_are_exported_under_the_modules_names(tmp_path, last):
    load_file = pytest.importorskip("safetensors.torch", reason="safetensors is not installed").load_file
    pipeline, params = blocks([0, 2])
    plan = pipeline.plan(Placement.loop(2), 1)
    saved = interop.Checkpoints(tmp_path, pipeline, plan, handler=handlers.Local())
    state = {1: {"layers.3.mean": torch.arange(3)}}
    path = saved.save(params=params, optimizer=init(params), state=state, step=3)
    interop.export_safetensors(tmp_path if last else path, tmp_path / "model.safetensors")
    expected = {**params[0], **params[1], **state[1]}
    assert differences(load_file(tmp_path / "model.safetensors"), expected) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001-step-3", "model.safetensors"]


class Masked(nn.Module):
    """With buffers of which one is in the state_dict, and two are not: one stays, one is changed by forward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0]), persistent=False)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.seen.add_(1)
        return self.second(self.first(x) * self.mask * self.scale)


@one_in(3)
@pytest.mark.parametrize("by", ["split", "split on meta", "from_modules"])
def test_an_export_is_a_state_dict_of_the_module(tmp_path, by):
    load_file = pytest.importorskip("safetensors.torch", reason="safetensors is not installed").load_file
    example, module = torch.randn(4, 3), nn.Sequential(Masked(), nn.ReLU(), nn.Linear(3, 3))
    if by == "from_modules":
        pipeline, params = interop.from_modules(module, at=[1])
    else:
        pipeline, params = interop.split(module, at=["2"], example=example)
    state = interop.buffers(pipeline, module)
    if by == "split on meta":  # where nothing is known of the values of buffers
        pipeline, _ = interop.split(copy.deepcopy(module).to("meta"), at=["2"], example=example.to("meta"))
    plan = pipeline.plan(Placement.loop(2), 1)
    saved = interop.Checkpoints(tmp_path, pipeline, plan, handler=handlers.Local())
    saved.save(params=params, state=state)
    interop.export_safetensors(tmp_path, tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    assert differences(found, dict(module.state_dict())) == []
    nn.Sequential(Masked(), nn.ReLU(), nn.Linear(3, 3)).load_state_dict(found)
    assert (
        differences(saved.load(**zeros({"params": params, "state": state})), {"params": params, "state": state}) == []
    )


def test_what_an_optimizer_keeps_for_stages_without_parameters_is_theirs(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Tanh())
    pipeline, params = interop.split(module, at=["1", "2"], example=torch.ones(4, 2))
    plan = pipeline.plan(Placement.loop(3), 1)
    checkpoints = interop.Checkpoints(tmp_path, pipeline, plan, handler=handlers.Local())
    counts = {stage: {"count": torch.tensor(float(stage))} for stage in range(3)}
    checkpoints.save(params=params, optimizer=counts)
    zero = {stage: {"count": torch.tensor(0.0)} for stage in range(3)}
    assert checkpoints.load(params=params, optimizer=zero)["optimizer"] == counts
