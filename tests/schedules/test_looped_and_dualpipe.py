"""Schedules over looped chunks and over folded pipelines, against drawn timelines and published closed forms."""

from inspect import cleandoc
from itertools import product

import pytest

from fpipe import Costs, Edges, Placement, Plan, ScheduleError, draw, lower, simulate, verify
from fpipe.effects import Backward, BackwardInput, BackwardWeight, Forward, Overlap, parts
from fpipe.programs.interleaving import interleave
from fpipe.schedules import CATALOGUE
from fpipe.schedules.dualpipe import dualpipe, dualpipe_v
from fpipe.schedules.gpipe import gpipe
from fpipe.schedules.interleaved import interleaved_1f1b, interleaved_1f1b_overlap
from fpipe.schedules.interleaved_zb import interleaved_zb
from fpipe.schedules.looped_bfs import looped_bfs
from fpipe.tables import TABLE
from tests.support.combinations import EFFORT, combined, few, one_in, sample

LOOPED = (looped_bfs, interleaved_1f1b, interleaved_1f1b_overlap, interleaved_zb)


@pytest.mark.parametrize(
    ("schedule", "plan", "timeline"),
    [
        (
            looped_bfs,
            Plan(Placement.loop(3, chunks=2), 3),
            """
            rank 0  F0a F1a F2a F0b F1b F2b .   .   .   .   B0b B1b B2b B0a B1a B2a
            rank 1  .   F0a F1a F2a F0b F1b F2b .   .   B0b B1b B2b B0a B1a B2a
            rank 2  .   .   F0a F1a F2a F0b F1b F2b B0b B1b B2b B0a B1a B2a
            """,
        ),
        (
            interleaved_1f1b,
            Plan(Placement.loop(2, chunks=2), 3),
            """
            rank 0  F0a F1a F2a F0b F1b F2b B0b .   B1b .   B2b B0a B1a B2a
            rank 1  .   F0a F1a F2a F0b B0b F1b B1b F2b B2b B0a B1a B2a
            """,
        ),
        (
            interleaved_1f1b,
            Plan(Placement.loop(2, chunks=2), 5),
            """
            rank 0  F0a F1a F2a F0b F1b F2b B0b F3a B1b F4a B2b F3b B0a F4b B1a .   B2a .   B3b B4b B3a B4a
            rank 1  .   F0a F1a F2a F0b B0b F1b B1b F2b B2b F3a B0a F4a B1a F3b B2a F4b B3b B4b B3a B4a
            """,
        ),
        (
            interleaved_zb,
            Plan(Placement.loop(3), 4),
            """
            rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
            rank 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
            rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
            """,
        ),
        (
            interleaved_zb,
            Plan(Placement.loop(3, chunks=2), 1),
            """
            rank 0  F0a .   .   F0b .   .   .   .   I0b W0b .   I0a W0a
            rank 1  .   F0a .   .   F0b .   .   I0b .   .   I0a W0b W0a
            rank 2  .   .   F0a .   .   F0b I0b .   .   I0a W0b W0a
            """,
        ),
        (
            dualpipe,
            Plan(Placement.both_ways(2), 6),
            """
            rank 0  F0a     F1b     F2a     B1b     F3b&B0a F4a&B3b F5b&B2a B5b     I4a     W4a
            rank 1  F1a     F0b     F3a     B0b     F2b&B1a F5a&B2b F4b&B3a B4b     I5a     W5a
            """,
        ),
        (
            dualpipe,
            Plan(Placement.both_ways(4), 2),
            """
            rank 0  F0a .   .   F1b B1b .   .   I0a W0a
            rank 1  .   F0a F1b .   .   I1b I0a W1b W0a
            rank 2  .   F1a F0b .   .   I0b I1a W0b W1a
            rank 3  F1a .   .   F0b B0b .   .   I1a W1a
            """,
        ),
        (
            dualpipe_v,
            Plan(Placement.v(1), 3),
            """
            rank 0  F0a     F0b     F1a     B0b     F1b&B0a F2a&B1b F2b&B1a B2b     I2a     W2a
            """,
        ),
    ],
)
def test_the_timeline(schedule, plan, timeline):
    assert draw(schedule, plan) == cleandoc(timeline)


