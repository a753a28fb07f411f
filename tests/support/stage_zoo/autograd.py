"""Stages with an autograd of their own: custom functions and operators, hooks, checkpoints, autocast."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch.utils import checkpoint as ckpt

from tests.support.stage_zoo.example import (
    ROWS,
    WIDTH,
    deep,
    example,
    family,
    layers,
    on,
    randn,
    square,
    wants,
)


class Scaled(torch.autograd.Function):
    """`forward(ctx, ...)`, with a plain argument and an output that is no tensor's gradient."""

    @staticmethod
    def forward(ctx, x, w, factor):
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        sign = (x > 0).to(x)
        ctx.mark_non_differentiable(sign)
        return x * w * factor, sign

    @staticmethod
    def backward(ctx, g, _):
        x, w = ctx.saved_tensors
        return g * w * ctx.factor, (g * x).sum(0) * (ctx.factor + 1), None


class Exponential(torch.autograd.Function):
    """`setup_context`, and a gradient that is not the derivative."""

    @staticmethod
    def forward(x, w):
        y = x.exp()
        return y * w, y

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1], output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, g, _):
        w, y = ctx.saved_tensors
        return 3 * g * w * y if ctx.needs_input_grad[0] else None, (g * y).sum(0)


class Once(torch.autograd.Function):
    """`once_differentiable`, and no gradient at all for its second input."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x.square() + w.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g, None


@example
def function_with_context():
    def fn(p, x):
        y, sign = Scaled.apply(x @ p["w"], p["b"], 3)
        return y, sign

    return on(fn, wants(ROWS, WIDTH), w=square(), b=randn(WIDTH))


@example
def function_with_setup_context():
    return on(lambda p, x: Exponential.apply(x @ p["w"], p["b"]), wants(ROWS, WIDTH), w=square(), b=randn(WIDTH))


@example
def function_once_differentiable():
    return on(lambda p, x: Once.apply(x * p["a"], p["b"]), wants(ROWS, WIDTH), a=randn(WIDTH), b=randn(WIDTH))


@torch.library.custom_op("fpipe_tests::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x * x * x


@cube.register_fake
def _(x):
    return torch.empty_like(x)


cube.register_autograd(
    lambda ctx, g: 3 * g * ctx.saved_tensors[0].square(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@example
def custom_op():
    return on(lambda p, x: cube(x @ p["w"]) + cube(p["b"]), wants(ROWS, WIDTH), w=square(), b=randn(WIDTH))


@example
def gradient_hook():
    def fn(p, x):
        h = torch.tanh(x @ p["w"])
        if h.requires_grad:
            h.register_hook(lambda g: g.clamp(-0.1, 0.1))
        return h * p["b"]

    return on(fn, wants(ROWS, WIDTH), w=square(), b=randn(WIDTH))


@example
def saved_tensor_hooks():
    """What is saved for the backward is rounded."""

    def fn(p, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
            return torch.tanh(x @ p["w"]) * p["b"]

    return on(fn, wants(ROWS, WIDTH), w=square(), b=randn(WIDTH))


@example
def gradient_inside():
    """Forces are the gradient of an energy, and are differentiated again."""

    def fn(p, x):
        with torch.enable_grad():
            place = x if x.requires_grad else x.detach().requires_grad_()
            energy = torch.tanh(place @ p["w"]).square().sum()
            (force,) = torch.autograd.grad(energy, place, create_graph=True)
        return energy, force

    return on(fn, wants(ROWS, WIDTH), w=square())


@example
def straight_through():
    def fn(p, x):
        h = x @ p["w"]
        return h + (h.round() - h).detach()

    return on(fn, wants(ROWS, WIDTH), w=square())


@example
def no_grad_inside():
    def fn(p, x):
        with torch.no_grad():
            target = torch.tanh(x @ p["w"])
        h = x @ p["w"]
        return (h - target).square(), target, h * h.detach().abs().amax()

    return on(fn, wants(ROWS, WIDTH), w=square())


@example
def function_transforms_inside():
    """Forces are the gradient of an energy; and a vmap over rows."""

    def fn(p, x):
        def energy(x):
            return torch.tanh(x @ p["w"]).square().sum()

        return torch.func.grad(energy)(x), torch.func.vmap(lambda row: row * (row @ p["w"]).sum())(x)

    return on(fn, wants(ROWS, WIDTH), w=square())


def block(p, x, dropout=0.0):
    return x + F.dropout(torch.tanh(x @ p["w"]) @ p["v"], dropout, training=dropout > 0)


def checkpointed(fn, *args, **options):
    return ckpt.checkpoint(fn, *args, use_reentrant=False, **options)


@example
def checkpoint_with_dropout():
    return on(lambda p, x: checkpointed(block, p, x, 0.4), wants(ROWS, WIDTH), w=square(), v=square())


@example
def checkpoint_without_randomness():
    def fn(p, x):
        return checkpointed(block, p, checkpointed(block, p, x))

    return on(fn, wants(ROWS, WIDTH), w=square(), v=square())


@example
def checkpoints_in_a_row_with_dropout():
    def fn(p, x):
        for layer in p["blocks"]:
            x = F.dropout(checkpointed(block, layer, x, 0.3), 0.1)
        return x

    return on(fn, wants(ROWS, WIDTH), blocks=[{"w": square(), "v": square()} for _ in range(3)])


@example
def checkpoints_that_draw_alike():
    """Both read the same tensor with the same parameters and draw the same shapes, with other outcomes."""

    def fn(p, x):
        return checkpointed(block, p, x, 0.5) * checkpointed(block, p, x, 0.5)

    return on(fn, wants(ROWS, WIDTH), w=square(), v=square())


@example
def checkpoint_that_draws_twice():
    def fn(p, x):
        def inner(x):
            return F.dropout(x, 0.5) @ p["w"] + F.dropout(x, 0.5).sin()

        return F.dropout(checkpointed(inner, x), 0.5)

    return on(fn, wants(ROWS, WIDTH), w=square())


@example
def checkpoint_in_a_checkpoint():
    def fn(p, x):
        return checkpointed(lambda x: checkpointed(block, p, torch.sin(x), 0.3) * x, x)

    return on(fn, wants(ROWS, WIDTH), w=square(), v=square())


@example
def checkpoint_beside_what_is_unused():
    """One checkpointed block's result goes nowhere, another's carries no gradient."""

    def fn(p, x):
        checkpointed(block, p, x, 0.5)
        return checkpointed(block, p, x, 0.5), checkpointed(block, p, x, 0.5).detach()

    return on(fn, wants(ROWS, WIDTH), w=square(), v=square())


def save_products(ctx, op, *args, **kwargs):
    return (
        ckpt.CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else ckpt.CheckpointPolicy.PREFER_RECOMPUTE
    )


def selective(dropout):
    def fn(p, x):
        mutable = dropout > 0  # under a trace every result is cached, and dropout writes to one of its own
        contexts = partial(ckpt.create_selective_checkpoint_contexts, save_products, allow_cache_entry_mutation=mutable)
        return checkpointed(block, p, x, dropout, context_fn=contexts)

    return on(fn, wants(ROWS, WIDTH), w=square(), v=square())


family(selective, plain={"dropout": 0.0}, dropout={"dropout": 0.5})


def autocast(fn, x, **params):
    def inside(p, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return fn(p, x)

    return on(inside, x, **params)


@example
def autocast_mlp():
    return autocast(lambda p, x: deep(p, x), wants(ROWS, WIDTH), layers=layers(2))


@example
def autocast_weight_twice():
    def fn(p, x):
        return F.layer_norm(F.relu(x @ p["w"]) @ p["w"], (WIDTH,)).exp()

    return autocast(fn, wants(ROWS, WIDTH), w=square())


@example
def autocast_checkpoint():
    return autocast(lambda p, x: checkpointed(block, p, x, 0.3), wants(ROWS, WIDTH), w=square(), v=square())
