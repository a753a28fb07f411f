"""The library of schedules against drawn timelines and published closed forms."""

from inspect import cleandoc

import pytest

from fpipe import Edges, Placement, Plan, ScheduleError, draw, lower
from fpipe.effects import Backward, BackwardInput, BackwardWeight, Forward, Overlap
from fpipe.programs.interleaving import interleave
from fpipe.programs.lowering import wavefront
from fpipe.schedules import gpipe, interleaved_1f1b, one_f_one_b, zb_h1
from tests.support.combinations import few, sample


def zero_bubble_by_hand(rank, plan):
    """A forward, an input gradient and a weight gradient in turn: what the drawing calls F, I and W."""
    (stage,) = plan.stages_on(rank)
    for m in range(plan.microbatches):
        yield from (Forward(stage, m), BackwardInput(stage, m), BackwardWeight(stage, m))


def overlapped_by_hand(rank, plan):
    yield Forward(rank, 0)
    if rank == 0:
        yield from (Forward(0, 1), Overlap(Forward(0, 2), Backward(0, 0)))
    else:
        yield from (Backward(1, 0), Forward(1, 1), Overlap(Forward(1, 2), Backward(1, 1)), Backward(1, 2))
    yield from (Backward(0, 1), Backward(0, 2)) if rank == 0 else ()


@pytest.mark.parametrize(
    ("schedule", "plan", "timeline"),
    [
        (
            gpipe,
            Plan(Placement.loop(4), 3),
            """
            rank 0  F0 F1 F2 .  .  .  .  .  .  B0 B1 B2
            rank 1  .  F0 F1 F2 .  .  .  .  B0 B1 B2
            rank 2  .  .  F0 F1 F2 .  .  B0 B1 B2
            rank 3  .  .  .  F0 F1 F2 B0 B1 B2
            """,
        ),
        (
            gpipe,
            Plan(Placement.v(2), 2),
            """
            rank 0  F0a F1a .   .   F0b F1b B0b B1b .   .   B0a B1a
            rank 1  .   F0a F1a F0b F1b .   .   B0b B1b B0a B1a
            """,
        ),
        (
            gpipe,
            Plan(Placement.both_ways(2), 4),
            """
            rank 0  F0a F2a F1b F3b B1b B3b B0a B2a
            rank 1  F1a F3a F0b F2b B0b B2b B1a B3a
            """,
        ),
        (
            gpipe,
            Plan(Placement.loop(3), 1, Edges([(), (), (0, 1)])),
            """
            rank 0  F0 .  .  B0
            rank 1  F0 .  .  B0
            rank 2  .  F0 B0
            """,
        ),
        (
            one_f_one_b,
            Plan(Placement.loop(4), 6),
            """
            rank 0  F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 .  B3 .  B4 .  B5
            rank 1  .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5
            rank 2  .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5
            rank 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
            """,
        ),
        (
            one_f_one_b,
            Plan(Placement.loop(4), 2),
            """
            rank 0  F0 F1 .  .  .  .  .  B0 .  B1
            rank 1  .  F0 F1 .  .  .  B0 .  B1
            rank 2  .  .  F0 F1 .  B0 .  B1
            rank 3  .  .  .  F0 B0 F1 B1
            """,
        ),
        (
            one_f_one_b,
            Plan(Placement((1, 0)), 2),
            """
            rank 0  .  F0 B0 F1 B1
            rank 1  F0 F1 .  B0 .  B1
            """,
        ),
        (
            interleaved_1f1b,
            Plan(Placement.loop(2, chunks=2), 2),
            """
            rank 0  F0a F1a F0b F1b .   B0b .   B1b B0a B1a
            rank 1  .   F0a F1a F0b B0b F1b B1b B0a B1a
            """,
        ),
        (
            interleaved_1f1b,
            Plan(Placement.loop(2, chunks=2), 1),
            """
            rank 0  F0a .   F0b .   .   B0b .   B0a
            rank 1  .   F0a .   F0b B0b .   B0a
            """,
        ),
        (
            interleaved_1f1b,
            Plan(Placement.loop(1), 2),
            """
            rank 0  F0 B0 F1 B1
            """,
        ),
        (
            wavefront,
            Plan(Placement.v(2), 3),
            """
            rank 0  F0a F1a F2a F0b .   F1b .   F2b
            rank 1  .   F0a F0b F1a F1b F2a F2b
            """,
        ),
        (
            zero_bubble_by_hand,
            Plan(Placement.loop(2), 2),
            """
            rank 0  F0 .  .  I0 W0 F1 .  .  I1 W1
            rank 1  .  F0 I0 W0 .  .  F1 I1 W1
            """,
        ),
        (
            overlapped_by_hand,
            Plan(Placement.loop(2), 3),
            """
            rank 0  F0    F1    .     F2&B0 .     B1    B2
            rank 1  .     F0    B0    F1    F2&B1 B2
            """,
        ),
    ],
)
def test_the_timeline(schedule, plan, timeline):
    assert draw(schedule, plan) == cleandoc(timeline)


