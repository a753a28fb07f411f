"""An effect that is defined here alone goes through everything, without a line changed in the library.

`Load(stage)` gives `Weights(stage)`, a value without microbatch, which the forwards of stage 1 need; `Mark(stage)` is
inert.
"""

import json
import math
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from fpipe import (
    Costs,
    Pipeline,
    Placement,
    Plan,
    ScheduleError,
    draw,
    handlers,
    lower,
    simulate,
    value_and_grad,
    verify,
)
from fpipe.effects import Forward, Recv, Reduce, Send
from fpipe.handlers import Observer
from fpipe.profiling.recording import Recording
from fpipe.programs.interning import Interning
from fpipe.programs.lowering import forward_only
from fpipe.schedules import one_f_one_b
from fpipe.tables import TABLE, Row, ValueRow, uniform
from fpipe.tensorboard.files.captures import assemble, columns_of
from fpipe.tensorboard.files.columns import Header, encode
from fpipe.tensorboard.files.writer import write
from fpipe.tensorboard.recording.memory import SlotMemory
from fpipe.timelines.perfetto import chrome_json

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Load:
    stage: int


@dataclass(frozen=True, slots=True)
class Mark:
    stage: int


@dataclass(frozen=True, slots=True)
class Weights:
    stage: int


def forward_needs(effect, plan):
    loaded = (Weights(effect.stage),) if effect.stage == 1 else ()
    return TABLE.effects[Forward].needs(effect, plan) + loaded


EFFECTS = TABLE.extended(
    {
        Load: Row(gives=lambda e, plan: (Weights(e.stage),), letter="L", label="load", colour="#f0e442"),
        Mark: Row(track="host", letter="M", label="mark", colour="#112233"),
        Weights: ValueRow(label="weights"),
        Forward: TABLE.effects[Forward]._replace(needs=forward_needs),
    }
)
PLAN = Plan(Placement.loop(2), 3)


def loading(rank, plan):
    """1F1B, with a load before the first forward of stage 1, and a mark at the end."""
    (stage,) = plan.stages_on(rank)
    if stage == 1:
        yield Load(1)
    yield from one_f_one_b(rank, plan)
    yield Mark(stage)


def with_rank_1(*effects):
    """`loading`, with other effects on rank 1 than its own `Load(1)`."""

    def schedule(rank, plan):
        if rank == 1:
            yield from effects
        yield from (e for e in loading(rank, plan) if not isinstance(e, Load))

    return schedule


def test_lowering_keeps_them_in_place_and_sends_nothing_of_a_value_that_stays():
    programs = lower(loading, PLAN, effects=EFFECTS)
    assert [e for e in programs[1] if isinstance(e, Load | Mark)] == [Load(1), Mark(1)]
    plain = lower(one_f_one_b, PLAN)
    for rank in (0, 1):
        posts = [e for e in programs[rank] if isinstance(e, Send | Recv)]
        assert posts == [e for e in plain[rank] if isinstance(e, Send | Recv)]


def test_the_verifier_takes_the_right_program():
    plain = lower(one_f_one_b, PLAN)
    assert verify(loading, PLAN, effects=EFFECTS).effects == (len(plain[0]) + 1, len(plain[1]) + 2)


@pytest.mark.parametrize(
    ("effects", "message"),
    [
        ([], r"rank 1 waits at Forward\(stage=1, microbatch=0\) for Weights\(stage=1\), which is not there"),
        ([Load(1), Load(1)], r"rank 1 yields Load\(stage=1\), but its Weights\(stage=1\) is on the rank already"),
        ([Load(1), Load(0)], r"rank 1 yields Load\(stage=0\), but only rank 0 may run it"),
        ([Load(1), Mark(0)], r"rank 1 yields Mark\(stage=0\), but only rank 0 may run it"),
        ([Load(1), Load(2)], r"rank 1 yields Load\(stage=2\), but there are stages 0 to 1"),
        ([Load(1), Mark(99)], r"rank 1 yields Mark\(stage=99\), but there are stages 0 to 1"),
    ],
    ids=["missing", "doubled", "load on a wrong rank", "mark on a wrong rank", "no such stage", "mark of no stage"],
)
def test_the_verifier_refuses_a_wrong_program_by_name(effects, message):
    with pytest.raises(ScheduleError, match=message):
        verify(with_rank_1(*effects), PLAN, effects=EFFECTS)


