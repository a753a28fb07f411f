"""The CPU, where every operation is done when it returns, and CUDA."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fpipe.devices.cuda_graph import CudaGraph
from fpipe.devices.interface import Device
from fpipe.devices.lanes import ThreadLane
from fpipe.devices.tape import Tape


class _Moment:
    """An event of the CPU: passed as soon as it is recorded."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def record(self, stream: Any) -> None:
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def elapsed_time(self, end_event: _Moment) -> float:
        return (end_event._seconds - self._seconds) * 1e3


class _OneStream:
    """The CPU's only stream."""

    def wait_event(self, event: Any) -> None:
        """Return at once: the event has passed."""


class Cpu:
    """The CPU."""

    torch_device = torch.device("cpu")
    asynchronous = False
    _stream = _OneStream()

    def current_stream(self) -> _OneStream:
        return self._stream

    def new_stream(self) -> _OneStream:
        return self._stream

    def event(self, timed: bool = False) -> _Moment:
        return _Moment()

    def use(self) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Return at once."""

    def generators(self) -> list[torch.Generator]:
        return [torch.default_generator]

    def host_memory(self, like: Tensor) -> Tensor:
        return torch.empty_like(like, device="cpu")

    def available_bytes(self) -> int | None:
        with suppress(OSError, ValueError):  # another system than Linux
            for line in Path("/proc/meminfo").read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return None

    def host_bytes(self, count: int) -> Tensor:
        """Memory of the CPU's that torch's allocator does not have: it stands for another memory than the device's."""
        return torch.from_numpy(np.empty(count, dtype=np.uint8))

    def new_lane(self) -> ThreadLane:
        return ThreadLane()

    def peak_bytes(self) -> int | None:
        return None

    def requested_peak(self, call: Callable[[], object]) -> int | None:
        return None

    def new_graph(self, tensors: Sequence[Tensor], keys: Sequence[Hashable]) -> Tape:
        return Tape(tensors)


class StreamLane:
    """A lane of a CUDA device: a stream, whose copies to and from pinned memory its copy engines run."""

    def __init__(self, device: Cuda) -> None:
        self.device, self._stream = device, device.new_stream()

    def copy(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        device, launched, done = self.device, self.device.event(), self.device.event()
        launched.record(device.current_stream())
        self._stream.wait_event(launched)
        with torch.cuda.stream(self._stream):
            for source, target in copies:
                target.copy_(source, non_blocking=True)
        done.record(self._stream)
        return lambda: device.current_stream().wait_event(done)


class Cuda:
    """A CUDA device; by default the current one.

    Args:
        device: with or without an index.
    """

    asynchronous = True

    def __init__(self, device: torch.device | str = "cuda") -> None:
        index = torch.device(device).index
        self.torch_device = torch.device("cuda", torch.cuda.current_device() if index is None else index)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.torch_device)

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    def use(self) -> None:
        torch.cuda.set_device(self.torch_device)

    def multiprocessors(self) -> int:
        return int(torch.cuda.get_device_properties(self.torch_device).multi_processor_count)

    def event(self, timed: bool = False) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def generators(self) -> list[torch.Generator]:
        return [torch.default_generator, torch.cuda.default_generators[self.torch_device.index]]

    def host_memory(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)

    def available_bytes(self) -> int | None:
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def host_bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device="cpu", pin_memory=True)

    def new_lane(self) -> StreamLane:
        return StreamLane(self)

    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.torch_device)

    def requested_peak(self, call: Callable[[], object]) -> int | None:
        before = torch.cuda.memory_stats(self.torch_device).get("requested_bytes.all.current", 0)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        call()
        return int(torch.cuda.memory_stats(self.torch_device)["requested_bytes.all.peak"] - before)

    def new_graph(self, tensors: Sequence[Tensor], keys: Sequence[Hashable]) -> CudaGraph:
        return CudaGraph(self.torch_device, tensors, keys)


def all_generators() -> list[torch.Generator]:
    """Return the global generators of the CPU, and of all CUDA devices if this process uses one."""
    others = torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    return [torch.default_generator, *others]


def cuda_count() -> int:
    """Return the number of CUDA devices that this process sees; 0 with a torch without CUDA."""
    return torch.cuda.device_count()


def current_device() -> Device:
    """Return the current CUDA device if this process uses one, else the CPU."""
    return Cuda() if torch.cuda.is_initialized() else Cpu()  # type: ignore[no-untyped-call]


def device_of(device: torch.device | str | Device) -> Device:
    """Return the device of a torch.device; a `Device` as it is.

    Raises:
        ValueError: fpipe does not know this type of device, or this process has no such device.
    """
    if not isinstance(device, torch.device | str):
        return device
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{device!r} is no device: {error}") from error
    if wanted.type == "cuda":
        if (wanted.index or 0) >= cuda_count():
            raise ValueError(f"there is no device {wanted}: {_visible()}")
        return Cuda(device)
    if wanted.type == "cpu":
        return Cpu()
    raise ValueError(f"fpipe runs on the CPU and on CUDA devices, not on {device}")


def _visible() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch is built without CUDA: install one with it, or use the CPU"
    count = cuda_count()
    return f"this process sees {count} CUDA device{'s' * (count != 1)} (CUDA_VISIBLE_DEVICES may hide others)"
