"""The pass that moves residuals to the host, or recomputes them, against closed forms and its own promises."""

import re
from math import floor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe import Costs, Link, Placement, Plan, ScheduleError, footprint, lower, offload, schedules, simulate, verify
from fpipe.effects import Discard, Fetch, Forward, Offload, Recompute, Residuals
from fpipe.programs.residuals import MOVES
from fpipe.programs.verifier import check
from fpipe.schedules import CATALOGUE
from fpipe.tables import TABLE
from fpipe.timelines.simulator import simulate_programs
from tests.support import cases
from tests.support.combinations import examples, few, one_in, thorough


def least(schedule, plan, costs, **options):
    """The least limit that the pass names when it is asked for the impossible."""
    with pytest.raises(ScheduleError) as refused:
        lower(schedule, plan, offload=offload(1e-6, costs, **options))
    return float(re.search(r"\((\d+) bytes\)", str(refused.value))[1])


def most(programs, costs):
    return max(each.total for each in footprint(programs, costs))


def steps(samples):
    """Samples (time, level) at which the level is another one."""
    return [each for before, each in zip([(0, 0), *samples], samples, strict=False) if each[1] != before[1]]


@one_in(3)
@pytest.mark.parametrize("p", few(range(3, 9), (3, 4, 8)))
def test_the_least_limit_of_1f1b_at_no_time_lost(p):
    # Copies that take `out` go one after the other from the first forward's end on, and rank 0 is fullest at the end of
    # its last warm-up forward, which starts at (p - 1) F: by then floor((p - 2) F / max(out, F)) are done. Then a
    # forward and a fetch add one, a backward and the end of a copy take one (PipeOffload, arXiv 2503.01328).
    plan, forward = Plan(Placement.loop(p), 3 * p), 1.0
    for out in (0.25, 0.5, 1, 1.25, 1.5, 2, 2.5, 3, 3.5, 5, 6, 7):
        costs = Costs(forward, backward=2, residuals=1000, offload=out, fetch=out)
        expected = p - floor((p - 2) * forward / max(out, forward))
        assert least(schedules.one_f_one_b, plan, costs) == 1000 * expected


def test_a_slower_step_gives_copies_more_time():
    plan, costs = Plan(Placement.loop(2), 8), Costs(1, backward=2, residuals=1000, offload=1, fetch=1)
    assert [least(schedules.one_f_one_b, plan, costs, slower=slower) for slower in (0.0, 1.0)] == [2000, 1000]


def test_a_moved_residual_counts_until_its_copy_ends_and_from_its_fetch_on():
    # +1 at F and at the fetch, -1 at W and at the end of an offload.
    plan = Plan(Placement.loop(3), 6)
    costs = Costs(backward=2, residuals=10, offload=0.75, fetch=0.75)
    timeline = simulate(schedules.one_f_one_b, plan, costs, offload=offload(20, costs))
    changes = []
    for span in (timeline.spans[at] for at in timeline.spans.of(0)):
        kind = type(span.effect).__name__
        if kind in ("Forward", "Fetch"):
            changes.append((span.start, 10))
        if kind in ("Backward", "Discard"):
            changes.append((span.end, -10))
    times = sorted({time for time, _ in changes})
    expected = [(time, sum(change for then, change in changes if then <= time)) for time in times]
    assert steps(timeline.memory(0)) == steps(expected)
    assert any(isinstance(e, Discard) for e in timeline.spans.effects)


COSTS = st.builds(
    Costs,
    forward=st.floats(0.5, 2),
    backward_input=st.floats(0.5, 2),
    backward_weight=st.floats(0.5, 2),
    communication=st.one_of(st.floats(0, 1), st.builds(Link, st.floats(0, 0.5), st.floats(5, 50))),
    activation=st.integers(0, 5),
    residuals=st.integers(5, 20),
    deferred=st.integers(0, 10),
    parameters=st.integers(0, 10),
    offload=st.one_of(st.floats(0, 3), st.builds(Link, st.floats(0, 0.2), st.floats(5, 50))),
    fetch=st.floats(0, 3),
)


