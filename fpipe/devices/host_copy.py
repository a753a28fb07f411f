"""Read a tensor on the host without a wait for what the device runs later."""

from __future__ import annotations

from torch import Tensor

from fpipe.devices.interface import Device


class HostCopy:
    """A copy on the host of a tensor as it is now; making it waits for nothing.

    Args:
        x: on the device, at its current stream.
        memory: where the copy goes, of x's shape and dtype, from `Device.host_memory`; by default new memory.
    """

    def __init__(self, x: Tensor, device: Device, memory: Tensor | None = None) -> None:
        self._memory = device.host_memory(x) if memory is None else memory
        self._memory.copy_(x.detach(), non_blocking=True)
        self._written = device.event()
        self._written.record(device.current_stream())

    def read(self) -> Tensor:
        """Wait until the device has written the copy, and return it."""
        self._written.synchronize()
        return self._memory
