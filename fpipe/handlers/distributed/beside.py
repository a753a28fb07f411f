"""Calls of all processes that train one model: those of each pipeline, and those that compute its stages together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from fpipe.handlers.distributed.collectives import Collectives, new_store
from fpipe.handlers.gloo import gloo_group
from fpipe.handlers.protocol import Peers
from fpipe.store import LIMIT, bounded

T = TypeVar("T")


class _OwnGroups:
    """Groups of gloo over the processes of one dimension of a mesh, apart from those of the caller."""

    def __init__(self, mesh: DeviceMesh, purpose: str, timeout: float | None) -> None:
        self._rank, self._size = mesh.get_local_rank(), mesh.size()
        processes = "-".join(map(str, mesh.mesh.flatten().tolist()))
        self._store = new_store(f"beside/{processes}/{purpose}", self._rank, timeout)
        self._groups: dict[str, Any] = {}

    def store(self) -> Store:
        return self._store

    def group(self, purpose: str, timeout: float | None) -> Any:
        if purpose not in self._groups:
            store, limit = PrefixStore(f"group of {purpose}", self._store), timeout or LIMIT
            self._groups[purpose] = bounded(lambda: gloo_group(store, self._rank, self._size, limit), limit)
        return self._groups[purpose]


def beside(mesh: DeviceMesh, purpose: str, *, hint: str, timeout: float | None, error: type[Exception]) -> Collectives:
    """Return collectives over one dimension of a mesh, over connections of their own, which any thread may use.

    Args:
        purpose, hint, timeout, error: as of `Peers.new_group`.
    """
    processes = dist.get_process_group_ranks(mesh.get_group())
    return Collectives(
        _OwnGroups(mesh, purpose, timeout),
        mesh.get_local_rank(),
        mesh.size(),
        timeout,
        purpose=purpose,
        hint=hint,
        error=error,
        name=lambda rank: f"process {processes[rank]}",
    )


@dataclass(eq=False)
class RowsOfPeers:
    """Calls of all processes of a grid, whose rows are pipelines with their replicas.

    Args:
        row: the processes of this one's row; None if it is alone there.
        column: those with its place in every row.
    """

    row: Peers | None
    column: Peers

    @property
    def size(self) -> int:
        """The number of all processes."""
        return self.column.size * (1 if self.row is None else self.row.size)

    def connect(self, call: str) -> None:
        """Make the connections, see `Peers.connect`."""
        if self.row is not None:
            self.row.connect(call)
        self.column.connect(call)

    def agree(
        self, do: Callable[[], T], call: str, share: Callable[[T], Any] = lambda result: result
    ) -> tuple[T, list[Any]]:
        """Return what a function returns, and what each process shares of its own, row by row; see `Peers.agree`."""

        def in_row() -> tuple[T, list[Any]]:
            if self.row is not None:
                return self.row.agree(do, call, share)
            result = do()
            return result, [share(result)]

        (result, _), shares = self.column.agree(in_row, call, lambda each: each[1])
        return result, [shared for row in shares for shared in row]
