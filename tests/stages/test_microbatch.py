"""Splitting trees into microbatches and merging them back, against indexing by hand."""

from collections import OrderedDict, namedtuple

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe.stages.microbatch import axes_of, merge, sizes_of, split
from tests.support.combinations import examples

Pair = namedtuple("Pair", ["left", "right"])


def sizes(rows, count):
    return sizes_of(rows, count)


def same(a, b):
    """Equal trees: structure, plain values, and tensors bit by bit."""
    one, other = (optree.tree_flatten(t, none_is_leaf=True) for t in (a, b))
    return one[1] == other[1] and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else type(x) is type(y) and x == y
        for x, y in zip(one[0], other[0], strict=True)
    )


@pytest.mark.parametrize(
    ("rows", "count", "expected"),
    [(8, 4, (2, 2, 2, 2)), (10, 4, (3, 3, 2, 2)), (3, 3, (1, 1, 1)), (5, 1, (5,)), (7, 2, (4, 3))],
)
def test_microbatches_are_as_equal_as_can_be_and_the_larger_ones_come_first(rows, count, expected):
    assert sizes(rows, count) == expected
    parts, found = split(torch.arange(rows), count)
    assert found == rows
    assert tuple(map(len, parts)) == expected


def test_every_tensor_is_split_along_its_first_axis():
    x = torch.arange(20).view(5, 4)
    parts, rows = split({"x": x, "y": (x[:, 0], [x[:, 1:]])}, 2)
    assert rows == 5
    assert same(parts[0], {"x": x[:3], "y": (x[:3, 0], [x[:3, 1:]])})
    assert same(parts[1], {"x": x[3:], "y": (x[3:, 0], [x[3:, 1:]])})


@pytest.mark.parametrize("axis", [1, -1])
def test_an_axis_says_where_to_split(axis):
    x = torch.arange(12).view(2, 6)
    parts, rows = split(x, 3, axis)
    assert rows == 6
    assert all(torch.equal(part, x[:, 2 * m : 2 * m + 2]) for m, part in enumerate(parts))


def test_parts_are_views_of_the_whole():
    x = torch.zeros(4)
    split(x, 2)[0][1].fill_(1)
    assert x.tolist() == [0, 0, 1, 1]


def test_what_has_no_axis_is_the_same_in_every_microbatch():
    table, x = torch.ones(7, 2), torch.arange(4)
    parts, rows = split({"table": table, "x": x}, 2, {"table": None, "x": 0})
    assert rows == 4
    assert all(part["table"] is table for part in parts)
    assert torch.equal(parts[1]["x"], x[2:])


def test_without_any_axis_there_are_no_rows():
    tree = {"x": torch.ones(1), "flag": True}
    parts, rows = split(tree, 3, None)
    assert rows is None
    assert len(parts) == 3
    assert all(same(part, tree) for part in parts)


@pytest.mark.parametrize("leaf", [True, 3, 0.5, "mask", b"raw", 1j, None, torch.float16, torch.device("cpu")], ids=repr)
def test_a_leaf_that_is_no_tensor_is_the_same_in_every_microbatch(leaf):
    tree = {"x": torch.arange(4), "leaf": leaf}
    parts, _ = split(tree, 2)
    assert [part["leaf"] for part in parts] == [leaf, leaf]
    assert same(merge(parts), tree)


def test_prefixes_of_axes_reach_every_leaf_below_them():
    tree = {"a": (1, [2, 3]), "b": {"c": 4, "d": None}, "e": 5}
    assert axes_of(tree, 0, "in_axes") == [0] * 6
    assert axes_of(tree, None, "in_axes") == [None] * 6
    assert axes_of(tree, {"a": 1, "b": None, "e": 0}, "in_axes") == [1, 1, 1, None, None, 0]
    assert axes_of(tree, {"a": (0, [None, 1]), "b": {"c": -1, "d": 2}, "e": 3}, "in_axes") == [0, None, 1, -1, 2, 3]


@pytest.mark.parametrize("axes", [{"x": 0}, (0, 0), {"x": 0, "y": (0, 0)}], ids=repr)
def test_axes_that_are_no_prefix_of_the_tree_are_refused(axes):
    with pytest.raises(ValueError, match="is no prefix of the tree"):
        split({"x": torch.ones(2), "y": torch.ones(2)}, 2, axes)


@pytest.mark.parametrize(
    ("tree", "axes", "message"),
    [
        (
            {"x": torch.ones(4), "y": [torch.ones(3)]},
            0,
            r"batch\['y'\]\[0\] \(float32\[3\]\) has 3 rows on axis 0 where the leaves before it have 4",
        ),
        ((torch.ones(2, 5),), 0, r"batch\[0\] \(float32\[2, 5\]\) has 2 rows on axis 0: too few for 3 microbatches"),
        ({"n": torch.tensor(1)}, 0, r"batch\['n'\] \(int64\[\]\) has no axis 0 to split; in_axes=None gives it"),
        (torch.ones(4), 1, r"batch \(float32\[4\]\) has no axis 1 to split"),
        (torch.ones(4), -2, r"batch \(float32\[4\]\) has no axis -2 to split"),
    ],
)
def test_a_tensor_that_cannot_be_split_is_named(tree, axes, message):
    with pytest.raises(ValueError, match=message):
        split(tree, 3, axes)


