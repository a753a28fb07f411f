"""Gradients of each sample: their rows, norms and aux, other transforms, and what is refused."""

import optree
import pytest
import torch
from torch.func import grad, vmap

import fpipe
from fpipe import Microbatches, Pipeline, Placement, Stage, StageError, handlers, interop, schedules, transforms
from tests.support import cases
from tests.support import transforms as support
from tests.support.combinations import thorough

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def layer(p, x):
    return torch.tanh(x @ p["w"] + p["b"])


def made(stages=3, rows=7, loss=cases.mse, **options):
    torch.manual_seed(0)
    params = {s: {"w": torch.randn(4, 4), "b": torch.randn(4)} for s in range(stages)}
    return Pipeline([layer] * stages, loss, **options), params, torch.randn(rows, 4), torch.randn(rows, 4)


def expected(pipeline, params, x, y):
    return vmap(grad(pipeline), (None, 0, 0))(params, x[:, None], y[:, None])


def run(pipeline, params, *data, microbatches=3, schedule=schedules.zb_h1, **options):
    plan = pipeline.plan(Placement.loop(len(pipeline.stages)), microbatches)
    options = {"has_aux": True, "reduction": "sum", "handler": handlers.Local(), "autodiff": "graph", **options}
    return fpipe.value_and_grad(pipeline, schedule, plan, **options)(params, *data)


def test_microbatches_of_any_sizes_give_rows_in_their_order():
    pipeline, params, x, y = made()
    sizes = (1, 4, 2)
    (loss, losses), grads = run(
        transforms.per_sample(pipeline), params, Microbatches(x.split(sizes)), Microbatches(y.split(sizes))
    )
    torch.testing.assert_close(grads, expected(pipeline, params, x, y), **TOLERANCE)
    each = vmap(pipeline, (None, 0, 0))(params, x[:, None], y[:, None])
    torch.testing.assert_close(torch.cat(losses.trees), each)
    torch.testing.assert_close(loss, each.sum())


def test_samples_along_another_axis_and_leaves_without_samples():
    pipeline, params, _, y = made(loss=lambda y, target: ((y - target["y"]) * target["scale"]).square().mean())

    def first(p, batch):
        return layer(p, batch["x"].movedim(1, 0).mean(1) + batch["bias"])

    pipeline = Pipeline([first, layer, layer], pipeline.loss)
    batch, target = {"x": torch.randn(5, 7, 4), "bias": torch.randn(4)}, {"y": y, "scale": torch.tensor(2.0)}
    axes = {"x": 1, "bias": None}, {"y": 0, "scale": None}
    _, grads = run(transforms.per_sample(pipeline, axes), params, batch, target, in_axes=axes)

    def alone(params, x, y):
        return pipeline(params, {**batch, "x": x[:, None]}, {**target, "y": y[None]})

    torch.testing.assert_close(grads, vmap(grad(alone), (None, 1, 0))(params, batch["x"], y), **TOLERANCE)


def test_norms_and_clipping_of_each_sample():
    """As differentially private SGD clips: the norm of a sample is that over all params."""
    pipeline, params, x, y = made()
    _, grads = run(transforms.per_sample(pipeline), params, x, y)
    plan = pipeline.plan(Placement.loop(3), 3)
    norms = fpipe.global_norm(grads, plan, handler=handlers.Local(), by_row=True)
    each = optree.tree_leaves(expected(pipeline, params, x, y))
    wanted = torch.stack([torch.stack([leaf[i].norm() for leaf in each]).norm() for i in range(7)])
    torch.testing.assert_close(norms.float(), wanted)
    scale = (norms.median() / norms).clamp(max=1).float()
    clipped = optree.tree_map(lambda g: torch.einsum("r,r...->r...", scale, g), grads)
    assert torch.all(fpipe.global_norm(clipped, plan, handler=handlers.Local(), by_row=True) <= norms.median() * 1.0001)


def norms_on_this_rank(rank):
    from tests.support.jobs import handler

    pipeline, params, x, y = made(stages=2)
    pipeline = transforms.per_sample(pipeline)
    plan = pipeline.plan(Placement.loop(2), 3)
    options = {"has_aux": True, "reduction": "sum"}
    step = fpipe.value_and_grad(pipeline, "1f1b", plan, handler=handler(), **options)
    _, grads = step(pipeline.params_on(params, plan, rank), x if rank == 0 else None, y if rank == 1 else None)
    _, whole = fpipe.value_and_grad(pipeline, "1f1b", plan, handler=handlers.Local(), **options)(params, x, y)
    norms = fpipe.global_norm(grads, plan, handler=handler(), by_row=True)
    return torch.equal(norms, fpipe.global_norm(whole, plan, handler=handlers.Local(), by_row=True))


def test_norms_of_samples_are_those_of_all_ranks(pools):
    assert pools(2).run(norms_on_this_rank) == [True, True]


