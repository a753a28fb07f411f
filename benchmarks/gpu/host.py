"""Part C: the host's time to launch a step, effect by effect, and the same as CUDA graphs."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

import fpipe
from benchmarks import autodiff
from benchmarks.gpu.blocks import Blocks, device_seconds, difference
from benchmarks.gpu.setting import Report, Setting
from fpipe import Pipeline, Placement, handlers, schedules
from fpipe.devices import device_of
from fpipe.effects import Effect
from fpipe.handlers.protocol import Observer
from tests.support import jobs
from tests.support.jobs import place

CAPTURES = {"captured": True, "captured by pieces": "pieces", "launched": False}
SHARE = 0.1  # of the device's time, that the host may take to launch a captured step with stages of `GATED` ms
GATED = 1.0


def host_time(setting: Setting) -> None:
    """Compare the time that the host needs to launch a step with the time that the device needs to run it.

    Of a rank alone, effect by effect, and of all ranks in this process, captured and not.
    """
    small = setting.cpu
    blocks = Blocks(setting.device, *((32, 1, 8) if small else (2048, 3, 128)), torch.bfloat16)
    wanted = (0.3, 1.0, 3.0, 10.0) if not small else (0.05,)
    for milliseconds in wanted:
        rows = 2 if small else blocks.rows(milliseconds / 1e3)
        figures: dict[str, Any] = {"sequences": rows, "forward_ms": 1e3 * blocks.forward_seconds(rows)}
        figures["graph"] = _host_and_device(blocks, rows, setting.device, {"autodiff": "graph"})
        if small or milliseconds == GATED:
            figures |= {name: _host_share(blocks, rows, capture) for name, capture in CAPTURES.items()}
        setting.report.add(**{f"{milliseconds:g} ms": figures})
        if milliseconds == GATED:
            _gate(setting.report, figures)
    setting.report.add(post_us=posts(setting))
    if not small:
        for milliseconds in wanted[:2]:
            figures = setting.report.figures[f"{milliseconds:g} ms"]
            figures["compiled"] = _compiled(blocks, figures["sequences"], setting.device)
            setting.report.add()


def _gate(report: Report, figures: Mapping[str, Any]) -> None:
    """Let the check fail where the host takes too long to launch a captured step."""
    for name, capture in CAPTURES.items():
        share = figures[name]["host_share"]
        passes = not capture or share <= SHARE
        report.expect(passes, f"the host takes {share:.0%} of the device's time at {GATED:g} ms, {name}")


def _host_share(blocks: Blocks, rows: int, capture: bool | str) -> dict[str, float]:
    """Return the host's time to launch a step of all ranks in this process, and the device's to run it."""
    pipeline, local = Pipeline([autodiff.transformer] * 2, difference), handlers.Local([blocks.device] * 2)
    plan, batch, params = (
        pipeline.plan(Placement.loop(2), 4),
        blocks.batch(4 * rows),
        dict.fromkeys(range(2), blocks.params),
    )
    step = fpipe.value_and_grad(pipeline, schedules.one_f_one_b, plan, handler=local, autodiff="graph", capture=capture)
    times = [_launched(lambda: step(params, batch, batch), blocks.device) for _ in range(8)][
        3:
    ]  # replayed from here on
    host, whole = (statistics.median(column) for column in zip(*times, strict=True))
    return {"host_ms": 1e3 * host, "device_ms": 1e3 * whole, "host_share": host / whole}


def _compiled(blocks: Blocks, rows: int, device: torch.device) -> dict[str, Any] | str:
    """Return the same of compiled graphs, or why there are none: the compiler's errors are of any kind."""
    try:
        return _host_and_device(blocks, rows, device, {"autodiff": "graph", "compile": True})
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