def test_an_effect_that_the_table_lacks_is_refused_with_the_way_out():
    with pytest.raises(ScheduleError, match=r"Mark\(stage=0\), which is no effect of the table: .*TABLE\.extended"):
        verify(loading, PLAN)


def test_the_simulator_takes_its_time_and_the_memory_its_bytes():
    costs = Costs(extra={Load: [0, 2.5], Weights: 100}, residuals=10)
    timeline = simulate(loading, PLAN, costs, effects=EFFECTS)
    (load,) = [span for span in timeline.compute(1) if isinstance(span.effect, Load)]
    assert (load.start, load.end) == (0.0, 2.5)
    first = next(span for span in timeline.compute(1) if isinstance(span.effect, Forward))
    assert first.start == 2.5
    assert timeline.busy[1] == 2.5 + simulate(one_f_one_b, PLAN).busy[1]
    assert max(size for _, size in timeline.memory(1)) == 110
    report = verify(loading, PLAN, effects=EFFECTS, costs=costs)
    assert report.peak_bytes == (20.0, 110.0)


def test_it_is_drawn():
    assert draw(loading, PLAN, effects=EFFECTS).splitlines() == [
        "rank 0  F0 F1 .  B0 F2 B1 .  B2",
        "rank 1  L  F0 B0 F1 B1 F2 B2",
    ]


def test_forward_only_drops_what_needs_or_gives_a_value_of_the_backward_pass():
    programs = lower(loading, PLAN, effects=EFFECTS)
    assert {type(e) for p in forward_only(programs).values() for e in p} == {Load, Mark, Forward, Send, Recv}
    table = EFFECTS.extended({Mark: Row(needs=lambda e, plan: TABLE.needs(Reduce(e.stage), plan))})
    programs = lower(loading, PLAN, effects=table)
    assert {type(e) for p in forward_only(programs).values() for e in p} == {Load, Forward, Send, Recv}


def load(calls, effect):
    """The function of `Load`: puts a tensor into the slot of its value."""
    slot = calls.slot(Weights(effect.stage))

    def call():
        LOADED.append(effect)
        calls.slots[slot] = torch.ones(2)

    return call


LOADED = []
FUNCTIONS = {Load: load, Mark: lambda calls, effect: None}
PARAMS = {0: torch.tensor(2.0), 1: torch.tensor(1.0)}
BATCH = torch.arange(6.0)


def pipeline():
    return Pipeline([lambda p, x: x * p, lambda p, x: x + p], loss=lambda y, t: (y - t).square().mean())


def trained(rank):
    """One step on a rank over gloo; its loss and gradients, what it loaded, and the effects that were recorded."""
    handler = handlers.Distributed(functions=FUNCTIONS)
    plan = pipeline().plan(PLAN.placement, 3)
    recording = Recording(lower(loading, plan, effects=EFFECTS))
    step = value_and_grad(pipeline(), loading, plan, handler=handler, effects=EFFECTS, observe=recording)
    params = pipeline().params_on(PARAMS, plan, rank)
    LOADED.clear()
    step(params, BATCH, BATCH * 0)
    LOADED.clear()
    loss, grads = step(params, BATCH, BATCH * 0)
    timeline = recording.measurement().timeline(partial=True)
    return loss, grads, list(LOADED), [e for e in timeline.spans.effects if isinstance(e, Load | Mark)]


REFERENCE = value_and_grad(pipeline(), one_f_one_b, pipeline().plan(PLAN.placement, 3), handler=handlers.Reference())


def test_local_runs_its_function_once_a_step():
    plan = pipeline().plan(PLAN.placement, 3)
    local = handlers.Local(functions=FUNCTIONS)
    step = value_and_grad(pipeline(), loading, plan, handler=local, effects=EFFECTS)
    for _ in range(2):
        LOADED.clear()
        assert step(PARAMS, BATCH, BATCH * 0) == REFERENCE(PARAMS, BATCH, BATCH * 0)
        assert [Load(1)] == LOADED


