"""Replicas of small pipelines: their batches, the reference's results, and jobs for a grid of processes."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from math import prod

import optree
import torch

import fpipe
from fpipe import handlers, interop, schedules
from fpipe.effects import Overlap, parts
from fpipe.handlers.protocol import Inputs
from fpipe.stages.microbatch import Microbatch, merge, size, split
from tests.support import cases, jobs
from tests.support.shards import mesh_of, whole
from tests.support.sharing import sharing

CASES = [name for name in cases.CASES if name != "modules"]  # a state has no replicas


@dataclass(frozen=True)
class Grid:
    """The mesh of a grid of processes: its dimensions, of which "pp" has the ranks of a replica.

    Args:
        text: such as "dp2 shard2 pp1".
    """

    text: str

    @property
    def shape(self):
        return {name: int(size) for name, size in re.findall(r"([a-z]+)(\d+)", self.text)}

    @property
    def ranks(self):
        return self.shape["pp"]

    @property
    def size(self):
        return prod(self.shape.values())

    @property
    def replicas(self):
        return self.size // self.ranks

    @property
    def mesh(self):
        return mesh_of(*self.shape.values(), names=tuple(self.shape))

    @property
    def over(self):
        """The mesh of the replicas."""
        names = tuple(name for name in self.shape if name != "pp")
        return self.mesh[names if len(names) > 1 else names[0]]


@functools.cache
def handler(grid, exact=True):
    """One handler for all jobs of this process on a grid: its connections are made once."""
    return handlers.Distributed(grid.mesh["pp"], replicas=grid.over, exact=exact, timeout=30)


def make(name, schedule, ranks, replicas, microbatches):
    """(case, schedule, plan) with the whole batch of all replicas, whose microbatches are of several sizes."""
    case, generator, plan = cases.make(name, schedule, ranks, microbatches, cases.rows(replicas * microbatches))
    return case, generator, replace(plan, replicas=replicas)


def rooms(schedule, plan):
    """The numbers of stages that may be whole at a time: from the least that the schedule can do with, to all."""
    programs = fpipe.lower(schedule, plan).values()
    least = 2 if any(type(e) is Overlap and both(e) for program in programs for e in program) else 1
    return range(least, max(len(plan.stages_on(rank)) for rank in range(plan.ranks)) + 1)


def both(overlap):
    """Whether an effect is of two stages at once."""
    return len({part.stage for part in parts(overlap)}) > 1


def room(schedule, plan, which):
    """The least number of stages that may be whole, or that of all, or None."""
    return None if which is None else {"least": min, "all": max}[which](rooms(schedule, plan))


def oracle(name, plan):
    """The reference's result for the whole batch: it knows no schedule, so that one call does for all."""
    return _oracle(name, plan.placement, plan.microbatches, plan.replicas)


@functools.cache
def _oracle(name, placement, microbatches, replicas):
    case = cases.built(name, placement.stages, cases.rows(replicas * microbatches))
    plan = case.pipeline.plan(placement, microbatches, replicas=replicas)
    return cases.reference(case, schedules.gpipe, plan)


def part(tree, axis, plan, replica, rows=None):
    """A replica's rows of a tree: those of its microbatches, or of its own number."""
    if tree is None:
        return None
    if rows is not None:
        first = sum(rows[:replica])
        return optree.tree_map(lambda x: x[first : first + rows[replica]], tree)
    count = plan.microbatches
    parts, _ = split(tree, plan.replicas * count, axis)
    return merge(parts[replica * count : (replica + 1) * count], axis)


def arguments(case, plan, grid, rows=None):
    """The arguments of a process: params, and its replica's batch and target."""
    params, batch, target, _ = cases.own(case, plan, grid.rank)
    axes = case.options.get("in_axes", 0)
    batch_axis, target_axis = axes if isinstance(axes, tuple) else (axes, axes)
    return (
        params,
        part(batch, batch_axis, plan, grid.replica, rows),
        part(target, target_axis, plan, grid.replica, rows),
    )


def train(rank, grid, name, schedule, microbatches, which, way="eager"):
    """Two steps on this process against the reference: where they differ."""
    case, generator, plan = make(name, schedule, grid.ranks, grid.replicas, microbatches)
    shared = sharing(handler(grid), name, plan.stages, way)
    return compare(grid, case, generator, plan, oracle(name, plan), which, own=shared, **jobs.WAYS[way])


