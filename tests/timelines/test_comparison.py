"""Two timelines side by side. Oracles: costs that were changed on purpose, and sums that must be the makespans'."""

import json
from array import array
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe import Costs, Link, Placement, Plan, schedules, simulate
from fpipe.effects import Backward, Forward, Gather, Recv, Send
from fpipe.tables import TABLE
from fpipe.timelines.comparison import Difference, path_shares, path_steps
from fpipe.timelines.spans import Spans
from fpipe.timelines.timeline import Timeline

PLAN = Plan(Placement.loop(3), 6)
EQUAL = simulate(schedules.one_f_one_b, PLAN)
MADE = {
    "1f1b": (schedules.one_f_one_b, PLAN),
    "gpipe": (schedules.gpipe, PLAN),
    "zb-v": (schedules.zb_v, Plan(Placement.v(3), 6)),
    "dualpipe": (schedules.dualpipe, Plan(Placement.both_ways(2), 8)),
}


def stretched(timeline, stretch):
    """A timeline whose spans begin and end at other times, in the same order: `stretch` of each time."""
    spans = timeline.spans
    starts, ends = (array("d", map(stretch, times)) for times in (spans.starts, spans.ends))
    return Timeline(timeline.plan, Spans(spans.first, spans.effects, starts, ends, spans.waited), timeline.costs)


def without(timeline, rank):
    """A timeline of which one rank's spans are missing."""
    spans = timeline.spans
    kept = [at for other in range(timeline.plan.ranks) if other != rank for at in spans.of(other)]
    place = {at: new for new, at in enumerate(kept)}
    counts = (0 if other == rank else len(spans.of(other)) for other in range(timeline.plan.ranks))
    return Timeline(
        timeline.plan,
        Spans(
            [0, *accumulate(counts)],
            [spans.effects[at] for at in kept],
            array("d", (spans.starts[at] for at in kept)),
            array("d", (spans.ends[at] for at in kept)),
            array("q", (place.get(spans.waited[at], -1) for at in kept)),
        ),
    )


def test_equal_timelines_differ_in_nothing():
    found = Difference(EQUAL, EQUAL)
    assert found.notices == []
    assert set(found.breakdown.values()) == {0.0}
    assert len(found.matched) == len(EQUAL.spans)
    assert {(each.longer, each.shift) for each in found.effects} == {(0.0, 0.0)}


def test_each_step_of_a_loop_is_compared_with_the_same_one():
    plan = Plan(Placement.loop(2), 3)
    a, b = (simulate("1f1b", plan, Costs(forward=forward), steps=3) for forward in (1, 2))
    found = Difference(a, b)
    assert found.notices == []
    assert {place: matched.at[1] for place, matched in found.matched.items()} == {at: at for at in range(len(a.spans))}


def test_what_was_made_slower_is_where_it_lies():
    slower = simulate(schedules.one_f_one_b, PLAN, Costs(forward=1.25, communication=0.5))
    found = Difference(slower, EQUAL)
    assert found.makespan == (slower.makespan, EQUAL.makespan)
    on_path = [slower.spans.effects[step.at] for step in path_steps(slower)]
    forwards = sum(isinstance(effect, Forward) for effect in on_path)
    sends = sum(isinstance(effect, Send) for effect in on_path)
    assert found.breakdown["forward"] == pytest.approx(0.25 * forwards)
    assert found.breakdown["transfer"] == pytest.approx(0.5 * sends)
    assert found.breakdown["backward"] == found.breakdown["host"] == 0.0


def test_one_stage_that_is_slower():
    slower = simulate(schedules.one_f_one_b, PLAN, Costs(forward=(1, 1, 3)))
    found = Difference(slower, EQUAL)
    six = found.effects[:6]
    assert {(each.effect.stage, each.took) for each in six} == {(2, (3.0, 1.0))}
    assert [each.longer for each in found.effects[6:]] == [0.0] * (len(found.effects) - 6)
    assert found.kinds["Forward"] == (30.0, 18.0)
    assert found.kinds["Backward"] == (36.0, 36.0)
    assert found.breakdown["forward"] == 12.0  # six forwards of the last rank, all on the path


def late(timeline, by):
    """Every effect begins so much later after the one it waited for; compute takes as long as before."""
    spans = timeline.spans
    starts, ends = array("d", spans.starts), array("d", spans.ends)
    order = sorted(range(len(starts)), key=lambda at: (spans.ends[at], spans.starts[at]))
    for _ in order:  # until nothing moves: who waits comes after whom it waits for
        for at in order:
            waited = spans.waited[at]
            if waited >= 0 and not isinstance(spans.effects[at], Recv):
                starts[at] = ends[waited] + by
                ends[at] = starts[at] + spans.ends[at] - spans.starts[at]
            elif waited >= 0:
                ends[at] = ends[waited]
    return Timeline(timeline.plan, Spans(spans.first, spans.effects, starts, ends, spans.waited))


