"""Train a mixture of experts whose experts are spread over replicas: each has its own tokens and its own experts.

    python examples/experts.py                                                    all experts in one process
    torchrun --standalone --nproc-per-node 4 examples/experts.py --ranks 2        2 replicas of 2 ranks

Tokens are words of several languages, and the model learns a dictionary of each. It prints how evenly the router
spreads the tokens: a balance of 1 is even; a router that sends all tokens to one expert has their number.
"""

import os
from typing import Annotated

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import fpipe
from fpipe import Placement, handlers, interop, parallel, schedules

LANGUAGES, WORDS = 8, 64


def feed_forward(params: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    """All experts of this process: x is of shape [experts, slots, width]."""
    up, down = params
    return torch.bmm(F.gelu(torch.bmm(x, up)), down)


class Layer(nn.Module):
    """The k best of some experts for each token."""

    def __init__(self, width: int, experts: int, k: int, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.k, self.mesh = k, mesh
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 4 * width, width) / (4 * width) ** 0.5)

    def forward(self, x: Tensor, measures: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        routing = parallel.route(self.router(y), self.k)
        y = parallel.mixture_of_experts(feed_forward, (self.up, self.down), y, routing, self.mesh, capacity_factor=1.5)
        return x + y, measures + torch.stack([parallel.balance_loss(routing), parallel.dropped(routing, 1.5)])


class Part(nn.Module):
    """A stage: a layer, with the embedding before the first one, and the head behind the last."""

    def __init__(self, layer: Layer, width: int, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.layer = layer
        self.word = nn.Embedding(WORDS, width) if is_first else None
        self.language = nn.Embedding(LANGUAGES, width) if is_first else None
        self.head = nn.Linear(width, WORDS) if is_last else None

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, measures = inputs
        if self.word is not None and self.language is not None:
            x, measures = self.word(x) + self.language(measures), torch.zeros(2, device=x.device)
        x, measures = self.layer(x, measures)
        return x if self.head is None else self.head(x), measures


def main(
    ranks: Annotated[int, typer.Option(help="Ranks of a pipeline; the other processes are its replicas.")] = 1,
    layers: Annotated[int, typer.Option(help="Layers of experts, each a stage.")] = 2,
    experts: Annotated[int, typer.Option(help="Experts of a layer.")] = 8,
    k: Annotated[int, typer.Option(help="Experts of a token.")] = 2,
    width: Annotated[int, typer.Option(help="Width of the model.")] = 32,
    batch: Annotated[int, typer.Option(help="Rows in a batch, of all replicas together.")] = 32,
    microbatches: Annotated[int, typer.Option(help="Parts that a replica's batch is split into.")] = 4,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 100,
    balance: Annotated[float, typer.Option(help="Weight of the balance loss.")] = 0.02,
) -> None:
    """Train a mixture of experts on dictionaries."""
    handler: handlers.Distributed | handlers.Local = handlers.Local()
    mesh, ep, replica, replicas = None, None, 0, 1
    if "RANK" in os.environ:
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if cuda else "gloo")
        shape = dist.get_world_size() // ranks, ranks
        mesh = init_device_mesh("cuda" if cuda else "cpu", shape, mesh_dim_names=("ep", "pp"))
        ep, replica, replicas = mesh["ep"], mesh["ep"].get_local_rank(), shape[0]
        handler = handlers.Distributed(mesh["pp"], replicas=ep, experts="ep")

    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> tuple[Tensor, Tensor]:
        logits, measures = output
        return F.cross_entropy(logits.flatten(0, 1), target.flatten()) + balance * measures[0], measures / layers

    torch.manual_seed(0)
    parts = [Part(Layer(width, experts, k, ep), width, s == 0, s == layers - 1) for s in range(layers)]
    pipeline, params = interop.from_modules(parts, loss=loss)
    plan = pipeline.plan(Placement.loop(ranks, layers // ranks), microbatches, replicas=replicas)
    if ep is not None:
        params = interop.shard(params, ep, {"layer.up": [Shard(0)], "layer.down": [Shard(0)]})
    params = pipeline.params_on(params, plan, handler)
    adam = interop.optimizer(torch.optim.Adam, lr=1e-2, donate=True)
    schedule = schedules.interleaved_1f1b if layers > ranks else schedules.one_f_one_b
    step = fpipe.train_step(pipeline, schedule, plan, adam, handler=handler, max_norm=1.0, has_aux=True, gather=True)
    state = adam.init(params)

    generator = torch.Generator().manual_seed(0)
    dictionaries = torch.stack([torch.randperm(WORDS, generator=generator) for _ in range(LANGUAGES)])
    for i in range(steps):
        words = torch.randint(WORDS, (batch, 16), generator=generator)
        languages = torch.randint(LANGUAGES, (batch, 16), generator=generator)
        rows = slice(replica * batch // replicas, (replica + 1) * batch // replicas)
        x, y = (words[rows], languages[rows]), dictionaries[languages, words][rows]
        params, state, (value, measures), _ = step(params, state, x, y)
        if handler.is_first and (i % 25 == 0 or i + 1 == steps):
            even, dropped = measures.view(-1, 2).mean(0)
            print(f"step {i}: loss {value:.3f}, balance {even:.2f}, {100 * dropped:.1f} % dropped", flush=True)
    handler.check()
    if mesh is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
