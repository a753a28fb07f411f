"""Every rule broken by hand, with its message; deadlocks that others ran into; and what the report counts.

Messages are asserted in the short forms of `tests.support.programs.text`: `a1.0>2` is the send of stage 1's activation
of microbatch 0 to rank 2, `g0/1.0<1` the receive of stage 0's gradient from stage 1, `F1.0` a forward.
"""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fpipe
from fpipe import Costs, Edges, Pipeline, Placement, Plan, ScheduleError, handlers, lower
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
from fpipe.programs.interleaving import interleave
from fpipe.programs.lowering import forward_only, wavefront
from fpipe.programs.program import Program
from fpipe.programs.transports import TRANSPORTS
from fpipe.programs.verifier import check, verify
from fpipe.schedules import CATALOGUE, gpipe, interleaved_1f1b, one_f_one_b
from tests.support.combinations import examples, one_in
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
    overlapped,
    reads,
    runs_each_once_in_order,
    runs_through,
    text,
    written,
)

SHORT = [
    (r"Activation\(stage=(\d+), microbatch=(\d+)\)", r"a\1.\2"),
    (r"WeightGradient\(stage=(\d+), rank=(\d+)\)", r"w\1@\2"),
    (r"Gradient\(stage=(\d+), consumer=(\d+), microbatch=(\d+)\)", r"g\1/\2.\3"),
    (r"Residuals\(stage=(\d+), microbatch=(\d+)\)", r"kept\1.\2"),
    (r"Deferred\(stage=(\d+), microbatch=(\d+)\)", r"deferred\1.\2"),
    (r"BackwardInput\(stage=(\d+), microbatch=(\d+)\)", r"I\1.\2"),
    (r"BackwardWeight\(stage=(\d+), microbatch=(\d+)\)", r"W\1.\2"),
    (r"Backward\(stage=(\d+), microbatch=(\d+)\)", r"B\1.\2"),
    (r"Forward\(stage=(\d+), microbatch=(\d+)\)", r"F\1.\2"),
    (r"Reduce\(stage=(\d+)\)", r"R\1"),
    (r"Send\(value=([^ ,]+), rank=(\d+)\)", r"\1>\2"),
    (r"Recv\(value=([^ ,]+), rank=(\d+)\)", r"\1<\2"),
    (r"Overlap\(forward=([^ ,]+), backward=([^ ,)]+)\)", r"\1&\2"),
]


def refusal(check, *args, **options):
    """What the error says, in short forms."""
    with pytest.raises(ScheduleError) as refused:
        check(*args, **options)
    message = str(refused.value)
    assert "\n" not in message
    for long, short in SHORT:
        message = re.sub(long, short, message)
    return message


def F(stage, microbatch):  # noqa: N802
    return Forward(stage, microbatch)


def B(stage, microbatch):  # noqa: N802
    return Backward(stage, microbatch)


ONE, CHUNKS, TIED = (
    Plan(Placement.loop(1), 2),
    Plan(Placement.loop(1, 2), 1),
    Plan(Placement.loop(2), 1, ties=((0, 1),)),
)
FORWARDS = [F(0, 0), F(0, 1)]


@pytest.mark.parametrize(
    ("plan", "orders", "message"),
    [
        (ONE, [[F(0, 0)]], "rank 0 never yields Forward of stage 0, microbatch 1"),
        (ONE, [[F(0, 1)]], "rank 0 never yields Forward of stage 0, microbatch 0"),
        (
            ONE,
            [[*FORWARDS, B(0, 0)]],
            "rank 0 never yields Backward, or BackwardInput and BackwardWeight, of stage 0, microbatch 1",
        ),
        (
            ONE,
            [[*FORWARDS, B(0, 0), BackwardWeight(0, 1)]],
            "rank 0 never yields BackwardInput of stage 0, microbatch 1",
        ),
        (
            ONE,
            [[*FORWARDS, BackwardInput(0, 1), B(0, 0)]],
            "rank 0 never yields BackwardWeight of stage 0, microbatch 1",
        ),
        (ONE, [[*FORWARDS, BackwardInput(0, 0)]], "rank 0 never yields BackwardWeight of stage 0, microbatch 0"),
        (
            PAIR,
            [[F0], [F1, B1]],
            "rank 0 never yields Backward, or BackwardInput and BackwardWeight, of stage 0, microbatch 0",
        ),
        (
            PAIR,
            [[F0, B0], [F1, F0, B1]],
            "rank 1 yields F0.0, but rank 0 runs that microbatch of that stage",
        ),
        (
            Plan(Placement.both_ways(2), 2),
            [[F(0, 1)], []],
            "rank 0 yields F0.1, but rank 1 runs that microbatch of that stage",
        ),
    ],
)
def test_every_stage_runs_every_microbatch_where_the_plan_says(plan, orders, message):
    assert refusal(verify, written(*orders), plan) == message
    assert refusal(verify, written(*orders), plan, ordered=False) == message


@pytest.mark.parametrize(
    ("order", "again"),
    [
        ([*FORWARDS, F(0, 1)], "F0.1"),
        ([*FORWARDS, B(0, 0), B(0, 0)], "B0.0"),
        ([*FORWARDS, BackwardInput(0, 0), BackwardInput(0, 0)], "I0.0"),
        ([*FORWARDS, BackwardInput(0, 0), B(0, 0)], "B0.0"),
        ([*FORWARDS, B(0, 0), BackwardWeight(0, 0)], "W0.0"),
        ([*FORWARDS, Overlap(F(0, 1), B(0, 0))], "F0.1"),
    ],
)
def test_nothing_runs_twice(order, again):
    assert refusal(verify, written(order), ONE) == (
        f"rank 0 yields {again}, but it has run: a microbatch goes forward once, and backward once, fused or in two "
        "halves"
    )


