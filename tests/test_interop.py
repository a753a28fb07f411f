"""Modules and optimizers of torch as pure functions, against torch itself."""

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


OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.5}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.Adadelta, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adafactor, {"lr": 0.1}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_an_optimizer_gives_torchs_bits_and_changes_nothing(kind, options):
    torch.manual_seed(0)
    params = {0: {"w": torch.randn(3, 3), "b": torch.randn(3)}, 2: {"w": torch.randn(3), "n": torch.arange(3)}}
    own = [params[0]["b"].clone(), params[0]["w"].clone(), params[2]["w"].clone()]
    theirs = kind([p.requires_grad_() for p in own], **options)
    init, update = interop.optimizer(kind, **options)
    state = init(params)
    for i in range(4):
        grads = [torch.randn_like(p) for p in own]
        for p, g in zip(own, grads, strict=True):
            p.grad = g
        theirs.step()
        given = {0: {"w": grads[1], "b": grads[0]}, 2: {"w": grads[2], "n": None}}
        before = copy.deepcopy((given, state, params))
        new_params, new_state = update(given, state, params)
        assert differences((given, state, params), before) == []
        params, state = new_params, new_state
        found = [params[0]["b"], params[0]["w"], params[2]["w"]]
        assert all(torch.equal(a, b) for a, b in zip(found, own, strict=True)), i
    assert state[2]["n"] == {}
    assert not params[0]["w"].requires_grad


def test_options_hold_for_one_update():
    init, update = interop.optimizer(torch.optim.SGD, lr=1.0)
    params, grads = {0: torch.zeros(1)}, {0: torch.ones(1)}
    state = init(params)
    assert update(grads, state, params, lr=0.25)[0][0] == -0.25
    assert update(grads, state, params)[0][0] == -1


def test_an_optimizer_with_a_closure_is_refused():
    with pytest.raises(TypeError, match="LBFGS"):
        interop.optimizer(torch.optim.LBFGS)


def test_gradients_of_another_structure():
    init, update = interop.optimizer(torch.optim.SGD, lr=1.0)
    params = {0: {"w": torch.zeros(1)}}
    with pytest.raises(ValueError, match="grads has another structure than params"):
        update({0: {"v": torch.zeros(1)}}, init(params), params)
