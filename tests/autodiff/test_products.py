"""Gradients of products, which torch computes in two ways, with or without zeros: a trace has the bits of both."""

import pytest
import torch

import fpipe
from fpipe import Pipeline, Placement, handlers, policies, schedules
from tests.support.jobs import differences

PRODUCTS = [
    torch.prod,
    lambda x: torch.prod(x, dim=0, keepdim=True),
    lambda x: x.mT.prod(1),
    lambda x: torch.ops.aten.prod.dim_int(x, -1),
    lambda x: torch.complex(x, x.flip(0)).prod(-1).abs(),
    lambda x: x.bfloat16().prod(1, dtype=torch.float32),
    lambda x: (x.prod(-1, keepdim=True) * x).prod(0),
]


def second(x):
    """A gradient that is differentiated again."""
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(x.prod(-1).sum(), x, create_graph=True)
    return slope


def step_of(handler, function, **options):
    pipeline = Pipeline([lambda p, x: function(x * p)], loss=lambda y, target: (y * target).abs().mean())
    plan = pipeline.plan(Placement.loop(1), 1)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handler, in_axes=None, **options)
    return lambda factors: step({0: factors.view(3, 4, 5)}, torch.ones(3, 4, 5), torch.tensor(2.0))


def values(zeros):
    factors = torch.randn(60, generator=torch.Generator().manual_seed(zeros)).exp()
    factors[:zeros] = 0.0
    return factors


@pytest.mark.parametrize("function", PRODUCTS)
def test_bits(function):
    reference = step_of(handlers.Reference(), function)
    traced = step_of(handlers.Local(), function, autodiff="graph", policy=policies.nothing_saveable)
    for zeros in (0, 1, 5):
        assert differences(traced(values(zeros)), reference(values(zeros))) == []


def test_a_product_is_differentiated_twice():
    reference, traced = step_of(handlers.Reference(), second), step_of(handlers.Local(), second, autodiff="graph")
    torch.testing.assert_close(traced(values(0)), reference(values(0)))
