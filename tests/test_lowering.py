"""From compute order to complete programs, and to one order over all ranks.

The oracle is written from the rules alone: `reads`, `makes` and `runs_through` say nothing of how lowering
or `fpipe.effects.TABLE` say it.
"""

from collections import Counter, deque
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe import Edges, Placement, Plan, ScheduleError, lower
from fpipe.effects import (
    Activation,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Gradient,
    Overlap,
    Recv,
    Reduce,
    Send,
    WeightGradient,
)
from fpipe.interleave import interleave
from fpipe.lowering import collect, communicate, complete, forward_only, prefetch, reduce, wavefront
from fpipe.schedules import gpipe, interleaved_1f1b, one_f_one_b


def reads(effect, plan):
    match effect:
        case Overlap(forward, backward):
            return reads(forward, plan) | reads(backward, plan)
        case Forward(s, m):
            return {Activation(t, m) for t in plan.edges.reads[s]}
        case Backward(s, m) | BackwardInput(s, m):
            return {Gradient(s, c, m) for c, read in enumerate(plan.edges.reads) if s in read} | {("kept", s, m)}
        case BackwardWeight(s, m):
            return {("deferred", s, m)}
        case Send(value, _):
            return {value}
        case Reduce(s):
            tied = {s}.union(*(group for group in plan.ties if s in group))
            return {WeightGradient(t, rank) for t in tied for rank in plan.placement.holders[t]}
    return set()


def makes(effect, rank, plan):
    match effect:
        case Overlap(forward, backward):
            return makes(forward, rank, plan) | makes(backward, rank, plan)
        case Forward(s, m):
            return {Activation(s, m), ("kept", s, m)}
        case Backward(s, m) | BackwardInput(s, m):
            gradients = {Gradient(t, s, m) for t in plan.edges.reads[s]}
            return gradients | (
                {("deferred", s, m)} if isinstance(effect, BackwardInput) else last_sum(s, m, rank, plan)
            )
        case BackwardWeight(s, m):
            return last_sum(s, m, rank, plan)
    return set()


def last_sum(stage, microbatch, rank, plan):
    return {WeightGradient(stage, rank)} if microbatch == plan.microbatches_of(stage, rank)[-1] else set()


def runs_through(programs, wired=True):
    """Whether every effect can run. Not wired: what one rank makes, all ranks have."""
    everywhere = set()
    here = {rank: set() if wired else everywhere for rank in programs}
    sent, posted = set(), set()
    left = {rank: deque(program) for rank, program in programs.items()}
    stuck = False
    while not stuck:
        stuck = True
        for rank, effects in left.items():
            plan = programs[rank].plan
            while effects and all(v in here[rank] or {(v, rank)} <= sent & posted for v in reads(effects[0], plan)):
                effect, stuck = effects.popleft(), False
                here[rank] |= makes(effect, rank, plan)
                if isinstance(effect, Send):
                    sent.add((effect.value, effect.rank))
                if isinstance(effect, Recv):
                    posted.add((effect.value, rank))
    return not any(left.values())


def computes(program):
    return [
        p
        for e in program
        for p in ((e.forward, e.backward) if isinstance(e, Overlap) else (e,))
        if isinstance(p, Forward | Backward | BackwardInput | BackwardWeight)
    ]


def runs_each_once_in_order(programs):
    """Every stage's forwards, and its weight gradients if there are any, in the order of the microbatches."""
    trained = any(isinstance(e, Backward | BackwardWeight) for p in programs.values() for e in computes(p))
    for rank, program in programs.items():
        plan = program.plan
        for stage in plan.stages_on(rank):
            own = [e for e in computes(program) if e.stage == stage]
            due = list(plan.microbatches_of(stage, rank))
            halves = sorted(e.microbatch for e in own if isinstance(e, BackwardInput))
            if [e.microbatch for e in own if isinstance(e, Forward)] != due:
                return False
            if [e.microbatch for e in own if isinstance(e, Backward | BackwardWeight)] != (due if trained else []):
                return False
            if halves != [e.microbatch for e in own if isinstance(e, BackwardWeight)]:
                return False
    return True


def legal(programs):
    return runs_each_once_in_order(programs) and runs_through(programs)


