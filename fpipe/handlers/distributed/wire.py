"""The messages of a value: contiguous memory for each tensor; small tensors are packed into one message.

Both ends derive the messages and their order from the signature alone. In a packed message a tensor is aligned as an
allocator would align it, because kernels choose by alignment. If leaves are optional, one message has a flag for each;
for this message the host waits on CUDA too, but not in a graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe.devices import aside, is_capturing
from fpipe.handlers.distributed.signature import Signature, TensorSpec, same, signature_of
from fpipe.handlers.distributed.strides import buffer, message, restored, strides_of
from fpipe.stages.cuts import Cuts, cuts_of, with_cuts
from fpipe.stages.pytree import Flat

Payload = Flat | list[Any]

SMALL = 1 << 15
"""Bytes of a tensor up to which a copy is cheaper than one more message."""
ALIGNMENT = 512
"""Bytes: of CUDA's caching allocator; a multiple of the CPU's."""


class Chunk(NamedTuple):
    """The place of a tensor in the messages.

    Args:
        leaf: its index among the leaves; PRESENCE for the flags of the optional leaves.
        size: bytes.
        at: the byte where it starts in a packed message.
    """

    leaf: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    size: int
    at: int = 0


PRESENCE = -1


class _Seen(NamedTuple):
    """A payload that had the codec's signature, with nothing filled in.

    Args:
        looks: of its leaves.
        cuts: the places of its pieces.
        as_is: whether its tensors travelled without a copy.
    """

    spec: Any
    looks: list[Any]
    cuts: Cuts
    as_is: bool


class PayloadCodec:
    """Converts payloads of one signature to messages and back.

    Args:
        device: where their tensors are.
        small: bytes up to which a tensor is packed with others.
        present: of the optional leaves, which were there in the last payload.
        has_tensors_alone: whether the signature has no plain leaf, whose value may differ from payload to payload.
    """

    def __init__(self, signature: Signature, device: torch.device, small: int = SMALL) -> None:
        self.signature, self.device = signature, device
        chunks = list(_chunks(signature))
        packed = [chunk for chunk in chunks if 0 < chunk.size <= small]
        self.packed = _placed(packed) if len(packed) > 1 else []
        inside = {chunk.leaf for chunk in self.packed}
        self.alone = [chunk for chunk in chunks if chunk.size and chunk.leaf not in inside]
        self.empty = [chunk for chunk in chunks if not chunk.size]
        self.length = self.packed[-1].at + self.packed[-1].size if self.packed else 0
        specs = {i: leaf for i, leaf in enumerate(signature.leaves) if isinstance(leaf, TensorSpec)}
        self.cuts = {i: spec.cut for i, spec in specs.items() if spec.cut is not None}
        self.has_tensors_alone = all(leaf is None or isinstance(leaf, TensorSpec) for leaf in signature.leaves)
        self.present: list[bool] = []
        self._seen: _Seen | None = None

    def messages(self, payload: Payload) -> list[Tensor] | None:
        """Return the messages of a payload; None if it has another signature."""
        leaves, spec = payload if isinstance(payload, Flat) else (payload, None)
        looks, cuts, seen = [look(leaf) for leaf in leaves], cuts_of(payload), self._seen
        if seen is None or seen.spec != spec or seen.cuts != cuts or not alike(seen.looks, looks):
            return self._checked_messages(leaves, spec, looks, cuts)
        if seen.as_is:
            return [leaves[chunk.leaf] for chunk in self.alone]
        return self._written(_contiguous(leaves))

    def _checked_messages(self, leaves: list[Any], spec: Any, looks: list[Any], cuts: Cuts) -> list[Tensor] | None:
        """Return the messages of a payload that does not look like the last one; None if it has another signature."""
        filled, presence = leaves, None
        if spec is None and len(leaves) == len(self.signature.leaves):
            flags = [leaves[i] is not None for i in self.signature.optional]
            if is_capturing() and flags != self.present:
                return None
            filled, presence, self.present = *self._filled(leaves, flags), flags
        signature = signature_of(filled if spec is None else with_cuts(filled, spec, cuts))
        if not same(signature._replace(optional=self.signature.optional), self.signature):
            return None
        tensors = _contiguous(filled)
        if presence is not None:
            tensors[PRESENCE] = presence
        elif all(a is b for a, b in zip(filled, leaves, strict=True)):
            self._seen = _Seen(spec, looks, cuts, self._travels_as_is(leaves, tensors))
        return self._written(tensors)

    def _travels_as_is(self, leaves: list[Any], tensors: dict[int, Tensor]) -> bool:
        strided = any(isinstance(leaf, TensorSpec) and leaf.strides for leaf in self.signature.leaves)
        copied = any(tensors[chunk.leaf].data_ptr() != leaves[chunk.leaf].data_ptr() for chunk in self.alone)
        return not (self.packed or strided or copied)

    def buffers(self) -> list[Tensor]:
        """Return empty messages to receive into."""
        packed = [torch.empty(self.length, dtype=torch.uint8, device=self.device)] if self.packed else []
        return packed + [torch.empty(chunk.shape, dtype=chunk.dtype, device=self.device) for chunk in self.alone]

    def payload(self, messages: list[Tensor]) -> Payload:
        """Return the payload of its messages; each tensor requires a gradient where the signature says so."""
        signature = self.signature
        tensors: dict[int, Tensor] = {}
        if self.packed:
            tensors = {chunk.leaf: _inside(messages[0], chunk) for chunk in self.packed}
            messages = messages[1:]
        for chunk, tensor in zip(self.alone, messages, strict=True):
            tensors[chunk.leaf] = tensor
        for chunk in self.empty:
            tensors[chunk.leaf] = torch.empty(chunk.shape, dtype=chunk.dtype, device=self.device)
        leaves: list[Any] = list(signature.leaves)
        for i, spec in enumerate(leaves):
            if isinstance(spec, TensorSpec):
                tensor = tensors[i] if spec.strides is None else restored(tensors[i], spec.shape, spec.strides)
                leaves[i] = tensor.requires_grad_() if spec.requires_grad else tensor
        if signature.optional:
            if not is_capturing():  # in a graph, what is there is what was there when the step ran as it is
                with aside():
                    self.present = tensors[PRESENCE].tolist()
            for i, there in zip(signature.optional, self.present, strict=True):
                leaves[i] = leaves[i] if there else None
        return leaves if signature.spec is None else with_cuts(leaves, signature.spec, self.cuts)

    def _filled(self, gradients: list[Any], flags: list[bool]) -> tuple[list[Any], Tensor | None]:
        """Return gradients in the signature's layout, with zeros for missing ones, and the flags of the optional."""
        leaves = [
            _laid_out(leaf, spec, self.device) if isinstance(spec, TensorSpec) else leaf
            for leaf, spec in zip(gradients, self.signature.leaves, strict=True)
        ]
        return leaves, self._flags(flags) if flags else None

    def _flags(self, flags: list[bool]) -> Tensor:
        """Return the message of the flags; in a graph, where no reader looks at them, without a copy from the host."""
        if is_capturing():
            return torch.zeros(len(flags), dtype=torch.uint8, device=self.device)
        with aside():
            return torch.tensor(flags, dtype=torch.uint8, device=self.device)

    def _written(self, tensors: dict[int, Tensor]) -> list[Tensor]:
        alone = [tensors[chunk.leaf] for chunk in self.alone]
        if not self.packed:
            return alone
        packed = torch.empty(self.length, dtype=torch.uint8, device=self.device)
        for chunk in self.packed:
            _inside(packed, chunk).copy_(tensors[chunk.leaf])
        return [packed, *alone]


