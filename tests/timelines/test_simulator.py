"""When effects happen, against closed forms, an oracle by relaxation, and timelines small enough to do by hand."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpipe import Costs, Edges, Link, Placement, Plan, ScheduleError, lower, simulate
from fpipe.costs import ROUNDING, Shared
from fpipe.effects import (
    Activation,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Gradient,
    Overlap,
    Recv,
    Residuals,
    Send,
)
from fpipe.schedules import from_table, gpipe, interleaved_1f1b, one_f_one_b, zb_h1
from fpipe.tables import TABLE
from fpipe.timelines.simulator import simulate_programs
from tests.support.combinations import few, one_in


def close(found, expected):
    return found == pytest.approx(expected, rel=1e-12, abs=1e-12)


TIMES = [(1, 1, 1, 0), (1, 1, 1, 0.25), (1, 2, 0.5, 0.1), (0.3, 0.7, 0.9, 0.3), (2, 0, 1, 5)]


@one_in(3)
@pytest.mark.parametrize(("f", "b", "w", "c"), TIMES)
def test_gpipe_takes_what_huang_et_al_say(f, b, w, c):
    for p, m in product(range(1, 7), range(1, 13)):
        timeline = simulate(gpipe, Plan(Placement.loop(p), m), Costs(f, b, w, communication=c))
        assert close(timeline.cost, (m + p - 1) * (f + b + w) + 2 * (p - 1) * c)


@pytest.mark.parametrize(("f", "b", "w", "c"), TIMES)
def test_1f1b_takes_what_the_zero_bubble_paper_says(f, b, w, c):
    # Narayanan et al. 2019; the communication is that of Qi et al. 2024, table 2.
    for p in range(2, 7):
        for m in range(p, 19, p):
            timeline = simulate(one_f_one_b, Plan(Placement.loop(p), m), Costs(f, b, w, communication=c))
            assert close(timeline.cost, (m + p - 1) * (f + b + w) + c * (2 * (p - 1) * m / p + 2 * (p - 2)))


@pytest.mark.parametrize(("f", "b", "w", "c"), TIMES)
@pytest.mark.parametrize("v", few([2, 3, 4], [3]))
def test_interleaved_1f1b_takes_what_narayanan_et_al_say(f, b, w, c, v):
    c = min(c, f / v, (b + w) / v)
    for p in range(2, 6):
        for m in range(2 * p, 17, p):
            costs = Costs(f / v, b / v, w / v, communication=c)
            timeline = simulate(interleaved_1f1b, Plan(Placement.loop(p, v), m), costs)
            assert close(timeline.cost, m * (f + b + w) + (p - 1) * (f + b + w) / v + 2 * (p * v - 1) * c)


def relaxed(programs, costs):
    """The same start times by brute force: all start at 0, and what starts too soon is put off until nothing is."""
    plan = programs[0].plan
    events = [(rank, at) for rank, program in programs.items() for at in range(len(program))]
    effects = {(rank, at): programs[rank].effects[at] for rank, at in events}
    computes = Forward | Backward | BackwardInput | BackwardWeight | Overlap
    took = {at: Fraction(costs.time(e)) if isinstance(e, computes) else 0 for at, e in effects.items()}
    waits = {(rank, at): [((rank, at - 1), took[rank, at - 1])] if at else [] for rank, at in events}
    made = {(rank, n): (rank, at) for rank, at in events for n in TABLE.gives(effects[rank, at], plan)}
    sent = {(e.value, e.rank): event for event, e in effects.items() if isinstance(e, Send)}
    for (rank, at), effect in effects.items():
        for name in () if isinstance(effect, Send) else TABLE.needs(effect, plan):
            maker = made[rank, name]
            if isinstance(effects[maker], Recv):
                maker = sent[name, rank]
                waits[rank, at].append((maker, Fraction(costs.link(maker[0], rank).latency)))
            else:
                waits[rank, at].append((maker, took[maker]))
    starts = dict.fromkeys(events, Fraction(0))
    while late := [
        (event, start)
        for event in events
        if (start := max((starts[other] + delay for other, delay in waits[event]), default=0)) > starts[event]
    ]:
        starts.update(late)
    return {rank: [float(starts[rank, at]) for at in range(len(program))] for rank, program in programs.items()}


def split(rank, plan):
    """Chunks in waves, the halves of the backward apart by one microbatch: legal on any placement of a chain."""
    for s in plan.stages_on(rank):
        yield from (Forward(s, m) for m in plan.microbatches_of(s, rank))
    for s in reversed(plan.stages_on(rank)):
        own = plan.microbatches_of(s, rank)
        for m in own:
            yield BackwardInput(s, m)
            yield from (BackwardWeight(s, m - 1) for _ in range(m > own[0]))
        yield BackwardWeight(s, own[-1])


number = st.integers(0, 8).map(lambda n: n / 4)


@st.composite
def planned(draw):
    p = draw(st.integers(1, 4))
    placement, schedule = draw(
        st.sampled_from(
            [
                (Placement.loop(p), gpipe),
                (Placement.loop(p), one_f_one_b),
                (Placement.loop(p, 2), interleaved_1f1b),
                (Placement.v(p), split),
                (Placement.loop(p, 2), split),
            ]
        )
    )
    plan = Plan(placement, draw(st.integers(1, 6)))
    per_stage = st.lists(number, min_size=plan.stages, max_size=plan.stages)
    edges = {(a, b): draw(number) for a in range(p) for b in range(p) if a != b}
    return schedule, plan, Costs(draw(per_stage), draw(per_stage), draw(per_stage), communication=edges)


@given(planned())
def test_times_are_those_of_the_oracle(case):
    schedule, plan, costs = case
    programs = lower(schedule, plan)
    timeline, expected = simulate_programs(programs, costs), relaxed(programs, costs)
    found = {rank: [span.start for span in timeline.spans if span.rank == rank] for rank in programs}
    assert found == expected


@given(planned())
def test_every_unit_of_time_is_accounted_for(case):
    schedule, plan, costs = case
    timeline = simulate(schedule, plan, costs)
    for rank in range(plan.ranks):
        causes, busy = timeline.causes[rank], timeline.busy[rank]
        gaps = list(timeline.gaps(rank))
        assert all(close(sum(g.end - g.start for g in gaps if g.cause == cause), causes[cause]) for cause in causes)
        waits = causes["dependency"] + causes["imbalance"]
        assert close(causes["imbalance"], min(waits, max(timeline.busy) - busy))
        assert tuple(causes) == timeline.cause_names
        assert all(value >= 0 for value in causes.values())
        assert close(sum(causes.values()), timeline.makespan - busy)
        assert close(timeline.idle[rank], sum(causes.values()))
        assert close(sum(gap.end - gap.start for gap in timeline.gaps(rank)), timeline.makespan - busy)
    assert max(timeline.busy) <= timeline.cost * (1 + 1e-12)
    assert timeline.cost <= timeline.makespan


def test_rounding_errors_are_no_gaps():
    """Where a receive ends and a compute begins at sums of tenths that differ in their last bit."""
    timeline = simulate(one_f_one_b, Plan(Placement.loop(8), 16), Costs(0.1, 0.1, 0.1, communication=0.01))
    gaps = [gap for rank in range(8) for gap in timeline.gaps(rank)]
    assert min(gap.end - gap.start for gap in gaps) == pytest.approx(0.01)
    assert "host" not in timeline.cause_names


def test_a_gap_is_a_rounding_error_by_the_rounding_of_all_sums():
    """Rank 1 waits for a forward that takes longer than its own, by less or by more than sums of times may round."""

    def shortest(longer):
        timeline = simulate(gpipe, Plan(Placement.loop(2), 2), Costs(forward=[1 + longer, 1]))
        return min(gap.end - gap.start for rank in range(2) for gap in timeline.gaps(rank))

    assert shortest(ROUNDING) > 0.5
    assert shortest(100 * ROUNDING) == pytest.approx(100 * ROUNDING, rel=1e-3)


@given(planned())
def test_the_critical_path_is_a_chain_without_gaps_from_start_to_end(case):
    schedule, plan, costs = case
    timeline = simulate(schedule, plan, costs)
    path = timeline.critical_path
    assert path[0].start == 0
    assert close(path[-1].end, timeline.makespan)
    for before, after in pairwise(path):
        if isinstance(after.effect, Recv):
            assert (before.effect, before.end) == (Send(after.effect.value, after.rank), after.end)
        else:
            assert before.end == after.start


@given(planned())
def test_spans_say_what_they_waited_for(case):
    schedule, plan, costs = case
    timeline = simulate(schedule, plan, costs)
    for at, span in enumerate(timeline.spans):
        if span.track == "compute" and span.start > 0:
            assert span.waited_for != at
            assert timeline.spans[span.waited_for].end == span.start
    assert [len([s for s in timeline.spans if s.rank == r]) for r in range(plan.ranks)] == [
        len(program) for program in lower(schedule, plan).values()
    ]


def times(timeline, rank, *tracks):
    return [(s.effect, s.start, s.end) for s in timeline.spans if s.rank == rank and s.track in tracks]


def test_a_value_travels_while_its_rank_goes_on():
    timeline = simulate(gpipe, Plan(Placement.loop(2), 2), Costs(1, 1, 1, communication=3))
    assert times(timeline, 0, "compute", "send") == [
        (Forward(0, 0), 0, 1),
        (Send(Activation(0, 0), 1), 1, 4),
        (Forward(0, 1), 1, 2),
        (Send(Activation(0, 1), 1), 2, 5),
        (Backward(0, 0), 11, 13),
        (Backward(0, 1), 13, 15),
    ]
    assert times(timeline, 1, "compute", "receive") == [
        (Recv(Activation(0, 0), 0), 0, 4),
        (Recv(Activation(0, 1), 0), 0, 5),
        (Forward(1, 0), 4, 5),
        (Forward(1, 1), 5, 6),
        (Backward(1, 0), 6, 8),
        (Backward(1, 1), 8, 10),
    ]
    assert (timeline.makespan, timeline.cost, timeline.busy, timeline.idle) == (15, 15, [6, 6], [9, 9])
    assert timeline.bubble_rate == 9 / 15
    assert timeline.causes == [
        {"warm-up": 0, "dependency": 6, "transfer": 3, "imbalance": 0, "drain": 0},
        {"warm-up": 4, "dependency": 0, "transfer": 0, "imbalance": 0, "drain": 5},
    ]


def test_bytes_go_one_after_the_other_where_there_is_a_bandwidth_and_latencies_do_not():
    plan = Plan(Placement.loop(2), 3)
    costs = Costs(1, 1, 1, communication=Link(latency=10, bandwidth=4), activation=[8, 0])
    arrivals = [end for _, _, end in times(simulate(gpipe, plan, costs), 1, "receive")]
    assert arrivals == [1 + 2 + 10, 3 + 2 + 10, 5 + 2 + 10]
    plain = Costs(1, 1, 1, communication=12)
    assert [end for _, _, end in times(simulate(gpipe, plan, plain), 1, "receive")] == [13, 14, 15]


def test_a_send_that_queues_is_on_the_critical_path_behind_the_one_it_queues_for():
    table = {0: [Forward(0, 0), Forward(0, 1)], 1: [Forward(1, 0), Forward(1, 1)]}
    costs = Costs(communication=Link(0, 1), activation=[100, 0])
    timeline = simulate(from_table(table), Plan(Placement.loop(2), 2), costs)
    assert [span.effect for span in timeline.critical_path] == [
        Forward(0, 0),
        Send(Activation(0, 0), 1),
        Send(Activation(0, 1), 1),
        Recv(Activation(0, 1), 0),
        Forward(1, 1),
    ]


def test_nothing_has_no_critical_path():
    timeline = simulate(lambda rank, plan: [], Plan(Placement.loop(2), 1))
    assert (timeline.critical_path, timeline.makespan, timeline.bubble_rate, timeline.peak_in_flight) == (
        [],
        0,
        0,
        [0, 0],
    )


def test_programs_are_of_one_plan_and_each_of_its_own_rank():
    programs = lower(gpipe, Plan(Placement.loop(2), 2))
    other = lower(gpipe, Plan(Placement.loop(2), 3))
    for wrong, message in [
        ({}, "there are no programs"),
        ({0: programs[0]}, r"programs of ranks \[0\], the plan has ranks 0 to 1"),
        ({0: programs[1], 1: programs[0]}, "the program of rank 0 is one of rank 1"),
        ({0: programs[0], 1: other[1]}, r"rank 1 has a program for Plan\(.*, others have one for Plan"),
    ]:
        with pytest.raises(ScheduleError, match=message):
            simulate_programs(wrong, Costs())


def test_each_edge_has_its_own_link():
    plan = Plan(Placement.loop(3), 1)
    edges = {(0, 1): 1, (1, 2): Link(2), (2, 1): 4, (1, 0): 8}
    timeline = simulate(gpipe, plan, Costs(1, 1, 1, communication=edges))
    assert [(s.start, s.end) for r in range(3) for s in timeline.compute(r)] == [
        (0, 1),
        (22, 24),
        (2, 3),
        (12, 14),
        (5, 6),
        (6, 8),
    ]
    del edges[2, 1]
    with pytest.raises(ScheduleError, match=r"no entry for the edge from rank 2 to rank 1: it has those for \(0, 1\)"):
        simulate(gpipe, plan, Costs(communication=edges))


def test_a_fused_backward_and_an_overlap_have_times_of_their_own():
    table = {0: [Forward(0, 0), Overlap(Forward(0, 1), Backward(0, 0)), BackwardInput(0, 1), BackwardWeight(0, 1)]}
    plan = Plan(Placement.loop(1), 2)

    def ends(**costs):
        return [span.end for span in simulate(from_table(table), plan, Costs(1, 2, 4, **costs)).compute(0)]

    assert ends() == [1, 8, 10, 14]
    assert ends(backward=5) == [1, 7, 9, 13]
    assert ends(overlap=5) == [1, 6, 8, 12]
    assert ends(backward=7, overlap=[5.5]) == [1, 6.5, 8.5, 12.5]


def test_a_rank_with_more_work_makes_the_others_wait_and_that_is_imbalance():
    timeline = simulate(one_f_one_b, Plan(Placement.loop(2), 4), Costs(forward=[1, 3], backward=[2, 3]))
    assert timeline.busy == [12, 24]
    expected = {"warm-up": 0, "dependency": 3, "transfer": 0, "imbalance": 12, "drain": 0}
    assert timeline.causes[0] == pytest.approx(expected)
    assert timeline.causes[1] == {"warm-up": 1, "dependency": 0, "transfer": 0, "imbalance": 0, "drain": 2}


def test_the_cost_leaves_a_late_start_out_and_the_makespan_counts_it():
    table = {0: [Forward(0, 0)], 1: [Forward(1, 0)]}
    timeline = simulate(from_table(table), Plan(Placement.loop(2), 1), Costs(forward=[1, 4]))
    assert (timeline.makespan, timeline.cost, timeline.bubble_rate) == (5, 4, 0)
    assert timeline.peak_in_flight == [0, 0]  # nothing runs backward, so nothing is kept


def test_the_unused_gradient_of_the_first_stage_costs_what_it_is_said_to():
    table = {r: [Forward(r, 0), BackwardInput(r, 0), BackwardWeight(r, 0)] for r in range(2)}
    timeline = simulate(from_table(table), Plan(Placement.loop(2), 1), Costs(1, [0, 2], 1))
    assert timeline.busy == [2, 4]
    assert timeline.makespan == 5


def test_in_flight_is_counted_in_microbatches_of_a_whole_rank():
    timeline = simulate(split, Plan(Placement.v(2), 3), Costs())
    assert timeline.peak_in_flight == [3, 3]
    assert timeline.in_flight(1) == [
        (1, 0.5),
        (2, 1),
        (3, 1.5),
        (4, 2),
        (5, 2.5),
        (6, 3),
        (12, 2.5),
        (14, 2),
        (15, 1.5),
        (18, 1),
        (20, 0.5),
        (21, 0),
    ]


def test_memory_over_time_counts_residuals_what_is_deferred_and_what_travels():
    table = {0: [Forward(0, 0), BackwardInput(0, 0), BackwardWeight(0, 0)], 1: [Forward(1, 0), Backward(1, 0)]}
    costs = Costs(1, 1, 1, communication=0.5, activation=[1, 0], residuals=[10, 20], deferred=[5, 0])
    timeline = simulate(from_table(table), Plan(Placement.loop(2), 1), costs)
    # The activation is on rank 0 until it is delivered (1.5), its gradient is expected on rank 0 from the start.
    assert timeline.memory(0) == [(0, 12), (1.5, 11), (6, 5), (7, 0)]
    # Rank 1 posts the receive at once, runs forward from 1.5 to 2.5, backward to 4.5; the gradient is there at 5.
    assert timeline.memory(1) == [(0, 1), (1.5, 21), (2.5, 20), (4.5, 1), (5, 0)]
    assert timeline.owners(0) == {"residuals": 10, "activation": 1, "received": 1}
    assert timeline.owners(1) == {"residuals": 20, "received": 1}


def test_owners_of_memory_are_those_of_the_peak():
    """Which microbatch 1 has, of which all is twice as large; the sum of its stage's gradients is there by then."""
    table = {0: [kind(0, m) for m in (0, 1) for kind in (Forward, BackwardInput, BackwardWeight)]}
    costs = Costs(residuals=10, deferred=15, parameters=7, sizes=[1, 2])
    timeline = simulate(from_table(table), Plan(Placement.loop(1), 2), costs)
    assert timeline.owners(0) == {"deferred": 30, "sums of gradients": 7}
    assert simulate(from_table(table), Plan(Placement.loop(1), 2), Costs()).owners(0) == {}


