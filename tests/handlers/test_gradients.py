"""Sums of weight gradients: in place, in the order of the microbatches, and in memory that is the caller's alone."""

import functools
import itertools
import math

import optree
import pytest
import torch

import fpipe
from fpipe import Pipeline, Placement, handlers, schedules
from fpipe.handlers.gradients import Sum, add, copied, total
from fpipe.stages.pytree import paths
from tests.support import cases, jobs
from tests.support.combinations import combined, one_in

LOCAL = [handlers.Reference(), handlers.Local()]
both = pytest.mark.parametrize("handler", LOCAL, ids=["reference", "local"])


def summed(microbatches, fresh=()):
    found = Sum()
    for terms in microbatches:
        found.add(terms, fresh)
    return found


def plain(microbatches):
    """The same from the left, out of place, and in float32 if they are narrower."""
    columns = (
        [x.float() if x is not None and x.element_size() < 4 else x for x in c] for c in zip(*microbatches, strict=True)
    )
    return [functools.reduce(add, column) for column in columns]


def bits(x):
    """What tells NaNs and the signs of zeros apart."""
    return None if x is None else (x.dtype, x.shape, x.contiguous().flatten().view(torch.uint8).tolist())


def memory(tree):
    """Where each tensor's storage begins."""
    leaves = optree.tree_leaves(tree, namespace="fpipe")
    return [x.untyped_storage().data_ptr() for x in leaves if isinstance(x, torch.Tensor) and x.numel()]


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("count", range(1, 7))
def test_the_bits_are_those_of_a_sum_from_the_left(dtype, count):
    torch.manual_seed(count)
    microbatches = [[randn(5, 3, dtype=dtype), randn(dtype=dtype), randn(2000, dtype=dtype)] for _ in range(count)]
    assert list(map(bits, summed(microbatches).read())) == list(map(bits, plain(microbatches)))


def test_zeros_keep_their_signs_and_nans_stay():
    odd = [0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 1.0]
    rows = [list(row) for row in itertools.product(odd, repeat=3)]
    microbatches = [[torch.tensor(column)] for column in zip(*rows, strict=True)]
    assert bits(summed(microbatches).read()[0]) == bits(plain(microbatches)[0])


@pytest.mark.parametrize(
    "there", list(itertools.product([False, True], repeat=4)), ids=lambda p: "".join(map(str, map(int, p)))
)
@pytest.mark.parametrize("fresh", [(), (0,)])
def test_nothing_counts_as_nothing(there, fresh):
    torch.manual_seed(0)
    microbatches = [[torch.full((3,), -0.0) if own else None, randn(3)] for own in there]
    expected = list(map(bits, plain(microbatches)))
    assert list(map(bits, summed(microbatches, fresh).read())) == expected


def test_leaves_of_several_dtypes_strides_and_devices_go_together():
    torch.manual_seed(0)

    def terms(m):
        return [
            randn(4, 6).T if m % 2 else randn(6, 4),
            randn(6, 4, dtype=torch.bfloat16),
            randn(1, 4).expand(6, 4),
            randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            randn(6, 4, dtype=torch.complex64).conj(),
            torch.complex(randn(4), randn(4)).conj().imag,
            randn(8)[::2],
            randn(0, 3),
            randn(3, dtype=torch.float64 if m == 2 else torch.float32),
            torch.empty(3, device="meta"),
        ]

    microbatches = [terms(m) for m in range(5)]
    *found, elsewhere = summed(microbatches).read()
    *expected, _ = plain(microbatches)
    assert list(map(bits, found)) == list(map(bits, expected))
    assert elsewhere.device.type == "meta"


def test_from_the_third_microbatch_on_it_adds_in_place():
    torch.manual_seed(0)
    microbatches = [[randn(4), randn(2, 3, dtype=torch.float64)] for _ in range(5)]
    found, at = Sum(), []
    for terms in microbatches:
        found.add(terms)
        at.append([x.data_ptr() for x in found.totals])
    assert at[0] == [x.data_ptr() for x in microbatches[0]]
    assert at[1] == at[2] == at[3] == at[4]
    assert [x.data_ptr() for x in found.read()] == at[1]
    assert not {*at[1]} & {x.data_ptr() for terms in microbatches for x in terms}


