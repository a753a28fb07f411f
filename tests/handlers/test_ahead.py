"""A job that is started again traces its stages before their inputs come."""

import uuid

from tests.support import ahead_jobs


def test_a_start_traces_by_the_signatures_of_the_one_before(pools):
    (first, expected), (second, _) = pools(2).run(ahead_jobs.starts, str(uuid.uuid4()))
    assert [loss for loss, _ in first] == [loss for loss, _ in second] == expected
    assert [traces for _, traces in first] == [1, 1, 1, 1]
    assert [traces for _, traces in second] == [1, 1, 2, 1]  # where the batch is another, the hint was of no use
