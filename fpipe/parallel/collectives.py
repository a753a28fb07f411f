"""Collectives with gradients, as functions of tensors.

They are the operators of torch's functional collectives, `_c10d_functional`, so tracing records them as nodes of a
graph. The gradients stand here: torch renames its functions, and registers gradients, between 2.11 and 2.13.

A gradient is that of the sum of the losses of all processes, as over replicas. Where processes compute the same loss,
as in tensor parallelism, use `copy` and `all_reduce(..., replicated=True)`: the f and g of Megatron-LM
(https://arxiv.org/abs/1909.08053, section 3), `pvary` and `psum` of JAX.

Of a tensor that other processes than those of the group place, as those of tensor parallelism do, the pieces travel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from fpipe.parallel.group import Group, named, rank_in
from fpipe.parallel.placed import over_pieces


def all_reduce(x: Tensor, group: Group, *, replicated: bool = False) -> Tensor:
    """Return the sum of the tensors of all processes.

    The gradient is the sum of the processes' gradients.

    Args:
        replicated: all processes compute the same from the sum, and their gradients are equal: the gradient is the
            process's own.
    """
    name, size = named(group)
    return x if size == 1 else over_pieces(lambda y: _call(_AllReduce, y, name, replicated), x, group)


def copy(x: Tensor, group: Group) -> Tensor:
    """Return a tensor that is the same on all processes, of which each makes its own use.

    The gradient is the sum of the processes' gradients.
    """
    name, size = named(group)
    return x if size == 1 else over_pieces(lambda y: _call(_Copy, y, name), x, group)


def all_gather(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Return the tensors of all processes, joined along a dimension in the order of the processes.

    All have one shape. The gradient is `reduce_scatter` of the processes' gradients.
    """
    name, size = named(group)
    if size == 1:
        return x
    return over_pieces(partial(_along, dim, lambda y: _call(_AllGather, y, name, size)), x, group, dim)


def reduce_scatter(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Return this process's part of the sum of the tensors of all processes, cut along a dimension.

    The gradient is `all_gather` of the processes' gradients.

    Raises:
        ValueError: the dimension can't be cut into equal parts.
    """
    name, size = named(group)
    _check_parts(x, dim, size)
    if size == 1:
        return x
    return over_pieces(partial(_along, dim, lambda y: _call(_ReduceScatter, y, name, size)), x, group, dim)


def all_to_all(x: Tensor, group: Group, split_dim: int = 0, concat_dim: int = 0) -> Tensor:
    """Cut a tensor into as many equal parts as there are processes, send each its part, and join the parts received.

    The gradient is the exchange the other way round.

    Raises:
        ValueError: the dimension can't be cut into equal parts.
    """
    name, size = named(group)
    _check_parts(x, split_dim, size)
    if size == 1:
        return x

    def exchanged(x: Tensor) -> Tensor:
        parts = _along(split_dim, lambda y: _call(_AllToAll, y, name, (y.shape[0] // size,) * size), x)
        if split_dim % x.ndim == concat_dim % x.ndim:
            return parts
        return torch.cat(parts.chunk(size, split_dim), concat_dim)

    return over_pieces(exchanged, x, group, split_dim, concat_dim)


def shift(x: Tensor, group: Group, by: int = 1) -> Tensor:
    """Send a tensor `by` processes on in a ring, and return the one received. All have one shape.

    The gradient is sent the other way round.
    """
    name, size = named(group)
    if by % size == 0:
        return x
    return over_pieces(lambda y: _call(_Shift, y, name, rank_in(group), size, by % size), x, group)


def _check_parts(x: Tensor, dim: int, size: int) -> None:
    if x.shape[dim] % size:
        raise ValueError(
            f"dimension {dim} of a tensor of shape {[*x.shape]} can't be cut into {size} equal parts, one for each "
            "process: pad it"
        )


def _along(dim: int, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function of the first dimension to another one. The smaller side is copied: the result is a view."""
    return function(x.movedim(dim, 0)).movedim(0, dim) if dim % x.ndim else function(x)


def _call(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    return cast(Tensor, function.apply(*args))  # type: ignore[no-untyped-call]


def run_collective(name: str, x: Tensor, *args: Any) -> Tensor:
    """Run an operator and wait for its result. In a traced graph the two are nodes, and the wait moves to its use."""
    operators = torch.ops._c10d_functional
    return cast(Tensor, operators.wait_tensor(getattr(operators, name)(x.contiguous(), *args)))


def run_all_to_all(x: Tensor, received: list[int], sent: list[int], name: str) -> Tensor:
    """Exchange rows: numbers of those that come from each process, and that go to it."""
    return run_collective("all_to_all_single", x, received, sent, name)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, replicated: bool) -> Tensor:
        ctx.name, ctx.replicated = name, replicated
        return run_collective("all_reduce", x, "sum", name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient if ctx.replicated else _call(_AllReduce, gradient, ctx.name, False), None, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _call(_AllReduce, gradient, ctx.name, True), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, size: int) -> Tensor:
        ctx.name, ctx.size = name, size
        return run_collective("all_gather_into_tensor", x, size, name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _call(_ReduceScatter, gradient, ctx.name, ctx.size), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, size: int) -> Tensor:
        ctx.name, ctx.size = name, size
        return run_collective("reduce_scatter_tensor", x, "sum", size, name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _call(_AllGather, gradient, ctx.name, ctx.size), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, sizes: tuple[int, ...]) -> Tensor:
        ctx.name, ctx.sizes = name, sizes
        return run_all_to_all(x, [*sizes], [*sizes], name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _call(_AllToAll, gradient, ctx.name, ctx.sizes), None, None


class _Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, rank: int, size: int, by: int) -> Tensor:
        ctx.name, ctx.rank, ctx.size, ctx.by = name, rank, size, by
        sent, received = ([0] * size for _ in range(2))
        flat = x.reshape(-1)
        sent[(rank + by) % size] = received[(rank - by) % size] = flat.shape[0]
        return run_all_to_all(flat, received, sent, name).view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _call(_Shift, gradient, ctx.name, ctx.rank, ctx.size, ctx.size - ctx.by), *[None] * 4
