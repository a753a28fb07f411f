"""evaluate runs the pipeline forward, and keeps nothing."""

import pytest
import torch

import fpipe
from fpipe import Pipeline, Placement, handlers, schedules
from fpipe.stages.microbatch import merge, split
from tests.support import cases, jobs
from tests.support.combinations import combined
from tests.support.sharing import sharing

PLACEMENTS = {"loop": Placement.loop(2), "chunks": Placement.loop(2, 2), "v": Placement.v(2)}
NAMES = ["linear", "convolution", "attention", "dictionary", "skip", "tied", "modules"]


def expected(case, m):
    """The pipeline called on each microbatch, put together."""
    parts, _ = split(case.batch, m)
    return merge([case.pipeline(case.params, part) for part in parts])


@combined(
    name=[n for n in NAMES if n != "modules"], placement=PLACEMENTS, way=["reference", "graph", "eager"], m=[1, 3, 8]
)
def test_outputs_equal_the_pipelines(name, placement, way, m):
    placement = PLACEMENTS[placement]
    case = cases.built(name, placement.stages)
    own = handlers.Reference() if way == "reference" else handlers.Local()
    if way == "graph":
        own = sharing(own, name)
    autodiff = "eager" if way == "eager" else "graph"
    run = fpipe.evaluate(case.pipeline, case.pipeline.plan(placement, m), handler=own, autodiff=autodiff)
    outputs = run(case.params, case.batch)
    assert jobs.differences(outputs, expected(case, m)) == []
    assert not outputs.requires_grad


@combined(ranks=[2, 4], name=NAMES)
def test_gloo_gathers_on_every_rank(pools, name, ranks):
    assert pools(ranks).run(jobs.evaluate_gathered, name, ranks, 3) == [[]] * ranks


def test_outputs_stay_on_the_last_rank_without_gather(pools):
    assert pools(2).run(jobs.evaluate_alone, 2) == ["nothing", "outputs"]


@pytest.mark.parametrize("autodiff", ["graph", "eager"])
@pytest.mark.parametrize("handler", [handlers.Reference(), handlers.Local()], ids=["reference", "local"])
def test_no_residual_is_kept(handler, autodiff):
    saved, modes = [], []

    def stage(p, x):
        modes.append(torch.is_grad_enabled())
        return torch.tanh(x @ p)

    pipeline = Pipeline([stage] * 2)
    run = fpipe.evaluate(pipeline, pipeline.plan(Placement.loop(2), 4), handler=handler, autodiff=autodiff)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        run(dict.fromkeys(range(2), torch.ones(3, 3)), torch.ones(8, 3))
    traced = autodiff == "graph" and isinstance(handler, handlers.Local)
    assert modes == [False] * (2 if traced else 8)
    assert saved == []


def test_the_loss_is_the_steps():
    case, schedule, plan = cases.make("attention", "one_f_one_b", 2, 3)
    loss, _ = cases.reference(case, schedule, plan)
    run = fpipe.evaluate(case.pipeline, plan, handler=handlers.Local(), loss=True)
    assert torch.equal(run(case.params, case.batch, case.target), loss)


def test_the_order_of_another_schedule():
    case, _, plan = cases.make("linear", "gpipe", 2, 4)
    run = fpipe.evaluate(case.pipeline, plan, handler=handlers.Local(), schedule=schedules.one_f_one_b)
    assert jobs.differences(run(case.params, case.batch), expected(case, 4)) == []
