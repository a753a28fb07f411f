"""Real models under every schedule: losses, gradients and training are the unsplit module's."""

import copy
from dataclasses import replace

import pytest
import torch

from fpipe import Placement, handlers, interop, schedules
from tests import split_cases, split_jobs
from tests.jobs import differences
from tests.sharing import sharing


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", split_cases.CASES)
def test_loss_and_gradients_are_the_unsplit_modules(name, stages):
    case, pipeline, params, state = split_cases.split(name, stages)
    assert len(pipeline.stages) == stages
    expected = split_cases.run(split_cases.step(pipeline, handlers.Reference()), case, params, state)
    split_cases.check(expected, case, pipeline)
    local = sharing(handlers.Local(), "split", name, stages)
    assert differences(split_cases.run(split_cases.step(pipeline, local), case, params, state), expected) == []


SCHEDULES = {
    "gpipe": (schedules.gpipe, Placement.loop),
    "one_f_one_b": (schedules.one_f_one_b, Placement.loop),
    "interleaved_1f1b": (schedules.interleaved_1f1b, lambda ranks: Placement.loop(ranks, chunks=2)),
    "zb_h1": (schedules.zb_h1, Placement.loop),
    "zb_v": (schedules.zb_v, Placement.v),
    "dualpipe_v": (schedules.dualpipe_v, Placement.v),
}


@pytest.mark.parametrize("name", split_cases.CASES)
def test_every_schedule_gives_the_references_bits(name):
    case, pipeline, params, state = split_cases.split(name, 4)
    expected = split_cases.run(split_cases.step(pipeline, handlers.Reference()), case, params, state)
    local = sharing(handlers.Local(), "split", name, 4)
    for schedule, (function, placement) in SCHEDULES.items():
        found = split_cases.run(split_cases.step(pipeline, local, function, placement), case, params, state)
        assert differences(found, expected) == [], schedule


@pytest.mark.parametrize("name", ["unet", "gpt"])
def test_over_gloo(pools, name):
    case, *split = split_cases.split(name, 4)
    chosen = ["zb_v", "interleaved_1f1b"]
    assert pools(2).run(split_jobs.train, chosen, case.batch, case.target, *split, limit=120) == [[]] * 2


@pytest.mark.parametrize("name", ["gpt", "t5"])
def test_twenty_steps_of_adamw_end_where_unsplit_training_ends(name):
    case, pipeline, params, state = split_cases.split(name, 4)
    own = split_cases.step(pipeline, sharing(handlers.Local(), "split", name, 4), schedules.zb_v, Placement.v)
    init, update = interop.optimizer(torch.optim.AdamW, lr=1e-2)
    kept, module = init(params), copy.deepcopy(case.module)
    theirs = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(20):
        _, grads, _ = split_cases.run(own, case, params, state)
        params, kept = update(grads, kept, params)
        theirs.zero_grad()
        for parameter, gradient in split_cases.unsplit(replace(case, module=module), 2)[1].items():
            module.get_parameter(parameter).grad = gradient
        theirs.step()
    found, expected = interop.to_state_dict(pipeline, params), module.state_dict()
    for entry, x in expected.items():
        torch.testing.assert_close(
            found[entry], x, rtol=1e-9, atol=1e-9, msg=lambda text, entry=entry: f"{entry}: {text}"
        )
    if name == "gpt":
        assert found["head.weight"] is found["wte.weight"]
