"""Transformed pipelines: torch.func's gradients within rounding, and the reference's bits under every schedule."""

import optree
import pytest
import torch
from torch import nn
from torch.func import grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import fpipe
from fpipe import Pipeline, Placement, handlers, interop
from fpipe.transforms import dual, hvp, per_sample
from fpipe.transforms.mapped import Sizes
from tests.support import cases, transforms
from tests.support.combinations import combined, few, one_in, thorough
from tests.support.jobs import differences

CASES = ["linear", "skip", "tied", "modules", "weighted", "subtrees"]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
"""Of float32, against another order of sums."""


def fits(transform, name, **_):
    nested = transform in ("hvp of vmap", "vmap of hvp")
    if transform == "per_sample" and name in ("modules", "weighted"):  # a state is of all samples, and so are weights
        return False
    return not (nested and name not in ("linear", "tied")) and not (transform == "mean flow" and name != "linear")


@pytest.mark.filterwarnings("error:.*eager autograd")
@combined(transform=[*transforms.TRANSFORMS, "mean flow"], name=CASES, where=fits)
def test_the_gradients_are_those_of_torch_func(transform, name):
    made = transforms.make(transform, name, 4, 3)
    plan = made.case.pipeline.plan(Placement.loop(4), 3)
    _, grads, *_ = cases.reference(made.case, fpipe.schedules.gpipe, plan)
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel on the CPU has no forward mode, and no rule for vmap
        expected = made.expected()
    none = {"none_is_leaf": True, "namespace": "fpipe"}
    pairs = zip(optree.tree_leaves(grads, **none), optree.tree_leaves(expected, **none), strict=True)
    compared = [torch.testing.assert_close(a, b, **TOLERANCE) for a, b in pairs if a is not None]
    assert compared


def runs(schedule, name, m, **rest):
    both_ways = schedule in cases.COPIED
    return fits(name=name, **rest) and not (both_ways and (m % 2 or name == "modules"))


@one_in(4)
@combined(
    transform=[*transforms.TRANSFORMS, "mean flow"],
    name=["linear", "skip", "tied", "modules"],
    schedule=["one_f_one_b", "zb_h1", "zb_v", "interleaved_1f1b", "dualpipe"],
    way=["graph", "eager", "gloo"],
    m=[2, 5],
    where=runs,
    singly=True,
)
def test_bits(pools, transform, name, schedule, way, m):
    if way == "gloo":
        arguments = transform, name, schedule, m, 2, {"autodiff": "graph"}
        assert pools(2).run(transforms.on_this_rank, *arguments) == [[], []]
    else:
        assert transforms.locally(transform, name, schedule, m, {"autodiff": way}) == []


@pytest.mark.filterwarnings("error:.*eager autograd")
@pytest.mark.parametrize("transform", few(["hvp of vmap", "vmap of hvp"], slice(1)))
def test_an_output_that_depends_on_no_member_has_tangents(transform):
    torch.manual_seed(0)
    pipeline = Pipeline([lambda p, x: x, lambda p, x: torch.tanh(x @ p)], loss=cases.mse)
    x, y = torch.randn(2, 4, 3).unbind()
    made = transforms.TRANSFORMS[transform](cases.Case(pipeline, {0: torch.ones(3), 1: torch.randn(3, 3)}, x, y), 2)
    case, plan = made.case, pipeline.plan(Placement.loop(2), 2)
    steps = [
        fpipe.value_and_grad(case.pipeline, "zb-h1", plan, handler=handler, **case.options)
        for handler in (handlers.Reference(), handlers.Local())
    ]
    (_, expected), (_, grads) = (step(case.params, case.batch, case.target) for step in steps)
    assert differences(grads, expected) == []
    torch.testing.assert_close(grads[1], made.expected()[1], **TOLERANCE)


@one_in(4)
@combined(
    transform=[*transforms.TRANSFORMS, "mean flow"],
    capture=[True, "pieces"],
    where=lambda transform, capture: (transform, capture) != ("per_sample", "pieces"),
)
def test_captured(transform, capture):
    assert transforms.locally(transform, "linear", "zb_h1", 2, {"capture": capture}) == []


@pytest.mark.parametrize(
    "transform",
    few([*(name for name in transforms.TRANSFORMS if name != "per_sample"), "mean flow"], ("hvp of vmap",)),
)
def test_replicas(transform):
    assert transforms.locally(transform, "linear", "one_f_one_b", 2, {}, replicas=2) == []


@combined(transform=few(["vmap", "mean flow", "hvp"], slice(1)), which=few([None, "all"], slice(1, 2)))
def test_replicas_over_gloo(pools, transform, which):
    assert pools(4).run(transforms.over_replicas, transform, which) == [[]] * 4


@thorough
def test_a_module_that_was_exported_and_split():
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True) for _ in range(2)]
    model = nn.Sequential(*layers).double()
    x, y = torch.randn(4, 5, 8).double(), torch.randn(4, 5, 8).double()
    pipeline, params = interop.split(model, stages=2, example=x[:2], loss=cases.mse)
    case = cases.Case(pipeline, params, x, y)
    with pytest.raises(ValueError, match=r"the batch\['x'\] is float64\[4, 5, 8\], and the module was split"):
        hvp(pipeline)(dual(params, None), {"x": dual(x, x)}, y)
    for transform in ("hvp", "vmap", "per_sample"):
        made = transforms.TRANSFORMS[transform](case, 2)
        plan = pipeline.plan(Placement.loop(2), 2)
        step = fpipe.value_and_grad(
            made.case.pipeline, "zb-h1", plan, handler=handlers.Local(), autodiff="graph", **made.case.options
        )
        _, grads = step(made.case.params, x, y)
        if transform == "per_sample":
            rows = [grad(pipeline)(params, x[i : i + 1], y[i : i + 1]) for i in range(4)]
            expected = optree.tree_map(lambda *each: torch.stack(each), *rows)
        else:
            with sdpa_kernel(SDPBackend.MATH), Sizes():
                expected = made.expected()
        torch.testing.assert_close(grads, expected)


@pytest.mark.parametrize("handler", few([handlers.Local(), handlers.Reference()], slice(1)), ids=repr)
def test_gradients_of_the_batch(handler):
    torch.manual_seed(0)
    pipeline = Pipeline([lambda p, x: torch.tanh(x @ p)] * 2, cases.mse)
    plan, params = pipeline.plan(Placement.loop(2), 2), {s: torch.randn(4, 4) for s in range(2)}
    x, y, along = torch.randn(3, 6, 4).unbind()
    options = {"handler": handler, "argnums": ("params", "batch")}
    vector = transforms.directions(params)

    step = fpipe.value_and_grad(hvp(pipeline), "zb-h1", plan, **options)
    _, grads = step(dual(params, vector), dual(x, along), y)
    gradient, product = jvp(grad(lambda p, x: pipeline(p, x, y), (0, 1)), (params, x), (vector, along))
    torch.testing.assert_close(grads, dual(product, gradient), **TOLERANCE)

    step = fpipe.value_and_grad(per_sample(pipeline), "zb-h1", plan, has_aux=True, reduction="sum", **options)
    _, grads = step(params, x, y)
    rows, of_x = vmap(grad(pipeline, (0, 1)), (None, 0, 0))(params, x[:, None], y[:, None])
    torch.testing.assert_close(grads, (rows, of_x[:, 0]), **TOLERANCE)
