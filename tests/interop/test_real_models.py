"""Real models under every schedule: losses, gradients and training are the unsplit module's."""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch

from fpipe import handlers
from tests.support import split_cases, split_jobs
from tests.support.combinations import combined, sample
from tests.support.jobs import differences, same
from tests.support.sharing import sharing

EVERY = [(name, n) for name in split_cases.CASES for n in (2, 4)]
QUICK = [(name, 4) for name in ("unet", "gpt", "gpt2", "t5")]
EACH = pytest.mark.parametrize(("name", "stages"), sample(EVERY, QUICK))


(MEETINGS,) = combined(case=split_cases.CASES, schedule=split_cases.SCHEDULES, handler=("local", "gloo")).args[1:]


def schedules_of(case, handler):
    return [schedule for name, schedule, over in MEETINGS if (name, over) == (case, handler)]


@cache
def expected(name, stages):
    case, pipeline, params, state = split_cases.split(name, stages)
    return split_cases.run(split_cases.step(pipeline, handlers.Reference(), autodiff="eager"), case, params, state)


@pytest.mark.parametrize(("name", "stages"), EVERY)
def test_loss_and_gradients_are_the_unsplit_modules(name, stages):
    case, pipeline, *_ = split_cases.split(name, stages)
    assert len(pipeline.stages) == stages
    split_cases.check(expected(name, stages), case, pipeline)


@EACH
def test_every_schedule_gives_the_references_bits(name, stages):
    case, pipeline, params, state = split_cases.split(name, stages)
    local = sharing(handlers.Local(), "split", name, stages)
    for schedule in schedules_of(name, "local"):
        found = split_cases.run(split_cases.step(pipeline, local, schedule), case, params, state)
        assert differences(found, expected(name, stages)) == [], schedule


@EACH
def test_over_gloo(pools, name, stages):
    """A schedule on as many ranks as it takes: one is no pipeline, and left out."""
    case, *split = split_cases.split(name, stages)
    loss, grads, state = expected(name, stages)
    whole = (loss, grads, state) if state else (loss, grads)
    for ranks in (2, 4):
        chosen = [schedule for schedule in schedules_of(name, "gloo") if split_cases.ranks(schedule, stages) == ranks]
        given = ((name, stages), chosen, case.batch, case.target, *split, whole)
        assert not chosen or pools(ranks).run(split_jobs.steps, *given) == [[]] * ranks


STEPS = 20


@EACH
def test_training_ends_where_the_unsplit_modules_ends(pools, name, stages):
    case, *split = split_cases.split(name, stages)
    schedule = {2: "one_f_one_b", 4: "zb_v"}[stages]
    given = ((name, stages), schedule, case.batch, case.target, *split, STEPS)
    ranks = pools(2).run(split_jobs.train, *given)
    whole = trained(name)
    assert set().union(*ranks) == whole.keys()
    for found in ranks:
        for entry, x in found.items():
            torch.testing.assert_close(x, whole[entry], rtol=1e-9, atol=1e-9, msg=lambda t, e=entry: f"{e}: {t}")
    for entry in ranks[0].keys() & ranks[1].keys():
        assert same(ranks[0][entry], ranks[1][entry]), entry


@cache
def trained(name):
    """The state_dict of a module after steps of AdamW."""
    case = split_cases.made(name)
    case = replace(case, module=copy.deepcopy(case.module))
    adamw = torch.optim.AdamW(case.module.parameters(), lr=1e-2)
    for _ in range(STEPS):
        _, gradients, buffers = split_cases.unsplit(case, 2)
        for entry, gradient in gradients.items():
            case.module.get_parameter(entry).grad = gradient
        case.module.load_state_dict(buffers, strict=False)
        adamw.step()
    return case.module.state_dict()


@pytest.mark.parametrize("name", sample(split_cases.CASES, ("unet",)))
def test_in_float32(name):
    case, pipeline, params, state = split_cases.split(name, 4, torch.float32)
    found = split_cases.run(split_cases.step(pipeline, handlers.Local()), case, params, state)
    split_cases.check(found, case, pipeline, tolerance={"rtol": 1e-4, "atol": 1e-6})
