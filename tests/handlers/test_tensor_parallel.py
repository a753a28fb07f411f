"""Tensor parallelism: leaves that are DTensors on mesh["tp"] give the loss and the gradients of one process."""

import re

import pytest

from tests.support import tensor_jobs
from tests.support.combinations import few

BLOCK = {"all_reduce": 2}
COUNTS = {
    0: ({"all_reduce": 3}, {"all_reduce": 2}),  # the embedding
    1: (BLOCK, BLOCK),
    2: (BLOCK, BLOCK),
    3: ({"all_reduce": 5}, {"all_reduce": 3}),  # the cross entropy: three numbers a row; the head's input gradient
}


@pytest.mark.parametrize(
    ("name", "policy"),
    few([("zb_v", "nothing_saveable"), ("looped_bfs", "everything_saveable")], slice(1)),
    ids=str,
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


def test_the_fused_layer_of_gpt2_is_cut_by_head(pools):
    """Unchanged, with its dropout, its tied head and its layers of [in, out]: it gathers nothing."""
    for counts, loss, gradients in pools(2).run(tensor_jobs.gpt2):
        assert [counts[stage, "forward"] for stage in (0, 1)] == [{"all_reduce": 3}, {"all_reduce": 5}]
        assert [counts[stage, "backward"] for stage in (0, 1)] == [{"all_reduce": 2}, {"all_reduce": 3}]
        assert counts[1, "backward_weight"] == {}
        assert loss <= 1e-6
        assert gradients <= 1e-5


TOGETHER = r"rank 0: processes \[0, 1\] compute stages together and were given different arguments: "
FAULTS = {
    "batch": TOGETHER + r"batch of microbatch 0 is int64\[4, 5\] with values of digest \w+ on process 0 and int64",
    "rng": TOGETHER + r"rng is \(0, 1\) on process 0 and \(0, 2\) on process 1\. They take",
    "placement": TOGETHER
    + r"params\[0\]\['block.gate_proj.weight'\] is \[12, 8\] placed \(Shard\(dim=0\),\) on process 0 and \[12, 8\]",
    "eager": r"rank 0, stage 0: its params have DTensors over a dimension of tensor parallelism, .*: leave autodiff=",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_one_error_on_all_processes(pools, fault):
    for text in pools(2).run(tensor_jobs.wrong, fault):
        assert re.match(FAULTS[fault], text), text


@pytest.mark.parametrize("options", [{"heads": 2}, {"post": True}], ids=str)
def test_other_models_are_right(pools, options):
    """DTensor gathers one head of keys and values, which two processes don't divide.

    After a layer that normalises its sum, gradients of both terms meet: what is whole, and parts of three products.
    """
    for loss, gradients, counts in pools(2).run(tensor_jobs.other_models, options):
        assert loss <= 1e-6
        assert gradients <= 1e-5
        if "post" in options:
            assert counts[1, "backward_input"] == {"all_reduce": 3}
            assert counts[1, "backward_weight"] == {}


def test_pieces_are_made_and_go_from_one_mesh_into_another(pools, tmp_path):
    assert pools(4).run(tensor_jobs.stored, str(tmp_path)) == [([[], [], []], [], True)] * 4
