"""Every schedule trains the example's GPT, with the reference's bits."""

import pytest

from fpipe.schedules import CATALOGUE
from tests import jobs

SIZES = [(name, m) for name in CATALOGUE for m in (4, 12)]


@pytest.mark.parametrize(("name", "m"), SIZES)
def test_local(name, m):
    assert jobs.train_gpt(0, name, 2, m, distributed=False) == []
    assert jobs.train_gpt(0, name, 4, m, distributed=False) == []


@pytest.mark.parametrize(("ranks", "m"), [(2, 12), (4, 4)])
@pytest.mark.parametrize("name", CATALOGUE)
def test_gloo(pools, name, m, ranks):
    assert pools(ranks).run(jobs.train_gpt, name, ranks, m) == [[]] * ranks
