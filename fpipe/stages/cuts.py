"""Values of a stage that are cut over the processes that compute it together, of which each has a piece.

Between stages a piece is a plain tensor. Its place in the larger one goes along with it, in `Pieces`, and over edges of
the pipeline in its signature. A place names no mesh: each rank of the pipeline has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import optree
import torch
from torch import Tensor

from fpipe.stages.pytree import Flat
from fpipe.stages.sharding import Placed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Cut(NamedTuple):
    """The place of a tensor in a larger one, which is cut over the processes that compute a stage together.

    The pieces are those of `torch.chunk`: of equal sizes, rounded up, of which the last ones may be smaller or empty.

    Args:
        dim: the dimension that is cut.
        piece, pieces: the number of this piece, and how many there are.
        shape, stride: of the larger tensor.
    """

    dim: int
    piece: int
    pieces: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __str__(self) -> str:
        return f"piece {self.piece} of {self.pieces} of {[*self.shape]} along dimension {self.dim}"

    @classmethod
    def of(cls, placed: Placed) -> Self:
        """Return the place of this process's piece.

        Args:
            placed: the placement, which is `Shard`.
        """
        dim: int = placed.placements[0].dim  # type: ignore[attr-defined]
        mesh = placed.mesh
        return cls(dim, mesh.get_local_rank(), mesh.size(), tuple(placed.shape), tuple(placed.stride))

    def over(self, mesh: DeviceMesh) -> Placed:
        """Return the placement over a mesh in which this process has the same number.

        Raises:
            ValueError: it has another one, or the mesh has another size.
        """
        if (mesh.get_local_rank(), mesh.size()) != (self.piece, self.pieces):
            raise ValueError(
                f"it is {self}, and this process is number {mesh.get_local_rank()} of the {mesh.size()} over which the "
                f"stage's params are placed, {mesh}"
            )
        from torch.distributed.tensor import Shard  # imported already: the mesh comes from a DTensor

        return Placed(mesh, (Shard(self.dim),), torch.Size(self.shape), self.stride)


Cuts = Mapping[int, Cut]
"""The places of those leaves of a tree that are pieces, by number."""
NO_CUTS: Cuts = {}


class Pieces(Flat):
    """A flattened tree of which some leaves are this process's pieces of larger tensors; made by `with_cuts`.

    Attributes:
        cuts: their places. A copy made otherwise has none, which is an error when they are read.
    """

    cuts: Cuts


def with_cuts(leaves: list[Any], spec: optree.PyTreeSpec, cuts: Cuts) -> Flat:
    """Return a flattened tree, with the places of the leaves that are pieces."""
    if not cuts:
        return Flat(leaves, spec)
    pieces = Pieces(leaves, spec)
    pieces.cuts = cuts
    return pieces


def cuts_of(value: object) -> Cuts:
    """Return the places of the leaves that are pieces."""
    return value.cuts if isinstance(value, Pieces) else NO_CUTS


CONSTRAIN: ContextVar[Callable[[Tensor, Any], Tensor] | None] = ContextVar("CONSTRAIN", default=None)
"""Places a tensor of the stage that is traced over the processes that compute it; None outside of such a trace."""
