"""Train the GPT of train_gpt.py as several pipelines: each has its own batches, and a shard of every parameter.

    torchrun --standalone --nproc-per-node 4 examples/sharded_gpt.py --ranks 2                 2 replicas of 2 ranks
    torchrun --standalone --nproc-per-node 4 examples/sharded_gpt.py --ranks 2 --resident 1    one whole stage at a time

Nothing is whole before the first step: the model is built on the meta device, and each process makes its own shards.
With --checkpoints FOLDER it goes on from there, on any other mesh: other --ranks, other numbers of processes.
"""

import functools
import math
import os
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from train_gpt import GPT, cross_entropy, cuts, learning_rate, read

import fpipe
from fpipe import Placement, handlers, interop, schedules


def init(module: nn.Module) -> None:
    """Initialise a module's own tensors."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
    for parameter in module.parameters(recurse=False):
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)


def main(
    ranks: Annotated[int, typer.Option(help="Ranks of a pipeline; the other processes are its replicas.")] = 2,
    chunks: Annotated[int, typer.Option(help="Stages on a rank.")] = 2,
    resident: Annotated[int | None, typer.Option(help="Whole stages on a rank at a time; by default all.")] = None,
    layers: Annotated[int, typer.Option(help="Transformer blocks.")] = 4,
    width: Annotated[int, typer.Option(help="Width of the model; heads are 32 wide.")] = 128,
    context: Annotated[int, typer.Option(help="Bytes in a window.")] = 64,
    batch: Annotated[int, typer.Option(help="Windows in a batch, of all replicas together.")] = 32,
    microbatches: Annotated[int, typer.Option(help="Parts that a replica's batch is split into.")] = 4,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 200,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3,
    checkpoints: Annotated[Path | None, typer.Option(help="Where to save, and to go on from.")] = None,
) -> None:
    """Train a byte-level GPT in several pipelines."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    shape = dist.get_world_size() // ranks, ranks
    mesh = init_device_mesh("cuda" if cuda else "cpu", shape, mesh_dim_names=("dp", "pp"))
    handler = handlers.Distributed(mesh["pp"], replicas=mesh["dp"])
    replica = mesh["dp"].get_local_rank()

    with torch.device("meta"):
        model = GPT(layers, width, context, dropout=0.1)
        example = torch.zeros(batch // shape[0] // microbatches, context, dtype=torch.uint8)
    pipeline, params = interop.split(model, at=cuts(model, ranks * chunks), example=example, loss=cross_entropy)
    plan = pipeline.plan(Placement.loop(ranks, chunks), microbatches, replicas=shape[0])
    shard = functools.partial(interop.fsdp, mesh=mesh["dp"])
    like = shard(pipeline.params_on(params, plan, handler.rank))
    params, _ = interop.materialise(pipeline, plan.stages_on(handler.rank), device=handler.device, init=init, like=like)
    adamw = interop.optimizer(torch.optim.AdamW, lr=lr, donate=True)
    step = fpipe.train_step(
        pipeline,
        schedules.interleaved_1f1b if chunks > 1 else schedules.one_f_one_b,
        plan,
        adamw,
        handler=handler,
        max_norm=1.0,
        resident=resident or chunks,
    )
    state = adamw.init(params)
    saved = checkpoints and interop.Checkpoints(checkpoints, pipeline, plan, handler=handler, keep=2)
    begun = 0
    if saved and saved.latest():
        whole = saved.load(params=params, optimizer=state, step=0)
        params, state, begun = whole["params"], whole["optimizer"], whole["step"]

    text, _ = (source.to(handler.device) for source in read(None))
    for i in range(begun, steps):
        places = interop.rows(len(text) - context, replica=replica, replicas=shape[0], batch=batch, step=i, seed=0)
        rows = text[torch.as_tensor(places)[:, None] + torch.arange(context + 1)]
        lr_now = learning_rate(i, steps, lr)
        params, state, loss, _ = step(params, state, rows[:, :-1], rows[:, 1:], rng=(0, i), lr=lr_now)
        if dist.get_rank() == 0 and (i % 20 == 0 or i + 1 == steps):
            print(f"step {i}: {loss.item() / math.log(2):.4f} bits per byte", flush=True)
    if saved:
        saved.save(params=params, optimizer=state, step=steps)
    handler.check()
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
