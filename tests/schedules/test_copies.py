"""Schedules of stages of which some have copies, which run microbatches in turn."""

from dataclasses import replace
from inspect import cleandoc
from math import ceil, inf, lcm

from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe import Costs, Edges, Link, Placement, Plan, draw, footprint, lower, simulate, verify
from fpipe.costs import ROUNDING
from fpipe.schedules import lower_bound, one_f_one_b, zb_auto
from tests.support.combinations import EFFORT, examples
from tests.support.copies import copied

copies = st.lists(st.sampled_from([1, 1, 2, 3, 4]), min_size=1, max_size=5)


def test_copies_take_turns():
    plan = Plan(copied(1, 2, 1), 6)
    assert draw(one_f_one_b, plan) == cleandoc(
        """
        rank 0  F0 F1 F2 F3 F4 B0 F5 B1 .  B2 .  B3 .  B4 .  B5
        rank 1  .  F0 .  F2 B0 F4 .  .  B2 .  .  .  B4
        rank 2  .  .  F1 .  F3 .  B1 F5 .  .  B3 .  .  .  B5
        rank 3  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
        """
    )


def in_flight(counts, m):
    """By stage, the peak of each of its copies: one more than its part of what all copies of the next stage hold."""
    peaks, later = [], 0
    for count in reversed(counts):
        peaks.append(1 + ceil(later / count))
        later = count * peaks[-1]
    return [min(peak, m // count) for peak, count in zip(reversed(peaks), counts, strict=True)]


@given(copies, st.integers(1, 4))
def test_1f1b_keeps_one_more_in_flight_than_a_share_of_the_next_stages(counts, times):
    plan = Plan(copied(*counts), times * lcm(*counts))
    peaks = [
        peak for peak, count in zip(in_flight(counts, plan.microbatches), counts, strict=True) for _ in range(count)
    ]
    assert [*verify(one_f_one_b, plan).peak_in_flight] == peaks


@given(copies, st.integers(1, 4))
def test_1f1b_takes_as_long_as_with_as_many_stages_as_ranks(counts, times):
    # (m + p - 1)(F + B), as of the same number of ranks without copies, where all ranks have as much to do.
    plan = Plan(copied(*counts), times * lcm(*counts))
    cost = simulate(one_f_one_b, plan, Costs(counts, backward=[2 * count for count in counts])).cost
    most = 3 * (plan.microbatches + plan.ranks - 1)
    assert cost <= most
    if len(counts) > 1 and times > 1 and counts.count(1) >= len(counts) - 1:
        assert cost == most


@st.composite
def problems(draw):
    """A plan with copies, costs that differ by stage, by edge and by microbatch, and a limit of each rank, or none."""
    counts = draw(copies.filter(lambda counts: 1 < sum(counts) < 9))
    placement, stages = copied(*counts), len(counts)
    if stages > 1 and draw(st.booleans()):  # a rank with two stages, of which one may have copies
        placement = Placement([*placement.holders[:-1], (0,)])
    m = draw(st.integers(1, 3)) * lcm(*map(len, placement.holders))
    skips = Edges([(), *[(s - 1,) for s in range(1, stages - 1)], (0, stages - 2)]) if stages > 2 else Edges(())
    plan = Plan(
        placement,
        m,
        draw(st.sampled_from([Edges(()), skips])),
        cotangents=draw(st.sampled_from(["by_consumer", "by_rank"])),
        trained=draw(st.none() | st.sets(st.integers(0, stages - 1)).map(lambda trained: trained | {stages - 1})),
    )
    times = st.lists(st.sampled_from([1, 2, 3]), min_size=stages, max_size=stages)
    link = st.builds(Link, st.sampled_from([0, 0.5, 2]), st.sampled_from([1, 4, inf]))
    edge = [(a, b) for a in range(plan.ranks) for b in range(plan.ranks) if a != b]
    costs = Costs(
        draw(times),
        draw(times),
        draw(times),
        communication={each: draw(link) for each in edge} or 0,
        activation=1,
        residuals=draw(times),
        deferred=0.5,
        scale=draw(st.sampled_from([(), [1 + n % 3 for n in range(m)]])),
    )
    return plan, costs, draw(st.none() | st.lists(st.integers(1, 4), min_size=plan.ranks, max_size=plan.ranks))


@settings(max_examples=examples(25))
@given(problems())
def test_zb_auto_takes_copies_and_keeps_to_limits(problem):
    plan, costs, limits = problem
    schedule = zb_auto(plan, costs, limits, effort=EFFORT)
    peaks, cost = verify(schedule, plan).peak_in_flight, simulate(schedule, plan, costs).cost
    assert limits is None or all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))
    assert cost >= lower_bound(plan, costs, limits) * (1 - ROUNDING)
    if all(len(plan.stages_on(rank)) == 1 for rank in range(plan.ranks)):
        peaks = verify(one_f_one_b, plan).peak_in_flight
        if limits is None or all(peak <= limit for peak, limit in zip(peaks, limits, strict=True)):
            assert cost <= simulate(one_f_one_b, plan, costs).cost * (1 + ROUNDING)


def most_bytes(schedule, plan, costs):
    return max(account.total for account in footprint(lower(schedule, plan), costs))


@settings(max_examples=examples(25))
@given(problems(), st.sampled_from([0, 1, 3]), st.sampled_from([0, 0.5, 1]))
def test_zb_auto_takes_copies_and_keeps_to_bytes(problem, parameters, part):
    """From what an order with one microbatch in flight has, every limit is kept, up to that of the fastest order."""
    plan, costs, _ = problem
    costs = replace(costs, parameters=[parameters * (1 + stage % 2) for stage in range(plan.stages)])
    least, most = (most_bytes(zb_auto(plan, costs, limit, effort=EFFORT), plan, costs) for limit in (1, None))
    limit = least + part * max(0, most - least)
    schedule = zb_auto(plan, costs, memory_limit_bytes=limit, effort=EFFORT)
    assert most_bytes(schedule, plan, costs) <= limit * (1 + ROUNDING)
    bound = lower_bound(plan, costs, memory_limit_bytes=limit)
    assert simulate(schedule, plan, costs).cost >= bound * (1 - ROUNDING)


def test_sums_that_copies_send_at_the_end_are_not_beside_a_microbatch():
    plan = Plan(copied(2, 2), 4)
    costs = Costs((3, 3), (2, 1), (2, 3), activation=1, residuals=3, deferred=0.5, parameters=(1, 2))
    assert most_bytes(zb_auto(plan, costs, memory_limit_bytes=12), plan, costs) == 12
