"""Where a process that computes stages together with others is gone, all of them are told which one, in time."""

import time
from math import prod

import pytest

from tests.support import stage_group_jobs as jobs
from tests.support.combinations import few, sample, thorough

GRACE = 5.0  # seconds on a busy machine
REASONS = {
    "killed": "did not give a reason",
    "ended": "did not give a reason",
    "stopped": "does not answer within timeout=2 s: its process is stopped",
}


@pytest.mark.parametrize("shape", sample([(1, 2), (2, 2), (1, 3), (2, 2, 2)], [(1, 2)]), ids=str)
@pytest.mark.parametrize("fault", few(REASONS, ["killed"]))
def test_all_others_name_the_process_that_is_gone(fresh_pool, shape, fault):
    """Those of its handler by its rank there and its number in the job, the others by the latter."""
    size = prod(shape)
    pool = fresh_pool(size)
    for pipe in pool.pipes:
        pipe.send((jobs.lost, (shape, fault, 2.0)))
    until = time.monotonic() + 60
    for rank in range(size - 1):
        outcome = pool.outcome(rank, until, jobs.lost)
        assert outcome.error is None, outcome.text
        text, seconds = outcome.value
        assert f"process {size - 1}" in text
        assert REASONS[fault] in text
        assert seconds < 2.0 * (fault == "stopped") + GRACE


@thorough
def test_a_process_that_does_not_come_to_the_first_step_is_named(pools):
    told, _ = pools(2).run(jobs.lost, (1, 2), "elsewhere", 1.0)
    text, seconds = told
    assert text.startswith(
        "process 0 could not reach all of processes [0, 1], which compute stages together (nothing came within "
        "timeout=1 s; missing: [1])"
    )
    assert seconds < 1.0 + GRACE


@thorough
def test_a_save_waits_for_a_process_as_long_as_the_handler_says(pools, tmp_path):
    told, _ = pools(2).run(jobs.late_save, (1, 2), str(tmp_path), 1.0)
    text, seconds = told
    assert "process 0 could not reach the other ranks at save of the checkpoints" in text
    assert "(nothing came within timeout=1 s; missing: [1])" in text
    assert seconds < 1.0 + GRACE
