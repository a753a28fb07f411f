"""A measured step: recorded by hand along a clock that stands still, in one process, and over several."""

import time
from itertools import pairwise

import pytest
import torch

import fpipe
from fpipe import Costs, Link, Measurement, Placement, Plan, ScheduleError, StageError, handlers, lower, schedules
from fpipe.effects import Activation, Backward, Forward, Gather, Gradient, Recv, Reduce, Scatter, Send
from fpipe.profiling.gathering import gather
from fpipe.profiling.recording import Recording
from fpipe.tables import LANES, TABLE
from fpipe.timelines.measurement import Account
from fpipe.timelines.simulator import simulate_programs
from tests.support import cases, grid_jobs, jobs
from tests.support.combinations import few, one_in

PLANS = {
    "gpipe": (schedules.gpipe, Plan(Placement.loop(3), 4)),
    "1f1b": (schedules.one_f_one_b, Plan(Placement.loop(4), 6)),
    "interleaved": (schedules.interleaved_1f1b, Plan(Placement.loop(2, 2), 4)),
    "zb_v": (schedules.zb_v, Plan(Placement.v(3), 6)),
    "dualpipe": (schedules.dualpipe, Plan(Placement.both_ways(4), 8)),
    "skips and ties": (
        schedules.gpipe,
        Plan(Placement.loop(4), 3, fpipe.Edges([(), (0,), (0, 1), (0, 2)]), ties=((0, 3),)),
    ),
}