@thorough
@settings(max_examples=examples(150))
@given(
    name=st.sampled_from([n for n in CATALOGUE if n not in ("v-auto", "zb-auto")]),
    ranks=st.sampled_from([2, 4]),
    microbatches=st.sampled_from([4, 6, 10]),
    costs=COSTS,
    slower=st.sampled_from([0.0, 0.05, 0.5]),
    recompute=st.booleans(),
    share=st.floats(0, 1),
)
def test_it_keeps_to_its_limit_and_is_never_slower_than_asked(
    name, ranks, microbatches, costs, slower, recompute, share
):
    entry = CATALOGUE[name]
    plan = entry.plan(ranks, microbatches)
    schedule, how = entry.schedule(plan, costs), {"slower": slower, "recompute": recompute}
    before = lower(schedule, plan)
    try:
        lowest = least(schedule, plan, costs, **how)
    except pytest.fail.Exception:
        lowest = 0.0
    limit = 1 + lowest + share * (most(before, costs) - lowest)
    programs = lower(schedule, plan, offload=offload(limit, costs, **how))
    check(programs)
    assert most(programs, costs) <= limit * (1 + 1e-9)
    moved, still = (simulate_programs(each, costs) for each in (programs, before))
    assert moved.makespan <= still.makespan * (1 + slower) * (1 + 1e-9)
    assert moved.cost <= still.cost * (1 + slower) * (1 + 1e-9)
    for rank, program in programs.items():
        assert tuple(e for e in program if type(e) not in MOVES) == before[rank].effects
        assert recompute or not any(isinstance(e, Recompute) for e in program)


def test_what_waits_gives_room_to_recompute():
    plan = Plan(Placement.loop(4), 6)  # in the drain rank 0 waits before each backward
    costs = Costs(backward=2, residuals=10, activation=1, offload=100, fetch=100)
    assert least(schedules.one_f_one_b, plan, costs) == most(lower(schedules.one_f_one_b, plan), costs)
    again = least(schedules.one_f_one_b, plan, costs, recompute=True)
    assert again < most(lower(schedules.one_f_one_b, plan), costs)
    programs = lower(schedules.one_f_one_b, plan, offload=offload(again, costs, recompute=True))
    assert any(isinstance(e, Recompute) for e in programs[0])
    assert simulate_programs(programs, costs).makespan == simulate(schedules.one_f_one_b, plan, costs).makespan


def test_what_a_slower_step_allows_is_recomputed_before_its_use():
    """Rank 0 of 1F1B waits for its first gradient and in the drain; two of six are made again there."""
    plan, costs = Plan(Placement.loop(4), 16), Costs(backward=2, residuals=10, offload=1000, fetch=1000)
    with pytest.raises(ScheduleError, match="with residuals moved, the least limit is 40 B"):
        lower(schedules.one_f_one_b, plan, offload=offload(30, costs, recompute=True))
    programs = lower(schedules.one_f_one_b, plan, offload=offload(30, costs, slower=0.1, recompute=True))
    assert [sum(isinstance(e, Recompute) for e in program) for program in programs.values()] == [6, 0, 0, 0]
    assert most(programs, costs) == 30
    assert simulate_programs(programs, costs).makespan == 57 + 4


def test_a_slower_step_is_no_slower_than_asked_in_a_loop_without_a_barrier():
    """The last rank of ZB-H2 begins three forwards late, so that delays of the first one are hidden in the makespan."""
    plan, costs = Plan(Placement.loop(4), 8), Costs(residuals=10, deferred=5, offload=3, fetch=3)
    assert least(schedules.zb_h2, plan, costs, slower=0.2, recompute=True) == 50  # 49 would cost 29
    moved = simulate("zb-h2", plan, costs, offload=offload(50, costs, slower=0.2, recompute=True))
    assert moved.cost <= 1.2 * simulate("zb-h2", plan, costs).cost == pytest.approx(28.8)


