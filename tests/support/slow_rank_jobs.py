"""A step of timed stages of which one is slow: what would help says what it takes without."""

from __future__ import annotations

import torch

import fpipe
from benchmarks.timed import forward
from fpipe import Pipeline, Placement, Plan, handlers
from tests.support.cases import mse

RANKS, MICROBATCHES, LAYER, SLOWER = 4, 8, 8e-3, 4.5  # seconds of a forward, and how many times that the slow one takes


def stage(seconds):
    return lambda w, x: forward(x, w, [seconds] * 3)


def measured(rank, slow, steps):
    """The measurements of some steps, with a stage that is slow or None."""
    times = [LAYER * (SLOWER if at == slow else 1) for at in range(RANKS)]
    pipeline, plan = Pipeline([stage(each) for each in times], mse), Plan(Placement.loop(RANKS), MICROBATCHES)
    recording = fpipe.Recording(fpipe.lower("1f1b", plan))
    handler = handlers.Distributed(timeout=60)
    step = fpipe.value_and_grad(pipeline, "1f1b", plan, handler=handler, autodiff="graph", observe=recording)
    params = {rank: torch.ones(8, 8)}
    batch, target = torch.ones(MICROBATCHES, 8), torch.zeros(MICROBATCHES, 8)
    step(params, batch, target)
    found = []
    for _ in range(steps):
        step(params, batch, target)
        found.append(fpipe.gather(recording))
    return found


def helped(rank, slow, steps):
    """On rank 0: of the slow steps what helps most, its makespans with it, and the errors of replays; and the makespans
    of steps without the slow stage."""
    with_it, without = measured(rank, slow, steps), measured(rank, None, steps)
    results = [fpipe.what_if(each) for each in with_it]
    rows = [(result.rows[0].what, result.rows[0].makespan, result.error, result.headline()) for result in results]
    return rows, [each.timeline().makespan for each in without]
