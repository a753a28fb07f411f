"""The automatic schedule against proved optima, and against the lower bound where proofs take too long."""

import time
from contextlib import suppress
from itertools import pairwise
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe import Costs, Link, Placement, Plan, ScheduleError, lower, simulate, verify
from fpipe.programs.footprint import footprint
from fpipe.schedules import lower_bound, v_auto, zb_auto
from fpipe.schedules.annealing import LONG, Settings, _Round, annealed, multistart
from fpipe.schedules.filling import Filling
from fpipe.schedules.list_scheduling import RULES, follow, greedy
from fpipe.schedules.plays import Limits, Player
from fpipe.schedules.squeezing import Squeezing
from fpipe.schedules.table import from_table
from fpipe.schedules.v_blocks import passes
from fpipe.schedules.work import Room, Work, table
from tests.support.combinations import EFFORT, examples, few, one_in, sample, thorough
from tests.support.instances import CHAINS, UNPROVED
from tests.support.processor import seconds_of


@one_in(4)
@pytest.mark.parametrize("instance", CHAINS, ids=str)
def test_optima(instance):
    plan, costs, limit = problem(instance)
    schedule = zb_auto(plan, costs, memory_limit_bytes=limit)
    assert lower_bound(plan, costs, memory_limit_bytes=limit) <= CHAINS[instance]
    assert simulate(schedule, plan, costs).cost == CHAINS[instance]
    assert max(account.total for account in footprint(lower(schedule, plan), costs)) <= limit


def problem(instance):
    """The plan and the costs of an instance, and its limit in bytes."""
    sizes = [1.0] * instance.microbatches  # memory is counted in chunks where lengths differ
    costs = Costs(
        instance.forward,
        instance.inputs,
        instance.weight,
        communication=instance.communication,
        residuals=instance.residuals,
        deferred=instance.deferred,
        scale=instance.scale,
        sizes=sizes,
    )
    return Plan(Placement(instance.placement), instance.microbatches), costs, instance.limit


def test_an_order_that_the_search_misses():
    """A solver finds a better one, without a proof."""
    ((instance, cost),) = UNPROVED.items()
    plan, costs, limit = problem(instance)
    assert lower_bound(plan, costs, memory_limit_bytes=limit) <= cost
    assert simulate(zb_auto(plan, costs, memory_limit_bytes=limit), plan, costs).cost <= cost + 2


# F, B, W, c: equal, of the published models (Qi et al. 2024, table 4), and others.
TIMES = [(1, 1, 1, 0), (18.5, 18.1, 9.3, 0.6), (29.5, 28.1, 23.4, 0.8), (3, 4, 2, 0.3), (2, 1, 3, 0.1), (1, 2, 1, 0)]
SIZES = [(8, 24), (8, 256), (16, 64), (16, 256), (32, 128), (32, 256)]
NEAR = 1.001  # times the lower bound


@thorough
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("deferred", [1, 0.5])
def test_near_the_bound_at_twice_the_ranks(size, times, deferred):
    check_near(size, times, deferred, 2)


@thorough
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("size", sample(SIZES, [(8, 24)]))
@pytest.mark.parametrize("deferred", [1, 0.5])
@pytest.mark.parametrize("limit", [2.25, 2.5, 3])
def test_near_the_bound_with_more_memory(size, times, deferred, limit):
    check_near(size, times, deferred, limit)


@one_in(3)
@pytest.mark.parametrize(
    ("size", "times", "deferred", "limit"),
    [
        ((8, 24), TIMES[1], 0.5, 2),
        ((8, 24), TIMES[2], 1, 2),
        ((8, 24), TIMES[3], 0.5, 2),
        ((8, 24), TIMES[2], 1, 2.5),
        ((16, 64), TIMES[2], 1, 2.5),
        ((16, 64), TIMES[3], 0.5, 2.25),
        ((8, 24), TIMES[4], 0.5, 2.5),
        ((16, 64), TIMES[3], 0.5, 2),
        ((8, 24), TIMES[3], 1, 3),
    ],
)
def test_near_the_bound(size, times, deferred, limit):
    check_near(size, times, deferred, limit)


