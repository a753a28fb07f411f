"""Every handler and schedule gives the reference's bits."""

import pytest
import torch

import fpipe
from fpipe import handlers
from tests import cases, jobs

MICROBATCHES = (1, 2, 3, 5, 8)


def microbatches(schedule):
    return [m for m in MICROBATCHES if schedule not in cases.BOTH_WAYS or m % 2 == 0]


EVERY = [
    (name, schedule, m)
    for name in cases.CASES
    for schedule in cases.SCHEDULES
    for m in microbatches(schedule)
    if not (name == "modules" and schedule in cases.BOTH_WAYS)  # a state has no copies
]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("name", "schedule", "m"), EVERY)
def test_local(name, schedule, m, ranks):
    case, generator, plan = cases.make(name, schedule, ranks, m)
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handlers.Local(), **case.options)
    found = step(case.params, case.batch, case.target, state=case.state, rng=case.rng)
    assert jobs.differences(found, cases.reference(case, generator, plan)) == []


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("name", "schedule", "m"), EVERY)
def test_gloo(pools, name, schedule, m, ranks):
    assert pools(ranks).run(jobs.train, name, schedule, m, ranks) == [[]] * ranks


@pytest.mark.parametrize("name", ["linear", "convolution", "attention", "dictionary", "skip", "tied"])
@pytest.mark.parametrize("m", MICROBATCHES)
def test_reference_is_the_plain_function(name, m):
    """Within rounding: torch.func sums over the whole batch at once."""
    torch.manual_seed(0)
    case = cases.CASES[name](4)
    double = jobs.optree.tree_map(
        lambda x: x.double() if x.is_floating_point() else x, (case.params, case.batch, case.target)
    )
    params, batch, target = double
    plan = case.pipeline.plan(fpipe.Placement.loop(4), m)
    step = fpipe.value_and_grad(case.pipeline, fpipe.schedules.gpipe, plan, handler=handlers.Reference())
    loss, grads = step(params, batch, target)
    expected, whole = torch.func.grad_and_value(case.pipeline)(params, batch, target)
    torch.testing.assert_close(loss, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, expected, rtol=1e-10, atol=1e-12)