def test_rows_that_do_not_agree_have_no_norms():
    grads = {0: torch.ones(3, 2), 1: torch.ones(4)}
    with pytest.raises(ValueError, match=r"the same rows along axis 0, not \[\[3\], \[4\]\]"):
        fpipe.global_norm(grads, fpipe.Plan(Placement.loop(2), 1), handler=handlers.Local(), by_row=True)


def test_a_param_that_nothing_uses_has_rows_of_zeros():
    pipeline, params, x, y = made(stages=2)
    params[1]["idle"] = torch.ones(2)
    for handler in (handlers.Local(), handlers.Reference()):
        _, grads = run(transforms.per_sample(pipeline), params, x, y, handler=handler)
        assert torch.equal(grads[1]["idle"], torch.zeros(7, 2))


def test_frozen_params_have_no_rows():
    pipeline, params, x, y = made(stages=1)
    frozen = Pipeline([Stage(layer, frozen=["b"])], pipeline.loss)
    _, grads = run(transforms.per_sample(frozen), params, x, y)
    assert grads[0]["b"] is None
    torch.testing.assert_close(grads[0]["w"], expected(pipeline, params, x, y)[0]["w"], **TOLERANCE)


@thorough
def test_samples_of_a_forward_mode_loss_and_of_members():
    torch.manual_seed(0)
    flow = support.mean_flow(2).case
    options = {"microbatches": 2, "has_aux": True}
    (_, losses), rows = run(transforms.per_sample(flow.pipeline), flow.params, flow.batch, flow.target, **options)
    plan = flow.pipeline.plan(Placement.loop(2), 2)
    total, whole = fpipe.value_and_grad(flow.pipeline, "1f1b", plan, handler=handlers.Local())(
        flow.params, flow.batch, flow.target
    )
    torch.testing.assert_close(optree.tree_map(lambda g: g.mean(0), rows), whole, **TOLERANCE)
    torch.testing.assert_close(losses.mean(), total)

    pipeline, params, x, y = made(stages=2)
    members = support.stacked(params)
    of_members = transforms.per_sample(transforms.vmap(pipeline), has_aux=True)
    (_, (_, losses)), rows = run(of_members, members, x, y, **options)
    each = vmap(lambda p: expected(pipeline, p, x, y), out_dims=1)(members)
    torch.testing.assert_close(rows, each, **TOLERANCE)
    assert losses.shape == (7, 1, support.MEMBERS)


def test_evaluate_has_the_output_of_each_sample():
    pipeline, params, x, y = made()
    plan, mapped = pipeline.plan(Placement.loop(3), 3), transforms.per_sample(pipeline)
    outputs = fpipe.evaluate(mapped, plan, handler=handlers.Local())(params, x)
    torch.testing.assert_close(outputs[:, 0], pipeline(params, x))
    options = {"loss": True, "has_aux": True, "reduction": "sum"}
    loss, losses = fpipe.evaluate(mapped, plan, handler=handlers.Local(), **options)(params, x, y)
    torch.testing.assert_close(loss, losses.sum())
    assert mapped(params, x, y)[0] == pytest.approx(loss.item())


REFUSED = {
    "mean": ({"reduction": "mean"}, "neither averaged nor weighted: pass reduction='sum'"),
    "weight": ({"reduction": "mean", "weight": len}, "neither averaged nor weighted: pass reduction='sum'"),
    "replicas": ({"replicas": 2}, "replicas can't add, and the plan has 2"),
    "pieces": ({"capture": "pieces"}, "capture='pieces' adds gradients"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_add_gradients_are_refused(name):
    options, message = REFUSED[name]
    pipeline = transforms.per_sample(made()[0])
    plan = pipeline.plan(Placement.loop(3), 3, options.get("replicas", 1))
    options = {"reduction": "sum", "has_aux": True, **{k: v for k, v in options.items() if k != "replicas"}}
    with pytest.raises(ValueError, match=message):
        fpipe.value_and_grad(pipeline, "1f1b", plan, handler=handlers.Local(), **options)


def test_pipelines_and_optimizers_that_are_refused():
    pipeline = transforms.per_sample(made()[0])
    for transform in (transforms.jvp, transforms.hvp, transforms.vmap, transforms.per_sample):
        with pytest.raises(ValueError, match="per_sample is the last transform"):
            transform(pipeline)
    with pytest.raises(ValueError, match="stage 1 is stateful, and a state, as of batch norm, is of all samples"):
        transforms.per_sample(Pipeline([layer, Stage(lambda p, s, x: (x, s), stateful=True)]))
    sgd = interop.optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="no optimizer takes this pipeline's gradients: they are the rows of samples"):
        fpipe.train_step(pipeline, "1f1b", pipeline.plan(Placement.loop(3), 3), sgd, handler=handlers.Local())


def test_a_stage_that_reads_no_samples_is_refused():
    _, params, x, y = made(stages=2)
    pipeline = Pipeline([Stage(lambda p: p["b"], reads=()), Stage(layer, reads=(0,))], cases.mse)
    with pytest.raises(StageError, match="stage 0 reads nothing that has samples"):
        run(transforms.per_sample(pipeline), params, x, y)
