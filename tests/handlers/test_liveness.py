"""Ranks that let others wait: slow ones are waited for, dead, stopped and absent ones are named in time."""

import time

import pytest

from tests.support import faults

GRACE = 8.0  # seconds that the error may come later than the time limit, on a busy machine


def test_a_slow_stage_is_waited_for(fresh_pool):
    """It computes for three times the time limit."""
    losses = fresh_pool(3).run(faults.run, 3, "slow", "eager", 1.0)
    assert len(set(losses)) == 1


@pytest.mark.parametrize(
    ("fault", "limits", "reason"),
    [
        ("slow", (1.0, 1.5), r"rank 1 has been at Forward(stage=1, microbatch=3) for 2 s, longer than compute_timeout"),
        ("stopped", (2.0,), "rank 1 does not answer: its process is stopped"),
        ("absent", (2.0,), "rank 1 has not come within timeout=2 s: its script is elsewhere"),
    ],
)
def test_a_rank_that_does_not_go_on_is_named(fresh_pool, fault, limits, reason):
    pool = fresh_pool(3)
    pool.run(faults.run, 3, "none")  # the first trace of a process takes long
    for pipe in pool.pipes:
        pipe.send((faults.run, (3, fault, "eager", *limits)))
    until = time.monotonic() + 30
    for rank in (0, 2):
        outcome = pool._outcome(rank, until, faults.run)
        assert outcome.error == "TransportError", outcome.text
        assert reason in outcome.text
        assert f"rank {rank} lost " in outcome.text
        assert outcome.seconds < 1.0 + sum(limits) + GRACE
