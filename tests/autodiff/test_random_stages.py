"""Random graphs of operations, traced and cut under random policies: eager autograd's bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe import Pipeline, Placement, Stage, handlers, policies, schedules
from fpipe.autodiff.traced import Traced
from tests.support.combinations import examples
from tests.support.oracle import differences, oracle, run, seeded, seeds_of
from tests.support.policies import POLICIES
from tests.support.stage_zoo import Example, randn, wants

LONGEST = 12
SHAPES = (3, 4), (4, 2)


def fitted(b, a):
    """b where it broadcasts to a, else what of it does."""
    return b if all(n in (1, m) for n, m in zip(b.shape, a.shape, strict=True)) else b.mean(1, keepdim=True)[:1]


def matmul(a, b, k):
    if a.shape[1] == b.shape[0]:
        return a @ b
    if a.shape[0] == b.shape[0]:
        return a.T @ b
    return a @ b.T if a.shape[1] == b.shape[1] else a @ a.T


def sliced(a, k):
    return a[:, k % a.shape[1] :] if k % 2 else a[k % a.shape[0] :: 2]


def joined(a, b, k):
    dim = int(a.shape[0] == b.shape[0])
    fits = a.shape[1 - dim] == b.shape[1 - dim] and a.shape[dim] + b.shape[dim] <= LONGEST
    return torch.cat([a, b], dim) if fits else a.clone()


def written(a, b, k):
    """In place on a fresh tensor, perhaps through a view of it that is read before and after.

    A view whose base is written to later has its gradient by way of `as_strided`, in the base's layout, where a
    trace has it contiguous: so the base is.
    """
    y = (a * 0.5).contiguous()
    view = y[k % len(y)]
    before = view * 2
    if k % 3 == 0:
        y.add_(fitted(b, y))
    elif k % 3 == 1:
        view.copy_(y[0] * 3)
    else:
        y[y > 0] = 0.25
        y.T.mul_(2)
    return [y, view[None], before[None]]


def named(a, b, k):
    return policies.checkpoint_name(torch.sin(a), "h")


def redone(a, b, k):
    return checkpoint(lambda a, b: F.dropout(torch.tanh(matmul(a, b, k)), 0.3), a, b, use_reentrant=False)


def without_gradient(a, b, k):
    with torch.no_grad():
        return a * fitted(b, a)


OPERATIONS = [
    lambda a, b, k: a + fitted(b, a),
    lambda a, b, k: a * fitted(b, a),
    lambda a, b, k: a - 2 * fitted(b, a),
    lambda a, b, k: torch.where(a > fitted(b, a), a, fitted(b, a)),
    lambda a, b, k: torch.tanh(a),
    lambda a, b, k: F.relu(a),
    lambda a, b, k: F.gelu(a).abs(),
    lambda a, b, k: torch.maximum(a, fitted(b, a)),
    matmul,
    matmul,
    lambda a, b, k: F.linear(a, a[:2] * k, b.reshape(-1)[:1]) if len(a) > 1 else a.exp(),
    lambda a, b, k: a.T,
    lambda a, b, k: a.reshape(a.shape[1], a.shape[0]),
    lambda a, b, k: sliced(a, k),
    lambda a, b, k: a[k % len(a)][None].expand(a.shape),
    lambda a, b, k: list(a.chunk(2, k % 2)),
    joined,
    lambda a, b, k: a.sum(k % 2, keepdim=True),
    lambda a, b, k: a.amax(k % 2, keepdim=True),
    lambda a, b, k: a.cumsum(k % 2).mean().view(1, 1),
    lambda a, b, k: F.layer_norm(a, a.shape[1:], a[0] if k % 2 else None),
    lambda a, b, k: a.softmax(k % 2),
    lambda a, b, k: a.index_select(0, torch.arange(len(a)).flip(0)).contiguous(),
    lambda a, b, k: F.dropout(a, 0.5),
    lambda a, b, k: a + torch.rand(a.shape[1]),
    lambda a, b, k: a.detach(),
    without_gradient,
    written,
    written,
    named,
    redone,
]

number = st.integers(0, 11)
program = st.lists(st.tuples(st.sampled_from(OPERATIONS), number, number, number), min_size=2, max_size=10)


def stage(steps, results):
    """The function of a program: each step takes two of the values so far; results are values by number."""

    def fn(p, *inputs):
        values = [*inputs, p["u"], p["v"], p["frozen"]]
        for op, i, j, k in steps:
            found = op(values[i % len(values)], values[j % len(values)], k)
            values.extend(found if isinstance(found, list) else [found])
        return [values[-1], *(values[i % len(values)] for i in results)]

    return Stage(fn, reads=(0, 1), frozen=("frozen",))


@settings(max_examples=examples(250), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    steps=program,
    results=st.lists(st.integers(0, 40), max_size=3),
    wanted=st.tuples(st.booleans(), st.booleans()),
    policy=st.sampled_from(list(POLICIES.values())),
    dropped=st.integers(0, 4),
)
def test_random_graphs_have_eagers_bits(steps, results, wanted, policy, dropped):
    torch.manual_seed(0)
    params = {"u": randn(3, 4), "v": randn(4, 4), "frozen": randn(4, 3)}
    sources = {
        s: (wants if want else randn)(*shape)
        for s, (want, shape) in zip((0, 1), zip(wanted, SHAPES, strict=True), strict=True)
    }
    example = Example(stage(steps, results), params, sources)
    seeds = seeds_of(kept=lambda i: i != dropped)
    piece = Traced(example.stage, policy=policy, fallback=False)
    prepared = piece.prepare(params)
    for m in range(2):
        seeded(m)
        expected, after = oracle(example, seeds), torch.get_rng_state()
        for split in (False, True):
            seeded(m)
            assert differences(run(piece, prepared, example, seeds, split), expected) == []
            assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("forks", [False, True])
def test_a_stage_that_seeds_itself_is_not_traced(forks):
    def seeds_itself(p, x):
        with torch.random.fork_rng(enabled=forks):
            torch.manual_seed(3)
            return x * p + torch.rand(4)

    pipeline = Pipeline([seeds_itself, lambda p, x: x * p], loss=lambda y, t: (y - t).square().mean())
    plan, params, x = pipeline.plan(Placement.loop(2), 2), dict.fromkeys(range(2), torch.ones(4)), torch.ones(4, 4)
    traced, eager = (
        fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local(), autodiff=autodiff)
        for autodiff in ("auto", "eager")
    )
    with pytest.warns(UserWarning, match="stage 0 .*eager.*seeds or restores the global generator"):
        loss, _ = traced(params, x, x, rng=(0, 0))
    assert torch.equal(loss, eager(params, x, x, rng=(0, 0))[0])
