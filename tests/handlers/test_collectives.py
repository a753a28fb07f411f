"""Calls of all ranks between steps: one result on all, or an error on all that names the rank at fault."""

import time
from pathlib import Path

import pytest

from fpipe import TransportError, handlers
from tests.support.jobs import handler


class Refused(Exception):
    pass


def texts(*calls):
    """The result or the error of each call."""
    results = []
    for call in calls:
        try:
            results.append(call())
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
    return results


def calls(rank):
    group = handler().peers.new_group("trying", hint="all do the same", error=Refused)
    assert handler().peers.new_group("trying") is group
    return texts(
        lambda: group.gather({"rank": (rank, 0.1, b"\0" * rank, None)}, "first"),
        lambda: group.agree(lambda: 1 // (2 - rank), "second"),
        lambda: group.gather(rank, "third" if rank else "another"),
        lambda: group.gather(object() if rank == 1 else 0, "fourth"),
        lambda: group.agree(lambda: rank, "fifth", lambda result: 10 * result),
    )


def test_a_result_or_an_error_is_one_on_all_ranks(pools):
    for rank, (gathered, failed, mixed, foreign, last) in enumerate(pools(3).run(calls)):
        assert gathered == [{"rank": (each, 0.1, b"\0" * each, None)} for each in range(3)]
        reason = "ZeroDivisionError: integer division or modulo by zero"
        assert failed == (reason if rank == 2 else f"Refused: rank 2 failed at second of trying: {reason}")
        other, here, its = (0, "third", "another") if rank else (1, "another", "third")
        assert mixed == f"Refused: rank {other} is at {its} of trying, and this one at {here}: all do the same"
        assert foreign == "UnpicklingError: a message holds a builtins.object, which is no plain Python type"
        assert last == (rank, [0, 10, 20])


def late(rank, folder):
    """Rank 2 comes to the second call when the others have given up, and rank 1 comes to it a little late."""
    group = handlers.Distributed(timeout=2).peers.new_group("trying", hint="all do the same")
    group.gather(rank, "first")
    if rank == 1:
        time.sleep(0.5)
    while rank == 2 and len(list(Path(folder).iterdir())) < 2:
        time.sleep(0.02)
    with pytest.raises(TransportError) as caught:
        group.gather(rank, "second")
    Path(folder, str(rank)).touch()
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named_and_one_that_comes_late_is_not(fresh_pool, tmp_path):
    first, second, _ = fresh_pool(3).run(late, str(tmp_path))
    assert (
        "rank 0 could not reach the other ranks at second of trying (nothing came within timeout=2 s; missing: [2])"
        in first
    )
    assert "missing: [2]" in second


def absent(rank, folder):
    """Rank 1 does not make the handler, and stays until rank 0 has given up."""
    given_up = Path(folder, "given up")
    while rank == 1 and not given_up.exists():
        time.sleep(0.02)
    if rank == 1:
        return None
    with pytest.raises(TransportError) as caught:
        handlers.Distributed(timeout=1).peers.gather(rank, "first")
    given_up.touch()
    return str(caught.value)


def test_a_rank_that_does_not_make_the_handler_is_named(fresh_pool, tmp_path):
    text, _ = fresh_pool(2).run(absent, str(tmp_path))
    assert "at the set-up of a new handler (nothing came within timeout=1 s; missing: [1])" in text
    assert "value_and_grad and evaluate are called on every rank, in the same order" in text
