"""Profiles of slices, and the memory that they predict."""

import math
from array import array
from dataclasses import replace
from itertools import product
from statistics import median

import pytest

import fpipe
from fpipe import Placement, Plan, handlers
from fpipe.effects import Backward, Forward, Recompute
from fpipe.handlers.protocol import Observer
from fpipe.tensorboard.recording.memory import SlotMemory
from fpipe.timelines.measurement import Columns, Measurement
from tests.support import cases, live_jobs
from tests.support.combinations import few, thorough


@thorough
@pytest.mark.parametrize("name", ["seq_1f1b", "seq_zb"])
def test_each_rank_holds_what_a_profile_of_its_slices_predicts(pools, name):
    for measured, predicted, difference in pools(2).run(live_jobs.held_in_slices, name, 2, 3):
        assert measured == pytest.approx(predicted, rel=0.01)
        assert difference < 0.02 * predicted  # live losses


class Owners(Observer):
    """Measures the bytes in a rank's slots by owner."""

    def __init__(self, program):
        self.program = program

    def on_store(self, rank, store):
        self.memory = SlotMemory(self.program, store)

    def begin(self, rank, effect):
        self.memory.begin(effect)

    def end(self, rank, effect):
        self.memory.end(effect)


@pytest.mark.parametrize("policy", few(["everything", "cheap", "nothing"], ["everything"]))
def test_each_owner_has_what_a_profile_of_slices_predicts(policy):
    pipeline, params, batch, target, costs = live_jobs.made("causal", 2, 4, policy, slices=3)
    plan = pipeline.plan(Placement.loop(1, chunks=2), 4, slices=3)
    measured = Owners(fpipe.lower("gpipe", plan)[0])
    options = {"handler": handlers.Local(), "autodiff": "graph", "policy": live_jobs.POLICIES[policy]}
    fpipe.value_and_grad(pipeline, "gpipe", plan, observe=measured, **options)(params, batch, target)
    owners = {name: size for name, size in measured.memory.owners.items() if name != "sums of gradients"}
    predicted = fpipe.simulate("gpipe", plan, costs).owners(0)
    predicted.pop("sums of gradients", None)
    assert owners == pytest.approx(predicted, abs=4 * 16)  # losses
    assert {"residuals", "prepared"} <= set(owners)


def test_a_profile_has_the_factors_of_each_slice():
    """Of a slice's keys and values as many times those of the first one as its number; the last passes none on."""
    *_, costs = live_jobs.made("causal", 2, 4, "everything", slices=3)
    scale = costs.slice_scale
    assert {"forward", "backward", "backward_input", "backward_weight", "residuals", "carry"} <= set(scale)
    sizes = [costs.carry[1] * factor for factor in scale["carry"][1]]
    slice_bytes = 2 * 16 * live_jobs.WIDTH * 4  # keys and values
    assert sizes[1:] == pytest.approx([2 * slice_bytes, 0])
    # A view of the gradient of all keys and values that the next slice reads.
    sizes = [costs.carry_gradient[1] * factor for factor in scale["carry_gradient"][1]]
    assert sizes == pytest.approx([2 * slice_bytes, 3 * slice_bytes, 0])
    for factors in scale["residuals"]:
        assert [*factors] == sorted(factors)
    masks = 4 * 16 * (16 + 32 + 48)
    assert costs.prepared == (masks, masks)


def test_a_measurement_has_the_times_of_each_slice():
    pipeline, params, batch, target, _ = live_jobs.made("causal", 2, 4, "everything", slices=3)
    plan = pipeline.plan(Placement.loop(2), 4, slices=3)
    recording = fpipe.Recording(fpipe.lower("seq-1f1b", plan))
    options = {"handler": handlers.Local(), "autodiff": "graph", "observe": recording}
    fpipe.value_and_grad(pipeline, "seq-1f1b", plan, **options)(params, batch, target)
    measurement = recording.measurement()
    costs, spans = measurement.costs(), [span for rank in (0, 1) for span in measurement.timeline().compute(rank)]
    for kind, cost in ((Forward, costs.forward), (Backward, costs.backward)):
        for s, t in product(range(2), range(3)):
            of_slice = [x.end - x.start for x in spans if x.effect in {kind(s, m, t) for m in range(4)}]
            assert costs.time(kind(s, 0, t)) == pytest.approx(median(of_slice))
        assert len(set(cost)) == 2
    assert costs.slice_scale["backward_input"] == ((1.0,) * 3,) * 2  # none ran


def test_a_measurement_has_the_times_of_each_slice_that_runs_again():
    plan = Plan(Placement.loop(1), 2, slices=2)
    ((rank, program),) = fpipe.lower("gpipe", plan).items()
    again = [Recompute(0, m, t) for m in range(2) for t in range(2)]
    effects = (*program, *again)
    took = [1 + 2 * effect.slice if effect in again else 1 for effect in effects]
    starts, nan = array("d", range(0, 4 * len(effects), 4)), array("d", [math.nan]) * len(effects)
    columns = Columns(starts, array("d", map(sum, zip(starts, took, strict=True))), nan, nan)
    costs = Measurement({rank: replace(program, effects=effects)}, {rank: columns}).costs()
    assert [costs.time(effect) for effect in again] == [1, 3, 1, 3]


def test_costs_without_slices_have_none():
    case = cases.built("linear", 2)
    costs = fpipe.profile(case.pipeline, case.params, case.batch, case.target, repeats=1)
    assert (costs.slice_scale, costs.carry, costs.prepared) == ((), (0.0, 0.0), (0.0, 0.0))
