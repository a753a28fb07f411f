"""Tangents: trees of them, functions that torch's forward mode gets wrong, and errors."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, jvp
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe import Pipeline, Placement, StageError, handlers, interop, schedules, transforms
from fpipe.transforms import Dual
from tests.support import cases
from tests.support.combinations import one_in, thorough
from tests.support.forked import CONTEXT

ATEN = torch.ops.aten


def norms():
    return {
        "layer": lambda p, x: F.layer_norm(x, (4,), p["w"], p["b"]),
        "batch": lambda p, x: F.batch_norm(x, None, None, p["w"], p["b"], training=True),
        "batch, by its operator": lambda p, x: ATEN.batch_norm.default(
            x, p["w"], p["b"], None, None, True, 0.1, 1e-5, False
        ),
        "instance": lambda p, x: F.instance_norm(x[None], weight=p["w"][:3], bias=p["b"][:3])[0],
        "rms": lambda p, x: F.rms_norm(x, (4,), p["w"]) + p["b"],
        "group": lambda p, x: F.group_norm(x, 2, p["w"], p["b"]),
    }


@one_in(4)
@pytest.mark.parametrize("name", norms())
def test_a_gradient_of_a_tangent_through_a_norm_is_right(name):
    """In torch 2.13, grad of jvp of layer_norm, batch_norm and instance_norm is wrong by as much as its size."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    norm = norms()[name]
    pipeline = Pipeline([lambda p, x: norm(p, x * p["w"]), lambda p, x: (x * p["c"]).sin().sum()])
    params = {0: {"w": randn(4), "b": randn(4)}, 1: {"c": randn(4)}}
    x, along = randn(3, 4), {0: {"w": randn(4), "b": None}, 1: None}

    def gradient(w):
        return grad(lambda p: pipeline(p, x))({0: {**params[0], "w": w}, 1: params[1]})

    _, product = jvp(gradient, (params[0]["w"],), (along[0]["w"],))
    plan = pipeline.plan(Placement.loop(2), 1)
    step = fpipe.value_and_grad(transforms.hvp(pipeline), schedules.zb_h1, plan, handler=handlers.Local())
    loss, grads = step(transforms.dual(params, along), x)
    torch.testing.assert_close(loss, pipeline(params, x))
    torch.testing.assert_close(transforms.primals(grads), product, rtol=1e-9, atol=1e-9)


def test_new_state_is_that_of_the_values():
    torch.manual_seed(0)
    modules = [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)]
    pipeline, params = interop.from_modules(modules, loss=lambda y, t: y.square().sum())
    state, x = interop.buffers(modules), torch.randn(3, 4, 5)
    plan = pipeline.plan(Placement.loop(2), 1)
    steps = [
        fpipe.value_and_grad(p, "1f1b", plan, handler=handlers.Local(), has_aux=p is not pipeline)
        for p in (pipeline, transforms.jvp(pipeline))
    ]
    *_, expected = steps[0](params, x, x, state=state)
    (_, tangent), _, new = steps[1](params, Dual(x, x), x, state=state)
    torch.testing.assert_close(new, expected)
    assert tangent.shape == (1,)


def test_a_kernel_whose_tangents_have_no_right_gradient_is_refused():
    pipeline = transforms.jvp(Pipeline([lambda p, x: ATEN.native_layer_norm.default(x * p, [4], None, None, 1e-5)[0]]))
    with pytest.raises(NotImplementedError, match=r"native_layer_norm.*torch\.nn\.functional"):
        pipeline({0: torch.ones(4)}, Dual(torch.randn(2, 4), torch.ones(2, 4)))


