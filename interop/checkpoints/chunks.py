"""The chunks of a whole tensor that this process has, of a DTensor: boxes without gaps, in its memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from fpipe.stages.sharding import is_dtensor, local


@dataclass(frozen=True)
class Chunk:
    """A box of a whole tensor.

    Args:
        offsets, sizes: in the whole tensor.
        starts: of the box in this process's piece.
    """

    offsets: torch.Size
    sizes: torch.Size
    starts: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """Return the box, as a view of a tensor's piece."""
        piece = local(tensor).detach()
        for dim, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            piece = piece.narrow(dim, start, size)
        return piece


def chunks_of(tensor: Tensor) -> list[Chunk]:
    """Return the chunks of a tensor; of a DTensor, those of this process's piece, which has none if it is empty.

    A layer that makes several things at once, as queries, keys and values, has a chunk of each.

    >>> chunks_of(torch.zeros(2, 3))
    [Chunk(offsets=torch.Size([0, 0]), sizes=torch.Size([2, 3]), starts=(0, 0))]
    """
    if not is_dtensor(tensor) or not tensor.numel():
        piece = local(tensor)
        return [Chunk(torch.Size([0] * piece.ndim), piece.shape, (0,) * piece.ndim)]
    along = [list(_runs(rows)) for rows in _rows(tensor)]
    return [
        Chunk(torch.Size(row for row, _, _ in box), torch.Size(size for _, size, _ in box), tuple(at for *_, at in box))
        for box in product(*along)
    ]


def _rows(tensor: Tensor) -> list[Tensor]:
    """Return the numbers of the rows of this process's piece, by dimension."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    assert isinstance(tensor, DTensor)
    rows = [torch.arange(size) for size in tensor.shape]
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for at, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard | _StridedShard):
            factor = getattr(placement, "split_factor", None)
            cut = Shard(0) if factor is None else _StridedShard(0, split_factor=factor)
            pieces, _ = cut._split_tensor(rows[placement.dim], mesh.size(at), with_padding=False, contiguous=False)
            rows[placement.dim] = pieces[coordinate[at]]
    return rows


def _runs(rows: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of numbers that follow one another: the first, how many there are, and where they stand."""
    breaks = [*((rows.diff() != 1).nonzero().flatten() + 1).tolist(), len(rows)] if len(rows) else []
    start = 0
    for stop in breaks:
        yield int(rows[start]), stop - start, start
        start = stop


class SavePlanner(DefaultSavePlanner):
    """Writes the chunks of this process's pieces: torch's own refuses pieces of several chunks."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.chunks = {(key, chunk.offsets): chunk.of(x) for key, x in tensors.items() for chunk in chunks_of(x)}
        self.tensors = tensors

    def create_local_plan(self) -> SavePlan:
        items = [self._item(key, self.tensors[key], offsets, chunk) for (key, offsets), chunk in self.chunks.items()]
        self.plan = SavePlan(items)
        return self.plan

    def _item(self, key: str, tensor: Tensor, offsets: torch.Size, chunk: Tensor) -> WriteItem:
        place = dcp.ChunkStorageMetadata(offsets, chunk.shape)
        data = TensorWriteData(place, dcp.TensorProperties.create_from_tensor(chunk), tensor.shape)
        return WriteItem(dcp.MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data)

    def lookup_object(self, index: dcp.MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.chunks[index.fqn, index.offset]


class LoadPlanner(DefaultLoadPlanner):
    """Reads the chunks of this process's pieces."""

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Metadata) -> None:
        super().__init__()
        self.stored = metadata.state_dict_metadata
        self.chunks = {key: {chunk.offsets: chunk.of(x) for chunk in chunks_of(x)} for key, x in tensors.items()}

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for key, chunks in self.chunks.items():
            places = [dcp.ChunkStorageMetadata(offsets, chunk.shape) for offsets, chunk in chunks.items()]
            stored = self.stored[key]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(key, stored, places)
        return LoadPlan(items)

    def lookup_tensor(self, index: dcp.MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.chunks[index.fqn][index.offset]
