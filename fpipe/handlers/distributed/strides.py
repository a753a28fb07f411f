"""The strides of a tensor that travels: the receiver restores them, because kernels, and so bits, depend on strides.

A message is contiguous, in the order of the sender's memory: a dense tensor, channels last or transposed, is sent
without a copy. An expanded dimension is sent once.
"""

from __future__ import annotations

import torch
from torch import Tensor

Strides = tuple[int, ...]


def strides_of(tensor: Tensor) -> Strides | None:
    """Return the strides to restore; None for a contiguous tensor, and for one that overlaps itself.

    Those of a conjugate or negative view are of the resolved tensor, which travels, and which kernels would see.
    """
    if tensor.is_contiguous() or tensor.numel() == 0:
        return None
    tensor = _resolved(tensor)
    shape, strides = _core(tuple(tensor.shape), tensor.stride()), tensor.stride()
    span = 1
    for i in reversed(_order(shape, strides)):
        if shape[i] > 1 and strides[i] < span:
            return None
        span = max(span, strides[i] * (shape[i] - 1) + 1)
    return strides


def message(tensor: Tensor) -> Tensor:
    """Return the tensor's elements, contiguous: a view of its memory if that is dense, else a copy."""
    tensor = _resolved(tensor)
    strides = strides_of(tensor)
    if strides is None:
        return tensor.contiguous()
    shape = _core(tuple(tensor.shape), strides)
    core = tensor.as_strided(shape, strides)
    return core.permute(_order(shape, strides)).contiguous()


def buffer(shape: tuple[int, ...], strides: Strides | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an empty message."""
    if strides is not None:
        core = _core(shape, strides)
        shape = tuple(core[i] for i in _order(core, strides))
    return torch.empty(shape, dtype=dtype, device=device)


def restored(message: Tensor, shape: tuple[int, ...], strides: Strides | None) -> Tensor:
    """Return the tensor of a message, with its strides.

    >>> x = torch.arange(6).view(2, 3).T.unsqueeze(-1).expand(3, 2, 4)
    >>> y = restored(message(x), tuple(x.shape), strides_of(x))
    >>> torch.equal(x, y), y.stride() == x.stride()
    (True, True)
    """
    if strides is None:
        return message
    core = _core(shape, strides)
    order = _order(core, strides)
    dense = message.permute([order.index(i) for i in range(len(order))])
    if any(a != b for a, b, n in zip(dense.stride(), strides, core, strict=True) if n > 1):
        dense = torch.empty_strided(core, strides, dtype=message.dtype, device=message.device).copy_(dense)
    return dense.as_strided(shape, strides)


def _resolved(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg()


def _core(shape: tuple[int, ...], strides: Strides) -> tuple[int, ...]:
    """Return the shape with size 1 for expanded dimensions."""
    return tuple(1 if stride == 0 else n for n, stride in zip(shape, strides, strict=True))


def _order(shape: tuple[int, ...], strides: Strides) -> list[int]:
    """Return the dimensions from the outermost in memory to the innermost."""
    return sorted(range(len(shape)), key=lambda i: (-strides[i], i))
