"""A step launches its work and reads nothing back on the host, but the weights of its microbatches, once."""

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fpipe
from fpipe import Pipeline, Placement, handlers, schedules
from tests.support.fake_device import FakeDevice

READS = {"_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "_unique2"}
CALLS = {Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.item, Tensor.__bool__, Tensor.__float__, Tensor.__int__}
MOVES = {Tensor.to, torch.as_tensor, torch.tensor}


class Operations(TorchDispatchMode):
    """The operations whose result the host needs."""

    def __init__(self):
        super().__init__()
        self.reads = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in READS:
            self.reads.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """The calls that read a tensor on the host, or copy it between devices in a way that the host waits for."""

    def __init__(self):
        super().__init__()
        self.reads = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        devices = [x for x in (*args[1:], *(kwargs or {}).values()) if isinstance(x, torch.device | str | Tensor)]
        moved = func in MOVES and isinstance(args[0], Tensor) and devices and result is not args[0]
        if func in CALLS or moved:
            self.reads.append(func.__name__)
        return result


def reads_of(call):
    with Operations() as operations, Calls() as calls:
        call()
    return operations.reads + calls.reads


def mean(output, target):
    return (output - target).square().mean()


def dropped(p, x):
    return torch.nn.functional.dropout(torch.tanh(x @ p), 0.1)


def step_and_target(schedule="zb_h1", stage=dropped, loss=mean, **options):
    """A step, a function of the target, and a target."""
    torch.manual_seed(0)
    pipeline = Pipeline([stage] * 2, loss)
    plan = pipeline.plan(Placement.loop(2), 4)
    params, x = {s: torch.randn(3, 3) for s in range(2)}, torch.randn(8, 3)
    step = fpipe.value_and_grad(pipeline, getattr(schedules, schedule), plan, handler=handlers.Local(), **options)
    return (lambda target, **more: step(params, x, target, **more)), torch.randn(8, 3)


def test_reads_and_moves_are_noticed():
    x = torch.ones(2)
    assert reads_of(lambda: x.tolist()) == ["tolist"]
    assert reads_of(lambda: bool(x[0] > 0)) == ["_local_scalar_dense", "__bool__"]
    assert reads_of(lambda: x.to("cpu", torch.float64)) == ["to"]
    assert reads_of(lambda: x.double().to(x)) == ["to"]
    assert reads_of(lambda: torch.as_tensor(x, dtype=torch.float64, device="cpu")) == ["as_tensor"]


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_a_step_reads_nothing(schedule):
    step, target = step_and_target(schedule, lambda p, x: torch.tanh(x @ p))
    step(target)
    assert reads_of(lambda: step(target)) == []


def test_a_step_with_seeds_reads_nothing():
    step, target = step_and_target()
    step(target, rng=(0, 0))
    assert reads_of(lambda: step(target, rng=(0, 1))) == []


@pytest.mark.parametrize("number", [lambda t: (t > 0).sum(), lambda t: int(t.shape[0]), lambda t: t.new_ones(1)])
def test_a_step_with_weights_reads_them_once(number):
    step, target = step_and_target(weight=number)
    step(target, rng=(0, 0))
    assert reads_of(lambda: step(target, rng=(0, 1))) == ["tolist"]


def test_weights_of_a_device_are_copied_once_and_waited_for_after_the_first_loss(monkeypatch):
    step, target = step_and_target("gpipe", weight=lambda t: (t > 0).sum())
    expected = step(target, rng=(0, 0))
    device, waits_before = FakeDevice(now=100.0), []
    monkeypatch.setattr("fpipe.training.arguments.device_of", lambda _: device)

    def loss(output, target):
        waits_before.append(len(device.waits))
        return mean(output, target)

    step, target = step_and_target("gpipe", loss=loss, weight=lambda t: (t > 0).sum(), autodiff="eager")
    total, gradients = step(target, rng=(0, 0))
    assert device.memory == [(4,)]
    assert len(device.waits) == 1
    assert waits_before == [0, 1, 1, 1]
    assert torch.equal(total, expected[0])
    assert all(torch.equal(gradients[s], expected[1][s]) for s in range(2))


def test_numbers_as_weights_stay_on_the_host_whatever_the_default_device():
    step, target = step_and_target(weight=lambda t: len(t))
    expected = step(target, rng=(0, 0))
    with torch.device("meta"):
        loss, _ = step(target, rng=(0, 0))
    assert torch.equal(loss, expected[0])


@pytest.mark.parametrize("number", [lambda t: t, lambda t: torch.ones(0)])
def test_a_weight_that_is_no_number_is_refused(number):
    step, target = step_and_target(weight=number)
    with pytest.raises(fpipe.StageError, match="weight must return one number, not a tensor of shape"):
        step(target)
