"""The calls that a CUDA graph makes, on a CUDA that records them; and on a GPU, a training step's bits."""

from contextlib import contextmanager

import pytest
import torch

from fpipe import handlers
from fpipe.devices import CaptureError, Cuda, GraphReset
from fpipe.devices.cuda_graph import CudaGraph
from fpipe.devices.tape import storage
from tests.support import cases, train_jobs


class Generator:
    """A CUDA generator, as far as graphs use it: it has a state, which other generators may hold too."""

    def __init__(self, log, name):
        self.log, self.state = log, name

    def clone_state(self):
        self.log.append("clone")
        return Generator(self.log, f"state {self.log.count('clone')}")

    def graphsafe_get_state(self):
        return Generator(self.log, self.state)

    def graphsafe_set_state(self, other):
        self.state = other.state

    def manual_seed(self, seed):
        self.log.append(f"seed {self.state} with {seed}")


@pytest.fixture
def cuda(monkeypatch):
    """The log of calls, and the default generator."""
    log = []
    generator = Generator(log, "global")

    class Graph:
        def register_generator_state(self, state):
            log.append(f"register {state.state}")

        def capture_begin(self, pool, capture_error_mode):
            log.append(f"begin {capture_error_mode} with {generator.state} and {pool}")

        def capture_end(self):
            log.append("end")
            if "fail" in log:
                raise RuntimeError("the capture is invalid")

        def pool(self):
            if "fail" in log:
                raise RuntimeError("without a preceding successful capture")

        def replay(self):
            log.append("replay")

        def reset(self):
            log.append("reset")

    class Stream:
        def __init__(self, device):
            self.device = device

    @contextmanager
    def on(stream):
        log.append("on the side stream")
        yield
        log.append("off")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append(f"synchronize {device}"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("empty cache"))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "a pool")
    for name in ("endAllocateToPool", "releasePool"):
        note = lambda device, pool, name=name: log.append(f"{name} {device}, {pool}")  # noqa: E731
        monkeypatch.setattr(torch._C, f"_cuda_{name}", note, raising=False)
    return log, generator


def test_each_scope_has_a_state_that_is_registered_before_the_capture_and_seeded_before_a_replay(cuda):
    log, generator = cuda
    graph = CudaGraph(torch.device("cuda", 0), [], [(0, 0), (1, 0)])
    with graph.capture():
        for key in ((0, 0), (1, 0), (1, 1)):
            with graph.seeded(key):
                log.append(f"draw from {generator.state}")
        log.append(f"then {generator.state}")
    graph.replay({(0, 0): 5, (1, 0): 6})
    assert log == [
        "clone",
        "clone",
        "register state 1",
        "register state 2",
        "synchronize cuda:0",
        "empty cache",
        "on the side stream",
        "clone",
        "begin thread_local with state 3 and a pool",
        "draw from state 1",
        "draw from state 2",
        "draw from state 3",
        "then state 3",
        "end",
        "off",
        "seed state 1 with 5",
        "seed state 2 with 6",
        "replay",
    ]
    assert generator.state == "global"


def test_the_error_of_a_function_is_raised_rather_than_that_of_its_capture(cuda):
    log, generator = cuda
    graph = CudaGraph(torch.device("cuda", 0), [], ["a"])

    def fails():
        log.append("fail")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), graph.capture(), graph.seeded("a"):
        fails()
    at = log.index("fail")
    assert log[at:] == ["fail", "end", "endAllocateToPool 0, a pool", "releasePool 0, a pool"]
    assert generator.state == "global"


def test_a_capture_that_fails_at_its_end_gives_its_memory_back(cuda):
    log, generator = cuda
    graph = CudaGraph(torch.device("cuda", 0), [], ["a"])
    with pytest.raises(RuntimeError, match="the capture is invalid"), graph.capture():
        log.append("fail")
    assert log[-3:] == ["end", "endAllocateToPool 0, a pool", "releasePool 0, a pool"]
    assert generator.state == "global"


def test_the_memory_of_a_capture_whose_function_failed_goes_with_its_graph(cuda):
    log, _ = cuda
    graph = CudaGraph(torch.device("cuda", 0), [], [])
    with pytest.raises(ValueError, match="no"), graph.capture():
        raise ValueError("no")
    assert log[-1] == "end"


def test_a_graph_that_was_reset_is_not_replayed(cuda):
    log, _ = cuda
    graph = CudaGraph(torch.device("cuda", 0), [], [])
    with graph.capture():
        pass
    graph.reset()
    with pytest.raises(GraphReset, match="the graph was reset"):
        graph.replay({})
    assert log[-1] == "reset"


def test_tensors_from_outside_are_kept_alive_and_others_are_not(cuda):
    outside = torch.ones(3)
    graph = CudaGraph(torch.device("cuda", 0), [], [])
    with graph.capture():
        inside = outside[1:] * 2
        inside.add_(torch.zeros(2)).sum()
    assert list(map(storage, graph.borrowed.tensors.values())) == [storage(outside)]


def test_only_what_is_donated_may_be_written_to(cuda):
    donated, outside = torch.ones(3), torch.ones(3)
    graph = CudaGraph(torch.device("cuda", 0), [donated], [])

    def function():
        donated[1:].mul_(outside[0])
        outside.neg_()

    with pytest.raises(CaptureError, match=r"writes by aten.neg_.default to a tensor from outside"), graph.capture():
        function()
    assert outside.sum() == 3


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@on_a_gpu
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "capturable"])
def test_bits_of_training_on_a_gpu(optimizer, donate):
    case, order, plan = cases.make("dropout", "zb_v", 2, 2)
    case = cases.on_device(case, torch.device("cuda"))
    own = handlers.Local()
    assert train_jobs.compare(own, case, order, plan, None, optimizer, donate, 0.1, capture=True) == []


@on_a_gpu
def test_a_device_makes_its_graphs():
    assert isinstance(Cuda().new_graph([], []), CudaGraph)