@pytest.mark.parametrize("schedule", [one_f_one_b, zb_h1])
def test_owners_add_up_to_the_peak(schedule):
    shared = [Shared(8, (Activation(0, 0), Residuals(0, 0), Residuals(1, 0)))]
    costs = Costs(1, 1, 1, communication=0.5, activation=10, residuals=40, deferred=20, shared=shared)
    timeline = simulate(schedule, Plan(Placement.loop(3), 6), costs)
    for rank in range(3):
        assert sum(timeline.owners(rank).values()) == max(size for _, size in timeline.memory(rank))


def test_skips_travel_on_their_own_edge():
    plan = Plan(Placement.loop(3), 1, Edges([(), (0,), (0, 1)]))
    timeline = simulate(gpipe, plan, Costs(1, 1, 1, communication={(a, b): 1 for a in range(3) for b in range(3)}))
    assert [s.start for s in timeline.compute(2)] == [4, 5]
    assert {s.effect.value for s in timeline.spans if s.rank == 0 and s.track == "receive"} == {
        Gradient(0, 1, 0),
        Gradient(0, 2, 0),
    }


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (
            {"forward": [1, 2, 3]},
            "forward has 3 entries, the plan 2 stages: give one number for all stages, or one for",
        ),
        ({"forward": -1}, r"forward must be a finite number of at least 0, not -1"),
        ({"deferred": [1, float("inf")]}, "deferred must be a finite number of at least 0, not inf"),
        ({"communication": float("nan")}, "communication must be a finite number of at least 0, not nan"),
        ({"forward": True}, "forward must be a finite number of at least 0, not True"),
        ({"forward": None}, "forward must be a finite number of at least 0, not None"),
        ({"forward": {0: 1}}, "forward must be a finite number of at least 0, not {0: 1}"),
        ({"communication": [0.1, 0.2]}, r"communication must be a finite number of at least 0, not \[0.1, 0.2\]"),
        ({"communication": {(0, 1): 1, "a": 2}}, "communication has an entry for 'a': an edge is"),
        ({"communication": {}}, "no entry for the edge from rank 1 to rank 0: it has those for none"),
        ({"overlap": "long"}, "overlap must be a finite number of at least 0, not 'long'"),
    ],
)
def test_costs_that_make_no_sense_are_refused(costs, message):
    with pytest.raises(ScheduleError, match=message):
        simulate(gpipe, Plan(Placement.loop(2), 1), Costs(**costs))