def check_near(size, times, deferred, limit):
    (p, m), (f, b, w, c) = size, times
    plan, most = Plan(Placement.loop(p), m), int(limit * p)
    costs = Costs(f, b, w, communication=c, residuals=1, deferred=deferred)
    cost = simulate(zb_auto(plan, costs, memory_limit_bytes=most), plan, costs).cost
    assert cost <= NEAR * lower_bound(plan, costs, memory_limit_bytes=most)


@thorough
def test_more_effort_finds_better_orders():
    plan, costs = Plan(Placement.wave(4, 2), 8), Costs(2, 3, 1, communication=0.5)
    cost, seconds = dict[float, float](), dict[float, float]()
    for effort in (0.2, 1, 4):
        began = time.process_time()
        schedule = zb_auto(plan, costs, 3, effort=effort)
        seconds[effort] = time.process_time() - began
        verify(schedule, plan)
        cost[effort] = simulate(schedule, plan, costs).cost
    assert cost[4] < cost[1] < cost[0.2]
    assert seconds[0.2] < seconds[1] < seconds[4]


@pytest.mark.parametrize("schedule", [zb_auto, v_auto])
@pytest.mark.parametrize("effort", [0, -1, inf])
def test_an_effort_is_a_number_of_times(schedule, effort):
    with pytest.raises(ScheduleError, match="effort is times as many tries as usual, more than 0, not"):
        schedule(Plan(Placement.v(2), 4), effort=effort)


@pytest.mark.timing
@pytest.mark.parametrize("size", [(8, 256), (16, 256), (32, 256)])
def test_a_search_takes_no_more_than_ten_seconds(size):
    (p, m), (f, b, w, c) = size, TIMES[1]
    plan = Plan(Placement.loop(p), m)
    costs = Costs(f, b, w, communication=c, residuals=1, deferred=0.5)
    assert seconds_of(lambda: zb_auto(plan, costs, memory_limit_bytes=2 * p)) < 10


@st.composite
def problems(draw):
    """A plan whose stages are a chain on any placement without copies, and its costs, with sizes or without."""
    p, m = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    places = [Placement.loop(p), Placement.v(p), Placement.loop(p, 2), Placement([p - 1 - r for r in range(p)])]
    plan = Plan(draw(st.sampled_from(places)), m)
    eighths = st.integers(1, 24).map(lambda n: n / 8)
    per_stage = eighths | st.lists(eighths, min_size=plan.stages, max_size=plan.stages)
    scale = draw(st.just(()) | st.lists(eighths, min_size=m, max_size=m))
    link = draw(st.just(0) | eighths | st.builds(Link, eighths, st.sampled_from([1.0, 8.0])))
    values = st.sampled_from([0, 0.5])
    activation = draw(values | st.lists(values, min_size=plan.stages, max_size=plan.stages))
    sizes = {"residuals": draw(eighths) + 2, "deferred": draw(eighths), "activation": activation}
    return plan, Costs(draw(per_stage), draw(per_stage), draw(per_stage), communication=link, scale=scale, **sizes)


@settings(max_examples=examples(200), deadline=None)
@given(problems(), st.integers(1, 6))
def test_what_is_ordered_for_lengths_is_above_the_bound(problem, limit):
    plan, costs = problem
    timeline = simulate(zb_auto(plan, costs, limit, effort=EFFORT), plan, costs)
    assert max(timeline.peak_in_flight) <= limit
    assert timeline.cost >= lower_bound(plan, costs, limit) * (1 - 1e-9)


