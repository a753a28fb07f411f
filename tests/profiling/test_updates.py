"""The time of an optimizer's update of each stage, as `profile` measures it."""

import torch

import fpipe
from fpipe import Pipeline, interop


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
