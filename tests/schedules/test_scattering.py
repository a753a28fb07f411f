"""Placements that have no name, and building blocks on them: right programs, within limits, always the same."""

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe import Costs, Placement, Plan, simulate, verify
from fpipe.costs import Tied
from fpipe.schedules.filling import Filling
from fpipe.schedules.modulo import Blocks, repeated
from fpipe.schedules.partitions import Partition
from fpipe.schedules.scattering import of_ranks, scattered
from fpipe.schedules.space import Space
from fpipe.schedules.table import from_table
from fpipe.schedules.work import Room, Work, table
from tests.support.combinations import examples


def filling(plan, costs, limit=None):
    return Filling(Work.of(plan, costs), Room.counted(plan, [limit or plan.microbatches] * plan.ranks))


# Building blocks


@pytest.mark.parametrize("placement", [Placement.v(2), Placement.loop(3), Placement([0, 1, 2, 0, 3])])
def test_a_block_repeats_without_overlaps_and_its_ranks_never_wait_for_each_other_in_vain(placement):
    """Where a period is the work of the busiest rank, nothing but the first and the last microbatches makes it wait."""
    plan, costs = Plan(placement, 12), Costs([1.0 + s % 2 for s in range(placement.stages)], 1, 1)
    blocks = Blocks(filling(plan, costs))
    blocks.run(200_000)
    filled = blocks.filled()
    schedule = from_table(table(filled.words, plan))
    verify(schedule, plan)
    timeline = simulate(schedule, plan, costs)
    assert timeline.cost == pytest.approx(filled.cost)
    assert blocks.least <= filled.cost <= 1.1 * blocks.least


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=8))
def test_passes_that_fill_a_period_fit_it_however_their_times_round(times):
    """On one rank passes follow one another; without weight gradients they take as long as the period."""
    plan = Plan(Placement([0] * len(times)), 4)
    blocks = Blocks(filling(plan, Costs(times, times[::-1], 0)))
    blocks.run(0)
    assert blocks.best.period == blocks.load
    assert blocks.best.cost == pytest.approx(blocks.least)


@pytest.mark.parametrize("placement", [Placement.v(4), Placement.loop(4, chunks=2), Placement([0, 1, 2, 1, 0, 3])])
def test_a_block_repeats_after_a_longer_period_where_memory_allows_no_shorter_one(placement):
    plan, costs = Plan(placement, 12), Costs(2, 3, 1, communication=0.5)
    with_less, with_all = Blocks(filling(plan, costs, limit=2)), Blocks(filling(plan, costs))
    with_less.run(0)
    with_all.run(0)
    assert with_less.load == with_all.load == with_all.best.period < with_less.best.period
    assert with_all.least <= with_all.filled().cost < with_less.filled().cost < inf


def test_a_block_of_passes_that_take_no_time_has_a_period_too():
    plan, costs = Plan(Placement.v(2), 4), Costs(0, 0, 0, communication=1)
    filled = repeated(filling(plan, costs, limit=1))
    assert simulate(from_table(table(filled.words, plan)), plan, costs).cost == filled.cost < inf


@settings(max_examples=examples(30), deadline=None)
@given(st.data())
def test_blocks_keep_to_the_memory(data):
    stages = data.draw(st.integers(2, 6))
    ranks = data.draw(st.lists(st.integers(0, 2), min_size=stages, max_size=stages).filter(lambda r: {*r} == {0, 1, 2}))
    times = st.lists(st.integers(0, 3).map(float), min_size=stages, max_size=stages)
    plan, limit = Plan(Placement(ranks), data.draw(st.integers(1, 6))), data.draw(st.sampled_from([1, 2, 3]))
    costs = Costs(
        data.draw(times), data.draw(times), data.draw(times), communication=data.draw(st.sampled_from([0, 1]))
    )
    filled = repeated(filling(plan, costs, limit))
    if filled.words:
        schedule = from_table(table(filled.words, plan))
        assert max(verify(schedule, plan).peak_in_flight) <= limit * max(map(len, map(plan.stages_on, range(3))))
        assert simulate(schedule, plan, costs).cost == pytest.approx(filled.cost)


# Placements


def test_neighbouring_layers_on_a_rank_are_a_stage_and_ranks_are_numbered_as_they_appear():
    assert of_ranks([3, 3, 1, 0, 0, 3]) == Partition(Placement([0, 1, 2, 0]), (2, 1, 2, 1))


def test_layouts_that_are_tried_have_all_layers_and_all_ranks_and_are_always_the_same():
    times = [1.0, 2, 1, 3, 1, 2, 6]
    plan = Plan(Placement([0, 0, 0, 1, 1, 2, 2]), 6)
    space = Space.of(plan, Costs(times, times, times), None, (1, 2), layouts=True)
    layouts, again = (scattered(space, "zb-auto", 200.0, None, None, 5) for _ in range(2))
    assert layouts == again
    assert layouts
    for placement, layers in layouts:
        assert sum(layers) == 7
        assert {rank for ranks in placement.holders for rank in ranks} == {0, 1, 2}
        assert all(a != b for a, b in pairwise(placement.holders))


def layouts(plan, costs, limit_bytes, progress=None):
    space = Space.of(plan, costs, None, (1, 2), layouts=True, progress=progress)
    return scattered(space, "zb-auto", inf, None, limit_bytes, 5)


SIZED = Costs(residuals=1, parameters=12, optimizer=2)


def test_layouts_fit_the_memory_with_shards_where_whole_parameters_do_not():
    """Three layers on a rank take 144 bytes. In shards they take 27, and the whole sums of their stages."""
    plan = Plan(Placement([0, 0, 0, 1, 1, 1]), 4)
    assert not layouts(plan, SIZED, 120)
    assert layouts(replace(plan, replicas=4), SIZED, 120)
    assert not layouts(replace(plan, replicas=4), SIZED, 30)


def test_layouts_fit_the_memory_with_copies_of_tied_parameters():
    """The rank of layer 3 has a copy of layer 0's, if they are apart."""
    plan = Plan(Placement([0, 0, 1, 1]), 4, ties=((0, 3),))
    costs = replace(SIZED, tied=[Tied(12, (0, 3))])
    for sizes, are_apart in (SIZED, True), (costs, False):
        ends = [(placement.holders[0], placement.holders[-1]) for placement, _ in layouts(plan, sizes, 110)]
        assert ends
        assert any(first != last for first, last in ends) == are_apart


def test_the_search_of_placements_reports_each_that_it_tries():
    names = []
    assert layouts(Plan(Placement([0, 0, 1, 1]), 4), SIZED, 200, names.append)
    assert len(names) > 5
    assert {*names} == {"zb-auto"}