@torch.library.custom_op("fpipe_tests::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


cube.register_fake(torch.empty_like)
cube.register_autograd(
    lambda ctx, g: 3 * g * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


def stage_step(fn, transform, params, **options):
    pipeline = transform(Pipeline([fn], loss=lambda y, t: y.square().sum()))
    plan = pipeline.plan(Placement.loop(1), 1)
    step = fpipe.value_and_grad(pipeline, "1f1b", plan, handler=handlers.Local(), autodiff="eager", **options)
    return step({0: params}, torch.ones(2, 4), None)


def test_an_operator_without_forward_mode_is_refused_and_mapped():
    """torch.func.jvp of a custom operator has a tangent of zero, without an error."""
    params = torch.arange(1.0, 5.0)
    with pytest.raises(StageError, match=r"fpipe_tests\.cube\.default has no forward mode, and torch would take"):
        stage_step(lambda p, x: cube(x * p), transforms.hvp, Dual(params, params))
    members = torch.stack([params, -params])
    results = [
        stage_step(lambda p, x, cube=function: cube(x * p), transforms.vmap, members, has_aux=True)[1][0]
        for function in (cube, lambda x: x**3)
    ]
    torch.testing.assert_close(*results)


class OfContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()


class WithoutRules(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        """There is nothing to save."""


@pytest.mark.parametrize(
    ("function", "transform", "way_out"),
    [
        (OfContext, transforms.vmap, "setup_context"),
        (WithoutRules, transforms.vmap, "generate_vmap_rule = True"),
        (WithoutRules, transforms.hvp, "jvp(ctx, *tangents)"),
    ],
)
def test_a_function_without_a_rule_is_named_with_the_way_out(function, transform, way_out):
    params = torch.ones(2, 4)
    text = rf"stage 0, .*the torch.autograd.Function {function.__name__} has no rule for .*{re.escape(way_out)}"
    given = Dual(params[0], params[0]) if transform is transforms.hvp else params
    with pytest.raises(StageError, match=text):
        stage_step(lambda p, x: function.apply(x * p), transform, given)


@pytest.mark.parametrize("transform", [transforms.hvp, transforms.vmap])
def test_checkpoints_are_refused(transform):
    def fn(p, x):
        return checkpoint(torch.mul, x, p, use_reentrant=False)

    params = torch.ones(4)
    params = Dual(params, params) if transform is transforms.hvp else torch.stack([params, params])
    with pytest.raises(StageError, match=r"torch\.utils\.checkpoint, .* policy=fpipe\.policies\.nothing_saveable"):
        stage_step(fn, transform, params)


def test_microbatches_of_other_sizes_have_tangents():
    torch.manual_seed(0)
    pipeline, sizes = Pipeline([lambda p, x: torch.tanh(x @ p)] * 2, cases.mse), (1, 4, 2)
    params, along = ({s: torch.randn(4, 4) for s in range(2)} for _ in range(2))
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    plan = pipeline.plan(Placement.loop(2), 3)
    step = fpipe.value_and_grad(transforms.hvp(pipeline), schedules.zb_h1, plan, handler=handlers.Local())
    data = fpipe.Microbatches(x.split(sizes)), fpipe.Microbatches(y.split(sizes))
    _, grads = step(transforms.dual(params, along), *data)
    gradient, product = jvp(grad(lambda p: pipeline(p, x, y)), (params,), (along,))
    torch.testing.assert_close(transforms.primals(grads), product, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(transforms.tangents(grads), gradient, rtol=1e-5, atol=1e-5)


def test_stages_without_tangents_run_as_they_are():
    seen = []
    pipeline = Pipeline([lambda p, x: (seen.append(type(x)), x * p)[1], lambda p, x: x * p])
    run = fpipe.evaluate(transforms.jvp(pipeline), pipeline.plan(Placement.loop(2), 1), handler=handlers.Reference())
    params = {0: torch.tensor(2.0), 1: Dual(torch.tensor(3.0), torch.tensor(1.0))}
    outputs = run(params, torch.ones(2))
    torch.testing.assert_close(outputs, Dual(torch.full((2,), 6.0), torch.full((2,), 2.0)))
    assert seen == [torch.Tensor]


def test_a_loss_that_no_tangent_leads_to():
    pipeline = transforms.jvp(Pipeline([lambda p, x: x * p], loss=lambda y, t: t.sum()))
    assert pipeline({0: torch.ones(2)}, Dual(torch.ones(2), torch.ones(2)), torch.ones(2)) == (2.0, 0.0)
    product = transforms.hvp(Pipeline([lambda p, x: x * p], loss=cases.mse))
    with pytest.raises(ValueError, match=r"no tangent reaches the loss: pass the params as transforms\.dual"):
        product({0: torch.ones(2)}, torch.ones(2), torch.ones(2))


@pytest.mark.parametrize(
    ("primals", "tangents", "message"),
    [
        ({"w": torch.ones(2)}, {"v": torch.ones(2)}, "are no prefix of the tree"),
        ({"w": torch.ones(2)}, {"w": torch.ones(3)}, r"\['w'\] is float32\[2\], and its tangent is float32\[3\]"),
        ({"w": torch.ones(2)}, {"w": 1.0}, r"the tangent at \['w'\] is 1.0: pass a tensor, or None"),
        ([torch.ones(2, dtype=torch.long)], [torch.ones(2, dtype=torch.long)], "has no tangent: pass None"),
    ],
)
def test_tangents_that_do_not_fit(primals, tangents, message):
    with pytest.raises(ValueError, match=message):
        transforms.dual(primals, tangents)


def test_options_that_do_not_fit():
    pipeline = Pipeline([lambda p, x: x], loss=cases.mse)
    with pytest.raises(ValueError, match="has_aux says what the pipeline's own loss returns"):
        transforms.jvp(pipeline, loss=cases.mse, has_aux=True)
    with pytest.raises(TypeError, match="a transform takes a Pipeline"):
        transforms.jvp(lambda p, x: x)


@pytest.mark.parametrize("capture", [False, True])
def test_a_step_within_a_transform_of_torch_func_names_the_way(capture):
    pipeline = Pipeline([lambda p, x: x * p] * 2, loss=cases.mse)
    plan, params, x = pipeline.plan(Placement.loop(2), 1), {0: torch.ones(4), 1: torch.ones(4)}, torch.ones(2, 4)
    step = fpipe.value_and_grad(pipeline, "1f1b", plan, handler=handlers.Local(), capture=capture)
    run = fpipe.evaluate(pipeline, plan, handler=handlers.Reference())
    calls = {
        "grad": lambda: grad(lambda p: step(p, x, x)[0])(params),
        "vmap": lambda: torch.func.vmap(lambda x: step(params, x, x)[0])(x[None]),
        "jvp": lambda: jvp(lambda x: run(params, x), (x,), (x,)),
    }
    for name, call in calls.items():
        with pytest.raises(StageError, match=rf"within torch\.func\.{name}, .*fpipe\.transforms\.jvp, hvp, vmap or"):
            call()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(StageError, match=r"within torch\.autograd\.forward_ad"):
        run(params, x)


def compiled():
    """In a process of its own: torch.compile changes how Python runs the frames of a process for good."""
    pipeline = Pipeline([lambda p, x: x * p], loss=cases.mse)
    step = fpipe.value_and_grad(pipeline, "1f1b", pipeline.plan(Placement.loop(1), 1), handler=handlers.Local())
    params, x = {0: torch.full((4,), 2.0)}, torch.ones(2, 4)
    step(params, x, x)
    assert torch.compile(lambda x: step(params, x, x)[0] * 2, backend="eager")(x) == step(params, x, x)[0] * 2
    with pytest.raises(Exception, match=r"a step of fpipe is no code for torch\.compile"):
        torch.compile(lambda x: step(params, x, x)[0], backend="eager", fullgraph=True)(x)


@thorough
def test_a_step_breaks_the_graph_of_a_compiled_function():
    process = CONTEXT.Process(target=compiled)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_no_optimizer_takes_hessian_vector_products():
    pipeline = transforms.hvp(Pipeline([lambda p, x: x * p], loss=cases.mse))
    sgd = interop.optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match=r"its gradients are Dual\(Hv, gradient\). Take value_and_grad"):
        fpipe.train_step(pipeline, "1f1b", pipeline.plan(Placement.loop(1), 1), sgd, handler=handlers.Local())


def test_the_product_of_a_frozen_param_is_none():
    pipeline = Pipeline([lambda p, x: x * p, lambda p, x: x * p], loss=cases.mse)
    params = {0: torch.tensor(2.0), 1: torch.tensor(3.0)}
    twin = transforms.hvp(pipeline.freeze(params, lambda path, p: path[0] == 0))
    step = fpipe.value_and_grad(twin, schedules.gpipe, twin.plan(Placement.loop(2), 2), handler=handlers.Local())
    _, grads = step(transforms.dual(params, params), torch.ones(4), torch.zeros(4))
    assert (transforms.primals(grads)[0], transforms.tangents(grads)[0]) == (None, None)
    assert transforms.tangents(grads)[1] == 24  # of (p q)^2 by q: 2 p^2 q
