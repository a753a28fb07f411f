"""Replicas of a small pipeline over a grid of processes, with parameters in shards."""

from __future__ import annotations

import torch

import fpipe
from fpipe import Placement, handlers, interop, schedules
from tests.support.shards import mesh_of

RANKS, REPLICAS, CHUNKS, MICROBATCHES, WIDTH = 2, 2, 2, 4, 64


def pipeline_and_plan():
    pipeline = fpipe.Pipeline(
        [lambda p, x: torch.tanh(x @ p["w"]) + p["b"]] * (RANKS * CHUNKS), loss=lambda y, t: (y - t).square().mean()
    )
    return pipeline, pipeline.plan(Placement.loop(RANKS, CHUNKS), MICROBATCHES, replicas=REPLICAS)


def params_of(stages):
    generator = torch.Generator().manual_seed(0)
    every = [
        {"w": torch.randn(WIDTH, WIDTH, generator=generator) / 8, "b": torch.zeros(WIDTH)}
        for _ in range(RANKS * CHUNKS)
    ]
    return {stage: every[stage] for stage in stages}


def batch_of(replicas):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(REPLICAS, MICROBATCHES * 2, WIDTH, generator=generator)
    return torch.cat([x[replica] for replica in replicas])


def run(steps, observe, resident=1):
    """Steps of this process; returns the handler and the last loss. Its parameters are sharded where `resident` is."""
    mesh = mesh_of(REPLICAS, RANKS, names=("dp", "pp"))
    handler = handlers.Distributed(mesh["pp"], replicas=mesh["dp"], timeout=30)
    pipeline, plan = pipeline_and_plan()
    params = params_of(plan.stages_on(handler.rank))
    if resident is not None:
        params = interop.fsdp(params, mesh["dp"])
    step = fpipe.value_and_grad(
        pipeline, schedules.looped_bfs, plan, handler=handler, observe=observe, resident=resident
    )
    batch = batch_of([handler.grid.replica])
    for _ in range(steps):
        loss, grads = step(params, batch, torch.zeros_like(batch))
    return handler, loss.item(), grads
