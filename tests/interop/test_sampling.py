"""Rows of replicas: each row once an epoch, the same batches for every number of replicas, and no state."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fpipe import interop


def batch_of(size, replicas, batch, step, **options):
    parts = [
        interop.rows(size, replica=r, replicas=replicas, batch=batch, step=step, **options) for r in range(replicas)
    ]
    assert {part.dtype for part in parts} == {torch.int64}
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)
    return torch.cat(parts).tolist()


@given(st.data(), st.integers(1, 40), st.one_of(st.none(), st.integers(0, 3)), st.booleans())
def test_an_epoch_has_each_row_once_in_the_same_batches_for_all_replicas(data, size, seed, drop_last):
    batch = data.draw(st.integers(1, size))
    replicas = data.draw(st.integers(1, batch if drop_last else size % batch or batch))
    steps = size // batch if drop_last else -(-size // batch)
    for epoch in range(2):
        numbers = range(epoch * steps, (epoch + 1) * steps)
        options = {"seed": seed, "drop_last": drop_last}
        batches = [batch_of(size, replicas, batch, step, **options) for step in numbers]
        assert batches == [batch_of(size, 1, batch, step, **options) for step in numbers]
        assert [len(each) for each in batches[:-1]] == [batch] * (steps - 1)
        everything = [row for each in batches for row in each]
        assert len(set(everything)) == len(everything) == (steps * batch if drop_last else size)
        assert set(everything) <= set(range(size))


def test_epochs_and_seeds_have_orders_of_their_own():
    epochs = [batch_of(32, 2, 32, step, seed=seed) for step in range(2) for seed in (0, 1)]
    assert all(sorted(each) == list(range(32)) for each in epochs)
    assert len({tuple(each) for each in epochs}) == 4
    assert batch_of(32, 2, 32, 0, seed=0) == epochs[0]  # also after those of other epochs
    state = torch.get_rng_state()
    interop.rows(32, replica=0, replicas=1, batch=32, step=5, seed=9)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_returned_is_the_callers():
    first = interop.rows(8, replica=0, replicas=1, batch=8, step=0, seed=3)
    kept = first.clone()
    first.zero_()
    assert torch.equal(interop.rows(8, replica=0, replicas=1, batch=8, step=0, seed=3), kept)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"replica": 2}, "replica must be one of 0 to 1, not 2"),
        ({"step": -1}, "step must be at least 0, not -1"),
        ({"batch": 1}, "a batch of size 1 is too small for 2 replicas with a row each"),
        ({"batch": 4, "microbatches": 3}, "a batch of size 4 is too small for 2 replicas with 3 microbatches each"),
        ({"microbatches": 0}, "microbatches must be at least 1, not 0"),
        ({"batch": 4, "size": 9, "drop_last": False}, "the last batch of an epoch has size 1, .*take drop_last=True"),
        ({"batch": 11}, "a dataset of size 10 is no whole batch of 11: take a smaller one, or drop_last=False"),
        ({"size": 0, "drop_last": False}, "a dataset of size 0 is no whole batch of 4"),
    ],
)
def test_numbers_out_of_range(changed, says):
    options = {"size": 10, "replica": 0, "replicas": 2, "batch": 4, "step": 0, **changed}
    with pytest.raises(ValueError, match=says):
        interop.rows(options.pop("size"), **options)
