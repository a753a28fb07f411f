"""Sequence parallelism of small pipelines: a model, one process's results, and jobs for the processes of a mesh."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import fpipe
from fpipe import handlers, interop
from fpipe.handlers.distributed.connections import Connections
from tests.support.shards import mesh_of
from tests.support.tensor_jobs import (
    HEADS,
    VOCABULARY,
    WIDTH,
    Attention,
    Collectives,
    distances,
    loss,
    step_of,
    worst,
)

LENGTH, ROWS = 4, 8
STYLE = interop.styles.megatron(
    column=("q_proj", "k_proj", "v_proj", "up_proj"),
    row=("o_proj", "down_proj"),
    vocabulary=("embed_tokens", "lm_head"),
)


class Stage(nn.Module):
    """A block with two norms, of both kinds, and dropout of what its layers add."""

    def __init__(self, first, last, dropout=0.0, heads=HEADS):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH) if first else None
        self.positions = nn.Embedding(LENGTH, WIDTH) if first else None
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.dropout = Attention(heads), nn.Dropout(dropout)
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.norm = nn.RMSNorm(WIDTH) if last else None
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False) if last else None

    def forward(self, x):
        if self.embed_tokens is not None:
            x = self.dropout(self.embed_tokens(x) + self.positions(torch.arange(x.shape[1])))
        x = x + self.dropout(self.attention(self.norm1(x)))
        x = x + self.dropout(self.down_proj(F.gelu(self.up_proj(self.norm2(x)))))
        return x if self.norm is None else self.lm_head(self.norm(x))


@functools.cache
def data(length=LENGTH):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(VOCABULARY, (ROWS, length), generator=generator) for _ in range(2))


@functools.cache
def model(stages=4, dropout=0.0, heads=HEADS):
    """A pipeline of a block in each stage, and its params."""
    torch.manual_seed(0)
    blocks = [Stage(i == 0, i == stages - 1, dropout, heads) for i in range(stages)]
    return interop.from_modules(blocks, loss=loss)


@functools.cache
def expected(stages=4, dropout=0.0, heads=HEADS, length=LENGTH):
    """Loss and gradients of one process, by the reference."""
    pipeline, params = model(stages, dropout, heads)
    plan = pipeline.plan(fpipe.Placement.loop(ranks=1, chunks=stages), microbatches=4)
    return step_of("gpipe", pipeline, plan, handlers.Reference())(params, *data(length), rng=(7, 0))


class SentBytes:
    """Bytes that this process sends to other ranks of the pipeline, while it is entered, but for heads of values."""

    def __enter__(self):
        self.count, self.send = 0, Connections.send

        def send(connections, messages, target):
            self.count += sum(x.nbytes for x in messages if (x.dtype, x.numel()) != (torch.int64, 1))
            return self.send(connections, messages, target)

        Connections.send = send
        return self

    def __exit__(self, *error):
        Connections.send = self.send


def collectives(rank, policy):
    """Counts of collectives by stage and block, and errors of the loss and the gradients."""
    pipeline, params = model(3)
    tp = interop.shard(params, mesh_of(2, names=("tp",)), STYLE)
    plan = pipeline.plan(fpipe.Placement.loop(ranks=3), microbatches=4)
    with Collectives() as counted:
        options = {"policy": getattr(fpipe.policies, policy), "autodiff": "graph"}
        step = step_of("zb_h1", pipeline.sequence_parallel(), plan, handlers.Local(), **options)
        value, grads = step(tp, *data(), rng=(7, 0))
    value0, grads0 = expected(3)
    return counted.counts, abs(value - value0).item() / value0.item(), worst(distances(grads, grads0))


def whole_mesh(rank, shape, name, resident, dropout, length, policy):
    """Errors of loss and gradients over processes of (pp, dp, tp), and the bytes that this one sends along them."""
    mesh = mesh_of(*shape, names=("pp", "dp", "tp"))
    stages = 4 if name in ("zb_v", "looped_bfs") else shape[0]
    options = stages, dropout, 4 * max(1, shape[2] // 2)
    pipeline, params = model(*options)
    placement = fpipe.Placement.loop(ranks=shape[0], chunks=stages // shape[0])
    if name == "zb_v":
        placement = fpipe.Placement.v(ranks=shape[0])
    plan = pipeline.plan(placement, microbatches=4 // shape[1], replicas=shape[1])
    handler = handlers.Distributed(mesh["pp"], replicas=mesh["dp"] if shape[1] > 1 else None, timeout=60)
    params = interop.shard(params, mesh["tp"], STYLE)
    if resident is not None:
        params = interop.fsdp(params, mesh["dp"])
    own = pipeline.params_on(params, plan, handler)
    count = ROWS // shape[1]
    rows = slice(count * mesh["dp"].get_local_rank(), count * (mesh["dp"].get_local_rank() + 1))
    batch = [x[rows] for x in data(length)]
    policy = getattr(fpipe.policies, policy)
    step = step_of(name, pipeline.sequence_parallel(), plan, handler, resident=resident, policy=policy)
    with SentBytes() as sent:
        value, grads = step(own, *batch, rng=(7, 0))
    value0, grads0 = expected(*options, length)
    alike = all(g.placements == own[s][n].placements for s, tree in grads.items() for n, g in tree.items())
    return abs(value - value0).item() / value0.item(), worst(distances(grads, grads0)), sent.count, alike


def lengths(rank):
    """Errors of a loss, gradients and outputs, of microbatches with 4 and 3 tokens a row, of which 3 are not cut."""
    pipeline, params = model(2)
    tp = interop.shard(params, mesh_of(2, names=("tp",)), STYLE)
    plan = pipeline.plan(fpipe.Placement.loop(ranks=2), microbatches=4)
    parts = [tuple(x[2 * m : 2 * m + 2, : 3 + m % 2] for x in data()) for m in range(4)]
    batch, target = (fpipe.Microbatches(each) for each in zip(*parts, strict=True))
    cut = pipeline.sequence_parallel()
    value, grads = step_of("zb_h1", cut, plan, handlers.Local())(tp, batch, target)
    value0, grads0 = step_of("zb_h1", pipeline, plan, handlers.Reference())(params, batch, target)
    outputs = fpipe.evaluate(cut, plan, handler=handlers.Local())(tp, batch)
    outputs0 = fpipe.evaluate(pipeline, plan, handler=handlers.Reference())(params, batch)
    wrong = max((a - b).abs().max().item() for a, b in zip(outputs, outputs0, strict=True))
    return abs(value - value0).item() / value0.item(), worst(distances(grads, grads0)), wrong


def by_hand(params, x):
    """A network whose input and output are cut along the tokens, by `constrain`."""
    x = fpipe.constrain(x, [Shard(1)])
    y = F.rms_norm(x, (WIDTH,)) * params["norm"]
    y = fpipe.constrain(y, {"tp": Replicate()})
    return x + fpipe.constrain(F.gelu(y @ params["up"]) @ params["down"], [Shard(1)])


def hand_made():
    generator = torch.Generator().manual_seed(2)
    shapes = {"norm": (WIDTH,), "up": (WIDTH, 12), "down": (12, WIDTH)}
    params = {s: {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for s in range(3)}
    x, y = torch.randn(2, ROWS, LENGTH, WIDTH, generator=generator)
    return fpipe.Pipeline([by_hand] * 3, loss=lambda y, t: (y - t).square().mean()), params, x, y


def network(params, x):
    """`by_hand`, unchanged from one process."""
    y = F.rms_norm(x, (WIDTH,)) * params["norm"]
    return x + F.gelu(y @ params["up"]) @ params["down"]


def constrained(rank, dim):
    """Counts of collectives by stage and block, and errors of the loss and the gradients, of a network.

    Args:
        dim: that of the tokens, of `sequence_parallel`; None for `by_hand`.
    """
    pipeline, params, x, y = hand_made()
    if dim is not None:
        pipeline = fpipe.Pipeline([network] * 3, loss=pipeline.loss).sequence_parallel(dim)
    rule = {"norm": [Replicate()], "up": [Shard(1)], "down": [Shard(0)]}
    tp = interop.shard(params, mesh_of(2, names=("tp",)), rule)
    plan = pipeline.plan(fpipe.Placement.loop(ranks=3), microbatches=2)
    value0, grads0 = step_of("zb_h1", pipeline, plan, handlers.Reference())(params, x, y)
    with Collectives() as counted:
        value, grads = step_of("zb_h1", pipeline, plan, handlers.Local())(tp, x, y)
    return counted.counts, abs(value - value0).item() / value0.item(), worst(distances(grads, grads0))


def unfit(rank, fault):
    """The error of a step whose ranks or stages do not fit. It breaks its mesh, which is therefore its own."""
    mesh, pipes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp")), None
    pipeline, params, x, y = hand_made()
    rule = {"norm": [Replicate()], "up": [Shard(1)], "down": [Shard(0)]}
    if fault == "order":
        pipes = [torch.distributed.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    if fault == "name":
        pipeline = fpipe.Pipeline([lambda p, x: fpipe.constrain(x @ p["up"], {"dp": Shard(1)})] * 3)
    if not (fault == "plain" and rank >= 2):
        params = interop.shard(params, mesh["tp"], rule)
    plan = pipeline.plan(fpipe.Placement((0, 1, 1)), microbatches=2)
    handler = handlers.Distributed(pipes[rank in (1, 2)] if pipes else mesh["pp"], timeout=60)
    with pytest.raises((fpipe.StageError, fpipe.TransportError)) as caught:
        step_of("gpipe", pipeline, plan, handler)(pipeline.params_on(params, plan, handler), x, y)
    return str(caught.value)


def transformer(rank, family):
    """Counts of collectives by stage and block, and errors of loss and gradients, of models of Hugging Face."""
    import transformers

    torch.manual_seed(0)
    options, style = SMALL[family]
    kind = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM", "BERT": "BertForMaskedLM"}[family]
    config = getattr(transformers, f"{'Bert' if family == 'BERT' else family}Config")
    model = getattr(transformers, kind)(config(vocab_size=31, **options, bos_token_id=1, eos_token_id=2))
    text = torch.randint(31, (4, 8))
    batch = {"input_ids": text, "labels": text}
    pipeline, params = interop.transformers.split(model, example=batch, stages=2)
    plan = pipeline.plan(fpipe.Placement.loop(ranks=2), microbatches=2)
    value0, grads0 = step_of("zb_h1", pipeline, plan, handlers.Reference())(params, batch, text, rng=(0, 1))
    tp = interop.shard(params, mesh_of(2, names=("tp",)), interop.styles.megatron(**style))
    with Collectives() as counted:
        step = step_of("zb_h1", pipeline.sequence_parallel(), plan, handlers.Local())
        value, grads = step(tp, batch, text, rng=(0, 1))
    errors = distances(grads, grads0)  # a bias of keys changes no attention: its gradient is noise around 0
    errors = {place: error for place, error in errors.items() if not place[1].endswith("key.bias")}
    return counted.counts, abs(value - value0).item() / value0.item(), worst(errors)


SMALL = {
    "BERT": (
        {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 8,
            "attention_probs_dropout_prob": 0.0,
        },
        {
            "column": ["query", "key", "value", "intermediate.dense"],
            "row": ["output.dense"],
            "vocabulary": ["word_embeddings"],
        },
    ),
    "GPT2": (
        {"n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0},
        {
            "column": ["c_attn", "c_fc"],
            "row": ["c_proj"],
            "vocabulary": ["wte"],
            "transposed": ["c_attn", "c_fc", "c_proj"],
            "fused": {"c_attn": 3},
        },
    ),
    "Llama": (
        {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        {
            "column": ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"],
            "row": ["o_proj", "down_proj"],
            "vocabulary": ["embed_tokens", "lm_head"],
        },
    ),
}