def test_a_gradient_that_comes_late_is_owned_two_microbatches_later():
    found = Sum()
    at = []
    for term in (None, torch.ones(3), None, torch.ones(3), torch.ones(3)):
        found.add([term])
        at.append(None if found.totals[0] is None else found.totals[0].data_ptr())
    assert at[0] is None
    assert at[1] == at[2]
    assert at[2] != at[3] == at[4]


def test_what_is_said_to_be_fresh_is_written_to_at_once():
    first, second = [torch.ones(3), torch.ones(3)], [torch.ones(3), torch.ones(3)]
    found = summed([first, second], fresh={1})
    assert torch.equal(first[0], torch.ones(3))
    assert torch.equal(first[1], torch.full((3,), 2.0))
    assert found.totals[1] is first[1]
    assert all(torch.equal(x, torch.full((3,), 2.0)) for x in found.read())


@pytest.mark.parametrize("count", range(1, 5))
def test_what_is_given_is_never_written_to_nor_given_on(count):
    torch.manual_seed(0)
    cotangent, column = randn(4, 4), randn(4, 1)

    def terms():
        return [cotangent, cotangent, cotangent.T, cotangent[0], column.expand(4, 4), None]

    before = cotangent.clone(), column.clone()
    found = summed([terms() for _ in range(count)]).read()
    assert torch.equal(cotangent, before[0])
    assert torch.equal(column, before[1])
    assert len({*memory(found)} - {*memory((cotangent, column))}) == 5
    for x in found[:-1]:
        x.zero_()  # which fails where memory is expanded
    assert torch.equal(cotangent, before[0])


def test_a_sum_is_final_when_it_is_read():
    found = summed([[torch.ones(2), None]])
    assert memory(found.read()) == memory(found.read())
    with pytest.raises(AssertionError, match="after it was read"):
        found.add([torch.ones(2), None])


@pytest.mark.parametrize(
    ("given", "strides"),
    [
        (torch.ones(2, 3).T, (1, 3)),
        (torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last), (48, 1, 12, 3)),
        (torch.ones(3, 1).expand(3, 4), (4, 1)),
        (torch.ones(1, 3).expand(4, 3).T, (4, 1)),
        (torch.ones(()).expand(2, 3), (3, 1)),
        (torch.ones(2, 3).T.unsqueeze(1).expand(3, 4, 2), (8, 2, 1)),
        (torch.ones(5).as_strided((3, 3), (1, 1)), (3, 1)),
        (torch.ones(4, 6)[:, ::2], (3, 1)),
    ],
    ids=["transposed", "channels last", "column", "row", "number", "transposed and expanded", "overlapping", "part"],
)
def test_a_copy_is_dense_and_keeps_strides_that_are(given, strides):
    found = copied({"x": given, "none": None})
    assert found["none"] is None
    assert torch.equal(found["x"], given)
    assert found["x"].stride() == strides
    assert found["x"].untyped_storage().nbytes() == 4 * given.numel()


class Own(torch.autograd.Function):
    """The sum of squares, halved: its gradient is the parameter itself."""

    @staticmethod
    def forward(ctx, p):
        ctx.save_for_backward(p)
        return p.square().sum() / 2

    @staticmethod
    def backward(ctx, g):
        return ctx.saved_tensors[0]


def careless(p, x):
    """Gradients that are one tensor, that are expanded, and that are the parameter itself."""
    return x + p["one"] + p["two"] + p["expanded"].sum() + Own.apply(p["own"])


