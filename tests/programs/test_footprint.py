"""The account of all bytes of a rank, by hand and by closed forms."""

from dataclasses import replace
from functools import partial
from math import nan
from operator import le

import pytest

from fpipe import Costs, Link, Placement, Plan, ScheduleError, lower, schedules, simulate, verify
from fpipe.costs import Tied
from fpipe.effects import Parameters
from fpipe.programs.footprint import footprint, least_bytes
from fpipe.programs.lowering import forward_only
from fpipe.schedules.cuts import recut
from tests.support.catalogue import FUNCTIONS

GIB = 2.0**30


def totals(programs, costs):
    return [each.total for each in footprint(programs, costs)]


def test_one_stage_on_each_rank_by_hand():
    """Parameters, a sum of gradients and Adam's two moments: four times the parameters, and the residuals."""
    plan = Plan(Placement.loop(2), 4)
    costs = Costs(parameters=[100, 40], residuals=[1, 2])
    accounts = footprint(lower(schedules.gpipe, plan), costs)
    # at the last forward there is no sum yet; at the end of the first backward one microbatch is gone
    assert [tuple(each) for each in accounts] == [(100, 200, 100, 3), (40, 80, 40, 6)]
    assert totals(lower(schedules.gpipe, plan), replace(costs, optimizer=0)) == [203, 86]


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_shards_are_a_part_of_parameters_and_state(replicas):
    plan = Plan(Placement.loop(2, chunks=2), 4, replicas=replicas)
    costs = Costs(parameters=96)
    whole = footprint(lower(schedules.looped_bfs, plan), costs)
    assert {tuple(each) for each in whole} == {(192, 384, 192, 0)}
    for resident in (1, 2):
        for each in footprint(lower(schedules.looped_bfs, plan, resident=resident), costs):
            assert (each.parameters, each.optimizer) == (192 / replicas, 384 / replicas)
            # while the second stage's sum is whole, the first one's is a shard
            assert each.gradients <= 96 + 96 / replicas
            assert each.live <= 96 * resident
            assert each.total <= 576 / replicas + 96 * resident + 96 + 96 / replicas


@pytest.mark.parametrize("resident", [None, 1, 2])
def test_casts_by_hand(resident):
    """A rank has its parameters twice, in two dtypes; what is gathered has the second, a sum a third."""
    plan = Plan(Placement.loop(1, chunks=2), 1, replicas=2)
    costs = Costs(0, 0, 0, parameters=96, gathered=48, gradients=72, gather=Link(0, 24), scatter=Link(0, 36))
    (account,) = footprint(lower(schedules.gpipe, plan, resident=resident), costs)
    if resident is None:
        assert account == (2 * (96 + 48), 2 * 2 * 96, 2 * 72, 0)
        assert simulate(schedules.gpipe, plan, costs).makespan == 2 * 2
    else:  # the peak is in the backward of stage 1: with stage 0 whole too, when both are
        assert (account.parameters, account.optimizer) == (96 + 48, 2 * 96)
        assert (account.gradients, account.live) in {1: [(72 + 36, 48)], 2: [(72, 48 * 2)]}[resident]
        timeline = simulate(schedules.gpipe, plan, costs, resident=2)
        assert timeline.makespan == 2 * 1 + 2 * 1  # two gathers, and two scatters to shards
    assert replace(costs, gathered=None, gradients=None).at("gradients", Parameters(0)) == 96


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_account_of_every_schedule_is_bounded(name):
    plan = replace(FUNCTIONS[name].plan(4, 8), replicas=2)
    schedule, costs = FUNCTIONS[name].schedule(plan), Costs(parameters=10, residuals=1, activation=0.25)
    programs = lower(schedule, plan)
    report = verify(schedule, plan, costs=costs, ordered=False)
    for rank, each in enumerate(footprint(programs, costs)):
        own = 10 * len(plan.stages_on(rank))
        assert (each.parameters, each.optimizer) == (own, 2 * own)
        assert own <= each.gradients + 1e-9 + own * (each.live > 0)
        assert max(own * 4, own * 3 + report.peak_bytes[rank]) <= each.total + 1e-9
        assert each.total <= own * 5 + report.peak_bytes[rank] + 1e-9  # sums of copies too


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        # Rank 1 has a copy of 30 bytes of stage 0, its state, a sum that includes it, and receives rank 0's.
        (Placement((0, 1)), [(100, 200, 130, 0), (70, 140, 100, 0)]),
        # One copy, and a sum of each stage.
        (Placement((0, 0)), [(140, 280, 170, 0)]),
        # Ranks 1 and 2 each have a copy; the tie's three sums are on each rank.
        (Placement((0, 1, 2)), [(100, 200, 160, 0), (70, 140, 130, 0), (50, 100, 110, 0)]),
        # A copy for the two stages of a rank that both use them; a sum of each.
        (Placement((0, 1, 1)), [(100, 200, 160, 0), (90, 180, 150, 0)]),
    ],
)
def test_a_rank_has_a_copy_of_tied_parameters_and_a_sum_for_each_stage_by_hand(placement, expected):
    stages = tuple(range(placement.stages))
    costs = Costs(parameters=[100, 40, 20][: len(stages)], tied=[Tied(30, stages)])
    programs = lower(schedules.gpipe, Plan(placement, 2, ties=(stages,)))
    assert [tuple(each) for each in footprint(programs, costs)] == expected


