"""Ensembles: axes of params, batch and target, state, random numbers and outputs."""

import optree
import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

import fpipe
from fpipe import Pipeline, Placement, Stage, StageError, handlers, schedules, transforms
from tests.support import cases

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def layer(p, x):
    return torch.tanh(x @ p["w"] + p["b"])


def params_of(*shape, stages=3):
    generator = torch.Generator().manual_seed(0)

    def randn(*size):
        return torch.randn(*size, generator=generator)

    return {s: {"w": randn(*shape, 4, 4), "b": randn(*shape, 4)} for s in range(stages)}


def run(pipeline, params, *data, microbatches=2, handler=None, **options):
    plan = pipeline.plan(Placement.loop(len(pipeline.stages)), microbatches)
    step = fpipe.value_and_grad(
        pipeline, schedules.zb_h1, plan, handler=handler or handlers.Local(), has_aux=True, autodiff="graph", **options
    )
    return step(params, *data)


@pytest.mark.parametrize("data", ["shared", "behind", "before"])
def test_each_member_may_have_its_own_data(data):
    torch.manual_seed(0)
    pipeline, params = Pipeline([layer] * 3, cases.mse), params_of(3)
    axes, in_axes = {"shared": (None, 0), "behind": (1, 0), "before": (0, 1)}[data]
    shape = {"shared": (6, 4), "behind": (6, 3, 4), "before": (3, 6, 4)}[data]
    x, y = torch.randn(shape), torch.randn(shape)
    mapped = transforms.vmap(pipeline, in_dims=(0, axes, axes))
    (loss, losses), grads = run(mapped, params, x, y, in_axes=in_axes)
    in_dims = (0, axes, axes)
    torch.testing.assert_close(grads, vmap(grad(pipeline), in_dims)(params, x, y), **TOLERANCE)
    torch.testing.assert_close(losses.mean(0), vmap(pipeline, in_dims)(params, x, y), **TOLERANCE)
    torch.testing.assert_close(loss, losses.mean(0).sum())


def test_a_trunk_that_the_members_share_runs_once():
    torch.manual_seed(0)
    rows = []

    def trunk(p, x):
        rows.append(x.shape)
        return layer(p, x)

    pipeline = Pipeline([trunk, layer, layer], cases.mse)
    params = {0: params_of()[0], 1: params_of(3)[1], 2: {"w": params_of(3)[2]["w"], "b": torch.ones(4)}}
    dims = {0: None, 1: 0, 2: {"w": 0, "b": None}}
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    (_, losses), grads = run(transforms.vmap(pipeline, (dims, None, None)), params, x, y)
    assert losses.shape == (2, 3)
    assert rows == [(3, 4)]  # traced once, without members
    expected = grad(lambda p: vmap(pipeline, (dims, None, None))(p, x, y).sum())(params)
    torch.testing.assert_close(grads, expected, **TOLERANCE)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tree", [False, True])
def test_a_tied_entry_has_the_axis_of_its_owner(shared, tree):
    torch.manual_seed(0)
    pipeline = Pipeline([layer, lambda p, x: layer(p, x) @ p["w"].T], cases.mse, ties={(1, "w"): (0, "w")})
    entry = params_of()[0]["w"] if shared else params_of(3)[0]["w"]
    params = {0: {"w": entry, "b": params_of(3)[0]["b"]}, 1: {"b": params_of(3)[1]["b"]}}
    dims = {0: {"w": None if shared else 0, "b": 0}, 1: {"b": 0} if tree else 0}
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    _, grads = run(transforms.vmap(pipeline, (dims, None, None)), params, x, y)
    plain = Pipeline([lambda p, x: pipeline({0: p[0], 1: p[1]}, x)], cases.mse)
    expected = grad(lambda p: vmap(lambda p: plain({0: p}, x, y), (dims,))(p).sum())(params)
    torch.testing.assert_close(grads, expected, **TOLERANCE)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_random_numbers_are_those_of_vmap(randomness):
    """The step seeds each piece from (seed, step, stage, microbatch); torch's vmap draws alike from that seed."""
    from fpipe.stages.rng import seeded

    def noisy(p, x):
        return F.dropout(x * p, 0.5)

    pipeline, params, x = Pipeline([noisy], cases.mse), {0: torch.ones(3, 4)}, torch.ones(6, 4)
    mapped = transforms.vmap(pipeline, randomness=randomness)
    outputs = fpipe.evaluate(mapped, pipeline.plan(Placement.loop(1), 1), handler=handlers.Local())(
        params, x, rng=(1, 2)
    )
    with seeded((1, 2), 0, 0):
        expected = vmap(noisy, (0, None), out_dims=1, randomness=randomness)(params[0], x)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=0)
    assert torch.equal(outputs[:, 0], outputs[:, 1]) is (randomness == "same")


