"""Which rows of several axes a test has, by the level of tests in FPIPE_TESTS.

By default, every value is in a row, and of rows that take long some run. FPIPE_TESTS=pairs has rows with every pair,
more of the values that take much the same way, and tests that combine what others check; FPIPE_TESTS=all has the full
products, and orders are searched with all effort.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pytest

LEVELS = ("", "pairs", "all")
LEVEL = LEVELS.index(os.environ.get("FPIPE_TESTS", ""))
PAIRS, ALL = LEVEL > 0, LEVEL > 1
EFFORT = (0.02, 0.1, 1.0)[LEVEL]
"""The effort with which `zb_auto`, `v_auto` and `search` run in tests whose assertions hold at any effort."""


def combined(
    where: Callable[..., bool] = lambda **_: True, every: bool = ALL, singly: bool = not PAIRS, **axes: Collection[Any]
) -> pytest.MarkDecorator:
    """Parametrize a test by rows of the axes' values; `where` is called with a row's values by name.

    Args:
        every: the full product.
        singly: otherwise, rows in which every value occurs, rather than every pair of values.
    """
    choose = product if every else each_value if singly else pairwise
    rows = choose(*axes.values(), allowed=lambda row: where(**dict(zip(axes, row, strict=True))))
    return pytest.mark.parametrize(list(axes), [row if len(axes) > 1 else row[0] for row in rows])


def sample(values: Collection[Any], quick: Collection[Any]) -> list[Any]:
    """The values of an axis that costs too much: `quick` of them by default, all under FPIPE_TESTS=all."""
    assert set(quick) <= set(values)
    return list(values if ALL else quick)


def few(values: Collection[Any], chosen: Sequence[Any] | slice) -> list[Any]:
    """The values of an axis that take much the same way: by default those `chosen`, all from FPIPE_TESTS=pairs on."""
    listed = list(values)
    chosen = listed[chosen] if isinstance(chosen, slice) else list(chosen)
    assert chosen
    assert all(each in listed for each in chosen)
    return listed if PAIRS else chosen


def one_in(count: int) -> pytest.MarkDecorator:
    """Of a test whose rows take long and much the same way: by default every `count`th of them, from the first on."""
    return pytest.mark.one_in(count)


thorough = pytest.mark.thorough
"""Of a test that combines, or repeats on a larger scale, what others check: it runs from FPIPE_TESTS=pairs on."""


def examples(count: int) -> int:
    """How many examples hypothesis draws: all under FPIPE_TESTS=all, a quarter under pairs, and by default a tenth."""
    return -(-count // (10, 4, 1)[LEVEL])


def product(*axes: Collection[Any], allowed: Callable[[tuple[Any, ...]], bool]) -> list[tuple[Any, ...]]:
    """Every row that is allowed."""
    return [row for row in itertools.product(*axes) if allowed(row)]


def each_value(*axes: Collection[Any], allowed: Callable[[tuple[Any, ...]], bool]) -> list[tuple[Any, ...]]:
    """Allowed rows in which every value occurs that occurs in any allowed row.

    Greedy: each row takes the next value of the axis with the most values left, and of the others values that are left,
    or else the next in turn. The same axes give the same rows.
    """
    values = [list(axis) for axis in axes]
    left = [dict.fromkeys(range(len(axis))) for axis in values]
    rows: list[tuple[Any, ...]] = []
    while any(left):
        orders = [sorted(range(len(x)), key=_turn(x, left[a], len(rows))) for a, x in enumerate(values)]
        longest = max(range(len(values)), key=lambda axis: len(left[axis]))
        del left[longest][orders[longest][0]]
        orders[longest] = orders[longest][:1]
        for places in sorted(itertools.product(*(range(len(order)) for order in orders)), key=sum):
            chosen = [order[place] for order, place in zip(orders, places, strict=True)]
            row = tuple(axis[i] for axis, i in zip(values, chosen, strict=True))
            if allowed(row):
                rows.append(row)
                for axis, i in enumerate(chosen):
                    left[axis].pop(i, None)
                break
    return rows


def _turn(axis: Sequence[Any], left: Collection[int], row: int) -> Callable[[int], tuple[bool, int]]:
    """A sort key: values that are left come first, then the others in turn from row to row."""
    return lambda i: (i not in left, i if i in left else (i - row) % len(axis))


def pairwise(
    *axes: Collection[Any], allowed: Callable[[tuple[Any, ...]], bool] = lambda row: True
) -> list[tuple[Any, ...]]:
    """Allowed rows in which every pair of two axes' values occurs that occurs in any allowed row.

    Greedy: each row takes the first pair that is missing, then for each other axis the value with the most missing
    pairs. The same axes give the same rows.
    """
    values = [list(axis) for axis in axes]
    if len(values) < 3:
        return product(*values, allowed=allowed)
    missing = dict.fromkeys(
        ((a, i), (b, j))
        for a, b in itertools.combinations(range(len(values)), 2)
        for i, j in itertools.product(range(len(values[a])), range(len(values[b])))
    )
    rows = []
    while missing:
        (a, i), (b, j) = pair = next(iter(missing))
        del missing[pair]
        for chosen in _completions({a: i, b: j}, values, missing):
            row = tuple(values[axis][chosen[axis]] for axis in range(len(values)))
            if allowed(row):
                rows.append(row)
                for met in itertools.combinations(sorted(chosen.items()), 2):
                    missing.pop(met, None)
                break
    return rows


def _completions(
    chosen: dict[int, int], values: Sequence[Sequence[Any]], missing: Collection[Any]
) -> Iterator[dict[int, int]]:
    """Every way to choose the other axes' values, those with the most missing pairs first."""
    if len(chosen) == len(values):
        yield chosen
        return
    axis = next(axis for axis in range(len(values)) if axis not in chosen)

    def met(i: int) -> int:
        return sum(tuple(sorted(((axis, i), other))) in missing for other in chosen.items())

    for i in sorted(range(len(values[axis])), key=met, reverse=True):
        yield from _completions(chosen | {axis: i}, values, missing)
