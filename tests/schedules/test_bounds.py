"""No program costs less than the bounds at its own limits: random ones, all small ones, and the proved optima."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe import Costs, Edges, Link, Placement, Plan, ScheduleError, lower, simulate, verify
from fpipe.costs import Shared
from fpipe.effects import Backward, BackwardInput, BackwardWeight, Deferred, Forward, Residuals
from fpipe.programs.footprint import footprint, lasting_bytes, least_bytes
from fpipe.schedules import from_table, gpipe, lower_bound, zb_auto
from fpipe.schedules.bounds import bound_in_any_order
from fpipe.schedules.flights import Flights
from fpipe.timelines.simulator import simulate_programs
from tests.schedules.test_optima import problem
from tests.support.combinations import examples
from tests.support.instances import CHAINS

quarters = st.integers(0, 12).map(lambda n: n / 4)


@st.composite
def problems(draw):
    """A plan whose stages are a chain, and costs of backwards that are shorter fused, or in halves."""
    p, m = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    places = [Placement.loop(p), Placement.loop(p), Placement.v(p), Placement([p - 1 - r for r in range(p)])]
    plan = Plan(draw(st.sampled_from(places)), m)
    per_stage = quarters | st.lists(quarters, min_size=plan.stages, max_size=plan.stages)
    factors = st.just(()) | st.lists(st.integers(1, 12).map(lambda n: n / 4), min_size=m, max_size=m)
    sizes = {name: draw(per_stage) for name in ("residuals", "deferred", "activation", "parameters", "gradients")}
    times = {name: draw(per_stage) for name in ("forward", "backward_input", "backward_weight")}
    both = (Residuals(0, 0), Residuals(plan.stages - 1, 0))
    shared = [Shared(0.25, both)] if plan.stages > 1 and isinstance(sizes["residuals"], float) else ()
    shared = shared if sizes["residuals"] and draw(st.booleans()) else ()
    return plan, Costs(
        **times,
        **sizes,
        backward=draw(st.none() | per_stage),
        communication=draw(quarters),
        scale=draw(factors),
        sizes=draw(factors),
        shared=shared,
    )


@pytest.mark.parametrize("kinds", [*product((Residuals, Deferred), repeat=2)])
def test_bytes_that_stages_of_a_rank_share_count_for_neither(kinds):
    names = [kind(stage, 0) for kind, stage in zip(kinds, (0, 3), strict=True)]
    flights = Flights(Plan(Placement.v(2), 2), Costs(residuals=10, deferred=10, shared=[Shared(8, names)]))
    assert [flights._alone(name) for name in names] == [2, 2]


def any_program(plan, rng):
    """An order of all effects at random: backwards fused or not, input gradients of microbatches in any order."""
    table = {rank: [] for rank in range(plan.ranks)}
    forwards, weights = [0] * plan.stages, [0] * plan.stages
    inputs = [set() for _ in range(plan.stages)]
    fused, late = rng.choice((0, 0.5, 1)), rng.choice((0.2, 1, 5))
    while min(weights) < plan.microbatches:
        ready = []
        for s in range(plan.stages):
            if forwards[s] < plan.microbatches and (not s or forwards[s - 1] > forwards[s]):
                ready.append((1 / late, Forward(s, forwards[s])))
            for m in range(forwards[s]):
                if m not in inputs[s] and (s + 1 == plan.stages or m in inputs[s + 1]):
                    is_whole = m == weights[s] and rng.random() < fused
                    ready.append((late, Backward(s, m) if is_whole else BackwardInput(s, m)))
            if weights[s] in inputs[s]:
                ready.append((1, BackwardWeight(s, weights[s])))
        (_, effect), *_ = rng.choices(ready, [weight for weight, _ in ready])
        s = effect.stage
        forwards[s] += isinstance(effect, Forward)
        weights[s] += isinstance(effect, Backward | BackwardWeight)
        if isinstance(effect, Backward | BackwardInput):
            inputs[s].add(effect.microbatch)
        table[plan.rank_of(s, 0)].append(effect)
    return from_table(table)


@settings(max_examples=examples(250), deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_no_program_costs_less_than_the_bound_of_its_memory(problem, rng):
    plan, costs = problem
    schedule = any_program(plan, rng)
    verify(schedule, plan)
    timeline = simulate(schedule, plan, costs)
    peaks, most = timeline.peak_in_flight, max(account.total for account in footprint(lower(schedule, plan), costs))
    for limits in product({None, max(peaks), tuple(peaks)}, {None, most or None}):
        for bound in lower_bound, bound_in_any_order:
            assert timeline.cost >= bound(plan, costs, limits[0], memory_limit_bytes=limits[1]) * (1 - 1e-9)


@settings(max_examples=examples(100), deadline=None)
@given(problems(), st.integers(1, 5))
def test_no_order_that_is_searched_costs_less_than_the_bound(problem, limit):
    """Those are near the bound, as random ones are not: at its cost, or at little more."""
    plan, costs = problem
    schedule = zb_auto(plan, costs, limit)
    within = max(account.total for account in footprint(lower(schedule, plan), costs)) or None
    cost = simulate(schedule, plan, costs).cost
    for limit_bytes in {None, within}:
        assert cost >= lower_bound(plan, costs, limit, memory_limit_bytes=limit_bytes) * (1 - 1e-9)


@settings(max_examples=examples(40), deadline=None)
@given(problems(), st.floats(1, 20), st.randoms(use_true_random=False))
def test_the_bound_in_any_order_is_the_same_in_all_orders(problem, limit, rng):
    plan, costs = problem
    bound = bound_in_any_order(plan, costs, memory_limit_bytes=limit)
    numbers = rng.sample(range(plan.microbatches), plan.microbatches)
    scale, sizes = ([each[m] for m in numbers] if each else () for each in (costs.scale, costs.sizes))
    ordered = replace(costs, scale=scale, sizes=sizes)
    assert bound_in_any_order(plan, ordered, memory_limit_bytes=limit) == pytest.approx(bound, rel=1e-12)
    assert bound <= lower_bound(plan, ordered, memory_limit_bytes=limit) * (1 + 1e-9)


def words(stage, microbatches):
    """All orders of a rank's effects, with each backward fused or in halves."""

    def longer(word, forwards, inputs, weights):
        if weights == microbatches:
            yield word
        if forwards < microbatches:
            yield from longer([*word, Forward(stage, forwards)], forwards + 1, inputs, weights)
        for m in {*range(forwards)} - inputs:
            yield from longer([*word, BackwardInput(stage, m)], forwards, inputs | {m}, weights)
            if m == weights:
                yield from longer([*word, Backward(stage, m)], forwards, inputs | {m}, weights + 1)
        if weights in inputs:
            yield from longer([*word, BackwardWeight(stage, weights)], forwards, inputs, weights + 1)

    return longer([], 0, frozenset(), 0)


