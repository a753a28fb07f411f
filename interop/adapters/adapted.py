"""A matrix W + s L R that is never put together where it is multiplied: x (W + s L R) = x W + ((x L) s) R.

The multiplications are those of torch and of exported graphs: `F.linear`, `matmul`, `mm`, `addmm`, after any number of
transpositions. Every other function gets the sum, which the stage's graph computes once a step, because it depends on
params alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


class Adapted(Tensor):
    """The sum of a matrix and of a product of two narrow ones, in the place of a parameter of a stage's function.

    Autograd goes through the three matrices; the tensor itself has no memory.
    """

    base: Tensor
    left: Tensor
    right: Tensor
    scale: float

    @staticmethod
    def __new__(cls, base: Tensor, left: Tensor, right: Tensor, scale: float) -> Adapted:
        self: Adapted = Tensor._make_wrapper_subclass(
            cls, base.shape, strides=base.stride(), dtype=base.dtype, device=base.device
        )
        self.base, self.left, self.right, self.scale = base, left, right, scale
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Adapted({tuple(self.base.shape)}, rank={self.right.shape[0]})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if func in OF_BASE:
                return func(args[0].base, *args[1:], **kwargs)
            rule = RULES.get(func)
            result = NotImplemented if rule is None else rule(func, *args, **kwargs)
            if result is NotImplemented:
                arguments: Any = (args, kwargs)
                plain: Any = optree.tree_map(_plain, arguments, none_is_leaf=True)
                result = func(*plain[0], **plain[1])
            return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(f"{func} does not go through __torch_function__, so an adapter can't be differentiated in it")

    def flipped(self) -> Adapted:
        """Return the transposed matrix."""
        return Adapted(self.base.t(), self.right.t(), self.left.t(), self.scale)

    def after(self, x: Tensor) -> Tensor:
        """Return the narrow part of x times this."""
        return torch.matmul(torch.matmul(x, self.left) * self.scale, self.right)


def summed(base: Tensor, left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return the sum as a plain matrix."""
    return torch.addmm(base, left, right, alpha=scale)


def _plain(x: Any) -> Any:
    return summed(x.base, x.left, x.right, x.scale) if isinstance(x, Adapted) else x


def _linear(func: Any, input: Any, weight: Any, bias: Any = None) -> Any:  # noqa: A002
    if not isinstance(weight, Adapted) or isinstance(input, Adapted) or isinstance(bias, Adapted):
        return NotImplemented
    return func(input, weight.base, bias) + weight.flipped().after(input)


def _matmul(func: Any, input: Any, other: Any) -> Any:  # noqa: A002
    if not isinstance(other, Adapted) or isinstance(input, Adapted):
        return NotImplemented
    return func(input, other.base) + other.after(input)


def _addmm(func: Any, input: Any, mat1: Any, mat2: Any, **factors: Any) -> Any:  # noqa: A002
    if factors or not isinstance(mat2, Adapted) or isinstance(input, Adapted) or isinstance(mat1, Adapted):
        return NotImplemented
    return func(input, mat1, mat2.base) + mat2.after(mat1)


def _flip(func: Any, x: Any, *dims: Any) -> Any:
    """Transpose; the two dimensions of a transposition are different, or it is none."""
    numbers = [dim % 2 for dim in (dims[0] if dims and isinstance(dims[0], list | tuple) else dims)]
    is_order = func in (Tensor.permute, torch.permute, aten.permute.default)
    changes = not numbers or (numbers == [1, 0] if is_order else numbers[0] != numbers[1])
    return x.flipped() if changes else x


def _getters(*names: str) -> list[Any]:
    return [getattr(Tensor, name).__get__ for name in names]


RULES: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((F.linear, aten.linear.default), _linear),
    **dict.fromkeys(
        (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, aten.matmul.default, aten.mm.default),
        _matmul,
    ),
    **dict.fromkeys((torch.addmm, Tensor.addmm, aten.addmm.default), _addmm),
    **dict.fromkeys(
        (
            *(torch.t, Tensor.t, *_getters("T", "mT"), aten.t.default),
            *(torch.transpose, Tensor.transpose, aten.transpose.int),
            *(torch.permute, Tensor.permute, aten.permute.default),
        ),
        _flip,
    ),
}
"""Function -> rule `(function, arguments) -> result`, or NotImplemented where another argument is adapted."""

OF_BASE = {
    *_getters("shape", "dtype", "device", "layout", "ndim", "is_sparse"),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point, Tensor.is_contiguous),
}
"""Functions of a matrix's kind alone."""