class Clock:
    """Stands still until it is set."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Driven:
    """A recording, and what a handler would tell it at given times."""

    def __init__(self, programs, loop=1):
        self.clock = Clock()
        self.recording = Recording(programs, self.clock, loop)

    def at(self, now, what, *args):
        self.clock.now = now
        getattr(self.recording, what)(*args)

    def run(self, rank, effect, start, end, *waits):
        """An effect from start to end, and before it the waits (value, used, arrived)."""
        for value, used, arrived in waits:
            self.at(used, "wait", rank, value)
            self.at(arrived, "arrive", rank, value)
        self.at(start, "begin", rank, effect)
        self.at(end, "end", rank, effect)


def drive(programs, predicted, ranks=None):
    """The recording of a step, or of several in a row, that goes as predicted."""
    driven = Driven(programs, predicted.steps)
    for rank in programs if ranks is None else ranks:
        program, coming, free = programs[rank], {}, 0.0
        for effect, at in zip(program.effects * predicted.steps, predicted.spans.of(rank), strict=True):
            span = predicted.spans[at]
            waits = []
            for value in TABLE.needs(effect, program.plan):
                if value in coming:
                    waits.append((value, free, free := max(free, coming.pop(value))))
            if span.track in ("receive", *LANES):
                coming |= dict.fromkeys(TABLE.gives(effect, program.plan), span.end)
            if span.track not in ("compute", "host"):
                driven.run(rank, effect, free, free, *waits)
                continue
            driven.run(rank, effect, span.start, span.end, *waits)
            free = span.end
    return driven.recording


def driven_alone(programs, predicted):
    """The measurement of steps that go as predicted, where each rank has a recording of its own."""
    each = {rank: drive(programs, predicted, [rank]).measurement() for rank in programs}
    return Measurement(programs, {rank: own.columns[rank] for rank, own in each.items()}, steps=predicted.steps)


def made(name, **costs):
    schedule, plan = PLANS[name]
    programs = lower(schedule, plan)
    return programs, simulate_programs(programs, Costs(**costs))


@pytest.mark.parametrize("communication", [0, 0.25, 3])
@pytest.mark.parametrize("name", PLANS)
def test_a_step_that_goes_as_predicted_has_the_predicted_timeline(name, communication):
    programs, predicted = made(name, forward=1, backward_input=1.5, backward_weight=0.5, communication=communication)
    measurement = drive(programs, predicted).measurement()
    measured = measurement.timeline()
    for rank in programs:
        assert list(measured.compute(rank)) == list(predicted.compute(rank))
        receives = measurement.receives(rank)
        expected = [span for span in predicted.spans if span.rank == rank and span.track == "receive"]
        found = [span for span in measured.spans if span.rank == rank and span.track == "receive"]
        for receive, a, b in zip(receives, found, expected, strict=True):
            assert (a.start, a.waited_for) == (b.start, b.waited_for)
            assert a.end >= b.end if receive.there else a.end == b.end
    assert measured.causes == predicted.causes
    assert measured.critical_path == predicted.critical_path
    assert measured.peak_in_flight == predicted.peak_in_flight


@pytest.mark.parametrize("name", PLANS)
def test_steps_in_a_row_that_go_as_predicted_have_the_predicted_timeline(name):
    schedule, plan = PLANS[name]
    programs = lower(schedules.updating(schedule), plan)
    costs = Costs(forward=1, backward_input=1.5, backward_weight=0.5, communication=0.25, update=0.25)
    predicted = simulate_programs(programs, costs, 3)
    measurement = driven_alone(programs, predicted)
    measured = measurement.timeline()
    assert (measured.steps, measured.period, measured.makespan) == (3, predicted.period, predicted.makespan)
    assert measured.step_ends == predicted.step_ends
    for rank in programs:
        assert [s[:5] for s in measured.compute(rank)] == [s[:5] for s in predicted.compute(rank)]
        assert measurement.account(rank).compute == predicted.busy[rank]
    medians = measurement.costs()
    assert (medians.forward, medians.update) == ((1,) * plan.stages, (0.25,) * plan.stages)
    assert "milliseconds of 3 steps; between" in str(measurement)


@pytest.mark.parametrize("name", PLANS)
def test_a_receive_is_waiting_and_transfer_and_waits_are_dependency_and_transfer(name):
    programs, predicted = made(name, forward=1, backward_input=1.5, backward_weight=0.5, communication=0.25)
    measurement = drive(programs, predicted).measurement()
    for rank in programs:
        account, causes = measurement.account(rank), predicted.causes[rank]
        for receive in measurement.receives(rank):
            assert receive.waiting + receive.transfer == receive.arrived - receive.posted
            assert 0 <= receive.exposed <= receive.transfer
            assert receive.there or receive.transfer == 0.25
        assert account.compute == predicted.busy[rank]
        assert account.between == [0.0] * (len(list(predicted.compute(rank))) - 1)
        first, last = min(s.start for s in predicted.compute(rank)), max(s.end for s in predicted.compute(rank))
        inside = [r for r in measurement.receives(rank) if first <= r.used < last]
        assert sum(r.arrived - r.used for r in inside) == last - first - predicted.busy[rank]
        exposed = sum(r.exposed for r in inside)
        behind = sum(r.exposed for r in measurement.receives(rank) if r.used >= last)  # of sums of gradients
        # of several values that a piece waits for, a timeline counts the last alone
        transfer = causes["transfer"] - behind
        assert exposed >= transfer if measurement.plan.edges.skips else exposed == transfer


SHARDED = {
    "bfs": (schedules.looped_bfs, Plan(Placement.loop(2, 3), 4, replicas=2), 1),
    "zb_v": (schedules.zb_v, Plan(Placement.v(3), 6, replicas=3), 1),
    "dualpipe": (schedules.dualpipe, Plan(Placement.both_ways(4), 8, replicas=2), 2),
    "ties": (schedules.gpipe, Plan(Placement.loop(4), 3, ties=((0, 3),), replicas=2), 1),
    "whole": (schedules.one_f_one_b, Plan(Placement.loop(3), 6, replicas=2), None),
}


def sharded(name, steps, **costs):
    schedule, plan, resident = SHARDED[name]
    programs = lower(schedule, plan, resident=resident)
    return programs, simulate_programs(programs, Costs(1, 1.5, 0.5, **costs), steps)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(("gather", "scatter"), [(0, 0), (0.25, 0.25), (3, 5)])
@pytest.mark.parametrize("name", SHARDED)
def test_gathers_and_scatters_that_go_as_predicted_have_the_predicted_timeline(name, gather, scatter, steps):
    programs, predicted = sharded(name, steps, gather=gather, scatter=scatter, communication=0.25)
    measurement = driven_alone(programs, predicted)
    measured = measurement.timeline()
    for rank in programs:
        assert list(measured.compute(rank)) == list(predicted.compute(rank))
        both = [[s for s in line.spans if s.rank == rank and s.track in LANES] for line in (measured, predicted)]
        assert len(both[0]) == len(both[1]) == len(measurement.collectives(rank))
        for collective, a, b in zip(measurement.collectives(rank), *both, strict=True):
            assert (a.effect, a.track) == (b.effect, b.track)
            assert a.start <= b.start
            assert a.end >= b.end
            if not collective.there:
                assert a.end == b.end
                assert collective.waited <= collective.transfer
    assert measured.plan.gathered == predicted.plan.gathered
    if gather == 3:  # every first use waited for its parameters
        assert measured.causes == predicted.causes
        assert measured.makespan == predicted.makespan


def test_waits_for_gathers_and_scatters_are_accounts_of_their_own():
    plan = Plan(Placement((0, 0)), 1, replicas=2)
    programs = lower(schedules.gpipe, plan, resident=1)
    predicted = simulate_programs(programs, Costs(1, 1, 1, gather=0.5, scatter=0.25))
    measurement = drive(programs, predicted).measurement()
    account = measurement.account(0)
    # stage 0, then 1, then 0 is gathered before its use; the scatter of stage 1 ran beside the backward of stage 0
    assert (account.gathering, account.scattering, account.waiting) == (1.5, 0.25, 0)
    assert (account.compute, account.between) == (6, [0.0] * 3)
    assert [(c.effect, c.posted, c.arrived, c.there) for c in measurement.collectives(0)] == [
        (Gather(0), 0, 0.5, False),
        (Gather(1), 1.5, 2, False),
        (Gather(0), 5, 5.5, False),
        (Scatter(1, 0), 5, 7.75, True),
        (Scatter(0, 0), 7.5, 7.75, False),
    ]
    costs = measurement.costs()
    assert (costs.gather, costs.scatter, costs.replicas) == ((0.5, 0.5), (0.25, 2.75), 2)
    assert str(measurement).splitlines()[0].split()[-2:] == ["gathering", "scattering"]
    assert measurement.timeline().causes[0]["gather"] == 1.5


def test_what_was_posted_behind_another_began_when_that_arrived():
    plan = Plan(Placement((0, 0)), 1, replicas=2)
    programs = lower(schedules.gpipe, plan, resident=2)
    predicted = simulate_programs(programs, Costs(0.125, 1, 1, gather=0.5))
    measurement = drive(programs, predicted).measurement()
    first, second, *_ = measurement.collectives(0)
    assert (first.posted, first.began, second.posted, second.began, second.arrived) == (0, 0, 0, 0.5, 1)
    assert measurement.costs().gather == (0.5, 0.5)
    spans = [span for span in measurement.timeline().spans if span.track == "gather"]
    assert [(span.start, span.end) for span in spans] == [(0, 0.5), (0.5, 1)]
    assert measurement.timeline().spans[spans[1].waited_for].effect == spans[0].effect


@pytest.mark.parametrize("name", SHARDED)
def test_replicas_in_one_process_are_recorded(name):
    """There parameters are whole, so that a gather takes no time."""
    schedule, plan, resident = SHARDED[name]
    pipeline = fpipe.Pipeline([lambda p, x: x * p] * plan.stages, loss=lambda y, t: y.sum())
    plan = pipeline.plan(plan.placement, plan.microbatches, replicas=plan.replicas)
    recording = Recording(programs := lower(schedule, plan, resident=resident))
    step = fpipe.value_and_grad(
        pipeline, schedule, plan, handler=handlers.Local(), observe=recording, resident=resident
    )
    params = {stage: torch.tensor(1.5) for stage in range(plan.stages)}
    for _ in range(2):
        step(params, torch.arange(float(plan.microbatches * plan.replicas)))
    timeline = recording.measurement().timeline()
    for rank in programs:
        effects = [span.effect for span in timeline.spans if span.rank == rank]
        assert effects == list(programs[rank])
        assert all(span.end >= span.start for span in timeline.spans)


A, G = Activation(0, 0), Gradient(0, 1, 0)


def by_hand():
    """One microbatch over two ranks, with a host that takes its time; seconds."""
    driven = Driven(lower(schedules.gpipe, Plan(Placement.loop(2), 1)))
    run = driven.run
    run(0, Recv(G, 1), 7, 8)
    run(0, Forward(0, 0), 10, 14)
    run(0, Send(A, 1), 15, 16)
    run(0, Backward(0, 0), 41, 50, (G, 20, 40))
    run(0, Reduce(0), 50, 51)
    run(1, Recv(A, 0), 11, 12)
    run(1, Forward(1, 0), 22, 25, (A, 12, 21))
    run(1, Backward(1, 0), 28, 34)
    run(1, Send(G, 0), 35, 36)
    run(1, Reduce(1), 36, 37)
    return driven.recording.measurement()


def test_waiting_transfer_and_the_time_between_two_pieces_by_hand():
    measurement = by_hand()
    assert [(r.waiting, r.transfer, r.exposed, r.there) for r in measurement.receives(0)] == [(28, 5, 5, False)]
    assert [(r.waiting, r.transfer, r.exposed, r.there) for r in measurement.receives(1)] == [(4, 6, 6, False)]
    assert measurement.account(0) == Account(13, [7], 2, 20, 5, 0, 0, 1, 0)
    assert measurement.account(1) == Account(9, [3], 2, 9, 6, 0, 0, 1, 0)
    timeline = measurement.timeline()
    assert [span.start for span in timeline.spans][:2] == [-3, 0]  # a receive that is posted before the first compute
    assert timeline.causes[0] == dict(zip(timeline.cause_names, (0, 21, 5, 0, 0, 1), strict=True))
    assert [span.effect for span in timeline.critical_path] == [
        *(Forward(0, 0), Send(A, 1), Recv(A, 0), Forward(1, 0), Backward(1, 0), Send(G, 0), Recv(G, 1), Backward(0, 0))
    ]


@pytest.mark.parametrize("name", PLANS)
def test_the_costs_of_a_step_that_goes_as_predicted_predict_it(name):
    """Of values that were there at their first use only a bound is known, so that every transfer is waited for here."""
    times = {"forward": 1, "backward_input": 1.5, "backward_weight": 0.5}
    programs, predicted = made(name, **times, communication=3)
    costs = drive(programs, predicted).measurement().costs()
    for rank in programs:
        for span in predicted.compute(rank):
            assert costs.time(span.effect) == span.end - span.start
    assert simulate_programs(programs, costs).makespan == pytest.approx(predicted.makespan)


def test_costs_are_medians_of_what_was_waited_for():
    costs = by_hand().costs()
    assert (costs.forward, costs.backward) == ((4, 3), (9, 6))
    assert dict(costs.communication) == {(0, 1): Link(6), (1, 0): Link(5)}


def test_ranks_that_are_not_recorded_leave_the_others_as_they_are():
    """What rank 1 sent was waited for as long as before; nobody knows since when it was under way."""
    measurement = by_hand()
    alone = Measurement(measurement.programs, {0: measurement.columns[0]})
    with pytest.raises(ValueError, match="rank 1 is not recorded in this process"):
        alone.timeline()
    whole, part = measurement.timeline(), alone.timeline(partial=True)
    assert list(part.compute(0)) == list(whole.compute(0))
    assert list(part.compute(1)) == []
    assert (part.busy, part.causes[0]["transfer"]) == ([13, 0], 0)
    assert part.causes[0]["dependency"] + part.causes[0]["imbalance"] == 26
    assert part.causes[0]["host"] == 1
    sends = [span for span in part.spans if span.track == "send"]
    assert [(span.start, span.end) for span in sends] == [(5, 6)]  # its post
    assert alone.costs().communication == {}


def test_the_table():
    assert str(by_hand()).splitlines()[:3] == [
        "rank    compute   between      each   posting    waiting   exposed          hidden   there",
        "   0  13000.000  7000.000  7000.000  2000.000  20000.000  5000.000  0.000 to 0.000  0 of 1",
        "   1   9000.000  3000.000  3000.000  2000.000   9000.000  6000.000  0.000 to 0.000  0 of 1",
    ]


@pytest.mark.parametrize(
    ("used", "arrived", "there", "exposed", "hidden", "at_most"),
    [
        (9, 12, False, 3, 3, 3),  # posted by both at 4, under compute from 5 to 8, then waited for
        (9, 9, True, 0, 0, 3),  # at 9 it was there: it came at any time since 4
        (9, 9.25, True, 0.25, 0, 3),  # probably too: to get it took a twentieth of the time since
        (9, 9.5, False, 0.5, 3, 3),
        (3, 6, False, 2, 1, 1),  # waited for before it was sent, and computed meanwhile: not from here on
    ],
)
def test_a_transfer_under_compute(used, arrived, there, exposed, hidden, at_most):
    """Rank 1 posts two receives at 0, and computes from 5 to 8 while the second is under way."""
    programs = lower(schedules.gpipe, Plan(Placement.loop(2), 2))
    other = Activation(0, 1)
    driven = Driven(programs)
    for effect in programs[0]:
        posted = {Send(A, 1): 1, Send(other, 1): 4}.get(effect, 0)
        waits = [(v, 0, 0) for v in TABLE.needs(effect, programs[0].plan) if isinstance(v, Gradient)]
        driven.run(0, effect, posted, posted, *waits)
    for effect in programs[1]:
        if effect == Forward(1, 0):
            driven.run(1, effect, 5, 8, (A, 0, 2))
        elif effect == Forward(1, 1):
            driven.run(1, effect, 13, 14, (other, used, arrived))
        else:
            driven.run(1, effect, *((0, 0) if isinstance(effect, Recv) else (20, 20)))
    measurement = driven.recording.measurement()
    first, second = measurement.receives(1)
    assert (first.there, first.waiting, first.transfer) == (False, 1, 1)
    assert (second.there, second.waiting, second.transfer) == (there, 4, arrived - 4)
    account = measurement.account(1)
    assert (account.receives, account.there) == (2, int(there))
    assert (account.exposed, account.hidden, account.hidden_at_most) == (1 + exposed, hidden, at_most)


def run_on(recording, rank, effects):
    """Effects that begin and end, and values that come, at once."""
    for effect in effects:
        recording.begin(rank, effect)
        if isinstance(effect, Recv):
            recording.wait(rank, effect.value)
            recording.arrive(rank, effect.value)
        recording.end(rank, effect)


def run_all(recording):
    for rank, program in recording.programs.items():
        run_on(recording, rank, program)


def fail(recording, count):
    """A step that fails in the effect after `count` of rank 0's, the others' being done."""
    effects = recording.programs[0].effects
    run_on(recording, 0, effects[:count])
    for rank in (1, 2):
        run_on(recording, rank, recording.programs[rank])
    recording.begin(0, effects[count])


def starts(recording):
    return {rank: columns.starts for rank, columns in recording.measurement().columns.items()}


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_step_that_fails_leaves_the_last_whole_one_and_the_next_starts_over(before, count):
    programs, predicted = made("gpipe", communication=1)
    recording = drive(programs, predicted)
    for _ in range(before):
        run_all(recording)
    assert recording.steps == 1 + before
    whole = starts(recording)
    recording.clock.now = -1.0
    fail(recording, count)
    assert recording.steps == 1 + before
    assert starts(recording) == whole
    recording.clock.now = 77.0
    run_all(recording)
    assert recording.steps == 2 + before
    assert all(
        set(columns.starts) | set(columns.ends) == {77.0} for columns in recording.measurement().columns.values()
    )


@pytest.mark.parametrize("loop", [1, 3])
def test_memory_is_made_for_the_last_steps_and_the_current_one_and_kept(loop):
    programs, _ = made("1f1b")
    recording = Recording(programs, Clock(), loop)

    def columns():
        return {id(lane.starts) for lanes in (recording._lanes, *recording._last) for lane in lanes.values()}

    for _ in range(loop + 1):
        run_all(recording)
    before = columns()
    for _ in range(3):
        run_all(recording)
    assert columns() == before
    assert len(before) == (loop + 1) * len(programs)


@pytest.mark.parametrize("fails", [False, True])
def test_a_loop_is_of_complete_steps_in_a_row(fails):
    programs, _ = made("gpipe")
    recording = Recording(programs, Clock(), loop=3)

    def run(now):
        recording.clock.now = now
        run_all(recording)

    run(1.0)
    run(2.0)
    with pytest.raises(ValueError, match="2 complete steps in a row of 3: run more, without one that fails"):
        recording.measurement()
    if fails:
        fail(recording, 3)
        run(3.0)
        run(4.0)
        with pytest.raises(ValueError, match="2 complete steps in a row"):
            recording.measurement()
        run(5.0)
    else:
        run(3.0)
    measurement, times = recording.measurement(), [3.0, 4.0, 5.0] if fails else [1.0, 2.0, 3.0]
    assert measurement.steps == 3
    for rank, columns in measurement.columns.items():
        assert list(columns.starts) == [time for time in times for _ in programs[rank]]
    with pytest.raises(ScheduleError, match="loop must be a whole number of at least 1, not 0"):
        Recording(programs, loop=0)


def test_a_call_that_fails_before_its_first_effect_begins_a_row():
    programs, _ = made("gpipe")
    recording = Recording(programs, Clock(), loop=2)
    for ends in (True, False, True):
        recording.on_step_begin()
        if ends:
            run_all(recording)
            recording.end_step()
    assert recording.steps == 2
    with pytest.raises(ValueError, match="1 complete step in a row of 2"):
        recording.measurement()
    recording.on_step_begin()
    run_all(recording)
    recording.end_step()
    assert recording.measurement().steps == 2


@pytest.mark.parametrize("loop", [1, 2])
@pytest.mark.parametrize("count", [1, 5, None])
def test_effects_that_a_step_runs_again_are_recorded_once(loop, count):
    """Post-validation takes an update back, and the handler runs the step again after `count` effects of rank 0."""
    programs, _ = made("gpipe")
    recording = Recording(programs, Clock(), loop)
    for time_of_step in (1.0, 2.0):
        recording.on_step_begin()
        recording.clock.now = -1.0
        run_on(recording, 0, programs[0].effects[:count])
        recording.clock.now = time_of_step
        run_all(recording)
        recording.end_step()
    assert recording.steps == 2
    times = [1.0, 2.0][-loop:]
    for rank, columns in recording.measurement().columns.items():
        assert list(columns.starts) == [time for time in times for _ in programs[rank]]


def test_what_is_recorded_is_not_changed_by_a_later_step():
    programs, predicted = made("1f1b")
    recording = drive(programs, predicted)
    measurement = recording.measurement()
    recording.clock.now = 99.0
    for _ in range(2):
        run_all(recording)
    assert list(measurement.timeline().compute(0)) == list(predicted.compute(0))


def test_other_programs_than_those_that_run_are_refused():
    plan = Plan(Placement.loop(2), 4)
    recording = Recording(lower(schedules.gpipe, plan))
    recording.begin(0, recording.programs[0].effects[0])
    with pytest.raises(ScheduleError, match=r"rank 0 begins Forward\(stage=0, microbatch=3\), where .* has Recv\("):
        recording.begin(0, Forward(0, 3))


def test_what_is_not_known_is_said():
    programs = lower(schedules.gpipe, Plan(Placement.loop(2), 1))
    recording = Recording(programs)
    with pytest.raises(ValueError, match="no complete step has been recorded: pass observe=recording"):
        recording.measurement()
    for effect in programs[0]:
        recording.begin(0, effect)
        recording.end(0, effect)
    with pytest.raises(ValueError, match=r"rank 0's handler never reported that Gradient\(.*\) arrived"):
        recording.measurement()


def test_one_rank_alone_has_an_account_but_no_timeline():
    programs, predicted = made("1f1b", communication=1)
    whole = drive(programs, predicted).measurement()
    part = type(whole)(programs, {1: whole.columns[1]})
    account, expected = part.account(1), whole.account(1)
    assert (account.compute, account.between, account.waiting) == (expected.compute, [0.0] * 11, expected.waiting)
    assert (account.exposed, account.hidden, account.hidden_at_most) == (None, None, None)
    assert str(part).splitlines()[1].split()[6:8] == ["-", "-"]
    with pytest.raises(ValueError, match=r"rank 0 is not recorded .* fpipe.gather\(recording, group\)"):
        part.timeline()


@one_in(4)
@pytest.mark.parametrize(
    ("name", "schedule", "ranks"),
    [
        ("attention", "one_f_one_b", 2),
        ("linear", "gpipe", 3),
        ("linear", "interleaved_1f1b", 2),
        ("skip", "split", 4),
        ("tied", "gpipe_v", 2),
        ("linear", "gpipe_both_ways", 2),
        ("linear", "overlap", 3),
    ],
)
def test_a_step_in_one_process(name, schedule, ranks):
    case, generator, plan = cases.make(name, schedule, ranks, 4)
    recording = Recording(lower(generator, plan))
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handlers.Local(), observe=recording)
    for count in (1, 2):
        found = step(case.params, case.batch, case.target)
        assert recording.steps == count
    assert jobs.differences(found, cases.reference(case, generator, plan)) == []
    timeline = recording.measurement().timeline()
    for rank, program in recording.programs.items():
        spans = [timeline.spans[at] for at in timeline.spans.of(rank)]
        assert tuple(span.effect for span in spans) == program.effects
        assert all(before.start <= after.start for before, after in pairwise(spans))
        assert all(before.end <= after.start for before, after in pairwise(timeline.compute(rank)))
        assert all(span.start <= span.end for span in spans)
        causes = timeline.causes[rank]
        assert tuple(causes) == timeline.cause_names
        assert min(causes.values()) >= 0
        assert sum(causes.values()) == pytest.approx(timeline.makespan - timeline.busy[rank], rel=1e-9)


def test_a_step_that_fails_in_one_process_starts_over():
    def stage(p, x):
        if broken:
            raise ValueError("broken")
        return x * p

    broken = False
    pipeline = fpipe.Pipeline([lambda p, x: x * p, stage], lambda y, t: y.sum())
    plan = pipeline.plan(Placement.loop(2), 2)
    recording = Recording(lower(schedules.gpipe, plan))
    step = fpipe.value_and_grad(
        pipeline, schedules.gpipe, plan, handler=handlers.Local(), autodiff="eager", observe=recording
    )
    arguments = {0: torch.ones(()), 1: torch.ones(())}, torch.ones(4)
    step(*arguments)
    whole = starts(recording)
    broken = True
    with pytest.raises(StageError, match="broken"):
        step(*arguments)
    assert (recording.steps, starts(recording)) == (1, whole)
    broken = False
    step(*arguments)
    assert recording.steps == 2
    assert min(starts(recording)[0]) > max(whole[0])


def one_rank(rank, skew, steps=1, loop=1):
    """This rank's recording of steps that are over at once, by a clock that is ahead by `skew`; None: the machine's."""
    programs, _ = made("1f1b")
    recording = Recording(programs, time.perf_counter if skew is None else lambda: time.perf_counter() + skew, loop)
    for _ in range(steps):
        run_on(recording, rank, programs[rank])
    return recording


def gathered(rank, skews):
    """Offsets, uncertainty, this rank's own starts, and what all ranks' starts are made to be."""
    recording = one_rank(rank, skews[rank])
    own = recording.measurement().columns[rank].starts
    found = gather(recording)
    return (
        found.offsets,
        found.uncertainty,
        own,
        {r: c.starts for r, c in found.columns.items()},
        found.timeline().makespan,
    )


def test_ranks_that_share_a_clock_are_put_together_as_they_are(pools):
    found = pools(4).run(gathered, [None] * 4)
    for rank, (offsets, uncertainty, own, starts, makespan) in enumerate(found):
        assert offsets == uncertainty == dict.fromkeys(range(4), 0.0)
        assert starts == found[0][3]
        assert starts[rank] == own
        assert makespan == found[0][4]


def test_clocks_that_differ_are_compared(pools):
    skews = [0.0, 5.0, -1000.0, 0.25]
    for rank, (offsets, uncertainty, own, starts, _) in enumerate(pools(4).run(gathered, skews)):
        assert uncertainty[0] == 0 < min(uncertainty[r] for r in (1, 2, 3))
        assert max(uncertainty.values()) < 0.1
        for other, skew in enumerate(skews):
            assert abs(offsets[other] - skew) <= uncertainty[other]
        assert list(starts[rank]) == pytest.approx([start - offsets[rank] for start in own], rel=0, abs=1e-9)


def gathered_loop(rank, loops):
    """The starts of all ranks in two steps of three, in seconds of rank 0's clock, and the number of these steps."""
    measurement = gather(one_rank(rank, 5.0 * rank, 3, loops[rank]))
    return {r: list(columns.starts) for r, columns in measurement.columns.items()}, measurement.timeline().steps