def _host_and_device(blocks: Blocks, rows: int, device: torch.device, options: Mapping[str, Any]) -> dict[str, Any]:
    microbatches = 4
    solo = blocks.solo(rows, microbatches, **options)
    times = [_launched(solo.step, device) for _ in range(8)][3:]
    host, whole = (statistics.median(column) for column in zip(*times, strict=True))
    kinds = _HostTimes()
    watched = blocks.solo(rows, microbatches, kinds, **options)
    for _ in range(4):
        kinds.seconds.clear()
        watched.step()
        device_of(device).synchronize()
    return {
        "host_ms": 1e3 * host,
        "device_ms": 1e3 * whole,
        "host_share": host / whole,
        "effects": len(solo.program),
        "host_us_per_effect": 1e6 * host / len(solo.program),
        "host_us_by_kind": {kind: 1e6 * statistics.median(each) for kind, each in kinds.seconds.items()},
    }


def _launched(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return the seconds that the host takes to launch a step, and the device to run it."""
    host = 0.0

    def step() -> None:
        nonlocal host
        start = time.perf_counter()
        call()
        host = time.perf_counter() - start

    whole = device_seconds(step, device)
    return host, whole


class _HostTimes(Observer):
    """Keeps the host's seconds in effects, by kind."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def begin(self, rank: int, effect: Effect) -> None:
        self._begun = time.perf_counter()

    def end(self, rank: int, effect: Effect) -> None:
        self.seconds[type(effect).__name__].append(time.perf_counter() - self._begun)


def posts(setting: Setting) -> dict[str, float]:
    """Return the host's median time to post a receive over NCCL, with and without its record of calls."""
    medians = {}
    for name, entries in (("with a record of calls", "2000"), ("without", "0")):
        pool = setting.pool(2, "nccl", TORCH_NCCL_TRACE_BUFFER_SIZE=entries, TORCH_FR_BUFFER_SIZE=entries)
        medians[name], _ = pool.run(post, setting.kind, limit=setting.report.limit(30))
        pool.close()  # its receives never end
    return medians


def post(rank: int, kind: str) -> float:
    device = place(rank, kind)
    ping = torch.ones(1, device=device)
    if rank == 1:
        dist.send(ping, 0)
        return 0.0
    dist.recv(ping, 1)
    buffers, times = [torch.empty(1 << 18, device=device) for _ in range(16)], []
    works = []
    for buffer in buffers:
        start = time.perf_counter()
        works.append(dist.irecv(buffer, 1))
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times[2:])


def graph(setting: Setting) -> None:
    """Compare steps that are captured, whole and by pieces, with the same step launched by the host: bits, times."""
    blocks = Blocks(setting.device, *((32, 1, 8) if setting.cpu else (1024, 2, 128)), torch.float32)
    pipeline, local = Pipeline([autodiff.transformer] * 2, difference), handlers.Local([setting.device] * 2)
    plan, batch, params = pipeline.plan(Placement.loop(2), 4), blocks.batch(8), dict.fromkeys(range(2), blocks.params)
    steps = [
        fpipe.value_and_grad(pipeline, schedules.one_f_one_b, plan, handler=local, autodiff="graph", capture=capture)
        for capture in (True, "pieces", False)
    ]
    captured, by_pieces, launched = (lambda step=step: step(params, batch, batch) for step in steps)
    expected = launched()
    for name, call in (("graph", captured), ("graphs of pieces", by_pieces)):
        results = [call() for _ in range(4)]  # it is captured in the second call, and replayed from the third on
        bits = not any(jobs.differences(result, expected) for result in results)
        setting.report.add(**{f"bits of the {name}": bits})
        setting.report.expect(bits, f"the results of the {name} are not those of the step")
    calls = captured, by_pieces, launched
    rounds = [[device_seconds(call, setting.device) for call in calls] for _ in range(12)][2:]
    setting.report.add(
        milliseconds=[1e3 * statistics.median(each) for each in zip(*rounds, strict=True)],
        ratio=statistics.median(a / c for a, _, c in rounds),
        ratio_of_pieces=statistics.median(b / c for _, b, c in rounds),
    )
