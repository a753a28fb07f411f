"""The gradient of `prod`, traced with the bits that it has in eager autograd.

Torch looks for zeros: where there are none, it divides the product by each factor, and else it multiplies the other
factors. A tensor without values takes the second way, which rounds otherwise. A trace has both, and a choice by values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fpipe.stages.sharding import has_dtensor


class Products(TorchFunctionMode):
    """Within it, products have both ways of their gradient. Transforms of torch.func keep torch's own."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in PRODUCTS and (given := _arguments(*args, **(kwargs or {}))):
            return _Product.apply(*given)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


def _arguments(
    input: Any,  # noqa: A002
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    **others: Any,
) -> tuple[Tensor, int | None, bool] | None:
    """Return a product's arguments; None if it has others, or no gradient that depends on zeros."""
    is_plain = isinstance(input, Tensor) and input.ndim > 0 and not has_dtensor((type(input),))
    if not is_plain or others or not (dim is None or isinstance(dim, int)):
        return None
    if torch._C._functorch.maybe_current_level() is not None:  # within torch.func
        return None
    x = input if dtype is None else input.to(dtype)
    return (x, dim, keepdim) if torch.is_grad_enabled() and x.requires_grad else None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
        return _product(x, dim, keepdim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int | None, bool], output: Tensor) -> None:
        x, ctx.dim, ctx.keepdim = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, product = ctx.saved_tensors
        with torch._C.DisableTorchFunction():
            if torch.is_grad_enabled():  # the stage differentiates the gradient
                (by_factors,) = torch.autograd.grad(_product(x, ctx.dim, ctx.keepdim), x, gradient, create_graph=True)
                return by_factors, None, None
            with torch.enable_grad():
                again = x.detach().requires_grad_()
                (by_factors,) = torch.autograd.grad(_product(again, ctx.dim, ctx.keepdim), again, gradient)
            zeros = x == 0
            if ctx.dim is None:
                by_factors = torch.where(zeros.sum() > 1, 0.0, by_factors)
            elif not ctx.keepdim:
                gradient, product = gradient.unsqueeze(ctx.dim), product.unsqueeze(ctx.dim)
            return torch.where(zeros.any(), by_factors, gradient * (product / x).conj()), None, None


def _product(x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    return torch.prod(x) if dim is None else torch.prod(x, dim, keepdim)


PRODUCTS = {torch.prod, Tensor.prod, torch.ops.aten.prod.default, torch.ops.aten.prod.dim_int}