def halved(schedule, delay=0):
    """The schedule with each backward in its two halves, weight gradients `delay` backwards later."""

    def run(rank, plan):
        late = deque()
        for e in schedule(rank, plan):
            if isinstance(e, Backward):
                yield BackwardInput(e.stage, e.microbatch)
                late.append(BackwardWeight(e.stage, e.microbatch))
                if len(late) > delay:
                    yield late.popleft()
            else:
                yield e
        yield from late

    return run


def overlapped(schedule):
    """The schedule with a forward and the backward behind it as one, where they are of different microbatches."""

    def run(rank, plan):
        held = None
        for e in schedule(rank, plan):
            if isinstance(held, Forward) and isinstance(e, Backward) and held.microbatch != e.microbatch:
                held, e = None, Overlap(held, e)
            yield from (held,) if held else ()
            held = e
        yield held

    return run


def written(*orders):
    """The schedule that yields these effects, rank by rank."""
    return lambda rank, plan: iter(orders[rank])


def text(program):
    """`F1.0` is stage 1's forward of microbatch 0; `a1.0>2` sends its activation to rank 2, `a1.0<1` receives it."""
    return " ".join(map(_text, program))


def _text(x):
    match x:
        case Activation(s, m):
            return f"a{s}.{m}"
        case Gradient(s, c, m):
            return f"g{s}/{c}.{m}"
        case WeightGradient(s, r):
            return f"w{s}@{r}"
        case Send(value, rank):
            return f"{_text(value)}>{rank}"
        case Recv(value, rank):
            return f"{_text(value)}<{rank}"
        case Reduce(s):
            return f"R{s}"
        case Overlap(f, b):
            return f"{_text(f)}&{_text(b)}"
    letter = {Forward: "F", Backward: "B", BackwardInput: "I", BackwardWeight: "W"}[type(x)]
    return f"{letter}{x.stage}.{x.microbatch}"


def texts(programs):
    return [text(program) for program in programs.values()]


F0, F1, B0, B1 = Forward(0, 0), Forward(1, 0), Backward(0, 0), Backward(1, 0)
A, G = Activation(0, 0), Gradient(0, 1, 0)
PAIR = Plan(Placement.loop(2), 1)


def test_communicate_sends_after_the_producer_and_receives_before_the_consumer():
    assert texts(communicate(collect(one_f_one_b, Plan(Placement.loop(2), 2)))) == [
        "F0.0 a0.0>1 F0.1 a0.1>1 g0/1.0<1 B0.0 g0/1.1<1 B0.1",
        "a0.0<0 F1.0 B1.0 g0/1.0>0 a0.1<0 F1.1 B1.1 g0/1.1>0",
    ]


def test_communicate_sends_input_gradients_before_the_weight_gradient_runs():
    assert texts(communicate(collect(halved(gpipe), PAIR))) == [
        "F0.0 a0.0>1 g0/1.0<1 I0.0 W0.0",
        "a0.0<0 F1.0 I1.0 g0/1.0>0 W1.0",
    ]


def test_communicate_sends_a_value_once_to_a_rank_that_reads_it_twice_and_never_to_its_own():
    plan = Plan(Placement((0, 0, 1, 1)), 1, Edges([(), (0,), (0, 1), (0, 2)]))
    assert texts(communicate(collect(gpipe, plan))) == [
        "F0.0 a0.0>1 F1.0 a1.0>1 g0/3.0<1 g0/2.0<1 g1/2.0<1 B1.0 B0.0",
        "a0.0<0 a1.0<0 F2.0 F3.0 B3.0 g0/3.0>0 B2.0 g0/2.0>0 g1/2.0>0",
    ]


def test_communicate_treats_an_overlap_as_one_effect():
    plan = Plan(Placement.loop(2), 2)
    first = [F0, Forward(0, 1), B0, Backward(0, 1)]
    second = [F1, Overlap(Forward(1, 1), B1), Backward(1, 1)]
    assert texts(communicate(collect(written(first, second), plan))) == [
        "F0.0 a0.0>1 F0.1 a0.1>1 g0/1.0<1 B0.0 g0/1.1<1 B0.1",
        "a0.0<0 F1.0 a0.1<0 F1.1&B1.0 g0/1.0>0 B1.1 g0/1.1>0",
    ]


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (([], [F1]), r"rank 1 needs Activation\(stage=0, microbatch=0\) for Forward.*, but rank 0 never makes it"),
        (([F0], []), r"rank 0 makes Activation\(stage=0, microbatch=0\) for rank 1, which never uses it"),
    ],
)
def test_communicate_refuses_a_value_without_maker_or_reader(orders, message):
    with pytest.raises(ScheduleError, match=message):
        communicate(collect(written(*orders), PAIR))


