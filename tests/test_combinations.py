"""The rows of tests have every value, or every pair of values, or are the whole product, by their level."""

import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.support.combinations import PAIRS, combined, each_value, few, pairwise, product

AXES = ("case", range(12)), ("schedule", range(18)), ("handler", range(3)), ("policy", range(7)), ("count", range(5))


def pairs(rows):
    return {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}


def even_on_both_ways(row):
    _, schedule, handler, _, count = row
    return (schedule > 1 or count % 2 == 0) and (schedule != 5 or handler != 2)


@pytest.mark.parametrize("allowed", [lambda row: True, even_on_both_ways], ids=["all", "some"])
def test_every_pair_of_allowed_rows_is_met(allowed):
    axes = [values for _, values in AXES]
    rows = pairwise(*axes, allowed=allowed)
    assert pairs(rows) == pairs(product(*axes, allowed=allowed))
    assert all(map(allowed, rows))
    assert len(rows) == len(set(rows)) < 1.25 * 12 * 18


@hypothesis.settings(max_examples=50)
@hypothesis.given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 30))
def test_pairs_of_random_axes(sizes, forbidden):
    axes = [range(size) for size in sizes]
    every = list(itertools.product(*axes))
    rows = pairwise(*axes, allowed=lambda row: hash(row) % 31 > forbidden)
    allowed = [row for row in every if hash(row) % 31 > forbidden]
    assert pairs(rows) == pairs(allowed)
    assert set(rows) <= set(allowed)


@hypothesis.settings(max_examples=50)
@hypothesis.given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 30))
def test_single_values_of_random_axes(sizes, forbidden):
    axes = [range(size) for size in sizes]
    allowed = [row for row in itertools.product(*axes) if hash(row) % 31 > forbidden]
    rows = each_value(*axes, allowed=lambda row: hash(row) % 31 > forbidden)
    assert {each for row in rows for each in enumerate(row)} == {each for row in allowed for each in enumerate(row)}
    assert set(rows) <= set(allowed)
    assert len(rows) <= sum(sizes)


def test_single_values_take_as_few_rows_as_the_longest_axis_has_values():
    rows = each_value("abcdef", range(10), "xy", allowed=lambda row: row[:2] != ("a", 0))
    assert len(rows) == 10
    assert rows == each_value("abcdef", range(10), "xy", allowed=lambda row: row[:2] != ("a", 0))


def test_the_same_axes_give_the_same_rows():
    assert pairwise("abc", range(4), "xy") == pairwise("abc", range(4), "xy")


def test_a_mark_has_the_rows_by_name():
    axes = {"letter": "abc", "number": range(3), "sign": "+-"}
    values, met, every = (
        combined(where=lambda letter, number, sign: (letter, sign) != ("a", "-"), **level, **axes).args
        for level in ({"every": False, "singly": True}, {"every": False, "singly": False}, {"every": True})
    )
    assert values[0] == met[0] == every[0] == ["letter", "number", "sign"]
    assert every[1] == [row for row in itertools.product(*axes.values()) if row[::2] != ("a", "-")]
    assert pairs(met[1]) == pairs(every[1])
    assert len(values[1]) == 3 < len(met[1]) < len(every[1]) == 15


def test_few_values_are_of_the_axis():
    assert few("abcd", "ca") == (list("abcd") if PAIRS else ["c", "a"])
    assert few("abcd", slice(1, 3)) == (list("abcd") if PAIRS else ["b", "c"])
    for chosen in ((), "x", slice(0)):
        with pytest.raises(AssertionError):
            few("abcd", chosen)
