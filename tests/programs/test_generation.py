"""Programs that generate tokens: drawn, by their closed form, under every transport, and broken by hand."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fpipe
from fpipe import Costs, Edges, Placement, Plan, ScheduleError, autoregressive, handlers
from fpipe.effects import Decode, Forward, Hidden, Prefill, Recv, Send, Token
from fpipe.generating import generate
from fpipe.programs.program import plan_of
from fpipe.programs.transports import TRANSPORTS
from fpipe.programs.verifier import check
from tests.programs.test_wrong_programs import faults
from tests.support.combinations import examples
from tests.support.generate_jobs import PROMPTS, cut, language_model

PLAN = Plan(Placement.loop(2), 2, tokens=3)
PLACEMENTS = [Placement.loop(1, 2), Placement.loop(2), Placement.loop(2, 2), Placement.v(2), Placement.loop(4)]


def test_the_first_rank_takes_a_token_when_it_arrives():
    drawn = fpipe.draw(autoregressive, Plan(Placement.loop(3), 4, tokens=3))
    assert drawn.splitlines() == [
        "rank 0  P0 P1 P2 P3 D0 D1 D2 D3 D0 D1 D2 D3",
        "rank 1  .  P0 P1 P2 P3 D0 D1 D2 D3 D0 D1 D2 D3",
        "rank 2  .  .  P0 P1 P2 P3 D0 D1 D2 D3 D0 D1 D2 D3",
    ]
    drawn = fpipe.draw(partial(autoregressive, prompts=False), Plan(Placement.loop(3), 2, tokens=2))
    assert drawn.splitlines() == [
        "rank 0  D0 D1 .  D0 D1",
        "rank 1  .  D0 D1 .  D0 D1",
        "rank 2  .  .  D0 D1 .  D0 D1",
    ]
    drawn = fpipe.draw(autoregressive, Plan(Placement.loop(3), 1, tokens=4, prefills=3))
    assert drawn.splitlines() == [
        "rank 0  P0 P0 P0 .  .  D0",
        "rank 1  .  P0 P0 P0 .  .  D0",
        "rank 2  .  .  P0 P0 P0 .  .  D0",
    ]


@settings(max_examples=examples(80), deadline=None)
@given(ranks=st.integers(1, 6), microbatches=st.integers(1, 8), tokens=st.integers(1, 5), prefills=st.integers(1, 4))
def test_all_ranks_are_at_work_where_there_are_as_many_microbatches(ranks, microbatches, tokens, prefills):
    """A token waits for the one before it, a slice of prompts does not."""
    plan = Plan(Placement.loop(ranks), microbatches, tokens=prefills - 1 + tokens, prefills=prefills)
    timeline = fpipe.simulate(autoregressive, plan, Costs(forward=2))
    assert timeline.makespan == 2 * ((tokens - 1) * max(ranks, microbatches) + prefills * microbatches + ranks - 1)
    assert set(timeline.busy) == {2 * plan.tokens * microbatches}


@pytest.mark.parametrize("placement", PLACEMENTS, ids=repr)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_programs_are_right_under_every_transport(placement, transport):
    for microbatches, tokens, prefills in [(1, 1, 1), (3, 4, 1), (5, 2, 0), (1, 3, 3), (3, 4, 3), (2, 5, 3)]:
        plan = Plan(placement, microbatches, tokens=tokens, prefills=max(1, prefills))
        fpipe.verify(partial(autoregressive, prompts=prefills > 0), plan, transport=transport)


def test_skips_go_to_each_reader_for_each_token():
    plan = Plan(Placement.loop(3), 2, Edges([(), (0,), (0, 1)]), tokens=3)
    report = fpipe.verify(autoregressive, plan, costs=Costs(activation=[8, 4, 2]))
    assert report.messages == {(0, 1): 6, (0, 2): 6, (1, 2): 6, (2, 0): 4}
    assert report.bytes == {(0, 1): 48, (0, 2): 48, (1, 2): 24, (2, 0): 0}


def test_tokens_go_from_the_last_rank_to_the_first():
    programs = fpipe.lower(autoregressive, PLAN)
    sent = [e.value for e in programs[1] if isinstance(e, Send)]
    assert sent == [Token(m, token) for token in range(2) for m in range(2)]
    first_use = programs[0].effects.index(Decode(0, 1, 2))
    assert Recv(Token(1, 1), 1) in programs[0].effects[:first_use]


def test_a_slice_of_prompts_comes_after_the_one_before_it():
    plan = Plan(Placement.loop(2), 1, tokens=2, prefills=2)

    def schedule(rank, plan):
        yield from reversed([*autoregressive(rank, plan)])

    with pytest.raises(ScheduleError, match=r"rank 0 waits at Prefill\(stage=0, microbatch=0, token=1\) for Cached"):
        fpipe.verify(schedule, plan)
    sent = [e.value for e in fpipe.lower(autoregressive, plan)[1] if isinstance(e, Send)]
    assert sent == []  # nothing comes after the first token, number 1


def tokens_of(programs, plan, handler):
    """The tokens of some programs, or of the right ones; None if they are refused."""
    pipeline, params = language_model(rows=4)
    new, given = plan.tokens - plan.prefills + 1, replace(plan, tokens=1, prefills=1)
    options = {"max_new_tokens": new, "prompt_slices": plan.prefills, "eos_token_id": (), "autodiff": "eager"}
    made = patch.object(generate, "_programs", lambda *_: programs) if programs else nullcontext()
    with made:
        return fpipe.generate(pipeline, params, PROMPTS, given, handler=handler, **options)


def is_right(programs):
    try:
        check(programs)
    except ScheduleError:
        return False
    return True


@pytest.mark.parametrize("slices", [1, 2])
def test_a_program_with_one_fault_is_refused_or_has_the_references_tokens(slices):
    """What comes later may be harmless; what is missing, doubled or on another rank is refused."""
    pipeline, _ = language_model(rows=4)
    plan = replace(pipeline.plan(cut(pipeline, 2), 2), tokens=2 + slices, prefills=slices)
    right, tried = fpipe.lower(autoregressive, plan), Counter()
    effects, expected = {rank: p.effects for rank, p in right.items()}, tokens_of(None, plan, handlers.Reference())
    for rank, order in effects.items():
        for at in range(len(order)):
            for kind, changed in faults(effects, rank, at):
                programs = {r: replace(right[r], effects=tuple(each)) for r, each in changed.items()}
                tried[kind, is_harmless := is_right(programs)] += 1
                if is_harmless:
                    assert torch.equal(tokens_of(programs, plan, handlers.Local()), expected), f"{kind} {order[at]}"
    assert {kind for kind, is_harmless in tried if is_harmless} == {"swapped", "moved on"}
    assert {kind for kind, is_harmless in tried if not is_harmless} == {
        *("without", "doubled", "elsewhere", "swapped", "moved on")
    }


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (Decode(0, 0, 3), "there are stages 0 to 1 and microbatches 0 to 1 and tokens 0 to 2"),
        (Decode(0, 0, 2), "it has run"),
        (Decode(1, 0, 2), "rank 1 runs that microbatch of that stage"),
        (Forward(0, 0), "it has run"),
        (Send(Token(0, 2), 1), "the plan has no such value"),
        (Send(Hidden(0, 0, 0), 1), "never yields Send"),
    ],
    ids=repr,
)
def test_what_does_not_belong_there_is_named(extra, message):
    def schedule(rank, plan):
        yield from autoregressive(rank, plan)
        if rank == 0:
            yield extra

    with pytest.raises(ScheduleError, match=message):
        fpipe.verify(schedule, PLAN)


def test_a_stage_without_a_token_is_named():
    def schedule(rank, plan):
        yield from (e for e in autoregressive(rank, plan) if e not in (Decode(1, 0, 2), Prefill(1, 1)))

    with pytest.raises(ScheduleError, match="rank 1 never yields Decode or Prefill of stage 1, microbatch 0, token 2"):
        fpipe.verify(schedule, PLAN)


def test_tokens_out_of_order_are_a_cycle_of_waits():
    with pytest.raises(ScheduleError, match=r"rank 0 waits at Decode\(stage=0, microbatch=1, token=2\) for Token"):
        fpipe.verify(lambda rank, plan: reversed([*autoregressive(rank, plan)]), PLAN)


def test_a_plan_of_training_has_no_further_tokens():
    with pytest.raises(ScheduleError, match="tokens 0 to 0"):
        fpipe.verify(lambda rank, plan: [Decode(rank, 0, 1)], Plan(Placement.loop(2), 1))
    with pytest.raises(ScheduleError, match="tokens must be a whole number of at least 1, not 0"):
        Plan(Placement.loop(2), 1, tokens=0)
    with pytest.raises(ScheduleError, match="prompts of 3 slices and at least one token need tokens=3, not 2"):
        Plan(Placement.loop(2), 1, tokens=2, prefills=3)
    assert plan_of(fpipe.lower(autoregressive, PLAN)).tokens == 3