@pytest.mark.parametrize(
    ("depth", "receiver"),
    [
        (0, "a0.0<0 F1.0 a0.1<0 F1.1 a0.2<0 F1.2 B1.0 g0/1.0>0 B1.1 g0/1.1>0 B1.2 g0/1.2>0"),
        (1, "a0.0<0 a0.1<0 F1.0 a0.2<0 F1.1 F1.2 B1.0 g0/1.0>0 B1.1 g0/1.1>0 B1.2 g0/1.2>0"),
        (2, "a0.0<0 a0.1<0 a0.2<0 F1.0 F1.1 F1.2 B1.0 g0/1.0>0 B1.1 g0/1.1>0 B1.2 g0/1.2>0"),
    ],
)
def test_prefetch_posts_as_many_receives_beyond_the_next_one_used_as_its_depth(depth, receiver):
    programs = prefetch(communicate(collect(gpipe, Plan(Placement.loop(2), 3))), depth)
    assert text(programs[1]) == receiver


@pytest.mark.parametrize(("edges", "depth"), [(Edges.chain(3), 2), (Edges([(), (0,), (0, 1)]), 4)])
def test_the_prefetch_depth_is_two_and_four_where_stages_are_skipped(edges, depth):
    plan = Plan(Placement.loop(3), 8, edges)
    assert lower(gpipe, plan) == lower(gpipe, plan, depth=depth)
    assert lower(gpipe, plan) != lower(gpipe, plan, depth=depth - 1)


def test_a_negative_prefetch_depth_is_refused():
    with pytest.raises(ScheduleError, match="the prefetch depth must be at least 0, not -1"):
        lower(gpipe, PAIR, depth=-1)


def test_reduce_follows_a_stages_last_weight_gradient_and_the_sends_behind_it():
    plan = Plan(Placement.loop(2, chunks=2), 1)
    assert texts(reduce(communicate(collect(gpipe, plan)))) == [
        "F0.0 a0.0>1 a1.0<1 F2.0 a2.0>1 g2/3.0<1 B2.0 g1/2.0>1 R2 g0/1.0<1 B0.0 R0",
        "a0.0<0 F1.0 a1.0>0 a2.0<0 F3.0 B3.0 g2/3.0>0 R3 g1/2.0<0 B1.0 g0/1.0>0 R1",
    ]


def test_reduce_exchanges_what_copies_and_ties_share_at_the_end():
    plan = Plan(Placement.both_ways(2), 2)
    assert [program.rpartition("g0/1")[2] for program in texts(lower(gpipe, plan))] == [
        ".1>1 B0.0 w0@0>1 w1@0>1 w0@1<1 w1@1<1 R0 R1",
        ".0>0 B0.1 w0@1>0 w1@1>0 w0@0<0 w1@0<0 R0 R1",
    ]
    plan = Plan(Placement.loop(3), 1, ties=((0, 2),))
    assert [program.partition(" B")[2] for program in texts(lower(gpipe, plan))] == [
        "0.0 w0@0>2 w2@2<2 R0",
        "1.0 g0/1.0>0 R1",
        "2.0 g1/2.0>1 w2@2>0 w0@0<0 R2",
    ]


@pytest.mark.parametrize(
    ("placement", "ties"), [(Placement.loop(1, 2), ((0, 1),)), (Placement.loop(2, 2), ((0, 1, 2),))]
)
def test_ties_between_stages_of_one_rank_are_reduced_once_for_each_stage(placement, ties):
    plan = Plan(placement, 2, ties=ties)
    order = interleave(lower(gpipe, plan))
    assert sorted(e.stage for _, e in order if isinstance(e, Reduce)) == list(range(plan.stages))


def test_forward_only_drops_what_is_backward():
    plan = Plan(Placement.loop(2), 2, ties=((0, 1),))
    order = [Overlap(Forward(1, 1), B1) if e == Forward(1, 1) else e for e in gpipe(1, plan) if e != B1]
    for schedule in (gpipe, halved(gpipe), written(tuple(gpipe(0, plan)), order)):
        assert texts(forward_only(lower(schedule, plan))) == [
            "F0.0 a0.0>1 F0.1 a0.1>1",
            "a0.0<0 a0.1<0 F1.0 F1.1",
        ]


