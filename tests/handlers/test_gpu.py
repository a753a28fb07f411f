"""On GPUs: one device holding all ranks, and NCCL with one rank on each."""

from itertools import pairwise

import pytest
import torch

import fpipe
from fpipe import handlers
from fpipe.tensorboard import Recorder
from fpipe.tensorboard.files.reader import CaptureId, find
from tests.support import cases, jobs

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


def test_a_recorder_takes_the_devices_times(tmp_path):
    case, generator, plan = cases.make("attention", "one_f_one_b", 2, 4)
    device = torch.device("cuda", 0)
    case = jobs.on_device(case, device)
    with Recorder(tmp_path, every=1) as recorder:
        handler = handlers.Local([device] * plan.ranks)
        step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handler, observe=recorder)
        for _ in range(4):
            step(case.params, case.batch, case.target)
    listing = find(tmp_path)
    assert listing.steps("", "measured") == listing.steps("", "predicted") == [1, 2, 3]
    capture = listing.read(CaptureId("", "measured", 3))
    assert {header.peak[1] for header in capture.headers.values()} == {"allocator"}
    for rank in range(2):
        spans = list(capture.timeline.compute(rank))
        assert all(span.end > span.start for span in spans)
        assert all(before.end <= after.start for before, after in pairwise(spans))


def test_ranks_over_nccl_record_one_capture(pools, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants a device for each rank, and there is one")
    pools(2).run(jobs.record_on_gpus, str(tmp_path), limit=180)
    capture = find(tmp_path).read(CaptureId("", "measured", 2))
    assert capture.notices == ()
    assert {header.device for header in capture.headers.values()} == {"cuda:0", "cuda:1"}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", NAMES)
def test_nccl_gives_the_references_bits(pools, name, schedule):
    ranks = min(torch.cuda.device_count(), 4)
    if ranks < 2:
        pytest.skip("NCCL wants a device for each rank, and there is one")
    assert pools(ranks).run(jobs.train_on_gpus, name, schedule, 4, ranks, limit=180) == [[]] * ranks