@settings(max_examples=examples(200), deadline=None)
@given(problems(), st.floats(1, 8), st.none() | st.integers(1, 3))
def test_a_limit_in_bytes_holds(problem, room, limit):
    plan, costs = problem
    most = room * max(costs.sizes or [1]) * costs.residuals * plan.stages / plan.ranks
    for engine in (zb_auto, v_auto) if plan.placement == Placement.v(plan.ranks) else (zb_auto,):
        schedule = None
        with suppress(ScheduleError):
            schedule = engine(plan, costs, limit, memory_limit_bytes=most, effort=EFFORT)
        if schedule is None:
            assert costs.activation or costs.deferred > costs.residuals
            continue
        verify(schedule, plan)
        assert max(account.total for account in footprint(lower(schedule, plan), costs)) <= most * (1 + 1e-9)
        timeline = simulate(schedule, plan, costs)
        assert limit is None or max(timeline.peak_in_flight) <= limit
        assert timeline.cost >= lower_bound(plan, costs, limit, memory_limit_bytes=most) * (1 - 1e-9)


@settings(max_examples=examples(50), deadline=None)
@given(problems())
def test_the_bytes_of_one_microbatch_in_flight_are_kept(problem):
    plan, costs = problem
    for engine in (zb_auto, v_auto) if plan.placement == Placement.v(plan.ranks) else (zb_auto,):
        least = max(each.total for each in footprint(lower(engine(plan, costs, 1, effort=EFFORT), plan), costs))
        if least:
            schedule = engine(plan, costs, memory_limit_bytes=least, effort=EFFORT)
            assert max(each.total for each in footprint(lower(schedule, plan), costs)) <= least * (1 + 1e-9)


def ruled_order(plan, costs, limit, rule=RULES[0]):
    """What fills words, and a rule's order."""
    work, limits = Work.of(plan, costs), [limit] * plan.ranks
    (ruled,) = greedy(work, limits, [rule])
    return Filling(work, Room.counted(plan, limits)), ruled


@settings(max_examples=examples(100), deadline=None)
@given(problems(), st.sampled_from(RULES), st.integers(1, 4), st.floats(1, 3))
def test_fillings_count_as_the_simulator(problem, rule, limit, slack):
    filling, ruled = ruled_order(*problem, limit, rule)
    work = filling.work
    assert follow(ruled.words, work) <= ruled.cost * (1 + 1e-12)  # a rule may wait where it need not
    words = [[at for at in word if at < filling.count] for word in ruled.words]
    filled = filling.fill(words, slack * max(filling.busy))
    assert [[at for at in word if at < filling.count] for word in filled.words] == words
    assert filled.cost == pytest.approx(follow(filled.words, work), rel=1e-12)


def ruled_play(plan, costs, limit, slack):
    """The player of a rule's order, its rows, and its play."""
    filling, ruled = ruled_order(plan, costs, limit)
    player = Player(filling, slack * max(filling.busy))
    rows = player.rows([at for at in word if at < filling.count] for word in ruled.words)
    return player, rows, player.play(rows)


@settings(max_examples=examples(60), deadline=None)
@given(problems(), st.integers(1, 4), st.floats(0.9, 1.5), st.randoms(use_true_random=False))
def test_a_play_that_goes_on_counts_as_one_from_the_beginning(problem, limit, slack, rng):
    """Whatever moves, and whether ranks then wait for each other or for memory: as `Filling` counts it."""
    player, rows, played = ruled_play(*problem, limit, slack)
    words, filling, target = player.words(rows), player.filling, player.target
    for _ in range(20):
        rank = rng.randrange(len(words))
        word, place = [*words[rank]], rng.randrange(len(words[rank]))
        other = place + rng.choice((-3, -2, -1, 1, 2, 3))
        if not 0 <= other < len(word):
            continue
        slot, is_later = rows[rank][place], other > place
        passed = rows[rank][place + 1 : other + 1] if is_later else rows[rank][other:place]
        if not player.tied[slot].isdisjoint(passed):
            continue
        word.insert(other, word.pop(place))
        moved = [*words[:rank], word, *words[rank + 1 :]]
        cost, _ = filling.best(moved, [target])
        reordered = player.reordered(played, slot, passed, is_later)
        assert (reordered is None) == (filling.sequence(moved) is None)
        if reordered is None:
            continue
        (same, between), rows_moved = reordered, player.rows(moved)
        order = played.order[:same] + between + played.order[same + len(between) :]
        assert sorted(order) == [*range(len(order))]
        done, state = player.state(played, same)
        assert done <= same
        heads = [row[0] for row in rows_moved]
        ended = player.run(order[done:], state, heads, player.unlimited)
        assert (max(player.spans(ended, heads)) if ended else inf) == cost
        if ended:
            over = max(player.spans(ended, heads)) - target
            waits = Limits(-over * (1 - 1e-6) + 1e-6, player.unlimited.latest)
            most = player.run(order[done:], state, heads, waits)
            assert most is None or max(player.spans(most, heads)) == cost
            words, rows = moved, rows_moved
            played = player.finished(order, ended, heads, done, played.states)
            assert [played.order[turn] for turn in played.turns] == [*range(len(order))]
            assert max(played.spans) == cost


