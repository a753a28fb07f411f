"""Context parallelism: a small causal model whose attention has keys of other ranks, against one process."""

from __future__ import annotations

import functools

import optree
import torch
import torch.nn.functional as F

import fpipe
from fpipe import handlers, parallel
from tests.support.replica_jobs import Grid

ROWS, TOKENS, WIDTH, HEADS = 4, 8, 8, 2


def relative(found, expected):
    """The largest error of a leaf beside its norm."""
    pairs = zip(optree.tree_leaves(found), optree.tree_leaves(expected), strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def block(group=None, is_causal=True, ring=False, heads=HEADS):
    """A stage: attention with learned positions, and a layer. Without a group, that of one process."""

    def stage(params, x):
        tokens = torch.arange(x.shape[1]) if group is None else parallel.positions(x.shape[1], group)
        x = x + params["positions"][tokens]
        q, k, v = ((x @ params[name]).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for name in ("q", "k", "v"))
        options = {"is_causal": is_causal, "enable_gqa": heads != HEADS}
        if group is None:
            y = F.scaled_dot_product_attention(q, k, v, **options)
        else:
            y = parallel.attention(q, k, v, group, ring=ring, **options)
        return x + (y.transpose(1, 2).flatten(2) @ params["o"]).tanh()

    return stage


def params_of(stages, heads=HEADS):
    generator = torch.Generator().manual_seed(0)
    few = WIDTH * heads // HEADS
    shapes = {"q": (WIDTH, WIDTH), "k": (WIDTH, few), "v": (WIDTH, few), "o": (WIDTH, WIDTH)}
    shapes["positions"] = (TOKENS, WIDTH)
    return {
        s: {name: torch.randn(shape, generator=generator) / 2 for name, shape in shapes.items()} for s in range(stages)
    }


def data():
    return torch.randn(2, ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).unbind()


def mse(output, target):
    return (output - target).square().mean()


def tokens_of(target):
    return target[..., 0].numel()


@functools.cache
def oracle(stages, is_causal, heads):
    """Outputs, loss and gradients of one process."""
    pipeline, params = (
        fpipe.Pipeline([block(None, is_causal, heads=heads)] * stages, loss=mse),
        params_of(stages, heads),
    )
    grads, loss = torch.func.grad_and_value(lambda params: pipeline(params, *data()))(params)
    output = data()[0]
    for own in params.values():
        output = block(None, is_causal, heads=heads)(own, output)
    return output, loss, grads


@functools.cache
def handler(grid):
    mesh = grid.mesh
    return mesh, handlers.Distributed(mesh["pp"], replicas=grid.over, context="cp", timeout=30)


def train(rank, text, schedule, chunks, is_causal, ring, heads, weighed):
    """The errors of loss, gradients and outputs on this process."""
    grid = Grid(text)
    mesh, own = handler(grid)
    group, stages, many = mesh["cp"], grid.ranks * chunks, grid.shape.get("dp", 1)
    pipeline = fpipe.Pipeline([block(group, is_causal, ring, heads)] * stages, loss=mse)
    placement = fpipe.Placement.v(grid.ranks) if schedule == "zb-v" else fpipe.Placement.loop(grid.ranks, chunks)
    plan = pipeline.plan(placement, ROWS // many // 2, replicas=grid.replicas)
    params = pipeline.params_on(params_of(stages, heads), plan, own.rank)
    rows = mesh["dp"].get_local_rank() if many > 1 else 0
    batch, target = (parallel.shard_sequence(x.chunk(many)[rows], group) for x in data())
    step = fpipe.value_and_grad(pipeline, schedule, plan, handler=own, weight=tokens_of if weighed else None)
    loss, grads = step(params, batch, target)
    output, value, expected = oracle(stages, is_causal, heads)
    part = fpipe.evaluate(pipeline, plan, handler=own)(params, batch)
    errors = [0.0]
    if part is not None:
        whole = parallel.unshard_sequence(part, group)
        errors = [relative(whole, output.chunk(many)[rows])]
    return float((loss - value).abs() / value), relative(grads, {s: expected[s] for s in grads}), *errors


def masked(rank):
    """The errors of loss and gradients where the tokens of one rank have no targets, and so its loss no weight."""
    mesh, own = handler(Grid("pp1 cp2"))
    batch, target = data()
    target[:, [0, 1, -2, -1]] = torch.nan  # rank 0's

    def loss(output, target):
        is_counted = ~target.isnan().any(-1)
        errors = (output - target.nan_to_num()).square().mean(-1) * is_counted
        return errors.sum() / is_counted.sum().clamp(min=1)

    pipeline, whole = (fpipe.Pipeline([block(group)], loss=loss) for group in (mesh["cp"], None))
    plan = pipeline.plan(fpipe.Placement.loop(1), 2, replicas=2)
    step = fpipe.value_and_grad(
        pipeline, "gpipe", plan, handler=own, weight=lambda target: float((~target.isnan().any(-1)).sum())
    )
    found = step(params_of(1), *(parallel.shard_sequence(x, mesh["cp"]) for x in (batch, target)))
    grads, value = torch.func.grad_and_value(lambda params: whole(params, batch, target))(params_of(1))
    return float((found[0] - value).abs() / value), relative(found[1], grads)


def refusals(rank):
    """What a handler with context= refuses, by name, and the step after that."""
    mesh, own = handler(Grid("pp1 cp2"))
    pipeline = fpipe.Pipeline([block(mesh["cp"])], loss=mse)
    plan = pipeline.plan(fpipe.Placement.loop(1), 1, replicas=2)
    step = fpipe.value_and_grad(pipeline, "gpipe", plan, handler=own)
    batch, target = (parallel.shard_sequence(x, mesh["cp"]) for x in data())
    calls = {
        "rows": lambda: step(params_of(1), batch[: ROWS - rank], target[: ROWS - rank]),
        "gather": lambda: fpipe.evaluate(pipeline, plan, handler=own, gather=True),
        "name": lambda: handlers.Distributed(mesh["pp"], replicas=mesh["cp"], context="sequence"),
        "tokens": lambda: parallel.shard_sequence(torch.zeros(2, 6), mesh["cp"]),
        "odd": lambda: parallel.attention(*torch.zeros(3, 1, 2, 3, 4), mesh["cp"], is_causal=True),
        "heads": lambda: parallel.attention(*torch.zeros(2, 1, 2, 4, 4), torch.zeros(1, 1, 4, 4), mesh["cp"]),
    }
    alone = fpipe.value_and_grad(pipeline, "gpipe", plan, handler=handlers.Local())
    calls["local"] = lambda: alone(params_of(1), batch, target)
    calls["together"] = lambda: alone(params_of(1), *(x[:, : TOKENS // 2] for x in data()))
    loss, _ = step(params_of(1), batch, target)
    return {name: text_of(call) for name, call in calls.items()}, loss


def text_of(call):
    """The text of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def orders(rank):
    """Whole tensors cut and joined, positions, and attention by the formula in place of kernels, in bits of float64."""
    group = Grid("pp1 cp2").mesh["cp"]
    x = torch.arange(16.0).reshape(2, 8)
    mine = parallel.shard_sequence(x, group)
    errors = []
    for is_causal in (False, True):
        for ring in (False, True):
            q, k, v = torch.randn(
                3, 2, 2, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
            ).unbind()
            v = v[..., :3]  # narrower than the keys, which no kernel takes
            own = [parallel.shard_sequence(y, group, 2).requires_grad_() for y in (q, k, v)]
            y = parallel.attention(*own, group, is_causal=is_causal, ring=ring)
            grads = torch.autograd.grad(y.sin().sum(), own)
            whole = [y.requires_grad_() for y in (q, k, v)]
            expected = F.scaled_dot_product_attention(*whole, is_causal=is_causal)
            of_whole = torch.autograd.grad(expected.sin().sum(), whole)
            errors += [relative(y, parallel.shard_sequence(expected, group, 2))]
            errors += [relative(a, parallel.shard_sequence(b, group, 2)) for a, b in zip(grads, of_whole, strict=True)]
    return (
        mine,
        parallel.unshard_sequence(mine, group),
        parallel.positions(4, group),
        float(torch.tensor(errors).amax()),
    )