@pytest.mark.parametrize(
    ("order", "late", "kind"),
    [
        ([F(0, 1), F(0, 0), B(0, 0), B(0, 1)], "F0.0", "forwards"),
        ([*FORWARDS, B(0, 1), B(0, 0)], "B0.0", "weight gradients"),
        (
            [*FORWARDS, *(half(0, m) for m in (1, 0) for half in (BackwardInput, BackwardWeight))],
            "W0.0",
            "weight gradients",
        ),
    ],
)
def test_microbatches_run_in_order_unless_another_is_admitted(order, late, kind):
    assert refusal(verify, written(order), ONE) == (
        f"rank 0 yields {late}, but microbatch 1 has run: a stage's {kind} run in microbatch order, for state and "
        "sums depend on it"
    )
    assert verify(written(order), ONE, ordered=False).effects == (len(order) + 1,)
    pipeline = Pipeline([lambda p, x: x * p], loss=lambda y, t: y.sum())
    with pytest.raises(ScheduleError, match="in microbatch order"):
        fpipe.value_and_grad(pipeline, written(order), ONE, handler=handlers.Local())


def test_input_gradients_may_run_in_any_order():
    order = [*FORWARDS, BackwardInput(0, 1), BackwardInput(0, 0), BackwardWeight(0, 0), BackwardWeight(0, 1)]
    assert verify(written(order), ONE).effects == (7,)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (
            [F0, Overlap(F1, B1), B0],
            "rank 0 yields F1.0&B1.0, but its backward needs kept1.0 of its forward: overlap what is independent",
        ),
        (
            [F0, Overlap(F1, BackwardInput(1, 0)), BackwardWeight(1, 0), B0],
            "rank 0 yields F1.0&I1.0, but its backward needs kept1.0 of its forward: overlap what is independent",
        ),
        (
            [Overlap(F0, B1), F1, B0],
            "no rank can go on: rank 0 waits at F0.0&B1.0 for kept1.0, which only F1.0 gives: run that first",
        ),
    ],
)
def test_the_parts_of_an_overlap_are_independent(order, message):
    assert refusal(verify, written(order), CHUNKS) == message


def test_parts_of_an_overlap_that_depend_on_each_other_over_another_rank_are_refused():
    plan = Plan(Placement((0, 1, 0)), 2)
    first = [F(0, 0), F(2, 0), Overlap(F(0, 1), B(2, 0)), F(2, 1), Overlap(F(2, 1), B(0, 0)), B(2, 1), B(0, 1)]
    assert "it has run" in refusal(verify, written(first, []), plan)
    first = [F(0, 0), Overlap(F(0, 1), B(2, 0)), F(2, 0), F(2, 1), B(0, 0), B(2, 1), B(0, 1)]
    second = [F(1, 0), B(1, 0), F(1, 1), B(1, 1)]
    assert refusal(verify, written(first, second), plan) == (
        "no rank can go on: rank 0 waits at F0.1&B2.0 for kept2.0, which only F2.0 gives: run that first"
    )


OWN = "for one of your own, pass effects=fpipe.tables.TABLE.extended({its class: Row(...)})"


@pytest.mark.parametrize(
    ("effect", "message"),
    [
        (Reduce(1.0), "rank 1 yields Reduce(stage=1.0), but there are stages 0 to 1"),
        ("F0", "rank 1 yields 'F0', which is no effect of the table: " + OWN),
        (None, "rank 1 yields None, which is no effect of the table: " + OWN),
        (F(1, 1), "rank 1 yields F1.1, but there are stages 0 to 1 and microbatches 0 to 0"),
        (B(2, 0), "rank 1 yields B2.0, but there are stages 0 to 1 and microbatches 0 to 0"),
        (BackwardInput(-1, 0), "rank 1 yields BackwardInput(stage=-1, microbatch=0), but there are stages 0 to 1 and "
         "microbatches 0 to 0"),
        (Overlap(F1, F1), "rank 1 yields F1.0&F1.0, but it overlaps a Forward with a Backward, or a half of one"),
        (Overlap(F1, B(3, 0)), "rank 1 yields B3.0, but there are stages 0 to 1 and microbatches 0 to 0"),
        (Send(G, 1), "rank 1 yields g0/1.0>1, but the peer must be another rank, 0 to 1"),
        (Send(G, 2), "rank 1 yields g0/1.0>2, but the peer must be another rank, 0 to 1"),
        (Recv(A, -1), "rank 1 yields Recv(value=a0.0, rank=-1), but the peer must be another rank, 0 to 1"),
        (Recv(Activation(0, 1), 0), "rank 1 yields a0.1<0, but the plan has no such value"),
        (Send(Gradient(1, 0, 0), 0), "rank 1 yields g1/0.0>0, but the plan has no such value"),
        (Send(WeightGradient(1, 0), 0), "rank 1 yields w1@0>0, but the plan has no such value"),
        (Send(F1, 0), "rank 1 yields F1.0>0, but the plan has no such value"),
        (Reduce(2), "rank 1 yields R2, but there are stages 0 to 1"),
    ],
    ids=repr,
)  # fmt: skip
def test_an_effect_that_names_what_the_plan_lacks_is_refused_by_lowering_and_verifier(effect, message):
    assert refusal(lower, written([F0], [F1, effect]), PAIR) == message
    assert refusal(check, {0: Program(PAIR, 0, (F0,)), 1: Program(PAIR, 1, (F1, effect))}) == message