@cache
def every_program(plan):
    programs = []
    for each in product(*(list(words(stage, plan.microbatches)) for stage in range(plan.stages))):
        lowered = lower(from_table(dict(enumerate(each))), plan)
        try:
            verify(from_table(dict(enumerate(each))), plan)
        except ScheduleError:  # the ranks wait for each other
            continue
        programs.append(lowered)
    return programs


def least_costs(plan, costs):
    """By limit in bytes, the least cost of all programs."""
    least = {}
    for programs in every_program(plan):
        peak = max(account.total for account in footprint(programs, costs))
        least[peak] = min(least.get(peak, float("inf")), simulate_programs(programs, costs).cost)
    return {limit: min(cost for peak, cost in least.items() if peak <= limit) for limit in sorted(least)}


@pytest.mark.parametrize(
    ("costs", "bounds"),
    [
        # By bytes the least cost of all programs, and the bound.
        (Costs(1, 2, 2, backward=3, residuals=2, deferred=1), {2: (14, 13), 3: (13, 13), 4: (10, 10)}),
        (Costs(1, 2, 2, backward=1.5, residuals=2, deferred=1), {2: (10, 10), 3: (10, 10), 4: (7.5, 7.5)}),
        # A weight gradient that needs more than residuals do.
        (
            Costs(2, 2, [3, 1], backward=[4, 4], residuals=2, deferred=3),
            {2: (24, 20), 3: (20, 20), 4: (15, 14), 5: (15, 14), 6: (14, 14)},
        ),
        (
            Costs([1, 2], 1, 1, backward=1.75, residuals=1, deferred=1, communication=0.5),
            {1: (13.5, 13.5), 2: (9.75, 9.75)},
        ),
    ],
)
def test_all_programs_of_two_microbatches_on_two_ranks(costs, bounds):
    plan = Plan(Placement.loop(2), 2)
    least = least_costs(plan, costs)
    assert {
        limit: (cost, lower_bound(plan, costs, memory_limit_bytes=limit)) for limit, cost in least.items()
    } == bounds
    assert all(bound <= cost for cost, bound in bounds.values())


@pytest.mark.parametrize("instance", CHAINS, ids=str)
def test_a_backward_in_the_time_of_its_halves_changes_no_bound(instance):
    (plan, costs, limit), b, w = problem(instance), instance.inputs, instance.weight
    bound = lower_bound(plan, costs, memory_limit_bytes=limit)
    for backward in b + w, b + w + 1:  # no order with fused backwards is faster than the optimum
        fused = replace(costs, backward=backward)
        assert lower_bound(plan, fused, memory_limit_bytes=limit) == bound <= CHAINS[instance]
    shorter = lower_bound(plan, replace(costs, backward=b + w / 2), memory_limit_bytes=limit)
    assert lower_bound(plan, replace(costs, backward=b + w / 2)) <= shorter < bound


