"""What torch.distributed.pipelining has cut, as a pipeline."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipe_split, pipeline

import fpipe
from fpipe import Placement, StageError, handlers, interop, schedules
from tests.support.cases import mse
from tests.support.combinations import one_in
from tests.support.jobs import differences

SPLIT = {"b": SplitPoint.BEGINNING, "c": SplitPoint.BEGINNING}


class Skips(nn.Module):
    """Two values skip stage 1; stage 2 reads a second input; one stage has buffers."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x, mask):
        h = F.relu(self.a(x))
        g = self.b(h * 2)
        return self.norm(self.c(g + h)) * mask * h.sin()


class Marked(nn.Module):
    """Cut by a mark in its forward; both parts use one parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 1.5))
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.a(x) * self.scale
        pipe_split()
        return self.b(h) * self.scale


def made(kind):
    torch.manual_seed(0)
    module = kind().double()
    inputs = (torch.randn(8, 4, dtype=torch.float64),) + (
        (torch.rand(8, 4, dtype=torch.float64),) if kind is Skips else ()
    )
    pipe = pipeline(module, mb_args=inputs, split_spec=SPLIT if kind is Skips else None)
    return module, pipe, inputs


@one_in(4)
@pytest.mark.parametrize("schedule", [schedules.gpipe, schedules.one_f_one_b, schedules.zb_h1])
@pytest.mark.parametrize("kind", [Skips, Marked])
def test_its_gradients_are_the_modules(kind, schedule):
    module, pipe, inputs = made(kind)
    stages, params = interop.from_pipe(pipe, loss=mse)
    plan = stages.plan(Placement.loop(pipe.num_stages), 1)
    step = fpipe.value_and_grad(stages, schedule, plan, handler=handlers.Local())
    state = interop.buffers([pipe.get_stage_module(i) for i in range(pipe.num_stages)]) or None
    target = torch.randn(8, 4, dtype=torch.float64)
    loss, grads, *_ = step(params, inputs if kind is Skips else inputs[0], target, state=state)
    expected = mse(module(*inputs), target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    found = {name: gradient for tree in grads.values() for name, gradient in tree.items()}
    assert found.keys() == dict(module.named_parameters()).keys()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-13)


def test_a_value_that_skips_stages_goes_straight_to_its_reader():
    _, pipe, _ = made(Skips)
    stages, _ = interop.from_pipe(pipe)
    assert stages.stages[1].sources == (0,)
    assert stages.stages[2].sources == (0, 1)
    assert (0, 2) in {(a, b) for b, stage in enumerate(stages.stages) for a in stage.sources}


def test_a_parameter_of_two_stages_is_one():
    _, pipe, _ = made(Marked)
    stages, params = interop.from_pipe(pipe)
    assert stages.entries == {(0, ("scale",)): ((0, ("scale",)), (1, ("scale",)))}
    assert set(params[1]) == {"b.weight", "b.bias"}


def test_the_pipe_is_left_as_it_is():
    _, pipe, inputs = made(Marked)
    before = {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}
    stages, params = interop.from_pipe(pipe)
    run = fpipe.evaluate(stages, stages.plan(Placement.loop(2), 1), handler=handlers.Local())
    assert differences(run(params, inputs[0]), pipe(*inputs)[0].detach()) == []
    assert differences(before, {name: parameter.detach() for name, parameter in pipe.named_parameters()}) == []


def test_the_mode_that_was_traced_stays():
    _, pipe, _ = made(Marked)
    stages, _ = interop.from_pipe(pipe)
    with pytest.raises(ValueError, match="stage 0 is a graph that was traced in one mode for good"):
        interop.eval_mode(stages)


def test_a_hook_of_a_parameter_is_refused():
    _, pipe, _ = made(Skips)
    pipe.get_stage_module(1).b.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(StageError, match=r"^stage 1: b\.weight has a hook on gradients, which a stage would lose"):
        interop.from_pipe(pipe)


class Averaged(nn.Module):
    """Its graph holds the number of rows."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.norm(self.a(x)) / x.shape[0])


@pytest.mark.parametrize("after", ["norm", "b"])
def test_microbatches_of_another_size_than_was_traced_are_refused(after):
    pipe = pipeline(Averaged(), mb_args=(torch.randn(2, 4),), split_spec={after: SplitPoint.BEGINNING})
    stages, params = interop.from_pipe(pipe, loss=mse)
    state = interop.buffers([pipe.get_stage_module(i) for i in range(2)])
    x = torch.randn(8, 4)
    step = fpipe.value_and_grad(stages, schedules.gpipe, stages.plan(Placement.loop(2), 4), handler=handlers.Local())
    assert step(params, x, x, state=state)[0].isfinite()
    for rows, microbatches in ((8, 2), (4, 4), (7, 4)):
        plan = stages.plan(Placement.loop(2), microbatches)
        step = fpipe.value_and_grad(stages, schedules.gpipe, plan, handler=handlers.Local())
        with pytest.raises(
            StageError, match=r"its input 0 is float32\[[14], 4\], and its Pipe was traced for \[2, 4\]"
        ):
            step(params, x[:rows], x[:rows], state=state)


class Returns(nn.Module):
    def __init__(self, returned):
        super().__init__()
        self.a, self.b, self.returned = nn.Linear(4, 4), nn.Linear(4, 4), returned

    def forward(self, x):
        h = self.a(x)
        return self.returned(x, h, self.b(h))


def returning(returned):
    return pipeline(Returns(returned), mb_args=(torch.randn(2, 4),), split_spec={"b": SplitPoint.BEGINNING})


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (lambda x, h, y: (y, h), "from stage 0, stage 1, where"),
        (lambda x, h, y: {"y": y, "x": x}, "from stage 1, the batch, where"),
    ],
    ids=["of a stage", "of the batch"],
)
def test_outputs_of_earlier_stages_are_refused(returned, says):
    with pytest.raises(ValueError, match=rf"forward returns what comes {says} a Pipe's output is the last stage's"):
        interop.from_pipe(returning(returned))


def test_several_outputs_of_the_last_stage_are_its_output():
    pipe = returning(lambda x, h, y: (y.sin(), y))
    stages, params = interop.from_pipe(pipe)
    x = torch.randn(2, 4)
    torch.testing.assert_close(stages(params, x), tuple(pipe(x)))


def test_what_is_no_pipe_is_refused():
    with pytest.raises(TypeError, match=r"not a Marked: a module as it is goes into interop\.split"):
        interop.from_pipe(Marked())
