"""Every model under every schedule on every mesh trains as one process does."""

import math
from itertools import product

import pytest
import torch
from torch import fx

from fpipe.autodiff.graph.collectives import is_post, overlapped
from tests.support import mesh_jobs
from tests.support.combinations import sample, thorough

SCHEDULES = ("gpipe", "one_f_one_b", "zb_v", "looped_bfs", "dualpipe_v")
SHAPES = ((2, 2, 2), (1, 1, 4), (2, 1, 2))  # ranks of a pipeline, replicas, and processes that compute a stage together
ROWS = [*product(mesh_jobs.MODELS, SCHEDULES, SHAPES)]
REPLICAS = ("blocks", "looped_bfs", (1, 2, 2))
QUICK = [REPLICAS, ("blocks", "dualpipe_v", (2, 1, 2)), ("blocks", "looped_bfs", (2, 2, 2))]


@thorough
@pytest.mark.parametrize(("model", "schedule", "shape"), sample([REPLICAS, *ROWS], QUICK), ids=str)
def test_the_whole_mesh_trains_as_one_process(pools, model, schedule, shape):
    """Losses, gradients and their norm, with dropout where the model has it, within rounding."""
    for first, fifth, gradients, norm, alike in pools(math.prod(shape)).run(
        mesh_jobs.train, model, schedule, shape, limit=400
    ):
        assert first <= 1e-6
        assert fifth <= 1e-4
        assert all(error <= 1e-5 for error in gradients.values())  # false for NaN, over which max may pass
        assert norm <= 1e-6
        assert alike


def test_the_pad_of_an_uneven_piece_does_not_change_the_order_of_collectives():
    """The last process pads its piece before a gather, and the others do not."""

    def order(is_padded):
        graph = fx.Graph()
        x = graph.placeholder("x")
        gradient, other = (graph.call_function(torch.ops.aten.relu.default, (x,)) for _ in range(2))
        graph.call_function(torch.ops._c10d_functional.all_reduce.default, (other, "sum", "0"))
        if is_padded:
            gradient = graph.call_function(torch.ops.aten.constant_pad_nd.default, (gradient, [0, 2]))
        graph.call_function(torch.ops._c10d_functional.all_gather_into_tensor.default, (gradient, 4, "0"))
        return [node.target for node in overlapped([*graph.nodes]) if is_post(node.target)]

    assert len(order(False)) == 2
    assert order(True) == order(False)
