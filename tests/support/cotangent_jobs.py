"""Pipelines in which stages read many earlier ones, with cotangents by consumer and by rank."""

from __future__ import annotations

import functools

import torch

import fpipe
from fpipe import Output, Pipeline, Stage, handlers
from tests.support import cases
from tests.support.jobs import WAYS, differences, expected_on, handler
from tests.support.sharing import sharing


def every(stages):
    """Each stage reads all earlier ones."""

    def first(p, x):
        return torch.tanh(x @ p["w"])

    def layer(p, *outputs):
        return torch.tanh(sum(x * weight for x, weight in zip(outputs, p["depth"], strict=True)) @ p["w"])

    nodes = [Stage(first), *(Stage(layer, reads=[Output(t) for t in range(s)]) for s in range(1, stages))]
    params = {s: {"w": cases.randn(8, 8), "depth": cases.randn(max(s, 1), 8)} for s in range(stages)}
    return cases.Case(Pipeline(nodes, cases.mse), params, cases.randn(cases.ROWS, 8), cases.randn(cases.ROWS, 8))


CASES = {"every": every, "skip": cases.skip, "dictionary": cases.dictionary}
"""The last two have consumers that read parts of an output, and leaves without gradients."""


@functools.cache
def make(name, schedule, ranks, microbatches, cotangents="by_rank"):
    """(case, schedule, plan), the same in every process."""
    generator, place = cases.SCHEDULES[schedule]
    placement = place(ranks)
    torch.default_generator.manual_seed(0)
    case = CASES[name](placement.stages)
    case.pipeline = case.pipeline.replace(case.pipeline.stages, case.pipeline.loss, cotangents)
    return case, generator, case.pipeline.plan(placement, microbatches)


def train(rank, name, schedule, ranks, microbatches, way):
    """Two steps on this rank against the reference: where they differ."""
    case, generator, plan = make(name, schedule, ranks, microbatches)
    params, batch, target, _ = cases.own(case, plan, rank)
    expected = expected_on(cases.reference(case, generator, plan), params, plan, rank, False)
    own = sharing(handler(), "cotangents", name)
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=own, **WAYS[way])
    return [d for _ in range(2) for d in differences(step(params, batch, target), expected)]


def here(name, schedule, ranks, microbatches, way, **options):
    """The same in this process."""
    case, generator, plan = make(name, schedule, ranks, microbatches)
    own = sharing(handlers.Local(), "cotangents", name)
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=own, **WAYS[way], **options)
    expected = cases.reference(case, generator, plan)
    return [d for _ in range(3) for d in differences(step(case.params, case.batch, case.target), expected)]
