"""A step that fails is no end: the next one has the reference's bits, on the same traces and connections."""

import re

import pytest

from tests.support import recovery_jobs
from tests.support.combinations import ALL, PAIRS, few, one_in, sample

KINDS = ("argument", "first", "middle", "last", "interrupt", "two", "again")


@pytest.fixture(scope="module", autouse=True)
def forgotten(pools):
    yield
    for pool in pools.made.values():
        pool.run(recovery_jobs.forget)


def kinds_of(way):
    """Kinds of faults, each with the rank at fault, which alternates: by default every fourth one under each way."""
    kinds = ("argument", "interrupt") if way == "captured" else KINDS
    if way not in recovery_jobs.TOGETHER:
        kinds = tuple(kind for kind in kinds if kind != "last")
    number = recovery_jobs.WAYS.index(way)
    every = 2 if PAIRS else 4
    chosen = kinds if ALL or len(kinds) == 2 else kinds[number % every :: every]
    return [(kind, (number // 2 + i) % 2) for i, kind in enumerate(chosen)]


@one_in(3)
@pytest.mark.parametrize("way", few(recovery_jobs.WAYS, slice(None, None, 2)))
def test_the_step_after_a_failed_one(pools, way):
    """It has the reference's bits, traces nothing again, and knows the signatures; each survivor names the rank."""
    kinds = kinds_of(way)
    size = 4 if way in recovery_jobs.REPLICATED else 2
    for number, outcomes in enumerate(pools(size).run(recovery_jobs.recover, way, kinds, 2)):
        for (kind, guilty), (errors, differences, counts) in zip(kinds, outcomes, strict=True):
            assert (differences, counts) == ([], [])
            for error in errors:
                if not error and way == "evaluate":  # it had ended its part
                    continue
                assert {"interrupt": "stopped", "argument": "params has no entry"}.get(kind, "by ") in error
                if kind == "two":  # either fails by itself, or because the other one did so first
                    assert error.startswith(("StageError", "TransportError"))
                elif number == guilty:
                    assert error.startswith("KeyboardInterrupt" if kind == "interrupt" else "StageError")
                else:
                    assert error.startswith("TransportError")
                    assert f"rank {guilty}" in error


def test_connections_on_which_nothing_was_posted_are_kept(pools):
    """An evaluation posts nothing on those backward, and the first ranks may have ended it."""
    outcomes = pools(4).run(recovery_jobs.kept, 4)
    assert [differences for _, differences in outcomes] == [[]] * 4
    assert outcomes[3][0] == ["(2, 3)"]
    for rank, (new, _) in enumerate(outcomes):
        assert {*new} <= {str((r, r + 1)) for r in (rank - 1, rank)}


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_set_up_that_fails_is_no_end(pools, wrong):
    outcomes = pools(2).run(recovery_jobs.new_program, wrong)
    assert outcomes[wrong][0].startswith("KeyboardInterrupt")
    assert "can't finish the step" in outcomes[1 - wrong][0]
    assert [found for _, *found in outcomes] == [[[], []]] * 2


def test_a_rank_that_does_not_come_to_the_next_step_is_named(pools):
    (failed, missed, ended), _ = pools(2).run(recovery_jobs.left_alone)
    assert "rank 0 can't finish the step, for a peer can't: rank 1, stage 1, microbatch 1" in failed
    assert "(rank 0 was connecting again after a failed step" in missed
    assert "rank 1 has not come within timeout=1 s" in missed
    assert "this handler ended with an earlier failure: rank 1 has not come" in ended


def test_a_step_whose_results_one_rank_has_ends_the_handler(pools):
    """One rank has updated its parameters, and the other one has not: nothing that follows would be right."""
    first, second = pools(2).run(recovery_jobs.ended_by_one)
    assert (first[0], second[0]) == ("", "KeyboardInterrupt: stopped")
    for error in (*first[1:], *second[1:]):
        assert "TransportError" in error
        assert re.search(r"rank 1 failed in step \d+ of this handler, which rank 0 had ended", error)


def test_a_rank_returns_when_its_own_program_has_ended(pools):
    """It has the loss, and waits for the other rank only where it asks."""
    (own, settled, same), (late, _, _) = pools(2).run(recovery_jobs.returned_early, 1.0)
    assert own < 0.7 < 1.0 <= late
    assert settled > 0.9
    assert same


@pytest.mark.parametrize("call", sample(["step", "check", "norm"], few(["step", "norm"], ["step"])))
def test_a_failure_of_a_step_that_a_rank_has_ended(pools, call):
    """The rank learns it in its next call, which names the rank and the step; the handler has then ended."""
    (first, second, third), (own, after) = pools(2).run(recovery_jobs.failed_late, call)
    assert first == ""
    assert own.startswith("StageError: rank 1, stage 1, microbatch 2: BackwardWeight raised ArithmeticError: by 1")
    for error in (second, third, after):
        assert re.search(r"rank 1 failed in step \d+ of this handler, which rank 0 had ended", error), error
        assert "ArithmeticError: by 1" in error


def test_a_step_that_clips_ends_on_all_ranks_or_on_none(pools):
    first, second = pools(2).run(recovery_jobs.failed_before_the_norm)
    assert first[0].startswith("TransportError: rank 0 can't finish the step, for a peer can't: rank 1, stage 1")
    assert second[0].startswith("StageError: rank 1, stage 1, microbatch 2")
    assert (first[1], second[1]) == ("", "")


def test_a_step_that_fails_after_an_update(pools):
    """It is undone, as nothing that was passed has changed; unless the update was in place."""
    first, second = pools(2).run(recovery_jobs.failed_after_an_update, False)
    assert first[0].startswith("TransportError: rank 0 can't finish the step, for a peer can't: rank 1, stage 1")
    assert (first[1], second[1]) == ("", "")
    first, second = pools(2).run(recovery_jobs.failed_after_an_update, True)
    assert "A rank had updated params in place, as the optimizer's donate=True lets it" in first[0]
    assert second[0].startswith("StageError: rank 1, stage 1, microbatch 2")
    for error in (first[1], second[1]):
        assert "by 1. A rank had updated params in place" in error


def test_a_rank_that_is_done_leaves_when_the_others_are(pools):
    assert pools(2).run(recovery_jobs.left_at_once) == ["", ""]


def test_a_rank_killed_after_another_one_has_returned_is_named(fresh_pool):
    first, _ = fresh_pool(2).outcomes(recovery_jobs.killed_late)
    assert first.error is None, first.text
    assert first.value[0] == ""
    assert "rank 0 can't go on: rank 1 did not give a reason" in first.value[1]


@pytest.mark.skipif(not ALL, reason="200 faults in a row take minutes: FPIPE_TESTS=all runs them")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("seed", range(2))
def test_many_faults_in_a_row(pools, ranks, seed):
    """On a handler that six functions share: no hang, no wrong bits, nothing that stays."""
    ways = ("graph", "eager", "train", "captured", "pieces", "evaluate", "gathered")
    for found, before, after in pools(ranks).run(recovery_jobs.attack, ranks, ways, seed, 200, limit=300):
        assert found == []
        assert after[0] <= before[0]
        assert after[1] <= before[1]


@pytest.mark.skipif(not ALL, reason="200 faults in a row take minutes: FPIPE_TESTS=all runs them")
@pytest.mark.parametrize("seed", range(2))
def test_many_faults_of_replicas_in_a_row(pools, seed):
    for found, before, after in pools(4).run(recovery_jobs.attack, 2, ("replicas", "shards"), seed, 200, limit=300):
        assert found == []
        assert after[0] <= before[0]
        assert after[1] <= before[1]
