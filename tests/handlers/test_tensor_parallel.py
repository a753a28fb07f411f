"""Tensor parallelism: leaves that are DTensors on mesh["tp"] give the loss and the gradients of one process."""

import math

import pytest

from tests.support import tensor_jobs

BLOCK = {"all_reduce": 2}
COUNTS = {
    0: ({"all_reduce": 3}, {"all_reduce": 2}),  # the embedding
    1: (BLOCK, BLOCK),
    2: (BLOCK, BLOCK),
    3: ({"all_reduce": 5}, {"all_reduce": 3}),  # the cross entropy: three numbers a row; the head's input gradient
}


@pytest.mark.parametrize(
    ("name", "policy"), [("looped_bfs", "everything_saveable"), ("zb_v", "nothing_saveable")], ids=str
)
def test_a_block_adds_twice_forward_twice_backward_and_never_for_weights(pools, name, policy):
    """As Megatron-LM does. Rematerialisation repeats no collective."""
    for counts, loss, gradients, alike in pools(2).run(tensor_jobs.collectives, name, policy):
        for stage, (forward, backward) in COUNTS.items():
            assert counts[stage, "prepare"] == {}
            assert counts[stage, "forward"] == forward
            assert counts[stage, "backward"] == backward
            assert counts[stage, "backward_input"] == (backward if stage else {})  # stage 0 has no input gradients
            assert counts[stage, "backward_weight"] == ({} if stage else backward)
        assert loss <= 1e-6
        assert gradients <= 1e-5
        assert alike


@pytest.mark.parametrize(
    ("shape", "name", "resident", "dropout"),
    [
        ((2, 2, 2), "zb_v", None, 0.0),
        ((2, 2, 2), "looped_bfs", 1, 0.25),
        ((2, 2, 2), "one_f_one_b", None, 0.25),
        ((1, 1, 4), "gpipe", None, 0.25),
        ((2, 1, 2), "dualpipe_v", None, 0.0),
        ((1, 2, 2), "looped_bfs", 2, 0.0),
    ],
    ids=str,
)
def test_the_whole_mesh_trains_as_one_process(pools, shape, name, resident, dropout):
    """Losses, gradients and the norm, over stages, replicas and pieces; with fsdp, leaves are cut over both."""
    for first, fifth, gradients, norm, alike in pools(math.prod(shape)).run(
        tensor_jobs.three_dimensions, shape, name, resident, dropout, limit=240
    ):
        assert first <= 1e-6
        assert fifth <= 1e-4
        assert gradients <= 1e-5
        assert norm <= 1e-6
        assert alike
