"""A training run whose number of ranks changes: on ranks of a pool, in one process, and as a script under torchrun."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from unittest.mock import patch

import optree
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fpipe
from fpipe import Costs, Pipeline, handlers, interop
from tests.support.cases import mse

STAGES, MICROBATCHES, TOTAL = 4, 4, 6


def layer(p, x):
    return F.dropout(torch.tanh(x @ p["w"]), 0.1)


def batch(i):
    generator = torch.Generator().manual_seed(i)
    return torch.randn(8, 3, generator=generator), torch.randn(8, 3, generator=generator)


def begin(handler, folder, stages=STAGES, total=TOTAL, memory=None, **options):
    """A run of so many steps as it begins, or goes on, with the plan for the ranks that there are."""
    pipeline = Pipeline([layer] * stages, mse)
    job = interop.elastic(pipeline, MICROBATCHES, handler=handler, folder=folder, **options)
    generator = torch.Generator().manual_seed(0)
    params = {s: {"w": torch.randn(3, 3, generator=generator)} for s in range(stages)}
    params = pipeline.params_on(params, job.plan, job.handler)
    if job.resident is not None and isinstance(job.handler, handlers.Distributed):
        params = interop.fsdp(params, job.handler.mesh)
    adam = interop.optimizer(torch.optim.Adam, lr=0.1)
    checkpoints = interop.Checkpoints(folder, pipeline, job.plan, handler=job.handler, memory=memory)
    run = interop.resume(checkpoints, params=params, optimizer=adam.init(params), losses=torch.zeros(total))
    step = fpipe.value_and_grad(pipeline, job.schedule, job.plan, handler=job.handler, resident=job.resident)
    return job, run, step, adam


def train(job, run, step, adam, until=TOTAL, every=None):
    replicas = job.handler.replicas(job.plan)
    for i in run.steps(until, every=every):
        both = [x.tensor_split(replicas.count)[replicas.here[0]] for x in batch(i)]
        x, y = both if len(replicas.here) == 1 else batch(i)
        loss, grads = step(run.params, x, y, rng=(0, i))
        run.params, run.optimizer = adam.update(grads, run.optimizer, run.params)
        run.losses = run.losses.index_fill(0, torch.tensor(i), loss.item())
    params = optree.tree_map(lambda x: x.full_tensor() if hasattr(x, "full_tensor") else x, run.params)
    return {"text": job.text, "params": params, "losses": run.losses.tolist()}


def go_on(rank, folder, until, options):
    """Train on this rank up to a step; a process without a stage leaves, with its status."""
    try:
        with patch("atexit.register") as at_exit:
            result = train(*begin(handlers.Distributed(timeout=20), folder, **options), until)
    except SystemExit as left:
        return {"left": left.code, "params": {}}
    for call in at_exit.call_args_list:
        call.args[0](*call.args[1:])
    return result


def on_hosts(rank, folder, until=TOTAL):
    """Train on this rank, which is a host with memory of its own, up to a step that fails on all; where it began."""
    shared = Path(folder, f"shm{rank}")
    shared.mkdir(parents=True, exist_ok=True)
    memory = interop.Memory(folder=shared, neighbour=True)
    job, run, step, adam = begin(handlers.Distributed(timeout=20), folder, memory=memory)
    first, compute = run.step, step

    def failing(params, *data, rng):
        if rng[1] == until:
            raise ArithmeticError("bad row")
        return compute(params, *data, rng=rng)

    try:
        return train(job, run, failing, adam) | {"first": first}
    except ArithmeticError:
        run.checkpoints.finish()
        dist.barrier()
        time.sleep(0.2)  # until the last copies have come
        return {"params": {}}


def with_cuts(folder, at, until):
    """Train a module that is cut at some layers, with a rank for each stage: the losses of all starts."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)))
    pipeline, params = interop.split(module, at=at, example=torch.zeros(2, 3), loss=mse)
    job = interop.elastic(pipeline, MICROBATCHES, handler=handlers.Local(), ranks=len(at) + 1, folder=folder)
    adam = interop.optimizer(torch.optim.Adam, lr=0.1)
    checkpoints = interop.Checkpoints(folder, pipeline, job.plan, handler=job.handler)
    run = interop.resume(checkpoints, params=params, optimizer=adam.init(params), losses=torch.zeros(TOTAL))
    step = fpipe.value_and_grad(pipeline, job.schedule, job.plan, handler=job.handler)
    for i in run.steps(until):
        loss, grads = step(run.params, *batch(i))
        run.params, run.optimizer = adam.update(grads, run.optimizer, run.params)
        run.losses = run.losses.index_fill(0, torch.tensor(i), loss.item())
    return run.losses.tolist(), job


def choose(rank, options_of_ranks):
    """The plan that this rank comes to, with options of its own."""
    pipeline = Pipeline([layer] * STAGES, mse)
    options = options_of_ranks[rank % len(options_of_ranks)]
    job = interop.elastic(pipeline, MICROBATCHES, handler=handlers.Distributed(timeout=20), **options)
    return job.text, job.found.bytes, [*fpipe.lower(job.schedule, job.plan)[0].effects]


def silent(rank):
    """The error of `elastic` where groups of its processes are never made, and the seconds until it is raised."""
    pipeline, handler = Pipeline([layer] * 2, mse), handlers.Distributed(timeout=1)
    began = time.monotonic()
    with patch.object(dist, "new_group", lambda *_, **__: time.sleep(10)):
        try:
            interop.elastic(pipeline, MICROBATCHES, handler=handler, replicas=2)
        except fpipe.TransportError as error:
            return str(error), time.monotonic() - began


def measured(rank, folder):
    """How often the costs were measured on this rank, in two starts, and the plans."""
    calls, texts = [], []

    def measure():
        calls.append(rank)
        return Costs(forward=[0.5, 1, 1, 1], residuals=8)

    for _ in range(2):
        handler = handlers.Distributed(timeout=20)
        job = interop.elastic(Pipeline([layer] * STAGES, mse), 4, handler=handler, folder=folder, costs=measure)
        texts.append(job.text)
    return len(calls), texts


def main(folder, total, seconds, stages=STAGES):
    """A rank of a job under torchrun, whose steps take a while and are all saved; it writes down when they ran."""
    started = time.time()
    torch.set_num_threads(1)
    handler = handlers.auto(timeout=5)
    joined = time.time()
    job, run, step, adam = begin(handler, folder, stages, total)
    events = Path(folder, f"events-{os.environ['TORCHELASTIC_RUN_ID']}-{os.getpid()}")

    def write(text):
        with events.open("a") as file:
            file.write(f"{time.time()} {handler.rank}/{handler.size if handler.peers else 1} {text}\n")

    events.write_text(f"{started} - began\n{joined} - joined\n")
    write("chose " + job.text)
    run_steps = run.steps

    def steps(end, every):
        for i in run_steps(end, every=every):
            yield i
            write(f"step {i}")
            time.sleep(seconds)

    run.steps = steps
    result = train(job, run, step, adam, total, every=1)
    torch.save(result, f"{folder}/end-{handler.rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), *map(int, sys.argv[4:]))
