"""Train a GPT on long sequences in slices, which pass keys and values on: less memory, and a smaller bubble.

    python examples/long_sequences.py --ranks 2                                 all ranks in this process
    torchrun --standalone --nproc-per-node 2 examples/long_sequences.py         one rank in each process, over gloo

Each microbatch is cut along its sequences (Sun et al. 2024, arXiv:2406.03488, "Seq1F1B"). A stage runs its slices from
the first to the last, and each attends to the keys and values of those before it; gradients go back from the last slice
to the first. The example compares the gradients with those of `Reference` on the same slices, which have the same bits,
and with those of whole sequences, which differ by rounding.
"""

from dataclasses import replace
from typing import Annotated, Any

import optree
import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

import fpipe
from fpipe import Pipeline, Placement, handlers, interop

VOCABULARY = 64
Past = tuple[Tensor, Tensor] | None
"""Keys and values of the slices before."""


class Block(nn.Module):
    """Causal attention and a perceptron, on one slice."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, past: Past, x: Tensor) -> tuple[Tensor, Past]:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if past is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.mix(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)))), (k, v)


class Part(nn.Module):
    """The blocks of one stage; the first one embeds tokens, the last one scores them."""

    def __init__(self, width: int, blocks: int, context: int | None = None, is_last: bool = False) -> None:
        super().__init__()
        if context is not None:
            self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads=2) for _ in range(blocks))
        self.scores = nn.Linear(width, VOCABULARY) if is_last else nn.Identity()

    def forward(self, carry: list[Past] | None, x: Tensor) -> tuple[Tensor, list[Past]]:
        past = carry or [None] * len(self.blocks)
        if not x.is_floating_point():
            start = 0 if past[0] is None else past[0][0].shape[2]
            x = self.tokens(x) + self.places(torch.arange(start, start + x.shape[1]))
        passed = []
        for block, each in zip(self.blocks, past, strict=True):
            x, kept = block(each, x)
            passed.append(kept)
        return self.scores(x), passed


def cross_entropy(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def build(stages: int, width: int, blocks: int, context: int) -> tuple[Pipeline, dict[int, Any]]:
    """Return a pipeline of stages that carry keys and values, and its params."""
    parts = [Part(width, blocks, None if s else context, s == stages - 1) for s in range(stages)]
    pipeline, params = interop.from_modules(parts, loss=cross_entropy)
    return pipeline.replace([replace(stage, carry=True) for stage in pipeline.stages], pipeline.loss), params


def sequences(count: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return sequences that repeat after a number of tokens that grows with the row, and their next tokens."""
    draw = torch.randint(VOCABULARY, (count, context + 1), generator=torch.Generator().manual_seed(seed))
    for row, tokens in enumerate(draw):
        for at in range(period := 5 + row % 11, context + 1):
            tokens[at] = tokens[at - period]
    return draw[:, :-1], draw[:, 1:]


def main(
    ranks: Annotated[int, typer.Option(help="Ranks of the pipeline; under torchrun, its processes.")] = 2,
    slices: Annotated[int, typer.Option(help="Slices of a sequence.")] = 4,
    schedule: Annotated[str, typer.Option(help="seq-1f1b, seq-zb or gpipe.")] = "seq-1f1b",
    context: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 256,
    width: Annotated[int, typer.Option(help="Width of the model.")] = 64,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 40,
) -> None:
    """Train a GPT on long sequences in slices, and compare its gradients."""
    handler = handlers.auto()
    if isinstance(handler, handlers.Distributed):
        ranks = handler.size
    torch.manual_seed(0)
    pipeline, whole = build(ranks, width, 2, context)
    sliced = pipeline.plan(Placement.loop(ranks), 2 * ranks, slices=slices)
    batch, target = sequences(4 * ranks, context, seed=0)
    params = pipeline.params_on(whole, sliced, handler)
    step = fpipe.value_and_grad(pipeline, schedule, sliced, handler=handler)

    _, grads = step(params, batch, target)
    reference = fpipe.value_and_grad(pipeline, schedule, sliced, handler=handlers.Reference())
    undivided = fpipe.value_and_grad(pipeline, "gpipe", replace(sliced, slices=1), handler=handlers.Reference())
    (_, same), (_, rounded) = (run(whole, batch, target) for run in (reference, undivided))
    print(f"stages {[*grads]}: the reference's bits on {leaves_equal(grads, same)} leaves", flush=True)
    print(f"stages {[*grads]}: from whole sequences at most {largest_error(grads, rounded):.1e} relative", flush=True)

    adamw = interop.optimizer(torch.optim.AdamW, lr=3e-3)
    state = adamw.init(params)
    for number in range(steps):
        loss, grads = step(params, *sequences(4 * ranks, context, seed=number))
        params, state = adamw.update(grads, state, params)
        if handler.is_first and number in (0, steps - 1):
            print(f"step {number}: loss {loss:.3f}", flush=True)
    scores = fpipe.evaluate(pipeline, sliced, handler=handler, gather=True)(params, batch)
    if handler.is_first:
        right = (scores.argmax(-1) == target)[:, 16:].float().mean()
        print(f"forward only, {tuple(scores.shape)}: {right:.0%} of the tokens after the 16th are right")


def leaves_equal(grads: Any, expected: Any) -> str:
    pairs = [*paired(grads, expected)]
    return f"{sum(torch.equal(a, b) for a, b in pairs)} of {len(pairs)}"


def largest_error(grads: Any, expected: Any) -> float:
    """Return the largest error of a leaf, relative to its largest number."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in paired(grads, expected))


def paired(grads: Any, expected: Any) -> Any:
    """Pair the leaves of this process's stages with the expected ones."""
    leaves = (optree.tree_leaves(tree) for tree in (grads, {stage: expected[stage] for stage in grads}))
    return zip(*leaves, strict=True)


if __name__ == "__main__":
    typer.run(main)
