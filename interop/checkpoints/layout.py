"""Where each leaf of a training state lies in the file of a memory checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import optree
import torch
from torch import Tensor

from fpipe.handlers.contents import fingerprint
from fpipe.interop.checkpoints.chunks import Chunk, chunks_of
from fpipe.interop.checkpoints.names import Entry, Name, entries, storable
from fpipe.interop.checkpoints.slots import WORD
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.sharding import local, sharding_key

ALIGNED = 64  # bytes
ROOM = 4096  # bytes for values, at least
EMPTY = 2  # tensors like a parameter that an optimizer without values will keep for it, as Adam does
CACHED = 1 << 19  # bytes that a core still has in its cache after it has copied them


class Run(NamedTuple):
    """Parts of tensors that are copied one after another, then read for their sum while they are in the cache.

    Args:
        places: of the parts in the file.
        content: the bytes of the file that are theirs, in whole words of 64 bits.
    """

    places: list[Tensor]
    content: np.ndarray[Any, Any]


class Layout:
    """The places of a training state's leaves in a file.

    Attributes:
        tensors: name, dtype, whole size, offsets and sizes of each box, and where its bytes begin.
        size: the bytes of all.
        holds: a number for what the process holds of its stages: equal for equal entries.
        expected: the bytes of the tensors, with those that an optimizer will keep.
        texts: about as many bytes stand before the tensors.
    """

    def __init__(self, sections: Mapping[str, Any], pipeline: Pipeline) -> None:
        listed, self._spec = entries(sections, pipeline)
        self._keys = [_key(each.leaf) for each in listed]
        self._plain = [(at, each.name) for at, each in enumerate(listed) if each.is_stored and not _is_tensor(each)]
        self._whole: list[tuple[int, Chunk | None]] = []
        self._rows: list[int | None] = []  # of each part of these
        self.tensors: list[tuple[Name, str, list[int], list[int], list[int], int]] = []
        self.size, later, holds = 0, 0, []
        for at, each in enumerate(listed):
            if not each.is_stored:
                continue
            chunks: list[Chunk] = []
            if _is_tensor(each):
                if not each.leaf.is_meta:
                    storable(each.name, each.leaf)
                chunks = chunks_of(each.leaf)
                self._whole += [(at, None if chunk.sizes == local(each.leaf).shape else chunk) for chunk in chunks]
                for chunk in chunks:
                    kind = str(each.leaf.dtype).removeprefix("torch.")
                    place = [*each.leaf.shape], [*chunk.offsets], [*chunk.sizes], self.size
                    self.tensors.append((each.name, kind, *place))
                    size = prod(chunk.sizes) * each.leaf.dtype.itemsize
                    self._rows.append(_rows(chunk.sizes, size) if each.leaf.device.type == "cpu" else None)
                    self.size += _aligned(size)
            elif each.is_empty and each.parameter is not None:
                later += EMPTY * _aligned(local(each.parameter[1]).nbytes) + ALIGNED
            if each.stage is not None:
                holds.append((each.name, [(*chunk.offsets, *chunk.sizes) for chunk in chunks]))
        self.holds, self.expected = fingerprint(holds), self.size + later
        self.texts = 2 * len(json.dumps(self.tensors)) + 2 * ROOM

    def fits(self, leaves: Sequence[Any], spec: optree.PyTreeSpec) -> bool:
        """Return whether a training state has this layout."""
        return spec == self._spec and list(map(_key, leaves)) == self._keys

    def sources(self, leaves: Sequence[Any]) -> list[Tensor]:
        """Return the tensors to be copied, in parts."""
        with torch.no_grad():
            return [*self._sources(leaves)]

    def _sources(self, leaves: Sequence[Any]) -> Iterator[Tensor]:
        for (at, chunk), rows in zip(self._whole, self._rows, strict=True):
            yield from _parts(local(leaves[at]) if chunk is None else chunk.of(leaves[at]), rows)

    def plain(self, leaves: Sequence[Any]) -> list[tuple[Name, Any]]:
        """Return the values that are no tensors."""
        return [(name, {} if _is_dict(leaves[at]) else storable(name, leaves[at])) for at, name in self._plain]

    def runs(self, memory: Tensor) -> list[Run]:
        """Return the places of these parts within the memory for all, in runs of about `CACHED` bytes."""
        content, begin, stop = memory.numpy(), memory.data_ptr(), 0
        groups, starts = list[list[Tensor]](), list[int]()
        for (_, kind, _, _, sizes, at), rows in zip(self.tensors, self._rows, strict=True):
            dtype = getattr(torch, kind)
            whole = memory[at : at + prod(sizes) * dtype.itemsize].view(dtype).view(sizes)
            for place in _parts(whole, rows):
                if not groups or stop - starts[-1] >= CACHED:
                    groups.append([])
                    starts.append(stop // WORD * WORD)  # a word of two runs is summed with the second one
                groups[-1].append(place)
                stop = place.data_ptr() - begin + place.nbytes if place.numel() else stop
        stops = [*starts[1:], len(content)]
        return [Run(places, content[a:b]) for places, a, b in zip(groups, starts, stops, strict=True)]


def _rows(sizes: Sequence[int], size: int) -> int | None:
    """Return the rows of a part of a tensor of so many bytes; None where it is one part."""
    return max(1, CACHED * sizes[0] // size) if size > CACHED and sizes else None


def _parts(tensor: Tensor, rows: int | None) -> Sequence[Tensor]:
    return [tensor] if rows is None else tensor.split(rows)  # type: ignore[no-untyped-call]


def _is_tensor(entry: Entry) -> bool:
    return isinstance(entry.leaf, Tensor)


def _is_dict(leaf: object) -> bool:
    return isinstance(leaf, dict)


def _key(leaf: Any) -> object:
    return sharding_key(leaf) if isinstance(leaf, Tensor) else None


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
