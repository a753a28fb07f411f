"""Replicas of a pipeline: every handler and schedule gives the bits of the reference, replicated and sharded."""

import optree
import pytest
import torch

import fpipe
from fpipe import Placement, handlers, schedules
from tests.handlers.test_weights import case as unlabelled_case
from tests.handlers.test_weights import labelled, whole
from tests.support import cases, jobs, replica_jobs
from tests.support.combinations import ALL, combined
from tests.support.replica_jobs import CASES, Grid
from tests.support.sharing import sharing

SCHEDULES = [*cases.SCHEDULES]


def step_of(case, schedule, plan, handler, **options):
    step = fpipe.value_and_grad(case.pipeline, schedule, plan, handler=handler, **{**case.options, **options})
    return step(case.params, case.batch, case.target, rng=case.rng)


# The oracle


@combined(name=CASES, replicas=(1, 2, 3, 4), microbatches=(1, 2, 3))
def test_replicas_are_copies_of_each_stage(name, replicas, microbatches):
    """Equal consecutive blocks of the microbatches, whose sums are added in order: the contract of copies."""
    case, _, plan = replica_jobs.make(name, "gpipe", 3, replicas, microbatches)
    copies = case.pipeline.plan(Placement([tuple(range(replicas))] * 3), replicas * microbatches)
    found = replica_jobs.oracle(name, plan)
    assert jobs.differences(found, cases.reference(case, schedules.gpipe, copies)) == []


