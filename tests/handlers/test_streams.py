"""The order of streams on a GPU, checked on the CPU: each use of a value comes after its arrival."""

from itertools import cycle, product

import pytest

from fpipe import lower
from fpipe.effects import Offload, Send
from tests.support import cases, stream_jobs
from tests.support.combinations import ALL, few, one_in, sample, thorough
from tests.support.replica_jobs import Grid

NAMES = ["attention", "skip", "tied", "layouts", "dictionary", "dropout", "modules", "twice"]
DOCUMENTED = {
    "event",
    "beginning a step: a rank has not come to it",
    "ending a step: a rank has not launched all of it",
}
"""What the host waits for in a step whose signature is known: that the device keeps up, and all ranks' hosts."""


MOVING = [*zip(cases.MOVING, ["attention", "layouts", "dropout", "tied", "skip"], cycle([2]))]
TWO = [
    *MOVING,
    *(  # "modules" has a state, which a stage with copies can't have
        (schedule, "skip" if name == "modules" and schedule in cases.COPIED else name, 2)
        for schedule, name in zip(cases.SCHEDULES, cycle(NAMES), strict=False)
    ),
]


@one_in(4)
@pytest.mark.parametrize(
    ("schedule", "name", "ranks"),
    [
        *sample(TWO, [*MOVING, *few(TWO[len(MOVING) :: 2], slice(1, None, 4))]),
        *(
            pytest.param(*row, marks=thorough)
            for row in sample([(s, n, 4) for s in cases.SCHEDULES for n in ("skip", "tied")], [("zb_v", "skip", 4)])
        ),
    ],
)
def test_every_use_is_ordered(pools, schedule, name, ranks):
    _, generator, plan = cases.make(name, schedule, ranks, stream_jobs.MICROBATCHES)
    programs = lower(generator, plan)
    edges = {(rank, e.rank) for rank, program in programs.items() for e in program if isinstance(e, Send)}
    outcomes = pools(ranks).run(stream_jobs.train, name, schedule, ranks)
    for rank, (differences, faults, waits, streams) in enumerate(outcomes):
        assert differences == []
        assert faults == []
        assert waits <= DOCUMENTED
        lanes = 2 * any(isinstance(e, Offload) for e in programs[rank])  # to the host, and back
        assert streams == 2 + sum(rank in edge for edge in edges) + lanes  # of compute, of results, of each edge


REPLAYED = few([("zb_v", "tied"), ("one_f_one_b", "dropout"), ("gpipe", "skip")], slice(1, None))
REPLAYS = [stream_jobs.train_captured, stream_jobs.train_by_pieces]


@one_in(2)
@pytest.mark.parametrize(
    ("job", "schedule", "name"),
    [(job, *each) for i, each in enumerate(REPLAYED) for j, job in enumerate(REPLAYS) if ALL or i % 2 == j],
)
def test_every_use_of_a_replayed_step_is_ordered(pools, job, schedule, name):
    for differences, faults, waits, _ in pools(2).run(job, name, schedule, 2):
        assert differences == []
        assert faults == []
        assert waits <= DOCUMENTED


def test_outputs_are_gathered_without_a_wait_of_the_host(pools):
    for differences, faults, waits, _ in pools(2).run(stream_jobs.evaluate, "attention", "gpipe", 2):
        assert differences == []
        assert faults == []
        assert waits <= DOCUMENTED


@thorough
@pytest.mark.parametrize(
    ("schedule", "which"),
    sample(
        [*product(cases.SCHEDULES, [None, "least"])],
        few([("zb_v", "least"), ("dualpipe", "least"), ("one_f_one_b", None)], slice(1)),
    ),
)
def test_every_use_is_ordered_with_replicas(pools, schedule, which):
    """Whole parameters after their gather, sums after their exchange; two streams more."""
    grid = Grid("dp2 pp2")
    _, generator, plan = cases.make("tied", schedule, 2, stream_jobs.MICROBATCHES)
    edges = {(rank, e.rank) for rank, program in lower(generator, plan).items() for e in program if isinstance(e, Send)}
    outcomes = pools(4).run(stream_jobs.train_replicas, "tied", schedule, grid, which)
    for rank, (differences, faults, waits, streams) in enumerate(outcomes):
        assert differences == []
        assert faults == []
        assert waits <= DOCUMENTED
        assert streams == 2 + sum(rank % 2 in edge for edge in edges) + (1 if which is None else 2)


@one_in(3)
@pytest.mark.parametrize("mutation", few(stream_jobs.MUTATIONS, slice(None, None, 3)))
def test_a_fault_in_the_order_is_caught(pools, mutation):
    """A rank whose step ends before its sends may be gone before they arrive: then its peer's step fails."""
    if mutation.endswith(("parameters", "replicas")):
        grid = Grid("dp2 pp2")
        outcomes = pools(4).outcomes(stream_jobs.train_replicas, "linear", "looped_bfs", grid, "least", mutation)
    else:
        outcomes = pools(2).outcomes(stream_jobs.train, "attention", "one_f_one_b", 2, mutation)
    assert any(outcome.value[1] for outcome in outcomes if not outcome.error)
