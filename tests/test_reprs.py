"""What a prompt and a notebook show of public objects: one short line, and where it makes sense, the call itself."""

import pytest
import torch
from torch import nn

import fpipe
from fpipe import Batch, Costs, Edges, Link, Output, Pipeline, Placement, Plan, Stage, handlers, interop, schedules


def double(params, x):
    return 2 * x


PIPELINE = Pipeline([double, double], loss=nn.functional.mse_loss)
PLAN = PIPELINE.plan(Placement.loop(2), 4)
LOCAL = handlers.Local()
CALLS = {
    "Placement((0, 1))": Placement.loop(2),
    "Placement.loop(64)": Placement.loop(64),
    "Placement.loop(16, chunks=2)": Placement.loop(16, chunks=2),
    "Placement.v(16)": Placement.v(16),
    "Placement.both_ways(32)": Placement.both_ways(32),
    "Placement(((0, 1, 2),))": Placement([(0, 1, 2)]),
    "Plan(Placement((0, 1)), microbatches=4)": PLAN,
    "Plan(Placement((0, 0, 0)), microbatches=2, edges=Edges(((), (0,), (0, 1))), ties=((0, 2),), replicas=2)": Plan(
        Placement([0] * 3), 2, Edges([(), (0,), (0, 1)]), ((0, 2),), 2
    ),
    "Costs()": Costs(),
    "Costs(forward=(1.0, 2.0), communication={(0, 1): Link(latency=0.1)}, scale=(1.0, 2.0))": Costs(
        forward=[1, 2], communication={(0, 1): 0.1}, scale=[1, 2]
    ),
    "Costs(sizes=(2.0, 1.0))": Costs(sizes=[2, 1]),
    "Link(latency=0.5, bandwidth=2.0)": Link(0.5, 2),
    "Output(0)": Output(0),
    "Output(0, 'skip', 1)": Output(0, "skip", 1),
    "Batch()": Batch(),
    "Stage(double)": Stage(double),
    "Stage(double, reads=[Output(0), Batch('mask')], stateful=True, frozen=('w',))": Stage(
        double, [Output(0), Batch("mask")], stateful=True, frozen=("w",)
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_value_is_shown_as_the_call_that_makes_it(call):
    assert repr(CALLS[call]) == call
    names = {**vars(fpipe.plan), "Costs": Costs, "Link": Link, "Output": Output, "Batch": Batch, "Stage": Stage}
    assert eval(call, {**names, "double": double}) == CALLS[call]


def shown(tmp_path):
    """Yield objects that are no values, and what they show."""
    programs = fpipe.lower("1f1b", PLAN)
    yield PIPELINE, "<Pipeline: 2 stages, loss mse_loss>"
    tied = Pipeline([double, double], ties={(1, "head"): (0, "wte")})
    yield tied, "<Pipeline: 2 stages, 1 tie>"
    yield programs[0], "<Program: 17 effects of rank 0 of 2>"
    yield fpipe.verify("1f1b", PLAN), "<Report: right under async: 34 effects, 8 messages>"
    yield LOCAL, "Local()"
    yield handlers.Local(["cpu", "meta"]), "Local(['cpu', 'meta'])"
    yield handlers.Reference(), "Reference()"
    yield schedules.CATALOGUE["zb-v"], "CATALOGUE['zb-v']"
    found = schedules.search(Plan(Placement.loop(2), 4))
    yield (
        found,
        f"<Found: {found.name}, 2 ranks, {found.plan.stages} stages, 4 microbatches, cost 12, peak {found.peak:g}>",
    )
    yield interop.optimizer(torch.optim.AdamW, lr=3e-4), "<Optimizer: AdamW(lr=0.0003)>"
    step = fpipe.value_and_grad(PIPELINE, "1f1b", PLAN, handler=LOCAL)
    yield step, "<Step: one_f_one_b, 2 ranks, 2 stages, 4 microbatches, Local()>"
    recording = fpipe.Recording(programs)
    yield recording, "<Recording of 2 ranks, 2 stages, 4 microbatches: 0 complete steps>"
    yield fpipe.LiveBytes(), "<LiveBytes: 0 effects>"
    recorder = fpipe.tensorboard.Recorder(tmp_path, steps=[2, 5])
    yield recorder, f"<Recorder into {tmp_path}: steps [2, 5]; now 0>"
    recorder.close()
    saved = interop.Checkpoints(tmp_path / "saved", PIPELINE, PLAN, handler=LOCAL, keep=3)
    yield saved, f"<Checkpoints in {tmp_path / 'saved'}, the last 3 of them>"
    split, _ = interop.split(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), stages=1, example=torch.ones(1, 2))
    yield split.stages[0], "Stage(GraphFunction, reads=(Batch(),))"
    yield split.stages[0].fn, "<GraphFunction: 2 entries of params, 0 of state>"


def test_other_objects_are_shown_in_a_line(tmp_path):
    for each, line in shown(tmp_path):
        assert repr(each) == line


def test_tables_are_shown_in_notebooks():
    report = fpipe.verify("1f1b", PLAN)
    assert report._repr_html_() == f"<pre>{report}</pre>"
    recording = fpipe.Recording(fpipe.lower("1f1b", PLAN))
    pipeline = Pipeline([lambda p, x: x * p] * 2, loss=lambda y, t: (y - t).sum())
    params = {0: torch.tensor(1.0), 1: torch.tensor(2.0)}
    fpipe.value_and_grad(pipeline, "1f1b", PLAN, handler=LOCAL, observe=recording)(params, torch.ones(4), torch.ones(4))
    measured = recording.measurement()
    assert repr(measured) == "<Measurement: 2 ranks, 2 stages, 4 microbatches; recorded: ranks 0, 1>"
    assert measured._repr_html_() == f"<pre>{measured}</pre>".replace("'", "&#x27;")
