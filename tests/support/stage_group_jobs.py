"""Processes that compute stages together, of which one is killed, stopped, or elsewhere."""

from __future__ import annotations

import atexit
import os
import signal
import time

import torch

import fpipe
from fpipe import Pipeline, Placement, handlers, interop
from tests.support.cases import mse
from tests.support.shards import mesh_of


def layer(p, x):
    return x + torch.tanh(x @ p["up"]) @ p["down"]


def made(shape, timeout):
    """A mesh of (pp, tp) or (pp, dp, tp), a handler, a pipeline with a stage on each rank, its plan, and the params."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = mesh_of(*shape, names=("pp", "tp") if len(shape) == 2 else ("pp", "dp", "tp"))
    replicas = mesh["dp"] if len(shape) == 3 else None
    own = handlers.Distributed(mesh["pp"], replicas=replicas, timeout=timeout)
    pipeline = Pipeline([layer] * shape[0], mse)
    plan = pipeline.plan(Placement.loop(shape[0]), 2, replicas=shape[1] if replicas else 1)
    cuts = {"up": [Shard(1)], "down": [Shard(0)]}
    params = {
        own.rank: {
            name: distribute_tensor(torch.eye(4), mesh["tp"], cut, src_data_rank=None) for name, cut in cuts.items()
        }
    }
    return mesh, own, pipeline, plan, params


def lost(rank, shape, fault, timeout):
    """The last process is killed or stopped before its third step, or its script ends; or it is late for the first one.

    What another one is told, and after how many seconds.
    """
    _, own, pipeline, plan, params = made(shape, timeout)
    step = fpipe.value_and_grad(pipeline, "1f1b", plan, handler=own)
    victim, x = torch.Size(shape).numel() - 1, torch.ones(8, 4)
    own.peers and own.peers.new_group("a meeting").gather(rank, "gather")
    for i in range(3):
        if rank == victim and fault == "elsewhere":
            time.sleep(timeout + 0.5)
            return None
        if rank == victim and i == 2 and fault == "ended":
            atexit._run_exitfuncs()  # as an interpreter does, of which a process of multiprocessing ends without
            os._exit(0)
        if rank == victim and i == 2:
            os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[fault])
        if i == 2:
            time.sleep(0.3)  # the accident comes first
        begun = time.monotonic()
        try:
            step(params, x, x)
        except fpipe.TransportError as error:
            return str(error), time.monotonic() - begun
    return "no error", 0.0


def late_save(rank, shape, folder, timeout):
    """The last process does not save; what another one is told, and after how many seconds."""
    mesh, own, pipeline, plan, params = made(shape, timeout)
    saved = interop.Checkpoints(folder, pipeline, plan, handler=own, tensor_parallel=mesh["tp"])
    saved.latest()
    if rank == torch.Size(shape).numel() - 1:
        time.sleep(timeout + 0.5)
        return None
    begun = time.monotonic()
    try:
        saved.save(params=params)
    except fpipe.TransportError as error:
        return str(error), time.monotonic() - begun
    return "no error", 0.0