def test_a_schedule_that_moves_residuals_itself_stays():
    plan, costs = Plan(Placement.loop(1), 2), Costs(residuals=10)

    def own(rank, plan):
        for m in range(2):
            yield from (Forward(0, m), Recompute(0, m), *schedules_backward(m))

    def schedules_backward(m):
        yield from (e for e in schedules.gpipe(0, plan) if not isinstance(e, Forward) and e.microbatch == m)

    assert lower(own, plan, offload=offload(1, costs)) == lower(own, plan)


@pytest.mark.parametrize(
    ("name", "options", "resident"), [("seq-1f1b", {"slices": 2}, None), ("1f1b", {"replicas": 2}, 1)]
)
@pytest.mark.parametrize("recompute", [False, True])
def test_recomputing_is_no_way_out_for_slices_and_gathered_stages(name, options, resident, recompute):
    plan, costs = Plan(Placement.loop(4), 8, **options), Costs(residuals=10)
    with pytest.raises(ScheduleError, match=r"the least limit is .* give that, allow") as refused:
        lower(name, plan, resident=resident, offload=offload(1, costs, recompute=recompute))
    assert "recompute" not in str(refused.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: offload(0, Costs(residuals=1)), "must be more than 0 bytes"),
        (lambda: offload(10, Costs()), "needs costs with sizes"),
        (lambda: offload(10, Costs(residuals=1), slower=-0.1), "slower must be a share of the step"),
        (
            lambda: lower("gpipe", Plan(Placement.loop(2), 4), offload=offload(10, Costs(residuals=[1, 2, 3]))),
            "residuals has 3 entries",
        ),
        (
            lambda: lower("1f1b", Plan(Placement.loop(4), 8), offload=offload(5, Costs(residuals=10))),
            r"rank \d can't keep to 5 B: with residuals moved, the least limit is 10 B .* at no time lost; give that, "
            r"allow a slower step \(slower=0.1\), let residuals be recomputed",
        ),
    ],
)
def test_what_can_not_be_is_refused(make, message):
    with pytest.raises(ScheduleError, match=message):
        make()


def test_the_cost_of_a_copy_is_a_time_or_that_of_a_link():
    costs = Costs(residuals=[10, 30], offload=Link(0.5, 20), fetch=[2, 3], scale=[1, 2], forward=[1, 4])
    assert [costs.time(Offload(1, m)) for m in (0, 1)] == [2.0, 3.5]
    assert [costs.time(Fetch(1, m)) for m in (0, 1)] == [3.0, 6.0]
    assert [costs.time(Recompute(1, m)) for m in (0, 1)] == [4.0, 8.0]
    assert Costs(recompute=0.5).time(Recompute(0, 0)) == 0.5
    assert TABLE.gives(Fetch(0, 3), Plan(Placement.loop(1), 4)) == (Residuals(0, 3),)


def test_waits_for_the_host_have_a_cause():
    plan = Plan(Placement.loop(2), 4)
    costs = Costs(backward=2, residuals=10, offload=4, fetch=4)
    timeline = simulate(schedules.gpipe, plan, costs, offload=offload(20, costs, slower=10.0))
    assert sum(cause["offload"] for cause in timeline.causes) > 0
    assert "offload" not in simulate(schedules.gpipe, plan, costs).cause_names
    assert {"offload", "fetch"} == set(timeline.drawn_lanes)
    assert verify(schedules.gpipe, plan, costs=costs, offload=offload(20, costs, slower=10.0)).peak_bytes[0] <= 20


@pytest.mark.parametrize("name", cases.MOVING)
def test_memory_over_time_ends_at_nothing_where_copies_take_no_time(name):
    # What is given up and comes back at one moment has one life that ends there and one that begins.
    schedule, place = cases.MOVING[name]
    timeline = simulate(schedule, Plan(place(4), 8), Costs(activation=1, residuals=3))
    for rank in range(4):
        samples = timeline.memory(rank)
        assert min(level for _, level in samples) >= 0
        assert samples[-1][1] == 0
