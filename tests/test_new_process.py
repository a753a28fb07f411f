"""What only a new process shows, in one: to import torch takes seconds."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.combinations import thorough

pytestmark = thorough

SCRIPT = """
import gc, json, sys
import torch
import fpipe
from fpipe import Pipeline, Placement, handlers, interop, schedules
from fpipe.stages.sharding import is_dtensor, locals_of, wrapped

found = {"load": interop.transformers.load.__name__, "transformers": "transformers" in sys.modules}
pipeline = Pipeline([lambda p, x: x * p["w"]] * 2, lambda y, t: (y - t).sum())
params, own = {s: {"w": torch.ones(2)} for s in range(2)}, handlers.Local()
plan = pipeline.plan(Placement.loop(2), 1)
step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=own, autodiff="eager")
_, grads = step(params, torch.ones(1, 2), torch.ones(1, 2))
grads, _ = fpipe.clip_by_global_norm(grads, 1.0, plan, handler=own)
wrapped(locals_of(params), params)
found["dtensors"] = [is_dtensor(params[0]["w"]), "torch.distributed.tensor" in sys.modules]
del grads, params, step

from torch._subclasses.fake_tensor import FakeTensor
pipeline = Pipeline([lambda p, x: torch.tanh(x @ p)] * 2, loss=lambda y, t: (y - t).square().mean())
step = fpipe.value_and_grad(pipeline, schedules.gpipe, pipeline.plan(Placement.loop(2), 2), handler=own)
params, x = {0: torch.eye(4), 1: torch.eye(4)}, torch.ones(6, 4)
gc.collect()
gc.freeze()
gc.disable()
results = step(params, x, x)
tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and not isinstance(x, FakeTensor)]
found["shapes"] = sorted(list(x.shape) for x in tensors)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def shown():
    """(what the script found, the lines of its log)."""
    environment = {**os.environ, "FPIPE_LOG": "effects"}
    ended = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    return json.loads(ended.stdout), ended.stderr.splitlines()


def test_transformers_is_found_in_interop_before_it_is_needed(shown):
    found, _ = shown
    assert (found["load"], found["transformers"]) == ("load", False)


def test_nothing_imports_dtensors_until_somebody_does(shown):
    """torch itself does where it traces a stage, and where it makes an optimizer."""
    found, _ = shown
    assert found["dtensors"] == [False, False]


def test_the_first_traced_step_of_a_process_leaves_no_real_tensor(shown):
    found, _ = shown
    assert found["shapes"] == [[], [4, 4], [4, 4]]


def test_the_log_of_effects_has_rank_and_time(shown):
    _, lines = shown
    assert len(lines) == 10 + 18  # of a step with one microbatch, and of one with two
    assert all(line.startswith("fpipe.effects") and " ms " in line for line in lines)
    assert sum("rank 1  Backward(stage=1, microbatch=0)" in line for line in lines) == 2