def test_a_link_needs_a_bandwidth_and_a_latency():
    with pytest.raises(ScheduleError, match="bandwidth must be more than 0, not 0"):
        Link(1, 0)
    with pytest.raises(ScheduleError, match="bandwidth must be more than 0, not None"):
        Link(1, None)
    with pytest.raises(ScheduleError, match="latency must be a finite number of at least 0, not -1"):
        Link(-1)


def test_measured_costs_may_be_arrays():
    given = Costs(np.array([1.0, 2.0]), np.float32(2), np.int64(3), communication=np.float64(0.5))
    assert given == Costs((1.0, 2.0), 2.0, 3.0, communication=0.5)
    assert type(given.communication) is float


def test_costs_can_be_hashed_whatever_they_were_given_as():
    first = Costs([1, 2], communication={(0, 1): 1, (1, 0): Link(2)})
    second = Costs((1.0, 2.0), communication={(1, 0): Link(2.0), (0, 1): Link(1)})
    assert (first, hash(first)) == (second, hash(second))
    assert first != Costs([1, 2])


def test_time_by_kind_is_all_of_the_time_in_compute():
    timeline = simulate(zb_h1, Plan(Placement.loop(2), 3), Costs(forward=2, backward_input=3))
    assert timeline.kinds == [{Forward: 6.0, BackwardInput: 9.0, BackwardWeight: 3.0}] * 2
    assert [sum(kinds.values()) for kinds in timeline.kinds] == timeline.busy


