"""Replicas of a pipeline: every handler and schedule gives the bits of the reference, replicated and sharded."""

import re
import time
from dataclasses import replace
from itertools import product

import optree
import pytest
import torch

import fpipe
from fpipe import Placement, handlers, schedules
from fpipe.effects import Gather, Release
from tests.handlers.test_weights import case as unlabelled_case
from tests.handlers.test_weights import labelled, whole
from tests.support import cases, jobs, replica_jobs
from tests.support.combinations import ALL, combined, few, one_in, sample, thorough
from tests.support.replica_jobs import CASES, Grid
from tests.support.sharing import sharing

SCHEDULES = [*cases.SCHEDULES]


def step_of(case, schedule, plan, handler, **options):
    step = fpipe.value_and_grad(case.pipeline, schedule, plan, handler=handler, **{**case.options, **options})
    return step(case.params, case.batch, case.target, rng=case.rng)


# The oracle


@combined(
    name=CASES,
    replicas=(1, 2, 3, 4),
    microbatches=(1, 2, 3),
    where=lambda name, microbatches, **_: name != "dropout" or microbatches == 1,  # drawn by their numbers
)
def test_replicas_are_copies_of_each_stage(name, replicas, microbatches):
    """A replica has consecutive microbatches, a copy every so many: the sums of each are added in order."""
    case = cases.built(name, 3, replicas * microbatches)
    plan = case.pipeline.plan(Placement.loop(3), microbatches, replicas=replicas)
    copies = case.pipeline.plan(Placement([tuple(range(replicas))] * 3), replicas * microbatches)
    _, *found = cases.reference(case, schedules.gpipe, plan)
    _, *expected = cases.reference(replica_jobs.in_turn(case, replicas, microbatches), schedules.gpipe, copies)
    assert jobs.differences(found, expected) == []