def compare(grid, case, schedule, plan, expected, which, rows=None, own=None, **options):
    """Two steps on this process against a result of all replicas: where they differ, and gradients misplaced."""
    shared = handler(grid)
    params, batch, target = arguments(case, plan, shared.grid, rows)
    expected = jobs.expected_on(expected, params, plan, shared.rank, False)
    if which is not None:
        params = interop.fsdp(params, grid.over)
    options = {"resident": room(schedule, plan, which), **case.options, **options}
    step = fpipe.value_and_grad(case.pipeline, schedule, plan, handler=own or shared, **options)
    before, found = optree.tree_map(torch.clone, params, namespace="fpipe"), []
    for _ in range(2):
        loss, grads = step(params, batch, target, rng=case.rng)
        found += misplaced(grads, params)
        found += jobs.differences((loss, whole(grads)), expected)
    return found + [("params", *path) for path in jobs.differences(whole(params), whole(before))]


def train_uneven(rank, grid, name, schedule, microbatches, rows, which):
    """Two steps of replicas with numbers of rows of their own, against the reference's run of their microbatches."""
    case, generator, plan = cases.make(name, schedule, grid.ranks, microbatches, sum(rows))
    plan = replace(plan, replicas=grid.replicas)
    return compare(grid, case, generator, plan, uneven(case, plan, rows), which, rows)


def uneven(case, plan, rows):
    """The reference's result where each replica has its own number of rows."""
    total, data = sum(rows), []
    for replica in range(plan.replicas):
        batch, target = (part(tree, 0, plan, replica, rows) for tree in (case.batch, case.target))
        halves = [split(tree, plan.microbatches)[0] for tree in (batch, target)]
        shares = [size(rows[replica], plan.microbatches, m) / total for m in range(plan.microbatches)]
        data += [Microbatch(*both, lambda share=share: share) for *both, share in zip(*halves, shares, strict=True)]
    step = fpipe.value_and_grad(case.pipeline, schedules.gpipe, plan, handler=handlers.Reference(), autodiff="eager")
    results = step.run(Inputs(case.params, {}, data, rng=case.rng))
    return step.spec.total(results.losses), results.gradients


def alone(case, plan, replica):
    """The gradients of one replica's microbatches, weighed by their shares of all rows."""
    count, total = plan.microbatches, plan.replicas * plan.microbatches
    batch, rows = split(case.batch, total)
    target, _ = split(case.target, total)
    numbers = range(replica * count, (replica + 1) * count)
    data = [Microbatch(batch[m], target[m], lambda m=m: size(rows, total, m) / rows) for m in numbers]
    plan = replace(plan, replicas=1)
    step = fpipe.value_and_grad(case.pipeline, schedules.gpipe, plan, handler=handlers.Reference(), autodiff="eager")
    return step.run(Inputs(case.params, {}, data)).gradients


def added(trees):
    return functools.reduce(lambda a, b: optree.tree_map(torch.add, a, b), trees)


def inexact(rank, grid, name, schedule, which):
    """Differences of the loss, and the largest error of a gradient beside the largest number of its tensor."""
    case, generator, plan = make(name, schedule, grid.ranks, grid.replicas, 2)
    shared = handler(grid, exact=False)
    params, batch, target = arguments(case, plan, shared.grid)
    expected = jobs.expected_on(oracle(name, plan), params, plan, shared.rank, False)
    if which is not None:
        params = interop.fsdp(params, grid.over)
    options = {"resident": room(generator, plan, which), "autodiff": "eager", **case.options}
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=shared, **options)
    loss, grads = step(params, batch, target, rng=case.rng)
    pairs = zip(*(optree.tree_leaves(tree, namespace="fpipe") for tree in (whole(grads), expected[1])), strict=True)
    return jobs.differences(loss, expected[0]), max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def misplaced(grads, params):
    """The gradients that are not placed as their parameters."""
    from torch.distributed.tensor import DTensor

    none = {"none_is_leaf": True, "namespace": "fpipe"}
    pairs = zip(optree.tree_leaves(grads, **none), optree.tree_leaves(params, **none), strict=True)
    return [
        ("placement", type(grad).__name__)
        for grad, param in pairs
        if grad is not None
        and (
            isinstance(grad, DTensor) != isinstance(param, DTensor)
            or (isinstance(param, DTensor) and grad.placements != param.placements)
        )
    ]
