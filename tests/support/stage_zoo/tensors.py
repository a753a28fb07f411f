"""Tensors: writes in place, views, complex numbers, constants, and memory layouts."""

from __future__ import annotations

import math

import torch
from torch import nn

from tests.support.stage_zoo.example import (
    LENGTH,
    ROWS,
    WIDTH,
    example,
    family,
    on,
    randn,
    square,
    wants,
)


@example
def in_place_on_intermediates():
    def fn(p, x):
        y = (x @ p["w"]).relu_()
        y = y + p["b"]
        y += 1
        y[x > 0] = 0
        z = y.clone()
        z[:, 1:3] *= x[:, 1:3]
        z[torch.tensor([0, 2])] = p["b"]
        z.t()[0].mul_(2)
        return y, z, z.sin().sub_(x)

    return on(fn, wants(ROWS, WIDTH), w=square(), b=randn(WIDTH))


@example
def in_place_into_a_buffer():
    def fn(p, x):
        out = torch.empty(2 * ROWS, WIDTH)
        out[:ROWS] = x @ p["w"]
        out[ROWS:].copy_(x).add_(p["b"])
        count = torch.zeros(ROWS, dtype=torch.long)
        count.index_add_(0, x.argmax(1) % ROWS, torch.ones(ROWS, dtype=torch.long))
        total = torch.zeros(WIDTH)
        for row in x:
            total = total + row
        return out, count, total, torch.zeros(WIDTH, ROWS).scatter_(0, x.argmax(1)[None], x.amax(1)[None])

    return on(fn, wants(ROWS, WIDTH), w=square(), b=randn(WIDTH))


@example
def in_place_then_read_by_a_view():
    def fn(p, x):
        y = x * p["b"]
        view = y[1]
        y.add_(x)
        head = view * 2
        view.mul_(3)
        return head, y, view

    return on(fn, wants(ROWS, WIDTH), b=randn(WIDTH))


@example
def complex_values():
    def fn(p, v):
        z = torch.fft.fft(v["x"]) * p["c"] + v["z"].conj()
        w = torch.view_as_complex(torch.stack([v["x"], z.imag], -1))
        return {"z": z @ p["c"].outer(p["c"]).conj(), "abs": z.abs(), "w": torch.fft.irfft(w), "conj": w.conj()}

    v = {"x": wants(ROWS, WIDTH), "z": wants(ROWS, WIDTH, dtype=torch.complex64)}
    return on(fn, v, c=randn(WIDTH, dtype=torch.complex64))


@example
def conjugate_and_negative_views():
    """Inputs and outputs whose memory holds the conjugate, or the negative, of what they are."""

    def fn(p, v):
        return v["z"] * p["c"], (v["z"] @ p["c"].conj()).conj(), v["n"] * 2, (v["z"] * p["c"]).conj().imag

    z = wants(ROWS, WIDTH, dtype=torch.complex64).detach().conj()
    return on(fn, {"z": z.requires_grad_(), "n": z.detach().imag}, c=randn(WIDTH, dtype=torch.complex64))


@example
def closed_over_tensor():
    table, module = randn(LENGTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def fn(p, x):
        return module(x @ p["w"]) * table[0] + table.sum(), table

    return on(fn, wants(ROWS, WIDTH), w=square())


@example
def closed_over_parameter():
    """It requires a gradient, and is read without."""
    scale = wants(WIDTH)

    def fn(p, x):
        with torch.no_grad():
            factor = scale * 2
        return x @ p["w"] * scale.detach(), factor, x.detach() * factor

    return on(fn, wants(ROWS, WIDTH), w=square())


@example
def constants_made_inside():
    def fn(p, x):
        mask = torch.ones(WIDTH, WIDTH).tril()
        angles = torch.arange(WIDTH)[None] / torch.tensor([10.0, 3.0, 1.5, 7.0])[:, None]
        scale = torch.tensor(2.0, requires_grad=True)
        return x @ (p["w"] * mask) + angles.sin() * x.new_tensor(3) + torch.full_like(x, math.pi) * scale, angles

    return on(fn, wants(ROWS, WIDTH), w=square())


@example
def parameters_alone_are_much_work():
    """Weights are standardised, cast and transposed before they meet the input."""

    def fn(p, x):
        w = (p["w"] - p["w"].mean(0)) / (p["w"].std(0) + 1e-5)
        low = (p["a"] @ p["b"]).bfloat16()
        return x @ (w + low.float()).T + torch.tanh(p["c"]).exp()

    return on(fn, wants(ROWS, WIDTH), w=square(), a=randn(WIDTH, 2), b=randn(2, WIDTH), c=randn(WIDTH))


def other_layout(form):
    """Inputs and parameters that are not contiguous."""
    if form == "transposed":
        x, w = randn(WIDTH, ROWS).T.requires_grad_(), square().T
    elif form == "sliced":
        x, w = randn(ROWS, 2 * WIDTH)[:, ::2].requires_grad_(), randn(WIDTH, 2 * WIDTH)[:, WIDTH:]
    else:
        x, w = randn(1, WIDTH).expand(ROWS, WIDTH).requires_grad_(), randn(WIDTH, 1).expand(WIDTH, WIDTH)
    return on(lambda p, x: (torch.tanh(x @ p["w"]).reshape(-1), x + 1, p["w"].reshape(-1)), x, w=w)


family(other_layout, transposed={"form": "transposed"}, sliced={"form": "sliced"}, expanded={"form": "expanded"})
