"""Read a training state from the files of a memory checkpoint that this host has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fpipe.interop.checkpoints.chunks import Chunk, chunks_of
from fpipe.interop.checkpoints.manifest import CheckpointError
from fpipe.interop.checkpoints.names import Name, below, dotted
from fpipe.interop.checkpoints.slots import Stored, stored_in


@dataclass(frozen=True)
class _Piece:
    """A box of a whole tensor in the memory of a part."""

    part: Stored
    dtype: torch.dtype
    offsets: Sequence[int]
    sizes: Sequence[int]
    at: int

    @property
    def tensor(self) -> Tensor:
        size = prod(self.sizes) * self.dtype.itemsize
        if not size:
            return torch.empty(self.sizes, dtype=self.dtype)
        return torch.from_numpy(self.part.tensors[self.at : self.at + size]).view(self.dtype).view(self.sizes)


class MemoryReader:
    """A memory checkpoint, as far as this host has its parts; see `Reader`.

    Args:
        folder: of the parts.
        step: attempt and step.

    Raises:
        CheckpointError: this host has none of them any more.
    """

    def __init__(self, folder: Path, step: tuple[int, int]) -> None:
        self.path = folder / f"step-{step[1]}"
        self.parts = [part for part in stored_in(folder) if (part.attempt, part.step) == step]
        if not self.parts:
            raise CheckpointError(f"its parts were removed from {folder}")
        self.plain: dict[Name, Any] = {}
        self.tensors: dict[Name, TensorStorageMetadata] = {}
        self._pieces = defaultdict[Name, dict[tuple[int, ...], _Piece]](dict)
        for part in self.parts:
            self.plain |= {tuple(name): value for name, value in part.values["plain"]}
            for name, kind, size, offsets, sizes, at in part.table["tensors"]:
                dtype = getattr(torch, kind)
                assert isinstance(dtype, torch.dtype)
                self._pieces[tuple(name)].setdefault(tuple(offsets), _Piece(part, dtype, offsets, sizes, at))
                properties = dcp.TensorProperties(dtype=dtype)
                self.tensors.setdefault(tuple(name), TensorStorageMetadata(properties, torch.Size(size), []))
        self.names = {*self.plain, *self.tensors}
        self.below = below(self.names)
        self.states = next((int(part.table["states"]) for part in self.parts), 1)

    def read(self, into: Mapping[Name, Tensor]) -> None:
        """Read tensors into others of the same shapes; into DTensors, this process's pieces.

        Raises:
            CheckpointError: they have not the bytes that were written, or this host lacks some.
        """
        with torch.no_grad():
            for name, tensor in into.items():
                for chunk in chunks_of(tensor):
                    self._fill(name, chunk, chunk.of(tensor))

    def _fill(self, name: Name, chunk: Chunk, memory: Tensor) -> None:
        missing = prod(chunk.sizes)
        for piece in self._pieces[name].values():
            starts = [*map(max, piece.offsets, chunk.offsets)]
            stops = [
                min(a + n, b + m)
                for a, n, b, m in zip(piece.offsets, piece.sizes, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
                continue
            if not piece.part.is_right:
                raise CheckpointError(f"{piece.part.path} has not the bytes that were written, by their sum")
            target = memory[_box(starts, stops, chunk.offsets)]
            target.copy_(piece.tensor[_box(starts, stops, piece.offsets)])
            missing -= target.numel()
        if missing:
            raise CheckpointError(f"{self.path} lacks {missing} numbers of {dotted(name)} on this host")


def _box(starts: Sequence[int], stops: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start - o, stop - o) for start, stop, o in zip(starts, stops, origin, strict=True))
