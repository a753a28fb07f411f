"""Steps whose microbatches run in slices, against the whole sequences and the reference."""

from dataclasses import replace

import optree
import pytest
import torch

import fpipe
from fpipe import Batch, Microbatches, Pipeline, Placement, ScheduleError, Stage, StageError, handlers, transforms
from tests.support import cases, jobs
from tests.support.combinations import combined, few, one_in, thorough

STAGES = 3


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def causal(p, carry, x):
    """Attention to all tokens so far."""
    q, k, v = (x @ p["qkv"]).chunk(3, -1)
    if carry is not None:
        k, v = torch.cat((carry[0], k), 1), torch.cat((carry[1], v), 1)
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    return x + torch.tanh(((q @ k.mT).masked_fill(~seen, float("-inf")).softmax(-1) @ v) @ p["o"]), (k, v)


def model(dtype=torch.float64):
    width = cases.WIDTH
    params = {s: {"qkv": torch.randn(width, 3 * width), "o": torch.randn(width, width)} for s in range(STAGES)}
    tree = params, torch.randn(6, 7, width), torch.randn(6, 7, width)
    return Pipeline([Stage(causal, carry=True)] * STAGES, cases.mse), *optree.tree_map(
        lambda x: 0.5 * x.to(dtype), tree
    )


def plan_of(pipeline, slices, microbatches=3, **options):
    return replace(pipeline.plan(Placement.loop(STAGES), microbatches, slices=slices), **options)


def step(pipeline, plan, schedule="seq-1f1b", handler=None, **options):
    return fpipe.value_and_grad(pipeline, schedule, plan, handler=handler or handlers.Local(), **options)


@one_in(3)
@combined(
    slices=few([2, 3, 7], [2, 3]),
    schedule=["gpipe", "seq-1f1b", "seq-zb"],
    replicas=[1, 2],
    reduction=["mean", "sum", "weight"],
)
def test_the_gradients_are_those_of_whole_sequences(slices, schedule, replicas, reduction):
    """Within rounding; a slice weighs as much as its share of the tokens."""
    pipeline, params, batch, target = model()
    options = {"reduction": "mean"}
    if reduction == "sum":
        pipeline, options = Pipeline(pipeline.stages, lambda y, t: (y - t).square().sum()), {"reduction": "sum"}
    elif reduction == "weight":
        options = {"weight": lambda t: t[..., 0].numel()}
    expected = step(pipeline, plan_of(pipeline, 1), "gpipe", **options)(params, batch, target)
    plan = plan_of(pipeline, slices, replicas=replicas)
    found = step(pipeline, plan, schedule, **options)(params, batch, target)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    reference = step(pipeline, plan, schedule, handlers.Reference(), **options)(params, batch, target)
    assert jobs.differences(found, reference) == []


@combined(slices=[2, 7], handler=[handlers.Local, handlers.Reference], schedule=[None, "seq-zb"])
def test_evaluate(slices, handler, schedule):
    """A long prompt forward only: the outputs of slices are joined."""
    pipeline, params, batch, target = model()
    expected = pipeline(params, batch)
    plan, options = plan_of(pipeline, slices), {"handler": handler(), "schedule": schedule}
    torch.testing.assert_close(fpipe.evaluate(pipeline, plan, **options)(params, batch), expected)
    loss = fpipe.evaluate(pipeline, plan, loss=True, **options)(params, batch, target)
    torch.testing.assert_close(loss, pipeline(params, batch, target))


@one_in(2)
@combined(trained=few([[0], [1], [2], [0, 2]], [[1], [0, 2]]), schedule=["seq-1f1b", "seq-zb"])
def test_frozen_stages(trained, schedule):
    """A trained first stage has gradients of what it carries, and none of an input."""
    pipeline, params, batch, target = model()
    frozen = pipeline.freeze(params, lambda path, x: path[0] not in trained)
    plan = plan_of(frozen, 3)
    assert plan.trained == frozenset(trained)
    found = step(frozen, plan, schedule)(params, batch, target)
    assert jobs.differences(found, step(frozen, plan, schedule, handlers.Reference())(params, batch, target)) == []
    _, whole = step(pipeline, plan_of(pipeline, 1), "gpipe")(params, batch, target)
    torch.testing.assert_close({s: found[1][s] for s in trained}, {s: whole[s] for s in trained}, rtol=1e-9, atol=1e-12)


@thorough
def test_microbatches_of_several_lengths():
    pipeline, params, *_ = model()
    shapes = [(2, 7, cases.WIDTH), (1, 3, cases.WIDTH), (3, 5, cases.WIDTH)]
    batch, target = (Microbatches([torch.randn(shape).double() for shape in shapes]) for _ in range(2))
    expected = step(pipeline, plan_of(pipeline, 1), "gpipe")(params, batch, target)
    plan = plan_of(pipeline, 3)
    torch.testing.assert_close(step(pipeline, plan)(params, batch, target), expected, rtol=1e-9, atol=1e-12)
    outputs = fpipe.evaluate(pipeline, plan, handler=handlers.Local())(params, batch)
    assert [each.shape for each in outputs] == [torch.Size(shape) for shape in shapes]


