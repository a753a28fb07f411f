"""Functions of fpipe.parallel over one dimension of a mesh go together with tensor parallelism over another one."""

import re

import pytest

from tests.support import placed_jobs
from tests.support.combinations import thorough

CASES = [(name, 1, name in ("one key", "experts")) for name in placed_jobs.MODELS]
LARGE = [(name, 2, sequence) for name in ("attention", "experts") for sequence in (False, True)]


@pytest.mark.parametrize(
    ("name", "ranks", "sequence"), [*CASES, *(pytest.param(*case, marks=thorough) for case in LARGE)], ids=str
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
