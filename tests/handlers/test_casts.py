"""Parameters in one dtype for the caller, another for the stages, and a third for the sums of gradients."""

from dataclasses import replace

import optree
import pytest
import torch

import fpipe
from fpipe import Pipeline, Placement, Sharding, handlers, schedules
from tests.support import cases, jobs
from tests.support.combinations import combined

MIXED = Sharding(gather=torch.bfloat16, reduce=torch.float32)


def cast(tree, dtype):
    def to(x):
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return optree.tree_map(to, tree, namespace="fpipe")


def mixed(name, schedule, ranks=2, microbatches=4, replicas=1):
    case, generator, plan = cases.make(name, schedule, ranks, microbatches, 8 * replicas * ranks + 1)
    case = replace(case, batch=cast(case.batch, torch.bfloat16), target=cast(case.target, torch.bfloat16))
    return case, generator, replace(plan, replicas=replicas)


@combined(
    name=["linear", "tied", "skip"],
    schedule=["gpipe", "zb_v", "interleaved_1f1b", "dualpipe"],
    replicas=[1, 3],
)
def test_every_schedule_has_the_references_bits(name, schedule, replicas):
    case, generator, plan = mixed(name, schedule, replicas=replicas)
    steps = [
        fpipe.value_and_grad(case.pipeline, generator, plan, handler=handler, sharding=MIXED, **case.options)
        for handler in (handlers.Local(), handlers.Reference())
    ]
    found, expected = (step(case.params, case.batch, case.target, rng=case.rng) for step in steps)
    assert jobs.differences(found, expected) == []
    assert {x.dtype for x in jobs.optree.tree_leaves(found[1], namespace="fpipe")} == {torch.float32}


def test_sums_keep_the_digits_that_the_terms_dtype_lacks():
    """256 terms of 1 make 256 in bfloat16, and one more changes nothing; in float32 it does."""

    def stage(p, x):
        assert p.dtype is torch.bfloat16
        return p * x.to(torch.bfloat16)

    pipeline = Pipeline([stage], lambda y, t: y.sum())
    plan = pipeline.plan(Placement.loop(1), 300)
    sums = {}
    for reduce in (torch.bfloat16, torch.float32):
        sharding = Sharding(gather=torch.bfloat16, reduce=reduce)
        step = fpipe.value_and_grad(
            pipeline, schedules.gpipe, plan, handler=handlers.Local(), sharding=sharding, reduction="sum"
        )
        _, grads = step({0: torch.tensor(1.0)}, torch.ones(300))
        sums[reduce] = grads[0].item()
    assert sums == {torch.bfloat16: 256.0, torch.float32: 300.0}


def test_the_oracle_is_a_cast_of_the_params():
    """Without sums in another dtype, the bits are those of the same pipeline on params that were cast before."""
    case, generator, plan = mixed("linear", "one_f_one_b", microbatches=3)
    local = handlers.Local()
    step = fpipe.value_and_grad(
        case.pipeline, generator, plan, handler=local, sharding=Sharding(gather=torch.bfloat16), **case.options
    )
    plain = fpipe.value_and_grad(case.pipeline, generator, plan, handler=local, **case.options)
    loss, grads = step(case.params, case.batch, case.target)
    expected, low = plain(cast(case.params, torch.bfloat16), case.batch, case.target)
    assert jobs.differences((loss, grads), (expected, cast(low, torch.float32))) == []


def test_a_dtype_must_be_floating_point():
    with pytest.raises(ValueError, match=r"gather must be a floating-point dtype or None, not torch\.int8"):
        Sharding(gather=torch.int8)
