"""Pipelines with mixtures of experts: their params and batches, the reference's results, and jobs for grids."""

from __future__ import annotations

import functools
import time

import optree
import torch

import fpipe
from fpipe import handlers, interop, parallel, schedules
from tests.support import cases, replica_jobs
from tests.support.shards import whole

WIDTH, HIDDEN, TOKENS = 4, 6, 5  # numbers of a token, of an expert's hidden layer, tokens of a row
MICROBATCHES = 4  # of a replica, of one row each


def ffn(params, x):
    """All experts of a process."""
    return torch.bmm(torch.bmm(x, params["up"]).tanh(), params["down"])


def block(params, x, k, factor, group):
    """(x, balance loss) of a layer of experts."""
    routing = parallel.route(x @ params["router"], k)
    y = parallel.mixture_of_experts(ffn, params["experts"], x, routing, group, capacity_factor=factor)
    return x + y * params["scale"], parallel.balance_loss(routing)


def loss_of(output, target):
    """The mean over the tokens whose target is not NaN, and the balance losses."""
    x, balance = output
    errors = (x - target.nan_to_num()).square().mean(-1) * is_counted(target)
    return errors.sum() / is_counted(target).sum().clamp(min=1) + 0.1 * balance, {"balance": balance}


def is_counted(target):
    return ~target.isnan().any(-1)


def weight(target):
    return float(is_counted(target).sum())


def pipeline_of(stages, k, factor=None, group=None):
    """Every stage is a layer of experts, and adds its balance loss to those before."""

    def first(params, x):
        return block(params, x, k, factor, group)

    def other(params, before):
        x, balance = block(params, before[0], k, factor, group)
        return x, before[1] + balance

    return fpipe.Pipeline([first, *[other] * (stages - 1)], loss=loss_of)


def params_of(stages, experts=4):
    generator = torch.Generator().manual_seed(0)

    def values(*shape):
        return torch.randn(shape, generator=generator)

    return {
        stage: {
            "router": values(WIDTH, experts),
            "scale": values(WIDTH),
            "experts": {"up": values(experts, WIDTH, HIDDEN), "down": values(experts, HIDDEN, WIDTH)},
        }
        for stage in range(stages)
    }


def batch_of(rows, masked=False):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, rows, TOKENS, WIDTH, generator=generator)
    if masked:
        y[1] = torch.nan  # of the second microbatch of the first replica
    return x, y


@functools.cache
def oracle(stages, k, factor, microbatches, replicas, masked):
    """The reference's result: one process, with all experts."""
    pipeline = pipeline_of(stages, k, factor)
    plan = pipeline.plan(fpipe.Placement([0] * stages), microbatches, replicas=replicas)
    step = fpipe.value_and_grad(
        pipeline, schedules.gpipe, plan, handler=handlers.Reference(), has_aux=True, weight=weight if masked else None
    )
    return step(params_of(stages), *batch_of(microbatches * replicas, masked))


@functools.cache
def handler(grid, exact=True):
    mesh = grid.mesh
    return handlers.Distributed(mesh["pp"], replicas=grid.over, experts="ep", exact=exact, timeout=30)


def sharded(params, grid, fsdp=False):
    from torch.distributed.tensor import Shard

    params = interop.shard(params, grid.mesh["ep"], {"experts.*": [Shard(0)]})
    return interop.fsdp(params, grid.mesh["dp"]) if fsdp else params


def train(rank, grid, schedule, k, factor, sums, masked):
    """Two steps on this process against the reference.

    Args:
        sums: how gradients are added: "exact", "inexact", or "fsdp" of sharded params.
        masked: microbatches weigh by their targets, of which one microbatch has none.

    Returns:
        The loss, that of the reference, the largest relative error of a gradient or of their norm, and that of a
        balance loss.
    """
    generator, place = cases.SCHEDULES[schedule]
    placement, own = place(grid.ranks), handler(grid, sums != "inexact")
    pipeline = pipeline_of(placement.stages, k, factor, grid.mesh["ep"])
    plan = pipeline.plan(placement, MICROBATCHES, replicas=grid.replicas)
    params = sharded(pipeline.params_on(params_of(plan.stages), plan, own.rank), grid, sums == "fsdp")
    options = {"resident": len(params) if sums == "fsdp" else None, "weight": weight if masked else None}
    step = fpipe.value_and_grad(pipeline, generator, plan, handler=own, has_aux=True, gather=True, **options)
    (expected, aux), gradients = oracle(plan.stages, k, factor, MICROBATCHES, grid.replicas, masked)
    batch, target = batch_on(own, masked)
    norm, worst = torch.cat([x.flatten() for x in optree.tree_leaves(gradients, namespace="fpipe")]).norm(), []
    for _ in range(2):
        (loss, balance), grads = step(params, batch, target)
        worst.append(float((fpipe.global_norm(grads, plan, handler=own) / norm - 1).abs()))
        worst.append(error_of(whole(grads), {stage: gradients[stage] for stage in params}))
        worst.append(len(replica_jobs.misplaced(grads, params)))
    return float(loss), float(expected), float(torch.tensor(worst).amax()), error_of(balance, aux)


