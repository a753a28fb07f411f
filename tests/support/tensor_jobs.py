"""Tensor parallelism of small pipelines: models, one process's results, and jobs for the processes of a mesh."""

from __future__ import annotations

import functools
import re
from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn

import fpipe
from fpipe import handlers, interop, schedules
from fpipe.autodiff import functions
from tests.support.shards import mesh_of, whole

VOCABULARY, WIDTH, HEADS, HIDDEN, LENGTH, ROWS = 11, 8, 4, 12, 5, 8
STYLE = {
    "column": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
    "row": ("o_proj", "down_proj"),
    "vocabulary": ("embed_tokens", "lm_head"),
}


class Attention(nn.Module):
    """Rotary embeddings and grouped heads."""

    def __init__(self, heads=HEADS):
        super().__init__()
        self.head = WIDTH // HEADS
        self.q_proj = nn.Linear(WIDTH, heads * self.head, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, heads * self.head // 2, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(heads * self.head, WIDTH)

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = (
            project(x).view(rows, length, -1, self.head).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        angles = torch.arange(length)[:, None] / torch.tensor([1.0, 100.0])
        q, k = (x * angles.cos() + x.flip(-1) * angles.sin() for x in (q, k))
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))


class Block(nn.Module):
    def __init__(self, dropout=0.0, heads=HEADS):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention(heads)
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down_proj, self.dropout = nn.Linear(HIDDEN, WIDTH, bias=False), nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down_proj(self.dropout(F.silu(self.gate_proj(y)) * self.up_proj(y)))


class Llama(nn.Module):
    def __init__(self, layers=4, **options):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=2)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(layers))
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


def loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=3)


@functools.cache
def data():
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(2))


@functools.cache
def llama(stages=4, **options):
    """A pipeline of a block in each stage, and its params."""
    torch.manual_seed(0)
    model = Llama(stages, **options)
    at = [f"blocks.{i}" for i in range(1, stages)]
    return interop.split(model, at=at, example=(data()[0][:2],), loss=loss)


def distances(grads, expected):
    """|g - g0| / |g0| of each leaf, by stage and name."""
    grads = whole(grads)
    return {
        (stage, name): ((grads[stage][name] - leaf).norm() / leaf.norm()).item()
        for stage, tree in expected.items()
        if stage in grads
        for name, leaf in tree.items()
    }


class Collectives:
    """Counts of collectives in the blocks that stages are partitioned into, by stage and block, while it is entered."""

    def __enter__(self):
        self.counts, self.partition = {}, functions.TraceConfig.partition

        def partition(config, *args, **kwargs):
            joint, blocks = self.partition(config, *args, **kwargs)
            backward = blocks.backward
            each = (blocks.prepare, blocks.forward, backward.fused, backward.input, backward.weight)
            for block in each:
                names = [re.search(r"c10d_functional\.(\w+)", str(node.target)) for node in block.body]
                found = Counter(name[1] for name in names if name and name[1] != "wait_tensor")
                self.counts[config.number, block.name] = dict(found)
            return joint, blocks

        functions.TraceConfig.partition = partition
        return self

    def __exit__(self, *error):
        functions.TraceConfig.partition = self.partition


@functools.cache
def expected(stages=4, rng=None, **options):
    """The loss and the gradients of one process, by the reference."""
    pipeline, params = llama(stages, **options)
    plan = pipeline.plan(fpipe.Placement.loop(ranks=1, chunks=stages), microbatches=4)
    return fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Reference())(params, *data(), rng=rng)


def collectives(rank, name, policy):
    """Counts of collectives by stage and block; errors of the loss and the gradients; whether these are placed."""
    pipeline, params = llama()
    tp = interop.shard(params, mesh_of(2, names=("tp",)), interop.styles.megatron(**STYLE))
    placement = fpipe.Placement.v(ranks=2) if name == "zb_v" else fpipe.Placement.loop(ranks=2, chunks=2)
    plan = pipeline.plan(placement, microbatches=4)
    with Collectives() as counted:
        options = {"policy": getattr(fpipe.policies, policy), "autodiff": "graph"}
        step = fpipe.value_and_grad(pipeline, getattr(schedules, name), plan, handler=handlers.Local(), **options)
        value, grads = step(tp, *data())
    value0, grads0 = expected()
    alike = all(g.placements == tp[s][n].placements for s, tree in grads.items() for n, g in tree.items())
    return counted.counts, abs(value - value0).item() / value0.item(), max(distances(grads, grads0).values()), alike