@pytest.mark.parametrize(
    ("into", "parameters", "stages"),
    [(8, (32, 2, 10, 10, 10, 10, 15, 15), (0, 7)), (2, (54, 50), (0, 1)), (1, (104,), None)],
)
def test_tied_parameters_of_another_cut_are_in_the_first_and_the_last_part(into, parameters, stages):
    costs = recut(Costs(parameters=[34, 20, 20, 30], tied=[Tied(30, (0, 3))]), 4, into)
    assert costs.parameters == parameters
    assert costs.tied == (() if stages is None else (Tied(30, stages),))


def test_casts_and_gathers_of_tied_parameters_are_those_of_each_stage_by_hand():
    plan, tied = Plan(Placement((0, 0)), 1, ties=((0, 1),), replicas=2), [Tied(32, (0, 1))]
    costs = Costs(0, 0, 0, parameters=96, gathered=48, gradients=72, gather=Link(0, 16), tied=tied)
    (whole,) = footprint(lower(schedules.gpipe, plan), costs)
    assert (whole.parameters, whole.optimizer, whole.gradients) == (2 * 96 + 48 + 48 + 16, 2 * 2 * 96, 72 + 72 + 24)
    (sharded,) = footprint(lower(schedules.gpipe, plan, resident=2), costs)
    assert (sharded.parameters, sharded.optimizer, sharded.live) == (whole.parameters / 2, 2 * 96, 48 + 48 + 16)
    assert simulate(schedules.gpipe, plan, costs, resident=2).makespan == (24 + 24 + 8) / 16
    assert Costs.from_json(costs.as_json()) == costs


@pytest.mark.parametrize("tied", [[Tied(1, (0, 2))], [Tied(1, ())]])
def test_tied_parameters_of_stages_that_the_plan_lacks_are_refused(tied):
    with pytest.raises(ScheduleError, match=r"tied names stages \(.*\): give some of the plan's 2, lowest first"):
        simulate(schedules.gpipe, Plan(Placement.loop(2), 1), Costs(parameters=2, tied=tied))


def test_what_is_not_trained_has_neither_gradients_nor_state():
    plan = Plan(Placement.loop(2), 4)
    programs = forward_only(lower(schedules.gpipe, plan))
    assert [tuple(each) for each in footprint(programs, Costs(parameters=10))] == [(10, 0, 0, 0)] * 2


LEAST = Costs(parameters=[96, 48, 24, 48], gradients=[96, 24, 48, 48], tied=[Tied(24, (0, 3))], residuals=8)


