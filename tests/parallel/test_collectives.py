"""Collectives and their gradients, against one process that has the tensors of all."""

import pytest
import torch

from fpipe import parallel
from tests.support import parallel_jobs as jobs


def test_results_and_gradients_are_those_of_one_process(pools):
    ranks = pools(jobs.SIZE).run(jobs.collectives)
    for name, oracle in jobs.ORACLES.items():
        xs = [jobs.tensor_of(rank).requires_grad_() for rank in range(jobs.SIZE)]
        results = oracle(xs)
        loss = sum(jobs.objective(y, rank) for rank, y in enumerate(results))
        for rank, gradient in enumerate(torch.autograd.grad(loss, xs)):
            assert torch.allclose(ranks[rank][name][0], results[rank]), name
            assert torch.allclose(ranks[rank][name][1], gradient), name


def test_a_layer_whose_loss_is_the_same_on_all_processes(pools):
    for grads, expected in pools(jobs.SIZE).run(jobs.replicated):
        torch.testing.assert_close(grads, expected)


class Alone:
    group_name = "alone"

    def __init__(self, size):
        self.size = lambda: size


@pytest.mark.parametrize("group", [Alone(1), None], ids=["group", "none"])
def test_one_process_is_left_as_it_is(group):
    x = torch.arange(8.0)
    functions = (parallel.all_reduce, parallel.copy, parallel.all_gather, parallel.reduce_scatter, parallel.all_to_all)
    assert all(function(x, group) is x for function in (*functions, parallel.shift))
    assert parallel.shard_sequence(x, group, 0) is parallel.unshard_sequence(x, group, 0) is x
    assert parallel.positions(8, group).tolist() == [*range(8)]
    q, k, v = torch.randn(3, 2, 2, 5, 4).unbind()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert parallel.attention(q, k, v, group, is_causal=True).equal(expected)


@pytest.mark.parametrize("function", [parallel.reduce_scatter, parallel.all_to_all])
def test_a_dimension_without_equal_parts_is_an_error(function):
    with pytest.raises(ValueError, match=r"dimension 0 of a tensor of shape \[6\] can't be cut into 4 equal parts"):
        function(torch.arange(6.0), Alone(4))
