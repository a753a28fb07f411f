"""Profiles of slices, and the memory that they predict."""

from statistics import fmean

import pytest

import fpipe
from fpipe import Placement, handlers
from tests.support import cases
from tests.support.combinations import thorough


@pytest.mark.parametrize("schedule", ["seq-1f1b", "seq-zb"])
@thorough
def test_a_profile_predicts_bytes(schedule):
    """Within a tenth: a profile has the mean of slices, of which later ones keep more keys and values."""
    case = cases.built("causal", 3)
    plan = case.pipeline.plan(Placement.loop(3), 4, slices=case.slices)
    arguments, options = (case.params, case.batch, case.target), {"autodiff": "graph"}
    sizes = {"microbatches": 4, "slices": case.slices}
    costs = fpipe.profile(case.pipeline, *arguments, repeats=1, **sizes, **options)
    assert fmean(costs.slice_scale) == pytest.approx(1)
    assert len(costs.slice_scale) == case.slices
    assert min(costs.carry) >= 0 < max(costs.carry)
    live = fpipe.LiveBytes()
    step = fpipe.value_and_grad(case.pipeline, schedule, plan, handler=handlers.Local(), observe=live, **options)
    for _ in range(2):
        step(*arguments, rng=case.rng)
    live.run(step, *arguments, rng=case.rng)
    predicted = fpipe.verify(schedule, plan, costs=costs).peak_bytes
    assert [live.peak(rank) for rank in range(3)] == pytest.approx(predicted, rel=0.1)


def test_costs_without_slices_have_none():
    case = cases.built("linear", 2)
    costs = fpipe.profile(case.pipeline, case.params, case.batch, case.target, repeats=1)
    assert (costs.slice_scale, costs.carry) == ((), (0.0, 0.0))
