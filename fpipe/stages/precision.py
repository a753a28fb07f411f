"""The dtypes of a step: in which stages compute, and in which their gradients are added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from fpipe.errors.arguments import checked_class
from fpipe.stages.pytree import NAMESPACE
from fpipe.stages.sharding import is_dtensor

HALVES = (torch.bfloat16, torch.float16)
"""The dtypes of which torch adds tensors to float32 ones without a cast before."""


@checked_class("compute", "reduce")
@dataclass(frozen=True)
class Precision:
    """The dtypes in which stages compute, and in which their gradients are added.

    Args:
        compute: of the parameters that stages compute with, and that replicas gather; by default their own. The params
            of the step are then the masters: they, the gradients and the optimizer's state keep their dtype.
        reduce: in which gradients are added, over microbatches, replicas, copies and ties; by default that of each
            gradient, and float32 for narrower ones.

    Gradients have the dtype of the parameters that were passed, to which the sums are cast once. Only floating-point
    parameters are cast; batch, target, state and what stages make of them are the caller's.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("compute", "reduce"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"{name} must be a floating-point dtype or None, not {dtype!r}")
            if dtype is not None and dtype.itemsize < torch.float16.itemsize:
                raise ValueError(
                    f"{name} must be a dtype of at least 16 bits, not {dtype}: torch neither multiplies nor adds "
                    "narrower ones without scales, which a stage may have of its own"
                )

    def cast(self, leaf: Any) -> Any:
        """Return a leaf of the params as stages get it."""
        is_cast = self.compute is not None and isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(self.compute) if is_cast and not is_dtensor(leaf) else leaf

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of a dtype are added.

        >>> Precision().sum_dtype(torch.bfloat16), Precision().sum_dtype(torch.float64)
        (torch.float32, torch.float64)
        """
        if not dtype.is_floating_point:
            return dtype
        return self.reduce or (dtype if dtype.itemsize >= torch.float32.itemsize else torch.float32)

    def term(self, gradient: Any) -> Any:
        """Return a gradient as it is added; None, which is none, as it is."""
        return gradient.to(self.sum_dtype(gradient.dtype)) if isinstance(gradient, Tensor) else gradient

    def adds_in_place(self, total: torch.dtype, gradient: torch.dtype) -> bool:
        """Return whether a gradient can be added to a total in place, with the bits of the sum with its `term`."""
        if total is not self.sum_dtype(gradient):
            return False
        return gradient is total or (total is torch.float32 and gradient in HALVES)

    def gradients(self, gradients: Any, params: Any) -> Any:
        """Return gradients in the dtypes of the params."""
        return optree.tree_map(
            lambda gradient, leaf: gradient if gradient is None else gradient.to(leaf.dtype),
            gradients,
            params,
            none_is_leaf=True,
            namespace=NAMESPACE,
        )


OWN_DTYPES = Precision()
"""No casts but those of narrow gradients, for their sums."""