@pytest.mark.parametrize("track", ["compute", "gather", "scatter", "host"])
def test_measured_costs_have_its_time_on_every_track(track):
    effects = EFFECTS.extended({Load: EFFECTS.effects[Load]._replace(track=track)})
    plan = pipeline().plan(PLAN.placement, 3)
    recording = Recording(lower(loading, plan, effects=effects))
    local = handlers.Local(functions=FUNCTIONS)
    value_and_grad(pipeline(), loading, plan, handler=local, effects=effects, observe=recording)(PARAMS, BATCH, BATCH)
    without, load = recording.measurement().costs().extra[Load]
    assert without == 0 < load


def test_gloo_runs_it_on_its_rank_and_the_recording_has_it(pools):
    loss, grads = REFERENCE(PARAMS, BATCH, BATCH * 0)
    ranks = pools(2).run(trained)
    for rank, (got, gradients, loaded, recorded) in enumerate(ranks):
        assert got == loss
        assert gradients == {rank: grads[rank]}
        assert loaded == ([Load(1)] if rank == 1 else [])
        assert recorded == ([Load(1)] if rank == 1 else []) + [Mark(rank)]


def test_a_handler_without_its_function_refuses_it_with_the_way_out():
    plan = pipeline().plan(PLAN.placement, 3)
    with pytest.raises(ScheduleError, match=r"Mark\(stage=0\), and the handler has no function.*functions=\{Mark: "):
        value_and_grad(pipeline(), loading, plan, handler=handlers.Local(), effects=EFFECTS)


def predicted():
    return simulate(loading, PLAN, Costs(extra={Load: [0, 2.5]}), effects=EFFECTS)


def test_the_exports_have_its_label_and_fields():
    events = json.loads("".join(chrome_json(predicted())))["traceEvents"]
    (load_,) = [event for event in events if event["name"] == "load stage 1"]
    assert (load_["cat"], load_["args"]["kind"], load_["args"]["stage"], load_["dur"]) == ("compute", "Load", 1, 2500.0)
    assert {event["name"] for event in events} >= {"mark stage 0", "mark stage 1"}


def test_a_file_has_what_a_reader_needs_that_never_imported_it():
    timeline = predicted()
    found = assemble(
        {rank: encode(Header("predicted", 0, rank, "", PLAN, ""), columns_of(timeline, rank)) for rank in (0, 1)}
    )
    assert list(map(repr, found.timeline.spans.effects)) == list(map(repr, timeline.spans.effects))
    kinds = {kind.__name__: row for kind, row in found.timeline.table.effects.items()}
    for kind in (Load, Mark, Forward):
        row, read = EFFECTS.effects[kind], kinds[kind.__name__]
        assert (read.letter, read.label, read.colour, read.track) == (row.letter, row.label, row.colour, row.track)
    assert found.timeline.busy == timeline.busy


def test_the_command_line_shows_it_in_a_process_that_never_imported_it(tmp_path):
    write(tmp_path / "run", predicted(), schedule="loading")

    def command(*words):
        line = [sys.executable, "-m", "fpipe", "timeline", str(tmp_path / "run"), *words]
        return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "1 L" in command()
    command("--out", str(tmp_path / "run.json"))
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert "load stage 1" in {event["name"] for event in events}


@dataclass(frozen=True, slots=True)
class Count:
    """Gives `Total(stage)`, a tree that the rank of stage 1 reads."""

    stage: int


@dataclass(frozen=True, slots=True)
class Show:
    stage: int


@dataclass(frozen=True, slots=True)
class Total:
    stage: int


SHOWN = []
TRAVELLING = TABLE.extended(
    {
        Count: Row(gives=lambda e, plan: (Total(e.stage),), track="host", label="count"),
        Show: Row(needs=lambda e, plan: (Total(0),), track="host", label="show"),
        Total: ValueRow(lambda v, plan: plan.ranks_of(v.stage)[0], lambda v, plan: plan.ranks_of(1), label="total"),
    }
)
TRAVELLING_FUNCTIONS = {
    Count: lambda calls, e: partial(calls.slots.__setitem__, calls.slot(Total(e.stage)), {"n": torch.arange(3.0)}),
    Show: lambda calls, e: partial(show, calls.slots, calls.slot(Total(0))),
}