def test_there_is_a_program_for_every_rank():
    programs = lower(gpipe, PAIR)
    assert refusal(check, {0: programs[0]}) == "there are programs of ranks [0], the plan has ranks 0 to 1"


def test_a_transport_that_there_is_not():
    with pytest.raises(ValueError, match="transport must be one of async, paired, rendezvous, not 'nccl'"):
        verify(gpipe, PAIR, transport="nccl")


TWO = Plan(Placement.loop(2), 2)


@pytest.mark.parametrize(
    ("plan", "orders", "message"),
    [
        (
            ONE,
            [[*FORWARDS, B(0, 0), Reduce(0), B(0, 1)]],
            "rank 0 yields R0, but it comes before the last weight gradient of stage 0",
        ),
        (
            ONE,
            [[*FORWARDS, B(0, 0), BackwardInput(0, 1), Reduce(0), BackwardWeight(0, 1)]],
            "rank 0 yields R0, but it comes before the last weight gradient of stage 0",
        ),
        (ONE, [[*FORWARDS, B(0, 0), B(0, 1), Reduce(0), Reduce(0)]],
         "rank 0 yields R0, but the stage is reduced already"),
        (ONE, [[*FORWARDS, Reduce(0)]], "rank 0 yields R0, but nothing runs backward"),
        (PAIR, [[F0, B0, Reduce(1)], [F1, B1]], "rank 0 yields R1, but the rank holds stages (0,)"),
        (PAIR, [[F0, B0, Reduce(0)], [F1, B1]], "rank 1 never yields Reduce(stage=1): a schedule yields every Reduce, "
         "or none"),
        (
            Plan(Placement.loop(1, 2), 1, ties=((0, 1),)),
            [[F0, F1, B1, Reduce(1), B0, Reduce(0)]],
            "rank 0 yields R1, but it comes before the last weight gradient of stage 0",
        ),
    ],
)  # fmt: skip
def test_a_stage_is_reduced_once_and_last(plan, orders, message):
    bare = message.replace("Reduce(stage=1)", "R1")
    assert refusal(verify, written(*orders), plan) == bare


W00, W11 = WeightGradient(0, 0), WeightGradient(1, 1)
FIRST = [F0, Send(A, 1), Recv(G, 1), B0]
SECOND = [Recv(A, 0), F1, B1, Send(G, 0)]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            [F0, Send(A, 1), Recv(G, 1), Send(W00, 1), B0, Recv(W11, 1), Reduce(0)],
            [*SECOND, Send(W11, 0), Recv(W00, 0), Reduce(1)],
            "rank 0 yields w0@0>1, but it comes before the last weight gradient of stage 0",
        ),
        (
            [*FIRST, Recv(W11, 1), Reduce(0)],
            [*SECOND, Send(W11, 0), Recv(W00, 0), Reduce(1)],
            "rank 0 never yields w0@0>1: rank 1 uses the value, and rank 0 makes it",
        ),
        (
            [*FIRST, Send(W00, 1), Recv(W11, 1), Reduce(0)],
            [*SECOND, Send(W11, 0), Reduce(1)],
            "rank 1 never yields w0@0<0: rank 1 uses the value, and rank 0 makes it",
        ),
        (
            [*FIRST, Send(W00, 1), Recv(W11, 1), Reduce(0)],
            [*SECOND, Send(W11, 0), Reduce(1), Recv(W00, 0)],
            "no rank can go on: rank 1 waits at R1 for w0@0, which it receives only later: post w0@0<0 first",
        ),
    ],
    ids=["sent before it is final", "not sent", "not received", "received late"],
)
def test_a_stage_is_reduced_with_what_all_who_share_it_have_summed(first, second, message):
    assert refusal(verify, written(first, second), TIED) == message


def test_sums_that_nobody_shares_are_not_sent():
    first = [*FIRST, Send(W00, 1), Reduce(0)]
    assert refusal(verify, written(first, [*SECOND, Recv(W00, 0), Reduce(1)]), PAIR) == (
        "rank 0 yields w0@0>1, but rank 1 never uses the value"
    )


def without(order, *effects):
    return [e for e in order if e not in effects]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (FIRST, without(SECOND, Recv(A, 0)), "rank 1 never yields a0.0<0: rank 1 uses the value, and rank 0 makes it"),
        (without(FIRST, Send(A, 1)), SECOND, "rank 0 never yields a0.0>1: rank 1 uses the value, and rank 0 makes it"),
        ([F0, Send(A, 1), *FIRST[1:]], SECOND,
         "rank 0 yields a0.0>1 twice: a value goes once to each rank that uses it"),
        (FIRST, [Recv(A, 0), *SECOND], "rank 1 yields a0.0<0 twice: a value goes once to each rank that uses it"),
        ([*FIRST, Send(G, 1)], SECOND, "rank 0 yields g0/1.0>1, but rank 1 makes the value"),
        ([*FIRST, Recv(A, 1)], SECOND, "rank 0 yields a0.0<1, but rank 0 makes the value"),
        (FIRST, [*SECOND, Recv(G, 0)], "rank 1 yields g0/1.0<0, but rank 1 makes the value"),
        ([Send(A, 1), F0, *FIRST[2:]], SECOND,
         "no rank can go on: rank 0 waits at a0.0>1 for a0.0, which only F0.0 gives: run that first"),
        (FIRST, [F1, Recv(A, 0), *SECOND[2:]],
         "no rank can go on: rank 1 waits at F1.0 for a0.0, which it receives only later: post a0.0<0 first"),
        (FIRST, [*SECOND[:2], Send(G, 0), B1],
         "no rank can go on: rank 1 waits at g0/1.0>0 for g0/1.0, which only B1.0 gives: run that first"),
    ],
)  # fmt: skip
def test_communication_by_hand_that_does_not_fit(first, second, message):
    assert verify(written(FIRST, SECOND), PAIR).messages == {(0, 1): 1, (1, 0): 1}
    assert refusal(verify, written(first, second), PAIR) == message