def test_loops_are_gathered(pools):
    programs, _ = made("1f1b")
    by_rank = pools(4).run(gathered_loop, [2] * 4)
    assert all(each == by_rank[0] for each in by_rank)
    starts, steps = by_rank[0]
    assert steps == 2
    assert {rank: len(own) for rank, own in starts.items()} == {rank: 2 * len(programs[rank]) for rank in programs}
    assert all(own == sorted(own) for own in starts.values())
    first = [own[0] for own in starts.values()]
    assert max(first) - min(first) < 4  # seconds; two clocks differ by 5
    for outcome in pools(4).outcomes(gathered_loop, [1, 1, 2, 1]):
        assert outcome.error == "ScheduleError"
        assert "the ranks recorded different numbers of steps: give every rank's Recording" in outcome.text


def refused(rank, steps, whose):
    recording = one_rank(rank if whose is None else whose, None, steps[rank])
    gather(recording)


@pytest.mark.parametrize(
    ("steps", "whose", "error", "text"),
    [
        ((1, 1), None, "ScheduleError", "rank 0 of 2 processes does not play that rank alone of 4 recorded ones"),
        ((1, 2, 1, 1), None, "ValueError", "rank 0 has recorded 1 complete steps, rank 1 2, so their last ones differ"),
        ((1, 1, 1, 1), 0, "ScheduleError", "rank 1 of 4 processes does not play that rank alone of 4 recorded ones"),
        ((1, 0, 1, 1), None, "ValueError", "no complete step has been recorded"),
    ],
)
def test_what_cannot_be_gathered_is_refused_on_every_rank(pools, steps, whose, error, text):
    for outcome in pools(len(steps)).outcomes(refused, steps, whose):
        assert outcome.error == error
        assert text in outcome.text


