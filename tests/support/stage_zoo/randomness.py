"""Random numbers: dropout, noise and decisions, used or not."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.support.stage_zoo.example import (
    ROWS,
    WIDTH,
    example,
    on,
    square,
    wants,
)


def random(fn, x=None, **params):
    return on(fn, wants(ROWS, WIDTH) if x is None else x, w=square(), **params)


@example
def random_dropout():
    return random(lambda p, x: F.dropout(F.relu(F.dropout(x, 0.3) @ p["w"]), 0.5))


@example
def random_dropout_of_channels():
    def fn(p, x):
        return F.alpha_dropout(F.dropout2d(x, 0.4) * 2, 0.2, training=True) @ p["w"]

    return random(fn, wants(2, 4, 3, WIDTH))


@example
def random_weight_dropout():
    """It depends on parameters alone, and differs from microbatch to microbatch."""
    return random(lambda p, x: x @ F.dropout(p["w"], 0.5))


@example
def random_noise():
    """It depends on nothing, and differs from microbatch to microbatch."""

    def fn(p, x):
        y = x @ p["w"] + torch.randn(WIDTH) * torch.rand(()) + torch.rand_like(x)
        return y + torch.empty(WIDTH).uniform_() + torch.normal(0.0, 1.0, (WIDTH,)), torch.randint(9, (3,))

    return random(fn)


@example
def random_decisions():
    def fn(p, x):
        h = x @ p["w"]
        chosen = torch.multinomial(h.detach().softmax(1), 2)
        mask = torch.bernoulli(h.detach().sigmoid())
        return (
            F.gumbel_softmax(h, hard=True),
            h * mask,
            h.gather(1, chosen),
            h[torch.randperm(ROWS)],
            F.rrelu(h, training=True),
        )

    return random(fn)


@example
def random_draw_that_nobody_uses():
    def fn(p, x):
        torch.rand(3)
        y = F.dropout(x, 0.5) @ p["w"]
        F.dropout(p["w"], 0.5)
        return y

    return random(fn)


@example
def random_draw_without_gradients():
    def fn(p, x):
        with torch.no_grad():
            noisy = F.dropout(x, 0.5)
        return (noisy @ p["w"], noisy)

    return random(fn)