def cells(effect, stage):
    """An effect in columns of one unit of time: two for a backward, three for an overlap; small for the way out."""
    if isinstance(effect, Overlap):
        return f"{cells(effect.forward, stage)}&{cells(effect.backward, stage)[0]}"
    text = {Forward: "F", Backward: "BB", BackwardInput: "I", BackwardWeight: "W"}[type(effect)]
    return text if effect.stage == stage else text.lower()


def to_scale(schedule, plan):
    """One row for each rank; a column is a unit of time, and the stage on the way in is written large."""
    timeline = simulate(schedule, plan)
    rows = []
    for rank in range(plan.ranks):
        row = f"{rank}  "
        for span in timeline.compute(rank):
            row = row.ljust(3 + int(span.start)) + cells(span.effect, min(plan.stages_on(rank)))
        rows.append(row)
    return "\n".join(rows)


def test_dualpipe_is_the_reports_figure():
    # DeepSeek-V3 report, figure 5: 8 ranks, 20 microbatches; here at F = B = W, where F&B takes three units.
    figure = """
        0  FFFFFFFfiwfiwfiwfF&b   f&BF&bf&BF&bf&Bbb f&Bbb f&Bbb f&BbbIWIWIWIW
        1   FFFFFfFfiwfiwfF&b  f&BF&bf&BF&bf&BF&bf&Bbb f&Bbb f&BbbBB iIwIWIWW
        2    FFFfFfFfiwfF&b f&BF&bf&BF&bf&BF&bf&BF&bf&Bbb f&BbbBB bbI iIWIwWW
        3     FfFfFfFfFbbf&BF&bf&BF&bf&BF&bf&BF&bf&BF&bf&BbbBB bbBB iI iIwWwW
        4     FfFfFfFfFbbf&BF&bf&BF&bf&BF&bf&BF&bf&BF&bf&BbbBB bbBB iI iIwWwW
        5    FFFfFfFfiwfF&b f&BF&bf&BF&bf&BF&bf&BF&bf&Bbb f&BbbBB bbI iIWIwWW
        6   FFFFFfFfiwfiwfF&b  f&BF&bf&BF&bf&BF&bf&Bbb f&Bbb f&BbbBB iIwIWIWW
        7  FFFFFFFfiwfiwfiwfF&b   f&BF&bf&BF&bf&Bbb f&Bbb f&Bbb f&BbbIWIWIWIW
        """
    assert to_scale(dualpipe, Plan(Placement.both_ways(8), 20)) == cleandoc(figure)


@pytest.mark.parametrize("p", range(1, 5))
@pytest.mark.parametrize("m", [1, 4, 9])
def test_dualpipe_v_is_dualpipe_cut_in_half(p, m):
    whole = to_scale(dualpipe, Plan(Placement.both_ways(2 * p), 2 * m)).splitlines()
    assert to_scale(dualpipe_v, Plan(Placement.v(p), m)).splitlines() == whole[:p]


def compute(schedule, plan):
    """Each rank's effects as the schedule yields them, and the same with overlaps taken apart."""
    orders = [list(schedule(rank, plan)) for rank in range(plan.ranks)]
    return orders, [[part for effect in order for part in parts(effect)] for order in orders]


def check(schedule, plan):
    """Each stage and copy runs its microbatches once and in order, pairs are independent, no rank waits for ever."""
    orders, apart = compute(schedule, plan)
    for rank, order in enumerate(apart):
        for stage in plan.stages_on(rank):
            for kind in (Forward, Backward | BackwardInput, Backward | BackwardWeight):
                own = [e.microbatch for e in order if isinstance(e, kind) and e.stage == stage]
                assert own == list(plan.microbatches_of(stage, rank))
    for pair in (effect for order in orders for effect in order if isinstance(effect, Overlap)):
        assert isinstance(pair.backward, Backward)
        assert not set(TABLE.gives(pair.forward, plan)) & set(TABLE.needs(pair.backward, plan))
        assert not set(TABLE.gives(pair.backward, plan)) & set(TABLE.needs(pair.forward, plan))
    programs = lower(schedule, plan)
    assert len(interleave(programs)) == sum(map(len, programs.values()))


MICROBATCHES = sample(range(1, 14), (1, 2, 3, 5, 8, 13))


