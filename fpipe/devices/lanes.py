"""Lanes: queues beside a device's compute, on which copies between its memory and the host's run one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

Copies = Sequence[tuple[Tensor, Tensor]]
"""Pairs of a tensor and the memory into which it is copied."""


class ThreadLane:
    """A lane of the CPU: a thread that copies while the other threads compute."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fpipe-lane")

    def copy(self, copies: Copies) -> Callable[[], None]:
        return self._thread.submit(_copy, copies).result


def _copy(copies: Copies) -> None:
    for source, target in copies:
        target.copy_(source)
