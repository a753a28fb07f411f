"""Two starts of a job, of which the second finds the signatures that the first has left."""

import os
import time
from unittest.mock import patch

import torch
import torch.distributed as dist

import fpipe
from fpipe import Pipeline, Placement, handlers
from tests.support.cases import mse


def layer(p, x):
    return torch.tanh(x @ p)


def start(rank, rows, meeting=None):
    """The loss of the first step of a start, and how often this rank has traced a stage.

    Args:
        meeting: the trace of stage 0 ends once stage 1 has been traced, whose input is the output of stage 0.
    """
    store, traces = dist.distributed_c10d._get_default_store(), []

    def first(p, x):
        traces.append(0)
        until = time.monotonic() + 10
        while meeting and not store.check([meeting]):
            assert time.monotonic() < until, "stage 1 waits for its input"
            time.sleep(0.01)
        return layer(p, x)

    def second(p, x):
        traces.append(1)
        if meeting:
            store.set(meeting, "traced")
        return layer(p, x)

    handler = handlers.Local() if rank is None else handlers.Distributed(timeout=20)
    pipeline = Pipeline([first, second], mse)
    plan = pipeline.plan(Placement.loop(2), 2)
    generator = torch.Generator().manual_seed(0)
    params = {s: torch.randn(4, 4, generator=generator) for s in range(2)}
    x, y = torch.randn(2, rows, 4, generator=generator)
    step = fpipe.value_and_grad(pipeline, "1f1b", plan, handler=handler)
    own = params if rank is None else {rank: params[rank]}
    losses = [step(own, x, y)[0].item() for _ in range(2)]
    assert losses[0] == losses[1]
    return losses[0], len(traces)


def starts(rank, job):
    """(loss, traces) of starts: the first of the job, one like it, and two with other batches; and of one process."""
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": job}
    with patch.dict(os.environ, environment):
        each = [start(rank, 8), start(rank, 8, meeting=job), start(rank, 12), start(rank, 12, meeting=f"{job} again")]
    return each, [start(None, rows)[0] for rows in (8, 8, 12, 12)]
