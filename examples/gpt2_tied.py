"""GPT-2 with its embedding and head tied, on the first and the last rank: one parameter, one gradient.

    python examples/gpt2_tied.py --ranks 4                             all ranks in this process
    torchrun --standalone --nproc-per-node 4 examples/gpt2_tied.py     one rank in each process, over gloo

The model learns to count. At the end the shared matrix has the same bits on both ranks. With --split every rank has as
many rows of it, for its part of the embedding and of the head: where the vocabulary is large, no rank then takes longer
than others (Yeung et al. 2024, arXiv:2411.05288). It learns the same.
"""

from functools import partial
from itertools import pairwise
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.func import functional_call

import fpipe
from fpipe import Pipeline, Placement, handlers, interop
from fpipe.parallel import Vocabulary


class Block(nn.Module):
    """GPT-2's block: pre-norm, causal attention, an MLP four times as wide."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(self.ln_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """Radford et al. 2019: the head's matrix is the embedding's."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Positions(nn.Module):
    """Add the embedding of positions."""

    def __init__(self, wpe: nn.Embedding) -> None:
        super().__init__()
        self.wpe = wpe

    def forward(self, x: Tensor) -> Tensor:
        return x + self.wpe(torch.arange(x.shape[1], device=x.device))


def split_vocabulary(model: GPT2, ranks: int) -> tuple[Pipeline, dict[int, Any]]:
    """Return a pipeline in which each rank has a part of the embedding and of the head, and equally many blocks."""
    cuts = [len(model.h) * rank // ranks for rank in range(ranks + 1)]
    parts = [nn.Sequential(*model.h[begin:end]) for begin, end in pairwise(cuts)]
    parts[0].insert(0, Positions(model.wpe))
    parts[-1].append(model.ln_f)

    def run(part: nn.Module, params: dict[str, Tensor], x: Tensor) -> Any:
        return functional_call(part, params, (x,))

    vocabulary = Vocabulary(model.wte.num_embeddings, ranks)
    params = [{name: each.detach() for name, each in part.named_parameters()} for part in parts]
    pipeline = vocabulary.pipeline([partial(run, part) for part in parts])
    return pipeline, vocabulary.split(model.wte.weight.detach(), params)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def counting(count: int, vocabulary: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return runs of numbers from random starts, and the next number of each."""
    first = torch.randint(vocabulary, (count, 1), generator=torch.Generator().manual_seed(seed))
    numbers = (first + torch.arange(context + 1)) % vocabulary
    return numbers[:, :-1], numbers[:, 1:]


def main(
    ranks: Annotated[int, typer.Option(help="Ranks of the pipeline; under torchrun, its processes.")] = 2,
    layers: Annotated[int, typer.Option(help="Transformer blocks.")] = 4,
    width: Annotated[int, typer.Option(help="Width of the model; heads are 16 wide.")] = 64,
    vocabulary: Annotated[int, typer.Option(help="Tokens that there are.")] = 64,
    context: Annotated[int, typer.Option(help="Tokens in a window.")] = 32,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 60,
    split: Annotated[bool, typer.Option("--split", help="Split the embedding and the head over all ranks.")] = False,
) -> None:
    """Train GPT-2 with its embedding and head tied, on the first and the last rank or in parts on all of them."""
    handler = handlers.auto()
    if isinstance(handler, handlers.Distributed):
        ranks = handler.size
    torch.manual_seed(0)
    model = GPT2(layers, width, width // 16, vocabulary, context)
    batch, microbatches = 16, 4
    if split:
        pipeline, params = split_vocabulary(model, ranks)
        plan, schedule = pipeline.plan(Placement.vocabulary(ranks), microbatches), "vocabulary-1f1b"
    else:
        example, _ = counting(batch // microbatches, vocabulary, context, seed=0)
        cuts = [f"h.{layers * rank // ranks}" for rank in range(1, ranks)]
        pipeline, params = interop.split(model, at=cuts, example=(example,), loss=cross_entropy)
        plan, schedule = pipeline.plan(Placement.loop(ranks), microbatches), "zb-h1"
    if handler.is_first:
        print(pipeline.describe())
    params = pipeline.params_on(params, plan, handler)  # without --split the last rank has the shared entry too

    step = fpipe.value_and_grad(pipeline, schedule, plan, handler=handler)
    adamw = interop.optimizer(torch.optim.AdamW, lr=3e-3)
    optimizer = adamw.init(params)
    for i in range(steps):
        tokens, target = counting(batch, vocabulary, context, seed=i)
        loss, grads = step(params, *(({"tokens": tokens, "targets": target}, None) if split else (tokens, target)))
        params, optimizer = adamw.update(grads, optimizer, params)
        if handler.is_first and (i % 20 == 0 or i + 1 == steps):
            print(f"step {i}: loss {loss:.4f}")
    if isinstance(handler, handlers.Distributed) and not split:
        shared = [torch.empty_like(model.wte.weight) for _ in range(ranks)]
        own = params[0]["wte.weight"] if 0 in params else torch.zeros_like(model.wte.weight)
        dist.all_gather(shared, own)
        if handler.is_first:
            print(f"embedding and head are {'the same bits' if torch.equal(shared[0], shared[-1]) else 'apart'}")


if __name__ == "__main__":
    typer.run(main)