@pytest.mark.parametrize("placement", [Placement.v(4), Placement.loop(4, 2), Placement.loop(4)])
def test_a_pass_that_starts_later_than_its_deadline_makes_the_order_slower(placement):
    """One at its deadline does not, but for weight gradients, which take little time here, and have none to spare."""
    weight, slight = 2**-16, 2**-8
    player, _, played = ruled_play(Plan(placement, 8), Costs(18.5, 18.1, weight, communication=0.6), 3, 1)
    longest, latest = max(played.spans), player.latest(played)
    assert slight > 2 * sum(time for *_, late, _ in player.steps if late for time in late[:1])
    for slot, deadline in enumerate(latest):
        if slot in played.heads:  # its rank's span begins with it
            continue
        for when, is_late in ((deadline, False), (deadline + slight, True)):
            begin = player.begin.copy()
            begin.ready[slot] = when
            ended = player.run(played.order, begin, played.heads, player.unlimited)
            assert (max(player.spans(ended, played.heads)) > longest + slight / 2) == is_late
            early = player.run(played.order, begin, played.heads, Limits(-inf, latest, tolerance=slight / 2))
            assert (early is None) == is_late


@settings(max_examples=examples(60), deadline=None)
@given(problems(), st.integers(1, 4), st.floats(0.9, 1.5))
def test_no_pass_has_started_later_than_its_deadline(problem, limit, slack):
    player, _, played = ruled_play(*problem, limit, slack)
    if played:
        spare = [due - at for due, at in zip(player.latest(played), played.starts, strict=True)]
        assert min(spare) >= -1e-9 * max(played.spans)


def test_annealing_plays_a_tenth_of_most_orders_and_keeps_the_deadlines_of_the_last_order(monkeypatch):
    player, rows, played = ruled_play(Plan(Placement.v(4), 12), Costs(18.5, 18.1, 9.3, communication=0.6), 3, 1)
    runs, run = [], Player.run

    def counted(self, slots, *arguments):
        passes = []
        state = run(self, (passes.append(slot) or slot for slot in slots), *arguments)
        runs.append(len(passes))
        return state

    monkeypatch.setattr(Player, "run", counted)
    annealing = _Round(player, rows, played, Random(0), Settings())
    annealing.run(max(player.filling.busy), 200_000)
    assert annealing.least < max(played.spans)
    assert len(runs) > 2_000
    assert sum(runs) < 0.15 * len(runs) * len(played.order)
    monkeypatch.undo()
    assert annealing.latest == player.latest(annealing.played)
    again = player.play(annealing.rows)
    assert again.spans == annealing.played.spans
    assert [annealing.rows[player.rank_of[slot]][place] for slot, place in enumerate(annealing.places)] == sorted(
        again.order
    )


@one_in(2)
@pytest.mark.parametrize(("placement", "limit", "cost"), [(Placement.v(3), 2, 106), (Placement.loop(3, 2), 3, 86)])
def test_annealing_makes_the_order_of_a_rule_faster(placement, limit, cost):
    filling, ruled = ruled_order(Plan(placement, 6), Costs(2, 3, 1, communication=0.5), limit)
    once, moved = (multistart(filling, [ruled], max(filling.busy), *often) for often in ((), (3, LONG)))
    assert once == annealed(filling, ruled, max(filling.busy))
    for each in (once, moved):
        assert each.cost == pytest.approx(follow(each.words, filling.work))
    assert moved.cost <= once.cost < ruled.cost
    assert moved.cost <= cost
    assert annealed(filling, ruled, ruled.cost) is multistart(filling, [ruled], ruled.cost) is ruled