def test_a_value_is_not_handed_on_by_who_received_it():
    plan = Plan(Placement.loop(3), 1, Edges([(), (0,), (0, 1)]))
    value, skip = Activation(1, 0), Activation(0, 0)
    orders = [
        [F0, Send(skip, 1)],
        [Recv(skip, 0), F1, Send(skip, 2), Send(value, 2)],
        [Recv(skip, 1), Recv(value, 1), F(2, 0)],
    ]
    assert refusal(verify, written(*orders), plan) == (
        "rank 0 never yields a0.0>2: rank 2 uses the value, and rank 0 makes it"
    )
    orders[0].append(Send(skip, 2))
    orders[2].append(Recv(skip, 0))
    assert refusal(verify, written(*orders), plan) == "rank 1 yields a0.0>2, but rank 0 makes the value"


def test_a_value_goes_to_no_rank_that_has_no_use_for_it():
    plan = Plan(Placement.loop(3), 1)
    orders = [[F0, Send(A, 1), Send(A, 2)], [Recv(A, 0), F1, Send(Activation(1, 0), 2)]]
    last = [Recv(Activation(1, 0), 1), Recv(A, 0), F(2, 0)]
    assert refusal(verify, written(*orders, last), plan) == "rank 0 yields a0.0>2, but rank 2 never uses the value"


def test_gradients_do_not_travel_where_nothing_runs_backward():
    assert refusal(verify, written([*FIRST[:2], Recv(G, 1)], [*SECOND[:2], Send(G, 0)]), PAIR) == (
        "rank 1 yields g0/1.0>0, but nothing runs backward"
    )


def test_receives_are_posted_in_the_order_of_the_sends():
    first = [F0, Send(A, 1), F(0, 1), Send(Activation(0, 1), 1)]
    second = [Recv(Activation(0, 1), 0), Recv(A, 0), F1, F(1, 1)]
    message = (
        "on the channel from rank 0 to rank 1, a0.0 is sent where a0.1 is received: post the receives in the order of "
        "the sends"
    )
    assert refusal(verify, written(first, second), TWO) == message
    assert refusal(interleave, lower(written(first, second), TWO)) == message


def test_two_ranks_that_wait_for_each_other():
    first = [F(0, 0), B(0, 0), F(0, 1), B(0, 1)]
    second = [F(1, 0), F(1, 1), B(1, 0), B(1, 1)]
    assert refusal(verify, written(first, second), TWO) == (
        "no rank can go on: rank 0 waits at B0.0 for g0/1.0, which rank 1 sends only after F1.1; rank 1 waits at F1.1 "
        "for a0.1, which rank 0 sends only after B0.0; on one of these ranks, run what the other waits for first"
    )


@pytest.mark.parametrize("transport", ["paired", "rendezvous"])
def test_orders_that_wait_for_each_other_do_so_under_every_transport(transport):
    """What lowering adds then doesn't hide it."""
    first = [F(0, 0), B(0, 0), F(0, 1), B(0, 1)]
    second = [F(1, 0), F(1, 1), B(1, 0), B(1, 1)]
    told = refusal(verify, written(first, second), TWO, transport=transport)
    assert "rank 0 waits at B0.0 for g0/1.0, which rank 1 sends only after F1.1; rank 1 waits at F1.1" in told
    ring = [[F(3, 0), F(0, 0)], [F(4, 0), F(1, 0)], [F(5, 0), F(2, 0)]]
    told = refusal(verify, written(*ring), Plan(Placement((0, 1, 2, 0, 1, 2)), 1), transport=transport)
    assert told.count(" waits at ") == 3


def test_of_a_long_cycle_the_middle_is_left_out():
    ranks = 9
    orders = [[F(rank + ranks, 0), F(rank, 0)] for rank in range(ranks)]
    told = refusal(verify, written(*orders), Plan(Placement.loop(ranks, 2), 1))
    assert told.count(" waits at ") == 6
    assert "; and so on, 3 more; " in told


def test_of_several_cycles_the_shortest_is_told():
    """Ranks 0, 1 and 2 wait in a circle of three, ranks 1 and 2 in one of two."""
    plan = Plan(Placement((0, 1, 2, 0, 1, 2)), 1)
    orders = [[F(3, 0), F(0, 0)], [F(4, 0), F(1, 0)], [F(5, 0), F(2, 0)]]
    assert refusal(verify, written(*orders), plan).count(" waits at ") == 3
    plan = Plan(Placement((0, 1, 2, 0, 1, 2)), 1, Edges([(), (0,), (1,), (2,), (2, 3), (1, 4)]))
    told = refusal(verify, written(*orders), plan)
    assert told == (
        "no rank can go on: rank 1 waits at F4.0 for a2.0, which rank 2 sends only after F5.0; rank 2 waits at F5.0 "
        "for a1.0, which rank 1 sends only after F4.0; on one of these ranks, run what the other waits for first"
    )


