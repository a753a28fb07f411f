"""Parameters in one dtype for the caller, another for the stages, and a third for the sums of gradients."""

from dataclasses import replace

import optree
import pytest
import torch

import fpipe
from fpipe import Pipeline, Placement, Precision, handlers, schedules
from tests.support import cases, jobs
from tests.support.combinations import combined, one_in

MIXED = Precision(compute=torch.bfloat16, reduce=torch.float32)


def cast(tree, dtype):
    def to(x):
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return optree.tree_map(to, tree, namespace="fpipe")


def mixed(name, schedule, ranks=2, microbatches=4, replicas=1):
    case, generator, plan = cases.make(name, schedule, ranks, microbatches, 8 * replicas * ranks + 1)
    case = replace(case, batch=cast(case.batch, torch.bfloat16), target=cast(case.target, torch.bfloat16))
    return case, generator, replace(plan, replicas=replicas)


@one_in(3)
@combined(
    name=["linear", "tied", "skip"],
    schedule=["gpipe", "zb_v", "interleaved_1f1b", "dualpipe"],
    replicas=[1, 3],
    singly=True,
)
def test_every_schedule_has_the_references_bits(name, schedule, replicas):
    case, generator, plan = mixed(name, schedule, replicas=replicas)
    steps = [
        fpipe.value_and_grad(case.pipeline, generator, plan, handler=handler, precision=MIXED, **case.options)
        for handler in (handlers.Local(), handlers.Reference())
    ]
    found, expected = (step(case.params, case.batch, case.target, rng=case.rng) for step in steps)
    assert jobs.differences(found, expected) == []
    assert {x.dtype for x in jobs.optree.tree_leaves(found[1], namespace="fpipe")} == {torch.float32}


def test_sums_of_narrow_gradients_are_float32():
    """256 microbatches of two tied stages with copies: the sums are off by one rounding, in bfloat16 by more."""
    rows, generator = 512, torch.Generator().manual_seed(0)
    x, w = torch.rand(rows, 4, generator=generator).bfloat16(), torch.rand(4, generator=generator).bfloat16()
    stages = [lambda p, x: x + 0.0 * p["w"].sum(), lambda p, x: x * p["w"]]
    pipeline = Pipeline(stages, lambda y, t: (y * t).sum(), ties={(1, "w"): (0, "w")})
    target = torch.rand(rows, 4, generator=generator).bfloat16()
    exact = (x.double() * target.double()).sum(0)
    schedule, plan = schedules.dualpipe, pipeline.plan(Placement.both_ways(2), 256)
    errors = {}
    for reduce in (None, torch.bfloat16):
        results = []
        for handler in (handlers.Local(), handlers.Reference()):
            options = {"precision": Precision(reduce=reduce), "reduction": "sum"}
            step = fpipe.value_and_grad(pipeline, schedule, plan, handler=handler, **options)
            results.append(step({0: {"w": w}, 1: {}}, x, target))
        assert jobs.differences(*results) == []
        gradient = results[0][1][0]["w"]
        assert gradient.dtype is torch.bfloat16
        errors[reduce] = ((gradient.double() - exact) / exact).abs().max().item()
    assert errors[None] < 2**-9 < 2**-8 < errors[torch.bfloat16]


def test_the_oracle_is_a_cast_of_the_params():
    """The bits are those of the same pipeline on params that were cast before, which rounds the sums to their dtype."""
    case, generator, plan = mixed("linear", "one_f_one_b", microbatches=3)
    local = handlers.Local()
    step = fpipe.value_and_grad(
        case.pipeline, generator, plan, handler=local, precision=Precision(compute=torch.bfloat16), **case.options
    )
    plain = fpipe.value_and_grad(case.pipeline, generator, plan, handler=local, **case.options)
    loss, grads = step(case.params, case.batch, case.target)
    expected, low = plain(cast(case.params, torch.bfloat16), case.batch, case.target)
    assert jobs.differences((loss, cast(grads, torch.bfloat16)), (expected, low)) == []


def test_a_dtype_must_be_floating_point():
    with pytest.raises(ValueError, match=r"compute must be a floating-point dtype or None, not torch\.int8"):
        Precision(compute=torch.int8)