@combined(schedule=LOOPED, p=few(range(1, 7), (1, 2, 5)), v=range(1, 5))
def test_looped_schedules_are_legal_for_any_number_of_microbatches(schedule, p, v):
    for m in MICROBATCHES:
        check(schedule, Plan(Placement.loop(p, v), m))


@pytest.mark.parametrize("p", few(range(1, 7), (1, 2, 5)))
def test_dualpipe_is_legal_for_any_number_of_microbatches(p):
    for m in MICROBATCHES:
        check(dualpipe_v, Plan(Placement.v(p), m))
        check(dualpipe, Plan(Placement.both_ways(2 * p), 2 * m))


@pytest.mark.parametrize(
    ("schedule", "placement", "m"),
    [
        *((s, Placement.loop(2, 2), 5) for s in LOOPED),
        (dualpipe_v, Placement.v(2), 5),
        (dualpipe, Placement.both_ways(4), 6),
    ],
)
def test_stages_may_be_skipped(schedule, placement, m):
    check(schedule, Plan(placement, m, Edges([(), (0,), (0, 1), (0, 2)])))


def peaks(schedule, plan):
    """The most microbatches of a stage that each rank has run forward and not yet backward to its weights."""
    found = []
    for order in compute(schedule, plan)[1]:
        running, peak = 0, 0
        for e in order:
            running += isinstance(e, Forward) - isinstance(e, Backward | BackwardWeight)
            peak = max(peak, running)
        found.append(peak)
    return found


