"""Tensor parallelism: leaves that are DTensors on mesh["tp"] give the loss and the gradients of one process."""

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
