"""What search finds is no worse than what it could have found, keeps the limit, stays above the bound, and runs."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fpipe
from fpipe import Costs, Edges, Link, Placement, Plan, ScheduleError, handlers, lower, simulate, verify
from fpipe.programs.footprint import footprint
from fpipe.schedules import CATALOGUE, gpipe, lower_bound, pareto, search, zb_auto
from fpipe.schedules.catalogue import shares
from fpipe.schedules.cuts import recut
from fpipe.schedules.partitions import blocks
from fpipe.schedules.space import CHUNKS, limits_of_ranks
from fpipe.timelines.simulator import simulate_programs
from tests.support import cases, jobs
from tests.support.combinations import EFFORT, PAIRS, examples, few, sample, thorough

number = st.integers(0, 8).map(lambda n: n / 4)


@st.composite
def models(draw):
    """Ranks, microbatches and costs of a model that is cut into one stage on each rank."""
    p = draw(st.sampled_from([1, 2, 3, 4, 6]))
    per_stage = st.one_of(number, st.lists(number, min_size=p, max_size=p))
    costs = Costs(draw(per_stage), draw(per_stage), draw(per_stage), communication=draw(number))
    return Plan(Placement.loop(p), draw(st.sampled_from([1, 2, 3, 4, 8, 12]))), costs


def admitted(plan, costs, limit=None, chunks=(1, 2, 3), effort=EFFORT):
    """Every named schedule that takes the model, as (name, plan, costs, timeline)."""
    for entry in CATALOGUE.values():
        for v in chunks if entry.any_chunks else (entry.chunks,):
            try:
                cut = entry.plan(plan.ranks, plan.microbatches, v)
                own = recut(costs, plan.stages, cut.stages)
                yield entry.name, cut, own, simulate(entry.schedule(cut, own, limit, effort=effort), cut, own)
            except ScheduleError:
                continue


@settings(max_examples=examples(25))
@given(models())
def test_no_schedule_goes_below_the_bound(model):
    plan, costs = model
    for name, cut, own, timeline in admitted(plan, costs):
        limit = max(timeline.peak_in_flight)
        assert timeline.cost >= lower_bound(cut, own, limit) * (1 - 1e-12), (name, cut)


@thorough
@settings(max_examples=examples(15))
@given(models(), st.sampled_from([None, 1, 2, 3.5]))
def test_nothing_that_was_tried_is_better(model, limit):
    plan, costs = model
    within = [
        timeline.cost
        for _, cut, _, timeline in admitted(plan, costs, limit, effort=1)
        if cut.edges == Edges.chain(cut.stages) and (limit is None or max(shares(timeline)) <= limit + 1e-9)
    ]  # others are no equal parts of the model, and not tried
    found = search(plan, costs, limit, chunks=(1, 2, 3))
    assert found.timeline.cost == pytest.approx(min(within), rel=1e-9)
    assert found.lower_bound <= found.timeline.cost * (1 + 1e-12)
    assert limit is None or found.peak <= limit + 1e-9
    verify(found.schedule, found.plan)


@thorough
def test_what_is_found_is_ordered_with_all_of_the_effort():
    plan, costs = Plan(Placement.loop(4), 8), Costs(4, 6, 3, communication=0.5)
    best = search(plan, costs, 2, chunks=(2,), names=["zb-auto"])
    quick, whole = (
        simulate(zb_auto(best.plan, best.costs, 2, effort=effort), best.plan, best.costs) for effort in (0.1, 1)
    )
    assert (best.timeline.cost, best.effort) == (whole.cost, 1)
    assert whole.cost < quick.cost


@st.composite
def uneven(draw):
    """Stages on ranks, of which some have more than others."""
    ranks = draw(st.integers(2, 3))
    more = draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks + 1))
    plan = Plan(Placement(draw(st.permutations([*range(ranks), *more]))), draw(st.integers(3, 6)))
    times = st.lists(st.integers(1, 4), min_size=plan.stages, max_size=plan.stages)
    return plan, Costs(*(draw(times) for _ in range(3)), communication=draw(st.sampled_from([0, 1])))


@settings(max_examples=examples(100), deadline=None)
@given(uneven(), st.sampled_from([1, 1.5, 2, 3]))
def test_a_limit_of_shares_of_the_model_bounds_ranks_by_their_stages(model, limit):
    plan, costs = model
    limits = limits_of_ranks(plan, limit)
    timeline = simulate(zb_auto(plan, costs, limits, effort=EFFORT), plan, costs)
    assert lower_bound(plan, costs, limits) <= timeline.cost * (1 + 1e-9)


def test_a_bound_of_stages_on_ranks_unevenly_is_no_higher_than_what_is_found():
    plan = Plan(Placement([0, 1, 1]), 6)  # 1.5 microbatches of half of the model are 2.25 of the first stage
    costs = Costs([1, 4, 1], [4, 4, 2], [1, 1, 4])
    found = search(plan, costs, memory_limit=1.5, recut=False)
    assert found.lower_bound <= found.timeline.cost
    assert lower_bound(plan, costs, 1.5) > found.timeline.cost  # as if each rank had half of the model
    with pytest.raises(ScheduleError, match="memory_limit has 3 entries, the plan 2 ranks"):
        lower_bound(plan, costs, [1, 2, 3])


@pytest.mark.parametrize(
    ("plan", "costs", "limit", "bound"),
    [
        # One microbatch goes to the last stage and back: 4 forwards, 4 input gradients, 6 transfers, a weight gradient.
        (Plan(Placement.loop(4), 1), Costs(communication=1), None, 15),
        # The busiest rank.
        (Plan(Placement.loop(2), 8), Costs(forward=[1, 2]), None, 32),
        # Rank 0 runs no backward before its first forward, that of stage 1 and the way back: 1 + 1 + 5, then 3 * 5.
        (Plan(Placement.loop(2), 3), Costs(1, 5, 0, overlap=6), None, 22),
        # It runs the last of 3 forwards before the way to stage 1 and back: 3 * 5 + 5 + 1, then its own backward, 1.
        (Plan(Placement.loop(2), 3), Costs(5, 1, 0, overlap=6), None, 22),
        # max(6m, 6m + 6p - 3k - 1), two chunks on each rank, k half microbatches.
        (Plan(Placement.v(4), 8), Costs(), 2, 48 + 24 - 12 - 1),
        (Plan(Placement.v(4), 8), Costs(2, 2, 2), 2, 2 * (48 + 24 - 12 - 1)),
        (Plan(Placement.v(4), 8), Costs(), 4, 48),
        (Plan(Placement.v(4), 8), Costs(), None, 48),
        (Plan(Placement.v(4), 8), Costs(1, 1, 2), 2, 64),
        # Rank 1 begins after a forward, and rank 0 ends with the input gradient that comes last: 1 + 3 * 6 + 5.
        (Plan(Placement.loop(2), 3), Costs(1, 5, 0), None, 24),
        (Plan(Placement.loop(2), 3), Costs(1, 5, 0, backward=5), None, 24),
        # A microbatch's two chunks are in flight for 4p + 4 in all, on each rank, and for the transfers.
        (Plan(Placement.v(4), 8), Costs(), 1, 8 * (16 + 4) / 2),
        (Plan(Placement.v(5), 20), Costs(communication=0.5), 2, 20 * (20 + 4 + 8) / 4),
        # On the last rank both are in flight for 2p + 1, where three chunks are room for one microbatch.
        (Plan(Placement.v(4), 8), Costs(), 1.5, 8 * 9),
        # A chain, one stage on each rank: m S + max over r of r X - (k - 1) W + max(0, (p - 1 - r) X - (k - 1) F).
        (Plan(Placement.loop(4), 8), Costs(), 4, 24 + 6 - 3),
        (Plan(Placement.loop(4), 8), Costs(communication=0.5), 4, 24 + 9 - 3),
        # Rank 0 begins a microbatch when the one before it, or before two, has been to the last rank and back.
        (Plan(Placement.loop(4), 8), Costs(), 1, 8 * 9),
        (Plan(Placement.loop(4), 8), Costs(2, 1, 0), 2, 2 + 4 * 12),
        (Plan(Placement.loop(3), 4), Costs([1, 2, 1], 1, 1), 1, 4 * 8),
        # Rank 1 fills the 5 until its first gradient with forwards of 2, and waits 1, or is late by 1; then rank 0,
        # with 5 forwards for 10, waits 1.
        (Plan(Placement.loop(3), 12), Costs(2, 3, 2), 6, 12 * 7 + 1),
        # Factors of microbatches: rank 1 works for 20, after the first one's forward, before the least gradient.
        (Plan(Placement.loop(2), 4), Costs(1, 1, 0, scale=[1, 2, 3, 4]), None, 20 + 1 + 1),
        (Plan(Placement.loop(2), 2), Costs(scale=[1, 2]), 1, 5 + 10),
        # An overlap that hides the forward takes work off every rank.
        (Plan(Placement.v(2), 8), Costs(1, 1, 1, overlap=2), None, 32),
    ],
)
def test_the_bound(plan, costs, limit, bound):
    assert lower_bound(plan, costs, limit) == pytest.approx(bound, rel=1e-8)


def test_the_bound_in_bytes_counts_what_an_input_gradient_leaves():
    plan, costs = Plan(Placement.loop(4), 8), Costs(residuals=2, deferred=1)
    assert lower_bound(plan, costs, memory_limit_bytes=8) == 24 + 6 - 3
    assert lower_bound(plan, costs, memory_limit_bytes=5) == 1 + 4 * 8 + 1
    # Residuals are on rank 0 for 8 of a microbatch, and deferred values for 1: (8 * 2 + 1) * 8 over the bytes.
    assert lower_bound(plan, costs, memory_limit_bytes=4) == 17 * 8 / 4
    assert lower_bound(plan, costs, memory_limit_bytes=2) == 17 * 8 / 2


@pytest.mark.parametrize("k", [3, 4, 6])
@pytest.mark.parametrize("communication", [0, 0.5])
def test_an_order_is_not_below_the_bound_of_its_bytes(k, communication):
    plan, costs = Plan(Placement.loop(3), 9), Costs(1, 1, 1, communication=communication, residuals=2, deferred=1)
    programs = lower(zb_auto(plan, costs, k), plan)
    limit = max(account.live for account in footprint(programs, costs))
    assert limit <= 2 * k
    cost = simulate_programs(programs, costs).cost
    assert lower_bound(plan, costs, k) >= lower_bound(plan, costs, memory_limit_bytes=limit) >= 9 * 3
    assert cost >= lower_bound(plan, costs, k)


def test_a_limit_that_nothing_keeps_is_refused_with_the_least_that_would_do():
    plan = Plan(Placement.loop(2), 4)
    with pytest.raises(ScheduleError, match=r"keeps to 0\.25 microbatches in flight: the least is 1$"):
        search(plan, memory_limit=0.25, chunks=(1, 2))
    assert search(plan, memory_limit=1, chunks=(1, 2)).peak == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"costs": Costs([1, 2])}, "forward has 2 entries, the plan 3 stages"),
        ({"costs": Costs(communication={(0, 1): 1})}, "communication has no entry for the edge from rank 1 to rank 0"),
        ({"memory_limit": float("nan")}, "the memory limit must be more than 0 microbatches, not nan"),
        ({"memory_limit": 0}, "the memory limit must be more than 0 microbatches, not 0"),
        ({"chunks": ()}, r"chunks must be numbers of stages on a rank, at least one, and each at least 1: \(\)"),
        ({"chunks": (0,)}, r"each at least 1: \(0,\)"),
        ({"names": ()}, r"names must be a list of schedules, at least one, such as \['1f1b'\], not \(\)"),
        ({"names": ["1f1c"]}, "no schedule is called '1f1c'"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(ScheduleError, match=message):
        search(Plan(Placement.loop(3), 2), **options)


def test_no_limit_may_be_an_infinite_one():
    plan = Plan(Placement.loop(2), 4)
    assert search(plan, memory_limit=float("inf")).name == search(plan).name


def test_of_equal_costs_the_lower_peak_wins_at_any_unit():
    for scale in sample((1e-10, 1, 1e10), (1e-10, 1e10)):
        best = search(Plan(Placement.loop(4), 12), Costs(scale, scale, scale), chunks=sample(CHUNKS, (1, 2)))
        assert (best.name, best.peak) == ("zb-v", 4)
        assert best.timeline.cost == pytest.approx(36 * scale)


@thorough
def test_pareto_trades_time_for_memory():
    plan = Plan(Placement.loop(4), 12 if PAIRS else 6)
    front = pareto(plan, chunks=(1, 2))
    times, peaks = [found.timeline.cost for found in front], [found.peak for found in front]
    assert times == sorted(set(times), reverse=True)
    assert peaks == sorted(set(peaks))
    assert len(front) >= 3
    assert times[-1] == search(plan, chunks=(1, 2)).timeline.cost
    for limit in few((1, 2, 4), (2,)):
        assert min(t for t, peak in zip(times, peaks, strict=True) if peak <= limit) <= (
            search(plan, memory_limit=limit, chunks=(1, 2)).timeline.cost + 1e-9
        )


@pytest.mark.parametrize("costs", [Costs(), Costs(residuals=2, deferred=1, parameters=5, backward=1.75)])
def test_each_bound_of_the_front_is_one_in_its_own_memory(costs):
    """No result with as little memory costs less; where another needs more, it may."""
    front = pareto(Plan(Placement.loop(3), 6), costs, chunks=(1, 2), effort=EFFORT)
    assert len(front) >= 3
    for n, result in enumerate(front):
        assert all(result.lower_bound <= each.timeline.cost * (1 + 1e-9) for each in front[: n + 1])
    bounds = [result.lower_bound for result in front]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] > 0.9 * front[-1].timeline.cost
    assert costs.parameters or bounds[0] > front[-1].timeline.cost


@pytest.mark.parametrize("limit_bytes", [None, 5])
def test_each_result_of_the_front_is_made_again_by_its_limits(limit_bytes):
    costs = Costs(2, 3, 1, communication=0.5, residuals=2, deferred=0.5)
    front = pareto(Plan(Placement.loop(2), 4), costs, memory_limit_bytes=limit_bytes, chunks=(1, 2), effort=0.05)
    ordered = [result for result in front if CATALOGUE[result.name].limited]
    assert max(result.effort for result in ordered) == 0.05
    assert {result.limit_bytes for result in ordered} == {None, limit_bytes}
    for result in ordered:
        limits = limits_of_ranks(result.plan, result.limit)
        schedule = CATALOGUE[result.name].schedule(
            result.plan, result.costs, limits, memory_limit_bytes=result.limit_bytes, effort=result.effort
        )
        again = simulate(schedule, result.plan, result.costs)
        assert (again.cost, again.peak_in_flight) == (result.timeline.cost, result.timeline.peak_in_flight)


def test_with_skips_only_schedules_for_as_many_stages_are_tried():
    plan = Plan(Placement.loop(2, 2), 4, Edges([(), (0,), (0, 1), (0, 2)]))
    found = search(plan, Costs(communication=0.5))
    assert found.plan.stages == 4
    assert found.plan.edges == plan.edges
    verify(found.schedule, found.plan)


@st.composite
def stages_that_stay(draw):
    """A model whose stages are no multiple of its ranks, or are; some are chains, others have a skip."""
    count = draw(st.integers(2, 6))
    p = draw(st.integers(1, count))
    edges = Edges([(), *(((0, s - 1) if s > 1 and draw(st.booleans()) else (s - 1,)) for s in range(1, count))])
    per_stage = st.lists(number, min_size=count, max_size=count)
    costs = Costs(draw(per_stage), draw(per_stage), draw(per_stage), communication=draw(number))
    plan = Plan(Placement([min(s, p - 1) for s in range(count)]), draw(st.sampled_from([1, 3, 4])), edges)
    return plan, costs, draw(st.sampled_from([None, p]))


@settings(max_examples=examples(15), deadline=None)
@given(stages_that_stay())
def test_stages_that_stay_are_placed_on_any_number_of_ranks(model):
    plan, costs, limit = model
    found = search(plan, costs, limit, recut=False)
    verify(found.schedule, found.plan)
    assert (found.plan.ranks, found.plan.edges) == (plan.ranks, plan.edges)
    assert all(len(ranks) == 1 for ranks in found.plan.placement.holders)
    assert limit is None or found.peak <= limit * (1 + 1e-9)
    assert found.lower_bound <= found.timeline.cost * (1 + 1e-12)
    looped = replace(plan, placement=Placement([s % plan.ranks for s in range(plan.stages)]))
    assert limit or found.timeline.cost <= simulate(gpipe, looped, costs).cost * (1 + 1e-9)
    again = search(plan, costs, limit, recut=False, names=[found.name])
    assert (again.name, again.plan, again.timeline.cost) == (found.name, found.plan, found.timeline.cost)


@settings(max_examples=examples(10), deadline=None)
@given(stages_that_stay())
def test_stages_that_stay_keep_to_both_limits(model):
    plan, costs, limit = model
    costs = replace(costs, residuals=1, deferred=0.5)
    most = search(plan, costs, limit, recut=False).bytes
    fastest = search(plan, costs, limit, recut=False, memory_limit_bytes=most)
    assert fastest.is_within(limit, most)
    assert fastest.lower_bound <= fastest.timeline.cost * (1 + 1e-12)


def test_what_stages_that_stay_need_in_bytes_is_enough_as_a_limit():
    plan, costs = Plan(Placement.loop(2), 3), Costs(communication=0.5, residuals=1, deferred=0.5)
    fastest = search(plan, costs, recut=False)
    assert search(plan, costs, recut=False, memory_limit_bytes=fastest.bytes).timeline.cost == fastest.timeline.cost


@example([0.0, 0.0, 0.25, 0.0], [1, 1, 2])  # the second block ends before the long layer
@given(st.lists(number, min_size=1, max_size=7), st.lists(st.sampled_from([1, 1, 2, 4]), min_size=1, max_size=7))
def test_the_largest_block_is_as_small_as_any_cut_makes_it(times, copies):
    copies = copies[: len(times)]

    def longest(ends):
        return max(sum(times[a:b]) / count for (a, b), count in zip(pairwise(ends), copies, strict=True))

    cuts = combinations(range(1, len(times)), len(copies) - 1)
    block_of = blocks(times, copies)
    assert sorted({*block_of}) == [*range(len(copies))]
    assert block_of == sorted(block_of)
    ends = [*map(block_of.index, range(len(copies))), len(times)]
    assert longest(ends) == min(longest([0, *cut, len(times)]) for cut in cuts)


@thorough
@pytest.mark.parametrize("limit", few([None, 1.5], [1.5]))
def test_what_was_found_runs_like_any_other(limit):
    case = cases.make("attention", "interleaved_1f1b", 2, 5)[0]
    found = search(case.pipeline.plan(Placement.loop(2, 2), 5), Costs(backward_weight=0.4), limit, chunks=(2,))
    assert found.plan.stages == 4
    step = fpipe.value_and_grad(case.pipeline, found.schedule, found.plan, handler=handlers.Local())
    loss, grads = step(case.params, case.batch, case.target)
    expected = cases.reference(case, found.schedule, found.plan)
    assert torch.equal(loss, expected[0])
    assert jobs.differences(grads, expected[1]) == []


def sharded(memory_limit_bytes, effort=EFFORT, **costs):
    """Costs of one model of two ranks, each with one stage; four replicas."""
    plan = Plan(Placement.loop(2), 4, replicas=4)
    costs = Costs(2, 2, 2, residuals=40, parameters=100, gather=Link(0, 150), scatter=Link(0, 150), **costs)
    return search(plan, costs, memory_limit_bytes=memory_limit_bytes, chunks=(1, 2), effort=effort), plan, costs


@thorough
def test_whether_to_shard_over_replicas_is_searched_too():
    fastest, _, _ = sharded(None)
    assert fastest.plan.replicas == 4
    # whole parameters are summed twice as long; shards are gathered beside the compute
    assert fastest.resident is not None
    programs = lower(fastest.schedule, fastest.plan, resident=fastest.resident)
    assert fastest.footprint == footprint(programs, fastest.costs)
    assert (
        fastest.timeline.makespan
        == simulate(fastest.schedule, fastest.plan, fastest.costs, resident=fastest.resident).makespan
    )
    free, *_ = sharded(None, optimizer=0)
    assert free.bytes < fastest.bytes


@thorough
@pytest.mark.parametrize("room", few([2.6, 3, 4, 6], [3]))
def test_what_is_found_keeps_to_a_limit_in_bytes_and_is_the_fastest_of_those(room):
    fastest, plan, costs = sharded(100 * room, effort=1)
    assert fastest.bytes <= 100 * room
    every = pareto(plan, costs, chunks=(1, 2))
    within = [each.timeline.cost for each in every if each.bytes <= 100 * room]
    assert fastest.timeline.cost == pytest.approx(min(within))
    assert [each.bytes for each in every] == sorted(each.bytes for each in every)
    limited = pareto(plan, costs, memory_limit_bytes=100 * room, chunks=(1, 2))
    assert [each.timeline.cost for each in limited] == pytest.approx(within)


def test_of_equal_results_the_one_that_is_named_first_is_found():
    for names in (["1f1b", "gpipe"], ["gpipe", "1f1b"]):
        assert search(Plan(Placement.loop(1), 1), names=names).name == names[0]


def test_a_limit_in_bytes_that_nothing_keeps_to():
    with pytest.raises(ScheduleError, match=r"keeps to 10 B on a rank: the least is \d+ B, of .* whole at a time"):
        sharded(10)
    with pytest.raises(ScheduleError, match="no schedule that is known keeps to 10 B on a rank: the least is"):
        pareto(Plan(Placement.loop(2), 4), Costs(parameters=100), memory_limit_bytes=10, chunks=(1,), effort=EFFORT)


def test_one_replica_is_not_sharded():
    found = search(Plan(Placement.loop(2), 4), Costs(parameters=100), memory_limit_bytes=400, chunks=(1,))
    assert (found.resident, found.bytes) == (None, 400)


def test_of_results_that_cost_the_same_the_one_of_fewest_stages_is_found():
    found = search(Plan(Placement.loop(1), 1), Costs(), memory_limit=1)
    assert (found.plan.stages, found.timeline.cost, found.lower_bound) == (1, 3, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": ["dualpipe"], "copies": False}, "dualpipe has copies of stages: leave copies=False out"),
        ({"names": ["dualpipe"], "copies": False, "layouts": True}, "leave copies=False out"),
        ({"names": ["dualpipe"], "recut": False}, "dualpipe has copies of stages: leave recut=False out"),
    ],
)
def test_a_search_without_copies_among_schedules_of_copies_is_refused(options, message):
    with pytest.raises(ScheduleError, match=message):
        search(Plan(Placement.loop(4), 8), **options)


def test_stages_with_copies_can_not_stay():
    plan = Plan(Placement([(0, 1), 2]), 4)
    with pytest.raises(
        ScheduleError, match=r"stages of Placement.* have copies: leave recut=False out, or order the plan"
    ):
        search(plan, recut=False)
    assert search(plan, chunks=(1,), effort=EFFORT).timeline.cost > 0


def test_a_front_without_copies():
    plan, costs = Plan(Placement.loop(2), 4), Costs(1, 2, 1, overlap=3)
    names = [
        {each.name for each in pareto(plan, costs, chunks=(1,), copies=copies, effort=EFFORT)}
        for copies in (True, False)
    ]
    assert "dualpipe" in names[0] - names[1]


@thorough
def test_copies_of_tied_parameters_count_whatever_the_cut():
    costs = Costs(forward=[1, 2, 3, 2], tied=[(4, (0, 3))], parameters=[5, 1, 1, 1])
    with pytest.raises(ScheduleError, match="keeps to 12 B on a rank: the least is 20 B"):
        search(Plan(Placement.loop(4), 2), costs, memory_limit_bytes=12)