def over_gloo(rank, schedule, ranks):
    """Two steps on this rank, and what was measured of the second: where it differs, and the measurement."""
    case, generator, plan = cases.make("attention", schedule, ranks, 4)
    params, batch, target, _ = cases.own(case, plan, rank)
    recording = Recording(lower(generator, plan))
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=jobs.handler(), observe=recording)
    expected = jobs.expected_on(cases.reference(case, generator, plan), params, plan, rank, False)
    found = [d for _ in range(2) for d in jobs.differences(step(params, batch, target), expected)]
    measurement = gather(recording)
    return found, str(measurement), measurement


@pytest.mark.parametrize("schedule", few(["one_f_one_b", "zb_h1", "interleaved_1f1b"], ["zb_h1"]))
def test_a_step_over_gloo(pools, schedule):
    for differing, table, measurement in pools(2).run(over_gloo, schedule, 2):
        assert differing == []
        timeline = measurement.timeline()
        for rank in range(2):
            assert sum(timeline.causes[rank].values()) == pytest.approx(timeline.makespan - timeline.busy[rank])
            assert all(before.end <= after.start for before, after in pairwise(timeline.compute(rank)))
            account = measurement.account(rank)
            assert account.compute == pytest.approx(timeline.busy[rank])
            assert account.receives > 0
            assert min(account.between) > 0
            for receive in measurement.receives(rank):
                assert receive.sent < receive.arrived
        assert len(table.splitlines()) == 1 + 2 + 3


