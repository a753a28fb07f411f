"""Part C: the backward, the update, and memory, beside torch and beside what is predicted.

On the CPU the same code runs in small, and its numbers mean nothing.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor

import fpipe
from benchmarks import autodiff as backwards
from benchmarks import optim as updates
from benchmarks.gpu.blocks import device_seconds
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.solo import Solo
from fpipe import Pipeline, Placement, handlers, schedules
from fpipe.devices import Device, device_of
from fpipe.effects import Effect
from fpipe.handlers.protocol import Observer
from fpipe.stages.pytree import flatten
from tests.support import cases
from tests.support.jobs import place


def autodiff(setting: Setting) -> None:
    """Time the backward, fused and split, beside eager autograd's and torch's split, by events."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    widths, dtypes = ((32,), (torch.float32,)) if setting.cpu else ((1024, 4096), (torch.float32, torch.bfloat16))
    for width, dtype, kind in product(widths, dtypes, backwards.STAGES):
        if setting.report.over:
            left_out = f"{kind}, width {width}, {dtype}, and what follows"
            setting.report.add(left_out=left_out)
            setting.report.note(f"left out for time: {left_out}")
            break
        row = _backward(kind, width, dtype, setting.device, seconds=0.2 if setting.cpu else 6.0)
        name = f"{kind}, width {width}, {str(dtype).removeprefix('torch.')}"
        setting.report.add(**{name: row})
        setting.report.expect(
            row["bits"] or not row["eager_repeats"], f"{name}: its gradients are not eager autograd's"
        )
        for ratio, values in row["ratios"].items():
            missed = values["verdict"] == "missed" and not setting.cpu
            setting.report.expect(not missed, f"{name}: {ratio} is {values['median']:.3f}, not {values['target']}")


def _backward(kind: str, width: int, dtype: torch.dtype, device: torch.device, seconds: float) -> dict[str, Any]:
    torch.manual_seed(0)
    fn, block, blocks = backwards.STAGES[kind]
    shape = (2, 8) if device.type == "cpu" else (8, 512)
    params = [
        {name: x.to(device, dtype) for name, x in tree.items()} for tree in backwards.make_params(block, width, blocks)
    ]
    x, cotangent = torch.randn(2, *shape, width, device=device, dtype=dtype)
    ways = backwards.eager_ways(fn, params, x, cotangent) | backwards.our_ways(fn, params, x, cotangent, "graph")
    expected, again = (ways["eager"].backward(*ways["eager"].forward()) for _ in range(2))
    repeats = all(map(torch.equal, expected, again))
    bits = all(
        all(map(torch.equal, ways[name].backward(*ways[name].forward()), expected)) for name in ("fused", "split")
    )
    times = _rounds(ways, device, seconds)
    ratios = {
        name: backwards.ratio(times[a], times[b], target(width)) for name, (a, b, target) in backwards.RATIOS.items()
    }
    medians = {name: 1e3 * statistics.median(each) for name, each in times.items()}
    return {
        "bits": bits,
        "eager_repeats": repeats,
        "rounds": len(times["eager"]),
        "milliseconds": medians,
        "ratios": ratios,
    }


