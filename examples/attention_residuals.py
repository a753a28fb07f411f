"""Train a transformer in which every block attends over all earlier ones, so that skips span the whole pipeline.

    python examples/attention_residuals.py --ranks 2                                 all ranks in this process
    torchrun --standalone --nproc-per-node 2 examples/attention_residuals.py         one rank in each process, over gloo

Attention residuals (Chen et al. 2026, arXiv:2603.15031, "full AttnRes") replace the sum of earlier outputs, which
residual connections make, by a softmax over them with a learned query for each block; DenseFormer (Pagliardini et al.
2024, arXiv:2402.02622) has learned weights in their place. A stage is a block here, and reads every earlier stage. Its
output has then a gradient from every later stage: with cotangents="by_rank" a rank adds those of its stages and sends
the sum.
"""

from dataclasses import replace
from typing import Annotated, Any

import optree
import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

import fpipe
from fpipe import Output, Pipeline, Placement, Plan, handlers, interop
from fpipe.effects import Gradient, Send

VOCABULARY = 8


class Attended(nn.Module):
    """The average of earlier outputs, weighed by a softmax over depth for each token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(width))  # at first, all outputs have the same weight

    def forward(self, *outputs: Tensor) -> Tensor:
        values = torch.stack(outputs)
        scores = F.rms_norm(values, values.shape[-1:]) @ self.query
        return (scores.softmax(0).unsqueeze(-1) * values).sum(0)


class Embedding(nn.Module):
    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Parameter(0.02 * torch.randn(context, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.places


class Block(nn.Module):
    """Causal attention and a perceptron, on an average of all earlier outputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attended, self.again = Attended(width), Attended(width)
        self.qkv, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, *outputs: Tensor) -> Tensor:
        x = F.rms_norm(self.attended(*outputs), outputs[0].shape[-1:])
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = self.mixed(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return mixed + self.mlp(F.rms_norm(self.again(*outputs, mixed), mixed.shape[-1:]))


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attended, self.scores = Attended(width), nn.Linear(width, VOCABULARY)

    def forward(self, *outputs: Tensor) -> Tensor:
        return self.scores(F.rms_norm(self.attended(*outputs), outputs[0].shape[-1:]))


def cross_entropy(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def build(stages: int, width: int, context: int) -> tuple[Pipeline, dict[int, Any]]:
    """Return a pipeline in which each stage reads all earlier ones, and its params."""
    modules = [Embedding(width, context), *(Block(width) for _ in range(stages - 2)), Head(width)]
    reads = {stage: [Output(earlier) for earlier in range(stage)] for stage in range(1, stages)}
    return interop.from_modules(modules, loss=cross_entropy, reads=reads, cotangents="by_rank")


def sequences(count: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return sequences whose next token is the sum of the last two, and these next tokens."""
    tokens = torch.randint(VOCABULARY, (count, context + 1), generator=torch.Generator().manual_seed(seed))
    for at in range(2, context + 1):
        tokens[:, at] = (tokens[:, at - 1] + tokens[:, at - 2]) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def gradient_messages(schedule: str, plan: Plan) -> int:
    """Return the number of gradients that a step sends from rank to rank."""
    effects = (effect for program in fpipe.lower(schedule, plan).values() for effect in program)
    return sum(isinstance(effect, Send) and isinstance(effect.value, Gradient) for effect in effects)


def main(
    ranks: Annotated[int, typer.Option(help="Ranks of the pipeline; under torchrun, its processes.")] = 2,
    chunks: Annotated[int, typer.Option(help="Stages on a rank.")] = 4,
    schedule: Annotated[str, typer.Option(help="A schedule of that placement.")] = "interleaved-1f1b",
    width: Annotated[int, typer.Option(help="Width of the model.")] = 32,
    context: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 16,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 100,
) -> None:
    """Train a transformer in which every block attends over all earlier ones."""
    handler = handlers.auto()
    if isinstance(handler, handlers.Distributed):
        ranks = handler.size
    microbatches, batch = 2 * ranks, 8 * ranks
    torch.manual_seed(0)
    pipeline, whole = build(ranks * chunks, width, context)
    plan = pipeline.plan(Placement.loop(ranks, chunks), microbatches)
    if handler.is_first:
        by_consumer = gradient_messages(schedule, replace(plan, cotangents="by_consumer"))
        print(f"gradients sent in a step: {by_consumer} by consumer, {gradient_messages(schedule, plan)} by rank")

    step = fpipe.value_and_grad(pipeline, schedule, plan, handler=handler)
    alone = fpipe.value_and_grad(pipeline, schedule, plan, handler=handlers.Reference())
    params = pipeline.params_on(whole, plan, handler)
    adamw = interop.optimizer(torch.optim.AdamW, lr=1e-2)
    optimizer = adamw.init(params)
    for i in range(steps):
        tokens, following = sequences(batch, context, seed=i)
        loss, grads = step(params, tokens, following)
        if i == 0:
            expected_loss, expected = alone(whole, tokens, following)
            expected = {stage: expected[stage] for stage in grads}
            same = optree.tree_all(optree.tree_map(torch.equal, (loss, grads), (expected_loss, expected)))
            if handler.is_first:
                print(f"the bits of one process: {same}")
        params, optimizer = adamw.update(grads, optimizer, params)
        if handler.is_first and (i % 10 == 0 or i + 1 == steps):
            print(f"step {i}: loss {loss:.4f}")


if __name__ == "__main__":
    typer.run(main)
