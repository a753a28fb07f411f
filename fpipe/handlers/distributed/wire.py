"""A value as messages: contiguous memory for each tensor, small ones packed into one.

Both ends work out from the signature alone what comes in which order. A tensor in a packed message stands where an
allocator would put it, since kernels look at that. Where leaves may be missing, a message tells which are there, for
which the host waits on CUDA too.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe.handlers.distributed.signature import Signature, TensorSpec, same, signature_of
from fpipe.handlers.distributed.strides import Strides, buffer, message, restored, strides_of
from fpipe.stages.pytree import Flat

Payload = Flat | list[Any]

SMALL = 1 << 15
"""Bytes of a tensor up to which a copy costs less than a message of its own."""
ALIGNMENT = 512
"""Bytes: CUDA's caching allocator's, of which the CPU's is a part."""


class Part(NamedTuple):
    """A tensor of a payload as it lies in a message.

    Args:
        leaf: its number among the leaves; PRESENCE for what tells which optional leaves are there.
        size: bytes.
        at: where it starts in a packed message.
    """

    leaf: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    size: int
    at: int = 0


PRESENCE = -1


class Wire:
    """How payloads of one signature travel.

    Args:
        device: where they live.
        small: bytes up to which a tensor is packed with others.
    """

    def __init__(self, signature: Signature, device: torch.device, small: int = SMALL) -> None:
        self.signature, self.device = signature, device
        parts = list(_parts(signature))
        packed = [part for part in parts if 0 < part.size <= small]
        self.packed = _placed(packed) if len(packed) > 1 else []
        inside = {part.leaf for part in self.packed}
        self.alone = [part for part in parts if part.size and part.leaf not in inside]
        self.empty = [part for part in parts if not part.size]
        self.length = self.packed[-1].at + self.packed[-1].size if self.packed else 0
        specs = [leaf for leaf in signature.leaves if isinstance(leaf, TensorSpec)]
        self.as_it_is = not (self.packed or any(spec.strides for spec in specs))
        # Of the last payload in which nothing was filled: its structure and looks, and whether it travelled uncopied.
        self.seen: tuple[Any, list[Any], bool] | None = None

    def messages(self, payload: Payload) -> list[Tensor] | None:
        """What travels of a payload; None if it has another signature."""
        leaves, spec = payload if isinstance(payload, Flat) else (payload, None)
        looks = [look(leaf) for leaf in leaves]
        if self.seen is not None and self.seen[0] == spec and alike(self.seen[1], looks):
            if self.seen[2]:
                return [leaves[part.leaf] for part in self.alone]
            return self._written({i: message(leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)})
        presence = None
        if isinstance(payload, list) and len(payload) == len(self.signature.leaves):
            payload, presence = self._filled(payload)
        if not same(signature_of(payload)._replace(optional=self.signature.optional), self.signature):
            return None
        filled = payload.leaves if isinstance(payload, Flat) else payload
        found = {i: message(leaf) for i, leaf in enumerate(filled) if isinstance(leaf, Tensor)}
        if presence is not None:
            found[PRESENCE] = presence
        elif all(a is b for a, b in zip(filled, leaves, strict=True)):
            uncopied = all(found[part.leaf].data_ptr() == leaves[part.leaf].data_ptr() for part in self.alone)
            self.seen = spec, looks, uncopied and self.as_it_is
        return self._written(found)

    def buffers(self) -> list[Tensor]:
        """Empty messages to receive into."""
        packed = [torch.empty(self.length, dtype=torch.uint8, device=self.device)] if self.packed else []
        return packed + [torch.empty(part.shape, dtype=part.dtype, device=self.device) for part in self.alone]

    def payload(self, messages: list[Tensor]) -> Payload:
        """The payload out of its messages, its tensors marked by whether they want a gradient."""
        signature = self.signature
        found: dict[int, Tensor] = {}
        if self.packed:
            found = {part.leaf: _inside(messages[0], part) for part in self.packed}
            messages = messages[1:]
        for part, tensor in zip(self.alone, messages, strict=True):
            found[part.leaf] = tensor
        for part in self.empty:
            found[part.leaf] = torch.empty(part.shape, dtype=part.dtype, device=self.device)
        leaves: list[Any] = list(signature.leaves)
        for i, spec in enumerate(leaves):
            if isinstance(spec, TensorSpec):
                tensor = found[i] if spec.strides is None else restored(found[i], spec.shape, spec.strides)
                leaves[i] = tensor.requires_grad_() if spec.requires_grad else tensor
        if signature.optional:
            for i, there in zip(signature.optional, found[PRESENCE].tolist(), strict=True):
                leaves[i] = leaves[i] if there else None
        return leaves if signature.spec is None else Flat(leaves, signature.spec)

    def _filled(self, payload: list[Any]) -> tuple[list[Any], Tensor | None]:
        """Gradients in the layout of the signature, zeros where it wants more, and what says where."""
        leaves = [
            _laid_out(leaf, spec, self.device) if isinstance(spec, TensorSpec) else leaf
            for leaf, spec in zip(payload, self.signature.leaves, strict=True)
        ]
        there = [payload[i] is not None for i in self.signature.optional]
        return leaves, torch.tensor(there, dtype=torch.uint8, device=self.device) if there else None

    def _written(self, found: dict[int, Tensor]) -> list[Tensor]:
        alone = [found[part.leaf] for part in self.alone]
        if not self.packed:
            return alone
        packed = torch.empty(self.length, dtype=torch.uint8, device=self.device)
        for part in self.packed:
            _inside(packed, part).copy_(found[part.leaf])
        return [packed, *alone]


def _parts(signature: Signature) -> Iterator[Part]:
    if signature.optional:
        yield Part(PRESENCE, (len(signature.optional),), torch.uint8, len(signature.optional))
    for i, spec in enumerate(signature.leaves):
        if isinstance(spec, TensorSpec):
            shape = tuple(buffer(spec.shape, spec.strides, spec.dtype, torch.device("meta")).shape)
            yield Part(i, shape, spec.dtype, prod(shape) * spec.dtype.itemsize)


def _placed(parts: list[Part]) -> list[Part]:
    at, found = 0, []
    for part in parts:
        found.append(part._replace(at=at))
        at += -(-part.size // ALIGNMENT) * ALIGNMENT
    return found


def _inside(packed: Tensor, part: Part) -> Tensor:
    return packed[part.at : part.at + part.size].view(part.dtype).view(part.shape)


def look(leaf: Any) -> Any:
    """What of a tensor decides how it travels."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad, leaf.device, leaf.is_conj(), leaf.is_neg()


def alike(before: list[Any], now: list[Any]) -> bool:
    """Whether tensors look the same, and what is no tensor is the very same: NaN is NaN, 1 is not True."""
    return len(before) == len(now) and all(
        a is b or (type(a) is tuple and type(b) is tuple and a == b) for a, b in zip(before, now, strict=True)
    )


def _laid_out(leaf: Tensor | None, spec: TensorSpec, device: torch.device) -> Tensor:
    shape, strides = spec.shape, spec.strides
    if leaf is None:
        return restored(buffer(shape, strides, spec.dtype, device).zero_(), shape, strides)
    if (leaf.dtype, tuple(leaf.shape)) != (spec.dtype, shape) or strides_of(leaf) == strides:
        return leaf
    return _strided(leaf, strides)


def _strided(leaf: Tensor, strides: Strides | None) -> Tensor:
    if strides is None:
        return leaf.contiguous()
    return torch.empty_strided(leaf.shape, strides, dtype=leaf.dtype, device=leaf.device).copy_(leaf)
