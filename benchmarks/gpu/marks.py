"""Part C: the recorded times of effects beside torch.profiler's times of their kernels, and what recording costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import fpipe
from benchmarks import autodiff
from benchmarks.gpu.blocks import Blocks, device_seconds, difference
from benchmarks.gpu.kernels import Spin
from benchmarks.gpu.setting import Setting
from fpipe import Pipeline, Placement, Recording, handlers, lower, schedules
from fpipe.programs.program import Programs
from fpipe.tensorboard.recording.device_clock import Marks


def marks(setting: Setting) -> None:
    """Compare the recorded times of effects with torch.profiler's of their kernels, and a step's time without them."""
    seconds, spin = 1e-3, None if setting.cpu else Spin(setting.device)
    programs, step, recording = _timed(setting, lambda: _take(seconds, spin, setting.device))
    spans = _recorded(recording, step, setting)
    assert len(programs) == 2
    if spin is not None:
        kernels = _profiled(step)
        setting.report.expect(len(kernels) == len(spans), f"{len(kernels)} kernels in {len(spans)} effects")
        if len(kernels) == len(spans):
            errors = _errors(spans, kernels)
            setting.report.add(
                effects=len(spans), worst_us=1e6 * max(errors), median_us=1e6 * statistics.median(errors)
            )
            setting.report.expect(max(errors) <= 20e-6, f"a mark is off by {1e6 * max(errors):.0f} µs")
    setting.report.add(spans=len(spans), recording=_cost(setting))


def _take(seconds: float, spin: Spin | None, device: torch.device) -> None:
    if spin is None:
        time.sleep(seconds)
    else:
        spin.launch(seconds, threads=32)


class _Timed(torch.autograd.Function):
    """The identity, with one kernel of a given time forward and one backward, and no other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor, take: Callable[[], None]) -> Tensor:
        ctx.take = take
        take()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
        ctx.take()
        return cotangent, None, None


class _Marked:
    """A recording of a device's marks, or of the host's clock on the CPU."""

    def __init__(self, programs: Programs, device: torch.device) -> None:
        count = sum(4 * len(program) for program in programs.values())
        self.marks = None if device.type == "cpu" else Marks(device, count)
        self.recording = Recording(programs, time.perf_counter if self.marks is None else self.marks)


def _timed(setting: Setting, take: Callable[[], None]) -> tuple[Programs, Callable[[], object], _Marked]:
    """Return a step of two ranks in this process whose compute effects have one timed kernel each."""
    pipeline = Pipeline([lambda p, x: _Timed.apply(x, p, take)] * 2, lambda y, t: y.squeeze())
    plan = pipeline.plan(Placement.loop(2), 4)
    params = {s: torch.ones((), device=setting.device) for s in range(2)}
    batch, programs = torch.ones(4, device=setting.device), lower(schedules.one_f_one_b, plan)
    recording = _Marked(programs, setting.device)
    step = fpipe.value_and_grad(
        pipeline,
        schedules.one_f_one_b,
        plan,
        handler=handlers.Local(),
        autodiff="eager",
        observe=recording.recording,
    )
    return programs, lambda: step(params, batch), recording


def _recorded(recording: _Marked, step: Callable[[], object], setting: Setting) -> list[tuple[float, float]]:
    """Return the begin and end of each compute effect of a step, in order."""
    clock = recording.marks
    if clock is not None:
        clock.begin(False)
    step()
    if clock is not None:
        clock.begin(True)
    step()
    measurement = recording.recording.measurement()
    columns = measurement.columns
    if clock is not None:
        columns, _ = clock.keep().seconds(columns)
        clock.begin(False)
    table = measurement.table
    return sorted(
        (lane.starts[at], lane.ends[at])
        for rank, lane in columns.items()
        for at, effect in enumerate(measurement.programs[rank])
        if table.effects[type(effect)].track == "compute"
    )


def _profiled(step: Callable[[], object]) -> list[tuple[float, float]]:
    """Return the begin and end of each timed kernel of a step, in seconds of the profiler's clock."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    events = (event for event in profiler.profiler.kineto_results.events() if event.name().startswith("spin"))
    return sorted((e.start_ns() / 1e9, (e.start_ns() + e.duration_ns()) / 1e9) for e in events)


def _errors(spans: Iterable[tuple[float, float]], kernels: Iterable[tuple[float, float]]) -> list[float]:
    """Return by how much each span's length differs from its kernel's. The two are of two steps."""
    return [abs((b - a) - (d - c)) for (a, b), (c, d) in zip(spans, kernels, strict=True)]


def _cost(setting: Setting) -> dict[str, float]:
    """Return the device's time of a step with marks over that without, as quartiles of rounds in turn."""
    blocks = Blocks(setting.device, *((32, 1, 8) if setting.cpu else (1024, 2, 128)), torch.float32)
    pipeline = Pipeline([autodiff.transformer] * 2, difference)
    plan, batch = pipeline.plan(Placement.loop(2), 4), blocks.batch(16)
    marked = _Marked(lower(schedules.one_f_one_b, plan), setting.device)
    steps = [
        fpipe.value_and_grad(pipeline, schedules.one_f_one_b, plan, handler=handlers.Local(), observe=observe)
        for observe in (None, marked.recording)
    ]
    ratios = []
    for i in range(6 if setting.cpu else 24):
        if marked.marks is not None:
            marked.marks.begin(True)
        times = [0.0, 0.0]
        for at in (0, 1) if i % 2 else (1, 0):
            step = steps[at]
            times[at] = device_seconds(
                lambda step=step: step({0: blocks.params, 1: blocks.params}, batch, batch), setting.device
            )
        ratios.append(times[1] / times[0])
    low, middle, high = statistics.quantiles(ratios[2:], n=4)
    return {"median": middle, "low": low, "high": high}
