"""On GPUs: all ranks in one process, and one rank in each over NCCL. One GPU is enough: ranks share those there are.

The jobs run on the CPU too, over gloo, in the last test of this file: code that has never run is wrong.
"""

import os
import re
from itertools import pairwise

import pytest
import torch

import fpipe
from fpipe import StageError, handlers, interop, schedules
from fpipe.tensorboard import Recorder
from fpipe.tensorboard.files.reader import CaptureId, find
from tests.support import cases, device_jobs, jobs
from tests.support.combinations import sample, thorough

CASES, SCHEDULES = cases.UNSLICED, [*cases.SCHEDULES]
SPREAD = [(CASES[i % len(CASES)], schedule) for i, schedule in enumerate(SCHEDULES)]
"""Every schedule once, and every case at least once."""
OF_FOUR = ("gpipe", "one_f_one_b", "interleaved_1f1b", "zb_v", "dualpipe_v", "dualpipe", "overlap")


def on_gpus(test):
    """Mark a test, and skip it where there is no GPU."""
    reason = "there is no CUDA device"
    for mark in (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=reason)):
        test = mark(test)
    return pytest.mark.usefixtures("deterministic")(test)


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setitem(os.environ, "CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def device():
    return torch.device("cuda", 0)


def fitting(name, schedule):
    """Schedules with copies of stages have none of a stage with state."""
    return "linear" if schedule in cases.COPIED and name == "modules" else name


def local_differences(name, schedule, device, microbatches=4):
    case, generator, plan = cases.make(name, schedule, 2, microbatches, cases.rows(microbatches))
    case, handler = cases.on_device(case, device), handlers.Local([device] * plan.ranks)
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handler, **case.options)
    result = step(case.params, case.batch, case.target, state=case.state, rng=case.rng)
    return [(name, *at) for at in jobs.differences(result, cases.oracle(name, plan, device))]


@on_gpus
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_local_gives_the_references_bits(schedule, device):
    names = [name for name in CASES if fitting(name, schedule) == name]
    assert [at for name in names for at in local_differences(name, schedule, device)] == []


@on_gpus
@pytest.mark.parametrize("mode", device_jobs.MODES)
def test_local_in_every_mode(mode, device):
    assert device_jobs.in_mode(handlers.Local([device] * 2), None, device, mode) == []


@on_gpus
@pytest.mark.parametrize("capture", [True, "pieces"])
@pytest.mark.parametrize("name", CASES)
def test_a_captured_step_gives_the_references_bits(name, capture, device):
    assert device_jobs.captured(name, "zb_v" if CASES.index(name) % 2 else "one_f_one_b", device, capture) == []


@on_gpus
def test_values_go_from_device_to_device(device):
    """Between a GPU and the CPU, and between two GPUs where there are two."""
    case, generator, plan = cases.make("linear", "one_f_one_b", 2, 3)
    expected = cases.reference(cases.on_device(case, device), generator, plan)
    for other in ["cpu", *(f"cuda:{i}" for i in range(1, torch.cuda.device_count()))]:
        devices = [device, torch.device(other)]
        params = {s: cases.moved(case.params[s], devices[s]) for s in range(2)}
        step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handlers.Local(devices))
        torch.testing.assert_close(cases.moved(step(params, case.batch, case.target), device), expected)


@on_gpus
def test_a_recorder_takes_the_devices_times(tmp_path, device):
    case, generator, plan = cases.make("attention", "one_f_one_b", 2, 4)
    case = cases.on_device(case, device)
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


@on_gpus
@pytest.mark.parametrize("job", ["gloo", "nccl"])
def test_ranks_over_nccl_record_one_capture(gpu_pools, job, tmp_path):
    gpu_pools(2, job).run(jobs.record, str(tmp_path), "cuda", limit=180)
    capture = find(tmp_path).read(CaptureId("", "measured", 2))
    assert capture.notices == ()
    assert {header.device.partition(":")[0] for header in capture.headers.values()} == {"cuda"}


@on_gpus
@pytest.mark.parametrize(("name", "schedule"), SPREAD)
def test_nccl_gives_the_references_bits(gpu_pools, name, schedule):
    name = fitting(name, schedule)
    assert gpu_pools(2).run(jobs.train, name, schedule, 4, 2, "everything", "cuda", limit=180) == [[]] * 2


