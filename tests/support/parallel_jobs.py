"""Stages that compute together: jobs for the processes of a pool, and what one process computes in their place."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fpipe import parallel

SIZE = 3
COLLECTIVES = {
    "all_reduce": lambda x, group: parallel.all_reduce(x, group),
    "all_gather": lambda x, group: parallel.all_gather(x, group),
    "all_gather of the last dimension": lambda x, group: parallel.all_gather(x, group, dim=-1),
    "reduce_scatter": lambda x, group: parallel.reduce_scatter(x, group),
    "reduce_scatter of dimension 1": lambda x, group: parallel.reduce_scatter(x, group, dim=1),
    "all_to_all": lambda x, group: parallel.all_to_all(x, group),
    "all_to_all of two dimensions": lambda x, group: parallel.all_to_all(x, group, split_dim=1, concat_dim=0),
    "shift": lambda x, group: parallel.shift(x, group),
    "shift back": lambda x, group: parallel.shift(x, group, by=-1),
}


def parts(xs, dim):
    """[from][to]: the tensors cut into parts."""
    return [x.chunk(len(xs), dim) for x in xs]


ORACLES = {
    "all_reduce": lambda xs: [sum(xs)] * len(xs),
    "all_gather": lambda xs: [torch.cat(xs)] * len(xs),
    "all_gather of the last dimension": lambda xs: [torch.cat(xs, -1)] * len(xs),
    "reduce_scatter": lambda xs: list(sum(xs).chunk(len(xs))),
    "reduce_scatter of dimension 1": lambda xs: list(sum(xs).chunk(len(xs), 1)),
    "all_to_all": lambda xs: [torch.cat(received) for received in zip(*parts(xs, 0), strict=True)],
    "all_to_all of two dimensions": lambda xs: [torch.cat(received) for received in zip(*parts(xs, 1), strict=True)],
    "shift": lambda xs: [xs[rank - 1] for rank in range(len(xs))],
    "shift back": lambda xs: [xs[(rank + 1) % len(xs)] for rank in range(len(xs))],
}
"""The results of all processes, of the tensors of all."""


def tensor_of(rank):
    return torch.arange(36.0).reshape(6, 6).cos() * (rank + 1)


def objective(y, rank):
    """A loss that differs by process and by item."""
    return (y * torch.arange(1.0, y.numel() + 1).reshape(y.shape).sin() * (rank + 2)).sum()


def collectives(rank):
    """{name: (result, gradient)} of each collective."""
    out = {}
    for name, function in COLLECTIVES.items():
        x = tensor_of(rank).t().contiguous().t().requires_grad_()  # in another order than that of its dimensions
        y = function(x, dist.group.WORLD)
        out[name] = y.detach(), *torch.autograd.grad(objective(y, rank), x)
    return out


def replicated(rank):
    """The gradients of a sum of squares in the two halves of a layer of Megatron-LM, and of its input."""
    torch.manual_seed(0)
    x, first, second = torch.randn(4, 6), torch.randn(6, 6), torch.randn(6, 6)
    parts = first.chunk(SIZE, 1)[rank].clone().requires_grad_(), second.chunk(SIZE, 0)[rank].clone().requires_grad_()
    read = x.clone().requires_grad_()
    hidden = (parallel.copy(read, dist.group.WORLD) @ parts[0]).relu()
    loss = parallel.all_reduce(hidden @ parts[1], dist.group.WORLD, replicated=True).square().sum()
    whole = [v.requires_grad_() for v in (x, first, second)]
    expected = torch.autograd.grad(((x @ first).relu() @ second).square().sum(), whole)
    grads = torch.autograd.grad(loss, (read, *parts))
    return grads, (expected[0], expected[1].chunk(SIZE, 1)[rank], expected[2].chunk(SIZE, 0)[rank])