@pytest.mark.parametrize("placement", [Placement.v(4), Placement.loop(4, 2)])
def test_what_annealing_finds_does_not_depend_on_the_unit_of_time(placement):
    """It is a power of two here, so that nothing is rounded."""
    orders = []
    for unit in (1, 2**-20, 2**20):
        costs = Costs(*(unit * time for time in (18.5, 18.1, 9.3)), communication=unit * 0.6)
        filling, ruled = ruled_order(Plan(placement, 8), costs, 3)
        order = annealed(filling, ruled, max(filling.busy), Settings(budget=50_000))
        assert order.cost < ruled.cost
        orders.append((order.cost / unit, order.words))
    assert orders[0] == orders[1] == orders[2]


def test_words_that_wait_for_each_other_have_no_sequence():
    plan = Plan(Placement.loop(2), 1)
    filling = Filling(Work.of(plan, Costs()), Room.counted(plan, [1, 1]))
    assert filling.sequence([[0, 2], [1, 3]]) is not None
    assert filling.sequence([[2, 0], [1, 3]]) is None
    assert filling.best([[2, 0], [1, 3]], [6, inf]) == (inf, inf)
    assert filling.fill([[2, 0], [1, 3]], 6) == (inf, [])


@pytest.mark.parametrize(("placement", "cost"), [(Placement.loop(2, 2), 43), (Placement.v(2), 38)])
def test_values_without_bytes_queue(placement, cost):
    """Behind an activation that takes 4 s: that of stage 2 on the loop, and the gradient for stage 2 on the V."""
    plan, costs = Plan(placement, 4), Costs(communication=Link(0, 1), activation=[4, 0, 0, 0])
    filling, ruled = ruled_order(plan, costs, 4)
    target = max(filling.busy)
    words = [[at for at in word if at < filling.count] for word in ruled.words]
    filled, player = filling.fill(words, target), Player(filling, target)
    simulated = simulate(from_table(table(filled.words, plan)), plan, costs).cost
    assert max(player.play(player.rows(words)).spans) == filled.cost == simulated == cost
    if placement == Placement.v(2):
        kinds = [[passes(rank, plan).index(at) for at in word] for rank, word in enumerate(filled.words)]
        assert Squeezing(filling.work).squeeze(kinds, 8)[0] == cost


def test_less_memory_costs_more():
    plan, costs = Plan(Placement.loop(4), 16), Costs(2, 3, 2, communication=0.25, residuals=4, deferred=2)
    costs_of = [
        simulate(zb_auto(plan, costs, memory_limit_bytes=n), plan, costs).cost
        for n in few(range(4, 40, 4), [4, 12, 32])
    ]
    assert all(less >= more for less, more in pairwise(costs_of))


@pytest.mark.parametrize(
    ("costs", "limit", "message"),
    [
        (Costs(), 4, "memory_limit_bytes needs costs with sizes"),
        (Costs(residuals=4), 0, "memory_limit_bytes must be more than 0 bytes, not 0"),
        (Costs(residuals=4), 3, "is 3 B: rank 0 needs 4 B for a microbatch; give it more than 4 B"),
        (
            Costs(residuals=4, parameters=8),
            30,
            "needs 36 B on rank 0: 8 B of parameters, 16 B of optimizer state, 8 B of gradients, 4 B of live",
        ),
    ],
)
@pytest.mark.parametrize("placement", [Placement.loop(2), Placement.v(2)])
def test_limits_that_nothing_keeps(costs, limit, message, placement):
    engine, chunks = (zb_auto, 1) if placement.stages == 2 else (v_auto, 2)
    if chunks == 1:
        with pytest.raises(ScheduleError, match=message):
            engine(Plan(placement, 4), costs, memory_limit_bytes=limit)
    else:
        with pytest.raises(ScheduleError, match="memory_limit_bytes"):
            engine(Plan(placement, 4), costs, memory_limit_bytes=limit)