def test_what_never_comes_is_told_before_any_cycle():
    """Ranks 0 and 1 wait for each other, and rank 2 for what nobody sends; programs that were never verified."""
    first, second = [F(0, 0), B(0, 0), F(0, 1)], [F(1, 0), F(1, 1), B(1, 0)]
    lowered = lower(written(first, second), TWO)
    plan = Plan(Placement.loop(3), 2)
    programs = {rank: Program(plan, rank, program.effects) for rank, program in lowered.items()}
    programs[2] = Program(plan, 2, ())
    assert "for g0/1.0, which rank 1 sends only after" in refusal(interleave, programs)
    value = Activation(1, 0)
    never = (Recv(value, 1), F(2, 0))
    programs[2] = Program(plan, 2, never)
    assert refusal(interleave, programs) == (
        "no rank can go on: rank 2 waits at F2.0 for a1.0, which rank 1 never sends"
    )
    programs[2] = Program(plan, 2, never[1:])
    assert refusal(interleave, programs) == (
        "no rank can go on: rank 2 waits at F2.0 for a1.0 from rank 1: post a1.0<1 first"
    )


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (([F0, Send(A, 1)], []), "rank 0 sends a0.0 to rank 1, which never receives it"),
        (([F0], [Recv(A, 0)]), "rank 0 never sends a0.0 to rank 1, which receives it"),
        (([B0], []), "no rank can go on: rank 0 waits at B0.0 for g0/1.0 from rank 1: post g0/1.0<1 first; "),
    ],
)
def test_interleaving_programs_that_were_never_verified(orders, message):
    programs = {rank: Program(PAIR, rank, tuple(order)) for rank, order in enumerate(orders)}
    assert refusal(interleave, programs) == message.removesuffix("; ")


def posts_by_hand(*ranks):
    """`a0.1>1` and the like, rank by rank."""
    return written(*([_effect(word) for word in order.split()] for order in ranks))


def _effect(word):
    if word[0] in "FB":
        return {"F": Forward, "B": Backward}[word[0]](*map(int, word[1:].split(".")))
    kind, value, peer = re.fullmatch(r"([ag])(.*)[<>](\d+)", word).groups()
    numbers = map(int, re.split(r"[/.]", value))
    return (Send if ">" in word else Recv)({"a": Activation, "g": Gradient}[kind](*numbers), int(peer))


# pytorch/pytorch#172668: receives put off to just before their use, on two ranks of two stages each. Both ranks send
# first and receive next; on the one communicator of the pair neither send ever meets its receive.
SEND_FIRST = posts_by_hand(
    "F0.0 a0.0>1 F0.1 a0.1>1 a1.0<1 F2.0 a2.0>1 a1.1<1 F2.1 a2.1>1",
    "a0.0<0 F1.0 a1.0>0 a0.1<0 F1.1 a1.1>0 a2.0<0 F3.0 a2.1<0 F3.1",
)
# The same issue, a later comment: odd ranks receive before they send, and yet rank 0's activation and rank 1's
# gradient wait for each other.
ODD_RECEIVES_FIRST = posts_by_hand(
    "F0.0 a0.0>1 F0.1 a0.1>1 a1.0<1 F2.0 a2.0>1 a1.1<1 F2.1 a2.1>1 F0.2 a0.2>1 g2/3.0<1 B2.0 g1/2.0>1 g2/3.1<1 B2.1 "
    "g1/2.1>1 a1.2<1 F2.2 a2.2>1 g0/1.0<1 B0.0 g0/1.1<1 B0.1 g2/3.2<1 B2.2 g1/2.2>1 g0/1.2<1 B0.2",
    "a0.0<0 F1.0 a0.1<0 a1.0>0 F1.1 a2.0<0 a1.1>0 F3.0 B3.0 a2.1<0 g2/3.0>0 F3.1 B3.1 a0.2<0 g2/3.1>0 F1.2 a1.2>0 "
    "g1/2.0<0 B1.0 g0/1.0>0 g1/2.1<0 B1.1 g0/1.1>0 a2.2<0 F3.2 B3.2 g2/3.2>0 g1/2.2<0 B1.2 g0/1.2>0",
)


def test_interleaved_sends_before_receives_deadlock_on_a_shared_queue():
    plan = Plan(Placement.loop(2, 2), 2)
    assert verify(SEND_FIRST, plan).messages == {(0, 1): 4, (1, 0): 2}
    assert refusal(verify, SEND_FIRST, plan, transport="paired") == (
        "no rank can go on: a0.1>1, at the head of rank 0's queue to rank 1, waits for its receive, which stands "
        "behind a1.0>0 in rank 1's queue to rank 0; a1.0>0, at the head of rank 1's queue to rank 0, waits for its "
        "receive, which stands behind a0.1>1 in rank 0's queue to rank 1; post the receive before the send on one of "
        "the two, or give each direction a channel of its own"
    )
    assert refusal(verify, SEND_FIRST, plan, transport="rendezvous") == (
        "no rank can go on: rank 0 waits at a0.1>1 for its receive, which rank 1 posts only after a1.0>0; rank 1 waits "
        "at a1.0>0 for its receive, which rank 0 posts only after a0.1>1; post the receive before the send on one of "
        "these ranks"
    )