@pytest.mark.parametrize(("more", "less"), [(1.0, 0.0), (3.0, 1.0), (1.0, 1.0)])
def test_time_between_what_was_recorded_is_the_hosts(more, less):
    a, b = late(EQUAL, more), late(EQUAL, less)
    found = Difference(a, b)
    gaps = [sum(step.gap for step in path_steps(each)) for each in (a, b)]
    assert gaps[0] > 0
    assert found.breakdown["host"] == gaps[0] - gaps[1] == a.makespan - b.makespan
    assert {time for part, time in found.breakdown.items() if part != "host"} == {0.0}


costs = st.builds(
    Costs,
    forward=st.floats(0.1, 5),
    backward_input=st.floats(0.1, 5),
    backward_weight=st.floats(0.1, 5),
    communication=st.one_of(st.floats(0, 3), st.builds(Link, st.floats(0, 1), st.floats(1, 10))),
    activation=st.just(1.0),
)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(MADE)), costs, st.sampled_from(sorted(MADE)), costs, st.floats(-100, 100))
def test_the_parts_add_up_to_the_difference(one, its_costs, other, other_costs, late):
    a = stretched(simulate(*MADE[one], its_costs), lambda time: time + late)
    found = Difference(a, simulate(*MADE[other], other_costs))
    assert sum(found.breakdown.values()) == pytest.approx(found.makespan[0] - found.makespan[1], abs=1e-6)
    assert sum(step.gap + step.duration for step in path_steps(a)) == pytest.approx(a.makespan, abs=1e-6)
    assert min(step.gap for step in path_steps(a)) >= 0
    json.dumps(found.as_json(), allow_nan=False)


def test_a_timeline_that_begins_late_differs_in_when_its_effects_begin_alone():
    found = Difference(stretched(EQUAL, lambda time: time + 1e4), EQUAL)
    assert {each.shift for each in found.effects} == {1e4}
    assert found.breakdown["host"] == pytest.approx(0.0, abs=1e-6)


def test_transfers_that_no_compute_waited_for_are_not_ranked():
    """Of what was there before its use a measurement has only a bound."""
    found = Difference(EQUAL, EQUAL)
    awaited = {
        EQUAL.spans.waited[at]
        for at in found.matched
        if TABLE.effects[type(EQUAL.spans.effects[at])].track == "compute"
    }
    ranked = {each.at[0] for each in found.effects}
    for at, effect in enumerate(EQUAL.spans.effects):
        if isinstance(effect, Recv):
            assert (at in ranked) == (at in awaited)
            assert (EQUAL.spans.waited[at] in ranked) == (at in awaited)
        elif not isinstance(effect, Send):
            assert at in ranked


def test_other_plans_are_matched_as_far_as_they_go():
    longer = simulate(schedules.one_f_one_b, Plan(Placement.loop(3), 8))
    found = Difference(longer, EQUAL)
    assert len(found.matched) == len(EQUAL.spans)
    assert found.notices[0] == (
        "the plans differ: 3 ranks, 3 stages, 8 microbatches, and 3 ranks, 3 stages, 6 microbatches; "
        "what both have is compared"
    )
    assert found.notices[1:] == [
        f"{len(longer.spans) - len(EQUAL.spans)} of the {len(longer.spans)} effects of the first are not in the other"
    ]
    assert found.breakdown["unmatched"] > 0
    assert sum(found.breakdown.values()) == longer.makespan - EQUAL.makespan


def test_stages_of_another_size_are_noticed():
    halves = simulate("zb-v", Plan(Placement.v(3), 6), Costs(0.5, 0.5, 0.5))
    found = Difference(simulate("zb-h1", Plan(Placement.loop(3), 6)), halves)
    assert found.kinds["Forward"] == (18, 18)  # the same work, in stages of half the size
    assert found.notices[1].startswith("a stage of the first is 2 times as much of the model as one of the second")


