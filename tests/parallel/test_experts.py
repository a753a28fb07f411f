"""Mixtures of experts: the pure functions against closed forms, and spread over processes against one process."""

import re
from itertools import product

import pytest
import torch

from fpipe import parallel
from tests.support import expert_jobs
from tests.support.combinations import few, one_in, sample, thorough
from tests.support.replica_jobs import Grid


def values(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def dense(params, x, routing):
    """The definition: every expert computes every token."""
    outputs = expert_jobs.ffn(params, x.expand(len(params["up"]), *x.shape))
    tokens = torch.arange(len(x))
    choices = zip(routing.experts.T, routing.weights.T, strict=True)
    return sum(weight[:, None] * outputs[expert, tokens] for expert, weight in choices)


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("factor", [None, 5.0])
def test_without_drops_it_is_the_sum_of_the_chosen_experts(k, factor):
    leaves = [values(12, 4), values(5, 4, 6, seed=1), values(5, 6, 4, seed=2), values(4, 5, seed=3)]

    def run(function):
        x, up, down, router = own = [leaf.clone().requires_grad_() for leaf in leaves]
        y = function({"up": up, "down": down}, x, parallel.route(x @ router, k))
        return y.detach(), torch.autograd.grad((y * values(*y.shape, seed=4)).sum(), own)

    def mixture(params, x, routing):
        one = torch.func.vmap(lambda p, rows: (rows @ p["up"]).tanh() @ p["down"])  # of one expert
        x = x.view(3, 4, -1)
        return parallel.mixture_of_experts(one, params, x, routing, capacity_factor=factor).flatten(0, 1)

    # float64: the dense definition adds the experts of a token in another order
    torch.testing.assert_close(run(mixture), run(dense), rtol=1e-12, atol=1e-12)


def test_what_is_beyond_the_capacity_adds_nothing():
    """Of 4 tokens and 2 experts of 2 slots: first choices come before second ones, and tokens in their order.

    Experts 0 and 1 multiply by 1 and 10.
    """
    experts = torch.tensor([[0, 1], [0, 1], [0, 1], [1, 0]])
    routing = parallel.Routing(experts, torch.full((4, 2), 0.5), torch.full((4, 2), 0.5))
    x, factors = torch.arange(1.0, 5.0).view(4, 1).requires_grad_(), torch.tensor([1.0, 10.0]).view(2, 1, 1)
    # Expert 0: tokens 0 and 1. Expert 1: token 3, whose first choice it is, then token 0.
    y = parallel.mixture_of_experts(torch.mul, factors, x, routing, capacity_factor=0.5)
    assert y.flatten().tolist() == [5.5, 1.0, 0.0, 20.0]
    assert torch.autograd.grad(y.sum(), x)[0].flatten().tolist() == [5.5, 0.5, 0.0, 5.0]
    assert parallel.dropped(routing, 0.5) == 4 / 8
    assert parallel.dropped(routing, None) == 0


def test_the_balance_loss_is_one_if_uniform_and_the_number_of_experts_if_one_takes_all():
    assert parallel.balance_loss(parallel.route(torch.eye(4), k=1)) == 1
    assert parallel.balance_loss(parallel.route(torch.zeros(6, 4), k=4)) == 1
    logits = torch.tensor([[90.0, 0.0, 0.0]] * 5, requires_grad=True)
    assert parallel.balance_loss(parallel.route(logits, k=1)) == 3
    even = torch.zeros(5, 3, requires_grad=True)
    (slope,) = torch.autograd.grad(parallel.balance_loss(parallel.route(even, k=1)), even)
    chosen = parallel.route(even, k=1).experts[0, 0]
    assert (slope[:, chosen] > 0).all()  # it falls as the expert that has all tokens becomes less probable
    assert slope.sum(-1).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_router_computes_in_float32_or_wider(dtype):
    routing = parallel.route(torch.zeros(2, 3, 8, dtype=dtype), 2, renormalise=False)
    assert routing.probabilities.shape == (6, 8)
    assert routing.weights.dtype == torch.promote_types(dtype, torch.float32)
    assert routing.weights.unique().tolist() == [1 / 8]
    y = parallel.mixture_of_experts(torch.mul, torch.ones(8, 1, 4, dtype=dtype), torch.ones(6, 4, dtype=dtype), routing)
    assert y.dtype == dtype


@pytest.mark.parametrize(
    ("count", "k", "options", "message"),
    [
        (4, 5, {}, "k must be a whole number between 1 and the number of experts, 4, not 5"),
        (4, 1, {"capacity_factor": 0.0}, "capacity_factor must be positive and finite, or None to drop nothing, not 0"),
        (3, 1, {}, "params['down'] is of shape [4, 6, 4], and this process has 3 of the router's 3 experts"),
        (4, 1, {"tokens": 7}, "x has 7 tokens, and routing is of 8: route the same tokens"),
    ],
)
def test_what_does_not_fit_is_refused(count, k, options, message):
    x, params = values(8, 4), {"up": values(4, 4, 6), "down": values(4, 6, 4)}
    tokens = options.pop("tokens", 8)
    with pytest.raises(ValueError, match=re.escape(message)):
        parallel.mixture_of_experts(
            expert_jobs.ffn, params, x[:tokens], parallel.route(x @ values(4, count), k), **options
        )


# Over processes

SCHEDULES = ("one_f_one_b", "zb_v", "interleaved_zb", "dualpipe")
GRIDS = ("ep2 pp1", "ep2 pp2", "dp2 ep2 pp1", "ep2 dp2 pp1")


SUMS = ("exact", "inexact", "fsdp")
QUICK = [
    ("one_f_one_b", 1, None, "ep2 pp1", "exact", True),
    ("zb_v", 2, 0.75, "ep2 pp2", "exact", False),
    ("interleaved_zb", 2, None, "ep2 dp2 pp1", "fsdp", True),
    ("interleaved_zb", 1, 0.75, "dp2 ep2 pp1", "inexact", False),
]


def fits(schedule, k, factor, text, sums, masked):
    return (schedule != "dualpipe" or "pp2" in text) and (sums == "exact" or "dp2" in text)


ROWS = [row for row in product(SCHEDULES, (1, 2), (None, 0.75), GRIDS, SUMS, (False, True)) if fits(*row)]


@one_in(2)
@pytest.mark.parametrize(
    ("schedule", "k", "factor", "text", "sums", "masked"), sample(ROWS, few(QUICK, [QUICK[0], QUICK[2]]))
)
def test_experts_of_several_processes_are_those_of_one(pools, schedule, k, factor, text, sums, masked):
    """Loss to 1e-6, gradients to 1e-5, and the balance losses of each microbatch; with drops and without.

    A microbatch of a replica that weighs nothing has a part in the experts' gradients of the others' tokens.
    """
    grid = Grid(text)
    for loss, expected, worst, balance in pools(grid.size).run(
        expert_jobs.train, grid, schedule, k, factor, sums, masked
    ):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert worst < 1e-5
        assert balance < 1e-6


@thorough
def test_rows_of_a_batch_are_spread_too(pools):
    for loss, gradients in pools(4).run(expert_jobs.context, Grid("ep2 cp2 pp1")):
        assert abs(loss) < 1e-6  # losses are float32
        assert gradients < 1e-12


@thorough
def test_training_and_checkpoints_on_another_mesh(pools, tmp_path):
    """Params, momentum and norms are those of one process; what two save, each with its experts, two with all load."""
    assert max(pools(2).run(expert_jobs.train_and_save, Grid("ep2 pp1"), tmp_path)) < 1e-5
    assert max(pools(2).run(expert_jobs.load_and_train, Grid("dp2 ep1 pp1"), tmp_path)) < 1e-5


@thorough
def test_a_profile_has_the_experts_of_one_process(pools):
    (sizes, seconds), others = pools(2).run(expert_jobs.profiled, Grid("ep2 pp1"))
    assert (sizes, seconds) == others
    assert seconds > 0
    assert sizes == (4 * (4 * 4 + 4 + 2 * (4 * 6 + 6 * 4)),)  # a router, scales, and 2 experts


def test_other_numbers_of_tokens_are_an_error_on_every_rank(pools):
    (text, loss), others = pools(2).run(expert_jobs.unequal, Grid("ep2 pp1"))
    assert others == (text, loss)
    assert "its collectives over ranks [0, 1] differ" in text
    assert "is all_to_all_single(float32[5, 4]) in forward on rank 0, all_to_all_single(float32[4, 4])" in text


def test_a_step_that_one_replica_refuses_is_an_error_on_every_rank_before_they_compute(pools):
    """The forwards of the others would wait for its tokens."""
    results = pools(2).run(expert_jobs.refused, Grid("ep2 pp1"))
    for text, seconds, goes_on in results:
        assert "batch (float32[1, 5, 4]) has 1 row on axis 0: too few for 4 microbatches" in text
        assert seconds < 15  # of 30 that a collective would wait
        assert goes_on


def test_what_can_not_run_is_refused_on_every_rank(pools):
    for lacks_experts, unequal, no_replicas, uneven in pools(2).run(expert_jobs.refusals, Grid("ep2 pp1")):
        assert "make the handler with experts='ep' instead" in lacks_experts
        assert "float32[3, 4, 6]" in unequal or "float32[3, 6, 4]" in unequal
        assert "over 2 processes, which don't divide its dimension 0: take a multiple of 2 experts" in unequal
        assert "experts='pp' is no dimension of the replicas, ['ep']" in no_replicas
        assert "3 experts can't be spread over 2 processes in equal numbers" in uneven
