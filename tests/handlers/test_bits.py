"""Every handler and schedule gives the reference's bits, by graphs under every policy and by eager autograd."""

from dataclasses import replace

import pytest
import torch

import fpipe
from fpipe import handlers, policies
from tests.support import cases, jobs
from tests.support.sharing import Sharing, sharing

MICROBATCHES = (1, 2, 3, 5, 8)
POLICIES = {
    "everything": policies.everything_saveable,
    "nothing": policies.nothing_saveable,
    "dots": policies.dots_saveable,
    "cheap": policies.cheap,
    "names": policies.save_only("mixed", "h"),
    "by stage": {0: policies.nothing_saveable, 1: policies.cheap},
}


def microbatches(schedule):
    return [m for m in MICROBATCHES if schedule not in cases.BOTH_WAYS or m % 2 == 0]


PAIRS = [
    (name, schedule)
    for name in cases.CASES
    for schedule in cases.SCHEDULES
    if not (name == "modules" and schedule in cases.BOTH_WAYS)  # a state has no copies
]
EVERY = [(name, schedule, m) for name, schedule in PAIRS for m in microbatches(schedule)]


def run(case, schedule, plan, handler, **options):
    step = fpipe.value_and_grad(case.pipeline, schedule, plan, handler=handler, **case.options, **options)
    return step(case.params, case.batch, case.target, state=case.state, rng=case.rng)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("name", "schedule", "m"), EVERY)
def test_local(name, schedule, m, ranks):
    case, generator, plan = cases.make(name, schedule, ranks, m, cases.rows(m))
    found = run(case, generator, plan, sharing(handlers.Local(), name, plan.stages), autodiff="graph")
    assert jobs.differences(found, cases.oracle(name, plan)) == []


def on_four(pairs):
    """Fewer microbatches than ranks, or not their multiple, or more than they hold: in turn, so that every case and
    every schedule has each. Two processes and one have all of them.
    """
    for name, schedule in pairs:
        several = [m for m in microbatches(schedule) if m in (2, 3, 8)]
        turn = list(cases.CASES).index(name) + list(cases.SCHEDULES).index(schedule)
        yield 4, name, schedule, several[turn % len(several)]


OVER_GLOO = [(2, *each) for each in EVERY] + list(on_four(PAIRS))


@pytest.mark.parametrize(("ranks", "name", "schedule", "m"), OVER_GLOO)
def test_gloo(pools, name, schedule, m, ranks):
    assert pools(ranks).run(jobs.train, name, schedule, m, ranks) == [[]] * ranks


@pytest.mark.parametrize(("name", "schedule"), PAIRS)
def test_eager(name, schedule):
    case, generator, plan = cases.make(name, schedule, 2, 4 if schedule in cases.BOTH_WAYS else 3)
    found = run(case, generator, plan, handlers.Local(), autodiff="eager")
    assert jobs.differences(found, cases.reference(case, generator, plan)) == []


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_v", "interleaved_zb"])
@pytest.mark.parametrize("name", ["attention", "dropout", "tied", "skip", "modules"])
@pytest.mark.parametrize("policy", POLICIES)
def test_policies(policy, name, schedule):
    case, generator, plan = cases.make(name, schedule, 2, 4)
    own = sharing(handlers.Local(), name, plan.stages, policy)
    found = run(case, generator, plan, own, autodiff="graph", policy=POLICIES[policy])
    assert jobs.differences(found, cases.reference(case, generator, plan)) == []


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_v", "interleaved_zb", "dualpipe"])
@pytest.mark.parametrize("name", ["linear", "attention"])
def test_dynamic(name, schedule):
    """Microbatches of several sizes, and a second batch of others, by one graph."""
    case, generator, plan = cases.make(name, schedule, 2, 4 if schedule in cases.BOTH_WAYS else 3)
    own = Sharing(handlers.Local(), {})
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=own, autodiff="graph", dynamic=True)
    for rows in (16, 9):
        part = replace(case, batch=case.batch[:rows], target=case.target[:rows])
        found = step(part.params, part.batch, part.target)
        assert jobs.differences(found, cases.reference(part, generator, plan)) == []
    assert [len(graphs.traced) for graphs in own.graphs.values()] == [1] * plan.stages


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