def test_receiving_first_on_odd_ranks_does_not_save_interleaved_1f1b():
    plan = Plan(Placement.loop(2, 2), 3)
    assert verify(ODD_RECEIVES_FIRST, plan).messages == {(0, 1): 9, (1, 0): 9}
    assert refusal(verify, ODD_RECEIVES_FIRST, plan, transport="paired") == (
        "no rank can go on: a0.2>1, at the head of rank 0's queue to rank 1, waits for its receive, which stands "
        "behind g2/3.0>0 in rank 1's queue to rank 0; g2/3.0>0, at the head of rank 1's queue to rank 0, waits for its "
        "receive, which stands behind a0.2>1 in rank 0's queue to rank 1; post the receive before the send on one of "
        "the two, or give each direction a channel of its own"
    )
    assert refusal(verify, ODD_RECEIVES_FIRST, plan, transport="rendezvous") == (
        "no rank can go on: rank 0 waits at a0.2>1 for its receive, which rank 1 posts only after g2/3.0>0; rank 1 "
        "waits at g2/3.0>0 for its receive, which rank 0 posts only after a0.2>1; post the receive before the send on "
        "one of these ranks"
    )


def megatron(order_of):
    """1F1B in which each rank posts, between two computes, its sends and receives in an order of its own.

    `order_of(rank)` names them as Megatron-LM does: to and from the previous and the next rank.
    """

    def schedule(rank, plan):
        computes = list(one_f_one_b(rank, plan))
        for before, after in zip([None, *computes], [*computes, None], strict=True):
            posts = {}
            if isinstance(before, Forward) and rank + 1 < plan.ranks:
                posts["send_next"] = Send(Activation(rank, before.microbatch), rank + 1)
            if isinstance(before, Backward) and rank:
                posts["send_prev"] = Send(Gradient(rank - 1, rank, before.microbatch), rank - 1)
            if isinstance(after, Forward) and rank:
                posts["recv_prev"] = Recv(Activation(rank - 1, after.microbatch), rank - 1)
            if isinstance(after, Backward) and rank + 1 < plan.ranks:
                posts["recv_next"] = Recv(Gradient(rank, rank + 1, after.microbatch), rank + 1)
            yield from (posts[name] for name in order_of(rank) if name in posts)
            yield from [after] if after else []

    return schedule


# NVIDIA/Megatron-LM#5100: the same order on every rank, and the order by parity that it is held against.
FIXED = megatron(lambda rank: ["send_prev", "recv_prev", "send_next", "recv_next"])
PARITY = megatron(
    lambda rank: (
        ["recv_prev", "send_next", "recv_next", "send_prev"]
        if rank % 2
        else ["send_next", "recv_prev", "send_prev", "recv_next"]
    )
)


def test_the_same_order_of_posts_on_every_rank_deadlocks_on_shared_queues():
    plan = Plan(Placement.loop(4), 8)
    assert sum(verify(FIXED, plan).messages.values()) == 2 * 3 * 8
    assert refusal(verify, FIXED, plan, transport="paired") == (
        "no rank can go on: a2.1>3, at the head of rank 2's queue to rank 3, waits for its receive, which stands "
        "behind g2/3.0>2 in rank 3's queue to rank 2; g2/3.0>2, at the head of rank 3's queue to rank 2, waits for its "
        "receive, which stands behind a2.1>3 in rank 2's queue to rank 3; post the receive before the send on one of "
        "the two, or give each direction a channel of its own"
    )
    assert refusal(verify, FIXED, plan, transport="rendezvous") == (
        "no rank can go on: rank 2 waits at a2.1>3 for its receive, which rank 3 posts only after g2/3.0>2; rank 3 "
        "waits at g2/3.0>2 for its receive, which rank 2 posts only after a2.1>3; post the receive before the send on "
        "one of these ranks"
    )


@pytest.mark.parametrize("transport", ["async", "paired", "rendezvous"])
def test_an_order_of_posts_by_parity_runs_on_shared_queues(transport):
    assert sum(verify(PARITY, Plan(Placement.loop(4), 8), transport=transport).messages.values()) == 2 * 3 * 8


def test_posts_named_by_neighbour_cross_where_two_ranks_are_both_neighbours():
    """The other half of #5100: with two ranks, previous and next are one peer, and nothing but order pairs messages.

    Interleaved, in one exchange: each rank sends its gradient back and its activation on, and receives likewise.
    """
    plan = Plan(Placement.loop(2, 2), 2)
    first, second = lower(interleaved_1f1b, plan, depth=0).values()
    sends = [at for at, e in enumerate(first) if isinstance(e, Send)]
    assert text(first.effects[at] for at in sends) == "a0.0>1 a0.1>1 a2.0>1 a2.1>1 g1/2.0>1 g1/2.1>1"
    order = list(first.effects)
    crossed = [Activation(2, 1), Gradient(1, 2, 0)]
    one, other = (next(at for at, e in enumerate(order) if e == Send(value, 1)) for value in crossed)
    moved = order.pop(one)
    order.insert(other, moved)
    assert refusal(check, {0: Program(plan, 0, tuple(order)), 1: second}) == (
        "on the channel from rank 0 to rank 1, g1/2.0 is sent where a2.1 is received: post the receives in the order "
        "of the sends"
    )


def test_a_receive_posted_long_before_its_value_blocks_a_shared_queue():
    """What a distance of prefetching costs where posts to a peer run one after the other."""
    assert verify(gpipe, TWO, depth=2)
    assert refusal(check, lower(gpipe, TWO, depth=2), transport="paired") == (
        "no rank can go on: rank 1 waits at F1.0 for a0.0, which rank 0 has sent, but it stands behind g0/1.0<1 in "
        "rank 0's queue to rank 1; g0/1.0<1, at the head of rank 0's queue to rank 1, waits for its send, which rank 1 "
        "posts only after F1.0; post a receive no earlier than its value is used, or give each direction a channel of "
        "its own"
    )