@st.composite
def placements(draw):
    """A placement, and the schedules that admit it."""
    ranks, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["loop", "chunks", "v", "both_ways", "any"]))
    if kind == "loop":
        return Placement.loop(ranks), [gpipe, one_f_one_b, interleaved_1f1b]
    if kind == "chunks":
        return Placement.loop(ranks, chunks), [gpipe, interleaved_1f1b]
    if kind == "v":
        return Placement.v(ranks), [gpipe]
    if kind == "both_ways":
        return Placement.both_ways(draw(st.sampled_from([2, 4]))), [gpipe]
    others = draw(st.lists(st.integers(0, ranks - 1), max_size=3))
    holders = draw(st.permutations([*range(ranks), *others]))
    return Placement([draw(st.sampled_from([rank, [rank, *{0} - {rank}]])) for rank in holders]), [gpipe]


@st.composite
def edges_between(draw, stages):
    """A DAG in which every stage but the last is read."""
    found = [[] for _ in range(stages)]
    for stage in range(stages - 1):
        for consumer in draw(st.sets(st.integers(stage + 1, stages - 1), min_size=1, max_size=3)):
            found[consumer].append(stage)
    return Edges(found)


@st.composite
def works(draw):
    """A plan, a schedule that admits it, and a prefetch depth."""
    placement, schedules = draw(placements())
    stages, copies = placement.stages, max(map(len, placement.holders))
    group = st.lists(st.integers(0, stages - 1), min_size=2, max_size=3, unique=True).map(tuple)
    plan = Plan(
        placement,
        copies * draw(st.integers(1, 8 // copies)),
        draw(st.just(Edges.chain(stages)) | edges_between(stages)),
        ties=tuple(draw(st.lists(group, max_size=2))) if stages > 1 else (),
    )
    schedule = draw(st.sampled_from([*schedules, wavefront]))
    schedule = draw(st.sampled_from([schedule, halved(schedule), halved(schedule, delay=2)]))
    return schedule, plan, draw(st.integers(0, 4))


def over_random_plans(test):
    return settings(max_examples=200)(given(works())(test))


def posts(programs, kind):
    """(from, to) -> the values that go there, in the order in which they are sent, or received."""
    found = {}
    for rank, program in programs.items():
        for e in program:
            if isinstance(e, kind):
                found.setdefault((rank, e.rank) if kind is Send else (e.rank, rank), []).append(e.value)
    return found


@over_random_plans
def test_on_each_directed_edge_receives_come_in_the_order_of_the_sends(work):
    schedule, plan, depth = work
    programs = lower(schedule, plan, depth=depth)
    assert posts(programs, Send) == posts(programs, Recv)


@over_random_plans
def test_every_value_is_made_or_received_before_its_use(work):
    schedule, plan, depth = work
    programs = lower(schedule, plan, depth=depth)
    for rank, program in programs.items():
        here = set()
        for effect in program:
            assert reads(effect, plan) <= here, (rank, effect)
            here |= {effect.value} if isinstance(effect, Recv) else makes(effect, rank, plan)
    assert legal(programs)


@over_random_plans
def test_each_value_goes_once_to_each_other_rank_that_reads_it(work):
    schedule, plan, depth = work
    programs = lower(schedule, plan, depth=depth)
    made = [(rank, v) for rank, program in programs.items() for e in program for v in makes(e, rank, plan)]
    read = {rank: {v for e in p if not isinstance(e, Send) for v in reads(e, plan)} for rank, p in programs.items()}
    due = Counter((maker, rank, v) for maker, v in made for rank in read if rank != maker and v in read[rank])
    sent = Counter((maker, rank, v) for (maker, rank), values in posts(programs, Send).items() for v in values)
    assert sent == due


@over_random_plans
def test_an_activation_or_gradient_is_sent_right_after_the_effect_that_gives_it(work):
    schedule, plan, depth = work
    for rank, program in lower(schedule, plan, depth=depth).items():
        fresh = set()
        for effect in program:
            if not isinstance(effect, Send):
                fresh = makes(effect, rank, plan)
            elif not isinstance(effect.value, WeightGradient):
                assert effect.value in fresh


@over_random_plans
def test_each_stage_that_has_weight_gradients_is_reduced_once_on_each_rank_that_holds_it(work):
    schedule, plan, depth = work
    programs = lower(schedule, plan, depth=depth)
    trained = any(isinstance(e, Backward | BackwardWeight) for program in programs.values() for e in program)
    for rank, program in programs.items():
        stages = sorted(e.stage for e in program if isinstance(e, Reduce))
        assert stages == (list(plan.stages_on(rank)) if trained else [])


def unused(program):
    """How many receives stand posted and unused, before each effect that computes."""
    waiting, counts = set(), []
    for e in program:
        if isinstance(e, Recv) and not isinstance(e.value, WeightGradient):
            waiting.add(e.value)
        elif not isinstance(e, Send | Recv | Reduce):
            counts.append(len(waiting))
            waiting -= reads(e, program.plan)
    return counts


@over_random_plans
def test_communicate_posts_a_receive_no_earlier_than_the_channels_order_asks(work):
    schedule, plan, _ = work
    for program in communicate(collect(schedule, plan)).values():
        latest = {}
        for effect in program:
            if isinstance(effect, Recv):
                latest[effect.rank] = effect.value
            else:
                assert set(latest.values()) <= reads(effect, plan)
                latest = {}


@over_random_plans
def test_receives_posted_ahead_stay_within_the_depth_except_where_the_channels_order_forces_them(work):
    schedule, plan, depth = work
    forced = communicate(collect(schedule, plan))
    for rank, program in lower(schedule, plan, depth=depth).items():
        for ahead, least in zip(unused(program), unused(forced[rank]), strict=True):
            assert ahead <= max(depth + 1, least)


@settings(max_examples=50)
@given(st.integers(1, 5), st.integers(1, 8), st.integers(0, 4), st.sampled_from([gpipe, one_f_one_b, interleaved_1f1b]))
def test_along_a_chain_receives_posted_ahead_stay_within_the_depth(ranks, microbatches, depth, schedule):
    programs = lower(schedule, Plan(Placement.loop(ranks), microbatches), depth=depth)
    assert max(n for program in programs.values() for n in unused(program)) <= depth + 1


@over_random_plans
def test_interleave_runs_every_effect_once_in_its_ranks_order_and_after_what_it_needs(work):
    schedule, plan, depth = work
    programs = lower(schedule, plan, depth=depth)
    order = interleave(programs)
    assert {r: tuple(e for rank, e in order if rank == r) for r in programs} == {
        r: program.effects for r, program in programs.items()
    }
    here, sent = set(), set()
    for rank, effect in order:
        assert all((v, rank) in here or (v, rank) in sent for v in reads(effect, plan))
        here |= {(v, rank) for v in makes(effect, rank, plan)}
        if isinstance(effect, Send):
            sent.add((effect.value, effect.rank))


@over_random_plans
def test_what_is_left_of_a_program_without_its_backward_still_runs(work):
    schedule, plan, depth = work
    programs = forward_only(lower(schedule, plan, depth=depth))
    assert all(isinstance(e, Forward) or isinstance(e.value, Activation) for p in programs.values() for e in p)
    assert posts(programs, Send) == posts(programs, Recv)
    assert legal(programs)
    assert len(interleave(programs)) == sum(map(len, programs.values()))


def mutations(order):
    for at, effect in enumerate(order):
        yield f"without {_text(effect)}", [*order[:at], *order[at + 1 :]]
        yield f"with {_text(effect)} twice", [*order[: at + 1], *order[at:]]
        if at:
            yield f"with {_text(effect)} earlier", [*order[: at - 1], effect, order[at - 1], *order[at + 1 :]]


def accepted(schedule, plan):
    try:
        interleave(lower(schedule, plan))
    except ScheduleError:
        return False
    return True


@pytest.mark.parametrize(
    ("schedule", "plan"),
    [
        (gpipe, Plan(Placement.loop(3), 2)),
        (one_f_one_b, Plan(Placement.loop(3), 3)),
        (halved(one_f_one_b, delay=1), Plan(Placement.loop(2), 3)),
        (overlapped(one_f_one_b), Plan(Placement.loop(3), 4)),
        (interleaved_1f1b, Plan(Placement.loop(2, chunks=2), 2)),
        (gpipe, Plan(Placement.both_ways(2), 4)),
        (gpipe, Plan(Placement((0, 1, 0)), 2, Edges([(), (0,), (0, 1)]))),
        (wavefront, Plan(Placement.v(2), 2)),
    ],
)
def test_a_compute_order_with_one_fault_is_accepted_only_if_it_is_legal(schedule, plan):
    orders = [tuple(schedule(rank, plan)) for rank in range(plan.ranks)]
    refused = 0
    for rank, order in enumerate(orders):
        for name, changed in mutations(order):
            faulty = written(*orders[:rank], changed, *orders[rank + 1 :])
            programs = collect(faulty, plan)
            fine = runs_each_once_in_order(programs) and runs_through(programs, wired=False)
            assert accepted(faulty, plan) == fine, f"rank {rank} {name}"
            assert not fine or legal(lower(faulty, plan))
            refused += not fine
    assert refused >= 2 * sum(map(len, orders))  # at least each effect left out, and each one doubled


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([], r"rank 0 ends without Forward of stage 0, microbatch 0"),
        ([F0, Forward(0, 2)], r"rank 0 yields Forward\(stage=0, microbatch=2\) where microbatch 1 is due"),
        (
            [*map(partial(Forward, 0), (0, 1, 2, 2))],
            r"yields Forward\(stage=0, microbatch=2\) where nothing more is due",
        ),
        ([*map(partial(Forward, 0), range(3)), B0, B0], r"Backward\(stage=0, microbatch=0\) where microbatch 1 is due"),
        ([*map(partial(Forward, 0), range(3)), B0], "ends without Backward, .* of stage 0, microbatch 1"),
        ([BackwardInput(0, 0), BackwardInput(0, 0)], r"yields BackwardInput\(stage=0, microbatch=0\) twice"),
        ([BackwardWeight(0, 0)], r"yields BackwardWeight\(stage=0, microbatch=0\) before its BackwardInput"),
        (
            [*map(partial(Forward, 0), range(3)), BackwardInput(0, 1)],
            "ends without BackwardWeight of stage 0, microbatch 1",
        ),
    ],
)
def test_an_incomplete_or_disordered_program_is_refused(order, message):
    with pytest.raises(ScheduleError, match=message):
        complete(collect(written(order), Plan(Placement.loop(1), 3)))


