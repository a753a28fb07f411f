"""On GPUs: one device holding all ranks, and NCCL with one rank on each."""

import pytest
import torch

import fpipe
from fpipe import handlers
from tests import cases, jobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
NAMES = ["linear", "attention", "dictionary", "skip", "tied", "dropout", "modules"]
SCHEDULES = ["gpipe", "one_f_one_b", "interleaved_1f1b", "split"]


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", NAMES)
def test_local_gives_the_references_bits(name, schedule):
    case, generator, plan = cases.make(name, schedule, 2, 3)
    device = torch.device("cuda", 0)
    case = jobs.on_device(case, device)
    handler = handlers.Local([device] * plan.ranks)
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handler, **case.options)
    found = step(case.params, case.batch, case.target, state=case.state, rng=case.rng)
    assert jobs.differences(found, cases.reference(case, generator, plan)) == []


def test_values_go_from_device_to_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one CUDA device")
    case, generator, plan = cases.make("linear", "one_f_one_b", 2, 3)
    devices = [torch.device("cuda", rank) for rank in range(2)]
    expected = cases.reference(jobs.on_device(case, devices[0]), generator, plan)
    params = {s: jobs.moved(case.params[s], devices[s]) for s in range(2)}
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handlers.Local(devices))
    loss, grads = step(params, case.batch, case.target)
    assert jobs.differences(jobs.moved((loss, grads), devices[0]), expected) == []


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", NAMES)
def test_nccl_gives_the_references_bits(pools, name, schedule):
    ranks = min(torch.cuda.device_count(), 4)
    if ranks < 2:
        pytest.skip("NCCL wants a device for each rank, and there is one")
    assert pools(ranks).run(jobs.train_on_gpus, name, schedule, 4, ranks, limit=180) == [[]] * ranks
