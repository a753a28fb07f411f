"""From compute order to complete programs, and to one order over all ranks."""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe import Edges, Placement, Plan, ScheduleError, lower
from fpipe.effects import (
    Activation,
    Backward,
    BackwardWeight,
    Forward,
    Gather,
    Overlap,
    Recv,
    Reduce,
    Release,
    Send,
    WeightGradient,
)
from fpipe.programs.interleaving import interleave, turns
from fpipe.programs.interning import Interning
from fpipe.programs.lowering import collect, communicate, forward_only, prefetch, reduce
from fpipe.schedules import gpipe, interleaved_1f1b, one_f_one_b
from fpipe.tables import TABLE, Row
from tests.support.combinations import examples
from tests.support.programs import (
    B0,
    B1,
    F0,
    F1,
    PAIR,
    A,
    G,
    halved,
    legal,
    makes,
    over_random_plans,
    reads,
    text,
    texts,
    written,
)


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
    ("orders", "made"),
    [
        (([], [F1]), ["", "F1.0"]),
        (([F0], []), ["F0.0 a0.0>1", ""]),
        (([F0, F0], [F1, B1]), ["F0.0 a0.0>1 F0.0 a0.0>1", "a0.0<0 F1.0 B1.0 g0/1.0>0 R1"]),
        (([F1], [F0, F1]), ["F1.0", "F0.0 F1.0"]),
    ],
    ids=["without its maker", "without its reader", "made twice", "on the wrong rank"],
)
def test_of_a_wrong_schedule_lowering_makes_what_it_can(orders, made):
    assert texts(lower(written(*orders), PAIR, depth=0)) == made


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
    with pytest.raises(ScheduleError, match="the prefetch depth must be a whole number of at least 0, not -1"):
        lower(gpipe, PAIR, depth=-1)
    with pytest.raises(ScheduleError, match=r"at least 0, not 1\.5"):
        lower(gpipe, PAIR, depth=1.5)


def test_a_schedule_that_yields_nothing_at_all_is_refused():
    with pytest.raises(
        ScheduleError, match="on rank 0 the schedule returns None: it yields effects, or returns a list"
    ):
        lower(lambda rank, plan: None, PAIR)


def test_an_unknown_transport_is_refused():
    with pytest.raises(ValueError, match="transport must be one of async, paired, rendezvous, not 'pigeon'"):
        lower(gpipe, PAIR, transport="pigeon")


def test_a_schedule_may_reduce_by_itself_and_leave_the_exchange_to_lowering_or_the_other_way_round():
    plan = Plan(Placement.loop(2), 1, ties=((0, 1),))
    whole = texts(lower(gpipe, plan))
    assert [program.partition(" B")[2] for program in whole] == [
        "0.0 w0@0>1 w1@1<1 R0",
        "1.0 g0/1.0>0 w0@0<0 w1@1>0 R1",
    ]

    def reducing(rank, plan):
        yield from gpipe(rank, plan)
        yield Reduce(rank)

    def sharing(rank, plan):
        yield from (e for e in lower(gpipe, plan)[rank] if not isinstance(e, Reduce))

    assert texts(lower(reducing, plan)) == whole
    assert texts(lower(sharing, plan)) == whole


def test_reduce_follows_a_stages_last_weight_gradient_and_the_sends_behind_it():
    plan = Plan(Placement.loop(2, chunks=2), 1)
    assert texts(reduce(communicate(collect(gpipe, plan)))) == [
        "F0.0 a0.0>1 a1.0<1 F2.0 a2.0>1 g2/3.0<1 B2.0 g1/2.0>1 R2 g0/1.0<1 B0.0 R0",
        "a0.0<0 F1.0 a1.0>0 a2.0<0 F3.0 B3.0 g2/3.0>0 R3 g1/2.0<0 B1.0 g0/1.0>0 R1",
    ]