def test_a_backward_is_run_by_every_stage_or_by_none():
    assert accepted(written([F0], [F1]), PAIR)
    with pytest.raises(ScheduleError, match="rank 0 ends without Backward"):
        lower(written([F0], [F1, B1]), PAIR)


@pytest.mark.parametrize(
    ("effect", "message"),
    [
        ("F0", "rank 1 yields 'F0', which is no effect"),
        (None, "rank 1 yields None, which is no effect"),
        (F0, r"rank 1 yields Forward\(stage=0, microbatch=0\): it holds stages \(1,\), .* microbatches 0 to 0"),
        (Forward(1, 1), r"rank 1 yields Forward\(stage=1, microbatch=1\)"),
        (Backward(2, 0), r"rank 1 yields Backward\(stage=2, microbatch=0\)"),
        (BackwardInput(-1, 0), r"rank 1 yields BackwardInput\(stage=-1, microbatch=0\)"),
        (Overlap(F1, B0), r"rank 1 yields Backward\(stage=0, microbatch=0\)"),
        (Send(G, 1), r"rank 1 yields Send\(.*\): the peer must be another rank, 0 to 1"),
        (Send(G, 2), r"rank 1 yields Send\(.*\): the peer must be another rank, 0 to 1"),
        (Recv(A, -1), r"rank 1 yields Recv\(.*\): the peer must be another rank, 0 to 1"),
        (Reduce(0), r"rank 1 yields Reduce\(stage=0\): it holds stages \(1,\)"),
    ],
    ids=repr,
)
def test_an_effect_that_is_not_this_ranks_to_run_is_refused(effect, message):
    with pytest.raises(ScheduleError, match=message):
        lower(written([F0], [F1, effect]), PAIR)