def test_leaves_that_every_slice_reads_whole():
    def shifted(p, carry, x, by):
        count = 0 if carry is None else carry
        return x * p + by[:, None] + count, count + x.shape[1]

    pipeline = Pipeline([Stage(shifted, reads=[Batch("x"), Batch("by")], carry=True)], lambda y, t: y.sum())
    batch = {"x": torch.randn(2, 4), "by": torch.arange(2.0)}
    axes = ({"x": 1, "by": None}, None)
    run = step(pipeline, pipeline.plan(Placement.loop(1), 1, slices=2), sequence_axes=axes, reduction="sum")
    loss, grads = run({0: torch.tensor(2.0)}, batch, None)
    torch.testing.assert_close(loss, (2 * batch["x"] + batch["by"][:, None] + torch.tensor([0, 0, 2, 2])).sum())
    torch.testing.assert_close(grads[0], batch["x"].sum())


def test_random_numbers_of_slices_differ():
    def noisy(p, carry, x):
        return p * torch.rand_like(x), None

    pipeline = Pipeline([Stage(noisy, carry=True)])
    run = fpipe.evaluate(pipeline, pipeline.plan(Placement.loop(1), 1, slices=2), handler=handlers.Local())
    one, two = run({0: torch.tensor(1.0)}, torch.zeros(2, 6), rng=(0, 0)).chunk(2, 1)
    assert not torch.equal(one, two)


def test_with_cotangents_by_rank():
    case = cases.built("recurrent", 4)
    pipeline = Pipeline(case.pipeline.stages, case.pipeline.loss, cotangents="by_rank")
    plan = pipeline.plan(Placement.loop(2, chunks=2), 2, slices=2)
    found, expected = (
        step(pipeline, plan, "gpipe", handler, **case.options)(case.params, case.batch, case.target, state=case.state)
        for handler in (handlers.Local(), handlers.Reference())
    )
    assert jobs.differences(found, expected) == []


def test_a_loss_that_is_not_finite_names_its_microbatch():
    pipeline, params, batch, target = model()
    batch[5, 6] = float("nan")  # the last token of the last of three microbatches
    with pytest.raises(fpipe.NonFiniteError, match="microbatch 2: the loss is nan; the gradients"):
        step(pipeline, plan_of(pipeline, 2), check_finite=True)(params, batch, target)


def test_a_stage_that_carries_runs_whole_microbatches_too():
    pipeline, params, batch, target = model()
    expected = torch.func.grad_and_value(pipeline)(params, batch, target)
    found = step(pipeline, plan_of(pipeline, 1), "1f1b")(params, batch, target)
    torch.testing.assert_close(found, expected[::-1], rtol=1e-9, atol=1e-12)


def test_refusals():
    pipeline, *_ = model()
    plan = plan_of(pipeline, 3)
    plain = Pipeline([lambda p, x: x] * STAGES, cases.mse)
    with pytest.raises(ScheduleError, match=r"no stage of the pipeline has carry=True: .* Stage\(fn, carry=True\)"):
        step(plain, plan_of(plain, 3))
    with pytest.raises(ScheduleError, match=r"such as schedules\.seq_1f1b"):
        step(pipeline, plan, "1f1b")
    with pytest.raises(ValueError, match="argnums has 'batch', and the plan has slices"):
        step(pipeline, plan, argnums=("params", "batch"))
    with pytest.raises(ValueError, match="capture=True with slices"):
        step(pipeline, plan, capture=True)
    with pytest.raises(ValueError, match="stage 0 has carry=True, and transforms have no slices"):
        transforms.per_sample(pipeline)


@pytest.mark.parametrize(
    ("axes", "slices", "message"),
    [
        (0, 3, r"batch \(float64\[2, 7, 8\]\) can't be cut into slices along axis 0, which is that of the rows"),
        (3, 3, "along axis 3, which does not exist: sequence_axes= has the axis"),
        (1, 8, "has 7 tokens on axis 1: too few for 8 slices"),
        ((1, 2, 3), 3, "sequence_axes must be one axis, or a pair"),
    ],
)
def test_axes_that_do_not_fit(axes, slices, message):
    pipeline, params, batch, target = model()
    with pytest.raises(StageError, match=message):
        step(pipeline, plan_of(pipeline, slices), sequence_axes=axes)(params, batch, target)


def test_a_stage_that_returns_no_carry():
    pipeline = Pipeline([Stage(lambda p, carry, x: x * p, carry=True)], cases.mse)
    run = step(pipeline, pipeline.plan(Placement.loop(1), 1, slices=2))
    with pytest.raises(StageError, match=r"a stage with carry returns \(outputs, carry\), not Tensor"):
        run({0: torch.tensor(2.0)}, torch.zeros(2, 4), torch.zeros(2, 4))
