"""Modules of torch as pure functions, against torch itself."""

import copy

import pytest
import torch
from torch import nn

import fpipe
from fpipe import Placement, handlers, interop, schedules
from tests.cases import mse
from tests.jobs import differences


def chain():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 4))]


class Tied(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.inner = nn.Module()
        self.inner.weight = weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x @ self.inner.weight * self.scale


def test_names_are_the_state_dicts():
    modules = chain()
    _, params = interop.from_modules(modules)
    state = interop.buffers(modules)
    for s, module in enumerate(modules):
        assert {**params[s], **state.get(s, {})}.keys() == module.state_dict().keys()
    assert params[0]["0.weight"].data_ptr() == modules[0][0].weight.data_ptr()
    assert 1 not in state


def test_back_into_modules():
    modules = chain()
    _, params = interop.from_modules(modules)
    changed = {s: {k: v + 1 for k, v in tree.items()} for s, tree in params.items()}
    state = {s: {k: v + 2 for k, v in tree.items()} for s, tree in interop.buffers(modules).items()}
    interop.into_modules(modules, changed, state)
    assert differences({n: p.detach() for n, p in modules[1].named_parameters()}, changed[1]) == []
    assert differences(dict(modules[0].named_buffers()), state[0]) == []


def test_the_module_is_never_touched_and_its_memory_not_kept():
    modules = chain()
    before = copy.deepcopy([m.state_dict() for m in modules])
    pipeline, params = interop.from_modules(modules, loss=mse)
    plan = pipeline.plan(Placement.loop(2), 2)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local())
    step(params, torch.randn(8, 4), torch.randn(8, 4), state=interop.buffers(modules), rng=(0, 0))
    assert differences([m.state_dict() for m in modules], before) == []
    assert {p.device.type for s in pipeline.stages for p in s.fn.skeleton.parameters()} == {"meta"}


def test_shared_parameters_are_tied():
    weight = nn.Parameter(torch.randn(4, 4))
    modules = [Tied(weight), nn.Linear(4, 4), Tied(weight)]
    pipeline, params = interop.from_modules(modules, loss=mse)
    assert pipeline.entries == {(0, ("inner.weight",)): ((0, ("inner.weight",)), (2, ("inner.weight",)))}
    assert list(params[2]) == ["scale"]
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    plan = pipeline.plan(Placement.loop(3), 1)
    _, grads = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local())(params, x, y)
    mse(nn.Sequential(*modules)(x), y).backward()
    torch.testing.assert_close(grads[0]["inner.weight"], weight.grad)


def test_frozen_parameters_get_none():
    modules = chain()
    modules[0][0].weight.requires_grad_(False)
    pipeline, params = interop.from_modules(modules, loss=mse)
    plan = pipeline.plan(Placement.loop(2), 2)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local())
    _, grads, _ = step(params, torch.randn(8, 4), torch.randn(8, 4), state=interop.buffers(modules), rng=(0, 0))
    assert grads[0]["0.weight"] is None
    assert grads[0]["0.bias"].shape == (6,)


def test_eval_mode_is_the_module_in_eval():
    modules = chain()
    pipeline, params = interop.from_modules(modules)
    x = torch.randn(8, 4)
    run = fpipe.evaluate(interop.eval_mode(pipeline), pipeline.plan(Placement.loop(2), 1), handler=handlers.Local())
    found = run(params, x, state=interop.buffers(modules))
    assert torch.equal(found, nn.Sequential(*modules).eval()(x))
    assert all(m.training for s in pipeline.stages for m in s.fn.skeleton.modules())


def test_a_wrong_tree_names_the_missing_key():
    pipeline, params = interop.from_modules([nn.Linear(2, 2)])
    with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
        pipeline({0: {"weight": params[0]["weight"]}}, torch.ones(2))
