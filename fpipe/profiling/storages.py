"""Count bytes by storage: memory that several tensors share counts once.

`profile` and the TensorBoard recorder measure in this way. It is cheap, and it sees only the tensors that are added:
no temporaries. `LiveBytes` sees every event of the allocator instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from fpipe.autodiff.storages import storage_bytes

Owner = TypeVar("Owner", bound=Hashable)


class StorageBytes(Generic[Owner]):
    """The storages that owners (names of values, slots) have, and their bytes.

    It keeps no storage alive: an owner's tensors must live until it is removed.

    Args:
        excluded: tensors whose storages do not count.
        total: bytes of all storages, each once.

    >>> import torch
    >>> x, count = torch.zeros(4), StorageBytes[str](excluded=[])
    >>> count.add("output", [x])
    >>> count.add("residuals", [x.view(2, 2), torch.zeros(2)])
    >>> count.total, count.bytes("residuals")
    (24, 24)
    >>> count.remove("residuals")
    >>> count.total
    16
    """

    def __init__(self, excluded: Iterable[Any]) -> None:
        self.total = 0
        self._excluded = frozenset(storage_bytes(excluded))
        self._owners: dict[int, dict[Owner, None]] = {}  # by storage
        self._sizes: dict[int, int] = {}
        self._storages: dict[Owner, dict[int, None]] = {}  # by owner

    def add(self, owner: Owner, leaves: Iterable[Any]) -> None:
        """Add the storages of the tensors among the leaves to an owner's."""
        for storage, size in storage_bytes(leaves).items():
            if storage in self._excluded:
                continue
            if storage not in self._owners:
                self._owners[storage], self._sizes[storage] = {}, size
                self.total += size
            self._owners[storage][owner] = None
            self._storages.setdefault(owner, {})[storage] = None

    def remove(self, owner: Owner) -> None:
        """Remove an owner; a storage without owners counts no longer."""
        for storage in self._storages.pop(owner, ()):
            del self._owners[storage][owner]
            if not self._owners[storage]:
                del self._owners[storage]
                self.total -= self._sizes.pop(storage)

    def bytes(self, owner: Owner) -> int:
        """Return the bytes of an owner's storages."""
        return sum(self._sizes[storage] for storage in self._storages.get(owner, ()))

    def by(self, group: Callable[[Owner], str]) -> dict[str, float]:
        """Return the bytes of each group of owners; a storage counts to the owner that has had it longest.

        >>> import torch
        >>> x, count = torch.zeros(4), StorageBytes[str](excluded=[])
        >>> count.add("output", [x])
        >>> count.add("residuals", [x, torch.zeros(2)])
        >>> count.by(str.upper)
        {'OUTPUT': 16.0, 'RESIDUALS': 8.0}
        """
        groups = defaultdict[str, float](float)
        for storage, owners in self._owners.items():
            groups[group(next(iter(owners)))] += self._sizes[storage]
        return dict(groups)

    def shared(self) -> Iterator[tuple[tuple[Owner, ...], int]]:
        """Yield the owners and bytes of each storage that has more than one owner."""
        for storage, owners in self._owners.items():
            if len(owners) > 1:
                yield tuple(owners), self._sizes[storage]
