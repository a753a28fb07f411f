"""Stages of transformer blocks whose forward takes a device a given time, and times by events."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import autodiff
from benchmarks.gpu.solo import Solo
from fpipe import Pipeline, Placement, schedules
from fpipe.devices import device_of
from fpipe.handlers.protocol import Observer


def device_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the time between the device's passing the begin and the end of a call; of the host on the CPU."""
    where = device_of(device)
    before, after = where.event(timed=True), where.event(timed=True)
    where.synchronize()
    before.record(where.current_stream())
    call()
    after.record(where.current_stream())
    where.synchronize()
    return float(before.elapsed_time(after)) / 1e3


class Blocks:
    """Stages of transformer blocks, each of a number of tokens that takes a forward a given time."""

    def __init__(self, device: torch.device, width: int, count: int, length: int, dtype: torch.dtype) -> None:
        self.device, self.width, self.length, self.dtype = device, width, length, dtype
        torch.manual_seed(0)
        params = autodiff.make_params(autodiff.BLOCK, width, count)
        self.params = [{name: x.to(device, dtype) for name, x in block.items()} for block in params]

    def batch(self, rows: int) -> Tensor:
        return torch.randn(rows, self.length, self.width, device=self.device, dtype=self.dtype)

    def forward_seconds(self, rows: int) -> float:
        x = self.batch(rows)
        with torch.no_grad():
            calls = [device_seconds(lambda: autodiff.transformer(self.params, x), self.device) for _ in range(7)]
        return statistics.median(calls[2:])

    def rows(self, seconds: float) -> int:
        """Return the sequences of a microbatch whose forward takes about that long."""
        rows = 1
        while (took := self.forward_seconds(rows)) < seconds and rows < 4096:
            rows = max(rows + 1, min(4 * rows, round(rows * seconds / took)))
        return rows

    def solo(self, rows: int, microbatches: int, observe: Observer | None = None, **options: Any) -> Solo:
        """Return the middle rank of three, under 1F1B."""
        pipeline = Pipeline([autodiff.transformer] * 3, difference)
        plan, batch = pipeline.plan(Placement.loop(3), microbatches), self.batch(rows * microbatches)
        params = dict.fromkeys(range(3), self.params)
        return Solo(
            pipeline, schedules.one_f_one_b, plan, 1, params, batch, batch, self.device, observe=observe, **options
        )


def difference(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error in float32."""
    return (output - target).float().square().mean()