def batch_on(own, masked=False):
    """The rows of this process's replica."""
    replicas = own.grid.replicas
    return [x.chunk(replicas)[own.grid.replica] for x in batch_of(MICROBATCHES * replicas, masked)]


def error_of(tree, expected):
    """The largest |x - y| / |y| of two trees."""
    pairs = zip(*(optree.tree_leaves(each, namespace="fpipe") for each in (tree, expected)), strict=True)
    return float(torch.stack([(x - y).norm() / y.norm() for x, y in pairs]).amax())  # NaN if one is


# Training, and checkpoints

SGD = interop.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)


def step_of(own, group=None, replicas=1):
    pipeline = pipeline_of(2, 2, None, group)
    ranks = getattr(own, "size", 1)
    plan = pipeline.plan(fpipe.Placement([0, ranks - 1]), MICROBATCHES, replicas=replicas)
    options = {"max_norm": 0.5, "has_aux": True, "autodiff": "eager" if group is None else "graph"}
    step = fpipe.train_step(pipeline, schedules.gpipe, plan, SGD, handler=own, **options)
    return pipeline, plan, step


@functools.cache
def trained(replicas, steps):
    """(params, optimizer state, norms) of one process after some steps."""
    _, _, step = step_of(handlers.Local(), replicas=replicas)
    params = params_of(2)
    state, norms = SGD.init(params), []
    for _ in range(steps):
        params, state, _, norm = step(params, state, *batch_of(MICROBATCHES * replicas))
        norms.append(float(norm))
    return params, state, norms


def train_and_save(rank, grid, folder):
    """Two steps on this process, saved; errors of params, state and norms against one process."""
    own = handler(grid)
    pipeline, plan, step = step_of(own, grid.mesh["ep"], grid.replicas)
    params = sharded(pipeline.params_on(params_of(2), plan, own.rank), grid)
    state, norms = SGD.init(params), []
    for _ in range(2):
        params, state, _, norm = step(params, state, *batch_on(own))
        norms.append(float(norm))
    interop.Checkpoints(folder, pipeline, plan, handler=own).save(params=params, optimizer=state)
    return compared(grid, 2, params, state, norms)


def load_and_train(rank, grid, folder):
    """A third step on this process, of the state that another mesh has saved; errors as of the steps before."""
    own = handler(grid)
    pipeline, plan, step = step_of(own, grid.mesh["ep"], grid.replicas)
    zeros = optree.tree_map(torch.zeros_like, params_of(2), namespace="fpipe")
    params = sharded(pipeline.params_on(zeros, plan, own.rank), grid)
    saved = interop.Checkpoints(folder, pipeline, plan, handler=own).load(params=params, optimizer=SGD.init(params))
    params, state, _, norm = step(saved["params"], saved["optimizer"], *batch_on(own))
    return compared(grid, 3, params, state, [float(norm)])


def compared(grid, steps, params, state, norms):
    wanted, moments, expected = trained(grid.replicas, steps)
    pairs = zip(norms, expected[-len(norms) :], strict=True)
    errors = [abs(norm / other - 1) for norm, other in pairs]
    for tree, whole_tree in ((params, wanted), (state, moments)):
        errors.append(error_of(whole(tree), {stage: whole_tree[stage] for stage in params}))
    return float(torch.tensor(errors).amax())


def profiled(rank, grid):
    """(bytes of parameters, seconds of a forward) of a stage, measured in all processes at once."""
    params, own = sharded(params_of(1), grid), handler(grid)
    costs = fpipe.profile(
        pipeline_of(1, 2, None, grid.mesh["ep"]),
        params,
        *batch_on(own),
        microbatches=2,
        has_aux=True,
        handler=own,
        repeats=1,
    )
    return costs.parameters, costs.forward[0]


# What is refused