@pytest.mark.parametrize("name", ["linear", "attention", "dictionary", "skip", "tied"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_the_reference_is_the_plain_function(name, replicas):
    """Within rounding of float64: torch.func sums over the whole batch at once, in another order."""
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
    """Models that run both ways take an even number of microbatches.

    Of `layouts`, a microbatch has two rows at least: with one row, graphs round otherwise than eager autograd.
    """
    if schedule in cases.COPIED and microbatches % 2:
        return False
    return name != "layouts" or replicas * microbatches <= 8


def is_quick(name, way, microbatches, replicas, ranks, **_):
    """Graphs are traced for every case, stage and size: by default they are those of a few."""
    few = name in ("linear", "tied") and (microbatches, ranks, replicas) == (2, 2, 3)
    return ALL or way == "eager" or few


def met(name, schedule, every):
    """Whether a case meets a schedule: by default, one of several."""
    return ALL or (CASES.index(name) + SCHEDULES.index(schedule)) % every == 0


@one_in(4)
@combined(
    name=CASES,
    schedule=SCHEDULES,
    replicas=(1, 2, 3, 4),
    microbatches=(1, 2, 4),
    ranks=(2, 4),
    way=("eager", "everything"),
    which=(None, "least", "all"),
    where=lambda name, schedule, **row: (
        met(name, schedule, 4) and is_quick(name, **row) and possible(name, schedule, **row)
    ),
)
def test_local(name, schedule, replicas, microbatches, ranks, way, which):
    case, generator, plan = replica_jobs.make(name, schedule, ranks, replicas, microbatches)
    local = sharing(handlers.Local(), name, plan.stages, way)
    resident = replica_jobs.room(generator, plan, which)
    found = step_of(case, generator, plan, local, resident=resident, **jobs.WAYS[way])
    assert jobs.differences(found, replica_jobs.oracle(name, plan)) == []


GRIDS = [Grid(text) for text in ("dp2 pp2", "dp3 pp2", "pp3 dp2", *(["dp4 pp2"] if ALL else []))]


def fits(name, schedule, microbatches, grid, which, way):
    odd = schedule in cases.COPIED and grid.ranks % 2
    return not odd and possible(name, schedule, microbatches, grid.replicas)


def one_of_each():
    """Rows in which every schedule is met, and each value of the other axes several times."""
    for i, schedule in enumerate(SCHEDULES):
        name, which = CASES[i % len(CASES)], (None, "least", "all")[(i + i // 3) % 3]
        grid, m = GRIDS[i % 3], (1, 2, 4)[i // 3 % 3]
        if schedule in cases.COPIED:
            grid, m = GRIDS[i % 2], 2 + 2 * (i % 2)
        yield name, schedule, m if name != "layouts" else min(m, 2), grid, which, "eager"


WAYS = ("eager", "everything")
PRODUCT = [row for row in product(CASES, SCHEDULES, (1, 2, 4), GRIDS, (None, "least", "all"), WAYS) if fits(*row)]


@one_in(4)
@pytest.mark.parametrize(
    ("name", "schedule", "microbatches", "grid", "which", "way"),
    sample(PRODUCT, few(one_of_each(), slice(None, None, 4))),
)
def test_over_gloo(pools, name, schedule, microbatches, grid, which, way):
    found = pools(grid.size).run(replica_jobs.train, grid, name, schedule, microbatches, which, way)
    assert found == [[]] * grid.size


@thorough
@pytest.mark.parametrize("schedule", few(["zb_v", "dualpipe"], ["dualpipe"]))
def test_graphs_over_gloo(pools, schedule):
    found = pools(6).run(replica_jobs.train, Grid("dp3 pp2"), "linear", schedule, 2, "least", "everything")
    assert found == [[]] * 6


@pytest.mark.parametrize("which", few([None, "least", "all"], ["least"]))
@pytest.mark.parametrize("text", ["dp2 shard2 pp1", *(["dp2 pp1 shard2", "dp2 shard2 pp2"] if ALL else [])])
def test_shards_may_be_replicated(pools, text, which):
    """Hybrid sharding: gathered over the last dimension, added over both in the order of the flattened mesh."""
    grid = Grid(text)
    found = pools(grid.size).run(replica_jobs.train, grid, "attention", "interleaved_zb", 2, which)
    assert found == [[]] * grid.size


@one_in(2)
@combined(which=(None, "least"), name=("linear", "dropout"))
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


@one_in(2)
@combined(
    case=few((("tied", "interleaved_zb"), ("layouts", "dualpipe"), ("weighted", "zb_v")), slice(2)),
    which=(None, "least"),
)
def test_an_inexact_sum_is_as_good(pools, case, which):
    """The backend's own order: gradients of float32 within 1e-5 of their largest, and the loss in bits."""
    grid = Grid("dp3 pp2")
    outcomes = pools(6).run(replica_jobs.inexact, grid, *case, which)
    for loss, error in outcomes:
        assert loss == []
        assert error < 1e-5


@pytest.mark.parametrize(
    ("text", "which"),
    few([*(("dp2 shard2 pp1", which) for which in (None, "least", "all")), ("dp2 shard2 pp2", "least")], slice(2)),
)
def test_an_inexact_sum_over_two_dimensions_has_two_levels(pools, text, which):
    """Each part of the gradients crosses the first dimension once; no operation is over all four replicas.

    Gradients of float32 are within 1e-5 of their largest, and the loss has the reference's bits.
    """
    grid = Grid(text)
    for (loss, error), processes, moved, size in pools(grid.size).run(
        replica_jobs.two_levels, grid, "linear", "interleaved_zb", which
    ):
        assert loss == []
        assert error < 1e-5
        assert {*processes.values()} == {2}
        assert moved["scatter", "exchange"] == size
        assert moved["replicate", "all_reduce"] == size / 2
        assert moved.get(("scatter", "all_gather")) == (size if which is None else None)
        assert (moved.get(("gather", "all_gather"), 0) >= size) == (which is not None)


@one_in(2)
@combined(which=(None, "least"), exact=(True, False))
def test_every_dtype_is_added(pools, which, exact):
    assert pools(6).run(replica_jobs.train_mixed, Grid("dp3 pp2"), which, exact) == [[]] * 6
    assert pools(4).run(replica_jobs.train_mixed, Grid("dp2 shard2 pp1"), which, exact) == [[]] * 4


@pytest.mark.parametrize("which", few([None, "least"], ["least"]))
def test_memory_formats_stay(pools, which):
    """Stages see parameters with their strides, also where these are contiguous too; gradients have the same."""
    for different, seen, of_gradients, of_params in pools(3).run(replica_jobs.train_images, Grid("dp3 pp1"), which):
        assert different == []
        assert seen == {(5, 1, 5, 5)}
        assert of_gradients == of_params


def test_strides_may_change_from_step_to_step(pools):
    """The gradient's piece has those of its parameter."""
    for seen, placed in pools(2).run(replica_jobs.train_transposed, Grid("dp2 pp1")):
        assert seen == [(4, 1), (1, 4)]
        assert placed


@pytest.mark.parametrize("which", [None, "least"])
def test_nothing_of_a_step_stays(pools, which):
    """Neither the batch nor a gradient, however long the step is kept."""
    assert pools(4).run(replica_jobs.left_of_a_step, Grid("dp2 pp2"), which) == [[]] * 4


def test_a_schedule_with_its_own_gathers_is_evaluated():
    pipeline = fpipe.Pipeline([lambda p, x: x * p, lambda p, x: x + p], loss=cases.mse)
    plan = pipeline.plan(Placement.loop(2), 2, replicas=2)
    table = {r: [Gather(r), *schedules.gpipe(r, plan), Release(r)] for r in range(2)}
    options = {"handler": handlers.Local(), "schedule": schedules.from_table(table), "resident": 1}
    outputs = fpipe.evaluate(pipeline, plan, **options)({0: torch.tensor(2.0), 1: torch.tensor(1.0)}, torch.ones(4))
    assert outputs.tolist() == [3.0] * 4


@pytest.mark.parametrize("which", few([None, "least", "all"], ["least"]))
def test_a_mesh_of_one_replica(pools, which):
    found = pools(2).run(replica_jobs.train, Grid("dp1 pp2"), "tied", "interleaved_zb", 3, which)
    assert found == [[]] * 2


# Weights


@pytest.mark.parametrize("unlabelled", few([[1], [2, 3], [0, 1, 3]], [[2, 3]]), ids=str)
def test_a_replica_may_have_no_weight(pools, unlabelled):
    """Of four microbatches of two replicas, some have labels: means over nothing are NaN, and are not counted."""
    schedule, plan, pipeline, params, x, y = unlabelled_case("interleaved_1f1b", unlabelled)
    plan = pipeline.plan(plan.placement, 2, replicas=2)
    found = [
        fpipe.value_and_grad(pipeline, schedule, plan, handler=own, weight=labelled, autodiff="eager")(params, x, y)
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
    return replica_jobs.compare(
        grid, case, schedule, plan, cases.reference(case, schedule, plan), which, autodiff="eager"
    )


# A state of their own


@one_in(2)
@pytest.mark.parametrize(
    ("replicas", "schedule", "options"),
    few(
        [
            (2, "interleaved_zb", {"autodiff": "eager"}),
            (3, "zb_v", {"autodiff": "eager"}),
            (3, "one_f_one_b", {"autodiff": "graph"}),
            (2, "one_f_one_b", {"autodiff": "graph", "capture": True}),
        ],
        slice(1, None, 2),
    ),
    ids=str,
)
def test_a_state_of_each_replica(replicas, schedule, options):
    """Each is that of a pipeline without replicas, which has run the replica's microbatches alone."""
    case, generator, plan = replica_jobs.make("modules", schedule, 2, replicas, 2)
    states = replace(case, state=[case.state] * replicas)
    expected = replica_jobs.buffered(states, generator, plan, handlers.Reference(), autodiff="eager")
    assert jobs.differences(replica_jobs.buffered(states, generator, plan, handlers.Local(), **options), expected) == []
    for replica, found in enumerate(expected[0][-1]):
        batch, target = (replica_jobs.part(tree, 0, plan, replica) for tree in (case.batch, case.target))
        alone = replace(case, batch=batch, target=target)
        assert jobs.differences(found, cases.reference(alone, generator, replace(plan, replicas=1))[-1]) == []


@one_in(2)
@pytest.mark.parametrize(
    ("text", "schedule", "which"),
    few(
        [("dp2 pp2", "interleaved_zb", None), ("dp3 pp1", "one_f_one_b", "all"), ("dp3 pp2", "zb_v", "least")],
        slice(2),
    ),
)
def test_a_state_of_each_replica_over_gloo(pools, tmp_path, text, schedule, which):
    """Steps and outputs have the reference's bits; a checkpoint has each replica's own."""
    grid = Grid(text)
    found = pools(grid.size).run(replica_jobs.train_buffered, grid, schedule, which, str(tmp_path))
    assert found == [[]] * grid.size


STATES = {
    "none": (None, r"stage 0: the stage is stateful, but state\[0\] has no entry for it: pass \{0: tree\}"),
    "one": ({0: {}}, r"plays 2 replicas, each with a state of its own: pass a list .*, such as \[state\] \* 2"),
    "too few": (
        [{0: {}}],
        r"plays 2 replicas, each with a state of its own: pass a list with one \{stage: tree",
    ),
    "no trees": ([{}, 3], r"the stage is stateful, but state\[0\] has no entry for it"),
}


@pytest.mark.parametrize("wrong", STATES)
def test_a_wrong_state_is_refused(wrong):
    case, generator, plan = replica_jobs.make("modules", "gpipe", 2, 2, 2)
    state, text = STATES[wrong]
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handlers.Local(), buffers="own")
    with pytest.raises(fpipe.StageError, match=text):
        step(case.params, case.batch, case.target, state=state)
    with pytest.raises(ValueError, match="buffers must be 'own' or None, not 'mine'"):
        fpipe.value_and_grad(case.pipeline, generator, plan, handler=handlers.Local(), buffers="mine")


# Memory


@one_in(3)
@pytest.mark.parametrize(
    ("name", "schedule", "way", "resident"),
    sample(
        [
            row
            for row in product(
                ("linear", "attention"),
                ("looped_bfs", "interleaved_1f1b", "zb_v", "dualpipe_v"),
                ("everything", "nothing"),
                (1, 2),
            )
            if row[1] != "dualpipe_v" or row[3] == 2
        ],
        few(
            [
                ("linear", "looped_bfs", "everything", 1),
                ("linear", "interleaved_1f1b", "everything", 2),
                ("linear", "dualpipe_v", "nothing", 2),
                ("linear", "zb_v", "everything", 1),
                ("attention", "zb_v", "nothing", 1),
            ],
            slice(3),
        ),
    ),
)
def test_what_is_released_is_freed(pools, name, schedule, way, resident):
    """Residuals, deferred values and caches keep nothing of it alive; on each rank are as many bytes as predicted."""
    grid, microbatches = Grid("dp2 pp2"), 4
    outcomes = pools(4).run(replica_jobs.watched, grid, name, schedule, microbatches, resident, way)
    for gathers, faults, peak, predicted in outcomes:
        assert faults == []
        assert peak == predicted > 0
        if schedule == "looped_bfs":
            assert gathers == 2 * 2 - resident
        if schedule == "interleaved_1f1b" and resident == 2:
            assert gathers == 2


@one_in(2)
@pytest.mark.parametrize(
    ("schedule", "resident", "precision"),
    few(
        [
            ("looped_bfs", 1, fpipe.Precision()),
            ("interleaved_1f1b", 2, fpipe.Precision(torch.bfloat16, torch.float32)),
            ("zb_v", 1, fpipe.Precision(torch.bfloat16)),
            ("gpipe_v", None, fpipe.Precision(torch.bfloat16, torch.float32)),
        ],
        slice(None, None, 3),
    ),
    ids=str,
)
def test_a_recorder_measures_what_the_account_has(pools, schedule, resident, precision):
    """Live values with gathered parameters, parameters with their copies in another dtype, and sums: within 2 %."""
    for pairs in pools(2).run(replica_jobs.measured, Grid("dp2 pp1"), schedule, resident, precision):
        for found, predicted in pairs:
            assert found == pytest.approx(predicted, rel=0.02)


# Options


@one_in(3)
@combined(
    name=("attention", "dictionary", "weighted", "dropout"),
    which=(None, "least", "all"),
    gather=(False, True),
    loss=(False, True),
    where=lambda name, loss, **_: loss == (name == "weighted"),
)
def test_evaluation(pools, name, which, gather, loss):
    """Outputs of all replicas on every process, or each replica's own on its last rank."""
    grid = Grid("dp2 pp2")
    assert pools(4).run(replica_jobs.evaluated, grid, name, which, gather, loss) == [[]] * 4


@pytest.mark.parametrize("which", few([None, "least"], ["least"]))
def test_batches_and_aux_along_other_axes(pools, which):
    assert pools(4).run(replica_jobs.train_axes, Grid("dp2 pp2"), which) == [[]] * 4


@one_in(2)
@pytest.mark.parametrize("options", few([{"prefetch": 1}, {"prefetch": 4}, {"dynamic": True}], slice(1, None)), ids=str)
def test_options_of_a_step(pools, options):
    options = {"autodiff": "graph" if "dynamic" in options else "eager", **options}
    found = pools(4).run(replica_jobs.train_with, Grid("dp2 pp2"), "linear", "interleaved_zb", "least", options)
    assert found == [[]] * 4


@pytest.mark.parametrize("which", few([None, "least"], ["least"]))
def test_training(pools, which):
    """Steps of `train_step` on each process: the params that the reference's gradients give, in bits."""
    assert pools(4).run(replica_jobs.train_steps, Grid("dp2 pp2"), which) == [[]] * 4


@pytest.mark.parametrize(
    ("name", "schedule"),
    sample(
        [*product(["linear", "tied", "weighted", "dropout"], ["zb_v", "dualpipe"])],
        few([("weighted", "dualpipe"), ("dropout", "zb_v")], slice(1)),
    ),
)
def test_replicas_in_one_process_are_captured(name, schedule):
    case, generator, plan = replica_jobs.make(name, schedule, 2, 3, 2)
    local = sharing(handlers.Local(), name, plan.stages, "everything")
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=local, capture=True, **case.options)
    for _ in range(3):
        found = step(case.params, case.batch, case.target, rng=case.rng)
        assert jobs.differences(found, replica_jobs.oracle(name, plan)) == []


UNCAPTURED = {
    "shards": "capture={} with resident=: a graph gathers no shards. Leave one of them out",
    "weights": "capture={} with weight= and replicas in other processes: their weights are added on the host. Leave",
}


def test_what_can_not_be_captured_says_the_way_out(pools):
    """At once, on every process; replicas in one process, and casts, take capture=True."""
    for texts in pools(4).run(replica_jobs.uncaptured, Grid("dp2 pp2")):
        for (fault, capture), text in texts.items():
            assert re.match(re.escape(UNCAPTURED[fault].format(repr(capture))), text), text
    case, generator, plan = replica_jobs.make("linear", "gpipe", 2, 2, 2)
    casts = {"plan": replace(plan, replicas=1), "precision": fpipe.Precision(compute=torch.bfloat16)}
    for options in ({"plan": plan}, casts):
        with pytest.raises(ValueError, match=r"several replicas in one process, or with precision=.* Take"):
            fpipe.value_and_grad(case.pipeline, generator, handler=handlers.Local(), capture="pieces", **options)


# Bad input


SHARDED = (
    r"rank \d, stage \d: its parameters are sharded over the replicas, as params\['b'\] is: pass resident= to value_and"
)
WHOLE = (
    r"rank \d, stage \d: its parameters must be sharded, for resident= was passed, and params\['b'\], float32\[8\], "
    "is not: shard all"
)
OTHERS = r"rank \d: the replicas of rank 1 were given different parameters: "
OVER_RANKS = (
    r"rank \d, stage \d: params\['b'\] is placed \(Shard\(dim=0\),\) over DeviceMesh\(\(pp=2\), .*, which has ranks of "
    "the pipeline: shard it over another dimension"
)
PROGRAMS = r"rank \d: the ranks were given different schedules, plans or recorders; every rank of every replica must"
FAULTS = {
    "a plain leaf": ([3], WHOLE),
    "not sharded": ([0, 1, 2, 3], WHOLE),
    "not resident": ([0, 1, 2, 3], SHARDED),
    "one replica is sharded": ([2, 3], SHARDED),
    "few rows": ([2, 3], r"rank \d: (batch|target) \(float32\[1, 8\]\) has 1 row on axis 0: too few for 2 microbatch"),
    "a mesh of another size": ([3], r"rank 1, stage 1: params\['b'\]: a leaf float32\[8\] is cut over DeviceMesh\("),
    "the ranks' mesh": (..., OVER_RANKS),
    "the ranks' mesh, whole": (..., OVER_RANKS),
    "along another dimension": (
        ...,
        OTHERS
        + r"params\[1\]\['w'\] is float32\[8, 8\] in 2 shards along dimension 0 on replica 0 and float32\[8, 8\] in 2 "
        "shards along dimension 1 on replica 1; their shapes, dtypes, shards, which of them are trained and, in the",
    ),
    "another mesh": (
        ...,
        r"params\['b'\]: a leaf float32\[8\] is cut over DeviceMesh\(.*\), and the replicas are those of DeviceMesh\(.*"
        ": cut it over",
    ),
    "no replicas": (
        ...,
        r"rank \d, stage \d: its params have DTensors over a dimension of tensor parallelism, .*'eager'",
    ),
    "other shapes": (..., OTHERS + r"params\[1\]\['more'\] is missing on replica 0 and float32\[3\] on replica 1;"),
    "other dtypes": (..., OTHERS + r"params\[1\]\['b'\] is float32\[8\] on replica 0 and float64\[8\] on replica 1;"),
    "other values": (
        ...,
        OTHERS + r"the digest of the values of params\[1\]\['b'\] is \w+ on replica 0 and \w+ on rep",
    ),
    "one frozen leaf": (
        ...,
        OTHERS.replace("of rank 1", "of rank 0")
        + r"params\[0\]\['b'\] is float32\[8\] on replica 0 and float32\[8\], frozen on replica 1;",
    ),
    "other rows": (
        ...,
        r"the ranks of replica 1 were given batches of different sizes, rank 0 \d rows, rank 1 \d rows: eve",
    ),
    "rows of one replica": (
        ...,
        "only 1 of 2 replicas were given a batch with rows, by which losses are weighed: give",
    ),
    "microbatches": (None, PROGRAMS),
    "schedules": (None, PROGRAMS),
    "replicas": (
        None,
        r"the plan is of replicas=1, the handler of 2: make the plan by pipeline.plan\(..., replicas=2\)",
    ),
    "ranks": (None, "the plan has 4 ranks, the group 2 processes: start with torchrun --standalone --nproc-per-node 8"),
    "a state": (
        None,
        "stage 0 is stateful, and the plan has 2 replicas: pass buffers='own' to value_and_grad, train",
    ),
}
"""Fault -> (the processes that can't run the step, ... for all that compare, None where it is not set up; text)."""


SOME = [
    *("a plain leaf", "not sharded", "few rows", "the ranks' mesh", "along another dimension", "another mesh"),
    *("rows of one replica", "other values", "microbatches", "replicas", "a state"),
]


@one_in(4)
@pytest.mark.parametrize("fault", few(FAULTS, SOME))
def test_what_does_not_fit_is_refused_on_every_process(pools, fault):
    """Before anything travels, so that the handler stays usable."""
    guilty, text = FAULTS[fault]
    for rank, ((kind, message), differences) in enumerate(pools(4).run(replica_jobs.wrong, Grid("dp2 pp2"), fault)):
        if guilty is None:
            assert kind == "ScheduleError"
        elif guilty is ... or rank in guilty:
            assert kind == "StageError"
        else:
            assert kind == "TransportError"
            text = f"^rank {rank % 2} of replica {rank // 2} can't run the step, for a peer can't: replica 1, {text}"
        assert re.search(text, message), message
        assert differences == []
        text = FAULTS[fault][1]


def test_a_refused_step_leaves_no_weights(pools):
    """The next step is scaled by its own weights, though nothing is received before they are."""
    (first, *different), (second, *others) = pools(2).run(replica_jobs.refused, Grid("dp2 pp1"))
    assert first[0] == "TransportError"
    assert "can't run the step, for a peer can't: replica 1, rank 0: batch (float32[1, 8]) has 1 row on" in first[1]
    assert second[0] == "StageError"
    assert different == others == [[]]


def test_replicas_have_the_same_options(pools):
    """When the step is made: they decide what travels between the replicas, and how many bytes of it."""
    names = *["precision="] * 2, *["reduction= or weight="] * 3, "loss= or gather="
    expected = [
        f"rank 0: the ranks were given different options {name}; every rank of every replica must make the same"
        for name in names
    ]
    assert pools(2).run(replica_jobs.differing, Grid("dp2 pp1")) == [(expected, [])] * 2


@pytest.mark.parametrize(
    ("text", "fault", "error"),
    [
        (
            "dp2 shard2 pp1",
            "over the copies",
            r"stage 0: params\['b'\], float32\[8\], is cut over dimension 0 of the replicas' mesh, .*, and shards are "
            "gathered over its last one: shard it by",
        ),
        (
            "dp2 pp2",
            "the ranks as replicas",
            r"replicas \[\[[02], [13]\], \[[02], [13]\]\], which overlap or differ in number: pass two",
        ),
        (
            "dp2 pp2",
            "all as replicas",
            r"the ranks have the replicas \[\[0, 1, 2, 3\], .* which overlap or differ in number",
        ),
        (
            "dp2 pp2",
            "several",
            r"the ranks have the replicas \[\[[02], [02]\], \[0, 1, 2, 3\]\], which overlap or differ in n",
        ),
    ],
)
def test_wrong_meshes_are_refused_on_every_process(pools, text, fault, error):
    for found in pools(4).run(replica_jobs.wrong_mesh, Grid(text), fault):
        assert re.search(error, found), found


@one_in(3)
@pytest.mark.parametrize(
    ("fault", "text", "which", "reason"),
    [
        (
            "killed",
            "dp2 pp2",
            1,
            "rank 1 of replica 1 did not give a reason: did its script end, or was its process ki",
        ),
        (
            "killed",
            "dp3 pp1",
            None,
            "can't go on: rank 0 of replica 2 .* adding the gradients of stage 0 over the replicas",
        ),
        ("stopped", "dp2 pp2", None, "rank 1 of replica 1 does not answer within timeout=2 s: its process is stopped"),
        (
            "killed",
            "dp2 pp1",
            None,
            "^rank 0 of replica 0 can't go on: rank 0 of replica 1 did .* waiting for the weights of the replicas",
        ),
    ],
)
def test_a_replica_that_is_lost_is_named(fresh_pool, fault, text, which, reason):
    grid = Grid(text)
    pool = fresh_pool(grid.size)
    for pipe in pool.pipes:
        weight = len if "weights" in reason else None
        pipe.send((replica_jobs.lost, (grid, fault, which, 2.0, weight)))
    until = time.monotonic() + 30
    for rank in range(grid.size - 1):
        outcome = pool.outcome(rank, until, replica_jobs.lost)
        assert outcome.error == "TransportError", outcome.text
        assert re.search(reason, outcome.text), outcome.text
        assert outcome.seconds < 15
