"""A gradient that no entry of the result could hold is refused, and so is a loss without gradients."""

import pytest
import torch
from torch import nn

import fpipe
from fpipe import Pipeline, Placement, StageError, handlers, interop, schedules
from tests.support.cases import mse

OUTSIDE = nn.Parameter(torch.full((4,), 2.0))
EACH_WAY = [(handlers.Local(), "graph"), (handlers.Local(), "eager"), (handlers.Reference(), "eager")]
each_way = pytest.mark.parametrize(("handler", "autodiff"), EACH_WAY, ids=["graph", "eager", "reference"])


class Unregistered(nn.Module):
    def forward(self, x):
        return x * OUTSIDE


class Weighing(nn.Module):
    """A loss with a parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, output, target):
        return ((output - target) * self.weight).square().mean()


class Turning(nn.Module):
    """Makes a leaf, for a gradient of its own, and reads a parameter without gradients."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Linear(4, 1)

    def forward(self, x):
        with torch.enable_grad():
            place = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(place).tanh().sum(), place, create_graph=True)
        with torch.no_grad():
            scale = OUTSIDE + 1
        return x + force * scale


def distilled(output, target):
    with torch.no_grad():
        wanted = target * OUTSIDE
    return mse(output, wanted)


def stepped(modules, loss, handler, autodiff):
    pipeline, params = interop.from_modules(modules, loss=loss)
    plan = pipeline.plan(Placement.loop(len(modules)), 2)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handler, autodiff=autodiff)
    return step(params, torch.ones(8, 4), torch.zeros(8, 4))


@each_way
@pytest.mark.parametrize("kind", ["module", "loss"])
def test_a_parameter_from_outside_is_refused(kind, handler, autodiff):
    torch.manual_seed(0)
    first = Unregistered() if kind == "module" else nn.Linear(4, 4)
    with pytest.raises(StageError, match=r"reads a float32\[4\] that requires a gradient.*Pass it in params"):
        stepped([first, nn.Linear(4, 4)], Weighing() if kind == "loss" else mse, handler, autodiff)


def test_a_tensor_that_a_function_closes_over_is_refused():
    scale = torch.ones(4, requires_grad=True)
    pipeline = Pipeline([lambda p, x: x * p * scale], loss=mse)
    step = fpipe.value_and_grad(
        pipeline, schedules.gpipe, pipeline.plan(Placement.loop(1), 1), handler=handlers.Local(), autodiff="graph"
    )
    with pytest.raises(StageError, match=r"stage 0, microbatch 0: .*reads a float32\[4\] that requires a gradient"):
        step({0: torch.ones(4)}, torch.ones(8, 4), torch.zeros(8, 4))


def test_split_refuses_a_parameter_from_outside():
    module = nn.Sequential(nn.Linear(4, 4), Unregistered(), nn.Linear(4, 4))
    with pytest.raises(StageError, match=r"reads a float32.* that no module registers"):
        interop.split(module, at=["2"], example=torch.ones(2, 4))


@each_way
def test_leaves_of_its_own_and_reading_without_gradients_are_right(handler, autodiff):
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(4, 4), Turning()), nn.Linear(4, 4)]
    loss, grads = stepped(modules, distilled, handler, autodiff)
    expected = distilled(nn.Sequential(*modules)(torch.ones(8, 4)), torch.zeros(8, 4))
    torch.testing.assert_close(loss, expected.detach())
    (gradient,) = torch.autograd.grad(expected, [modules[0][1].energy.weight])
    assert gradient.any()
    torch.testing.assert_close(grads[0]["1.energy.weight"], gradient)


@each_way
def test_a_loss_that_depends_on_no_parameter_is_refused(handler, autodiff):
    with pytest.raises(StageError, match=r"requires no gradient for any microbatch: .*evaluate\(loss=True\)"):
        stepped(
            [nn.Linear(4, 4), nn.Linear(4, 4)], lambda output, target: mse(output.detach(), target), handler, autodiff
        )


@each_way
def test_a_loss_may_be_constant_where_nothing_is_trained(handler, autodiff):
    modules = [nn.Linear(4, 4).requires_grad_(False) for _ in range(2)]
    loss, grads = stepped(modules, mse, handler, autodiff)
    torch.testing.assert_close(loss, mse(nn.Sequential(*modules)(torch.ones(8, 4)), torch.zeros(8, 4)))
    assert grads == {stage: {"weight": None, "bias": None} for stage in range(2)}


@each_way
def test_a_microbatch_may_have_a_constant_loss(handler, autodiff):
    def loss(output, target):
        return mse(output, target[0]) if target[1].any() else torch.zeros(())

    pipeline, params = interop.from_modules([nn.Linear(4, 4), nn.Linear(4, 4)], loss=loss)
    plan = pipeline.plan(Placement.loop(2), 2)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handler, autodiff="eager")
    target = torch.zeros(8, 4), torch.arange(8) // 4
    assert step(params, torch.ones(8, 4), target)[1][0]["weight"].any()
    with pytest.raises(StageError, match="requires no gradient for any microbatch"):
        step(params, torch.ones(8, 4), (target[0], torch.zeros(8)))


@pytest.mark.parametrize("kind", ["copies", "replicas"])
def test_the_losses_of_a_copy_or_a_replica_may_all_be_constant(kind):
    def loss(output, target):
        return mse(output, target[0]) if target[1].any() else torch.zeros(())

    pipeline, params = interop.from_modules([nn.Linear(4, 4), nn.Linear(4, 4)], loss=loss)
    if kind == "copies":
        schedule, plan = schedules.dualpipe, pipeline.plan(Placement.both_ways(2), 4)
    else:
        schedule, plan = schedules.gpipe, pipeline.plan(Placement.loop(2), 2, replicas=2)
    target = torch.zeros(8, 4), torch.arange(8) // 4
    found, expected = (
        fpipe.value_and_grad(pipeline, schedule, plan, handler=handler, autodiff="eager")(
            params, torch.ones(8, 4), target
        )
        for handler in (handlers.Local(), handlers.Reference())
    )
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[1][s][name], expected[1][s][name]) for s in range(2) for name in params[s])
