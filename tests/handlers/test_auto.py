"""The handler for the way in which a program was started."""

import atexit
import warnings
from importlib import import_module

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fpipe import Pipeline, Placement, handlers
from tests.support.forked import script

PROGRAM = """
import atexit
import sys

at_exit = []
atexit.register = lambda *call: at_exit.append(call)  # a forked process ends without calling them

import torch
import torch.distributed as dist

import fpipe
from fpipe import Pipeline, Placement, handlers

pipeline = Pipeline([lambda p, x: x * p["w"], lambda p, x: x * p["w"]], loss=lambda y, t: (y - t).sum())
handler = handlers.auto()
plan = pipeline.plan(Placement.loop(ranks=2), microbatches=2)
params = pipeline.params_on({0: {"w": torch.tensor(2.0)}, 1: {"w": torch.tensor(3.0)}}, plan, handler)
step = fpipe.value_and_grad(pipeline, "1f1b", plan, handler=handler)
loss, grads = step(params, torch.ones(4), torch.zeros(4))
if handler.is_first:
    print(type(handler).__name__, handler.rank, sorted(params), loss.item())

def end():
    for function, *arguments in at_exit:
        if function.__module__.startswith("fpipe.handlers.distributed.auto"):
            function(*arguments)

if dist.is_initialized():
    sys.last_value = RuntimeError("unhandled")
    end()
    assert dist.is_initialized()
    sys.last_value = None
    end()
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    end()
    assert dist.is_initialized()  # since it is the program's
    assert isinstance(handlers.auto(), handlers.Local)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("restarts", ["0", "3"])
def test_a_store_that_does_not_survive_a_host_is_warned_of(restarts, monkeypatch):
    """Where torchrun may start the job again."""
    module = import_module("fpipe.handlers.distributed.auto")
    monkeypatch.setattr(module, "_processes", lambda: 2)
    monkeypatch.setattr(module, "_init", lambda device: None)
    monkeypatch.setattr(module, "Distributed", lambda **options: None)
    for name, value in {"USE_AGENT_STORE": "True", "MAX_RESTARTS": restarts}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        handlers.auto()
    texts = [str(each.message) for each in told]
    assert [text[:44] for text in texts] == ["set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for"] * (restarts == "3")


LOCAL = "Local 0 [0, 1] 12.0\n"


@pytest.mark.parametrize(("processes", "printed"), [(0, LOCAL), (1, LOCAL), (2, "Distributed 0 [0] 12.0\n")])
def test_one_program_runs_in_one_process_and_in_two(processes, printed, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    assert script(tmp_path / "train.py", processes=processes, cwd=tmp_path) == printed


@pytest.mark.parametrize(("local_rank", "devices", "device"), [("1", 4, 1), (None, 4, 2), (None, 1, 0)])
def test_the_gpu_of_a_process(local_rank, devices, device, monkeypatch):
    chosen = []
    monkeypatch.setenv("RANK", "6")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(dist, "init_process_group", chosen.append)
    monkeypatch.setattr(atexit, "register", lambda *call: None)
    import_module("fpipe.handlers.distributed.auto")._init(torch.device("cuda"))
    assert chosen == [torch.device("cuda", device), "nccl"]


def with_a_group_of_its_own(rank):
    handler = handlers.auto(timeout=60.0)
    return handler.timeout, handler.rank == rank == dist.get_rank(), handler.is_first == (rank == 0), repr(handler)


def test_a_group_that_is_there_is_used(pools):
    for rank, found in enumerate(pools(2).run(with_a_group_of_its_own)):
        assert found == (60.0, True, True, f"<Distributed: rank {rank} of 2, on cpu>")


def test_params_and_state_of_all_ranks_of_a_process():
    pipeline = Pipeline([lambda p, x: x] * 3, ties={(2, "head"): (0, "wte")})
    plan = pipeline.plan(Placement.loop(3), 1)
    params = {0: {"wte": 1, "wpe": 2}, 1: {}, 2: {}}
    assert pipeline.params_on(params, plan, handlers.Local()) == params
    for rank in (2, np.int64(2), torch.tensor(2)):
        assert pipeline.params_on(params, plan, rank) == {0: {"wte": 1}, 2: {}}
    assert pipeline.state_on({0: 1, 2: 3}, plan, handlers.Reference()) == {0: 1, 2: 3}
