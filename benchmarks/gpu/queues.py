"""Part C: the share of hardware queues and multiprocessors that waiting kernels take from compute."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import fpipe
from benchmarks.gpu.kernels import Spin
from benchmarks.gpu.setting import Setting
from fpipe import Pipeline, Placement, handlers, schedules
from fpipe.devices import device_of
from fpipe.effects import Value
from fpipe.handlers.protocol import Observer
from tests.support.jobs import place


def queues(setting: Setting) -> None:
    """Count the streams that may wait for a kernel before compute on another stream waits with them."""
    most = 2 if setting.cpu else 40
    for connections in ("unset", "8", "32"):
        pool = setting.pool(1, CUDA_DEVICE_MAX_CONNECTIONS=None if connections == "unset" else connections)
        (blocked,) = pool.run(blocking, most, setting.kind, limit=setting.report.limit(25))
        setting.report.add(**{f"max_connections {connections}": blocked or f"more than {most}"})
        pool.close()


def blocking(rank: int, most: int, kind: str) -> int | None:
    """Return the least number of waiting streams beside which a kernel of another stream does not run."""
    device = place(rank, kind)
    where = device_of(device)
    if kind == "cpu":
        return next((n for n in range(1, most + 1) if not _computes(where, None, [where.new_stream()] * n)), None)
    spin = Spin(device)
    streams = [torch.cuda.Stream(device, priority=0 if i < 32 else -1) for i in range(most)]
    return next((n for n in range(1, most + 1) if not _computes(where, spin, streams[:n])), None)


def _computes(where: Any, spin: Spin | None, streams: Sequence[Any]) -> bool:
    """Whether compute goes on while the streams wait for a kernel on the first of them."""
    gate, done, x = where.event(), where.event(), torch.ones(8, device=where.torch_device)
    x.add_(1)  # loads its kernel, for which CUDA may wait until the device is idle
    where.synchronize()
    if spin is not None:
        spin.hold()
        spin.launch(2.0, stream=streams[0], threads=32)
    gate.record(streams[0])
    for stream in streams[1:]:
        stream.wait_event(gate)
        if spin is not None:
            spin.launch(0.0, stream=stream, threads=32)
    x.add_(1)
    done.record(where.current_stream())
    until = time.monotonic() + 0.5
    while not done.query() and time.monotonic() < until:
        time.sleep(0.001)
    passed: bool = done.query()
    if spin is not None:
        spin.release()
    where.synchronize()
    return passed


def stolen_sms(setting: Setting) -> None:
    """Measure a GEMM beside spinning blocks, then while a rank waits for a value."""
    size, repeats = (64, 2) if setting.cpu else (8192, 20)
    rates = {"0 blocks": gemm_rate(setting.device, size, repeats)}
    if not setting.cpu:
        spin, side = Spin(setting.device), torch.cuda.Stream(setting.device)
        for blocks in (4, 16, 32, 64):
            spin.hold()
            spin.launch(4.0, blocks, side)
            rates[f"{blocks} blocks"] = gemm_rate(setting.device, size, repeats)
            spin.release()
            torch.cuda.synchronize()
        for priority in (0, -1):
            setting.report.add(**{f"latency_us at priority {priority}": _latency(setting.device, size, priority)})
    setting.report.add(tflops=rates)
    for channels in (4, 16):
        pool = setting.pool(2, NCCL_NCHANNELS_PER_NET_PEER="16")  # else NCCL takes two by sockets
        during, _ = pool.run(beside_receive, size, repeats, channels, setting.kind, limit=setting.report.limit(25))
        setting.report.add(**{f"tflops while a value is waited for, {channels} channels": during})
        setting.report.expect(len(during) == 1, f"rank 0 waited {len(during)} times")
        pool.close()


def gemm_rate(device: torch.device, size: int, repeats: int) -> float:
    """Return the TFLOP/s of a product of square matrices in bfloat16; waits for nothing else on the device."""
    a, b = _matrices(size, device)
    where = device_of(device)
    before, after = where.event(timed=True), where.event(timed=True)
    torch.mm(a, b)
    before.record(where.current_stream())
    for _ in range(repeats):
        torch.mm(a, b)
    after.record(where.current_stream())
    after.synchronize()
    return 2 * size**3 * repeats / before.elapsed_time(after) / 1e9


def _matrices(size: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(2, size, size, device=device, generator=generator).bfloat16()


def beside_receive(rank: int, size: int, repeats: int, channels: int, kind: str) -> list[float]:
    """Return the rate of a GEMM on rank 0 while it has posted a receive, which rank 1 keeps waiting."""
    device, rates = place(rank, kind), list[float]()

    def last(p: Any, x: Any) -> Any:
        if during.begun:
            time.sleep(0.2 if kind == "cpu" else 3.0)
        return (x * p).sum()

    during = _During(lambda: rates.append(gemm_rate(device, size, repeats)))
    pipeline = Pipeline([lambda p, x: x * p, last])
    plan = pipeline.plan(Placement.loop(2), 1)
    where = {} if kind == "cpu" else {"device": device, "backend": handlers.NCCL(channels=channels)}
    step = fpipe.value_and_grad(
        pipeline,
        schedules.gpipe,
        plan,
        handler=handlers.Distributed(**where),
        autodiff="eager",
        observe=during,
    )
    batch = torch.ones(1, 1 << (4 if kind == "cpu" else 22), device=device) if rank == 0 else None
    for begun in (False, True):  # the first step compares signatures, and posts each receive at its first use
        during.begun = begun
        step({rank: torch.ones((), device=device)}, batch)
        device_of(device).synchronize()
    return rates


class _During(Observer):
    """Calls a function where rank 0 begins to wait for a value."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call, self.begun = call, False

    def wait(self, rank: int, value: Value) -> None:
        if rank == 0 and self.begun:
            self.call()


def _latency(device: torch.device, size: int, priority: int) -> float:
    """Return the median microseconds that a kernel of 16 blocks takes beside a GEMM, on a stream of a priority."""
    a, b = _matrices(size, device)
    spin, side = Spin(device), torch.cuda.Stream(device, priority=priority)
    times = []
    for _ in range(20):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(4):
            torch.mm(a, b)
        before.record(side)
        spin.launch(0.0, 16, side)
        after.record(side)
        torch.cuda.synchronize(device)
        times.append(1e3 * before.elapsed_time(after))
    return statistics.median(times)
