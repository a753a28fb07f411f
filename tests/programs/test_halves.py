"""Plans whose stages are not all trained: programs have the halves of backwards that exist, and no other."""

from dataclasses import replace
from itertools import compress

import pytest

from fpipe import Costs, Edges, Placement, Plan, ScheduleError, draw, lower, schedules, simulate, verify
from fpipe.effects import Backward, BackwardInput, BackwardWeight, Forward, Gradient, Overlap, Recv, Reduce, Send, parts
from fpipe.programs.lowering import forward_only
from fpipe.programs.verifier import check
from tests.support.combinations import combined, one_in
from tests.support.programs import written

CHAIN = Plan(Placement.loop(3), 3)
EVERY = """
rank 0  F0 F1 F2 .  .  B0 .  B1 .  B2
rank 1  .  F0 F1 .  B0 F2 B1 .  B2
rank 2  .  .  F0 B0 F1 B1 F2 B2
"""


def plan_with(trained, plan=CHAIN):
    return Plan(plan.placement, plan.microbatches, plan.edges, plan.ties, trained=trained)


@pytest.mark.parametrize(
    ("trained", "picture"),
    [
        (None, EVERY),
        (
            {0, 1, 2},
            """
rank 0  F0 F1 F2 .  .  W0 .  W1 .  W2
rank 1  .  F0 F1 .  B0 F2 B1 .  B2
rank 2  .  .  F0 B0 F1 B1 F2 B2
""",
        ),
        (
            {2},
            """
rank 0  F0 F1 F2
rank 1  .  F0 F1 F2
rank 2  .  .  F0 W0 F1 W1 F2 W2
""",
        ),
        (
            {0},
            """
rank 0  F0 F1 F2 .  .  W0 .  W1 .  W2
rank 1  .  F0 F1 .  I0 F2 I1 .  I2
rank 2  .  .  F0 I0 F1 I1 F2 I2
""",
        ),
        (
            {1},
            """
rank 0  F0 F1 F2
rank 1  .  F0 F1 .  W0 F2 W1 .  W2
rank 2  .  .  F0 I0 F1 I1 F2 I2
""",
        ),
        (
            set(),
            """
rank 0  F0 F1 F2
rank 1  .  F0 F1 F2
rank 2  .  .  F0 F1 F2
""",
        ),
    ],
    ids=str,
)
def test_one_f_one_b(trained, picture):
    assert draw("1f1b", plan_with(trained)) == picture.strip()


def test_a_split_backward_loses_the_other_half():
    assert draw("zb-h1", plan_with({1})) == (
        """
rank 0  F0 F1 F2
rank 1  .  F0 F1 F2 W0 .  W1 .  W2
rank 2  .  .  F0 I0 F1 I1 F2 I2
""".strip()
    )


def needed(plan):
    """The halves that each stage has, by a walk along the edges; and the (source, consumer) of every gradient."""
    before = [set[int]() for _ in range(plan.stages)]
    for stage, sources in enumerate(plan.edges.reads):
        before[stage] |= {*sources}.union(*(before[source] for source in sources))
    trained = set(plan.trained)
    halves = [(stage in trained, bool(before[stage] & trained)) for stage in range(plan.stages)]
    return halves, {
        (source, stage)
        for stage, sources in enumerate(plan.edges.reads)
        for source in sources
        if source in trained or before[source] & trained
    }


SKIPS = Edges([(), (), (0,), (0, 1), (2, 3), (4,)])


@one_in(4)
@combined(
    schedule=[
        *("gpipe", "1f1b", "zb-h1", "zb-h2", "looped-bfs", "interleaved-1f1b", "interleaved-zb"),
        *("zb-v", "v-half", "v-min", "dualpipe-v", "dualpipe"),
    ],
    trained=[(), (0,), (1,), (2, 4), (5,), (0, 5), range(6)],
    edges=["chain", "skips"],
    cotangents=["by_consumer", "by_rank"],
    replicas=[1, 2],
)
def test_programs_have_the_halves_that_exist(schedule, trained, edges, cotangents, replicas):
    entry = schedules.CATALOGUE[schedule]
    ranks = 6 // entry.chunks if entry.placement != "both ways" else 6
    plan = entry.plan(ranks, 12)
    plan = Plan(
        plan.placement,
        12,
        SKIPS if edges == "skips" else plan.edges,
        ((0, 5),) if edges == "skips" else (),
        replicas,
        cotangents=cotangents,
        trained=trained,
    )
    assert plan.stages == 6
    programs = lower(entry.schedule(plan), plan, resident=None if replicas == 1 else 2)
    report = check(programs, costs=Costs(residuals=1, deferred=1, activation=1))
    halves, gradients = needed(plan)
    counts = {(stage, half): 0 for stage in range(6) for half in range(2)}
    for program in programs.values():
        for effect in program:
            for part in parts(effect):
                counts[getattr(part, "stage", 0), 0] += isinstance(part, Backward | BackwardWeight)
                counts[getattr(part, "stage", 0), 1] += isinstance(part, Backward | BackwardInput)
    assert counts == {(stage, half): 12 * halves[stage][half] for stage in range(6) for half in range(2)}
    values = (getattr(e, "value", None) for program in programs.values() for e in program)
    sent = {(value.stage, value.consumer) for value in values if isinstance(value, Gradient)}
    if cotangents == "by_consumer":
        apart = (any(plan.rank_of(s, m) != plan.rank_of(c, m) for m in range(12)) for s, c in gradients)
        assert sent == set(compress(gradients, apart))
    assert sent <= gradients
    timeline = simulate(entry.schedule(plan), plan, resident=None if replicas == 1 else 2)
    assert max(timeline.peak_in_flight) <= max(report.peak_in_flight)
    for rank in range(plan.ranks):
        flights = timeline.in_flight(rank)
        assert not flights or flights[-1][1] == 0
    assert all(isinstance(e, Forward | Send | Recv) for p in forward_only(lower("gpipe", plan)).values() for e in p)