def largest_group(p, m):
    """How torch's flexible interleaving and ours divide m microbatches into groups of at least p: the largest one."""
    return -(-m // max(1, m // p))


@pytest.mark.parametrize("p", few(range(1, 7), (1, 2, 5)))
@pytest.mark.parametrize("v", range(1, 5))
def test_peaks_of_looped_schedules(p, v):
    for m in range(1, 3 * p + 2):
        plan, g = Plan(Placement.loop(p, v), m), largest_group(p, m)
        assert peaks(looped_bfs, plan) == [m * v] * p
        # Narayanan et al. 2021, section 2.2, and the warm-up of Megatron-LM, where g = p.
        expected = [min(m * v, 2 * (p - r - 1) + (v - 1) * g + 1) for r in range(p)]
        assert peaks(interleaved_1f1b, plan) == expected
        one_more = [min(m * v, 2 * (p - r - 1) + (v - 1) * g + 2) for r in range(p)]
        assert peaks(interleaved_1f1b_overlap, plan) == one_more  # Megatron-LM: one microbatch more of warm-up
        assert peaks(interleaved_zb, plan) == [min(m * v, (v - 1) * g + p)] * p
        assert m % p or g == p


def test_dualpipe_keeps_one_chunk_more_than_there_are_stages():
    # DeepSeek-V3 report, table 2: PP + 1 activations.
    for p, m in product(range(1, 7), sample(range(1, 16), (1, 2, 5, 8, 11, 15))):
        stages = 2 * p
        for schedule, plan in (
            (dualpipe_v, Plan(Placement.v(p), m)),
            (dualpipe, Plan(Placement.both_ways(stages), 2 * m)),
        ):
            found = peaks(schedule, plan)
            assert found == [stages + 1] * plan.ranks if m >= stages else max(found) <= min(stages + 1, 2 * m)


TIMES = sample([(1, 1, 1), (2, 1, 3), (3, 2, 1), (1, 2, 1)], [(2, 1, 3), (3, 2, 1)])  # of one chunk: F, B, W


def microbatches(p):
    """Numbers of them, from as many as there are ranks on."""
    return sample(range(p, 3 * p + 2), {p, p + 1, 2 * p + 1, 3 * p})


@combined(schedule=[looped_bfs, interleaved_1f1b], p=few(range(1, 6), (1, 2, 5)), v=range(1, 4))
def test_looping_divides_the_bubble_by_the_number_of_chunks(schedule, p, v):
    # Lamy-Poirier 2023; Narayanan et al. 2021, section 2.2: (p - 1) S / v. Both say p | m; any m >= p does.
    for m, (f, b, w) in product(microbatches(p), TIMES):
        cost = simulate(schedule, Plan(Placement.loop(p, v), m), Costs(f, b, w)).cost
        assert cost == m * v * (f + b + w) + (p - 1) * (f + b + w)


@pytest.mark.parametrize("p", few(range(2, 6), (2, 5)))
@pytest.mark.parametrize("v", range(1, 4))
def test_interleaved_1f1b_waits_for_every_transfer_on_the_way_of_the_first_and_the_last_group(p, v):
    # m S + (p - 1) S / v + 2 (p v - 1) c, where p | m and c <= min(F, B + W) / v.
    for m, (f, b, w), c in product((p, 2 * p, 3 * p), TIMES, sample((0.25, 0.5, 1, 2), (0.25, 1))):
        if c <= min(f, b + w):
            cost = simulate(interleaved_1f1b, Plan(Placement.loop(p, v), m), Costs(f, b, w, communication=c)).cost
            assert cost == (m * v + p - 1) * (f + b + w) + 2 * (p * v - 1) * c


@pytest.mark.parametrize("schedule", ["gpipe", "zb-auto"])
@pytest.mark.parametrize("waves", [1, 2, 3])
def test_a_wave_sends_nothing_at_its_turns(schedule, waves):
    # Liu et al. 2023 (Hanayo), section 3: down the ranks and back up. GPipe's cost at a single microbatch is the depth.
    p, m = 3, 4
    entry, plan = CATALOGUE[schedule], Plan(Placement.wave(p, waves), m)
    report = verify(entry.schedule(plan, effort=EFFORT), plan)
    assert report.messages == {
        edge: m * 2 * waves for r in range(p - 1) for edge in ((r, r + 1), (r + 1, r))
    }  # an activation and a gradient over each edge of a chain of 2 * p * waves stages, but at 2 * waves - 1 turns
    one = Plan(Placement.wave(p, waves), 1)
    timeline = simulate(gpipe, one, Costs(communication=0.25))
    assert timeline.makespan == 2 * p * waves * 3 + 0.25 * 2 * 2 * waves * (p - 1)


@pytest.mark.parametrize("p", few(range(1, 6), (1, 2, 5)))
@pytest.mark.parametrize("v", range(1, 4))
def test_the_cost_of_interleaved_1f1b_with_overlaps(p, v):
    # The last rank begins after p - 1 forwards, never waits, and its last gradient passes p - 1 backwards. Its warm-up
    # of (v - 1) g + 1 chunks, and as many backwards at the end, are apart; all else overlaps.
    for m, (f, b, w), share in product(microbatches(p), TIMES, sample((0, 0.25, 0.5, 1), (0.25, 1))):
        apart = f + b + w
        pair = max(f, b + w) + share * min(f, b + w)
        plan = Plan(Placement.loop(p, v), m)
        cost = simulate(interleaved_1f1b_overlap, plan, Costs(f, b, w, overlap=pair)).cost
        warmup = (v - 1) * largest_group(p, m) + 1
        assert cost == pytest.approx(m * v * pair + warmup * (apart - pair) + (p - 1) * apart)


@pytest.mark.parametrize("p", few(range(1, 6), (1, 2, 5)))
@pytest.mark.parametrize("v", range(1, 4))
def test_the_bubble_of_interleaved_zb_is_that_of_zb_h1_divided_by_the_number_of_chunks(p, v):
    # Qi et al. 2024, table 2: (p - 1) (F + B - W) for v = 1.
    for m, (f, b, w) in product(microbatches(p), TIMES):
        if w <= min(f, b):
            cost = simulate(interleaved_zb, Plan(Placement.loop(p, v), m), Costs(f, b, w)).cost
            assert cost == m * v * (f + b + w) + (p - 1) * (f + b - w)


def idle(schedule, plan, costs):
    """Each rank's idle time, a late start included."""
    timeline = simulate(schedule, plan, costs)
    return [timeline.makespan - busy for busy in timeline.busy]


@one_in(3)
@pytest.mark.parametrize("p", range(1, 5))
def test_the_bubble_of_dualpipe(p):
    # DeepSeek-V3 report, table 2: (PP / 2 - 1) (F&B + full - 3 W). Exact on every rank where F = B >= W and overlaps
    # take as long as their parts; where they take less, the rank with the fewest of them idles less than the others.
    times = sample([(1, 1), (2, 2), (2, 1), (3, 1)], [(2, 2), (3, 1)])
    for m, (f, w), share in product((2 * p - 1, 2 * p, 2 * p + 3), times, (0, 0.5, 1)):
        pair = f + w + share * f
        costs = Costs(f, f, w, overlap=pair)
        bubble = (p - 1) * (pair + f + w - 3 * w)
        for schedule, plan in (
            (dualpipe_v, Plan(Placement.v(p), m)),
            (dualpipe, Plan(Placement.both_ways(2 * p), 2 * m)),
        ):
            found = idle(schedule, plan, costs)
            assert found == [bubble] * plan.ranks if share == 1 else max(found) == bubble


@pytest.mark.parametrize("p", range(2, 5))
def test_the_bubble_of_dualpipe_is_at_most_the_reports(p):
    # Where F <= B, W <= B, and an overlap takes at least as long as its backward and at most as long as both parts.
    times = sample([*product(range(1, 4), repeat=3)], [(1, 1, 1), (1, 3, 1), (1, 3, 2), (2, 3, 3), (3, 3, 1)])
    for m, (f, b, w), share in product((2 * p - 1, 2 * p, 2 * p + 3), times, (0, 0.5, 1)):
        if f <= b and w <= b:
            pair = b + w + share * f
            bubble = (p - 1) * (pair + b + w - 3 * w)
            assert max(idle(dualpipe_v, Plan(Placement.v(p), m), Costs(f, b, w, overlap=pair))) <= bubble


@pytest.mark.parametrize("p", few(range(1, 6), (1, 2, 5)))
def test_dualpipe_with_few_microbatches_waits_for_the_fold_and_back_once(p):
    # The first microbatch's forwards and input gradients, and its first weight gradient: 2 PP + 1; each other one takes
    # a rank four units more, since its weight gradients fit into the idle time.
    for m in range(1, p + 1):
        assert simulate(dualpipe_v, Plan(Placement.v(p), m)).makespan == 4 * (p + m) - 2


@pytest.mark.parametrize("schedule", [interleaved_1f1b, interleaved_zb, dualpipe_v])
def test_fewer_microbatches_never_take_longer(schedule):
    for p in range(1, 6):
        placement = Placement.v(p) if schedule is dualpipe_v else Placement.loop(p, 2)
        times = [simulate(schedule, Plan(placement, m)).makespan for m in range(1, 3 * p)]
        assert times == sorted(times)


def test_looped_bfs_is_gpipe_on_a_loop():
    plan = Plan(Placement.loop(3, 2), 4)
    assert compute(looped_bfs, plan) == compute(gpipe, plan)


@pytest.mark.parametrize(
    ("schedule", "placement", "message"),
    [
        (looped_bfs, Placement.v(2), r"looped_bfs wants Placement\.loop\(2, chunks\), not Placement\(\(0, 1, 1, 0\)\)"),
        (looped_bfs, Placement.both_ways(2), r"looped_bfs wants Placement\.loop\(2, chunks\)"),
        (interleaved_1f1b, Placement.v(2), r"interleaved_1f1b wants Placement\.loop\(2, chunks\)"),
        (interleaved_zb, Placement((0, 1, 0)), r"interleaved_zb wants Placement\.loop\(2, chunks\), not .*\(0, 1, 0\)"),
        (
            dualpipe,
            Placement.v(2),
            r"dualpipe wants Placement\.both_ways\(ranks\), ranks even, not .*; dualpipe_v needs",
        ),
        (dualpipe, Placement.v(3), r"dualpipe wants Placement\.both_ways\(ranks\), ranks even"),
        (
            dualpipe_v,
            Placement.loop(2, 2),
            r"dualpipe_v wants .*, not Placement\(\(0, 1, 0, 1\)\): take Placement\.v\(2\)",
        ),
        (
            dualpipe_v,
            Placement.both_ways(2),
            r"dualpipe_v wants .*, not Placement\(\(\(0, 1\), \(1, 0\)\)\): take Placement\.v\(2\)",
        ),
    ],
)
def test_a_placement_that_the_schedule_is_not_for_is_refused(schedule, placement, message):
    with pytest.raises(ScheduleError, match=message):
        draw(schedule, Plan(placement, 2))


def test_what_numbers_dualpipe_wants_is_said_by_placement_and_plan():
    with pytest.raises(ScheduleError, match="an even number of ranks, not 3"):
        Placement.both_ways(3)
    with pytest.raises(ScheduleError, match="take a multiple of 2, not 5"):
        Plan(Placement.both_ways(4), 5)