@pytest.mark.parametrize(
    ("placement", "limit", "bound"),
    [
        # 16 microbatches on rank 0, two at a time: F, the way of 3 (F + I) and I with residuals, and W.
        (Placement.loop(4), 4, 16 * (2 * (1 + 3 * 2.5 + 1.5) + 1) / 4),
        # On each rank of a V two chunks, one away for more stages and one for fewer: 7 in all.
        (Placement.v(4), 2, 16 * (2 * (2 + 7 * 2.5 + 3) + 2) / 2),
    ],
)
def test_a_limit_in_bytes_counts_with_measured_times(placement, limit, bound):
    costs = Costs(1, 1.5, 1.25, backward=2.5, residuals=2, deferred=1)
    assert lower_bound(Plan(placement, 16), costs, memory_limit_bytes=limit) == pytest.approx(bound)


def test_input_gradients_in_another_order_are_not_below_the_bound():
    """The longest microbatch comes back first, and rank 0 ends with a short one."""
    plan, costs = Plan(Placement.loop(3), 3), Costs(1 / 64, [0.5, 1 / 64, 1], 0, scale=[1, 1, 4])

    def cost(order):
        effects = {
            rank: [
                *(Forward(rank, m) for m in range(3)),
                *(BackwardInput(rank, m) for m in order),
                *(BackwardWeight(rank, m) for m in range(3)),
            ]
            for rank in range(3)
        }
        verify(from_table(effects), plan)
        return simulate(from_table(effects), plan, costs).cost

    assert lower_bound(plan, costs) <= cost([2, 1, 0]) < cost([0, 1, 2])


def test_a_rank_waits_for_its_last_gradient_where_whole_weight_gradients_do_not_fit():
    """Three while a microbatch is at the next rank and back, on each rank, are more than there are before the last one.

    So a rank runs two, and waits for what is left of that time.
    """
    p, m, (f, b, w, c) = 8, 24, (29.5, 28.1, 23.4, 0.8)
    plan, costs = Plan(Placement.loop(p), m), Costs(f, b, w, communication=c, residuals=1, deferred=1)
    bound = lower_bound(plan, costs, memory_limit_bytes=20)
    assert bound == pytest.approx(m * (f + b + w) + f + b + 2 * c - 2 * w)
    assert simulate(zb_auto(plan, costs, memory_limit_bytes=20), plan, costs).cost == pytest.approx(bound)


@pytest.mark.parametrize(("residuals", "deferred"), [(5, 3), (1, 3), (3, 0)])
def test_a_limit_that_no_program_keeps_has_a_bound(residuals, deferred):
    costs = Costs(residuals=residuals, deferred=deferred)
    assert lower_bound(Plan(Placement.loop(3), 4), costs, memory_limit_bytes=2) >= 4 * 3 + 2


def test_a_limit_in_bytes_is_one_of_all_that_a_rank_has():
    plan, costs = Plan(Placement.loop(4), 8), Costs(residuals=2, deferred=1)
    whole = replace(costs, parameters=100, optimizer=2, prepared=10)
    assert lasting_bytes(plan, whole) == [300.0] * 4
    for limit in 2, 4, 8:
        bound = lower_bound(plan, whole, memory_limit_bytes=310 + limit)
        assert bound == lower_bound(plan, costs, memory_limit_bytes=limit) > lower_bound(plan, costs)
    sharded = replace(plan, replicas=2)
    assert lower_bound(sharded, whole, memory_limit_bytes=160 + 4) == lower_bound(plan, costs, memory_limit_bytes=4)


def test_sums_of_gradients_are_not_there_before_the_first_one():
    """At its peak GPipe has all residuals and no sum: with the sum taken off the limit, one microbatch would fit."""
    plan, costs = Plan(Placement.loop(2), 2), Costs(1, 1, 0, residuals=10, gradients=5)
    (limit,) = {account.total for account in footprint(lower(gpipe, plan), costs)}
    assert (limit, least_bytes(plan, costs)) == (20, [5, 5])
    cost = simulate(gpipe, plan, costs).cost
    assert lower_bound(plan, costs, memory_limit_bytes=20) <= cost < lower_bound(plan, costs, memory_limit_bytes=15)


def test_of_an_output_a_transfer_is_what_the_next_stage_reads():
    plan = Plan(Placement.loop(2), 1)
    costs = Costs(activation=[100, 0], reads={(0, 1): 10}, communication=Link(0, 10))
    assert simulate("1f1b", plan, costs).cost == 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1
    assert lower_bound(plan, costs) == 7  # without the weight gradient of the second stage, which may be late


def test_the_published_bound_is_of_chains():
    # The last stage of a V reads all others, which read the batch: no chunk waits for another one's forward.
    v, flat = Plan(Placement.v(4), 8), Edges([()] * 7 + [tuple(range(7))])
    assert lower_bound(v, Costs(), memory_limit=2) == 6 * 8 + 6 * 4 - 3 * 4 - 1
    assert lower_bound(replace(v, edges=flat), Costs(), memory_limit=2) <= 6 * 8 + 2