def show(slots, slot):
    SHOWN.append(slots[slot])


def counting(rank, plan):
    if rank == 0:
        yield Count(0)
    yield from one_f_one_b(rank, plan)
    if rank == 1:
        yield Show(1)


def shown(rank):
    """What rank 1 shows in two steps over gloo."""
    handler, plan = handlers.Distributed(functions=TRAVELLING_FUNCTIONS), pipeline().plan(PLAN.placement, 3)
    step = value_and_grad(pipeline(), counting, plan, handler=handler, effects=TRAVELLING)
    SHOWN.clear()
    for _ in range(2):
        step(pipeline().params_on(PARAMS, plan, rank), BATCH, BATCH * 0)
    return list(SHOWN)


def test_a_tree_without_microbatch_travels_as_it_is(pools):
    assert Send(Total(0), 1) in lower(counting, PLAN, effects=TRAVELLING)[0].effects
    assert verify(counting, PLAN, effects=TRAVELLING).messages == {(0, 1): 4, (1, 0): 3}
    plan = pipeline().plan(PLAN.placement, 3)
    local = handlers.Local(functions=TRAVELLING_FUNCTIONS)
    SHOWN.clear()
    value_and_grad(pipeline(), counting, plan, handler=local, effects=TRAVELLING)(PARAMS, BATCH, BATCH * 0)
    for values in ([*SHOWN, *SHOWN], pools(2).run(shown)[1]):
        assert [list(value) for value in values] == [["n"], ["n"]]
        assert all(torch.equal(value["n"], torch.arange(3.0)) for value in values)


class Measured(Observer):
    """Measures the store of one rank."""

    def __init__(self, program):
        self.program = program

    def on_store(self, rank, store):
        if rank == self.program.rank:
            self.store = store

    def on_step_begin(self):
        self.memory = SlotMemory(self.program, self.store)

    def begin(self, rank, effect):
        if rank == self.program.rank:
            self.memory.begin(effect)

    def end(self, rank, effect):
        if rank == self.program.rank:
            self.memory.end(effect)


@pytest.mark.parametrize(
    ("schedule", "effects", "functions", "effect", "size"),
    [(loading, EFFECTS, FUNCTIONS, Load(1), 8), (counting, TRAVELLING, TRAVELLING_FUNCTIONS, Count(0), 12)],
    ids=["a tensor", "a dict"],
)
def test_the_bytes_of_its_value_are_measured(schedule, effects, functions, effect, size):
    plan = pipeline().plan(PLAN.placement, 3)
    observer = Measured(lower(schedule, plan, effects=effects)[effect.stage])
    options = {"handler": handlers.Local(functions=functions), "effects": effects, "observe": observer}
    value_and_grad(pipeline(), schedule, plan, **options)(PARAMS, BATCH, BATCH * 0)
    assert observer.memory.during[observer.program.effects.index(effect)] == size


@dataclass(frozen=True, slots=True)
class Drop:
    stage: int


def test_a_value_that_is_given_up_and_given_again_counts_twice_in_turn():
    def weights(effect, plan):
        return (Weights(effect.stage),)

    table = EFFECTS.extended({Drop: Row(needs=weights, frees=weights)})
    plan = Plan(Placement((0, 0)), 2)

    def whole(rank, plan):
        for m in range(plan.microbatches):
            yield from (Load(0), Forward(0, m), Drop(0), Load(1), Forward(1, m), Drop(1))

    costs = Costs(extra={Weights: 100})
    assert verify(whole, plan, effects=table, costs=costs).peak_bytes == (100.0,)
    assert max(size for _, size in simulate(whole, plan, costs, effects=table).memory(0)) == 100.0


def test_a_uniform_row_of_an_effect_with_another_number_is_read_for_each():
    @dataclass(frozen=True)
    class Slice:
        stage: int
        microbatch: int
        part: int

    gives = uniform(lambda e, plan: (Part(e.stage, e.microbatch, e.part),))
    table = TABLE.extended({Slice: Row(gives=gives), Part: ValueRow()})
    interning = Interning(PLAN, table)
    names = [list(map(interning.name, interning.ids(Slice(0, m, part))[1])) for m in (0, 1) for part in (0, 1)]
    assert names == [[Part(0, m, part)] for m in (0, 1) for part in (0, 1)]


