"""What the ranks of a pool run to write torch.profiler's traces of torch's own schedules."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.profiler import ProfilerActivity, profile, schedule

from fpipe.interop.torch_traces.steps import ANNOTATE
from tests.support.torch_jobs import data, modules, total

SINGLE = ("ScheduleGPipe", "Schedule1F1B")
LOOPS = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble")
VS = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


def stages_of(name, rank, ranks):
    """The stages that a rank of torch's schedule holds."""
    if name in SINGLE:
        return [rank]
    return [rank, rank + ranks] if name in LOOPS else [rank, 2 * ranks - 1 - rank]


def write_traces(rank, folder, name, ranks, microbatches, steps=2, annotated=True, numbered=True):
    """Train some steps under the profiler; each rank returns the passes that torch's schedule has for it, in order.

    Args:
        annotated: whether Schedule1F1B's stages are annotated by the lines that an error gives.
        numbered: whether the profiler's step() is called.
    """
    own = stages_of(name, rank, ranks)
    count = ranks * len(own)
    whole = modules(count)
    stages = [PipelineStage(whole[index], index, count, torch.device("cpu")) for index in own]
    if name == "Schedule1F1B" and annotated:
        exec(ANNOTATE, {"torch": torch, "stage": stages[0]})
    made = getattr(torch_schedules, name)(stages[0] if name in SINGLE else stages, microbatches, loss_fn=total)
    x, target = data()
    x, target = (tensor.repeat(microbatches, 1)[: 3 * microbatches] for tensor in (x, target))

    def step():
        made.step(*([x] if 0 in own else []), target=target if count - 1 in own else None)

    step()  # makes what later steps keep
    about = {"schedule": schedule(wait=0, warmup=1, active=steps, repeat=1)} if numbered else {}
    file = Path(folder) / f"rank{rank}_trace.json{'.gz' if rank % 2 else ''}"
    about["on_trace_ready"] = lambda profiler: profiler.export_chrome_trace(str(file))
    with profile(activities=[ProfilerActivity.CPU], **about) as profiler:
        for _ in range(steps + numbered):
            step()
            if numbered:
                profiler.step()
    return [str(a) for a in made.pipeline_order[rank] if a is not None and a.is_compute_op]