@on_gpus
@pytest.mark.parametrize("capture", [True, "pieces"])
@pytest.mark.parametrize(("name", "schedule"), sample(SPREAD, [*SPREAD[:: len(SPREAD) // 3]]))
def test_a_captured_step_over_nccl_has_the_bits_of_one_that_is_not(gpu_pools, name, schedule, capture):
    name = fitting(name, schedule)
    assert gpu_pools(2).run(jobs.captured, name, schedule, 4, 2, "everything", "cuda", capture, limit=180) == [[]] * 2


CAPTURED = [
    device_jobs.captured_without_gradients,
    device_jobs.captured_without_tensors,
    device_jobs.captured_in_turn,
    device_jobs.captured_on_streams,
]


@on_gpus
@pytest.mark.parametrize("ask", CAPTURED)
def test_captured_steps_over_nccl(gpu_pools, ask):
    assert gpu_pools(2).run(ask, "cuda", limit=180) == [[]] * 2


@on_gpus
def test_a_failure_beside_a_live_graph_is_an_error_on_all_ranks(gpu_pools):
    """Last: the handler of this test is gone, and so are its communicators."""
    check_failure(gpu_pools(2).run(device_jobs.captured_failure, "cuda", limit=180))


def check_failure(outcomes):
    (first, soon), (second, soon_there) = outcomes
    assert (soon, soon_there) == (True, True)
    assert second.startswith("ZeroDivisionError")
    assert re.match("TransportError: .*rank 1: ZeroDivisionError: division by zero", first)


def syncs_device(p, x):
    torch.cuda.synchronize()
    return x * p


def syncs_event(p, x):
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    return x * p


WAITS = {
    "item": (lambda p, x: x * p * x.sum().item(), 1),
    "constant": (lambda p, x: x * p + torch.tensor([2.0], device=x.device), 1),
    "to the host": (lambda p, x: x * p * x.sum().cpu().to(x.device), 1),
    "stream": (lambda p, x: torch.cuda.current_stream().synchronize() or x * p, 1),
    "device": (syncs_device, 2),
    "event": (syncs_event, 2),
}
"""A stage that waits -> the call that refuses it: torch does not see all waits before they are captured."""


@on_gpus
@pytest.mark.parametrize("kind", WAITS)
def test_a_stage_that_waits_for_the_device_is_refused_and_nothing_is_updated(kind, device):
    function, call = WAITS[kind]
    pipeline = fpipe.Pipeline([lambda p, x: x * p, function], loss=lambda y, t: y.square().mean())
    plan = pipeline.plan(fpipe.Placement.loop(2), 2)
    sgd = interop.optimizer(torch.optim.SGD, lr=0.1, donate=True)
    step = fpipe.train_step(
        pipeline, schedules.gpipe, plan, sgd, handler=handlers.Local(), capture=True, autodiff="eager"
    )
    params = {s: torch.tensor(2.0, device=device) for s in range(2)}
    x, state = torch.ones(4, device=device), sgd.init(params)
    for _ in range(call - 1):
        params, state, _ = step(params, state, x)
    before = {s: p.item() for s, p in params.items()}
    with pytest.raises(StageError, match=r"leave capture=True out|called a synchronizing CUDA operation"):
        step(params, state, x)
    assert {s: p.item() for s, p in params.items()} == before
    assert torch.rand(1, device=device).numel() == 1  # the generator can draw


@on_gpus
@pytest.mark.parametrize("schedule", sample(OF_FOUR, ("one_f_one_b", "zb_v", "dualpipe")))
def test_nccl_on_four_ranks(gpu_pools, schedule):
    differences = gpu_pools(4).run(jobs.train, "attention", schedule, 8, 4, "everything", "cuda", limit=180)
    assert differences == [[]] * 4


@on_gpus
@pytest.mark.parametrize("job", ["gloo", "nccl"])
@pytest.mark.parametrize(
    ("ask", "arguments"),
    [
        (device_jobs.dtypes, ()),
        (jobs.odd_values, (2, "graph")),
        (jobs.shapes_change, (2, "graph")),
        (jobs.evaluate_gathered, ("dictionary", 2, 3)),
        (jobs.train, ("weighted", "one_f_one_b", 4, 2, "eager")),
        *((device_jobs.train_in_mode, (mode,)) for mode in device_jobs.MODES),
    ],
)
def test_nccl_carries_everything(gpu_pools, job, ask, arguments):
    assert gpu_pools(2, job).run(ask, *arguments, "cuda", limit=180) == [[], []]


@on_gpus
@pytest.mark.parametrize("job", ["gloo", "nccl"])
def test_norms_and_checkpoints_over_nccl(gpu_pools, job, tmp_path):
    assert gpu_pools(2, job).run(device_jobs.norm_and_checkpoint, str(tmp_path), "cuda", limit=180) == [[], []]


@thorough
def test_what_is_captured_is_right_over_gloo(pools):
    for ask in CAPTURED:
        assert pools(2).run(ask, "cpu") == [[], []], ask


@thorough
def test_the_jobs_of_these_tests_are_right_over_gloo(pools, tmp_path):
    """As far as no other test runs them."""
    assert pools(2).run(device_jobs.dtypes, "cpu") == [[], []]
    assert pools(2).run(device_jobs.norm_and_checkpoint, str(tmp_path), "cpu") == [[], []]
    for mode in ("autocast", "bfloat16", "side stream", "sum"):
        assert pools(2).run(device_jobs.train_in_mode, mode, "cpu") == [[], []], mode
    for capture in (True, "pieces"):
        assert device_jobs.captured("twice", "one_f_one_b", torch.device("cpu"), capture) == []
    check_failure(pools(2).run(device_jobs.captured_failure, "cpu"))
    assert local_differences("twice", "zb_v", torch.device("cpu")) == []
    pools(2).run(jobs.record, str(tmp_path / "log"), "cpu")
    assert len(find(tmp_path / "log").read(CaptureId("", "measured", 2)).headers) == 2