@dataclass(frozen=True)
class Part:
    stage: int
    microbatch: int
    part: int


@pytest.mark.parametrize("row", [Row(colour="red"), Row(track="io")])
def test_a_row_that_no_reader_could_draw_is_refused(row):
    with pytest.raises(ValueError, match="the row of Load has a colour that is not #rrggbb"):
        TABLE.extended({Load: row})


@dataclass
class Thawed:
    stage: int


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        (Thawed, Row(), "the table maps frozen dataclasses to Row or ValueRow"),
        (Load, Row(track="send"), "the row of Load is on the track 'send', and its effects have no rank and no value"),
        (Load, Row(letter=""), "the row of Load needs one letter for drawings, not ''"),
    ],
)
def test_a_row_that_would_break_later_is_refused(kind, row, message):
    with pytest.raises((TypeError, ValueError), match=message):
        TABLE.extended({kind: row})


@pytest.mark.parametrize("time", [math.nan, math.inf, -5.0])
def test_a_time_that_is_none_is_refused(time):
    table = EFFECTS.extended({Load: EFFECTS.effects[Load]._replace(time=lambda effect, costs: time)})
    with pytest.raises(ScheduleError, match=r"the time of Load\(stage=1\) is .*: the row of Load is wrong"):
        simulate(loading, PLAN, effects=table)


def test_extra_costs_are_of_classes_of_ones_own():
    with pytest.raises(ScheduleError, match="extra is for classes of your own: the cost of Forward has an argument"):
        Costs(extra={Forward: 30})


def test_scaled_microbatches_take_their_share_of_time_and_bytes():
    costs = Costs(scale=np.array([1.0, 0.5, 2.0]), sizes=(1, 2, 4), residuals=10, activation=1)
    timeline = simulate(one_f_one_b, PLAN, costs)
    assert timeline.busy == [10.5, 10.5]
    assert verify(one_f_one_b, PLAN, costs=costs).bytes == {(0, 1): 7.0, (1, 0): 7.0}
    assert simulate(one_f_one_b, PLAN, Costs(scale=(1, 1, 1))).busy == simulate(one_f_one_b, PLAN).busy
    with pytest.raises(ScheduleError, match="scale has 2 entries, the plan 3 microbatches"):
        simulate(one_f_one_b, PLAN, Costs(scale=(1, 2)))
    with pytest.raises(ScheduleError, match="scale has one factor for each microbatch, not 2"):
        Costs(scale=2.0)


def test_a_value_whose_class_has_no_row_is_refused_by_name():
    loads = TABLE.extended({Load: Row(gives=lambda e, plan: (Weights(e.stage),))})
    with pytest.raises(TypeError, match=r"the table has no row for Weights: extend it, as in TABLE\.extended"):
        verify(with_rank_1(Load(1)), PLAN, effects=loads.extended({Mark: EFFECTS.effects[Mark]}))


def test_a_row_that_names_a_value_outside_the_plan_is_refused():
    beyond = EFFECTS.extended({Load: Row(gives=lambda e, plan: (Weights(e.stage + 1),))})
    with pytest.raises(ScheduleError, match=r"the row of Load names Weights\(stage=2\), which the plan does not have"):
        verify(loading, PLAN, effects=beyond)


def test_work_without_a_microbatch_is_refused():
    with pytest.raises(TypeError, match="the row of Load has work, and its effects have no microbatch"):
        TABLE.extended({Load: Row(work=1)})


def test_freeing_a_value_that_is_not_there_is_refused():
    table = EFFECTS.extended({Drop: Row(frees=lambda e, plan: (Weights(e.stage),))})
    for effects in ([Drop(1), Load(1)], [Load(1), Drop(1), Drop(1)]):
        with pytest.raises(ScheduleError, match=r"Drop\(stage=1\), but the Weights\(stage=1\) that it frees is not on"):
            verify(with_rank_1(*effects), PLAN, effects=table, costs=Costs(extra={Weights: 1}))
