"""What would help. Oracles: simulations without what was made slow on purpose, and replays with nothing changed."""

import json
import random
import re
from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings

from fpipe import Costs, Link, Placement, Plan, ScheduleError, by_length, lower, offload, schedules, simulate, what_if
from fpipe.effects import Backward, Forward, Recv, Send
from fpipe.schedules.catalogue import CATALOGUE
from fpipe.timelines.replay import Replay
from fpipe.timelines.simulator import simulate_programs
from fpipe.timelines.spans import Spans
from fpipe.timelines.timeline import Timeline
from tests.profiling.test_recording import by_hand
from tests.support import slow_rank_jobs
from tests.support.combinations import one_in, thorough
from tests.timelines.test_comparison import without
from tests.timelines.test_simulator import planned

PLAN = Plan(Placement.loop(8), 16)
TIMES = Costs(1, 1, 1, communication=0.05)
EDGES = {(a, b): 0.05 for a in range(8) for b in range(8) if a != b}


def slowed(at, by, stages=8, each=1.0):
    """The costs with one stage that takes `by` times as long."""
    times = [each * (by if stage == at else 1.0) for stage in range(stages)]
    return Costs(times, times, times, communication=0.05)


def too_short(rank, plan, by=2):
    """1F1B with a warm-up that is too short by so many forwards."""
    (stage,) = plan.stages_on(rank)
    warmup = max(0, min(plan.ranks - 1 - rank, plan.microbatches) - by)
    yield from (Forward(stage, m) for m in range(warmup))
    for m in range(plan.microbatches - warmup):
        yield Forward(stage, m + warmup)
        yield Backward(stage, m)
    yield from (Backward(stage, m) for m in range(plan.microbatches - warmup, plan.microbatches))


LOOPED, HALF = Plan(Placement.loop(8, 2), 16), Costs(0.5, 0.5, 0.5, communication=0.05)
LENGTHS = [1.0, 2, 1, 3, 1, 1, 2, 1, 1, 4, 1, 1, 2, 1, 1, 1]
CASES = {  # what is wrong -> the schedule and costs with it and without, the first row, the headline
    "rank": (
        ("1f1b", PLAN, slowed(5, 4.5)),
        ("1f1b", PLAN, TIMES),
        "rank 5",
        r"rank 5 computes 4\.5x slower than the median: 160\.5 of 231\.5",
    ),
    "rank, in its backwards alone": (
        ("1f1b", PLAN, Costs(1, backward=[2, 2, 2, 2, 2, 9, 2, 2], communication=0.05)),
        ("1f1b", PLAN, TIMES),
        "rank 5",
        r"rank 5 computes 3\.33x slower than the median: .*",
    ),
    "edge": (
        ("1f1b", PLAN, replace(TIMES, communication=EDGES | {(2, 3): 4.0})),
        ("1f1b", PLAN, TIMES),
        "edge 2 -> 3",
        r"transfers from rank 2 to rank 3 take 80x the median of the edges: .*",
    ),
    "edge among others that take time": (
        ("1f1b", PLAN, replace(TIMES, communication=dict.fromkeys(EDGES, 0.2) | {(2, 3): 5.0})),
        ("1f1b", PLAN, replace(TIMES, communication=dict.fromkeys(EDGES, 0.2))),
        "edge 2 -> 3",
        r"transfers from rank 2 to rank 3 take 25x the median of the edges: .*",
    ),
    "stage": (
        ("interleaved-1f1b", LOOPED, slowed(11, 3.0, 16, 0.5)),
        ("interleaved-1f1b", LOOPED, HALF),
        "stage 11 (rank 3)",
        r"stage 11 \(rank 3\) computes 3x slower than the median: .*",
    ),
    "warm-up": ((too_short, PLAN, TIMES), ("1f1b", PLAN, TIMES), "warm-up 2 longer", r"warm-up 2 longer: .*"),
    "order": (
        ("1f1b", PLAN, replace(TIMES, scale=LENGTHS)),
        ("1f1b", PLAN, replace(TIMES, scale=[LENGTHS[m] for m in by_length(LENGTHS)])),
        "order of microbatches",
        r"another order of the microbatches: .*",
    ),
}


