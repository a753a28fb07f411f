"""The order of microbatches of unequal lengths, and the packing of sequences into them."""

from itertools import permutations, product
from statistics import mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe import Costs, Placement, Plan, schedules
from tests.support.combinations import few, one_in

LENGTHS = st.lists(st.integers(0, 50), max_size=7)


@given(LENGTHS)
def test_short_ones_come_first_and_last(lengths):
    order = fpipe.by_length(lengths)
    assert sorted(order) == list(range(len(lengths)))
    ordered = [lengths[i] for i in order]
    top = (len(lengths) - 1) // 2 + 1 if lengths else 0
    assert ordered[:top] == sorted(ordered[:top])
    assert ordered[top:] == sorted(ordered[top:], reverse=True)


def lognormal(count):
    """Lengths as drawn, and the same in order."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        lengths = list(rng.lognormal(0, 0.6, 16))
        yield lengths, [lengths[i] for i in fpipe.by_length(lengths)]


def makespan(schedule, lengths):
    return fpipe.simulate(schedule, Plan(Placement.loop(4), 16), Costs(scale=lengths)).makespan


@pytest.mark.parametrize("schedule", [schedules.one_f_one_b, schedules.zb_h1])
def test_pipelines_wait_less(schedule):
    drawn, ordered = zip(
        *([makespan(schedule, n) / (3 * sum(n)) - 1 for n in each] for each in lognormal(10)), strict=True
    )
    assert mean(ordered) < 0.8 * mean(drawn)


def test_gpipe_takes_as_long_in_every_order():
    """A flow shop whose jobs take equally long on all machines: the sum, and once for each other rank the longest."""
    for drawn, ordered in lognormal(3):
        expected = pytest.approx(3 * (sum(drawn) + 3 * max(drawn)))
        assert [makespan(schedules.gpipe, each) for each in (drawn, ordered)] == [expected] * 2


@given(LENGTHS, st.integers(1, 3))
def test_packs_are_about_equally_long(lengths, microbatches):
    if len(lengths) < microbatches:
        return
    packs = fpipe.pack(lengths, microbatches)
    assert sorted(i for each in packs for i in each) == list(range(len(lengths)))
    assert all(each and each == sorted(each) for each in packs)
    choices = product(range(microbatches), repeat=len(lengths))
    totals = (
        [sum(n for n, at in zip(lengths, c, strict=True) if at == m) for m in range(microbatches)] for c in choices
    )
    best = min(map(max, totals))
    longest = max(sum(lengths[i] for i in each) for each in packs)
    assert longest <= (4 / 3 - 1 / (3 * microbatches)) * best + 1e-9


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fpipe.by_length([1, -2]), "length 1 is -2: a length is a number of at least 0"),
        (lambda: fpipe.pack([1, float("nan")], 1), "length 1 is nan"),
        (lambda: fpipe.pack([1, 2], 3), "2 sequences can't fill 3 microbatches: each has at least one"),
        (lambda: fpipe.pack([1, 2], 0), "microbatches must be at least 1, not 0"),
    ],
)
def test_wrong_lengths(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def searched(order, lengths, **options):
    plan, costs = Plan(Placement.loop(3), len(lengths)), Costs(scale=lengths, residuals=2, deferred=1)
    found = schedules.search(plan, costs, names=["1f1b", "zb-auto"], chunks=(1,), order=order, **options)
    assert list(found.costs.scale) == [lengths[m] for m in found.order]
    assert found.timeline.cost == fpipe.simulate(found.schedule, found.plan, found.costs).cost
    assert found.lower_bound <= found.timeline.cost * (1 + 1e-9)
    fpipe.verify(found.schedule, found.plan)
    return found


@pytest.mark.parametrize("limit", few([{}, {"memory_limit": 3}, {"memory_limit_bytes": 40}], slice(1, 2)))
def test_the_order_is_part_of_the_search(limit):
    lengths = [5.0, 1, 4, 2, 3, 9, 2, 2]
    drawn, peak, found = (searched(order, lengths, **limit) for order in ("drawn", "peak", "search"))
    assert drawn.order == tuple(range(8))
    assert peak.order == tuple(fpipe.by_length(lengths))
    assert found.timeline.cost <= min(peak.timeline.cost, drawn.timeline.cost) < drawn.timeline.cost
    assert found.bytes <= limit.get("memory_limit_bytes", found.bytes)


def test_the_searched_order_is_the_best_of_all_orders():
    """One schedule under all orders of five microbatches: exchanges find the best one."""
    lengths = [3.0, 1, 4, 2, 6]
    plan = Plan(Placement.loop(2), 5)
    found = schedules.search(plan, Costs(scale=lengths), names=["1f1b"], chunks=(1,), order="search")
    costs = (Costs(scale=each) for each in permutations(lengths))
    assert found.timeline.cost == min(fpipe.simulate("1f1b", plan, each).cost for each in costs)


def test_many_microbatches_are_exchanged_too():
    """What is left of the bubble is at most 0.85 of what the order by length leaves."""
    lengths = list(np.random.default_rng(0).lognormal(0, 0.6, 32))
    plan, options = Plan(Placement.loop(4), 32), {"names": ["zb-h1"], "chunks": (1,)}
    peak, found = (schedules.search(plan, Costs(scale=lengths), order=order, **options) for order in ("peak", "search"))
    bubbles = [each.timeline.cost - 3 * sum(lengths) for each in (peak, found)]
    assert 0 < bubbles[1] < 0.85 * bubbles[0]


def test_a_schedule_by_costs_orders_anew_for_the_order_that_is_found():
    lengths, plan = [5.0, 1, 4, 2, 3, 9], Plan(Placement.loop(2), 6)
    found = schedules.search(plan, Costs(2, 3, 1, scale=lengths), 1, names=["zb-auto"], chunks=(1,), order="search")
    again = schedules.zb_auto(found.plan, found.costs, 1)
    assert found.timeline.cost <= fpipe.simulate(again, found.plan, found.costs).cost


@pytest.mark.parametrize("costs", [{}, {"backward": 1.5}, {"backward": 3}, {"overlap": 2.5}])
def test_the_bound_of_a_searched_order_holds_in_every_order(costs):
    lengths, plan = [3.0, 1, 4, 2], Plan(Placement.loop(2), 4)
    options = {"names": ["1f1b", "zb-h1"], "chunks": (1,)}
    found = schedules.search(plan, Costs(scale=lengths, **costs), order="search", **options)
    orders = [Costs(scale=each, **costs) for each in permutations(lengths)]
    least = min(fpipe.simulate(name, plan, each).cost for each in orders for name in options["names"])
    work = 10 * (1 + min(2, costs.get("backward", 2))) if "overlap" not in costs else 0
    assert work <= found.lower_bound <= least <= found.timeline.cost


@pytest.mark.parametrize(
    "options",
    [{"host": 0.5}, {"memory_limit_bytes": 60.0}],  # the time beside layers, and residuals that are recomputed
)
def test_the_bound_of_a_searched_order_counts_no_more_than_the_work_of_layers(options):
    plan, costs = Plan(Placement([0, 0, 1, 1]), 4), Costs(scale=[3, 1, 4, 2], residuals=[8, 1, 1, 1], backward=1.5)
    found = schedules.search(plan, costs, order="search", layouts=True, names=["1f1b"], chunks=(1,), **options)
    assert found.lower_bound == 10 * 4 * 2.5 / 2 < found.timeline.cost
    assert (found.offload is not None) == ("memory_limit_bytes" in options)


@one_in(2)
@pytest.mark.parametrize("options", [{"names": ["v-auto"]}, {"names": ["zb-auto", "v-auto"], "layouts": True}])
def test_every_engine_orders_microbatches(options):
    lengths = [5.0, 1, 4, 2]
    plan = Plan(Placement([0, 0, 1, 1]) if "layouts" in options else Placement.v(2), 4)
    costs = Costs(1, 1, 1, scale=lengths)
    drawn, peak, found = (
        schedules.search(plan, costs, 1.5, order=order, **options) for order in ("drawn", "peak", "search")
    )
    assert found.timeline.cost <= min(drawn.timeline.cost, peak.timeline.cost) < drawn.timeline.cost
    assert list(found.costs.scale) == [lengths[m] for m in found.order]
    assert found.timeline.cost == fpipe.simulate(found.schedule, found.plan, found.costs).cost


def test_equal_lengths_stay_as_drawn():
    found = schedules.search(Plan(Placement.loop(2), 4), names=["1f1b"], order="search")
    assert (found.order, found.costs.scale) == ((0, 1, 2, 3), ())


def test_unknown_orders():
    with pytest.raises(TypeError, match="order must be 'drawn' or 'peak' or 'search', not 'valley'"):
        schedules.search(Plan(Placement.loop(2), 4), order="valley")