def runs_under(programs, transport):
    """The oracle of transports: every effect runs in the end, if each that can is tried again and again."""
    here = {rank: set() for rank in programs}
    at = dict.fromkeys(programs, 0)
    queues = {}

    def posted(rank, recv):
        return any(e == recv for e in programs[rank].effects[: at[rank]])

    def can(rank, effect):
        if isinstance(effect, Recv):
            return True
        if transport == "rendezvous" and isinstance(effect, Send) and not posted(effect.rank, Recv(effect.value, rank)):
            return False
        return reads(effect, programs[rank].plan) <= here[rank]

    def transfer():
        for (rank, peer), own in queues.items():
            other = queues.get((peer, rank), [])
            sends = [at for at, e in enumerate(own) if isinstance(e, Send)][:1]
            for first in sends if transport != "paired" or sends == [0] else []:
                half = Recv(own[first].value, rank)
                receives = [e for e in other if isinstance(e, Recv)] if transport != "paired" else other
                if receives and receives[0] == half:
                    here[peer].add(own.pop(first).value)
                    other.remove(half)
                    return True
        return False

    moved = True
    while moved:
        moved = transfer()
        for rank, program in programs.items():
            while at[rank] < len(program) and can(rank, effect := program.effects[at[rank]]):
                at[rank] += 1
                moved = True
                if isinstance(effect, Send | Recv):
                    queues.setdefault((rank, effect.rank), []).append(effect)
                else:
                    here[rank] |= makes(effect, rank, program.plan)
    return all(at[rank] == len(program) for rank, program in programs.items())


@pytest.mark.parametrize("transport", ["async", "paired", "rendezvous"])
@settings(max_examples=examples(150))
@given(data=st.data())
def test_programs_with_moved_posts_are_refused_if_and_only_if_they_get_stuck(transport, data):
    ranks, chunks = data.draw(st.sampled_from([(2, 1), (2, 2), (3, 1), (3, 2), (4, 1)]))
    schedule = data.draw(st.sampled_from([gpipe, interleaved_1f1b, halved(interleaved_1f1b, delay=1)]))
    plan = Plan(Placement.loop(ranks, chunks), data.draw(st.integers(1, 4)))
    programs = dict(lower(schedule, plan, depth=data.draw(st.integers(0, 2))))
    for _ in range(data.draw(st.integers(0, 6))):
        rank = data.draw(st.integers(0, ranks - 1))
        order = list(programs[rank].effects)
        posts = [at for at, e in enumerate(order) if isinstance(e, Send | Recv)]
        if not posts:
            continue
        start = data.draw(st.sampled_from(posts))
        effect = order.pop(start)
        near = [at for at, e in enumerate(order) if type(e) is type(effect) and e.rank == effect.rank]
        low = max((at + 1 for at in near if at < start), default=0)  # so that the channel keeps its order
        high = min((at for at in near if at >= start), default=len(order))
        order.insert(data.draw(st.integers(low, high)), effect)
        programs[rank] = Program(plan, rank, tuple(order))
    runs = runs_under(programs, transport)
    if runs:
        check(programs, transport=transport)
    else:
        assert refusal(check, programs, transport=transport).startswith("no rank can go on: ")


@over_random_plans
def test_what_lowering_makes_of_a_right_schedule_is_right(work):
    schedule, plan, depth = work
    programs = lower(schedule, plan, depth=depth)
    report = check(programs)
    assert report.effects == tuple(map(len, programs.values()))
    sent = [(rank, e.rank) for rank, program in programs.items() for e in program if isinstance(e, Send)]
    assert report.messages == {edge: sent.count(edge) for edge in sorted({*sent})}
    ahead = check(forward_only(programs))
    assert ahead.peak_in_flight == (0,) * plan.ranks
    assert set(ahead.messages) <= set(report.messages)


def mutations(order):
    for at, effect in enumerate(order):
        yield f"without {text([effect])}", [*order[:at], *order[at + 1 :]]
        yield f"with {text([effect])} twice", [*order[: at + 1], *order[at:]]
        if at:
            yield f"with {text([effect])} earlier", [*order[: at - 1], effect, order[at - 1], *order[at + 1 :]]


def accepted(schedule, plan):
    try:
        verify(schedule, plan)
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
            faulty = [*orders[:rank], changed, *orders[rank + 1 :]]
            programs = {r: Program(plan, r, tuple(effects)) for r, effects in enumerate(faulty)}
            fine = runs_each_once_in_order(programs) and runs_through(programs, wired=False)
            assert accepted(written(*faulty), plan) == fine, f"rank {rank} {name}"
            assert not fine or legal(lower(written(*faulty), plan))
            refused += not fine
    assert refused >= 2 * sum(map(len, orders))  # at least each effect left out, and each one doubled


def test_a_backward_is_run_by_every_stage_or_by_none():
    assert verify(written([F0], [F1]), PAIR).peak_in_flight == (0.0, 0.0)


# Peaks: the sources are those of the schedules' docstrings; in microbatches of a whole rank.

MICROBATCHES = (1, 2, 3, 5, 8)


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("m", MICROBATCHES)
def test_the_peaks_of_gpipe_and_1f1b(p, m):
    plan = Plan(Placement.loop(p), m)
    assert verify(gpipe, plan).peak_in_flight == (m,) * p
    assert verify(one_f_one_b, plan).peak_in_flight == tuple(min(p - r, m) for r in range(p))
    late = verify(halved(one_f_one_b, delay=2), plan).peak_in_flight  # a weight gradient ends its microbatch's flight
    assert late == tuple(min(p - r + 2, m) for r in range(p))


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("v", [2, 3, 7])
def test_the_peak_of_interleaved_1f1b_in_chunks_of_a_rank(p, v):
    # Warm-up of 2(p - r - 1) + (v - 1)p chunks and one more, as in Narayanan et al. 2021.
    for m in (p, 2 * p, 4 * p):
        expected = tuple(min(m * v, 2 * (p - r - 1) + (v - 1) * p + 1) / v for r in range(p))
        assert verify(interleaved_1f1b, Plan(Placement.loop(p, v), m)).peak_in_flight == expected


