"""Parametrize a test over several axes: every pair of values by default, the full product under FPIPE_TESTS=all."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pytest

ALL = os.environ.get("FPIPE_TESTS") == "all"


def combined(
    where: Callable[..., bool] = lambda **_: True, every: bool = ALL, **axes: Collection[Any]
) -> pytest.MarkDecorator:
    """Parametrize a test by rows of the axes' values; `where` is called with a row's values by name."""
    choose = product if every else pairwise
    rows = choose(*axes.values(), allowed=lambda row: where(**dict(zip(axes, row, strict=True))))
    return pytest.mark.parametrize(list(axes), [row if len(axes) > 1 else row[0] for row in rows])


def sample(values: Collection[Any], quick: Collection[Any]) -> list[Any]:
    """The values of an axis that costs too much: `quick` of them by default, all under FPIPE_TESTS=all."""
    assert set(quick) <= set(values)
    return list(values if ALL else quick)


def examples(count: int) -> int:
    """How many examples hypothesis draws: all of them under FPIPE_TESTS=all, else a quarter."""
    return count if ALL else -(-count // 4)


def product(*axes: Collection[Any], allowed: Callable[[tuple[Any, ...]], bool]) -> list[tuple[Any, ...]]:
    """Every row that is allowed."""
    return [row for row in itertools.product(*axes) if allowed(row)]


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
