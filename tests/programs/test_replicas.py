"""The programs of replicated and sharded pipelines: gathers, releases and scatters, placed, verified and simulated."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpipe import Costs, Link, Placement, Plan, ScheduleError, lower, schedules, simulate
from fpipe.effects import BackwardWeight, Forward, Gather, Overlap, Reduce, Release, Scatter, parts
from fpipe.programs.lowering import forward_only
from fpipe.programs.program import Program
from fpipe.programs.residence import Residence, residence
from fpipe.programs.verifier import check
from fpipe.schedules import from_table
from fpipe.tables import WEIGHT
from fpipe.timelines.simulator import simulate_programs
from tests.support.catalogue import FUNCTIONS
from tests.support.combinations import sample

SIZES = [(2, 2, 4), (2, 4, 8), (4, 2, 8), (4, 4, 16)]  # ranks, chunks, microbatches


def gathers(programs):
    return [sum(type(e) is Gather for e in programs[rank]) for rank in range(len(programs))]


def looped(ranks, chunks, microbatches):
    return Plan(Placement.loop(ranks, chunks), microbatches, replicas=2)


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), SIZES)
def test_gathers_have_the_closed_forms(ranks, chunks, microbatches):
    plan = looped(ranks, chunks, microbatches)
    for room in range(1, chunks + 1):
        breadth_first = lower(schedules.looped_bfs, plan, resident=room)
        assert gathers(breadth_first) == [2 * chunks - room] * ranks
        depth_first = lower(schedules.interleaved_1f1b, plan, resident=room)
        if room > 1:
            assert gathers(depth_first) == [2 * (chunks - room) * microbatches // ranks + room] * ranks


@pytest.mark.parametrize(("ranks", "microbatches", "expected"), [(2, 4, [7, 11]), (4, 16, [27, 31, 35, 39])], ids=str)
def test_gathers_of_a_v_with_one_resident_stage(ranks, microbatches, expected):
    plan = Plan(Placement.v(ranks), microbatches, replicas=2)
    assert gathers(lower(schedules.zb_v, plan, resident=1)) == expected


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_schedule_is_right_with_replicas_and_shards(name):
    plan = replace(FUNCTIONS[name].plan(4, 8), replicas=3)
    schedule, chunks = FUNCTIONS[name].schedule(plan), max(len(plan.stages_on(rank)) for rank in range(plan.ranks))
    overlaps = any(type(e) is Overlap for program in lower(schedule, plan).values() for e in program)
    for room in range(1 + overlaps, chunks + 1):
        programs = lower(schedule, plan, resident=room)
        report = check(programs, ordered=False)
        assert max(report.peak_resident) <= room
        if room == chunks:
            assert gathers(programs) == [len(plan.stages_on(rank)) for rank in range(plan.ranks)]
    for rank, program in lower(schedule, plan).items():
        scatters = [(at, e) for at, e in enumerate(program) if type(e) is Scatter]
        assert {e for _, e in scatters} == {Scatter(stage, rank) for stage in plan.stages_on(rank)}
        assert len(scatters) == len(plan.stages_on(rank))
        for at, e in scatters:
            weights = (works(program, each, e.stage) for each in range(at, len(program)))
            assert not any(weights)  # the last weight gradient of the stage is before it


def works(program, at, stage):
    rows = program.table.effects
    return any(rows[type(part)].work & WEIGHT and part.stage == stage for part in parts(program.effects[at]))


def test_one_replica_has_the_programs_of_a_plan_without_replicas():
    plan = looped(2, 2, 4)
    alone = lower(schedules.looped_bfs, replace(plan, replicas=1))
    assert {type(e) for program in alone.values() for e in program}.isdisjoint({Gather, Release, Scatter})
    both = lower(schedules.looped_bfs, plan)
    for rank, program in alone.items():
        without = [e for e in both[rank] if type(e) is not Scatter]
        assert sorted(map(repr, without)) == sorted(map(repr, program))


@cache
def fewest(uses, room, whole=frozenset()):
    """The fewest gathers of a sequence of stages, by trying every choice."""
    if not uses:
        return 0
    first, rest = uses[0], uses[1:]
    if first in whole:
        return fewest(rest, room, whole)
    choices = [whole] if len(whole) < room else [whole - {stage} for stage in whole]
    return 1 + min(fewest(rest, room, choice | {first}) for choice in choices)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(1, 3))
def test_no_other_residence_has_fewer_gathers(uses, room):
    plan = Plan(Placement((0, 0, 0, 0)), len(uses))
    program = Program(plan, 0, tuple(Forward(stage, at) for at, stage in enumerate(uses)))
    placed = residence({0: program}, room)[0]
    assert gathers({0: placed}) == [fewest(tuple(uses), room)]
    assert [e for e in placed if type(e) is Forward] == list(program)
    whole = set()
    for effect in placed:
        if type(effect) is Gather:
            whole.add(effect.stage)
        elif type(effect) is Release:
            whole.remove(effect.stage)
        else:
            assert effect.stage in whole
        assert len(whole) <= room
    assert not whole


def test_a_limit_in_bytes():
    programs = lower(schedules.looped_bfs, looped(2, 2, 4))
    placed = residence(programs, Residence(30, [10, 30, 20, 10]))
    assert gathers(placed) == [2, 3]  # rank 0 has stages of 10 and 20, rank 1 of 30 and 10
    with pytest.raises(ScheduleError, match=r"rank 1 yields Forward.*needs 30 B whole at once, and the limit is 29 B"):
        residence(programs, Residence(29, [10, 30, 20, 10]))


@pytest.mark.parametrize("size", [-1, float("nan"), float("inf")])
def test_sizes_are_numbers_of_bytes(size):
    with pytest.raises(ScheduleError, match=f"the size of stage 1 must be a number of bytes, not {size}"):
        Residence(30, [10, size])


def test_a_gather_ahead_is_as_late_as_hides_it():
    """Looped BFS on one rank runs F0 F0 F1 F1 B1 B1 B0 B0; the numbers are those of the computes before a gather."""
    plan, costs = looped(1, 2, 2), Costs(forward=1, backward=3, gather=1.5)
    early = lower(schedules.looped_bfs, plan, resident=1)[0]
    late = lower(schedules.looped_bfs, plan, resident=Residence(1, costs=costs))[0]
    all_of_it = lower(schedules.looped_bfs, plan, resident=Residence(costs=costs))[0]
    assert posts(early) == posts(late) == [(0, 0), (1, 2), (0, 6)]  # there is no room for the next before its use
    assert posts(lower(schedules.looped_bfs, plan, resident=2)[0]) == [(0, 0), (1, 0)]
    assert posts(all_of_it) == [(0, 0), (1, 0)]  # 1.5 before 2 is within the first forward
    cheap = lower(schedules.looped_bfs, plan, resident=Residence(costs=replace(costs, gather=1)))[0]
    assert posts(cheap) == [(0, 0), (1, 1)]


@pytest.mark.parametrize(("cost", "makespan"), [(0.5, 100.5), (5, 114)])
def test_scatters_hide_no_gather(cost, makespan):
    plan, costs = Plan(Placement.loop(2, 4), 8, replicas=2), Costs(forward=1, backward=2, gather=cost, scatter=cost)
    for resident in (2, Residence(2, costs=costs)):
        assert simulate(schedules.looped_bfs, plan, costs, resident=resident).makespan == makespan


CHUNKED = ["looped_bfs", "interleaved_1f1b", "zb_v", "v_half", "dualpipe"]


@pytest.mark.parametrize("name", sample([*FUNCTIONS], CHUNKED))
@pytest.mark.parametrize("gather", [0.0, 0.7, 4.0])
def test_gathers_ahead_are_no_more_and_take_no_longer(name, gather):
    plan, costs = replace(FUNCTIONS[name].plan(4, 8), replicas=2), Costs(1, 1, 1, gather=gather, scatter=gather)
    schedule = FUNCTIONS[name].schedule(plan)
    most = max(len(plan.stages_on(rank)) for rank in range(plan.ranks))
    for room in (most, 2):
        early, late = (lower(schedule, plan, resident=each) for each in (room, Residence(room, costs=costs)))
        check(late, ordered=False)
        for rank in early:
            assert [stage for stage, _ in posts(late[rank])] == [stage for stage, _ in posts(early[rank])]
            assert all(b >= a for (_, a), (_, b) in zip(posts(early[rank]), posts(late[rank]), strict=True))
        assert simulate_programs(late, costs).makespan <= simulate_programs(early, costs).makespan + 1e-9


def posts(program):
    """(stage, the number of computes before it) of each gather."""
    computes = [bool(program.table.effects[type(e)].work) for e in program]
    return [(e.stage, sum(computes[:at])) for at, e in enumerate(program) if type(e) is Gather]


def test_an_overlap_of_two_stages_needs_room_for_both():
    plan = replace(FUNCTIONS["dualpipe"].plan(4, 8), replicas=2)
    with pytest.raises(
        ScheduleError, match=r"Overlap.*needs the parameters of 2 stages whole at once, and the limit is 1"
    ):
        lower(schedules.dualpipe, plan, resident=1)


def test_evaluation_gathers_what_its_forwards_need():
    programs = residence(forward_only(lower(schedules.looped_bfs, looped(2, 2, 4))), 1)
    check(programs)
    assert gathers(programs) == [2, 2]
    assert {type(e) for program in programs.values() for e in program}.isdisjoint({Scatter, Reduce})


def test_weight_gradients_of_later_stages_need_no_parameters():
    plan = looped(2, 2, 4)
    programs = lower(schedules.zb_v, Plan(Placement.v(2), 4, replicas=2), resident=1)
    table = programs[0].table
    for program in programs.values():
        for effect in program:
            if type(effect) is BackwardWeight:
                needed = [name for name in table.needs(effect, program.plan) if hasattr(name, "stage")]
                assert any(type(name).__name__ == "Parameters" for name in needed) == (effect.stage == 0)
    assert plan.gathered == frozenset()  # lowering makes a plan of its own


# Wrong programs


def program_of(schedule=schedules.looped_bfs, resident=1):
    return lower(schedule, looped(2, 2, 4), resident=resident)


def changed(programs, change, rank=0):
    effects = change(list(programs[rank]))
    return {**programs, rank: replace(programs[rank], effects=tuple(effects))}


def without(kind, number=0):
    def change(effects):
        at = [at for at, e in enumerate(effects) if type(e) is kind][number]
        return effects[:at] + effects[at + 1 :]

    return change


def twice(kind):
    def change(effects):
        at = next(at for at, e in enumerate(effects) if type(e) is kind)
        return effects[: at + 1] + effects[at:]

    return change


def moved(kind, places):
    def change(effects):
        at = next(at for at, e in enumerate(effects) if type(e) is kind)
        effect = effects.pop(at)
        effects.insert(at + places, effect)
        return effects

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(Gather), r"rank 0 yields Forward.*parameters of stage 0 are not whole: yield Gather\(0\) before it"),
        (without(Gather, -1), r"the parameters of stage . are not whole"),
        (without(Release, -1), r"rank 0 never yields Release\(0\)"),
        (without(Release), r"rank 0 never yields Release\(0\)|whole already"),
        (twice(Gather), r"the parameters of the stage are whole already: release them first"),
        (twice(Release), r"rank 0 yields Release.*not whole"),
        (moved(Release, -2), r"the parameters of stage 0 are not whole"),
        (lambda effects: [Gather(1), *effects], r"only rank 1 may run it"),
        (without(Scatter), r"rank 0 .*Scatter\(2, 0\)"),
        (twice(Scatter), r"the stage is scattered already"),
        (moved(Scatter, -6), r"it comes before the last weight gradient of stage 2"),
        (lambda effects: [Scatter(0, 1) if e == Scatter(0, 0) else e for e in effects], r"only rank 1 may run it"),
        (moved(Reduce, -20), r"it comes before (Scatter\(0, 0\): a sum is of all replicas|the last weight)"),
    ],
)
def test_a_wrong_program_is_refused(change, message):
    with pytest.raises(ScheduleError, match=message):
        check(changed(program_of(), change))


def test_an_overlap_reads_the_parameters_of_both_its_parts():
    """A gather for one part of an overlap is not enough (a fault that other systems had)."""
    plan = replace(FUNCTIONS["dualpipe"].plan(4, 8), replicas=2)
    programs = lower(schedules.dualpipe, plan, resident=2)
    program = list(programs[1])
    at = next(at for at, e in enumerate(program) if type(e) is Overlap and e.forward.stage != e.backward.stage)
    stage = program[at].backward.stage
    last = next(i for i in range(at, len(program)) if program[i] == Release(stage))
    program.insert(at, program.pop(last))
    with pytest.raises(ScheduleError, match=f"Overlap.*parameters of stage {stage} are not whole"):
        check({**programs, 1: replace(programs[1], effects=tuple(program))})


def test_one_replica_scatters_nothing():
    programs = lower(schedules.gpipe, Plan(Placement.loop(2), 2))
    with pytest.raises(ScheduleError, match="the plan has one replica"):
        check(changed(programs, lambda effects: [*effects, Scatter(0, 0)]))


def test_a_schedule_keeps_the_gathers_that_it_yields():
    plan = looped(2, 1, 2)
    table = {rank: [Gather(rank), *schedules.gpipe(rank, plan), Release(rank)] for rank in range(plan.ranks)}
    programs = lower(from_table(table), plan, resident=1)
    check(programs)
    assert gathers(programs) == [1, 1]
    assert programs[0].plan.gathered == {0, 1}


# Simulated


def test_gathers_run_beside_the_compute():
    """One rank with two stages, one at a time: what is gathered before its first use, and what is waited for."""
    plan = Plan(Placement((0, 0)), 1, replicas=2)
    timeline = simulate(schedules.gpipe, plan, Costs(1, 1, 1, gather=0.5, scatter=0.25), resident=1)
    # G0 0-0.5, F0 0.5-1.5, G1 1.5-2, F1 2-3, B1 3-5, G0 5-5.5, B0 5.5-7.5; scatter of 1: 5-5.25, of 0: 7.5-7.75
    assert timeline.makespan == 7.75
    assert timeline.causes == [
        {"warm-up": 0, "dependency": 0, "transfer": 0, "imbalance": 0, "drain": 0, "gather": 1.5, "scatter": 0.25}
    ]
    both = simulate(schedules.gpipe, plan, Costs(1, 1, 1, gather=0.5, scatter=0.25), resident=2)
    assert both.makespan == 6.75  # the second gather travels beside the first forward
    lanes = [(span.track, span.start, span.end) for span in both.spans if span.track in ("gather", "scatter")]
    assert lanes == [("gather", 0, 0.5), ("gather", 0.5, 1), ("scatter", 4.5, 4.75), ("scatter", 6.5, 6.75)]
    assert type(both.critical_path[0].effect) is Gather
    assert type(both.critical_path[-1].effect) is Scatter


@given(st.floats(0, 3), st.floats(0, 3), st.integers(1, 2), st.sampled_from([schedules.zb_v, schedules.gpipe]))
def test_every_unit_of_time_is_accounted_for(gather, scatter, room, schedule):
    plan = Plan(Placement.v(3), 4, replicas=2)
    costs = Costs(1, [1, 2, 1, 3, 1, 1], 1, gather=gather, scatter=scatter, communication=0.5)
    timeline = simulate(schedule, plan, costs, resident=room)
    last = max(span.end for span in timeline.spans if span.track in ("compute", "scatter"))
    assert timeline.makespan == pytest.approx(last - timeline.start)
    for rank in range(plan.ranks):
        assert min(timeline.causes[rank].values()) >= 0
        assert sum(timeline.causes[rank].values()) == pytest.approx(timeline.makespan - timeline.busy[rank])


def test_the_time_of_a_gather_over_a_link():
    plan = Plan(Placement((0,)), 1, replicas=4)
    costs = Costs(0, 0, 0, parameters=100, gather=Link(0.5, 25), scatter=Link(0.25, 50), replicas=4)
    assert simulate(schedules.gpipe, plan, costs, resident=1).makespan == (0.5 + 75 / 25) + (0.25 + 75 / 50)
    halves = replace(costs, shards=2)  # each replica has a half, and lacks one
    assert simulate(schedules.gpipe, plan, halves, resident=1).makespan == (0.5 + 50 / 25) + (0.25 + 75 / 50)


def test_whole_parameters_count_as_memory_while_they_are_there():
    plan = looped(2, 2, 4)
    costs = Costs(parameters=[100, 10, 30, 20], gather=0.1)
    one, both = (check(lower(schedules.looped_bfs, plan, resident=room), costs=costs).peak_bytes for room in (1, 2))
    assert one == (100, 20)
    assert both == (130, 30)
    timeline = simulate(schedules.looped_bfs, plan, costs, resident=1)
    assert [max(size for _, size in timeline.memory(rank)) for rank in range(2)] == [100, 20]