def test_no_memory_is_kept_for_what_does_not_run():
    costs = Costs(residuals=100, deferred=10)
    assert verify("1f1b", plan_with({2}), costs=costs).peak_bytes == (0, 0, 100)
    assert verify("1f1b", plan_with({0}), costs=costs).peak_bytes == (300, 200, 100)
    assert verify("zb-h1", plan_with({0}), costs=costs).peak_bytes == (300, 200, 100)
    assert verify("1f1b", plan_with({2})).peak_in_flight == (0, 0, 1)
    assert verify("1f1b", plan_with({0})).peak_in_flight == (3, 2, 1)
    assert simulate("1f1b", plan_with({0}), Costs(backward_input=3, backward_weight=2)).busy == [3 + 6, 3 + 9, 3 + 9]


PAIR = Plan(Placement.loop(2), 1)
F0, F1 = Forward(0, 0), Forward(1, 0)


@pytest.mark.parametrize("second", [Backward(1, 0), BackwardWeight(1, 0)], ids=["all halves", "its own"])
def test_a_schedule_may_yield_all_halves_or_those_that_exist(second):
    programs = lower(written([F0], [F1, second]), plan_with({1}, PAIR))
    check(programs)
    assert [e for e in programs[1] if isinstance(e, Backward | BackwardWeight)] == [BackwardWeight(1, 0)]


def test_an_overlap_goes_on_with_the_half_that_is_left():
    plan = Plan(Placement.loop(1, chunks=2), 2, trained={1})
    pairs = [Overlap(Forward(0, 1), Backward(1, 0)), Forward(1, 1), Overlap(Forward(0, 0), Backward(0, 0))]
    programs = lower(written([*pairs]), plan)
    assert [e for e in programs[0] if not isinstance(e, Reduce)] == [
        Overlap(Forward(0, 1), BackwardWeight(1, 0)),
        Forward(1, 1),
        Forward(0, 0),
    ]
    costs = Costs(forward=2, backward_weight=3, overlap=1)
    assert costs.time(programs[0].effects[0]) == 5
    assert costs.time(pairs[0]) == 1


def test_communication_of_gradients_that_do_not_exist_is_left_out():
    talking = lower("gpipe", PAIR)
    assert any(isinstance(e, Send) and isinstance(e.value, Gradient) for e in talking[1])
    programs = lower(written(talking[0].effects, talking[1].effects), plan_with({1}, PAIR))
    check(programs)
    assert not any(isinstance(getattr(e, "value", None), Gradient) for p in programs.values() for e in p)


@pytest.mark.parametrize(
    ("trained", "orders", "message"),
    [
        ({1}, [[F0], [F1]], None),
        ({1}, [[F0], [F1, BackwardInput(1, 0)]], None),
        ({0}, [[F0, BackwardWeight(0, 0)], [F1]], "rank 1 never yields BackwardInput of stage 1, microbatch 0"),
        ({0}, [[F0], [F1, Backward(1, 0)]], "rank 0 never yields BackwardWeight of stage 0, microbatch 0"),
        (
            {0, 1},
            [[F0, Backward(0, 0)], [F1, BackwardInput(1, 0)]],
            "rank 1 never yields BackwardWeight of stage 1, microbatch 0",
        ),
    ],
)
def test_a_half_that_is_missing(trained, orders, message):
    plan = plan_with(trained, PAIR)
    if message is None:
        assert not any(parts(e)[0] == BackwardWeight(1, 0) for e in lower(written(*orders), plan)[1])
        return
    with pytest.raises(ScheduleError, match=message):
        verify(written(*orders), plan)


@pytest.mark.parametrize(
    ("trained", "effect", "message"),
    [
        ({1}, Backward(1, 0), "stage 1 has no input gradients: no stage before it is trained; yield BackwardWeight"),
        ({1}, BackwardInput(1, 0), "stage 1 has no input gradients: no stage before it is trained"),
        (
            {1},
            Backward(0, 0),
            "stage 0 has no weight gradients: plan.trained does not name it; yield no backward of it",
        ),
        ({0}, Backward(1, 0), "stage 1 has no weight gradients: plan.trained does not name it; yield BackwardInput"),
        ({0}, BackwardInput(0, 0), "stage 0 has no input gradients: no stage before it is trained; yield BackwardW"),
    ],
)
def test_a_half_too_many_in_complete_programs(trained, effect, message):
    programs = lower("gpipe", plan_with(trained, PAIR))
    rank = effect.stage
    wrong = replace(programs[rank], effects=(*programs[rank].effects, effect))
    with pytest.raises(ScheduleError, match=message):
        check({**programs, rank: wrong})


def test_a_plan_names_its_trained_stages():
    assert repr(plan_with({2, 0})) == "Plan(Placement((0, 1, 2)), microbatches=3, trained=(0, 2))"
    assert eval(repr(plan_with(()))) == plan_with(frozenset())
    with pytest.raises(ScheduleError, match="trained names stage 3: there are stages 0 to 2"):
        plan_with([1, 3])
