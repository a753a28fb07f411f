"""A microbatch of weight 0 isn't counted, whatever its loss and the last stage's gradients are."""

import pytest
import torch
import torch.nn.functional as F

import fpipe
from fpipe import Output, Pipeline, Placement, Stage, handlers, schedules
from tests.support.combinations import combined, one_in
from tests.support.jobs import differences, expected_on, handler

PLACEMENTS = {
    "gpipe": Placement.loop(4),
    "zb_h1": Placement.loop(4),
    "interleaved_1f1b": Placement.loop(2, 2),
    "dualpipe": Placement.both_ways(4),
}


def masked(output, target):
    """The mean over what is labelled: of nothing, it is NaN, and so are its gradients."""
    each = F.cross_entropy(output, target.clamp(min=0), reduction="none")
    return torch.where(target < 0, 0, each).sum() / labelled(target)


def ignoring(output, target):
    return F.cross_entropy(output, target, ignore_index=-100)


def labelled(target):
    return (target >= 0).sum()


def affine(p, x):
    return torch.tanh(x @ p["w"] + p["b"])


def case(name, unlabelled):
    """`(schedule, plan, pipeline, params, batch, target)`: four stages, of which the last reads two."""
    torch.manual_seed(1)
    params = {s: {"w": torch.randn(4, 4), "b": torch.randn(4)} for s in range(4)}
    stages = [affine, affine, affine, Stage(lambda p, x, skip: affine(p, x + skip), reads=(Output(2), Output(0)))]
    pipeline = Pipeline(stages, masked)
    target = torch.randint(4, (8,))
    target[[2 * m + row for m in unlabelled for row in (0, 1)]] = -100
    return getattr(schedules, name), pipeline.plan(PLACEMENTS[name], 4), pipeline, params, torch.randn(8, 4), target


def whole(pipeline, params, x, y):
    """The loss and its gradients over what is labelled, in one piece."""
    own = {s: {k: p.clone().requires_grad_() for k, p in tree.items()} for s, tree in params.items()}
    loss = pipeline(own, x[y >= 0], y[y >= 0])
    loss.backward()
    return loss.detach(), {s: {k: p.grad for k, p in tree.items()} for s, tree in own.items()}


@one_in(3)
@combined(autodiff=["graph", "eager"], name=PLACEMENTS)
def test_what_is_not_labelled_is_not_counted(name, autodiff):
    schedule, plan, pipeline, params, x, y = case(name, [1, 3])
    found = [
        fpipe.value_and_grad(pipeline, schedule, plan, handler=own, weight=labelled, autodiff=autodiff)(params, x, y)
        for own in (handlers.Reference(), handlers.Local(), handlers.Local(["cpu"] * plan.ranks))
    ]
    assert differences(found[1], found[0]) == []
    assert differences(found[2], found[0]) == []
    torch.testing.assert_close(found[0], whole(pipeline, params, x, y))


def over_ranks(rank, name, steps):
    """Where steps with these microbatches unlabelled differ from the reference."""
    found = []
    for unlabelled in steps:
        schedule, plan, pipeline, params, x, y = case(name, unlabelled)
        if not found:
            step = fpipe.value_and_grad(pipeline, schedule, plan, handler=handler(), weight=labelled)
        reference = fpipe.value_and_grad(pipeline, schedule, plan, handler=handlers.Reference(), weight=labelled)
        own = pipeline.params_on(params, plan, rank)
        expected = expected_on(reference(params, x, y), own, plan, rank, False)
        found.append(differences(step(own, x, y), expected))
    return found


@one_in(2)
@pytest.mark.parametrize("name", ["zb_h1", "dualpipe"])
def test_over_ranks_it_may_be_another_in_each_step(pools, name):
    assert pools(4).run(over_ranks, name, [[1], [], [0, 3]]) == [[[], [], []]] * 4


@pytest.mark.parametrize("own", [handlers.Reference(), handlers.Local()], ids=["reference", "local"])
def test_evaluation_counts_alike(own):
    *_, pipeline, params, x, y = case("gpipe", [0, 2])
    run = fpipe.evaluate(pipeline, pipeline.plan(Placement.loop(4), 4), handler=own, loss=True, weight=labelled)
    torch.testing.assert_close(run(params, x, y), pipeline(params, x[y >= 0], y[y >= 0]))


@pytest.mark.parametrize("autodiff", ["graph", "eager"])
def test_a_mean_of_nothing_at_all_is_nan(autodiff):
    schedule, plan, pipeline, params, x, y = case("gpipe", range(4))
    options = {"weight": labelled, "autodiff": autodiff}
    loss, _ = fpipe.value_and_grad(pipeline, schedule, plan, handler=handlers.Local(), **options)(params, x, y)
    assert loss.isnan()


@pytest.mark.parametrize("autodiff", ["graph", "eager"])
def test_a_pipeline_of_one_stage(autodiff):
    torch.manual_seed(0)
    x, y = torch.randn(4, 3), torch.tensor([-100, -100, 1, 2])
    pipeline, params = Pipeline([lambda p, x: x * p], ignoring), {0: torch.randn(3)}
    plan = pipeline.plan(Placement.loop(1), 2)
    found = [
        fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=own, weight=labelled, autodiff=autodiff)(
            params, x, y
        )
        for own in (handlers.Reference(), handlers.Local())
    ]
    assert differences(found[1], found[0]) == []
    p = params[0].clone().requires_grad_()
    loss = ignoring(x * p, y)
    torch.testing.assert_close(found[0], (loss.detach(), {0: torch.autograd.grad(loss, p)[0]}))