def test_rank_numbers_are_aligned_when_they_have_two_digits():
    first, *_, last = draw(gpipe, Plan(Placement.loop(11), 1)).splitlines()
    assert first.startswith("rank  0  F0 .")
    assert last == "rank 10  " + ".  " * 10 + "F0 B0"


def compute_orders(schedule, plan):
    return {rank: list(schedule(rank, plan)) for rank in range(plan.ranks)}


def replay(plan, orders):
    """How many effects can run, in a chain, if every rank goes on until it lacks what it needs."""
    done, at = set(), dict.fromkeys(orders, 0)

    def ready(e):
        if isinstance(e, Forward):
            return e.stage == 0 or Forward(e.stage - 1, e.microbatch) in done
        behind = e.stage == plan.stages - 1 or Backward(e.stage + 1, e.microbatch) in done
        return behind and Forward(e.stage, e.microbatch) in done

    moved = True
    while moved:
        moved = False
        for rank, order in orders.items():
            while at[rank] < len(order) and ready(order[at[rank]]):
                done.add(order[at[rank]])
                at[rank] += 1
                moved = True
    return sum(at.values())


MICROBATCHES = sample(range(1, 13), (1, 2, 3, 5, 8, 12))


@pytest.mark.parametrize("ranks", few(range(1, 7), (1, 2, 5)))
@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [(one_f_one_b, 1), *((s, v) for s in (gpipe, interleaved_1f1b) for v in range(1, 5))],
)
def test_the_schedule_is_legal_and_complete(schedule, ranks, chunks):
    for microbatches in MICROBATCHES:
        plan = Plan(Placement.loop(ranks, chunks), microbatches)
        orders = compute_orders(schedule, plan)
        for stage in range(plan.stages):
            for kind in (Forward, Backward):
                own = [e.microbatch for e in orders[stage % ranks] if isinstance(e, kind) and e.stage == stage]
                assert own == list(range(microbatches))
        assert sum(map(len, orders.values())) == replay(plan, orders) == 2 * plan.stages * microbatches
        programs = lower(schedule, plan)
        assert len(interleave(programs)) == sum(map(len, programs.values()))


def peaks(schedule, plan):
    """For each rank, the most microbatches (times chunks) run forward and not backward yet."""
    found = []
    for order in compute_orders(schedule, plan).values():
        in_flight = [sum(1 if isinstance(e, Forward) else -1 for e in order[: at + 1]) for at in range(len(order))]
        found.append(max(in_flight))
    return found


@pytest.mark.parametrize("p", few(range(1, 7), (1, 2, 5)))
@pytest.mark.parametrize("m", MICROBATCHES)
def test_gpipe_keeps_every_microbatch_in_flight(p, m):
    assert peaks(gpipe, Plan(Placement.loop(p), m)) == [m] * p


