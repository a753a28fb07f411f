"""A gradient that no entry of the result could hold is refused, and so is a loss without gradients."""

from contextlib import suppress

import pytest
import torch
from torch import nn

import fpipe
from fpipe import Pipeline, Placement, StageError, handlers, interop, schedules
from tests.support import jobs, replica_jobs
from tests.support.cases import mse
from tests.support.combinations import one_in

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


@each_way
@pytest.mark.parametrize("place", ["stage", "loss", "params"])
def test_a_tensor_that_a_function_closes_over_is_refused(place, handler, autodiff):
    scale = torch.ones(4, requires_grad=True)
    loss = mse if place != "loss" else lambda output, target: mse(output * scale, target)
    pipeline = Pipeline([lambda p, x: x * p * scale if place != "loss" else x * p], loss=loss)
    plan = pipeline.plan(Placement.loop(1), 1)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handler, autodiff=autodiff)
    params = {0: scale if place == "params" else torch.ones(4)}
    with pytest.raises(StageError, match=r"reads a float32\[4\] that requires a gradient"):
        step(params, torch.ones(8, 4), torch.zeros(8, 4))


@each_way
def test_a_tensor_that_a_stage_reads_in_later_steps_alone_is_refused(handler, autodiff):
    scale, reads = torch.ones(4, requires_grad=True), []
    pipeline = Pipeline([lambda p, x: x * p * scale if reads else x * p * x.detach().requires_grad_()], loss=mse)
    plan = pipeline.plan(Placement.loop(1), 1)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handler, autodiff=autodiff)
    step({0: torch.ones(4)}, torch.ones(8, 4), torch.zeros(8, 4))
    reads.append(True)
    arguments = {0: torch.ones(4)}, torch.ones(6, 4), torch.zeros(6, 4)
    with suppress(StageError):  # eager sees it in the second of these steps
        step(*arguments)
    with pytest.raises(StageError, match="requires a gradient"):
        step(*arguments)


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
def test_a_pipeline_without_trained_parameters_is_refused(handler, autodiff):
    """Autograd refuses such a loss too. The batch may still get gradients, and `evaluate` gives the loss alone."""
    modules = [nn.Linear(4, 4).requires_grad_(False) for _ in range(2)]
    with pytest.raises(StageError, match=r"where every parameter is frozen, pipeline\.unfreeze trains some"):
        stepped(modules, mse, handler, autodiff)
    pipeline, params = interop.from_modules(modules, loss=mse)
    plan, batch, target = pipeline.plan(Placement.loop(2), 2), torch.ones(8, 4), torch.zeros(8, 4)
    options = {"handler": handler, "argnums": "batch", "autodiff": autodiff}
    loss, gradient = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, **options)(params, batch, target)
    x = batch.clone().requires_grad_()
    expected = mse(nn.Sequential(*modules)(x), target)
    torch.testing.assert_close((loss, gradient), (expected.detach(), *torch.autograd.grad(expected, [x])))
    assert fpipe.evaluate(pipeline, plan, handler=handler, loss=True)(params, batch, target) == loss


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


def masked(output, target):
    return mse(output, target[0]) if target[1].any() else torch.zeros(())


def partly_constant(handler, kind, *masks):
    """The results of the last of equal steps in which the microbatches of some ranks have constant losses."""
    torch.manual_seed(0)
    pipeline, params = interop.from_modules([nn.Linear(4, 4), nn.Linear(4, 4)], loss=masked)
    schedule, plan = schedules.gpipe, pipeline.plan(Placement.loop(1, 2), 2, replicas=2)
    rows = slice(None)
    if kind == "copies":
        schedule, plan = schedules.dualpipe, pipeline.plan(Placement.both_ways(2), 4)
    elif isinstance(handler, handlers.Distributed):
        rows = slice(4 * handler.grid.replica, 4 * handler.grid.replica + 4)
    step = fpipe.value_and_grad(pipeline, schedule, plan, handler=handler, autodiff="eager")
    batch, target = torch.ones(8, 4)[rows], torch.zeros(8, 4)[rows]
    return [step(params, batch, (target, mask[rows])) for mask in masks][-1]


SOME, NONE = torch.arange(8) // 4, torch.zeros(8)


def partly_constant_over_gloo(rank, kind):
    """(where a step differs from the reference, the errors of a first and a later one whose losses are constant)."""

    def made():
        grid = replica_jobs.Grid("dp2 pp1")
        replicated = {"group": grid.mesh["pp"], "replicas": grid.over} if kind == "replicas" else {}
        return handlers.Distributed(**replicated, timeout=30)

    wrong = jobs.differences(partly_constant(made(), kind, SOME), partly_constant(handlers.Reference(), kind, SOME))
    texts = []
    for masks in ([NONE], [SOME, NONE]):
        with pytest.raises((StageError, fpipe.TransportError)) as caught:
            partly_constant(made(), kind, *masks)
        texts.append(str(caught.value))
    return wrong, texts


@one_in(2)
@pytest.mark.parametrize("kind", ["copies", "replicas"])
def test_the_losses_of_a_copy_or_a_replica_may_be_constant_but_not_all(kind, pools):
    expected = partly_constant(handlers.Reference(), kind, SOME)
    assert jobs.differences(partly_constant(handlers.Local(), kind, SOME), expected) == []
    for handler in (handlers.Local(), handlers.Reference()):
        with pytest.raises(StageError, match="requires no gradient for any microbatch"):
            partly_constant(handler, kind, NONE)
    for wrong, texts in pools(2).run(partly_constant_over_gloo, kind):
        assert wrong == []
        assert ["requires no gradient for any microbatch" in text for text in texts] == [True, True]