def test_all_chunks_of_a_microbatch_are_one_microbatch_exactly():
    assert verify(gpipe, Plan(Placement.loop(1, chunks=49), 1)).peak_in_flight == (1.0,)


def test_an_overlap_has_its_forward_in_flight_before_its_backward_ends():
    orders = [[F(0, 0), Overlap(F(0, 1), B(0, 0)), B(0, 1)], [F(1, 0), B(1, 0), F(1, 1), B(1, 1)]]
    assert verify(written(*orders), TWO).peak_in_flight == (2.0, 1.0)


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("m", MICROBATCHES)
def test_messages_and_bytes_are_those_that_cross_ranks(p, m):
    costs = Costs(activation=[*range(1, 2 * p + 1)])
    report = verify(gpipe, Plan(Placement.v(p), m), costs=costs)
    edges = [(r, r + 1) for r in range(p - 1)] + [(r + 1, r) for r in range(p - 1)]
    assert report.messages == dict.fromkeys(sorted(edges), 2 * m)  # down: activations, and gradients of the way up
    assert report.bytes == dict.fromkeys(sorted(edges), 2 * p * m)  # of stages r and 2p - 2 - r: r + 1 and 2p - 1 - r


def test_a_value_that_two_stages_of_a_rank_read_travels_once():
    plan = Plan(Placement((0, 1, 1)), 3, Edges([(), (0,), (0, 1)]))
    report = verify(gpipe, plan, costs=Costs(activation=10))
    assert report.messages == {(0, 1): 3, (1, 0): 6}
    assert report.bytes == {(0, 1): 30, (1, 0): 60}


def test_peak_bytes_by_hand():
    """Rank 0 has both residuals, both activations, of which no gradient has told yet that they came, and the first
    gradient's buffer. Rank 1 has at its second forward residuals, its input, and the gradient that it has sent."""
    costs = Costs(activation=10, residuals=100, deferred=30)
    orders = posts_by_hand(
        "F0.0 a0.0>1 F0.1 a0.1>1 g0/1.0<1 B0.0 g0/1.1<1 B0.1",
        "a0.0<0 F1.0 B1.0 g0/1.0>0 a0.1<0 F1.1 B1.1 g0/1.1>0",
    )
    assert verify(orders, TWO, costs=costs).peak_bytes == (2 * 100 + 3 * 10, 100 + 2 * 10)
    early = posts_by_hand(
        "g0/1.0<1 g0/1.1<1 F0.0 a0.0>1 F0.1 a0.1>1 B0.0 B0.1",
        "a0.0<0 a0.1<0 F1.0 B1.0 g0/1.0>0 F1.1 B1.1 g0/1.1>0",
    )
    assert verify(early, TWO, costs=costs).peak_bytes == (2 * 100 + 4 * 10, 100 + 2 * 10)
    split = [*FORWARDS, BackwardInput(0, 0), BackwardInput(0, 1), BackwardWeight(0, 0), BackwardWeight(0, 1)]
    assert verify(written(split), ONE, costs=costs).peak_bytes == (2 * 100,)  # then 100 + 30, and 2 * 30


def test_costs_that_do_not_fit_the_plan():
    with pytest.raises(ScheduleError, match="activation has 3 entries, the plan 2 stages"):
        verify(gpipe, PAIR, costs=Costs(activation=[1, 2, 3]))


def test_a_report_reads_as_a_table():
    report = verify(interleaved_1f1b, Plan(Placement.loop(2, 2), 4), costs=Costs(activation=10, residuals=100))
    assert str(report).splitlines() == [
        "right under async: 84 effects, 24 messages",
        "rank  effects  in flight  bytes",
        "   0       42        2.5  570 B",
        "   1       42        1.5  370 B",
        "  edge  messages  bytes",
        "0 to 1        12  120 B",
        "1 to 0        12  120 B",
    ]
    assert str(verify(gpipe, ONE)).splitlines() == [
        "right under async: 5 effects, 0 messages",
        "rank  effects  in flight",
        "   0        5          2",
    ]


def test_steps_are_verified_when_they_are_made():
    pipeline = Pipeline([lambda p, x: x * p] * 2, loss=lambda y, t: y.sum())
    orders = [*FIRST[:-1], F0, B0], SECOND
    with pytest.raises(ScheduleError, match="it has run"):
        fpipe.value_and_grad(pipeline, written(*orders), PAIR, handler=handlers.Local())
    ahead = written([F0, Send(A, 1)], [F1, Recv(A, 0)])
    with pytest.raises(ScheduleError, match="which it receives only later"):
        fpipe.evaluate(pipeline, PAIR, handler=handlers.Local(), schedule=ahead)


@one_in(4)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", CATALOGUE)
def test_every_transport_runs_what_was_lowered_for_it(name, transport):
    for ranks in 2, 4:
        plan = CATALOGUE[name].plan(ranks, 2 * ranks)
        plan = replace(plan, ties=((0, plan.stages - 1),))
        schedule = CATALOGUE[name].schedule(plan)
        report = verify(schedule, plan, transport=transport)
        assert report.messages == verify(schedule, plan).messages