def test_a_copy_of_a_stage_runs_its_own_block_only():
    with pytest.raises(ScheduleError, match=r"rank 0 yields Forward\(stage=0, microbatch=1\).*runs its own block"):
        lower(written([Forward(0, 1)], []), Plan(Placement.both_ways(2), 2))


OWN = [[F0, Send(A, 1), Recv(G, 1), B0, Reduce(0)], [Recv(A, 0), F1, B1, Send(G, 0), Reduce(1)]]


def test_a_schedule_keeps_its_own_communication():
    assert [list(p) for p in lower(written(*OWN), PAIR).values()] == OWN
    bare = [[e for e in order if not isinstance(e, Reduce)] for order in OWN]
    assert [list(p) for p in lower(written(*bare), PAIR).values()] == OWN


@pytest.mark.parametrize(
    "orders",
    [
        [[F0, Forward(0, 1), B0, Reduce(0), Backward(0, 1)]],
        [[F0, Forward(0, 1), B0, Backward(0, 1), Reduce(0), Reduce(0)]],
        [[F0, Forward(0, 1), B0, Backward(0, 1), Reduce(0)], [F1, Forward(1, 1), B1, Backward(1, 1)]],
    ],
    ids=["before the last weight gradient", "twice", "on one rank alone"],
)
def test_a_stage_is_reduced_once_and_last(orders):
    with pytest.raises(ScheduleError, match="Reduce"):
        interleave(lower(written(*orders), Plan(Placement.loop(len(orders)), 2)))


