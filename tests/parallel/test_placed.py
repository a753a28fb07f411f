"""Functions of fpipe.parallel over one dimension of a mesh go together with tensor parallelism over another one."""

import re

import pytest
import torch
from torch.distributed.tensor import Shard

import fpipe
from fpipe import interop, parallel
from tests.support import placed_jobs
from tests.support.combinations import few, thorough

CASES = [(name, 1, name in ("one key", "experts")) for name in placed_jobs.MODELS]
LARGE = [(name, 2, sequence) for name in ("attention", "experts") for sequence in (False, True)]


@pytest.mark.parametrize(
    ("name", "ranks", "sequence"),
    [*few(CASES, slice(1)), *(pytest.param(*case, marks=thorough) for case in LARGE)],
    ids=str,
)
def test_values_that_other_processes_place_travel_as_pieces(pools, name, ranks, sequence):
    """Loss and gradients are those of the same processes without tensor parallelism, whose oracle is one process.

    Attention by head, where the processes divide the heads of the keys or not; experts that are cut too.
    """
    for loss, gradients in pools(4 * ranks).run(placed_jobs.placed, name, ranks, sequence):
        assert loss <= 1e-6
        assert gradients <= 1e-5


def test_a_collective_over_the_processes_that_place_its_tensor_is_refused(pools):
    for text in pools(2).run(placed_jobs.misplaced):
        assert re.search(r"a tensor is placed over .*, and group has processes \[[01]\] of it: its op", text)


X, ROUTING = torch.ones(3, 2), parallel.route(torch.eye(3), 1)
WRONG = {
    "group": (lambda: parallel.all_reduce(X, "tp"), TypeError, r"group must be a process group, .*, not 'tp'"),
    "k": (
        lambda: parallel.route(X, 1.5),
        ValueError,
        "k must be a whole number between 1 and the nu",
    ),
    "capacity": (
        lambda: parallel.dropped(ROUTING, float("inf")),
        ValueError,
        "must be positive and finite",
    ),
    "outputs": (
        lambda: parallel.mixture_of_experts(lambda p, x: x[:1], None, X, ROUTING),
        ValueError,
        r"function returned a tensor of shape \[1, 2, 2\] for inputs of shape \[3, 2, 2\]: it must be",
    ),
    "placements": (lambda: fpipe.constrain(X, Shard(1)), TypeError, r"placements must be one for each dimension, as"),
    "names": (lambda: interop.styles.megatron("q_proj"), TypeError, r"column must be names .*, not 'q_proj'"),
}


@pytest.mark.parametrize("argument", WRONG)
def test_a_wrong_argument_is_named(argument):
    call, error, text = WRONG[argument]
    with pytest.raises(error, match=text):
        call()


def test_a_mixture_of_no_tokens_has_none():
    routing = parallel.route(torch.ones(0, 3), 2)
    assert parallel.mixture_of_experts(lambda p, x: x, None, torch.ones(0, 2), routing).shape == (0, 2)