@pytest.mark.parametrize("name", ["linear", "attention", "dictionary", "skip", "tied"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_the_reference_is_the_plain_function(name, replicas):
    """Within rounding: torch.func sums over the whole batch at once."""
    case, _, plan = replica_jobs.make(name, "gpipe", 2, replicas, 2)
    params, batch, target = optree.tree_map(
        lambda x: x.double() if x.is_floating_point() else x, (case.params, case.batch, case.target)
    )
    step = fpipe.value_and_grad(case.pipeline, schedules.gpipe, plan, handler=handlers.Reference())
    loss, grads = step(params, batch, target)
    expected, total = torch.func.grad_and_value(case.pipeline)(params, batch, target)
    torch.testing.assert_close(loss, total, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, expected, rtol=1e-10, atol=1e-12)


# In bits


def possible(name, schedule, microbatches, replicas, **_):
    """Models that run both ways take an even number of microbatches. By default a case meets every fourth schedule.

    Of `layouts`, a microbatch has two rows at least: with one row, graphs round otherwise than eager autograd.
    """
    if schedule in cases.BOTH_WAYS and microbatches % 2:
        return False
    if name == "layouts" and replicas * microbatches > 8:
        return False
    return ALL or (CASES.index(name) + SCHEDULES.index(schedule)) % 4 == 0


@combined(
    name=CASES,
    schedule=SCHEDULES,
    replicas=(1, 2, 3, 4),
    microbatches=(1, 2, 4),
    ranks=(2, 4),
    way=("eager", "everything"),
    which=(None, "least", "all"),
    where=possible,
)
def test_local(name, schedule, replicas, microbatches, ranks, way, which):
    case, generator, plan = replica_jobs.make(name, schedule, ranks, replicas, microbatches)
    local = sharing(handlers.Local(), name, plan.stages, way)
    resident = replica_jobs.room(generator, plan, which)
    found = step_of(case, generator, plan, local, resident=resident, **jobs.WAYS[way])
    assert jobs.differences(found, replica_jobs.oracle(name, plan)) == []


GRIDS = [Grid(text) for text in ("dp2 pp2", "dp3 pp2", "pp3 dp2", *(["dp4 pp2"] if ALL else []))]


@combined(
    name=CASES,
    schedule=SCHEDULES,
    microbatches=(1, 2, 4),
    grid=GRIDS,
    way=("eager", "everything"),
    which=(None, "least", "all"),
    where=lambda grid, schedule, **row: (
        (grid.ranks % 2 == 0 or schedule not in cases.BOTH_WAYS)
        and possible(schedule=schedule, replicas=grid.replicas, **row)
    ),
)
def test_over_gloo(pools, name, schedule, microbatches, grid, way, which):
    found = pools(grid.size).run(replica_jobs.train, grid, name, schedule, microbatches, which, way)
    assert found == [[]] * grid.size


@pytest.mark.parametrize("which", [None, "least", "all"])
@pytest.mark.parametrize("text", ["dp2 shard2 pp1", *(["dp2 pp1 shard2", "dp2 shard2 pp2"] if ALL else [])])
def test_shards_may_be_replicated(pools, text, which):
    """Hybrid sharding: gathered over the last dimension, added over both in the order of the flattened mesh."""
    grid = Grid(text)
    found = pools(grid.size).run(replica_jobs.train, grid, "attention", "interleaved_zb", 2, which)
    assert found == [[]] * grid.size


@pytest.mark.parametrize("which", [None, "least"])
@pytest.mark.parametrize("name", ["linear", "dropout"])
def test_replicas_may_have_other_numbers_of_rows(pools, name, which):
    """10 and 6 of 16: every row counts alike, and the losses of a microbatch by its share of all rows."""
    grid = Grid("dp2 pp2")
    assert pools(4).run(replica_jobs.train_uneven, grid, name, "zb_v", 2, (10, 6), which) == [[]] * 4


@pytest.mark.parametrize("schedule", ["one_f_one_b", "looped_bfs"])
def test_the_order_of_the_sum_shows(schedule):
    """With three replicas, the order in which their gradients are added changes bits; Local has the reference's."""
    case, generator, plan = replica_jobs.make("linear", schedule, 2, 3, 2)
    expected = replica_jobs.oracle("linear", plan)
    terms = [replica_jobs.alone(case, plan, replica) for replica in range(3)]
    assert jobs.differences(replica_jobs.added(terms), expected[1]) == []
    assert jobs.differences(replica_jobs.added(terms[::-1]), expected[1]) != []
    assert jobs.differences(step_of(case, generator, plan, handlers.Local()), expected) == []


@pytest.mark.parametrize("which", [None, "least"])
@pytest.mark.parametrize(
    ("name", "schedule"), [("tied", "interleaved_zb"), ("layouts", "dualpipe"), ("weighted", "zb_v")]
)
def test_an_inexact_sum_is_as_good(pools, name, schedule, which):
    """The backend's own order: gradients of float32 within 1e-5 of their largest, and the loss in bits."""
    grid = Grid("dp3 pp2")
    outcomes = pools(6).run(replica_jobs.inexact, grid, name, schedule, which)
    for loss, error in outcomes:
        assert loss == []
        assert error < 1e-5


# Weights


@pytest.mark.parametrize("unlabelled", [[1], [2, 3], [0, 1, 3]], ids=str)
def test_a_replica_may_have_no_weight(pools, unlabelled):
    """Of four microbatches of two replicas, some have labels: means over nothing are NaN, and are not counted."""
    schedule, plan, pipeline, params, x, y = unlabelled_case("interleaved_1f1b", unlabelled)
    plan = pipeline.plan(plan.placement, 2, replicas=2)
    found = [
        fpipe.value_and_grad(pipeline, schedule, plan, handler=own, weight=labelled)(params, x, y)
        for own in (handlers.Reference(), handlers.Local())
    ]
    assert jobs.differences(found[1], found[0]) == []
    torch.testing.assert_close(found[0], whole(pipeline, params, x, y))
    for which in (None, "least"):
        assert pools(4).run(weighed, Grid("dp2 pp2"), unlabelled, which) == [[]] * 4


def weighed(rank, grid, unlabelled, which):
    schedule, plan, pipeline, params, x, y = unlabelled_case("interleaved_1f1b", unlabelled)
    plan = pipeline.plan(plan.placement, 2, replicas=2)
    case = cases.Case(pipeline, params, x, y, options={"weight": labelled})
    return replica_jobs.compare(grid, case, schedule, plan, cases.reference(case, schedule, plan), which)
