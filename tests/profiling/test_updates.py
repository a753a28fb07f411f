"""The time of an optimizer's update of each stage, as `profile` and a `Recording` measure it."""

import torch

import fpipe
from fpipe import Pipeline, Placement, handlers, interop, schedules


def test_trained_stages_have_a_time_and_params_stay():
    layers = [lambda p, x: torch.tanh(x * p["w"])] * 3
    pipeline = Pipeline(layers, loss=lambda y, t: (y - t).square().mean())
    params = {stage: {"w": torch.ones(4), "count": torch.tensor(3)} for stage in range(3)}
    frozen = pipeline.freeze(params, lambda path, x: path[0] == 1)
    adam = interop.optimizer(torch.optim.AdamW, lr=0.1, donate=True)
    data = torch.ones(4, 4), torch.zeros(4, 4)
    first, second, third = fpipe.profile(frozen, params, *data, repeats=2, optimizer=adam).update
    assert min(first, third) > 0
    assert second == 0
    assert all(torch.equal(tree["w"], torch.ones(4)) for tree in params.values())
    assert fpipe.profile(pipeline, params, *data, repeats=1).update == (0, 0, 0)


def test_updates_are_recorded():
    pipeline = Pipeline([lambda p, x: x * p] * 2, loss=lambda y, t: y.sum())
    plan = pipeline.plan(Placement.loop(ranks=2), microbatches=2)
    recording = fpipe.Recording(fpipe.lower(schedules.updating("gpipe"), plan))
    sgd = interop.optimizer(torch.optim.SGD, lr=0.1)
    step = fpipe.train_step(pipeline, "gpipe", plan, sgd, handler=handlers.Local(), observe=recording)
    params = {0: torch.tensor(2.0), 1: torch.tensor(1.0)}
    step(params, sgd.init(params), torch.arange(4.0))
    measurement = recording.measurement()
    assert [type(span.effect).__name__ for span in measurement.timeline().compute(rank=1)][-1] == "Update"
    assert min(measurement.costs().update) > 0