def on_grid(rank, skew):
    """What each process of a grid gathers over all of them, and over its own replica; by clocks that differ."""
    _, plan = grid_jobs.pipeline_and_plan()
    programs = lower(schedules.looped_bfs, plan, resident=1)
    recording = Recording(programs, (lambda: time.perf_counter() + 10 * rank) if skew else time.perf_counter)
    handler, *_ = grid_jobs.run(2, recording)
    whole, replica = gather(recording), gather(recording, handler.group)
    return (handler.grid.replica, handler.rank), whole, replica


@pytest.mark.parametrize("skew", few([False, True], [True]))
def test_recordings_of_replicas_are_gathered(pools, skew):
    found = pools(4).run(on_grid, skew)
    assert [place for place, _, _ in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for (replica, rank), whole, alone in found:
        assert len(whole.replicas) == 2
        starts = [{rank: c.starts for rank, c in each.columns.items()} for each in whole.replicas]
        assert starts == [{rank: c.starts for rank, c in each.columns.items()} for each in found[0][1].replicas]
        assert {rank: c.starts for rank, c in whole.columns.items()} == starts[replica]
        assert alone.replicas == ()
        assert sorted(alone.columns) == [0, 1]
        if skew:  # process r * 2 + rank is ahead by ten seconds for each of its number
            for r, each in enumerate(whole.replicas):
                for other in range(2):
                    expected = 10 * (2 * r + other)
                    assert abs(each.offsets[other] - expected) <= each.uncertainty[other] < 0.1
            assert abs(alone.offsets[1] - 10) <= alone.uncertainty[1] < 0.1
        timeline = whole.timeline()
        origins = [each.origin for each in whole.replicas]
        assert whole.origin == min(origins)
        assert timeline.start == pytest.approx(origins[replica] - min(origins), abs=1e-9)
        assert {span.track for span in timeline.spans} >= {"gather", "scatter"}
        account = whole.account(rank)
        assert account.gathering > 0
        assert account.scattering >= 0  # a sum may be there before it is waited for
        costs = whole.costs()
        assert min(*costs.gather, *costs.scatter) >= 0
        assert max(costs.gather) > 0
        predicted = simulate_programs(whole.programs, costs)
        assert [(s.rank, s.track, s.effect) for s in predicted.spans] == [
            (s.rank, s.track, s.effect) for s in timeline.spans
        ]