@one_in(4)
@pytest.mark.parametrize("name", CASES)
def test_what_was_made_slow_comes_first_and_wins_what_its_absence_does(name):
    slow, well, what, headline = CASES[name]
    captured, mended = simulate(*slow), simulate(*well)
    result = what_if(captured)
    assert result.rows[0].what == what
    assert result.rows[0].seconds == pytest.approx(captured.makespan - mended.makespan, rel=0.05)
    assert result.timeline_of(what).makespan == pytest.approx(mended.makespan, rel=0.05)
    assert re.fullmatch(headline, result.headline())
    wins = [row.seconds for row in result.rows]
    assert wins == sorted(wins, reverse=True)
    assert all(row.makespan == captured.makespan - row.seconds for row in result.rows)


@given(planned())
@settings(max_examples=50)
def test_a_replay_with_nothing_changed_is_the_timeline(case):
    captured = simulate(*case)
    replay = Replay(captured)
    again = replay.timeline_of(replay.measured)
    assert replay.makespans([replay.measured])[0] == pytest.approx(captured.makespan)
    assert list(again.spans.starts) == pytest.approx(list(captured.spans.starts))
    assert again.causes == [pytest.approx(causes) for causes in captured.causes]


@pytest.mark.parametrize(
    ("name", "plan", "costs", "resident"),
    [
        ("gpipe", Plan(Placement.loop(2), 3), Costs(1, 1, 1, communication=Link(10, 4), activation=[8, 0]), None),
        ("looped-bfs", Plan(Placement.loop(2, 3), 4, replicas=2), Costs(gather=0.5, scatter=1, communication=0.2), 1),
        ("dualpipe", Plan(Placement.both_ways(4), 8), Costs(overlap=1.6, communication=0.2), None),
        ("zb-v", Plan(Placement.v(3), 6), Costs(1, 1.2, 0.8, communication=0.1), None),
    ],
)
def test_queues_gathers_scatters_and_overlaps_are_replayed(name, plan, costs, resident):
    captured = simulate(name, plan, costs, resident=resident)
    replay = Replay(captured)
    again = replay.timeline_of(replay.measured)
    assert again.makespan == pytest.approx(captured.makespan, rel=1e-12)
    assert list(again.spans.starts) == pytest.approx(list(captured.spans.starts))
    if resident:
        result = what_if(captured)
        mended = simulate(name, plan, replace(costs, gather=0), resident=resident)
        row = next(row for row in result.rows if row.what == "gathers")
        assert row.makespan == pytest.approx(mended.makespan)
        assert any("other orders were not tried" in notice for notice in result.notices)


def test_a_measured_step_is_replayed_with_the_hosts_time():
    """Rank 0 waits from 20 to 40 for what rank 1 sends at 35; all other gaps are the host's."""
    measurement = by_hand()
    captured, result = measurement.timeline(), what_if(measurement)
    assert result.error == 0
    transfers = what_if(captured, orders=False).timeline_of("transfers")
    assert captured.makespan - transfers.makespan == 11  # 16 to 21 and 35 to 40, and a post that is later than its send
    host = next(row for row in result.rows if row.what == "host time")
    assert host.seconds == captured.makespan - 13 - 9 - 11  # what both compute and what is under way is left


