"""Schedules of stages of which some have copies, which run microbatches in turn."""

from inspect import cleandoc
from math import ceil, lcm

from hypothesis import given
from hypothesis import strategies as st

from fpipe import Costs, Placement, Plan, draw, simulate, verify
from fpipe.schedules import one_f_one_b


def copied(*counts):
    """A placement of stages with so many copies each, one stage on a rank."""
    ranks = iter(range(sum(counts)))
    return Placement([[next(ranks) for _ in range(count)] for count in counts])


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
