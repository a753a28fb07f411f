"""Every schedule trains the example's GPT, with the reference's bits."""

from functools import cache

import pytest
import torch

from examples import train_gpt as example
from fpipe import handlers, interop
from fpipe.schedules import CATALOGUE
from tests.support import jobs
from tests.support.combinations import combined, sample
from tests.support.sharing import sharing

ROWS, CONTEXT = 2, 16  # of a microbatch, however many there are: all have the same graphs


@cache
def pipelines():
    """(pipeline, params) by the number of stages, each of one layer."""
    torch.manual_seed(0)
    models = {stages: example.GPT(layers=stages, width=32, context=CONTEXT, dropout=0.1) for stages in (2, 4, 8)}
    options = {"example": torch.zeros(ROWS, CONTEXT, dtype=torch.uint8), "loss": example.cross_entropy}
    return {n: interop.split(model, at=example.cuts(model, n), **options) for n, model in models.items()}


@cache
def data(m):
    """Two batches."""
    torch.manual_seed(0)
    text = torch.randint(256, (500,), dtype=torch.uint8)
    return [example.windows(text, ROWS * m, CONTEXT, seed=seed) for seed in range(2)]


UNSLICED = example.SCHEDULES
"""The example's stages carry nothing from slice to slice."""


@cache
def expected(plan):
    own = (*pipelines()[plan.stages], data(plan.microbatches))
    return jobs.gpt_steps(handlers.Reference(), "gpipe", plan, *own, autodiff="eager")


@combined(name=UNSLICED, ranks=sample((2, 4), (2,)), m=sample((4, 12), (4,)))
def test_local(name, m, ranks):
    plan = CATALOGUE[name].plan(ranks, m)
    local = sharing(handlers.Local(), "gpt", plan.stages)
    found = jobs.gpt_steps(local, name, plan, *pipelines()[plan.stages], data(m))
    assert jobs.differences(found, expected(plan)) == []


@pytest.mark.parametrize(("ranks", "m"), sample([(2, 12), (2, 4), (4, 4)], [(4, 4)]))
def test_gloo(pools, m, ranks):
    """In one job, so that what is trained is sent once. By default one schedule."""
    names = sample(UNSLICED, ["1f1b"])
    plans = {CATALOGUE[name].plan(ranks, m) for name in names}
    arguments = (pipelines(), data(m), {plan: expected(plan) for plan in plans})
    assert pools(ranks).run(jobs.train_gpt, names, ranks, m, *arguments, limit=300) == [[]] * ranks