def test_the_message_says_what_was_to_be_split():
    with pytest.raises(ValueError, match=r"^target\[0\] "):
        split([torch.ones(1)], 2, what="target")


def test_merging_joins_tensors_stacks_scalars_and_keeps_plain_values():
    trees = [
        {"x": torch.arange(3), "loss": torch.tensor(0.5), "kind": "mean"},
        {"x": torch.arange(3, 5), "loss": torch.tensor(1.5), "kind": "mean"},
    ]
    assert same(merge(trees), {"x": torch.arange(5), "loss": torch.tensor([0.5, 1.5]), "kind": "mean"})


def test_merging_without_an_axis_takes_the_first():
    first, other = torch.ones(2), torch.ones(2)
    assert merge([{"x": first}, {"x": other}], None)["x"] is first


def test_merging_goes_along_each_leafs_own_axis():
    a, b, one = torch.ones(2, 3), torch.zeros(2, 1), torch.ones(1)
    merged = merge([Pair(a, one), Pair(b, one)], Pair(1, None))
    assert same(merged, Pair(torch.tensor([[1.0, 1, 1, 0]] * 2), one))


@pytest.mark.parametrize("empty", [None, {}, (), {"x": None, "y": ()}], ids=repr)
def test_a_tree_without_leaves_is_split_and_merged(empty):
    parts, rows = split(empty, 2)
    assert (parts, rows) == ([empty, empty], None)
    assert merge(parts) == empty


def test_a_subtree_that_is_none_stays_none():
    tree = {"x": torch.arange(4), "mask": None, "more": (None, torch.arange(4))}
    for axes in (0, {"x": 0, "mask": None, "more": 0}, {"x": 0, "mask": 0, "more": (None, 0)}):
        parts, _ = split(tree, 2, axes)
        assert all(part["mask"] is None and part["more"][0] is None for part in parts)
        assert same(merge(parts, axes), tree)


@pytest.mark.parametrize(
    ("trees", "message"),
    [
        (
            [{"x": torch.ones(1)}, {"x": torch.ones(1)}, {"y": torch.ones(1)}],
            r"microbatches 0 and 2 have different structures: .*'x'.* and .*'y'",
        ),
        ([(1,), [1]], "microbatches 0 and 1 have different structures"),
        ([{"a": ["mean"]}, {"a": ["sum"]}], r"the plain value at \['a'\]\[0\] differs between microbatches"),
        (["one", 2], "the plain value at the root differs"),
    ],
)
def test_microbatches_that_do_not_fit_together_are_refused(trees, message):
    with pytest.raises(ValueError, match=message):
        merge(trees)


@st.composite
def splits(draw):
    """A tree, a number of microbatches, the axis of every leaf, and how many rows there are."""
    count = draw(st.integers(1, 5))
    rows = draw(st.integers(count, 11))
    shape = st.lists(st.integers(0, 3), max_size=2)

    def tensor(before, after, from_behind):
        whole = torch.Size([*before, rows, *after])
        return torch.arange(whole.numel()).view(whole), len(before) - len(whole) * from_behind

    split_leaf = st.builds(tensor, shape, shape, st.booleans())
    whole = shape.map(lambda s: (torch.ones(s), None))
    plain = st.tuples(st.sampled_from([1, "text", 0.5, True]), st.sampled_from([0, None]))
    nothing = st.just((None, 0))

    def nested(children):
        keys = st.sampled_from("abc")
        pairs = st.lists(children, min_size=1, max_size=3)
        return st.one_of(
            pairs.map(lambda found: tuple(map(list, zip(*found, strict=True)))),
            pairs.map(lambda found: tuple(zip(*found, strict=True))),
            st.dictionaries(keys, children, min_size=1).map(
                lambda d: tuple(OrderedDict((k, pair[i]) for k, pair in d.items()) for i in (0, 1))
            ),
            st.tuples(children, children).map(lambda found: tuple(Pair(*side) for side in zip(*found, strict=True))),
        )

    tree, axes = draw(st.recursive(st.one_of(split_leaf, whole, plain, nothing), nested, max_leaves=8))
    return tree, count, axes, rows


@settings(max_examples=examples(200))
@given(splits())
def test_merging_undoes_splitting(example):
    tree, count, axes, _ = example
    assert same(merge(split(tree, count, axes)[0], axes), tree)


@settings(max_examples=examples(100))
@given(splits())
def test_each_microbatch_has_its_own_rows(example):
    tree, count, axes, rows = example
    parts, found = split(tree, count, axes)
    starts = [sum(sizes(rows, count)[:m]) for m in range(count)]
    leaves = [optree.tree_leaves(t, none_is_leaf=True) for t in (tree, axes, *parts)]
    for whole, axis, *pieces in zip(*leaves, strict=True):
        if not isinstance(whole, torch.Tensor) or axis is None:
            assert all(piece is whole for piece in pieces)
        else:
            assert found == rows == whole.shape[axis]
            for piece, start, width in zip(pieces, starts, sizes(rows, count), strict=True):
                assert torch.equal(piece, whole.narrow(axis, start, width))