def test_a_draw_is_an_error_by_default():
    pipeline = transforms.vmap(Pipeline([lambda p, x: F.dropout(x * p, 0.5)], cases.mse))
    plan = pipeline.plan(Placement.loop(1), 1)
    step = fpipe.value_and_grad(pipeline, "1f1b", plan, handler=handlers.Local(), has_aux=True, autodiff="eager")
    with pytest.raises(StageError, match="randomness"):
        step({0: torch.ones(3, 4)}, torch.ones(6, 4), torch.ones(6, 4), rng=(0, 0))


def test_outputs_and_aux_have_the_members_behind_the_samples():
    torch.manual_seed(0)

    def loss(y, target):
        error = (y - target).square().mean(1)
        return error.mean(), {"rows": error.detach(), "worst": error.max().detach(), "unit": "m"}

    pipeline, params = Pipeline([layer] * 2, loss), params_of(3, stages=2)
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    mapped = transforms.vmap(pipeline, has_aux=True)
    (_, (losses, aux)), _ = run(mapped, params, x, y)
    plan = pipeline.plan(Placement.loop(2), 2)
    outputs = fpipe.evaluate(mapped, plan, handler=handlers.Local())(params, x)
    expected = vmap(pipeline, (0, None))(params, x)
    torch.testing.assert_close(outputs, expected.movedim(0, 1), **TOLERANCE)
    assert (losses.shape, aux["rows"].shape, aux["worst"].shape, aux["unit"]) == ((2, 3), (5, 3), (2, 3), "m")
    torch.testing.assert_close(aux["rows"], (outputs - y[:, None]).square().mean(2))


def test_a_pipeline_whose_last_output_is_the_loss():
    pipeline = transforms.vmap(Pipeline([Stage(layer), lambda p, x: (x * p["b"]).mean()]))
    params, x = params_of(3, stages=2), torch.ones(4, 4)
    (loss, losses), _ = run(pipeline, params, x)
    assert losses.shape == (2, 3)
    torch.testing.assert_close(loss, losses.mean(0).sum())


@pytest.mark.parametrize(
    ("dims", "error", "message"),
    [
        ((0, 0), ValueError, "three for params, batch and target"),
        (({0: 0}, None, None), ValueError, "in_dims of the params has no entry for stage 1"),
        ((3, None, None), ValueError, r"a tensor of shape \[3, 4\] in the params has no axis 3"),
        (({0: {"v": 0}, 1: 0}, None, None), ValueError, "in_dims of the params .* is no prefix of the tree"),
        ((None, None, None), TypeError, "nothing that reaches the last stage has an axis to map over"),
    ],
)
def test_axes_that_do_not_fit(dims, error, message):
    pipeline = Pipeline([layer] * 2, cases.mse)
    params = params_of(stages=2) if dims[0] is None else params_of(3, stages=2)
    with pytest.raises(error, match=message):
        transforms.vmap(pipeline, dims)(params, torch.ones(2, 4), torch.ones(2, 4))


def test_the_losses_need_has_aux():
    pipeline = transforms.vmap(Pipeline([layer] * 2, cases.mse))
    plan = pipeline.plan(Placement.loop(2), 1)
    step = fpipe.value_and_grad(pipeline, "1f1b", plan, handler=handlers.Local())
    with pytest.raises(StageError, match=r"not tuple; has_aux=True takes \(loss, aux\)"):
        step(params_of(3, stages=2), torch.ones(2, 4), torch.ones(2, 4))


def test_an_optimizer_updates_every_member():
    torch.manual_seed(0)
    pipeline, params = Pipeline([layer] * 2, cases.mse), params_of(3, stages=2)
    adam = fpipe.interop.optimizer(torch.optim.Adam, lr=0.1)
    x, y = torch.randn(6, 4), torch.randn(6, 4)

    def step_of(pipeline, **options):
        plan = pipeline.plan(Placement.loop(2), 2)
        return fpipe.train_step(pipeline, "1f1b", plan, adam, handler=handlers.Local(), **options)

    new, *_ = step_of(transforms.vmap(pipeline), has_aux=True)(params, adam.init(params), x, y)
    second = optree.tree_map(lambda x: x[1], params)
    alone, *_ = step_of(pipeline)(second, adam.init(second), x, y)
    torch.testing.assert_close(optree.tree_map(lambda x: x[1], new), alone, **TOLERANCE)


def test_a_state_without_the_members_is_refused():
    pipeline = transforms.vmap(Pipeline([Stage(lambda p, s, x: (x * p, s + 1), stateful=True)], lambda y, t: y.sum()))
    step = fpipe.value_and_grad(
        pipeline, "gpipe", pipeline.plan(Placement.loop(1), 1), handler=handlers.Local(), has_aux=True
    )
    with pytest.raises(StageError, match=r"shape \[\] in the state has no axis 0: stack the members' states"):
        step({0: torch.ones(3)}, torch.ones(4), state={0: torch.tensor(0)})
