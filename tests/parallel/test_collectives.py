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


def test_one_process_is_left_as_it_is():
    x = torch.arange(6.0)
    functions = (parallel.all_reduce, parallel.copy, parallel.all_gather, parallel.reduce_scatter, parallel.all_to_all)
    assert all(function(x, Alone(1)) is x for function in (*functions, parallel.shift))


@pytest.mark.parametrize("function", [parallel.reduce_scatter, parallel.all_to_all])
def test_a_dimension_without_equal_parts_is_an_error(function):
    with pytest.raises(ValueError, match=r"dimension 0 of a tensor of shape \[6\] can't be cut into 4 equal parts"):
        function(torch.arange(6.0), Alone(4))