@pytest.mark.parametrize(("forward", "backward", "slow"), [([1, 3], [2, 2], 1), ([1, 1, 9, 1], [2, 2, 18, 2], 2)])
def test_a_transfer_that_nothing_waited_for_takes_the_tightest_time_of_its_edge_or_that_of_others(
    forward, backward, slow
):
    """A late compute hides transfers; measured, their sends end when they are used, and only a bound is known."""
    plan = Plan(Placement.loop(len(forward)), 6)
    costs = Costs(forward=forward, backward=backward, communication=0.5)
    captured = simulate(schedules.one_f_one_b, plan, costs)
    spans = captured.spans
    ends, waited = array("d", spans.ends), set(spans.waited)
    for at, effect in enumerate(spans.effects):
        if isinstance(effect, Recv) and at not in waited:
            use = min(s.start for s in captured.compute(spans[at].rank) if s.start >= ends[at])
            ends[at] = ends[spans.waited[at]] = use
    measured = Timeline(plan, Spans(spans.first, spans.effects, spans.starts, ends, spans.waited), captured.costs)
    mended = simulate(schedules.one_f_one_b, plan, replace(costs, forward=1, backward=2))
    row = next(row for row in what_if(measured).rows if row.what == f"rank {slow}")
    assert row.makespan == pytest.approx(mended.makespan, rel=0.05)
    assert what_if(measured).error == 0


def test_one_slow_moment_is_found_and_noise_wins_little():
    captured = simulate("1f1b", PLAN, TIMES)
    at = next(at for at in captured.spans.of(3) if captured.spans.effects[at] == Forward(3, 9))
    replay = Replay(captured)
    own = replay.measured.own.copy()
    own[replay.node_of[at]] += 20
    result = what_if(replay.timeline_of(replay.measured._replace(own=own)))
    assert result.rows[0].what in ("rank 3", "every forward")
    assert result.rows[0].seconds == pytest.approx(20, rel=0.05)
    noise = random.Random(0)
    noisy = replay.measured._replace(own=replay.measured.own * [noise.uniform(0.98, 1.02) for _ in replay.span_of])
    rows = what_if(replay.timeline_of(noisy)).rows
    assert max((row.seconds for row in rows if row.what.startswith("rank")), default=0) < 0.01 * captured.makespan


def test_schedules_of_the_same_placement_and_memory_are_tried():
    costs = Costs(1, 1, 1, communication=1)
    captured = simulate(schedules.zb_h1, PLAN, costs)
    result = what_if(captured, schedule="zb-h1")
    named = {row.what: row for row in result.rows if row.what.startswith("schedule ")}
    best = simulate(schedules.zb_auto(PLAN, costs, max(captured.peak_in_flight)), PLAN, costs)
    assert min(row.makespan for row in named.values()) == pytest.approx(best.makespan, rel=0.01)
    assert all(max(result.timeline_of(what).peak_in_flight) <= max(captured.peak_in_flight) for what in named)
    more = next(row for row in result.rows if row.what == "17 microbatches")
    longer = simulate(schedules.zb_h1, replace(PLAN, microbatches=17), costs)
    assert more.seconds == pytest.approx(captured.makespan - longer.makespan * 16 / 17)
    fused = {row.what for row in what_if(simulate("1f1b", PLAN, costs)).rows}
    assert not fused & {"schedule zb-h1", "schedule zb-auto"}  # the halves of its backwards were not measured


def test_no_order_is_searched_whose_effects_were_not_measured(monkeypatch):
    def searched(*args, **options):
        raise AssertionError("an order was searched")

    monkeypatch.setitem(CATALOGUE, "zb-auto", replace(CATALOGUE["zb-auto"], function=searched))
    assert what_if(simulate("1f1b", PLAN, TIMES)).rows
    with pytest.raises(AssertionError, match="an order was searched"):
        what_if(simulate("zb-h1", PLAN, TIMES))


