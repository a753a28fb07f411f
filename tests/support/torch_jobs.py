"""What the ranks of a pool run in torch's own pipeline runtime."""

from __future__ import annotations

import copy
import functools
import tempfile
from types import SimpleNamespace

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import fpipe
from fpipe import handlers, interop
from fpipe.interop.torch_csv import from_csv

WIDTH, ROWS = 8, 24


def total(output, target):
    return ((output - target) ** 2).sum()


def mean(output, target):
    return ((output - target) ** 2).mean()


def modules(stages):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)) for _ in range(stages)]


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, ROWS, WIDTH, generator=generator)


def stand_ins(ranks, chunks=1, rank=0):
    """What torch's schedules ask of stages when all they do is to write their table."""
    about = {"group_size": ranks, "group_rank": rank, "num_stages": ranks * chunks, "submod": None, "is_last": False}
    return [SimpleNamespace(stage_index=rank + chunk * ranks, **about) for chunk in range(chunks)]


def as_text(table):
    """What torch's `_dump_csv` writes, without a file."""
    return "".join(",".join("" if a is None else str(a) for a in table[rank]) + "\n" for rank in sorted(table))


def loaded(text, stages, microbatches, communication, **options):
    """torch's runtime, with its schedule from our text."""
    runtime = _PipelineScheduleRuntime(stages, microbatches, **options)
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write(text)
        file.flush()
        runtime._load_csv(file.name, format="compute_comms" if communication else "compute_only")
    return runtime


def gradients(rank, plan, reduction, make):
    """Where the losses and gradients of two steps in torch's runtime are not the reference's bits."""
    loss = {"sum": total, "mean": mean}[reduction]
    whole = modules(plan.stages)
    own = {stage: copy.deepcopy(whole[stage]) for stage in plan.stages_on(rank)}
    stages = [PipelineStage(module, stage, plan.stages, torch.device("cpu")) for stage, module in own.items()]
    runtime = make(stages, plan.microbatches, loss_fn=loss, scale_grads=reduction == "mean")
    pipeline, params = interop.from_modules(whole, loss=loss)
    step = fpipe.value_and_grad(
        pipeline, fpipe.schedules.gpipe, plan, handler=handlers.Reference(), reduction=reduction
    )
    x, target = data()
    expected, grads = step(params, x, target)
    found = []
    for _ in range(2):
        losses: list[torch.Tensor] = []
        for module in own.values():
            module.zero_grad()
        runtime.step(*([x] if 0 in own else []), target=target, losses=losses)
        scale = plan.microbatches if reduction == "mean" else 1
        if plan.stages - 1 in own and not torch.equal(sum(loss.detach() / scale for loss in losses), expected):
            found.append("loss")
        found += [
            f"{stage}.{name}"
            for stage, module in own.items()
            for name, parameter in module.named_parameters()
            if not torch.equal(parameter.grad, grads[stage][name])
        ]
    return found


def train_from_csv(rank, text, communication, reduction):
    _, plan = from_csv(text)
    return gradients(rank, plan, reduction, functools.partial(_load, text, communication))


def _load(text, communication, stages, microbatches, **options):
    return loaded(text, stages, microbatches, communication, **options)


def train_by_name(rank, name, ranks, microbatches, options):
    """The same with one of torch's V-shaped schedules: it says by itself where stages go."""
    plan = fpipe.Plan(fpipe.Placement.v(ranks), microbatches)
    return gradients(rank, plan, "sum", functools.partial(getattr(torch_schedules, name), **options))
