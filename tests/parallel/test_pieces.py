"""Collectives inside pieces: nodes of graphs, compared over processes before they run, and watched while they do."""

import pytest
import torch

from tests.support import piece_jobs as jobs
from tests.support.combinations import few, one_in, thorough
from tests.support.pool import Pool


@pytest.fixture(scope="module")
def graphs(pools):
    return pools(2).run(jobs.graphs)


def test_graphs_have_eagers_bits_under_every_policy(graphs):
    for outcomes in graphs:
        assert [key for key, (equal, *_) in outcomes.items() if not equal] == []


def test_no_collective_is_recomputed(graphs):
    for outcomes in graphs:
        for name in jobs.STAGES:
            assert outcomes[name, "nothing_saveable"][1] == outcomes[name, "everything_saveable"][1]


def test_a_torch_that_marks_nothing_as_impure_changes_nothing(graphs, pools):
    for outcomes, others in zip(graphs, pools(2).run(jobs.unmarked), strict=True):
        assert {key: outcome[:2] for key, outcome in outcomes.items()} == {
            key: outcome[:2] for key, outcome in others.items()
        }


def test_equal_collectives_are_merged_and_unread_ones_run(graphs):
    """A sum of parameters alone belongs to the piece that runs once a step."""
    counts = {name: graphs[0][name, "everything_saveable"][1] for name in jobs.STAGES}
    assert counts["layer"] == {
        ("forward", "all_gather_into_tensor"): 1,
        ("backward", "reduce_scatter_tensor"): 1,
        ("backward_input", "reduce_scatter_tensor"): 1,
    }
    assert counts["twice"]["forward", "all_reduce"] == 1
    assert counts["unread"] == {("forward", "all_reduce"): 1}
    assert counts["of_params"]["prepare", "all_reduce"] == 1
    assert ("forward", "all_reduce") not in counts["of_params"]


def test_a_collective_is_posted_early_and_waited_for_late(graphs):
    lines = graphs[0]["layer", "everything_saveable"][2].splitlines()
    at = {
        name: next(i for i, line in enumerate(lines) if name in line) for name in ("all_gather", "mm(", "wait_tensor(")
    }
    assert at["all_gather"] < at["mm("] < at["wait_tensor("]


@thorough
def test_the_collectives_of_layers_where_nothing_is_saved(pools):
    counts = pools(2).run(jobs.layer_counts)[0]
    assert counts["gathered"] == {
        ("forward", "all_gather_into_tensor"): 2,
        ("backward", "reduce_scatter_tensor"): 2,
        ("backward_input", "reduce_scatter_tensor"): 2,
    }
    exchange = "all_to_all_single"
    assert counts["ring"] == {("forward", exchange): 1, ("backward", exchange): 3, ("backward_input", exchange): 3}
    assert counts["experts"] == {("forward", exchange): 2, ("backward", exchange): 2, ("backward_input", exchange): 2}


def test_a_microbatch_without_weight_has_its_part_in_the_losses_of_other_replicas(pools):
    for results, expected in pools(2).run(jobs.weightless):
        torch.testing.assert_close(results, expected)


def test_draws_are_the_same_on_all_ranks_of_a_stage(pools):
    for results, expected in pools(2).run(jobs.dropout):
        torch.testing.assert_close(results, expected)


@pytest.fixture(scope="module")
def new_pool():
    """Two processes that have traced the same stages: a trace is known by its number among those of equal shapes."""
    pool = Pool(2)
    yield pool
    pool.close()


@one_in(2)
@pytest.mark.parametrize("which", ["local", "distributed"])
def test_different_collectives_are_one_error_on_all_ranks(new_pool, which):
    here, there = new_pool.run(jobs.different, which)
    assert here["equal"] is there["equal"] is None
    for name, difference in {
        "order": "collective 1 is all_reduce(float32[2, 4], reduce_op=sum, 32 bytes) in forward on rank 0, "
        "missing on rank 1",
        "shape": "collective 0 is all_gather_into_tensor(float32[1, 4], group_size=2, 16 bytes) in forward on rank 0, "
        "all_gather_into_tensor(float32[2, 4], group_size=2, 32 bytes) in forward on rank 1",
        "backward": "collective 1 is missing on rank 0, all_reduce(float32[2, 4], reduce_op=sum, 32 bytes) in "
        "backward on rank 1",
    }.items():
        for text in (here[name], there[name]):
            assert text.startswith("StageError: rank 0")
            assert difference in text
    lacks = "rank 1 has traced it without the collectives that rank 0 has over ranks [0, 1], and these would wait for "
    assert (
        f"stage 0, microbatch 0: {lacks}ever: all_reduce(float32[2, 4], reduce_op=sum, 32 bytes) in forward"
        in (here["missing"])
    )
    assert f"stage 0: {lacks}" in there["missing"] or f"stage 0, microbatch 0: {lacks}" in there["missing"]


def test_what_ranks_could_not_run_together_is_refused(pools):
    for texts in pools(2).run(jobs.refusals):
        assert "eager autograd runs it" in texts["branches"]
        assert "it has collectives, and can't be traced: it needs the value of a tensor" in texts["after"]
        assert (
            "c10d.allreduce_.default writes to its argument: take the function of fpipe.parallel" in texts["in_place"]
        )
        assert "Leave autodiff='eager' out" in texts["eager"]
        assert "compile=True does not support" in texts["compile"]
        assert "can't be captured" in texts["capture"]
        assert texts["pieces"] is None  # it runs without graphs


@pytest.mark.parametrize("how", few(["killed", "stopped", "raises"], ["killed"]))
def test_a_peer_that_goes_is_an_error_within_the_limit(fresh_pool, how):
    pool = fresh_pool(2)
    for pipe in pool.pipes:
        pipe.send((jobs.lose, (how,)))
    assert pool.pipes[0].poll(60)
    outcome = pool.pipes[0].recv()
    assert outcome.error is None, outcome.text
    text, seconds, after = outcome.value
    assert text.startswith("TransportError: ")
    assert seconds < 30
    assert "this handler ended" in after
    assert {"killed": "replica 1", "stopped": "does not answer", "raises": "out of luck"}[how] in text + after