def refusals(rank, grid):
    """The errors of steps that can't run: of a handler without `experts=`, and of experts of unequal numbers."""
    messages = []
    for own, count in ((replica_jobs.handler(grid), 4), (handler(grid), 3)):
        pipeline = pipeline_of(1, 1, None, grid.mesh["ep"])
        plan = pipeline.plan(fpipe.Placement.loop(1), MICROBATCHES, replicas=grid.replicas)
        step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=own, has_aux=True)
        try:
            step(sharded(params_of(1, count), grid), *batch_on(own))
        except fpipe.StageError as error:
            messages.append(str(error))
    try:
        handlers.Distributed(grid.mesh["pp"], replicas=grid.over, experts="pp")
    except ValueError as error:
        messages.append(str(error))
    try:
        block(params_of(1, 3)[0], batch_of(1)[0], 1, None, grid.mesh["ep"])
    except ValueError as error:
        messages.append(str(error))
    return messages


def unequal(rank, grid):
    """The error of a step in which the second replica has shorter rows, and the loss of the step after it."""
    own = handlers.Distributed(grid.mesh["pp"], replicas=grid.over, experts="ep", timeout=30)
    pipeline = pipeline_of(1, 1, None, grid.mesh["ep"])
    plan = pipeline.plan(fpipe.Placement.loop(1), MICROBATCHES, replicas=grid.replicas)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=own, has_aux=True)
    batch, target = batch_on(own)
    params, tokens = sharded(params_of(1), grid), TOKENS - own.grid.replica
    try:
        step(params, batch[:, :tokens], target[:, :tokens])
    except fpipe.StageError as error:
        (loss, _), _ = step(params, batch, target)
        return str(error), float(loss)


def refused(rank, grid):
    """The error of a step that the last replica alone refuses, after how many seconds; and if the next one is right."""
    own = handlers.Distributed(grid.mesh["pp"], replicas=grid.over, experts="ep", timeout=30)
    pipeline = pipeline_of(1, 1, None, grid.mesh["ep"])
    plan = pipeline.plan(fpipe.Placement.loop(1), MICROBATCHES, replicas=grid.replicas)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=own, has_aux=True)
    params, batch = sharded(params_of(1), grid), batch_on(own)
    (loss, _), _ = step(params, *batch)
    cut = [x[:1] for x in batch] if own.grid.replica == grid.replicas - 1 else batch
    began = time.monotonic()
    try:
        step(params, *cut)
    except (fpipe.StageError, fpipe.TransportError) as error:
        seconds = time.monotonic() - began
        (again, _), _ = step(params, *batch)
        return str(error), seconds, bool(again == loss)


# Parts of rows


def attend(params, x, mesh):
    q, k, v = ((x @ params[name]).unflatten(-1, (2, 2)).transpose(1, 2) for name in "qkv")
    if mesh is None:
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        y = parallel.attention(q, k, v, mesh["cp"], is_causal=True)
    return x + y.transpose(1, 2).flatten(2)


def context(rank, grid):
    """Errors of loss and gradients of stages whose rows and experts are both spread, in float64."""

    def step_of(mesh, own, microbatches, replicas=1):
        def stage(params, x):
            return block(params, attend(params, x, mesh), 2, None, mesh and mesh["ep"])[0]

        pipeline = fpipe.Pipeline([stage, stage], loss=torch.nn.functional.mse_loss)
        plan = pipeline.plan(fpipe.Placement.loop(1, chunks=2), microbatches, replicas=replicas)
        return fpipe.value_and_grad(pipeline, schedules.zb_v, plan, handler=own)

    generator = torch.Generator().manual_seed(2)
    params = params_of(2)
    for tree in params.values():
        tree |= {name: torch.randn(WIDTH, WIDTH, generator=generator) for name in "qkv"}
    params = optree.tree_map(torch.Tensor.double, params, namespace="fpipe")
    rows = torch.randn(2, 8, 8, WIDTH, generator=generator).double()
    expected, gradients = step_of(None, handlers.Reference(), 8)(params, *rows)
    mesh = grid.mesh
    own = handlers.Distributed(mesh["pp"], replicas=grid.over, context="cp", experts="ep", timeout=30)
    parts = [parallel.shard_sequence(x.chunk(2)[mesh["ep"].get_local_rank()], mesh["cp"]) for x in rows]
    loss, grads = step_of(mesh, own, 4, grid.replicas)(sharded(params, grid), *parts)
    return float(loss / expected - 1), error_of(whole(grads), gradients)