@pytest.mark.parametrize(("placement", "trained"), [(Placement.loop(2, 2), None), (Placement.v(2), (1, 3))])
@pytest.mark.parametrize(("replicas", "shards"), [(1, None), (4, None), (4, 2)])
@pytest.mark.parametrize("gathered", [None, 24])
def test_the_least_bytes_are_at_most_those_of_any_program(placement, trained, replicas, shards, gathered):
    plan = Plan(placement, 3, replicas=replicas, ties=((0, 3),), trained=trained)
    costs = replace(LEAST, shards=shards, gathered=gathered)
    residents = (None, 1, 2) if replicas > 1 else (None,)
    for schedule in (schedules.gpipe, schedules.zb_auto(plan, costs)):
        for resident in residents:
            needed = totals(lower(schedule, plan, resident=resident), costs)
            assert all(map(le, least_bytes(plan, costs), needed))


def test_the_least_bytes_by_hand():
    """Parameters, copies of tied ones, Adam's state and sums; of shards one stage is whole, or its sum."""
    plan = Plan(Placement.loop(2, 2), 2, ties=((0, 3),))  # the sum of stage 3 has the tied part
    assert least_bytes(plan, LEAST) == [3 * (96 + 24) + (96 + 48), 3 * (48 + 48 + 24) + (24 + 48 + 24)]
    shards = [3 * (96 + 24) / 4 + 96, 3 * (48 + 48 + 24) / 4 + 48 + 24]
    sums = [3 * (96 + 24) / 4 + 48 + 96 / 4, 3 * (48 + 48 + 24) / 4 + 24 + (48 + 24) / 4]
    assert least_bytes(replace(plan, replicas=4), LEAST) == [*map(max, shards, sums)]


def test_a_limit_refuses_with_the_account():
    plan = Plan(Placement.loop(2, chunks=2), 4, replicas=4)
    costs = Costs(parameters=8 * GIB, residuals=GIB)
    needed = totals(lower(schedules.looped_bfs, plan, resident=1), costs)
    simulate(schedules.looped_bfs, plan, costs, resident=1, memory_limit_bytes=max(needed))
    with pytest.raises(
        ScheduleError,
        match=r"rank 0 needs 67 GiB, 27 GiB more than the limit of 40 GiB: 16 GiB of parameters, 32 GiB of optimizer "
        r"state, 16 GiB of gradients, 3 GiB of live values; more replicas",
    ):
        simulate(schedules.looped_bfs, plan, costs, memory_limit_bytes=40 * GIB)


@pytest.mark.parametrize("refuse", [partial(simulate, schedules.zb_v), schedules.search, schedules.pareto])
@pytest.mark.parametrize(
    ("costs", "limit", "message"),
    [
        (Costs(), 1, "memory_limit_bytes needs costs with sizes: pass costs="),
        (Costs(parameters=1), nan, "memory_limit_bytes must be more than 0 bytes, not nan"),
        (Costs(parameters=1), -1, "memory_limit_bytes must be more than 0 bytes, not -1"),
    ],
)
def test_a_limit_in_bytes_needs_sizes_to_compare_with(refuse, costs, limit, message):
    with pytest.raises(ScheduleError, match=message):
        refuse(Plan(Placement.v(2), 8), costs, memory_limit_bytes=limit)


def test_what_is_not_sharded_travels_twice():
    plan = Plan(Placement((0,)), 1, replicas=4)
    costs = Costs(0, 0, 0, parameters=100, scatter=Link(0.25, 50))
    assert simulate(schedules.gpipe, plan, costs, resident=1).makespan == 0.25 + 75 / 50
    assert simulate(schedules.gpipe, plan, costs).makespan == 2 * (0.25 + 75 / 50)
    with pytest.raises(ScheduleError, match="the costs are those of 2 replicas, the plan has 4"):
        simulate(schedules.gpipe, plan, replace(costs, replicas=2))
