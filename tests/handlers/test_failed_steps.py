"""A step that fails is no end: the next one has the reference's bits, on the same traces and connections."""

import pytest

from tests.support import recovery_jobs
from tests.support.combinations import combined, sample

KINDS = ("argument", "first", "middle", "last", "interrupt", "two", "again")
GUILTY = 1


@pytest.fixture(scope="module", autouse=True)
def forgotten(pools):
    yield
    for pool in pools.made.values():
        pool.run(recovery_jobs.forget)


@combined(
    lambda way, kind, guilty: way != "captured" or kind in ("argument", "interrupt"),
    way=recovery_jobs.WAYS,
    kind=KINDS,
    guilty=(0, 1),
)
def test_the_step_after_a_failed_one(pools, way, kind, guilty):
    is_replicated = way in recovery_jobs.REPLICATED
    outcomes = pools(4 if is_replicated else 2).run(recovery_jobs.recover, way, kind, 2, guilty)
    for number, (errors, differences, counts) in enumerate(outcomes):
        for error in errors:
            if not error and way == "evaluate":  # it had ended its part
                continue
            failed = number == guilty or (kind == "two" and number < 2)
            names = {"interrupt": "stopped", "argument": "params has no entry"}.get(kind, "by ")
            assert names in error, error
            if number == guilty:
                assert error.startswith("KeyboardInterrupt" if kind == "interrupt" else "StageError")
            elif not failed and kind != "two":
                assert error.startswith("TransportError")
                assert f"rank {guilty}" in error
        assert differences == []
        assert counts == []


@pytest.mark.parametrize("ranks", sample([2, 4], []))
@pytest.mark.parametrize("seed", range(2))
def test_many_faults_in_a_row(pools, ranks, seed):
    """On a handler that six functions share: no hang, no wrong bits, nothing that stays."""
    ways = ("graph", "eager", "train", "captured", "pieces", "evaluate", "gathered")
    for found, before, after in pools(ranks).run(recovery_jobs.attack, ranks, ways, seed, 200, limit=300):
        assert found == []
        assert after[0] <= before[0]
        assert after[1] <= before[1]


@pytest.mark.parametrize("seed", sample(range(2), []))
def test_many_faults_of_replicas_in_a_row(pools, seed):
    for found, before, after in pools(4).run(recovery_jobs.attack, 2, ("replicas", "shards"), seed, 200, limit=300):
        assert found == []
        assert after[0] <= before[0]
        assert after[1] <= before[1]
