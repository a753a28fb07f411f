"""Schedules and search for plans whose stages are not all trained."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe import Costs, Edges, Placement, Plan, draw, lower, schedules, simulate
from fpipe.programs.verifier import check
from fpipe.schedules.bounds import lower_bound
from fpipe.schedules.catalogue import CATALOGUE
from fpipe.schedules.cuts import existing, recut_for, recut_trained
from tests.support.combinations import EFFORT, examples, few, thorough

SUBSETS = st.sets(st.integers(0, 5))
TIMES = st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=6, max_size=6)


@settings(max_examples=examples(60))
@given(
    placement=st.sampled_from([Placement.loop(6), Placement.loop(3, 2), Placement.v(3), Placement((0, 0, 1, 1, 1, 0))]),
    skips=st.booleans(),
    trained=SUBSETS,
    times=st.tuples(TIMES, TIMES, TIMES),
    limit=st.sampled_from([1.0, 1.5, 2.0, 3.0, None]),
)
def test_an_order_for_costs_verifies_and_keeps_to_its_limit(placement, skips, trained, times, limit):
    edges = Edges([(), (), (0,), (0, 1), (2, 3), (4,)]) if skips else Edges(())
    plan = Plan(placement, 5, edges, trained=trained)
    costs = Costs(*times, communication=0.25)
    schedule = schedules.zb_auto(plan, costs, limit, effort=EFFORT)
    check(lower(schedule, plan))
    timeline = simulate(schedule, plan, costs)
    assert limit is None or max(timeline.peak_in_flight) <= limit
    assert timeline.cost >= lower_bound(plan, costs, limit) * (1 - 1e-9)


@settings(max_examples=examples(30))
@given(
    name=st.sampled_from(["zb-v", "v-half", "v-min", "v-auto"]), trained=SUBSETS, times=st.tuples(TIMES, TIMES, TIMES)
)
def test_orders_on_a_v_verify_and_keep_to_their_limit(name, trained, times):
    plan, costs, limit = Plan(Placement.v(3), 5, trained=trained), Costs(*times), 2.5
    schedule = CATALOGUE[name].schedule(plan, costs, limit, effort=EFFORT)
    check(lower(schedule, plan))
    most = {"zb-v": 3, "v-half": 2.5, "v-min": 2.5, "v-auto": limit}[name]
    assert max(simulate(schedule, plan, costs).peak_in_flight) <= most


def test_the_order_is_one_for_the_halves_that_exist():
    plan = Plan(Placement.loop(3), 4)
    assert draw(schedules.zb_auto(plan, Costs(), 3), plan) == (
        """
rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
rank 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
""".strip()
    )
    frozen = replace(plan, trained=[1])
    assert draw(schedules.zb_auto(frozen, Costs(), 3), frozen) == (
        """
rank 0  F0 F1 F2 F3
rank 1  .  F0 F1 F2 W0 F3 W1 .  W2 .  W3
rank 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3
""".strip()
    )


@thorough
@pytest.mark.parametrize(("trained", "most"), few([([3], 16.0), ([2, 3], 19.0), ([0], 24.0)], slice(1)))
def test_search_is_faster_where_less_is_trained(trained, most):
    plan = Plan(Placement.loop(4), 8)
    whole = schedules.search(plan, memory_limit=4, chunks=(1, 2)).timeline.cost
    found = schedules.search(replace(plan, trained=trained), memory_limit=4, chunks=(1, 2))
    assert found.lower_bound <= found.timeline.cost <= most <= whole == 24
    check(lower(found.schedule, found.plan))
    every = schedules.pareto(replace(plan, trained=trained), chunks=(1, 2))
    assert min(result.timeline.cost for result in every) <= found.timeline.cost


def test_costs_of_another_cut_have_the_halves_that_exist():
    plan = Plan(Placement.loop(2, 2), 4, trained=[1])
    costs = Costs(forward=1, backward_input=[1, 2, 4, 8], backward_weight=[1, 2, 4, 8], residuals=5, deferred=3)
    own = existing(costs, plan)
    assert (own.backward_input, own.backward_weight) == ((0, 0, 4, 8), (0, 2, 0, 0))
    assert (own.residuals, own.deferred) == ((0, 5, 5, 5), (0, 0, 0, 0))
    fused = existing(replace(costs, backward=[1, 3, 7, 15]), replace(plan, trained=[0, 2]))
    assert fused.backward == (1, 2, 7, 8)
    into = Plan(Placement.loop(2), 4, trained=recut_trained(plan.trained, 4, 2))
    assert into.trained == {0}
    halves = recut_for(costs, plan, into)
    assert (halves.backward_input, halves.backward_weight) == ((0, 12), (2, 0))
    first = Plan(Placement.loop(2, 2), 4, trained=[0])  # the input gradients of stage 1 lead to the weights of stage 0
    assert recut_for(costs, first, replace(into, trained=[0])).backward_weight == (1 + 2, 0)
