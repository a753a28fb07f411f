"""Slices of microbatches in names, tables, lowering, verifier, memory, drawings and event files."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from fpipe import Costs, Placement, Plan, ScheduleError, lower
from fpipe.cli.app import app
from fpipe.costs import Shared
from fpipe.effects import (
    Activation,
    Backward,
    BackwardInput,
    BackwardWeight,
    Carry,
    CarryGradient,
    Forward,
    Gradient,
    Recv,
    Residuals,
    Send,
)
from fpipe.programs.interning import Interning
from fpipe.programs.verifier import check, verify
from fpipe.schedules import from_table, gpipe, seq_1f1b, seq_zb
from fpipe.tables import TABLE
from fpipe.tensorboard.files.columns import Columns, Header, decode, encode
from tests.support.combinations import combined

PLAN = Plan(Placement.loop(2), 2, slices=2)


def test_the_first_slice_is_the_microbatch_without_slices():
    assert Forward(1, 2) == Forward(1, 2, 0)
    assert repr(Forward(1, 2)) == "Forward(stage=1, microbatch=2)"
    assert (
        repr(Send(Gradient(1, 2, 3, 4), 0))
        == "Send(value=Gradient(stage=1, consumer=2, microbatch=3, slice=4), rank=0)"
    )
    assert repr(Plan(Placement.loop(1), 2)) == "Plan(Placement((0,)), microbatches=2)"
    assert pickle.loads(pickle.dumps(Forward(1, 2, 3))) == Forward(1, 2, 3) != Forward(1, 2)


def test_what_effects_need_and_give():
    first, last = Forward(1, 0, 0), Forward(1, 0, 1)
    assert TABLE.needs(last, PLAN) == (Activation(0, 0, 1), Carry(1, 0, 0))
    assert TABLE.gives(first, PLAN) == (Carry(1, 0, 0), Residuals(1, 0, 0))
    assert TABLE.gives(last, PLAN) == (Residuals(1, 0, 1),)
    assert TABLE.gives(Backward(1, 0, 1), PLAN)[:2] == (Gradient(0, 1, 0, 1), CarryGradient(1, 0, 0))
    assert TABLE.needs(BackwardInput(0, 0, 0), PLAN) == (Gradient(0, 1, 0), CarryGradient(0, 0, 0), Residuals(0, 0))
    assert CarryGradient(0, 0, 0) in TABLE.frees(Backward(0, 0, 0), PLAN)
    assert TABLE.producer(Carry(0, 0, 0), PLAN) is None
    assert TABLE.text(Send(Activation(0, 3, 1), 1)) == "send activation 3.1"
    assert TABLE.text(Forward(0, 3, 1)) == "forward stage 0, microbatch 3, slice 1"


def test_a_trained_first_stage_has_gradients_of_what_it_carries():
    plan = replace(PLAN, trained=[0, 1])
    assert plan.has_input_half(0)
    assert not replace(plan, slices=1).has_input_half(0)
    kinds = {type(effect) for effect in lower(seq_zb, plan)[0]}
    assert {BackwardInput, BackwardWeight} <= kinds
    assert not replace(plan, trained=[1]).has_input_half(0)
    verify(seq_zb, replace(plan, trained=[1]))


@combined(schedule=[gpipe, seq_1f1b, seq_zb], trained=[None, (0,), (1, 2)], replicas=[1, 2], slices=[2, 3])
def test_names_have_ids_of_their_own(schedule, trained, replicas, slices):
    plan = Plan(Placement.loop(3), 4, trained=trained, replicas=replicas, slices=slices)
    programs = lower(schedule, plan)
    check(programs)
    interning = Interning(plan)
    for program in programs.values():
        for effect in program:
            columns = TABLE.needs(effect, plan), TABLE.gives(effect, plan), TABLE.frees(effect, plan)
            assert tuple(tuple(map(interning.name, ids)) for ids in interning.ids(effect)) == columns


def ordered(*effects):
    """A schedule of one stage on one rank, and its plan of one microbatch in two slices."""
    return from_table({0: effects}), Plan(Placement.loop(1), 1, slices=2)


F0, F1, B0, B1 = Forward(0, 0), Forward(0, 0, 1), Backward(0, 0), Backward(0, 0, 1)
I0, I1, W0, W1 = BackwardInput(0, 0), BackwardInput(0, 0, 1), BackwardWeight(0, 0), BackwardWeight(0, 0, 1)


@pytest.mark.parametrize(
    ("effects", "problem"),
    [
        ((F1, F0, B1, B0), "Forward of slice 0 comes later: the slices of a microbatch run forward from the first"),
        ((F0, F1, B0, B1), "of slice 1 comes later: the slices of a microbatch run backward from the last"),
        ((F0, F1, I1, I0, W0, W1), "BackwardWeight of slice 1 comes later"),
        ((F0, F1, I0, I1, W1, W0), "BackwardInput of slice 1 comes later"),
        ((F0, F1, B1, B0, B0), "it has run"),
        ((F0, F1, B1), "never yields Backward, or BackwardInput and BackwardWeight, of stage 0, microbatch 0, slice 0"),
        ((F0, F1, Forward(0, 0, 2)), "there are stages 0 to 0 and microbatches 0 to 0 and slices 0 to 1"),
    ],
)
@pytest.mark.parametrize("is_ordered", [True, False])
def test_wrong_orders(effects, problem, is_ordered):
    with pytest.raises(ScheduleError, match=problem):
        verify(*ordered(*effects), ordered=is_ordered)


@pytest.mark.parametrize("effects", [(F0, F1, B1, B0), (F0, F1, I1, I0, W1, W0), (F0, F1, I1, W1, B0)])
def test_right_orders(effects):
    assert verify(*ordered(*effects)).peak_in_flight == (1.0,)


def test_a_slice_that_the_plan_does_not_have():
    with pytest.raises(ScheduleError, match="there are stages 0 to 0 and microbatches 0 to 0 and slices 0 to 0"):
        verify(ordered(F0, F1)[0], Plan(Placement.loop(1), 1))


def test_bytes():
    """What is carried counts from one slice to the next; shared memory counts once for each slice."""
    plan, costs = Plan(Placement.loop(1), 1, slices=3), Costs(residuals=10, carry=3)
    assert verify(gpipe, plan, costs=costs).peak_bytes == (30 + 3 + 0,)
    shared = Costs(residuals=10, carry=3, shared=[Shared(3, (Residuals(0, 0), Carry(0, 0, 0)))])
    assert verify(gpipe, plan, costs=shared).peak_bytes == (30,)


@pytest.mark.parametrize("slices", [1, 2])
def test_an_event_file_there_and_back(slices):
    plan = replace(PLAN, slices=slices)
    effects = lower(seq_zb, plan)[0].effects
    count = len(effects)
    columns = Columns(effects, np.zeros(count), np.ones(count), (np.full(count, -1, np.int32),) * 2)
    header, found = decode(encode(Header("predicted", 0, 0, "mine", plan, unit=""), columns))
    assert header.plan == plan
    assert tuple(found.effects) == effects


def test_the_command_line():
    def told(*arguments):
        result = CliRunner().invoke(app, [*arguments, "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    size = ("--ranks", "4", "--microbatches", "8")
    for slices in (2, 4):
        found = told("simulate", "seq-1f1b", *size, "--slices", str(slices))
        assert (found["cost"], found["slices"]) == (8 * 3 + 3 * 3 / slices, slices)
    assert told("simulate", "1f1b", *size) == told("simulate", "1f1b", *size, "--slices", "1")
    refused = CliRunner().invoke(app, ["simulate", "1f1b", *size, "--slices", "2"])
    assert refused.exit_code
    assert "takes no slices" in refused.output


def test_receives_are_in_the_order_of_the_sends():
    receives = [e.value for e in lower(seq_1f1b, PLAN)[1] if isinstance(e, Recv)]
    assert receives == [Activation(0, m, t) for m in range(2) for t in range(2)]
