"""Placements, edges and plans: what a schedule may know, and what is refused."""

import pytest

from fpipe import Edges, Placement, Plan, ScheduleError


def grid(plan):
    """Rows of ranks, columns of microbatches: the stages that run there."""
    return [
        [[s for s in range(plan.stages) if plan.rank_of(s, m) == rank] for m in range(plan.microbatches)]
        for rank in range(plan.ranks)
    ]


@pytest.mark.parametrize(
    ("placement", "holders", "ranks"),
    [
        (Placement.loop(3), ((0,), (1,), (2,)), 3),
        (Placement.loop(2, chunks=3), ((0,), (1,), (0,), (1,), (0,), (1,)), 2),
        (Placement.v(3), ((0,), (1,), (2,), (2,), (1,), (0,)), 3),
        (Placement.wave(2, 2), ((0,), (1,), (1,), (0,), (0,), (1,), (1,), (0,)), 2),
        (Placement.both_ways(4), ((0, 3), (1, 2), (2, 1), (3, 0)), 4),
        (Placement((1, 0, 0)), ((1,), (0,), (0,)), 2),
        (Placement([(0, 1), 1]), ((0, 1), (1,)), 2),
    ],
    ids=repr,
)
def test_a_placement_says_who_holds_each_stage(placement, holders, ranks):
    assert placement.holders == holders
    assert (placement.stages, placement.ranks) == (len(holders), ranks)
    assert hash(placement) == hash(Placement(holders))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Placement(()), "at least one stage"),
        (lambda: Placement([0, ()]), r"stage 1 has no rank: name one"),
        (lambda: Placement([0, -1]), r"stage 1 is placed on ranks \(-1,\): take different ranks, from 0"),
        (lambda: Placement([(0, 0)]), r"stage 0 is placed on ranks \(0, 0\)"),
        (lambda: Placement([0, 3, 1]), "rank 2 has no stage: ranks are numbered 0 to 3 without gaps"),
        (lambda: Placement([1]), "rank 0 has no stage"),
        (lambda: Placement.loop(0), "ranks must be a whole number of at least 1, not 0"),
        (lambda: Placement.loop(2, chunks=1.5), "chunks must be a whole number of at least 1, not 1.5"),
        (lambda: Placement.v(True), "ranks must be a whole number of at least 1, not True"),
        (lambda: Placement.wave(2, 0), "waves must be a whole number of at least 1, not 0"),
        (lambda: Placement.both_ways(3), "even number of ranks, not 3"),
        (lambda: Placement([10**18, 0]), "rank 1 has no stage: ranks are numbered 0 to 1000000000000000000"),
        (lambda: Placement(4), r"names the rank of each stage.* not 4: .*take Placement.loop"),
        (lambda: Placement("01"), "not '01'"),
    ],
)
def test_a_wrong_placement_is_refused(make, message):
    with pytest.raises(ScheduleError, match=message):
        make()


def test_in_a_chain_each_stage_reads_the_one_before_it():
    chain = Edges.chain(3)
    assert chain == Edges([(), (0,), (1,)])
    assert [chain.sources(s) for s in range(3)] == [(), (0,), (1,)]
    assert [chain.consumers(s) for s in range(3)] == [(1,), (2,), ()]
    assert not chain.skips


def test_in_a_dag_sources_come_lowest_first_and_consumers_highest_first():
    dag = Edges([(), (0,), (), (2, 0, 1, 0), (0, 3)])
    assert [dag.sources(s) for s in range(5)] == [(), (0,), (), (0, 1, 2), (0, 3)]
    assert [dag.consumers(s) for s in range(5)] == [(4, 3, 1), (3,), (3,), (4,), ()]
    assert dag.skips


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Edges([(), (0, 2), (1,)]), "stage 1 reads stage 2: an edge goes from a lower stage to a higher one"),
        (lambda: Edges([(0,)]), "stage 0 reads stage 0"),
        (lambda: Edges([(), (-1, 0)]), "stage 1 reads stage -1"),
        (lambda: Edges([(), (5,)]), "stage 1 reads stage 5: .* there are stages 0 to 1"),
        (lambda: Edges([(), (0,), (0,)]), r"stage 1 is read by no stage, and only the last stage's output \(2\)"),
        (lambda: Edges.chain(0), "stages must be a whole number of at least 1, not 0"),
    ],
)
def test_wrong_edges_are_refused(make, message):
    with pytest.raises(ScheduleError, match=message):
        make()


