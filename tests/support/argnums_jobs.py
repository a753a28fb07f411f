"""Gradients of the batch and of the target on the ranks of a pool, against the reference's."""

from __future__ import annotations

import functools

import optree
import torch

import fpipe
from fpipe import Batch, Output, Pipeline, Placement, Stage, handlers, interop, schedules
from tests.support import cases
from tests.support.jobs import WAYS, differences, expected_on, handler
from tests.support.shards import mesh_of
from tests.support.sharing import sharing

ALL = ("params", "batch", "target")
NAMES = [name for name in cases.UNSLICED if name != "attention"]  # as dropout is


@functools.cache
def oracle(name, stages, rows, microbatches):
    """The reference's `(loss, (grads, gradients of the batch, of the target)[, state])`."""
    case = cases.built(name, stages, rows)
    plan = case.pipeline.plan(Placement.loop(stages), microbatches)
    step = fpipe.value_and_grad(
        case.pipeline, "gpipe", plan, handler=handlers.Reference(), argnums=ALL, autodiff="eager", **case.options
    )
    return step(case.params, case.batch, case.target, state=case.state, rng=case.rng)


def train(rank, name, schedule, microbatches, ranks, way="everything"):
    """Two steps on this rank against the reference: where they differ."""
    case, generator, plan = cases.make(name, schedule, ranks, microbatches, cases.rows(microbatches))
    params, batch, target, state = cases.own(case, plan, rank)
    loss, (grads, *of_data), *new = oracle(name, plan.stages, cases.rows(microbatches), microbatches)
    if plan.placement == Placement.both_ways(ranks):
        grads = copies_oracle(name, ranks, microbatches)
    loss, grads, *new = expected_on((loss, grads, *new), params, plan, rank, case.state is not None)
    of_data = [g if x is not None else None for g, x in zip(of_data, (batch, target), strict=True)]
    own = sharing(handler(), name)
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=own, argnums=ALL, **WAYS[way], **case.options)
    found = [step(params, batch, target, state=state, rng=case.rng) for _ in range(2)]
    return [d for each in found for d in differences(each, (loss, (grads, *of_data), *new))]


def copies_oracle(name, ranks, microbatches):
    """The gradients of params that have copies, which are added in another order."""
    _, _, plan = cases.make(name, "dualpipe", ranks, microbatches, cases.rows(microbatches))
    return cases.oracle(name, plan)[1]


def several_readers(ranks=2):
    """A pipeline whose stages on all ranks read one leaf, and one that all microbatches share; its arguments."""

    def layer(p, h, k, s):
        return torch.tanh(h @ p) * k + s

    def first(p, b):
        return layer(p, b["x"], b["k"], b["s"])

    nodes = [Stage(first, reads=[Batch()])]
    nodes += [Stage(layer, reads=[Output(s - 1), Batch("k"), Batch("s")]) for s in (1, 2, 3)]
    generator = torch.Generator().manual_seed(0)
    randn = functools.partial(torch.randn, generator=generator)
    params = {s: randn(4, 4) for s in range(4)}
    batch = {"x": randn(6, 4), "k": randn(6, 4), "s": randn(4), "i": torch.arange(6), "unused": randn(6)}
    axes = {"x": 0, "k": 0, "s": None, "i": 0, "unused": 0}
    pipeline = Pipeline(nodes, loss=lambda y, t: (y - t).square().mean())
    return pipeline, params, batch, randn(6, 4), {"in_axes": (axes, 0)}


def partial_batches(rank, capture):
    """Each rank passes the leaves that its stages read: where three steps differ from the reference."""
    pipeline, params, batch, target, options = several_readers()
    plan = pipeline.plan(Placement.loop(2, 2), 3)
    arguments = {"argnums": "batch", "autodiff": "graph", **options}
    reference = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Reference(), **arguments)
    loss, expected = reference(params, batch, target)
    if rank:
        batch, expected = ({**tree, "x": None, "i": None, "unused": None} for tree in (batch, expected))
        arguments["in_axes"] = ({**options["in_axes"][0], "x": None}, 0)
    step = fpipe.value_and_grad(
        pipeline, schedules.interleaved_zb, plan, handler=handler(), capture=capture, **arguments
    )
    own = pipeline.params_on(params, plan, rank)
    found = [step(own, batch, target if rank else None) for _ in range(3)]
    return [d for each in found for d in differences(each, (loss, expected))]


def replicas(rank, kind="distributed"):
    """Two replicas of two ranks, in this process or in four: where the gradients of the batch differ."""
    pipeline, params, batch, target, options = several_readers()
    plan = pipeline.plan(Placement.loop(2, 2), 1, replicas=2)
    arguments = {"argnums": ("params", "batch"), "resident": 1, **options}
    reference = fpipe.value_and_grad(pipeline, "gpipe", plan, handler=handlers.Reference(), **arguments)
    loss, (grads, of_batch) = reference(params, batch, target)
    if kind == "local":
        step = fpipe.value_and_grad(pipeline, "interleaved-zb", plan, handler=handlers.Local(), **arguments)
        return differences(step(params, batch, target), (loss, (grads, of_batch)))
    mesh = mesh_of(2, 2, names=("dp", "pp"))
    own = handlers.Distributed(mesh["pp"], replicas=mesh["dp"], timeout=30)
    rows = slice(3 * own.grid.replica, 3 * own.grid.replica + 3)
    part = {k: x if k == "s" else x[rows] for k, x in batch.items()}
    alone = pipeline.plan(Placement.loop(2, 2), 1)
    one = fpipe.value_and_grad(pipeline, "gpipe", alone, handler=handlers.Reference(), argnums="batch", **options)
    _, of_part = one(params, part, target[rows])
    expected = optree.tree_map(lambda g: g / 2, of_part)  # a half of the rows
    step = fpipe.value_and_grad(pipeline, "interleaved-zb", plan, handler=own, **arguments)
    shards = interop.fsdp(pipeline.params_on(params, plan, own.rank), mesh["dp"])
    found, (own_grads, found_of_batch) = step(shards, part, target[rows] if own.rank else None)
    own_grads = optree.tree_map(lambda x: x.full_tensor(), own_grads)
    if own.rank:  # its stages read neither
        expected = {**expected, "x": None, "unused": None}
    expected_grads = {s: grads[s] for s in own_grads}
    return differences((found, own_grads, found_of_batch), (loss, expected_grads, expected))
