"""A forward writes its new state into the memory of the old one where that is given up, and only there."""

import pytest
import torch

from fpipe import Stage
from fpipe.autodiff.traced import Traced
from fpipe.stages.microbatch import Microbatch
from fpipe.stages.stage import Batch

AT = torch.tensor([1])


def placed(p, state, x):
    return p * x, state.index_copy(0, AT.clone(), x)


def scattered(p, state, x):
    return p * x, state.scatter(0, torch.ones_like(x, dtype=torch.int64), x)


def indexed(p, state, x):
    return p * x, state.index_put((torch.ones(1, dtype=torch.int64),), x)


def read_before(p, state, x):
    total = state.sum(0)
    return p * total, state.index_copy(0, AT.clone(), x)


def read_later(p, state, x):
    new = state.index_copy(0, AT.clone(), x)
    return p * (new - state).sum(0), new


def returned(p, state, x):
    return state, state.index_copy(0, AT.clone(), x)


def run(function, donated):
    """(output, the new state, the old state afterwards, whether they are one memory)."""
    stage = Stage(function, [Batch()], stateful=True)
    traced = Traced(stage, donated=donated, fallback=False)
    old = torch.arange(6.0).reshape(3, 2).clone()
    prepared, data = traced.prepare(torch.tensor(2.0)), Microbatch(torch.full((1, 2), 9.0), None)
    with torch.no_grad():
        output, _, new = traced.forward(prepared, old, {}, data, False)
    return output.tree, new, old, new.data_ptr() == old.data_ptr()


@pytest.mark.parametrize("function", [placed, scattered, indexed, read_before, read_later, returned])
def test_results_are_those_of_new_memory(function):
    output, new, old, is_shared = run(function, donated=False)
    assert not is_shared
    assert torch.equal(old, torch.arange(6.0).reshape(3, 2))
    again, in_place, _, is_shared = run(function, donated=True)
    assert is_shared == (function not in (read_later, returned))
    assert torch.equal(again, output)
    assert torch.equal(in_place, new)
