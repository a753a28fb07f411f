"""The order of microbatches of unequal lengths, and the packing of sequences into them."""

from itertools import product
from statistics import mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe import Costs, Placement, Plan, schedules

LENGTHS = st.lists(st.integers(0, 50), max_size=7)


@given(LENGTHS)
def test_short_ones_come_first_and_last(lengths):
    order = fpipe.by_length(lengths)
    assert sorted(order) == list(range(len(lengths)))
    ordered = [lengths[i] for i in order]
    top = (len(lengths) - 1) // 2 + 1 if lengths else 0
    assert ordered[:top] == sorted(ordered[:top])
    assert ordered[top:] == sorted(ordered[top:], reverse=True)


def lognormal(count):
    """Lengths as drawn, and the same in order."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        lengths = list(rng.lognormal(0, 0.6, 16))
        yield lengths, [lengths[i] for i in fpipe.by_length(lengths)]


def makespan(schedule, lengths):
    return fpipe.simulate(schedule, Plan(Placement.loop(4), 16), Costs(scale=lengths)).makespan


@pytest.mark.parametrize("schedule", [schedules.one_f_one_b, schedules.zb_h1])
def test_pipelines_wait_less(schedule):
    drawn, ordered = zip(
        *([makespan(schedule, n) / (3 * sum(n)) - 1 for n in each] for each in lognormal(10)), strict=True
    )
    assert mean(ordered) < 0.8 * mean(drawn)


def test_gpipe_takes_as_long_in_every_order():
    """A flow shop whose jobs take equally long on all machines: the sum, and once for each other rank the longest."""
    for drawn, ordered in lognormal(3):
        expected = pytest.approx(3 * (sum(drawn) + 3 * max(drawn)))
        assert [makespan(schedules.gpipe, each) for each in (drawn, ordered)] == [expected] * 2


@given(LENGTHS, st.integers(1, 3))
def test_packs_are_about_equally_long(lengths, microbatches):
    if len(lengths) < microbatches:
        return
    packs = fpipe.pack(lengths, microbatches)
    assert sorted(i for each in packs for i in each) == list(range(len(lengths)))
    assert all(each and each == sorted(each) for each in packs)
    choices = product(range(microbatches), repeat=len(lengths))
    totals = (
        [sum(n for n, at in zip(lengths, c, strict=True) if at == m) for m in range(microbatches)] for c in choices
    )
    best = min(map(max, totals))
    longest = max(sum(lengths[i] for i in each) for each in packs)
    assert longest <= (4 / 3 - 1 / (3 * microbatches)) * best + 1e-9


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fpipe.by_length([1, -2]), "length 1 is -2: a length is a number of at least 0"),
        (lambda: fpipe.pack([1, float("nan")], 1), "length 1 is nan"),
        (lambda: fpipe.pack([1, 2], 3), "2 sequences can't fill 3 microbatches: each has at least one"),
        (lambda: fpipe.pack([1, 2], 0), "microbatches must be at least 1, not 0"),
    ],
)
def test_wrong_lengths(call, message):
    with pytest.raises(ValueError, match=message):
        call()
