"""Residuals on the host: copied there, given up on the device, and copied back.

Invariants:
- A copy moves whole storages. Tensors that shared one share one again, at the same places in it.
- What the caller owns stays where it is: parameters and the batch. What another value of the rank has too is copied
  like the rest: that value may be gone long before the backward, and until then it keeps the memory on the device.
- Memory is given up only when the stream on which the rank computes has waited for the copies that use it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fpipe.autodiff.functions import SavedGraph
from fpipe.autodiff.storages import storage_bytes
from fpipe.devices import Device, Lane


@dataclass(frozen=True)
class _Place:
    """The place of a tensor: the number of its storage, and where it is there."""

    storage: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]
    is_conj: bool
    is_neg: bool

    def of(self, memory: Tensor) -> Tensor:
        """Return the tensor at this place of a storage, given as bytes."""
        x = torch.empty(0, dtype=self.dtype, device=memory.device)
        x.set_(memory.untyped_storage(), self.offset, self.shape, self.strides)
        x = x.conj() if self.is_conj else x
        return torch._neg_view(x) if self.is_neg else x


@dataclass
class OnHost:
    """Residuals whose storages are copied to the host.

    Args:
        saved: them without the tensors that are moved.
        places: of these tensors, by their number.
        device: their storages on the device, as bytes, until they are given up.
        host: the copies.
        done: lets the rank wait for the copies; None once it has.
    """

    saved: SavedGraph
    places: dict[int, _Place]
    device: list[Tensor]
    host: list[Tensor]
    done: Callable[[], None] | None

    @property
    def bytes(self) -> int:
        """The bytes that were moved."""
        return sum(memory.numel() for memory in self.host)

    def wait(self) -> OnHost:
        """Let the rank wait for the copies, and give up the memory on the device."""
        if self.done is not None:
            self.done()
        self.done, self.device = None, []
        return self


class HostResiduals:
    """The residuals of one rank that are on the host, and the lanes there and back.

    Args:
        device: on which the rank computes.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._out: Lane = device.new_lane()
        self._back: Lane = device.new_lane()
        self._spare = defaultdict[int, list[Tensor]](list)  # by size: memory that copies of this step or the last took
        self._sizes = set[int]()  # of this step's copies
        self._under_way: dict[int, Callable[[], None]] = {}

    def offload(self, saved: SavedGraph, fixed: Iterable[Any]) -> OnHost:
        """Post the copies of residuals to the host.

        Args:
            fixed: tensors whose storages stay.
        """
        staying, numbers = storage_bytes(fixed), dict[int, int]()
        values, places, device = [*saved.values], dict[int, _Place](), list[Tensor]()
        for i, x in enumerate(values):
            if type(x) is not Tensor or x.layout is not torch.strided or x.requires_grad:
                continue
            storage = x.untyped_storage()
            if storage._cdata in staying or not storage.nbytes():
                continue
            if storage._cdata not in numbers:
                numbers[storage._cdata] = len(device)
                device.append(torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage))
            places[i], values[i] = _place(x, numbers[storage._cdata]), None
        host = [self._memory(each.numel()) for each in device]
        done = self._post(self._out, list(zip(device, host, strict=True)))
        return OnHost(replace(saved, values=values), places, device, host, done)

    def fetch(self, moved: OnHost) -> tuple[SavedGraph, Callable[[], None]]:
        """Post the copies back, into new memory.

        Returns:
            The residuals, and a function that lets the rank wait for them.
        """
        device = self._device.torch_device
        memories = [torch.empty(each.numel(), dtype=torch.uint8, device=device) for each in moved.host]
        values = [*moved.saved.values]
        for i, place in moved.places.items():
            values[i] = place.of(memories[place.storage])
        done = self._post(self._back, list(zip(moved.host, memories, strict=True)))

        def wait() -> None:
            done()
            for memory in moved.host:
                self._spare[memory.numel()].append(memory)

        return replace(moved.saved, values=values), wait

    def clear(self) -> None:
        """End a step: wait for all copies that are under way, and give up memory of sizes that it did not use."""
        for done in [*self._under_way.values()]:
            done()
        for size in self._spare.keys() - self._sizes:
            del self._spare[size]
        self._sizes.clear()

    def _memory(self, count: int) -> Tensor:
        self._sizes.add(count)
        spare = self._spare[count]
        return spare.pop() if spare else self._device.host_bytes(count)

    def _post(self, lane: Lane, copies: list[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        wait = lane.copy(copies)

        def done() -> None:
            self._under_way.pop(id(copies), None)
            wait()

        self._under_way[id(copies)] = done
        return done


def _place(x: Tensor, storage: int) -> _Place:
    return _Place(storage, x.dtype, int(x.storage_offset()), x.shape, x.stride(), x.is_conj(), x.is_neg())