@pytest.mark.parametrize("p", few(range(1, 7), (1, 2, 5)))
@pytest.mark.parametrize("m", MICROBATCHES)
def test_1f1b_keeps_as_many_in_flight_as_there_are_ranks_from_it_to_the_last(p, m):
    # Narayanan et al. 2021, section 2.2: rank r starts p - r microbatches before its first backward.
    assert peaks(one_f_one_b, Plan(Placement.loop(p), m)) == [min(p - r, m) for r in range(p)]


@pytest.mark.parametrize("p", few(range(1, 7), (1, 2, 5)))
@pytest.mark.parametrize("v", range(2, 5))
def test_interleaved_1f1b_keeps_its_warm_up_and_one_more_in_flight(p, v):
    # Warm-up of 2(p - r - 1) + (v - 1)p, as in Megatron-LM's forward_backward_pipelining_with_interleaving.
    for m in range(p, 13, p):
        expected = [min(m * v, 2 * (p - r - 1) + (v - 1) * p + 1) for r in range(p)]
        assert peaks(interleaved_1f1b, Plan(Placement.loop(p, v), m)) == expected


def columns(schedule, plan):
    return max(len(row.split()) - 2 for row in draw(schedule, plan).splitlines())


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
@pytest.mark.parametrize("p", few(range(1, 7), (1, 2, 5)))
def test_the_makespan_is_that_of_the_microbatches_and_a_bubble_of_one_less_than_the_ranks(schedule, p):
    # Narayanan et al. 2021, section 2.2: m(tf + tb) and a bubble of (p - 1)(tf + tb), here with tf = tb = 1.
    for m in MICROBATCHES:
        assert columns(schedule, Plan(Placement.loop(p), m)) == 2 * (m + p - 1)


@pytest.mark.parametrize("p", few(range(1, 7), (1, 2, 5)))
@pytest.mark.parametrize("v", range(2, 5))
def test_interleaving_divides_the_bubble_by_the_number_of_chunks(p, v):
    # Narayanan et al. 2021, section 2.2: a bubble of (p - 1)(tf + tb) / v; a chunk takes 1/v, here one unit.
    for m in range(p, 13, p):
        assert columns(interleaved_1f1b, Plan(Placement.loop(p, v), m)) == 2 * (m * v + p - 1)


@pytest.mark.parametrize(
    ("schedule", "placement", "message"),
    [
        (one_f_one_b, Placement.v(2), r"one stage on each rank, not Placement\(\(0, 1, 1, 0\)\)"),
        (one_f_one_b, Placement.loop(2, 2), r"take Placement\.loop\(2\), or interleaved_1f1b for several chunks"),
        (one_f_one_b, Placement.both_ways(2), "one stage on each rank, not Placement"),
        (one_f_one_b, Placement([(0, 1), 2, 2]), r"or gpipe or zb_auto for copies and several chunks"),
        (one_f_one_b, Placement.both_ways(2), r"or dualpipe for both ways"),
        (zb_h1, Placement([(0, 1), 2]), r"or one_f_one_b, gpipe or zb_auto for copies"),
        (zb_h1, Placement([(0, 1)]), r"one stage on each rank and no copies, not Placement\(\(\(0, 1\),\)\)"),
        (interleaved_1f1b, Placement.v(2), r"wants Placement\.loop\(2, chunks\), not Placement\(\(0, 1, 1, 0\)\)"),
        (interleaved_1f1b, Placement.both_ways(2), r"wants Placement\.loop\(2, chunks\)"),
        (interleaved_1f1b, Placement((1, 0)), r"wants Placement\.loop\(2, chunks\), not Placement\(\(1, 0\)\)"),
        (interleaved_1f1b, Placement((0, 1, 0)), r"wants Placement\.loop\(2, chunks\), not Placement\(\(0, 1, 0\)\)"),
    ],
)
def test_a_placement_that_the_schedule_is_not_for_is_refused(schedule, placement, message):
    with pytest.raises(ScheduleError, match=message):
        draw(schedule, Plan(placement, 2))
