"""Sequence parallelism: activations cut along their tokens give the loss and the gradients of one process."""

import math
import re

import pytest
import torch
from torch.distributed.tensor import Partial, Shard

import fpipe
from fpipe import handlers, interop, schedules
from tests.support import sequence_jobs
from tests.support.combinations import ALL, few, one_in, sample, thorough
from tests.support.sequence_jobs import LENGTH, ROWS, WIDTH, by_hand, hand_made
from tests.support.tensor_jobs import unexpected

BLOCK = {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
COUNTS = {
    0: ({**BLOCK, "reduce_scatter_tensor": 3}, {**BLOCK, "all_gather_into_tensor": 3}),  # the embedding
    1: (BLOCK, BLOCK),
    2: (
        {**BLOCK, "all_gather_into_tensor": 3, "all_reduce": 3},  # the head; the cross entropy: three numbers a row
        {**BLOCK, "reduce_scatter_tensor": 3},
    ),
}


@pytest.mark.parametrize("policy", sample(["everything_saveable", "nothing_saveable"], ["nothing_saveable"]))
@thorough
def test_a_block_gathers_twice_and_scatters_twice_each_way_and_never_for_weights(pools, policy):
    """As Megatron-LM does. The gradients of norms, biases and positions are added once a step, not in pieces."""
    for counts, loss, gradients in pools(2).run(sequence_jobs.collectives, policy):
        assert unexpected(counts, COUNTS) == {}
        assert loss <= 1e-6
        assert gradients <= 1e-5


MESHES = [
    ((2, 2, 2), "zb_v", None, 0.25, LENGTH, "everything_saveable"),
    ((2, 1, 2), "gpipe", None, 0.25, LENGTH, "nothing_saveable"),
    ((2, 1, 2), "one_f_one_b", None, 0.0, 3, "everything_saveable"),
    ((1, 2, 2), "looped_bfs", 2, 0.25, LENGTH, "cheap"),
    ((2, 1, 2), "zb_v", None, 0.25, LENGTH, "dots_saveable"),
    ((1, 1, 4), "gpipe", None, 0.25, LENGTH, "everything_saveable"),
]


@pytest.mark.parametrize(
    ("shape", "name", "resident", "dropout", "length", "policy"),
    sample(MESHES, few([MESHES[1], MESHES[3]], slice(1))),
    ids=str,
)
def test_the_whole_mesh_computes_as_one_process(pools, shape, name, resident, dropout, length, policy):
    """With dropout, whose draws are those of one process. Edges carry pieces: 1/tp of the bytes from each process.

    Three tokens are not cut over two processes.
    """
    ranks, replicas, processes = shape
    sends = {"zb_v": 2}.get(name, ranks - 1)  # of a rank for a microbatch; the middle stages of zb_v are on one rank
    whole = ROWS // 4 * length * WIDTH * 4  # bytes of an activation, or gradient, of a microbatch
    count = (4 // replicas) * sends * whole // (processes if length % processes == 0 else 1)
    for loss, gradients, sent, alike in pools(math.prod(shape)).run(
        sequence_jobs.whole_mesh, *(shape, name, resident, dropout, length, policy), limit=240
    ):
        assert loss <= 1e-6
        assert gradients <= 1e-5
        assert sent == count
        assert alike


@thorough
def test_lengths_that_are_cut_and_lengths_that_are_not_go_together(pools):
    """The gradient of a norm is a part of a sum in one microbatch, and whole in the next."""
    for loss, gradients, outputs in pools(2).run(sequence_jobs.lengths):
        assert loss <= 1e-6
        assert gradients <= 1e-5
        assert outputs <= 1e-5


@one_in(2)
@pytest.mark.parametrize("dim", [None, 0])
def test_constrain_places_values_and_their_gradients(pools, dim):
    """As `sequence_parallel` does, whose tokens may come first."""
    gather, scatter = {"all_gather_into_tensor": 1}, {"reduce_scatter_tensor": 1}
    for counts, loss, gradients in pools(2).run(sequence_jobs.constrained, dim):
        assert counts[1, "forward"] == gather | scatter
        assert counts[1, "backward_input"] == gather | scatter
        assert counts[1, "backward_weight"] == {}
        assert loss <= 1e-6
        assert gradients <= 1e-5


def test_constrain_is_an_identity_where_nothing_is_placed():
    pipeline, params, x, y = hand_made()
    expected = torch.func.grad(lambda p: pipeline(p, x, y))(params)
    plan = pipeline.plan(fpipe.Placement.loop(ranks=3), microbatches=2)
    for options in {"autodiff": "graph"}, {"autodiff": "eager"}:
        step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local(), **options)
        _, grads = step(params, x, y)
        for stage, tree in expected.items():
            for name, gradient in tree.items():
                torch.testing.assert_close(grads[stage][name], gradient)
    assert by_hand(params[0], x).shape == x.shape


FAULTS = {
    "order": r"an input does not fit: it is piece [01] of 2 of \[4, 4, 8\] along dimension 1, and this process is "
    r"number [01] of the 2 over which .* have tensor-parallel meshes of one size, in one order",
    "plain": r"an input is piece [01] of 2 of \[4, 4, 8\] along dimension 1, and no param of this rank is a DTensor",
    "name": r"placements name 'dp', and the dimensions of .* are \['tp'\]",
}


@one_in(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_pieces_that_do_not_fit_are_one_error_on_all_processes(pools, fault):
    for text in pools(4).run(sequence_jobs.unfit, fault, limit=240):
        assert re.search(FAULTS[fault], text), text


def test_constrain_is_refused_where_a_graph_would_lose_it():
    class Module(torch.nn.Linear):
        def forward(self, x):
            return super().forward(fpipe.constrain(x, [Shard(0)]))

    with pytest.raises(fpipe.StageError, match="in a module that is exported, and the graph would lose it: make"):
        interop.split(Module(4, 4), stages=1, example=torch.ones(2, 4))
    with pytest.raises(ValueError, match="is a sum that is not added"):
        fpipe.constrain(torch.ones(2), {"tp": Partial()})


@pytest.mark.parametrize("dim", [2, -1])
def test_a_dimension_that_has_no_tokens_is_refused(dim):
    with pytest.raises(ValueError, match=r"activations are \[batch, tokens, width\]"):
        hand_made()[0].sequence_parallel(dim)


@pytest.mark.skipif(not ALL, reason="it takes 10 seconds to trace each")
@pytest.mark.parametrize("family", ["BERT", "GPT2", "Llama"])
def test_models_of_hugging_face_are_cut_unchanged(pools, family):
    """BERT normalises sums, and has a layer and a norm before its head."""
    for counts, loss, gradients in pools(2).run(sequence_jobs.transformer, family):
        if family != "BERT":
            assert [counts[stage, "forward"] for stage in (0, 1)] == [COUNTS[stage][0] for stage in (0, 2)]
            assert [counts[stage, "backward"] for stage in (0, 1)] == [COUNTS[stage][1] for stage in (0, 2)]
            assert counts[1, "backward_weight"] == {}
        assert loss <= 1e-6
        assert gradients <= 1e-5
