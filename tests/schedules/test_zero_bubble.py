"""ZB-H1, ZB-H2 and the automatic schedule against the paper's figures and closed forms (Qi et al., ICLR 2024)."""

from functools import cache, partial
from inspect import cleandoc
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe import Costs, Edges, Link, Placement, Plan, ScheduleError, draw, lower, simulate
from fpipe.effects import BackwardInput, BackwardWeight, Forward
from fpipe.programs.verifier import verify
from fpipe.schedules.list_scheduling import Rules, greedy
from fpipe.schedules.table import from_table
from fpipe.schedules.work import Work, table
from fpipe.schedules.zb_auto import zb_auto
from fpipe.schedules.zero_bubble import zb_h1, zb_h2
from fpipe.timelines.simulator import simulate_programs
from tests.support.combinations import EFFORT, examples, one_in, sample

lowered = cache(lower)


def chain(ranks, microbatches):
    return Plan(Placement.loop(ranks), microbatches)


@pytest.mark.parametrize(
    ("schedule", "timeline"),
    [
        (
            zb_h1,
            """
            rank 0  F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7
            rank 1  .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
            rank 2  .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
            rank 3  .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7
            """,
        ),
        (
            zb_h2,
            """
            rank 0  F0 F1 F2 F3 F4 F5 F6 I0 W0 F7 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 I7 W7
            rank 1  .  F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 F7 I3 W1 I4 W2 I5 W3 I6 W4 I7 W5 W6 W7
            rank 2  .  .  F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 F7 I5 W1 I6 W2 I7 W3 W4 W5 W6 W7
            rank 3  .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 F7 I7 W1 W2 W3 W4 W5 W6 W7
            """,
        ),
    ],
    ids=["zb_h1", "zb_h2"],
)
def test_the_order_is_the_papers(schedule, timeline):
    """Figure 3: four ranks, eight microbatches; ZB-H1 keeps a bubble of p - 1, ZB-H2 is a parallelogram without one."""
    assert draw(schedule, chain(4, 8)) == cleandoc(timeline)


def test_few_microbatches():
    assert draw(zb_h1, chain(3, 1)) == cleandoc(
        """
        rank 0  F0 .  .  .  .  I0 W0
        rank 1  .  F0 .  .  I0 W0
        rank 2  .  .  F0 I0 W0
        """
    )


def test_ranks_in_any_order():
    timeline = draw(zb_h2, Plan(Placement((2, 0, 1)), 6)).splitlines()
    rows = [line.removeprefix(f"rank {rank}") for rank, line in enumerate(timeline)]
    straight = [line.removeprefix(f"rank {rank}") for rank, line in enumerate(draw(zb_h2, chain(3, 6)).splitlines())]
    assert rows == [straight[1], straight[2], straight[0]]


# Binary fractions, so that sums are exact and equality is equality.
TIMES = list(
    product(
        sample((1, 2, 3), (1, 3)),
        (0.5, 1, 2, 3),
        sample((0, 0.5, 1, 1.5, 2, 3, 5), (0, 0.5, 2, 3, 5)),
        sample((0, 0.25, 0.5, 1), (0, 0.25, 1)),
    )
)
SHAPES = [(1, 2), (2, 4), (2, 7), (3, 6), (3, 9), (5, 11)]


@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_cost_of_h1(p, m):
    plan = chain(p, m)
    for f, b, w, c in TIMES:
        if 2 * c <= w:
            cost = simulate_programs(lowered(zb_h1, plan), Costs(f, b, w, communication=c)).cost
            bubble = b + 2 * c + max(0, f - w + 2 * c)
            assert cost == m * (f + b + w) + (p - 1) * bubble, (f, b, w, c)
            if w <= f + 2 * c:
                assert bubble == f + b - w + 4 * c  # table 2


