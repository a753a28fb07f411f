"""Updates of stages in programs: where lowering puts them, the verifier's rules, and what several steps take."""

import pytest

from fpipe import Costs, Placement, Plan, ScheduleError, draw, lower, simulate, verify
from fpipe.effects import Reduce, Send, Update
from fpipe.schedules import from_table, gpipe, looped_bfs, one_f_one_b, updating, zb_h1, zb_h2
from fpipe.schedules.catalogue import CATALOGUE


def test_the_picture():
    assert (
        draw(updating(one_f_one_b), Plan(Placement.loop(3), 4))
        == """\
rank 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 U
rank 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 U
rank 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 U"""
    )


def test_a_chunk_is_updated_before_the_next_one_is_done():
    assert (
        draw(updating(looped_bfs), Plan(Placement.loop(2, 2), 2))
        == """\
rank 0  F0a F1a F0b F1b .   .   B0b B1b Ub  B0a B1a Ua
rank 1  .   F0a F1a F0b F1b B0b B1b Ub  B0a B1a Ua"""
    )


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_schedule_updates_each_stage_once(name):
    entry = CATALOGUE[name]
    plan = entry.plan(4, 8)
    schedule = entry.schedule(plan)
    verify(updating(schedule), plan)
    for program in lower(updating(schedule), plan).values():
        effects = list(program)
        for stage in plan.stages_on(program.rank):
            assert effects.count(Update(stage)) == 1
            assert effects.index(Update(stage)) == effects.index(Reduce(stage)) + 1


def test_untrained_stages_and_forward_passes_have_none():
    plan = Plan(Placement.loop(3), 4, trained=frozenset({1}))
    updates = [[e for e in program if isinstance(e, Update)] for program in lower(updating(zb_h1), plan).values()]
    assert updates == [[], [Update(1)], []]


def wrong(change):
    plan = Plan(Placement.loop(2), 2)
    programs = {rank: [*program] for rank, program in lower(updating(zb_h1), plan).items()}
    change(programs[1])
    return from_table({rank: tuple(order) for rank, order in programs.items()}), plan


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda order: order.remove(Update(1)), r"rank 1 never yields Update\(stage=1\): a schedule yields every"),
        (lambda order: order.append(Update(1)), r"rank 1 yields Update\(stage=1\), but the stage is updated already"),
        (lambda order: order.append(Update(0)), r"rank 1 yields Update\(stage=0\), but only rank 0 may run it"),
        (
            lambda order: order.insert(0, order.pop()),
            r"rank 1 yields Update\(stage=1\), but it comes before Reduce\(1\): the stage's gradients are not final",
        ),
    ],
)
def test_what_is_refused(change, text):
    with pytest.raises(ScheduleError, match=text):
        verify(*wrong(change))


def test_shared_stages_are_updated_after_all_their_sums():
    plan = Plan(Placement.both_ways(2), 4)
    for program in lower(updating(gpipe), plan).values():
        assert [type(e).__name__ for e in [*program][-4:]] == ["Reduce", "Update"] * 2


# Several steps


@pytest.mark.parametrize("update", [0, 1.5])
@pytest.mark.parametrize("m", [6, 12])
def test_two_ranks_take_the_cost_of_a_step_instead_of_its_makespan(m, update):
    """A step of zb-h2 has no bubble: without a barrier, a rank is at work all the time."""
    plan, costs = Plan(Placement.loop(2), m), Costs(update=update)
    one, loop = (simulate(updating(zb_h2), plan, costs, steps=steps) for steps in (1, 20))
    assert one.makespan == one.period == 3 * m + 1 + update
    assert loop.period == 3 * m + update
    assert loop.makespan == 20 * loop.period + 1


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("update", [0, 1.5])
def test_a_step_takes_its_cost_on_more_ranks_too(ranks, update):
    """The last rank begins ranks - 1 forwards late, and the ranks before it have run them when it comes."""
    plan, costs = Plan(Placement.loop(ranks), 4 * ranks), Costs(update=update)
    one, loop = (simulate(updating(zb_h2), plan, costs, steps=steps) for steps in (1, 12))
    assert one.makespan == one.cost + ranks - 1
    assert loop.period == one.cost == 3 * 4 * ranks + update


def test_values_that_do_not_lead_wait_until_all_ranks_have_begun():
    """Of gpipe on two ranks one forward leads: the second value of the last rank's step waits for its begin."""
    plan, costs = Plan(Placement.loop(2), 4), Costs(update=[0, 30])
    loop = simulate(updating(gpipe), plan, costs, steps=2)
    late = loop.step_ends[1][0]
    sends = [span for span in loop.spans if span.rank == 0 and isinstance(span.effect, Send)][4:]
    assert [span.start < late for span in sends] == [True, False, False, False]


def test_the_wait_for_ranks_that_come_late_is_a_dependency():
    loop = simulate(zb_h2, Plan(Placement.loop(4), 8), steps=3)
    assert loop.cause_names == simulate(gpipe, Plan(Placement.loop(4), 8)).cause_names
    assert {span.rank for span in loop.critical_path} == {0, 1, 2, 3}
    assert loop.critical_path[0].start == 0
    assert loop.critical_path[-1].end == loop.makespan


def test_steps_whose_first_rank_ends_last_take_the_makespan_each():
    plan = Plan(Placement.loop(2), 4)
    one, loop = (simulate(gpipe, plan, steps=steps) for steps in (1, 5))
    assert one.period == one.makespan
    assert loop.period == one.makespan
    assert loop.step_ends == [[15 * i for i in range(1, 6)], [15 * i - 2 for i in range(1, 6)]]
    assert [len(list(loop.compute(rank))) for rank in (0, 1)] == [5 * 8] * 2
    assert loop.peak_in_flight == one.peak_in_flight


def test_chunks_of_one_rank():
    plan = Plan(Placement.loop(1, 2), 3)
    loop = simulate(updating(looped_bfs), plan, Costs(update=2), steps=3)
    assert loop.period == 3 * 2 * 3 + 2 * 2


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_wrong_numbers_of_steps(steps):
    with pytest.raises((ScheduleError, TypeError), match="steps must be"):
        simulate(gpipe, Plan(Placement.loop(2), 4), steps=steps)