def _rounds(ways: Mapping[str, Any], device: torch.device, seconds: float) -> dict[str, list[float]]:
    """Return the device's seconds of each way's backward, in rounds of another order each."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    order, until = random.Random(0), time.monotonic() + seconds
    while len(times["eager"]) < 10 or (time.monotonic() < until and len(times["eager"]) < 200):
        for name in order.sample(list(ways), len(ways)):
            way = ways[name]
            saved = way.forward()
            gradients: list[Any] = []
            times[name].append(
                device_seconds(lambda way=way, saved=saved, g=gradients: g.append(way.backward(*saved)), device)
            )
            del saved, gradients
            way.forget()
    return {name: each[3:] for name, each in times.items()}


def optim(setting: Setting) -> None:
    """Run benchmarks.optim on this device."""
    sizes = ((2, 32),) if setting.cpu else ((24, 2048), (6, 4096))
    for (layers, width), kernel in product(sizes, updates.KERNELS):
        row = updates.row(kernel, layers, width, setting.device, 3 if setting.cpu else 15)
        setting.report.add(**{f"{kernel}, {layers} layers of width {width}": row})
        ratio = row["ratios"]["donated"]
        setting.report.expect(
            setting.cpu or ratio <= 1.05, f"{kernel}, width {width}: donated is {ratio:.3f} of torch's"
        )


SPREAD = ("gpipe", "one_f_one_b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v")


def memory(setting: Setting) -> None:
    """Compare the peak of rank 0, alone, with that which `verify` predicts from a profile."""
    ranks, microbatches = 2, 4
    for name in (*(SPREAD[1:3] if setting.cpu else SPREAD), "one_f_one_b_offloaded", "gpipe_recomputed"):
        generator, place_of = (cases.SCHEDULES | cases.MOVING)[name]
        pipeline, params, batch, plan = large(place_of(ranks), microbatches, setting)
        costs = fpipe.profile(pipeline, params, *batch, microbatches=microbatches, repeats=1, autodiff="graph")
        predicted = fpipe.verify(generator, plan, costs=costs).peak_bytes
        assert predicted is not None
        measured = _peak(Solo, (pipeline, generator, plan, 0, params, *batch, setting.device), setting)
        off = measured / predicted[0] - 1
        setting.report.add(**{name: {"predicted": predicted[0], "measured": measured, "off": off}})
        setting.report.expect(abs(off) <= 0.02, f"{name}: {off:+.1%}")
    lead(setting)


def large(placement: Placement, microbatches: int, setting: Setting) -> tuple[Any, Any, Any, Any]:
    """Blocks whose residuals are much larger than their parameters."""
    width, length, rows = (32, 8, 4) if setting.cpu else (256, 512, 32)
    torch.manual_seed(0)
    shapes = {"qkv": (width, 3 * width), "up": (width, 2 * width), "down": (2 * width, width)}
    params = {
        s: {name: torch.randn(*shape, device=setting.device) / width for name, shape in shapes.items()}
        for s in range(placement.stages)
    }
    pipeline = Pipeline([cases.attend] * placement.stages, cases.mse)
    batch = torch.randn(2, rows * microbatches, length, width, device=setting.device)
    return pipeline, params, batch, pipeline.plan(placement, microbatches)


def _peak(make: Callable[..., Solo], arguments: tuple[Any, ...], setting: Setting) -> float:
    """Return the most bytes at the end of an effect, beyond those before the step and its sums of gradients."""
    if setting.cpu:
        live = fpipe.LiveBytes()
        solo = make(*arguments, observe=live, autodiff="graph")
        solo.step()
        live.run(solo.step)
        return float(live.peak(solo.program.rank))
    allocated = _Allocated(setting.device)
    solo = make(*arguments, observe=allocated, autodiff="graph")
    solo.step()
    allocated.start()
    results = solo.step()
    sums = [x for x in flatten(results.gradients).leaves if isinstance(x, Tensor)]
    return float(allocated.peak - sum(x.numel() * x.element_size() for x in sums))


class _Allocated(Observer):
    """Keeps the most bytes that are requested from CUDA's allocator at the end of an effect."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.before, self.peak = device, 0, 0

    def _bytes(self) -> int:
        return int(torch.cuda.memory_stats(self.device)["requested_bytes.all.current"])

    def start(self) -> None:
        self.before, self.peak = self._bytes(), 0

    def end(self, rank: int, effect: Effect) -> None:
        self.peak = max(self.peak, self._bytes() - self.before)


def lead(setting: Setting) -> None:
    """Report the bytes of NCCL's connections, and of a step whose host runs ahead of the device."""
    pool = setting.pool(2)
    for name, waits in (("host_leads", False), ("host_waits", True)):
        peaks = pool.run(_leading, 1 << (4 if setting.cpu else 22), waits, setting.kind, limit=setting.report.limit(40))
        setting.report.add(**{name: peaks})


def _leading(rank: int, elements: int, waits: bool, kind: str) -> dict[str, int]:
    """Return bytes: of the device that connecting takes, and the peak of a step that torch's allocator has."""
    device = place(rank, kind)
    pipeline, microbatches = Pipeline([lambda p, x: torch.tanh(x * p)] * 2, cases.mse), 8
    plan = pipeline.plan(Placement.loop(2), microbatches)
    batch, free = torch.ones(microbatches, elements, device=device), _free(kind)
    step = fpipe.value_and_grad(
        pipeline,
        schedules.one_f_one_b,
        plan,
        handler=handlers.Distributed() if kind == "cpu" else handlers.Distributed(device=device),
        observe=_Waiting(device_of(device)) if waits else None,
    )
    connected = free - _free(kind)
    arguments = ({rank: torch.tensor(1.0, device=device)}, batch if rank == 0 else None, batch if rank else None)
    for _ in range(2):  # the first one traces
        device_of(device).synchronize()
        before = _allocator("current", kind)
        step(*arguments)
    device_of(device).synchronize()
    peaks = _allocator("peak", kind)
    return {"connections": connected, **{name: peaks[name] - before[name] for name in peaks}}


def _free(kind: str) -> int:
    return 0 if kind == "cpu" else torch.cuda.mem_get_info()[0]


def _allocator(which: str, kind: str) -> dict[str, int]:
    """Return the bytes that are requested and active, now or at their peak; asking for now begins a new peak."""
    names = ("requested_bytes", "active_bytes")
    if kind == "cpu":
        return dict.fromkeys(names, 0)
    stats = torch.cuda.memory_stats()
    if which == "current":
        torch.cuda.reset_peak_memory_stats()
    return {name: stats[f"{name}.all.{which}"] for name in names}


class _Waiting(Observer):
    """Lets the host wait for the device after each effect."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def end(self, rank: int, effect: Effect) -> None:
        self.device.synchronize()
