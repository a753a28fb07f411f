"""Operations along each dimension of a tensor that two processes cut, beside those of one process."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from fpipe.autodiff.graph.sharded import Partitioner
from fpipe.stages.sharding import Placed
from tests.support.shards import mesh_of

SHAPE = 4, 4, 4  # equal, so that a result that is cut along a wrong dimension fits
TARGET = torch.linspace(0, 1, 64).view(SHAPE)
ORDER, ROWS = torch.tensor([3, 0, 1, 2]), torch.tensor([1, 0])

SCANS = {
    "cumsum": lambda x, d: x.cumsum(d),
    "cumprod": lambda x, d: x.cumprod(d),
    "logcumsumexp": lambda x, d: x.logcumsumexp(d),
    "cummax": lambda x, d: x.cummax(d)[0],
    "cummin": lambda x, d: x.cummin(d)[0],
    "diff": lambda x, d: x.diff(dim=d),
    "select": lambda x, d: x.select(d, 2),
    "any": lambda x, d: (x > 0).any(d).to(x) * x.sum(),
}
"""Those of which DTensor has computed some wrongly, or that are made of these."""
OPERATIONS = SCANS | {
    "flip": lambda x, d: x.flip(d),
    "roll": lambda x, d: x.roll(3, d),
    "sort": lambda x, d: x.sort(d)[0],
    "stable sort": lambda x, d: x.sort(dim=d, stable=True, descending=True)[0],
    "argsort": lambda x, d: x * x.argsort(d),
    "topk": lambda x, d: x.topk(2, d)[0],
    "index_select": lambda x, d: x.index_select(d, ORDER),
    "gather": lambda x, d: x.gather(d, x.argsort(d)),
    "scatter": lambda x, d: x.scatter(d, x.argsort(d), x * 2),
    "scatter_add": lambda x, d: x.scatter_add(d, x.argsort(d), x * 2),
    "index_add": lambda x, d: x.index_add(d, ROWS, x.narrow(d, 0, 2) * 1.0),
    "index_fill": lambda x, d: x.index_fill(d, ROWS, 2.0),
    "softmax": lambda x, d: x.softmax(d),
    "log_softmax": lambda x, d: x.log_softmax(d),
    "logsumexp": lambda x, d: x.logsumexp(d),
    "sum": lambda x, d: x.sum(d),
    "mean": lambda x, d: x.mean(d, keepdim=True),
    "var": lambda x, d: x.var(d),
    "prod": lambda x, d: x.prod(d),
    "amax": lambda x, d: x.amax(d),
    "min": lambda x, d: x.min(d)[0],
    "argmax": lambda x, d: x.argmax(d) * x.sum(),
    "all": lambda x, d: (x > -1).all(d).to(x) * x.sum(),
    "norm": lambda x, d: torch.linalg.vector_norm(x, 3, d),
    "median": lambda x, d: x.median(d)[0],
    "narrow": lambda x, d: x.narrow(d, 1, 3),
    "split": lambda x, d: x.split(2, d)[1],
    "cat": lambda x, d: torch.cat([x, x * 2], d),
    "stack": lambda x, d: torch.stack([x, x * 2], d),
    "unsqueeze": lambda x, d: x.unsqueeze(d),
    "unflatten": lambda x, d: x.unflatten(d, (2, -1)),
    "repeat_interleave": lambda x, d: x.repeat_interleave(2, d),
    "transpose": lambda x, d: x.transpose(d, 0),
    "glu": F.glu,
    "normalize": lambda x, d: F.normalize(x, dim=d),
    "slice_scatter": lambda x, d: x.slice_scatter(x.narrow(d, 0, 2) * 3, d, 0, 2),
    "select_scatter": lambda x, d: x.select_scatter(x.select(d, 0) * 3, d, 1),
    "diagonal": lambda x, d: x.diagonal(0, d, (d + 1) % 3),
}
LOSSES = {
    f"{name} {reduction}": lambda x, d, loss=loss, reduction=reduction: loss(x, TARGET, reduction=reduction)
    for name, loss in {
        "mse": F.mse_loss,
        "l1": F.l1_loss,
        "smooth l1": F.smooth_l1_loss,
        "huber": F.huber_loss,
        "logits": F.binary_cross_entropy_with_logits,
        "binary": lambda x, target, reduction: F.binary_cross_entropy(x.sigmoid(), target, reduction=reduction),
        "margin": F.soft_margin_loss,
        "poisson": F.poisson_nll_loss,
        "gaussian": lambda x, target, reduction: F.gaussian_nll_loss(x, target, target + 1, reduction=reduction),
        "cross entropy": lambda x, target, reduction: F.cross_entropy(x, target.argmax(1), reduction=reduction),
        "soft cross entropy": lambda x, target, reduction: F.cross_entropy(x, target, reduction=reduction),
    }.items()
    for reduction in ("mean", "sum", "none")
}
"""Losses of a cut tensor, which have no dimension."""
OPERATIONS |= LOSSES


def swept(rank, operations, cuts, dims):
    """What differs from one process, by operation, dimension that is cut, and dimension: the results, or gradients."""
    torch.manual_seed(0)
    x, wrong = torch.randn(SHAPE), []
    for name in operations:
        for cut in cuts:
            for dim in dims:
                expected = _by_one(OPERATIONS[name], x, dim)
                errors = [
                    ((a - b).norm() / b.norm().clamp(min=1e-6)).item()
                    for a, b in zip(_by_pieces(OPERATIONS[name], x, dim, cut), expected, strict=True)
                ]
                if not all(error <= 1e-5 for error in errors):
                    wrong.append((name, cut, dim, *errors))
    return wrong


def _by_one(function, x, dim):
    x = x.clone().requires_grad_()
    y = function(x, dim)
    return y.detach(), *torch.autograd.grad((y * _weights(y)).sum(), x)


def _by_pieces(function, x, dim, cut):
    mesh = mesh_of(2, names=("tp",))
    placed = Placed(mesh, (Shard(cut),), x.shape, x.stride())
    partitioner = Partitioner([placed])
    piece = x.chunk(2, cut)[mesh.get_local_rank()].clone().requires_grad_()
    with partitioner.running():
        y = function(partitioner.read(piece, placed, ("x",)), dim)
        loss = (y * _weights(y)).sum()
        partitioner.start_backward()
        (gradient,) = torch.autograd.grad(loss, piece)
        whole = partitioner.whole(y)
    pieces = [torch.empty_like(piece) for _ in range(2)]
    torch.distributed.all_gather(pieces, gradient.contiguous())
    return whole.detach(), torch.cat(pieces, cut)


def _weights(y):
    """Numbers that differ, by which each element has a gradient of its own."""
    return torch.linspace(-1, 2, y.numel()).view(y.shape)
