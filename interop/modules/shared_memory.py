"""Registered tensors that are different objects over the same memory: no entry of params can stand for both."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from fpipe.errors import StageError
from fpipe.stages.sharding import is_dtensor

Key = TypeVar("Key", bound=Hashable)


def overlapping(tensors: Mapping[Key, Tensor]) -> Iterator[tuple[Key, Key]]:
    """Yield the keys of each two different tensors that have an element of memory in common."""
    by_storage: dict[int, dict[int, Key]] = {}
    for key, x in tensors.items():
        if x.layout is torch.strided and not is_dtensor(x) and x.numel():
            by_storage.setdefault(x.untyped_storage()._cdata, {}).setdefault(id(x), key)
    for keys in by_storage.values():
        for one, other in itertools.combinations(keys.values(), 2):
            if _overlap(tensors[one], tensors[other]):
                yield one, other


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one storage have an element in common: parts of one buffer have none."""
    low, high = zip(*map(_span, (a, b)), strict=True)
    if max(low) >= min(high):
        return False
    if a.element_size() != b.element_size():
        return True
    used = torch.zeros(max(high) - min(low), dtype=torch.bool, device="cpu")
    one, other = (x.storage_offset() - min(low) for x in (a, b))
    used.as_strided(a.shape, a.stride(), one).fill_(True)
    return bool(used.as_strided(b.shape, b.stride(), other).any())


def _span(x: Tensor) -> tuple[int, int]:
    """Return the first element of a tensor in its storage, and the one after its last."""
    start = int(x.storage_offset())
    return start, start + 1 + sum((int(n) - 1) * int(step) for n, step in zip(x.shape, x.stride(), strict=True))


def refuse_overlapping_params(tensors: Mapping[str, Tensor]) -> None:
    """Raise StageError for a parameter over memory that another parameter, or a buffer, has too.

    Two parameters that both are frozen may have the same memory: no step changes either.
    """
    for one, other in overlapping(tensors):
        pair = tensors[one], tensors[other]
        parameters = [x for x in pair if isinstance(x, nn.Parameter)]
        if any(x.requires_grad for x in parameters) or len(parameters) == 1:
            raise StageError(
                f"{one} and {other} are two tensors over the same memory, of which params would have two values: "
                "register one nn.Parameter under both names, or copy one of them with .clone()"
            )