def test_copies_of_residuals_are_replayed_and_other_orders_are_not_tried():
    """Another order would need the memory that the copies made free."""
    plan, costs = Plan(Placement.loop(2), 6), Costs(backward=2, residuals=10, offload=4, fetch=4)
    moved = offload(20, costs, slower=10.0)
    captured = simulate("gpipe", plan, costs, offload=moved)
    mended = simulate_programs(lower("gpipe", plan, offload=moved), replace(costs, offload=0, fetch=0))
    result = what_if(captured)
    assert [(row.what, row.makespan) for row in result.rows[:1]] == [("copies of residuals", mended.makespan)]
    assert result.error == 0
    assert result.notices == [
        "other orders were not tried: residuals are moved to the host, which depends on the order"
    ]


def test_missing_ranks_are_replayed_as_far_as_they_are_known():
    part = without(simulate("1f1b", PLAN, slowed(5, 4.5)), 7)
    result = what_if(part)
    assert result.error == pytest.approx(0, abs=1e-9)
    assert any("ranks are missing" in notice for notice in result.notices)


@pytest.mark.parametrize(
    ("captured", "schedule", "reason"),
    [
        ("zb-h1", "1f1b", "1f1b gives another order than the captured one; in a program, fpipe.what_if(measurement, "),
        ("zb-h1", "mine", "no schedule is called 'mine'.*; in a program, fpipe.what_if"),
        ("dualpipe", "dualpipe", "dualpipe does not take 9: .* take a multiple of 2, not 9"),
    ],
)
def test_why_one_more_microbatch_was_not_tried(captured, schedule, reason):
    plan = Plan(Placement.both_ways(4) if captured == "dualpipe" else Placement.loop(4), 8)
    (notice,) = what_if(simulate(captured, plan, TIMES), schedule=schedule).notices
    assert re.match(f"one more microbatch was not tried: {reason.replace('(', '[(]')}", notice)


def test_effects_in_a_cycle_and_wrong_arguments_are_refused():
    captured = simulate("gpipe", Plan(Placement.loop(2), 1))
    spans = captured.spans
    order = {Recv: 0, Backward: 1, Forward: 2, Send: 3}  # the backward, before the forward that it hangs on
    first = sorted((spans.effects[at] for at in spans.of(0)), key=lambda effect: order.get(type(effect), 4))
    effects = [*first, *(spans.effects[at] for at in spans.of(1))]
    waited = array("q", spans.waited)
    sends = [at for at, effect in enumerate(effects) if isinstance(effect, Send)]
    for at, effect in enumerate(effects):
        if isinstance(effect, Recv):
            waited[at] = next(at for at in sends if effects[at].value == effect.value)
    with pytest.raises(ScheduleError, match="wait for each other in a cycle"):
        what_if(Timeline(captured.plan, Spans(spans.first, effects, spans.starts, spans.ends, waited)))
    with pytest.raises(TypeError, match="what_if: timeline must be"):
        what_if("1f1b")


def test_the_json_has_the_largest_first():
    result = what_if(simulate("1f1b", PLAN, slowed(5, 4.5)))
    found = json.loads(json.dumps(result.as_json()))
    assert list(found) == ["what_if", "makespan", "replayed", "error", "notices"]
    assert found["what_if"][0] == {
        "what": "rank 5",
        "seconds": pytest.approx(160.5),
        "makespan": pytest.approx(71),
        "assumes": "its effects at the medians over the stages",
    }
    assert repr(result).startswith("<WhatIf: ")


@thorough
@pytest.mark.timing
def test_what_mending_a_slow_rank_wins_is_measured(pools):
    """Timed stages on four ranks over gloo: the step without the slow rank takes what the replay says, within 5 %."""
    rows, without = pools(4).run(slow_rank_jobs.helped, 2, 5)[0]
    assert {what for what, *_ in rows} == {"rank 2"}
    assert max(abs(error) for _, _, error, _ in rows) < 0.02
    least = min(makespan for _, makespan, *_ in rows)  # a busy machine only adds to it
    assert least == pytest.approx(min(without), rel=0.05)
    assert all(re.match(r"rank 2 computes 4\.\d+x slower than the median", headline) for *_, headline in rows)