def test_compute_is_the_same_on_another_rank():
    plan = Plan(Placement([2, 1, 0]), 6)
    found = Difference(EQUAL, simulate(schedules.one_f_one_b, plan))
    assert "in where stages run" in found.notices[0]
    computes = [each for each in found.effects if isinstance(each.effect, Forward)]
    assert len(computes) == 18
    assert {each.rank for each in computes} == {(0, 2), (1, 1), (2, 0)}
    assert not any(isinstance(each.effect, Send | Recv) and each.rank[0] != each.rank[1] for each in found.effects)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_rank_that_only_one_has(swapped):
    pair = EQUAL, without(EQUAL, 1)
    found = Difference(*(pair[::-1] if swapped else pair))
    assert found.ranks == [0, 2]
    which = "second" if swapped else "first"
    assert f"only the {which} has rank 1" in found.notices
    assert {each.rank[0] for each in found.effects} == {0, 2}
    assert sum(found.breakdown.values()) == pytest.approx(found.makespan[0] - found.makespan[1])
    if not swapped:  # its path leads through the rank that the other lacks, where nobody knows who waited for whom
        assert found.breakdown["unmatched"] > 0
        assert found.breakdown["host"] == 0


def test_fewer_ranks():
    found = Difference(EQUAL, simulate(schedules.one_f_one_b, Plan(Placement.loop(2), 6)))
    assert found.ranks == [0, 1]
    assert "only the first has rank 2" in found.notices


def test_the_json_has_the_places_of_effects():
    slower = simulate(schedules.zb_v, MADE["zb-v"][1], Costs(forward=2))
    found = Difference(slower, simulate(*MADE["zb-v"])).as_json()
    assert found["makespan"] == [slower.makespan, simulate(*MADE["zb-v"]).makespan]
    assert list(found) == ["makespan", "bubble_rate", "ranks", "kinds", "breakdown", "groups", "effects", "notices"]
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2]
    assert all(tuple(rank["causes"]) == slower.cause_names for rank in found["ranks"])
    assert found["ranks"][1]["busy"] == [slower.busy[1], 36.0]
    first = found["effects"][0]
    spans = slower.spans
    assert isinstance(spans.effects[spans.first[first["rank"]] + first["row"]], Forward)
    assert first["took"] == [2.0, 1.0]
    assert len(found["effects"]) <= 200


def test_groups_are_the_effects_by_rank_and_kind():
    slow = Costs(forward=[1, 1, 1.25], backward=[2, 3.5, 2], communication=0.25)
    found = Difference(simulate(schedules.one_f_one_b, PLAN, slow), EQUAL)
    assert [(g.name, g.rank, g.kind, g.size, g.median, g.total) for g in found.groups[:2]] == [
        ("rank 1: B", 1, Backward, 6, 1.5, 9.0),
        ("rank 2: F", 2, Forward, 6, 0.25, 1.5),
    ]
    assert found.apart == []
    assert {group.name for group in found.groups if group.kind is Recv} == {
        f"rank {rank}: receive" for rank in range(3)
    }
    assert sum(group.size for group in found.groups) == len(found.effects)
    assert sum(group.total for group in found.groups) == pytest.approx(sum(each.longer for each in found.effects))
    assert all(group.largest in found.effects for group in found.groups)


def test_a_receive_counts_from_when_its_value_was_sent():
    """However early it was posted."""
    slow = simulate(schedules.one_f_one_b, PLAN, Costs(communication=0.5))
    receives = [each for each in Difference(slow, EQUAL).effects if isinstance(each.effect, Recv)]
    assert {each.took for each in receives} == {(0.5, 0.0)}


def test_a_timeline_without_compute_compares():
    none = Timeline(PLAN, Spans([0, 0, 0, 0], [], array("d"), array("d"), array("q")))
    found = Difference(none, EQUAL)
    assert found.breakdown == {
        "forward": 0.0,
        "backward": 0.0,
        "transfer": 0.0,
        "host": 0.0,
        "elsewhere": -EQUAL.makespan,
    }
    assert found.effects == []
    assert "only the second has ranks 0, 1, 2" in found.notices


def test_gathers_and_scatters_are_parts_of_their_own():
    """Where both paths go through the same gathers, the difference is that of their durations."""
    plan = Plan(Placement((0, 0)), 1, replicas=2)
    slow, fast = (
        simulate(schedules.gpipe, plan, Costs(1, 1, 1, gather=gather, scatter=scatter), resident=1)
        for gather, scatter in ((0.75, 0.5), (0.5, 0.25))
    )
    difference = Difference(slow, fast)
    assert difference.notices == []  # the second gather of a stage is compared with the second
    assert difference.breakdown["gather"] == pytest.approx(3 * 0.25)
    assert difference.breakdown["scatter"] == pytest.approx(0.25)
    assert sum(difference.breakdown.values()) == pytest.approx(slow.makespan - fast.makespan)
    assert path_shares(slow)["gather"] == pytest.approx(3 * 0.75)
    gathers = [each for each in difference.effects if type(each.effect) is Gather]
    assert [each.took for each in gathers] == [(0.75, 0.5)] * 3
