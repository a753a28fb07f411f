"""Observers of a generation: each effect is recorded, and measured costs simulate the program that was recorded."""

import json
from dataclasses import replace

import pytest
import torch

import fpipe
from fpipe import Costs, Placement, Plan, Recording, autoregressive, handlers, lower, simulate
from fpipe.effects import Decode, Prefill
from tests.support.combinations import combined
from tests.support.generate_jobs import PROMPTS, cut, language_model, observed

NEW, LONGEST = 4, 5
PLACED = Placement([0, 0, 1, 1])


class Clock:
    """Seconds that pass in stages alone: of stage s, s + 1 for each token of a prompt."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def timed(self, number, stage):
        def fn(params, *args):
            tokens = args[stage.stateful]  # the first input, after the cache
            self.now += (number + 1) * tokens.shape[1]
            return stage.fn(params, *args)

        return replace(stage, fn=fn)


def recorded(ranks, slices):
    """The program's plan, and the recording of a generation on a clock."""
    pipeline, params = language_model(2)
    clock = Clock()
    pipeline = pipeline.replace([clock.timed(s, stage) for s, stage in enumerate(pipeline.stages)], None)
    plan = pipeline.plan(cut(pipeline, ranks), 4)
    program = replace(plan, tokens=NEW + slices - 1, prefills=slices)
    recording = Recording(lower(autoregressive, program), clock)
    options = {"max_new_tokens": NEW, "eos_token_id": (), "prompt_slices": slices, "autodiff": "eager"}
    fpipe.generate(pipeline, params, PROMPTS, plan, handler=handlers.Local(), observe=recording, **options)
    return program, recording


@combined(ranks=[1, 2, 4], slices=[1, 2])
def test_measured_costs_simulate_the_program_that_was_recorded(ranks, slices):
    plan, recording = recorded(ranks, slices)
    measurement = recording.measurement()
    costs = measurement.costs()
    assert costs.prefill == tuple(LONGEST / slices * each for each in (1, 2, 3, 4))
    assert costs.decode == (1, 2, 3, 4)
    assert simulate(autoregressive, plan, costs).busy == [measurement.account(rank).compute for rank in range(ranks)]
    assert Costs.from_json(json.loads(json.dumps(costs.as_json()))) == costs


def test_prefill_and_decode_cost_a_forward_by_default():
    costs = Costs(forward=[2, 3], scale=[1, 10])
    assert [costs.time(kind(1, 1, 0)) for kind in (Prefill, Decode)] == [30, 30]
    costs = replace(costs, prefill=[5, 7], decode=1)
    assert [costs.time(kind(1, 1, 0)) for kind in (Prefill, Decode)] == [70, 10]
    assert costs.as_json() == {**Costs(forward=[2, 3], scale=[1, 10]).as_json(), "prefill": [5, 7], "decode": 1}


def test_a_recording_over_gloo_has_every_effect_and_changes_no_token(pools):
    expected = lower(autoregressive, Plan(PLACED, 4, tokens=NEW))
    pieces = {rank: [effect for effect in p if isinstance(effect, Prefill | Decode)] for rank, p in expected.items()}
    for plain, tokens, measurement in pools(2).run(observed, NEW):
        assert torch.equal(tokens, plain)
        line = measurement.timeline()
        assert {rank: [span.effect for span in line.compute(rank)] for rank in pieces} == pieces
        assert all(receive.arrived >= receive.sent for rank in pieces for receive in measurement.receives(rank))
        assert all(seconds > 0 for seconds in (*measurement.costs().prefill, *measurement.costs().decode))


def test_a_program_that_is_not_the_only_one_is_not_observed():
    pipeline, _ = language_model(2)
    plan = pipeline.plan(PLACED, 4)
    recording = Recording(lower(autoregressive, replace(plan, tokens=NEW)))
    options = {"max_new_tokens": NEW, "tokens_per_program": 2, "observe": recording}
    with pytest.raises(ValueError, match="4 tokens are 2 of 2 or less: pass tokens_per_program=max_new_tokens"):
        fpipe.generator(pipeline, plan, handler=handlers.Local(), **options)
