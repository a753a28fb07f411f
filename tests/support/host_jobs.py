"""What ranks on two hosts are asked to do."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import fpipe
from fpipe import handlers
from tests.support import cases, jobs

ROWS, WIDTH = 256, 512  # of what goes from rank to rank for one microbatch
FORWARD, BACKWARD = 0.012, 0.024  # seconds of a stage


def train_for_ever(rank, began, timeout):
    """Steps until a peer is lost; a file says when they go well."""
    case, schedule, plan = cases.make("linear", "one_f_one_b", 2, 4)
    params, batch, target, _ = cases.own(case, plan, rank)
    step = fpipe.value_and_grad(case.pipeline, schedule, plan, handler=handlers.Distributed(timeout=timeout))
    for i in itertools.count():
        step(params, batch, target)
        if i == 3:
            Path(began, str(rank)).touch()


def transfer(rank):
    """Seconds in which what a microbatch sends gets to the other host: there and back, halved."""
    value = torch.ones(ROWS, WIDTH)

    def there_and_back():
        for turn in (0, 1):
            dist.send(value, 1 - rank) if turn == rank else dist.recv(value, 1 - rank)

    return median(seconds(there_and_back, 7, before=2)) / 2


def least_transfer(milliseconds, megabits):
    """Seconds of it by arithmetic."""
    return milliseconds / 1e3 + 32 * ROWS * WIDTH / (megabits * 1e6)


class Pause(torch.autograd.Function):
    """Work that needs no core, so that it takes as long on a busy machine."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(BACKWARD)
        return gradient.clone()


def train(rank, schedule, microbatches):
    """Seconds of a training step whose stages only pause."""
    order, place = cases.SCHEDULES[schedule]
    pipeline = fpipe.Pipeline([lambda p, x: Pause.apply(x * p)] * 2, cases.mse)
    plan = pipeline.plan(place(2), microbatches)
    step = fpipe.value_and_grad(pipeline, order, plan, handler=jobs.handler(), autodiff="eager")
    x = torch.ones(microbatches * ROWS, WIDTH)
    return min(seconds(lambda: step({rank: torch.ones(())}, x, x), 2, before=1))


def seconds(run, repeats, before):
    """What each run takes, after some that don't count."""
    found = []
    for _ in range(before + repeats):
        dist.barrier()
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return found[before:]