def test_a_plan_is_a_chain_unless_told_otherwise():
    plan = Plan(Placement.loop(2, chunks=2), 3)
    assert (plan.stages, plan.ranks, plan.microbatches) == (4, 2, 3)
    assert plan.edges == Edges.chain(4)
    assert plan == Plan(Placement((0, 1, 0, 1)), 3, Edges.chain(4))
    assert [(plan.sources(s), plan.consumers(s)) for s in (0, 1, 3)] == [((), (1,)), ((0,), (2,)), ((2,), ())]


def test_a_rank_holds_its_stages_lowest_first():
    plan = Plan(Placement.v(2), 1)
    assert [plan.stages_on(rank) for rank in range(2)] == [(0, 3), (1, 2)]
    plan = Plan(Placement.both_ways(2), 2)
    assert [plan.stages_on(rank) for rank in range(2)] == [(0, 1), (0, 1)]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: Plan(2, 4), "placement must be a Placement, such as .*, not 2"),
        (lambda: Plan(Placement.loop(2), 1).stages_on(-1), "there is no rank -1: the plan has ranks 0 to 1"),
        (lambda: Plan(Placement.loop(2), 1).stages_on(2), "there is no rank 2"),
    ],
)
def test_a_wrong_argument_of_a_plan_is_refused(ask, message):
    with pytest.raises(ScheduleError, match=message):
        ask()


def test_without_copies_a_rank_runs_every_microbatch_of_its_stages():
    plan = Plan(Placement((0, 1, 0)), 2)
    assert grid(plan) == [[[0, 2], [0, 2]], [[1], [1]]]
    assert [plan.microbatches_of(s, r) for s, r in ((0, 0), (1, 1), (2, 0))] == [range(2)] * 3


def test_copies_of_a_stage_take_microbatches_in_turn():
    plan = Plan(Placement.both_ways(2), 4)
    assert grid(plan) == [[[0], [1], [0], [1]], [[1], [0], [1], [0]]]
    assert [plan.microbatches_of(0, rank) for rank in (0, 1)] == [range(0, 4, 2), range(1, 4, 2)]
    assert [plan.microbatches_of(1, rank) for rank in (0, 1)] == [range(1, 4, 2), range(0, 4, 2)]


def test_a_stage_may_have_copies_where_another_has_none():
    plan = Plan(Placement([0, (2, 0, 1), 1]), 6)
    assert grid(plan) == [
        [[0], [0, 1], [0], [0], [0, 1], [0]],
        [[2], [2], [1, 2], [2], [2], [1, 2]],
        [[1], [], [], [1], [], []],
    ]


@pytest.mark.parametrize(
    ("placement", "ties", "sharers"),
    [
        (Placement.loop(2), (), [[(0, 0)], [(1, 1)]]),
        (Placement.both_ways(2), (), [[(0, 0), (0, 1)], [(1, 1), (1, 0)]]),
        (Placement.loop(3), ((2, 0),), [[(0, 0), (2, 2)], [(1, 1)], [(0, 0), (2, 2)]]),
        (
            Placement.loop(2, 2),
            ((0, 2), (1, 2)),
            [[(0, 0), (2, 0)], [(1, 1), (2, 0)], [(0, 0), (1, 1), (2, 0)], [(3, 1)]],
        ),
        (Placement([(0, 1), 1]), ((0, 1),), [[(0, 0), (0, 1), (1, 1)]] * 2),
    ],
)
def test_a_stage_shares_its_gradient_with_its_copies_and_its_ties(placement, ties, sharers):
    plan = Plan(placement, 2, ties=ties)
    assert [list(plan.sharers(s)) for s in range(plan.stages)] == sharers


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Plan(Placement.loop(2), 0), "microbatches must be a whole number of at least 1, not 0"),
        (lambda: Plan(Placement.loop(2), 2.0), "microbatches must be a whole number of at least 1, not 2.0"),
        (lambda: Plan(Placement.loop(2), 1, Edges.chain(3)), "the edges have 3 stages, the placement 2"),
        (lambda: Plan(Placement.both_ways(2), 3), "stage 0 has 2 copies, .* take a multiple of 2, not 3"),
        (lambda: Plan(Placement.loop(2), 1, ties=((0, 2),)), "a tie names stage 2: there are stages 0 to 1"),
        (lambda: Plan(Placement.loop(2), 1, ties=((-1, 0),)), "a tie names stage -1"),
    ],
)
def test_a_wrong_plan_is_refused(make, message):
    with pytest.raises(ScheduleError, match=message):
        make()
