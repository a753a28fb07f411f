"""Context parallelism: loss, gradients and outputs are those of one process that has the whole sequence."""

import re

import torch

from tests.support import context_jobs as jobs
from tests.support.combinations import combined, few, one_in
from tests.support.replica_jobs import Grid

MESHES = ("pp1 cp2", "pp2 cp2", "pp1 dp2 cp2")


def fits(text, schedule, **_):
    return (schedule == "1f1b") == (text != "pp1 cp2") or schedule in ("zb-v", "gpipe")


@one_in(3)
@combined(
    text=few(MESHES, slice(2)),
    schedule=("gpipe", "1f1b", "zb-v"),
    is_causal=(True, False),
    ring=(False, True),
    heads=(2, 1),
    weighed=(False, True),
)
def test_a_step_is_that_of_one_process(pools, text, schedule, is_causal, ring, heads, weighed):
    chunks = 2 if schedule == "zb-v" else 1
    arguments = text, schedule, chunks, is_causal, ring, heads, weighed
    for loss, grads, outputs in pools(Grid(text).size).run(jobs.train, *arguments):
        assert loss <= 1e-6
        assert grads <= 1e-5
        assert outputs <= 1e-5


def test_tokens_without_targets_have_a_part_in_the_gradients_of_the_others(pools):
    for loss, grads in pools(2).run(jobs.masked):
        assert loss <= 1e-6
        assert grads <= 1e-5


def test_what_is_no_part_of_the_same_rows_is_refused(pools):
    (texts, loss), (others, other) = pools(2).run(jobs.refusals)
    assert torch.equal(loss, other)
    assert "replicas 0 and 1 share the rows of a batch" in texts["rows"]
    assert "were given 4 and 3 rows" in others["rows"]
    assert "gather=True joins the outputs of replicas by rows" in texts["gather"]
    assert "context='sequence' is no dimension of the replicas, ['cp']" in texts["name"]
    assert "a sequence of 6 tokens can't be cut over 2 ranks" in texts["tokens"]
    assert "q has 3 tokens of this rank" in texts["odd"]
    assert "they must be [batch, heads, tokens, width]" in texts["heads"]
    assert re.search(r"batch of microbatch 0 of replica 0 is .* on process 0 and .* on process 1\. ", texts["local"])
    assert "Local plays all replicas of the plan in this process" in texts["local"]
    assert texts["together"] is None  # of processes with one batch, each of which plays both replicas


def test_each_rank_has_an_early_and_a_late_part(pools):
    for rank, (part, whole, positions, error) in enumerate(pools(2).run(jobs.orders)):
        expected = torch.tensor([[0, 1, 6, 7], [2, 3, 4, 5]][rank])
        assert positions.equal(expected)
        assert part.equal(torch.arange(16.0).reshape(2, 8)[:, expected])
        assert whole.equal(torch.arange(16.0).reshape(2, 8))
        assert error < 1e-12
