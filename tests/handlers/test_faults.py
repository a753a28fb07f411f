"""Processes that are stopped or killed: every wait of every call ends in time, and all survivors name the same rank."""

import signal
import time

import pytest

from fpipe.store import JobStore, StoreError, bounded
from tests.support import fault_jobs
from tests.support.combinations import one_in, sample, thorough

GRACE = 12.0  # seconds that an error may come later than the time limit, on a busy machine


def test_what_must_agree_is_agreed_on(pools):
    outcomes = pools(2).run(fault_jobs.disagreements)
    assert outcomes[0][1] == outcomes[1][1]
    for told, _ in outcomes:
        for name in ("rng", "rng of one", "skipped", "captured"):
            assert "rank 0 and rank 1 were called with different rng=" in told[name]
        assert "rank 0 and rank 1 were given different batches of equal shapes" in told["batch"]
        assert "rank 0 and rank 1 were given different targets of equal shapes" in told["target"]
        for name in ("reduction", "weight"):
            assert "the ranks were given different options reduction= or weight=" in told[name]
        assert "different settings: max_norm= is 1.0 on rank 0 and 2.0 on rank 1" in told["captured max_norm"]
        assert "max_norm is 1.0 on rank 0 and 2.0 on rank 1" in told["max_norm"]


@pytest.mark.parametrize("kind", sample(["value_and_grad", "evaluate", "a step", "an evaluation"], ["value_and_grad"]))
def test_ranks_out_of_step_are_told_apart(pools, kind):
    outcomes = pools(2).run(fault_jobs.out_of_step, 2, kind, 1, "gpipe", False, "graph")
    assert all("came to another step than rank 0" in text for text in outcomes), outcomes


class Silent:
    """A store whose host is stopped."""

    def check(self, keys):
        time.sleep(60)


def test_a_call_to_a_silent_store_ends():
    begun = time.monotonic()
    with pytest.raises(StoreError, match=r"does not answer within timeout=0.1 s"):
        JobStore(Silent(), 0.1).has("a")
    with pytest.raises(KeyError, match="cut"):  # without a limit, what watches the wait ends it
        JobStore(Silent(), None, check=lambda: {}["cut"]).has("a")
    assert time.monotonic() - begun < 10
    assert bounded(lambda: 3, 1.0) == 3


@pytest.mark.parametrize("accident", sample([signal.SIGSTOP, signal.SIGKILL], [signal.SIGSTOP]))
@thorough
def test_every_call_ends_in_time_after_the_host_of_the_store_is_gone(fresh_pool, tmp_path, accident):
    pool, timeout = fresh_pool(2), 3.0
    for pipe in pool.pipes:
        pipe.send((fault_jobs.after, (2, timeout, accident, str(tmp_path))))
    outcome = pool.outcome(1, time.monotonic() + 60, fault_jobs.after)
    assert outcome.error is None, outcome.text
    errors = outcome.value
    assert set(errors) == {"value_and_grad", "another handler", "a step", "latest", "save", "clipping"}
    for name, (kind, text, seconds) in errors.items():
        assert kind == "TransportError", (name, text)
        assert seconds < timeout + GRACE, (name, seconds)
        assert accident == signal.SIGKILL or f"timeout={timeout:g} s" in text, (name, text)


@pytest.mark.parametrize("victim", sample([0, 1, 3], [1]))
def test_a_rank_killed_while_edges_connect_costs_the_time_limit_once(fresh_pool, victim):
    timeout = 3.0
    outcomes = fresh_pool(4).outcomes(fault_jobs.killed_while_connecting, 4, timeout, victim)
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            text, seconds = outcome.value
            assert seconds < timeout + GRACE, seconds
            assert fault_jobs.blamed(text) == f"rank {victim}", text


@one_in(2)
@pytest.mark.parametrize(
    ("victim", "moment"),
    sample([(v, m) for v in range(4) for m in ("before", "within")], [(2, "within"), (1, "before")]),
)
def test_all_survivors_name_the_rank_that_died(fresh_pool, victim, moment):
    outcomes = fresh_pool(4).outcomes(fault_jobs.killed, 4, victim, moment)
    texts = [outcome.value for rank, outcome in enumerate(outcomes) if rank != victim]
    assert {fault_jobs.blamed(text) for text in texts} == {f"rank {victim}"}, texts
    assert all("noticed it" in text for text in texts), texts