def test_reduce_exchanges_what_copies_and_ties_share_at_the_end():
    plan = Plan(Placement.both_ways(2), 2)
    assert [program.rpartition("g0/1")[2] for program in texts(lower(gpipe, plan))] == [
        ".1>1 B0.0 w0@0>1 w0@1<1 w1@0>1 w1@1<1 R0 R1",
        ".0>0 B0.1 w0@0<0 w0@1>0 w1@0<0 w1@1>0 R0 R1",
    ]
    plan = Plan(Placement.loop(3), 1, ties=((0, 2),))
    assert [program.partition(" B")[2] for program in texts(lower(gpipe, plan))] == [
        "0.0 w0@0>2 w2@2<2 R0",
        "1.0 g0/1.0>0 R1",
        "2.0 g1/2.0>1 w0@0<0 w2@2>0 R2",
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


@settings(max_examples=examples(50))
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
def test_turns_are_the_runs_of_the_interleaving(work):
    schedule, plan, depth = work
    programs = lower(schedule, plan, depth=depth)
    order = []
    for rank, start, stop, givers in turns(programs):
        effects = programs[rank].effects
        order += [(rank, effect) for effect in effects[start:stop]]
        for effect, places in zip(effects[start:stop], givers, strict=True):
            wanted = () if isinstance(effect, Recv) else TABLE.needs(effect, plan)
            assert all(name in TABLE.gives(effects[at], plan) for name, at in zip(wanted, places, strict=True))
    assert tuple(order) == interleave(programs)


@over_random_plans
def test_numbers_say_what_the_table_says(work):
    schedule, plan, depth = work
    interning, names = Interning(plan), {}
    for program in lower(schedule, plan, depth=depth).values():
        for effect in program:
            said = [tuple(map(interning.name, column)) for column in interning.ids(effect)]
            assert said == [TABLE.needs(effect, plan), TABLE.gives(effect, plan), TABLE.frees(effect, plan)]
            names |= {name: interning.id(name) for column in said for name in column}
    assert len({*names.values()}) == len(names)
    assert all(interning.name(id_) == name for name, id_ in names.items())


@over_random_plans
def test_what_is_left_of_a_program_without_its_backward_still_runs(work):
    schedule, plan, depth = work
    programs = forward_only(lower(schedule, plan, depth=depth))
    assert all(isinstance(e, Forward) or isinstance(e.value, Activation) for p in programs.values() for e in p)
    assert posts(programs, Send) == posts(programs, Recv)
    assert legal(programs)
    assert len(interleave(programs)) == sum(map(len, programs.values()))


@dataclass(frozen=True)
class Note:
    number: int


NOTES = TABLE.extended({Note: Row()})


@pytest.mark.parametrize(
    ("forever", "table", "message"),
    [
        (
            [F0],
            TABLE,
            r"rank 0 yields more than 19 effects.*Forward\(stage=0, microbatch=0\) 20 times: if .* never ends",
        ),
        ([F0, Send(A, 1), Recv(G, 1)], TABLE, r"rank 0 .* more than 19 effects.*among them .* 7 times"),
        ([F0, Gather(0), Release(0)], TABLE, r"rank 0 .* more than 19 effects.*among them .* 7 times"),
        (map(partial(Forward, 0), count()), TABLE, r"microbatch=1\), but there are stages .* microbatches 0 to 0"),
        ([Note(0)], NOTES, r"rank 0 .* more than 787 effects.*Note\(number=0\) 788 times"),
        (map(Note, count()), NOTES, r"rank 0 .* more than 787 effects"),
    ],
    ids=["compute", "communication", "gathers", "microbatches", "its own", "its own, each another"],
)
def test_a_schedule_that_never_ends_is_refused(forever, table, message):
    with pytest.raises(ScheduleError, match=message):
        lower(lambda rank, plan: cycle(forever), PAIR, effects=table)


def test_a_schedule_may_have_many_effects_of_its_own():
    notes = [Note(i) for i in range(700)]
    program = lower(written([*notes, F0, B0], [F1, B1]), PAIR, effects=NOTES)[0]
    assert [effect for effect in program if isinstance(effect, Note)] == notes


OWN = [[F0, Send(A, 1), Recv(G, 1), B0, Reduce(0)], [Recv(A, 0), F1, B1, Send(G, 0), Reduce(1)]]


def test_a_schedule_keeps_its_own_communication():
    assert [list(p) for p in lower(written(*OWN), PAIR).values()] == OWN
    bare = [[e for e in order if not isinstance(e, Reduce)] for order in OWN]
    assert [list(p) for p in lower(written(*bare), PAIR).values()] == OWN


@pytest.mark.parametrize(
    "microbatches",
    [
        range(511, -1, -1),
        range(512),
        [m for pair in zip(range(0, 512, 4), range(2, 512, 4), strict=True) for m in pair],
    ],
    ids=["backwards", "copies in turn", "one of them"],
)
@pytest.mark.parametrize("placement", [Placement.both_ways(2), Placement([(0, 1, 2, 3), 4, 5, 6])], ids=[2, 4])
def test_ids_are_made_a_chunk_at_a_time_in_any_order(placement, microbatches, monkeypatch):
    interning, rows = Interning(Plan(placement, 512)), []
    names = interning._names_of
    monkeypatch.setattr(interning, "_names_of", lambda effect: rows.append(effect) or names(effect))
    gives = {m: interning.ids(Forward(0, m))[1] for m in microbatches}
    assert gives == {m: tuple(map(interning.id, TABLE.gives(Forward(0, m), interning.plan))) for m in microbatches}
    assert len(rows) <= 2 * 512 / 64