@one_in(4)
@pytest.mark.parametrize(("p", "m"), [*SHAPES, (2, 3), (3, 5), (4, 7)])
def test_cost_of_h2(p, m):
    plan = chain(p, m)
    for f, b, w, c in TIMES:
        if 2 * c <= f + b:
            cost = simulate_programs(lowered(zb_h2, plan), Costs(f, b, w, communication=c)).cost
            bubble = max(0, f + b - 2 * w + 2 * c, b - f + 2 * c)
            assert cost == m * (f + b + w) + (p - 1) * bubble, (f, b, w, c)
            if w <= f and 2 * w <= f + b:
                assert bubble == f + b - 2 * w + 2 * c  # table 2


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 7, 12])
def test_every_size_verifies_and_keeps_its_peak(p, m):
    plan = chain(p, m)
    for schedule, peak in ((zb_h1, p), (zb_h2, 2 * p - 1)):
        assert verify(schedule, plan).peak_in_flight == (min(peak, m),) * p


@pytest.mark.parametrize("p", sample(range(1, 9), (1, 2, 3, 5)))
def test_cost_of_the_automatic_order_under_a_limit(p):
    """Section 3: a microbatch less of memory costs a unit, from ZB-H1 to ZB-H2 and no further."""
    for k in {p, p + 1, (3 * p) // 2, 2 * p - 2, 2 * p - 1, 3 * p} - {p - 1, 0}:
        for m in {k, 2 * p + 1, 3 * p} - set(range(k)):
            timeline = simulate(zb_auto(chain(p, m), Costs(), k), chain(p, m))
            assert timeline.cost == 3 * m + max(0, 2 * p - 1 - k), (k, m)
            assert max(timeline.peak_in_flight) <= k


@pytest.mark.parametrize(
    ("p", "k", "m", "least"),
    [
        (2, 1, 4, 20),
        (3, 1, 4, 28),
        (3, 2, 6, 25),
        (4, 1, 4, 36),
        (4, 2, 6, 31),
        (4, 2, 8, 41),
        (4, 3, 6, 24),
        (4, 3, 9, 34),
    ],
)
def test_less_memory_than_ranks(p, k, m, least):
    """The optimum, found and proven by constraint programming."""
    assert simulate(zb_auto(chain(p, m), Costs(), k), chain(p, m)).cost == least


@pytest.mark.parametrize(("k", "least"), [(4, 189), (5, 185), (6, 181), (7, 177)])
def test_embedding_and_head(k, least):
    """Heavier stages at both ends: the optimum, found and proven by constraint programming."""
    plan = chain(4, 12)
    costs = Costs([5, 4, 4, 4], [5, 5, 5, 6], [3, 3, 3, 4], communication=1)
    assert simulate(zb_auto(plan, costs, k), plan, costs).cost == least
    assert simulate(zb_h1, plan, costs).cost == 192


@st.composite
def problems(draw, placements):
    ranks = draw(st.integers(1, 5))
    plan = Plan(draw(placements)(ranks), draw(st.integers(1, 12)))
    numbers = st.just(0) | st.floats(0.25, 8)
    per_stage = numbers | st.lists(numbers, min_size=plan.stages, max_size=plan.stages)
    transfer = st.floats(0, 4) | st.builds(Link, st.floats(0, 1), st.floats(1, 100))
    costs = Costs(draw(per_stage), draw(per_stage), draw(per_stage), communication=draw(transfer), activation=8)
    chunk = len(plan.stages_on(0))
    limits = st.integers(chunk, 3 * ranks * chunk).map(lambda k: k / chunk)
    limit = draw(st.none() | limits | st.lists(limits, min_size=ranks, max_size=ranks))
    return plan, costs, limit


@settings(max_examples=examples(80))
@given(problems(st.just(Placement.loop)))
def test_never_worse_than_by_hand(problem):
    plan, costs, limit = problem
    schedule = zb_auto(plan, costs, limit)
    room = plan.microbatches if limit is None else min(limit) if isinstance(limit, list) else limit
    cost = simulate(schedule, plan, costs).cost
    for by_hand, peak in ((zb_h1, plan.ranks), (zb_h2, 2 * plan.ranks - 1)):
        if min(peak, plan.microbatches) <= room:
            assert cost <= simulate(by_hand, plan, costs).cost * (1 + 1e-12)


@settings(max_examples=examples(80))
@given(
    problems(
        st.sampled_from(
            [Placement.loop, Placement.v, partial(Placement.loop, chunks=2), partial(Placement.loop, chunks=3)]
        )
    )
)
def test_the_limit_holds_and_the_program_verifies(problem):
    plan, costs, limit = problem
    peaks = verify(zb_auto(plan, costs, limit, effort=EFFORT), plan).peak_in_flight
    limits = limit if isinstance(limit, list) else [plan.microbatches if limit is None else limit] * plan.ranks
    assert all(peak <= most + 1e-9 for peak, most in zip(peaks, limits, strict=True))


@pytest.mark.parametrize("schedule", [zb_h1, zb_h2])
@pytest.mark.parametrize("placement", [Placement.v(2), Placement.loop(2, chunks=2), Placement.both_ways(2)])
def test_one_stage_on_each_rank(schedule, placement):
    with pytest.raises(ScheduleError, match=r"one stage on each rank and no copies.*Placement\.loop\(2\)"):
        lower(schedule, Plan(placement, 4))


@pytest.mark.parametrize(
    ("plan", "costs", "limit", "message"),
    [
        (chain(2, 4), Costs(), 0, r"memory_limit is 0 on rank 0: at least 1"),
        (chain(2, 4), Costs(), [2, 0.5], r"memory_limit is 0.5 on rank 1: at least 1"),
        (chain(2, 4), Costs(), [2], r"memory_limit has 1 entries, the plan 2 ranks"),
        (chain(2, 4), Costs(), float("nan"), r"memory_limit is nan on rank 0"),
        (chain(2, 4), Costs(forward=[1, 2, 3]), 2, r"forward has 3 entries, the plan 2 stages"),
    ],
)
def test_refusals(plan, costs, limit, message):
    with pytest.raises(ScheduleError, match=message):
        zb_auto(plan, costs, limit)


def test_an_unlimited_order_takes_no_more_memory_than_it_needs():
    assert simulate(zb_auto(chain(3, 20)), chain(3, 20)).peak_in_flight == [5, 5, 5]


@pytest.mark.parametrize(
    ("p", "limit", "of_v_auto", "above"),
    sample([(4, 2, 1049.1, 0), (4, 3, 881.7, 0), (8, 4, 2053.5, 0.011)], [(4, 2, 1049.1, 0)]),
)
def test_an_order_on_a_v_with_little_memory_is_nearly_as_fast_as_that_of_v_auto(p, limit, of_v_auto, above):
    """There blocks of the V are known by their shapes; here they come from any placement."""
    plan, costs = Plan(Placement.v(p), 2 * p), Costs(18.5, 18.1, 9.3, communication=0.6)
    schedule = zb_auto(plan, costs, limit)
    assert max(verify(schedule, plan).peak_in_flight) <= limit
    assert simulate(schedule, plan, costs).cost <= of_v_auto * (1 + above + 1e-9)


@pytest.mark.parametrize("limit", [1, 1.5, 2, 3])
def test_chunks_never_lock_each_other_out(limit):
    """Two chunks share a rank's memory: were the first to fill it, the second could never run."""
    plan = Plan(Placement.loop(3, chunks=2), 7)
    (filled,) = greedy(Work.of(plan, Costs()), [limit] * 3, [Rules("forward")])
    assert max(verify(from_table(table(filled.words, plan)), plan).peak_in_flight) <= limit


def test_a_table_runs_every_effect_once():
    plan = Plan(Placement((0, 1, 0)), 5, Edges([(), (0,), (0, 1)]))
    filled, *_ = greedy(Work.of(plan, Costs(communication=0.5)), [2, 2])
    rows = table(filled.words, plan)
    kinds = (Forward, BackwardInput, BackwardWeight)
    for rank, effects in rows.items():
        expected = {kind(stage, m) for kind in kinds for stage in plan.stages_on(rank) for m in range(5)}
        assert set(effects) == expected
        assert len(effects) == len(expected)
    assert verify(from_table(rows), plan).peak_in_flight[1] <= 2
