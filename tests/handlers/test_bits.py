"""Every handler and schedule gives the reference's bits, by graphs under every policy and by eager autograd."""

from dataclasses import replace
from itertools import product

import pytest
import torch

import fpipe
from fpipe import handlers
from tests.support import cases, jobs
from tests.support.combinations import ALL, combined, few, one_in, sample
from tests.support.sharing import Sharing, sharing


def possible(name, schedule, m, way, ranks, **_):
    """A schedule that runs a model both ways takes an even number of microbatches, and a state has no copies.

    What a policy does to a stage, tests of autodiff see: here, by default, it meets every schedule on a few cases. Of
    the full product, policies other than the first are run with two microbatches on two ranks.
    """
    fits = schedule not in cases.COPIED or (m % 2 == 0 and name not in ("modules", "recurrent"))
    fits = fits and (name not in cases.SLICED or schedule in cases.TAKE_SLICES)
    if schedule in cases.MOVING and way == "eager":
        fits = fits and schedule == "gpipe_recomputed"  # residuals of eager autograd can't be moved
    if ALL:
        return fits and (way == "everything" or m == ranks == 2)
    return fits and (way in ("everything", "eager") or name in ("attention", "dropout", "modules"))


@one_in(4)
@combined(
    name=cases.CASES,
    schedule=[*cases.SCHEDULES, *cases.MOVING],
    way=jobs.WAYS,
    m=(1, 2, 3, 5, 8),
    handler=("local", "gloo"),
    ranks=(2, 4),
    where=possible,
)
def test_training(pools, name, schedule, way, m, handler, ranks):
    check_training(pools, name, schedule, way, m, handler, ranks)


def check_training(pools, name, schedule, way, m, handler, ranks):
    if handler == "gloo":
        assert pools(ranks).run(jobs.train, name, schedule, m, ranks, way) == [[]] * ranks
    else:
        case, generator, plan = cases.make(name, schedule, ranks, m, cases.rows(m))
        local = sharing(handlers.Local(), name)
        step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=local, **jobs.WAYS[way], **case.options)
        found = step(case.params, case.batch, case.target, state=case.state, rng=case.rng)
        assert jobs.differences(found, cases.oracle(name, plan)) == []


@pytest.mark.parametrize("name", few(["linear", "skip", "tied", "dropout", "weighted"], ["tied"]))
@pytest.mark.parametrize("handler", ["local", "gloo"])
def test_1f1b_of_copies_that_have_their_ranks_alone(pools, name, handler):
    check_training(pools, name, "one_f_one_b_copied", "everything", 4, handler, 4)


@one_in(2)
@pytest.mark.parametrize(
    ("name", "schedule"),
    sample(
        [*product(["linear", "attention"], ["one_f_one_b", "zb_v", "interleaved_zb", "dualpipe"])],
        few(
            [("linear", "interleaved_zb"), ("attention", "zb_v"), ("linear", "dualpipe"), ("attention", "one_f_one_b")],
            slice(2),
        ),
    ),
)
def test_dynamic(name, schedule):
    """Microbatches of several sizes, and a second batch of others, by one graph."""
    case, generator, plan = cases.make(name, schedule, 2, 4 if schedule in cases.COPIED else 3)
    own = Sharing(handlers.Local(), graphs={})
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=own, autodiff="graph", dynamic=True)
    for rows in (16, 9):
        part = replace(case, batch=case.batch[:rows], target=case.target[:rows])
        found = step(part.params, part.batch, part.target)
        assert jobs.differences(found, cases.reference(part, generator, plan)) == []
    assert {len(graphs.traced) for graphs in own.graphs.values()} == {1}


@pytest.mark.parametrize("name", ["linear", "convolution", "attention", "dictionary", "skip", "tied"])
@pytest.mark.parametrize("m", [1, 2, 3, 5, 8])
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


@one_in(3)
@pytest.mark.parametrize("name", few([name for name in cases.UNSLICED if name != "modules"], slice(None, None, 3)))
def test_microbatches_of_one_row(name):
    """A dimension of size 1 has any stride, by which some kernels choose their algorithm; batch norm takes two rows."""
    case, generator, plan = cases.make(name, "one_f_one_b", 3, 3, 3)
    steps = [
        fpipe.value_and_grad(case.pipeline, generator, plan, handler=handler, **case.options)
        for handler in (sharing(handlers.Local(), name, plan.stages, "one row"), handlers.Reference())
    ]
    found, expected = (step(case.params, case.batch, case.target, state=case.state, rng=case.rng) for step in steps)
    assert jobs.differences(found, expected) == []
