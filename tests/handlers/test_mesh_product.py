"""Every model under every schedule on every mesh trains as one process does."""

import math
from itertools import product

import pytest

from tests.support import mesh_jobs
from tests.support.combinations import sample

SCHEDULES = ("gpipe", "one_f_one_b", "zb_v", "looped_bfs", "dualpipe_v")
SHAPES = ((2, 2, 2), (1, 1, 4), (2, 1, 2))  # ranks of a pipeline, replicas, and processes that compute a stage together
ROWS = [*product(mesh_jobs.MODELS, SCHEDULES, SHAPES)]
QUICK = [("blocks", "looped_bfs", (2, 2, 2)), ("blocks", "dualpipe_v", (2, 1, 2))]


@pytest.mark.parametrize(("model", "schedule", "shape"), sample(ROWS, QUICK), ids=str)
def test_the_whole_mesh_trains_as_one_process(pools, model, schedule, shape):
    """Losses, gradients and their norm, with dropout where the model has it, within rounding."""
    for first, fifth, gradients, norm, alike in pools(math.prod(shape)).run(
        mesh_jobs.train, model, schedule, shape, limit=400
    ):
        assert first <= 1e-6
        assert fifth <= 1e-4
        assert max(gradients.values()) <= 1e-5
        assert norm <= 1e-6
        assert alike