def _chunks(signature: Signature) -> Iterator[Chunk]:
    if signature.optional:
        yield Chunk(PRESENCE, (len(signature.optional),), torch.uint8, len(signature.optional))
    for i, spec in enumerate(signature.leaves):
        if isinstance(spec, TensorSpec):
            shape = tuple(buffer(spec.shape, spec.strides, spec.dtype, torch.device("meta")).shape)
            yield Chunk(i, shape, spec.dtype, prod(shape) * spec.dtype.itemsize)


def _placed(chunks: list[Chunk]) -> list[Chunk]:
    at, placed = 0, []
    for chunk in chunks:
        placed.append(chunk._replace(at=at))
        at += -(-chunk.size // ALIGNMENT) * ALIGNMENT
    return placed


def _contiguous(leaves: list[Any]) -> dict[int, Tensor]:
    return {i: message(leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}


def _inside(packed: Tensor, chunk: Chunk) -> Tensor:
    return packed[chunk.at : chunk.at + chunk.size].view(chunk.dtype).view(chunk.shape)


def look(leaf: Any) -> Any:
    """Return the properties of a tensor that decide its messages; any other leaf as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad, leaf.device, leaf.is_conj(), leaf.is_neg()


def alike(before: list[Any], now: list[Any]) -> bool:
    """Whether tensors look the same, and other leaves are the same objects: NaN is NaN, 1 is not True."""
    return len(before) == len(now) and all(
        a is b or (type(a) is tuple and type(b) is tuple and a == b) for a, b in zip(before, now, strict=True)
    )


def _laid_out(leaf: Tensor | None, spec: TensorSpec, device: torch.device) -> Tensor:
    shape, strides = spec.shape, spec.strides
    if leaf is None:
        return restored(buffer(shape, strides, spec.dtype, device).zero_(), shape, strides)
    if (leaf.dtype, tuple(leaf.shape)) != (spec.dtype, shape) or strides_of(leaf) == strides:
        return leaf
    if strides is None:
        return leaf.contiguous()
    return torch.empty_strided(leaf.shape, strides, dtype=leaf.dtype, device=leaf.device).copy_(leaf)