@one_in(4)
@both
@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_share_no_memory_with_each_other_nor_with_the_params(handler, microbatches, tied):
    torch.manual_seed(0)
    params = {s: {"one": randn(4), "two": randn(1, 4), "expanded": randn(3), "own": randn(2)} for s in range(3)}
    if tied:
        del params[2]["one"]
    pipeline = Pipeline([careless] * 3, lambda y, t: y.sum(), ties={(2, "one"): (0, "one")} if tied else None)
    plan = pipeline.plan(Placement.loop(3), microbatches)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handler, reduction="sum")
    batch = randn(microbatches, 4)
    _, grads = step(params, batch)
    before = copied((params, batch, grads))
    places = memory((params, batch, grads))
    assert len(set(places)) == len(places) == 2 * len(memory(params)) + 1
    for x in optree.tree_leaves(grads):
        x.add_(1)
    expected = (*before[:2], optree.tree_map(lambda x: x + 1, before[2]))
    assert jobs.differences((params, batch, grads), expected) == []


@one_in(4)
@combined(
    handler=LOCAL,
    name=cases.UNSLICED,
    schedule=("gpipe", "gpipe_both_ways", "split"),
    where=lambda name, schedule, **_: not (name == "modules" and schedule in cases.COPIED),  # a state has no copies
)
def test_results_share_no_memory(handler, name, schedule):
    case, generator, plan = cases.make(name, schedule, 2, 2)
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handler, **case.options)
    _, grads, *_ = step(case.params, case.batch, case.target, state=case.state, rng=case.rng)
    own = memory(grads)
    assert len(set(own)) == len(own) > 0
    assert not {*own} & {*memory((case.params, case.batch, case.target, case.state))}


@both
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_sparse_gradients_are_added(handler, microbatches):
    def first(p, x):
        return torch.nn.functional.embedding(x, p, sparse=True)

    params = {0: torch.ones(6, 2), 1: torch.ones(2)}
    pipeline = Pipeline([first, lambda p, x: x * p], lambda y, t: y.sum())
    plan = pipeline.plan(Placement.loop(2), microbatches)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handler, reduction="sum", autodiff="eager")
    _, grads = step(params, torch.tensor([0, 1, 1, 5, 3, 3, 3, 1]))
    assert grads[0].is_sparse
    assert torch.equal(grads[0].to_dense(), torch.tensor([1.0, 3, 0, 3, 0, 1])[:, None].expand(6, 2))


def copies(a, b, spare):
    """The total of a leaf of which two ranks have these sums."""
    pipeline, params = Pipeline([torch.mul] * 2), {0: {"w": a}, 1: {"w": a}}
    plan = pipeline.plan(Placement.both_ways(2), 4)
    (key,) = paths(params[0])
    sums = {(0, rank): {key: x} for rank, x in enumerate([a, b])}
    return total(pipeline, plan, params, plan.stages_on(0), sums, [0], spare)[0]["w"]


@pytest.mark.parametrize("spare", [(), [(0, 0)], [(0, 1)]], ids=["none", "first", "second"])
def test_a_total_over_copies_is_in_memory_that_nothing_else_reads(spare):
    odd = torch.tensor([0.0, -0.0, math.inf, math.nan, 1.0, 1e-45])
    a, b = odd.repeat(6).view(6, 6), odd.repeat_interleave(6).view(6, 6)
    expected, before = bits(a + b), list(map(bits, (a, b)))
    result = copies(a, b, spare)
    assert bits(result) == expected
    written = [rank for _, rank in spare]
    assert [rank for rank, x in enumerate([a, b]) if memory([x]) == memory([result])] == written
    assert [rank for rank, x in enumerate([a, b]) if bits(x) != before[rank]] == written


@pytest.mark.parametrize(
    "b",
    [randn(3, 2).t(), randn(4, 3)[:2], randn(2, 3, dtype=torch.float64), randn(1, 3).expand(2, 3)],
    ids=["strides", "view", "dtype", "expanded"],
)
def test_a_total_is_not_in_memory_of_another_layout(b):
    a, before = randn(2, 3), bits(b)
    result = copies(a, b, [(0, 1)])
    assert bits(result) == bits(a + b)
    assert result.stride() == (a + b).stride()
    assert memory([result]) not in (memory([a]), memory([b]))
    assert bits(b) == before