def test_a_receive_order_that_is_not_the_channels_is_refused_and_the_channel_named():
    first = [F0, Send(A, 1), Forward(0, 1), Send(Activation(0, 1), 1)]
    second = [Recv(Activation(0, 1), 0), Recv(A, 0), F1, Forward(1, 1)]
    message = (
        r"on the channel from rank 0 to rank 1, Activation\(stage=0, microbatch=0\) is sent where "
        r"Activation\(stage=0, microbatch=1\) is received: post the receives in the order of the sends"
    )
    with pytest.raises(ScheduleError, match=message):
        interleave(lower(written(first, second), Plan(Placement.loop(2), 2)))


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (
            ([F0, Send(A, 1)], [F1]),
            r"rank 1 waits at Forward.* for Activation.* from rank 0: post Recv\(Activation.*, 0\)",
        ),
        (([F0], [Recv(A, 0), F1]), r"rank 1 waits at Forward.* for Activation.* from rank 0, which never sends it"),
        (([F0, Send(A, 1), Send(A, 1)], [Recv(A, 0), F1]), r"rank 0 yields Send\(.*\) twice"),
        (([F0, Send(A, 1)], [F1, Recv(A, 0)]), r"rank 1 waits at Forward.* for Activation"),
        (([F0, Send(G, 1)], [F1]), r"rank 0 yields Send\(.*: rank 1 makes it"),
        (([F0, Send(A, 1)], [Recv(A, 0), F1, Recv(A, 0)]), r"rank 1 yields Recv\(.*\) twice"),
    ],
    ids=["not posted", "never sent", "sent twice", "received late", "of another", "received twice"],
)
def test_communication_that_does_not_fit_is_refused(orders, message):
    with pytest.raises(ScheduleError, match=message):
        interleave(lower(written(*orders), PAIR))


def test_when_all_ranks_are_parked_the_message_says_what_each_waits_for():
    plan = Plan(Placement((0, 1, 0)), 1)
    orders = [Forward(2, 0), F0, Backward(2, 0), B0], [B1, F1]
    message = (
        r"no rank can go on: rank 0 waits at Forward\(stage=2, microbatch=0\) for Activation\(stage=1, microbatch=0\) "
        r"from rank 1, which has yet to send it; rank 1 waits at Backward\(stage=1, microbatch=0\) for "
        r"(Residuals\(stage=1, microbatch=0\), which no effect before it gives|"
        r"Gradient\(stage=1, consumer=2, microbatch=0\) from rank 0, which has yet to send it)$"
    )
    with pytest.raises(ScheduleError, match=message):
        interleave(lower(written(*orders), plan))


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (
            [F1, F0, B1, B0],
            r"rank 0 waits at Forward\(stage=1.* for Activation\(stage=0.*, which this rank itself makes only later",
        ),
        (
            [B1, F0, F1, B0],
            r"rank 0 waits at Backward\(stage=1.* for Residuals\(stage=1.*, which no effect before it gives",
        ),
        (
            [F0, Overlap(F1, B1), B0],
            r"rank 0 waits at Overlap.* for Residuals\(stage=1.*, which no effect before it gives",
        ),
    ],
)
def test_a_rank_that_waits_for_itself_is_told_so(order, message):
    with pytest.raises(ScheduleError, match=message):
        interleave(lower(written(order), Plan(Placement.loop(1, chunks=2), 1)))
