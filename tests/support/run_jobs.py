"""A training run that saves, is asked to end, and goes on: in one process, on ranks of a pool, as a script."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

import fpipe
from fpipe import Pipeline, Placement, handlers, interop
from tests.support.cases import mse
from tests.support.shards import mesh_of

TOTAL, EVERY = 12, 5


def layer(p, x):
    return torch.tanh(x @ p["w"])


def batch(i):
    generator = torch.Generator().manual_seed(i)
    return torch.randn(4, 3, generator=generator), torch.randn(4, 3, generator=generator)


def begin(folder, handler, **options):
    """A run as it begins, or goes on, and its step."""
    pipeline = Pipeline([layer, layer], mse)
    ranks = getattr(handler, "size", 2)
    plan = pipeline.plan(Placement.loop(ranks, 2 // ranks), 2)
    generator = torch.Generator().manual_seed(0)
    params = {s: {"w": torch.randn(3, 3, generator=generator)} for s in range(2)}
    params = pipeline.params_on(params, plan, handler.rank) if isinstance(handler, handlers.Distributed) else params
    adam = interop.optimizer(torch.optim.Adam, lr=0.1)
    checkpoints = interop.Checkpoints(folder, pipeline, plan, handler=handler, **options)
    run = interop.resume(checkpoints, params=params, optimizer=adam.init(params), order=torch.arange(3))
    return run, fpipe.value_and_grad(pipeline, "1f1b", plan, handler=handler), adam


def train(run, step, adam, at=lambda i: None, total=TOTAL):
    """Train to the end; `at` is called with the number of each step."""
    for i in run.steps(total, every=EVERY):
        at(i)
        _, grads = step(run.params, *batch(i))
        run.params, run.optimizer = adam.update(grads, run.optimizer, run.params)
        run.order = run.order.roll(1)
    return {"params": run.params, "order": run.order, "step": run.step}


def sharded(folder, mesh, handler):
    """As `begin`, of stages that the processes of mesh["tp"] compute together."""
    from torch.distributed.tensor import Shard, distribute_tensor

    pipeline = Pipeline([two_layers, two_layers], mse)
    ranks = getattr(handler, "size", 2)
    plan = pipeline.plan(Placement.loop(ranks, 2 // ranks), 2)
    params = {s: {"up": torch.ones(3, 4) / (2 + s), "down": torch.ones(4, 3) / 4} for s in range(2)}
    cuts = {"up": [Shard(1)], "down": [Shard(0)]}
    params = {
        s: {name: distribute_tensor(x, mesh["tp"], cuts[name], src_data_rank=None) for name, x in tree.items()}
        for s, tree in pipeline.params_on(params, plan, handler).items()
    }
    sgd = interop.optimizer(torch.optim.SGD, lr=0.1)
    checkpoints = interop.Checkpoints(folder, pipeline, plan, handler=handler, tensor_parallel=mesh["tp"])
    run = interop.resume(checkpoints, params=params, optimizer=sgd.init(params), order=torch.arange(3))
    return run, fpipe.value_and_grad(pipeline, "1f1b" if ranks > 1 else "looped-bfs", plan, handler=handler), sgd


def two_layers(p, x):
    return x + torch.tanh(x @ p["up"]) @ p["down"]


def asked_of_a_mesh(rank, folder, shape, guilty, at):
    """As `asked`, of a mesh with tensor parallelism; over one rank, by `Local` where the mesh has no ranks."""
    mesh = mesh_of(*shape, names=("pp", "tp")[-len(shape) :])
    own = handlers.Distributed(mesh["pp"], timeout=20) if len(shape) > 1 else handlers.Local()
    return left(rank, guilty, at, *sharded(folder, mesh, own))


def asked_after_a_mesh(rank, folder):
    """As `asked`, by a handler that has trained stages with tensor parallelism before; this run has none."""
    mesh = mesh_of(2, 2, names=("pp", "tp"))
    handler = handlers.Distributed(mesh["pp"], timeout=20)
    train(*sharded(f"{folder}/first", mesh, handler), total=2)
    return left(rank, [2], 4, *begin(f"{folder}/{mesh['tp'].get_local_rank()}", handler))


def asked(rank, folder, guilty, at):
    """Train on this rank; a guilty one gets SIGTERM in a step. The status with which it leaves, and its step."""
    return left(rank, guilty, at, *begin(folder, handlers.Distributed(timeout=20)))


def left(rank, guilty, at, run, step, update):
    """Train; the status with which a rank leaves that gets SIGTERM in a step, or another one does, and its step."""

    def signalled(i):
        if i == at and rank in guilty:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        train(run, step, update, signalled)
    except SystemExit as left:
        return left.code, run.step
    return None, run.step


def asked_while_a_step_fails(rank, folder, at):
    """Train on this rank; rank 1 gets SIGTERM in a step that fails on rank 0, and is left out. As of `asked`."""
    run, step, _ = begin(folder, handlers.Distributed(timeout=20))
    try:
        for i in run.steps(TOTAL):
            x, y = batch(i)
            if i == at and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            try:
                step(run.params, x[:, 1:] if i == at and rank == 0 else x, y)
            except (fpipe.StageError, fpipe.TransportError):
                continue
    except SystemExit as left:
        return left.code, run.step
    return None, run.step


def go_on(rank, folder):
    """Train to the end on this rank, from where the folder's run is."""
    return train(*begin(folder, handlers.Distributed(timeout=20)))


def main(folder):
    """A rank of a job whose rank 1 is killed in every second start, and which saves each step."""
    handler = handlers.auto(timeout=20)
    run, step, adam = begin(folder, handler, keep=2)
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def killed(i):
        if restarts < 2 and i == run_from + 6 and handler.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    run_from = run.step
    result = train(run, step, adam, killed, total=20)
    torch.save(result, f"{folder}/end-{handler.rank}.pt")


def endless(folder):
    """A rank of a job that trains until it is asked to end: it notes the step that runs, and its last one."""
    handler = handlers.auto(timeout=20)
    run, step, adam = begin(folder, handler)

    def note(i):
        Path(folder, f"at-{handler.rank}").write_text(str(i))

    try:
        train(run, step, adam, note, total=10**9)
    finally:
        Path(folder, f"left-{handler.rank}").write_text(str(run.step))


if __name__ == "__main__":
    {"killed": main, "endless": endless}[sys.argv[2]](sys.argv[1])