def test_sums_of_copies_take_their_bytes_over_a_link():
    # Each rank sends the sums of both stages, 40 and 60 bytes, one behind the other, when its last backward has ended.
    plan, costs = Plan(Placement.both_ways(2), 8), Costs(parameters=[40, 60])
    free, slow = (simulate("dualpipe", plan, replace(costs, communication=Link(0, over))) for over in (inf, 10))
    assert slow.makespan == free.makespan + (40 + 60) / 10
    for before, after in zip(free.causes, slow.causes, strict=True):  # who waits for the sums waits for a transfer
        assert after == before | {"transfer": before["transfer"] + 10}
    assert isinstance(slow.critical_path[-1].effect, Recv)
    twice = replace(costs, gradients=[80, 120], communication=Link(0, 10))  # of bfloat16 in float32
    assert simulate("dualpipe", plan, twice).makespan == free.makespan + (80 + 120) / 10


def test_of_the_sums_of_tied_parameters_only_these_travel():
    # Rank 0 sends 8 tied bytes to rank 2, and the reverse; rank 2's last backward ends first, so rank 0's sum counts.
    plan = Plan(Placement.loop(3), 4, ties=((0, 2),))
    costs = Costs(parameters=[20, 30, 12], tied=[(8, (0, 2))])
    free, slow = (simulate(gpipe, plan, replace(costs, communication=Link(0, over))) for over in (inf, 4))
    assert slow.makespan == free.makespan + 8 / 4
    unknown = replace(costs, tied=(), communication=Link(0, 4))  # all of the sum, where nobody says which part is tied
    assert simulate(gpipe, plan, unknown).makespan == free.makespan + 20 / 4
