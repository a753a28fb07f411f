"""Tensor parallelism of small pipelines: models, one process's results, and jobs for the processes of a mesh."""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fpipe
from fpipe import handlers, interop, schedules
from fpipe.autodiff import agreement, functions
from fpipe.handlers.distributed.groups import Groups
from fpipe.stages.sharding import placed_alike
from fpipe.store import JobStore
from tests.support.jobs import differences
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
    """
    Args:
        post: normalise after each addition, as BERT does, rather than before each layer.
    """

    def __init__(self, dropout=0.0, heads=HEADS, post=False):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.post = Attention(heads), post
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down_proj, self.dropout = nn.Linear(HIDDEN, WIDTH, bias=False), nn.Dropout(dropout)

    def forward(self, x):
        if self.post:
            y = self.norm1(x + self.attention(x))
            return self.norm2(y + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y)))
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down_proj(self.dropout(F.silu(self.gate_proj(y)) * self.up_proj(y)))


def loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=3)


@functools.cache
def data():
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(2))


class Stage(nn.Module):
    """A block of the model, with what comes before the first one and after the last one."""

    def __init__(self, first, last, **options):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=2) if first else None
        self.block = Block(**options)
        self.norm = nn.RMSNorm(WIDTH) if last else None
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False) if last else None

    def forward(self, x):
        x = self.block(x if self.embed_tokens is None else self.embed_tokens(x))
        return x if self.norm is None else self.lm_head(self.norm(x))


@functools.cache
def llama(stages=4, **options):
    """A pipeline of a block in each stage, and its params."""
    torch.manual_seed(0)
    blocks = [Stage(i == 0, i == stages - 1, **options) for i in range(stages)]
    return interop.from_modules(blocks, loss=loss)


def distances(grads, expected):
    """|g - g0| / |g0| of each leaf, by stage and name."""
    grads = whole(grads)
    return {
        (stage, name): ((grads[stage][name] - leaf).norm() / leaf.norm()).item()
        for stage, tree in expected.items()
        if stage in grads
        for name, leaf in tree.items()
        if leaf is not None
    }


def worst(errors):
    """The largest error by name; NaN if one is, where Python's max may return another one."""
    return torch.tensor([*errors.values()]).amax().item()


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


def unexpected(counts, expected):
    """The blocks that have other collectives than (forward, backward) of their stage, with their counts.

    Those of a backward are in the half of input gradients, or, of stage 0, which has none, in that of weight gradients.
    """
    found = {}
    for stage, (forward, backward) in expected.items():
        halves = {"backward_input": backward if stage else {}, "backward_weight": {} if stage else backward}
        for name, count in {"prepare": {}, "forward": forward, "backward": backward, **halves}.items():
            if counts[stage, name] != count:
                found[stage, name] = counts[stage, name]
    return found


def step_of(name, pipeline, plan, handler, **options):
    return fpipe.value_and_grad(pipeline, getattr(schedules, name), plan, handler=handler, **options)


@functools.cache
def expected(stages=4, steps=1, rng=None, **options):
    """The losses of some steps of AdamW, and the gradients and norm of the first, of one process, by the reference."""
    pipeline, params = llama(stages, **options)
    plan = pipeline.plan(fpipe.Placement.loop(ranks=1, chunks=stages), microbatches=4)
    return trained(step_of("gpipe", pipeline, plan, handlers.Reference()), params, data(), steps, rng, plan)


def trained(step, params, rows, steps, rng, plan, handler=None):
    adamw = interop.optimizer(torch.optim.AdamW, lr=1e-2)
    state, losses, first = adamw.init(params), [], ()
    for i in range(steps):
        loss, grads = step(params, *rows, rng=rng and (rng, i))
        losses.append((loss[0] if isinstance(loss, tuple) else loss).item())  # beside its aux
        clipped, norm = fpipe.clip_by_global_norm(grads, 1.0, plan, handler=handler or handlers.Reference())
        first = first or (grads, norm)
        params, state = adamw.update(clipped, state, params)
    return losses, *first


def collectives(rank, name, policy, stages):
    """Counts of collectives by stage and block; errors of the loss and the gradients; whether these are placed."""
    pipeline, params = llama(stages)
    tp = interop.shard(params, mesh_of(2, names=("tp",)), interop.styles.megatron(**STYLE))
    ranks = stages // 2
    placement = fpipe.Placement.v(ranks) if name == "zb_v" else fpipe.Placement.loop(ranks, chunks=2)
    plan = pipeline.plan(placement, microbatches=4)
    with Collectives() as counted:
        options = {"policy": getattr(fpipe.policies, policy), "autodiff": "graph"}
        value, grads = step_of(name, pipeline, plan, handlers.Local(), **options)(tp, *data())
    (value0,), grads0, _ = expected(stages)
    alike = all(g.placements == tp[s][n].placements for s, tree in grads.items() for n, g in tree.items())
    return counted.counts, abs(value.item() - value0) / value0, worst(distances(grads, grads0)), alike


def gpt2(rank):
    """Counts of collectives by stage and block, and errors of loss and gradients, of GPT-2 of Hugging Face."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))
    text = torch.randint(31, (4, 8))
    batch = {"input_ids": text, "labels": text}
    pipeline, params = interop.transformers.split(model, example=batch, stages=2)
    plan = pipeline.plan(fpipe.Placement.loop(ranks=2), microbatches=2)
    value0, grads0 = step_of("zb_h1", pipeline, plan, handlers.Reference())(params, batch, text, rng=(0, 1))
    style = interop.styles.megatron(
        column=["c_attn", "c_fc"],
        row=["c_proj"],
        vocabulary=["wte"],
        transposed=["c_attn", "c_fc", "c_proj"],
        fused={"c_attn": 3},
    )
    tp = interop.shard(params, mesh_of(2, names=("tp",)), style)
    with Collectives() as counted:
        value, grads = step_of("zb_h1", pipeline, plan, handlers.Local())(tp, batch, text, rng=(0, 1))
    errors = distances(grads, grads0)
    return counted.counts, abs(value - value0).item() / value0.item(), worst(errors)


def layer(params, x):
    """A network whose hidden numbers are read as heads."""
    hidden = (x @ params["up"]).view(*x.shape[:-1], *params.get("heads", (2, 8)))
    return x + F.relu(hidden).flatten(-2) @ params["down"] + params.get("bias", 0)


WRONG = {  # by fault, what one process or all have instead: names of params, and how they are placed; or of arguments
    "batch": {"batch": torch.zeros(8, 4)},
    "rows": {"batch": torch.ones(7, 4)},
    "rng": {"rng": (0, 2)},
    "reduction": {"options": {"reduction": "sum"}},
    "autocast": {"autocast": True},
    "sharded": {"up": "whole"},
    "partial": {"up": "partial"},
    "pipeline": {"up": "pp"},
    "elsewhere": {"up": "elsewhere"},
    "meshes": {"up": "named otherwise"},
    "shape": {"up": torch.ones(4, 32), "down": torch.ones(32, 4)},
    "dtype": {"up": torch.ones(4, 16, dtype=torch.float64)},
    "missing": {"bias": None},
    "values": {"bias": torch.ones(4)},
    "function": {"function": lambda params, x: layer(params, x @ params["up"] @ params["down"])},
    "failing": {"function": lambda params, x: layer(params, x) @ params["none"]},
    "heads": {"heads": (1, 16)},
}


TRACED = ("function", "failing", "heads")
"""Faults of functions, which are found when they are traced."""
FIRST = (*TRACED, "reduction", "values")
"""Faults that are found in a first step alone."""
OF_COLUMNS = ("reduction", "autocast")
"""Faults of both ranks of a pipeline, which agree."""


def step_of_layers(mesh, function=layer, **options):
    """A step of 2 x 2 processes, whose last stage has another function."""
    pipeline = fpipe.Pipeline([layer, function], loss=F.mse_loss)
    plan = pipeline.plan(fpipe.Placement.loop(ranks=2), microbatches=2)
    handler = handlers.Distributed(mesh["pp"], timeout=20)
    return step_of("one_f_one_b", pipeline, plan, handler, **options)


shared_step = functools.cache(step_of_layers)


def forget(rank):
    """Let the step that several faults have in common go."""
    shared_step.cache_clear()


def wrong(rank, fault, first):
    """The errors of steps in which process 3 of 2 x 2 is wrong; it works after each.

    Args:
        first: the first step of a function is wrong, and a later one; otherwise one of a function that has worked.
    """
    names = ("pp", "tp")
    # A fault of TRACED may end the handler and the groups of its mesh, so it has a mesh of its own.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names) if fault in TRACED else mesh_of(2, 2, names=names)
    changes = WRONG[fault] if rank == 3 or fault == "heads" or (rank == 1 and fault in OF_COLUMNS) else {}
    function, options = changes.get("function", layer), changes.get("options", {})
    step = step_of_layers(mesh, function, **options) if first else shared_step(mesh)

    def run(changes):
        batch, rng = changes.get("batch", torch.ones(ROWS, 4)), changes.get("rng", (0, 1))
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in changes):
            return step({rank // 2: _layer_params(mesh, changes)}, batch, torch.ones(ROWS, 4), rng=rng)

    texts = []
    if not first:
        run({})
    for _ in range(2 if first and fault not in FIRST else 1):
        with pytest.raises((fpipe.StageError, fpipe.TransportError, ValueError)) as caught:
            run(changes)
        texts.append(f"{caught.type.__name__}: {caught.value}")
        if fault not in FIRST:  # of which some have begun a collective in a piece, and one has another step
            run({})
    return texts


def given_up(rank):
    """Return the values that a process reads in two exchanges, each of which follows one that process 0 gives up.

    Process 1 has read all values of the first one that is given up, and has not begun the second one.
    """
    store, real, group = torch.distributed.distributed_c10d._get_default_store(), JobStore.has, (0, 1)

    def exchange(value, look=lambda missing: None):
        return agreement.exchange("tests", group, [rank, value], "testing", lambda *_: AssertionError(), look)

    def late(self, *keys):
        if rank == 0 and real(self, *keys):
            store.wait(["read by 1"])
            raise fpipe.TransportError("given up")
        return real(self, *keys)

    def alone(missing):
        raise fpipe.TransportError(f"{missing} have not begun")

    with contextlib.suppress(fpipe.TransportError), mock.patch.object(JobStore, "has", late):
        exchange("first")
        store.set("read by 1", "")
    texts = [exchange("second")]
    if rank == 0:
        with pytest.raises(fpipe.TransportError, match=r"\[1\] have not begun"):
            exchange("third", alone)
    torch.distributed.barrier()
    return [*texts, exchange("fourth")]


def after_others(rank):
    """The groups on which steps over two meshes of the same processes and names post, and those of the meshes.

    The groups of the first have gone.
    """
    pipeline, posted, groups = fpipe.Pipeline([layer, layer], loss=F.mse_loss), [], []
    plan = pipeline.plan(fpipe.Placement.loop(ranks=2), microbatches=2)
    for _ in range(2):
        mesh, lent = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp")), set()
        handler = handlers.Distributed(mesh["pp"], timeout=20)
        step = step_of("one_f_one_b", pipeline, plan, handler)
        with mock.patch.object(Groups, "lend", lambda self, group, lent=lent: lent.add(group.group_name)):
            step({rank // 2: _layer_params(mesh, {})}, torch.ones(ROWS, 4), torch.ones(ROWS, 4), rng=(0, 1))
        posted.append(lent)
        groups.append({mesh["tp"].get_group().group_name})
        torch.distributed.barrier()
        torch.distributed.destroy_process_group(mesh["tp"].get_group())
    return posted, groups


def _layer_params(mesh, changes):
    """The pieces of a layer's params, but for changes by name: another value, or the way in which it is placed."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    def place(name, x, how):
        cut = {"up": Shard(1), "down": Shard(0)}.get(name, Replicate())
        if how == "partial":
            return DTensor.from_local(x, mesh["tp"], [Partial()], run_check=False)
        cut = Replicate() if how == "whole" else cut
        others = {
            "pp": mesh["pp"],
            "elsewhere": DeviceMesh("cpu", [0, 1], _init_backend=False, _rank=3),
            "named otherwise": _renamed(mesh),
        }
        return distribute_tensor(x, others.get(how, mesh["tp"]), [cut], src_data_rank=None)

    params = {"up": torch.ones(4, 16) / 8, "down": torch.ones(16, 4) / 8, "bias": torch.zeros(4)}
    params |= {name: x for name, x in changes.items() if name in params and not isinstance(x, str)}
    ways = {name: how for name, how in changes.items() if isinstance(how, str)}
    params = {name: place(name, x, ways.get(name)) for name, x in params.items() if x is not None}
    return params | {name: x for name, x in changes.items() if name == "heads"}


@functools.cache
def _renamed(mesh):
    """A mesh of the same processes as mesh["tp"], with another name."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(mesh["tp"].get_group(), "cpu", mesh_dim_names=("other",))


def eager(rank):
    """The error of a step by eager autograd."""
    pipeline, params = llama(2)
    plan = pipeline.plan(fpipe.Placement.loop(ranks=2), microbatches=2)
    tp = interop.shard(params, mesh_of(2, names=("tp",)), interop.styles.megatron(**STYLE))
    with pytest.raises(fpipe.StageError) as caught:
        step_of("gpipe", pipeline, plan, handlers.Local(), autodiff="eager")(tp, *data())
    return str(caught.value)


def other_models(rank, options):
    """Errors of loss and gradients, counts of collectives by stage and block, and the error where all heads are cut."""
    pipeline, params = llama(2, **options)
    plan = pipeline.plan(fpipe.Placement.loop(ranks=2), microbatches=4)
    mesh, style, text = mesh_of(2, names=("tp",)), STYLE, ""
    if "heads" in options:
        tp = interop.shard(params, mesh, interop.styles.megatron(**style))
        with pytest.raises(fpipe.StageError) as caught:
            step_of("gpipe", pipeline, plan, handlers.Local())(tp, *data())
        text = str(caught.value)
        style = style | {"column": tuple(name for name in style["column"] if name not in ("k_proj", "v_proj"))}
    tp = interop.shard(params, mesh, interop.styles.megatron(**style))
    with Collectives() as counted:
        value, grads = step_of("gpipe", pipeline, plan, handlers.Local())(tp, *data())
    (value0,), grads0, _ = expected(2, **options)
    return abs(value.item() - value0) / value0, worst(distances(grads, grads0)), counted.counts, text


def einsum(rank):
    """Errors of loss and gradients of a network that einsum computes, and counts of collectives by stage and block."""

    def network(params, x):
        return torch.einsum("bth,hd->btd", torch.relu(torch.einsum("...d,dh->...h", x, params["up"])), params["down"])

    torch.manual_seed(0)
    params, x = {0: {"up": torch.randn(4, 16) / 2, "down": torch.randn(16, 4) / 2}}, torch.randn(4, 6, 4)
    pipeline = fpipe.Pipeline([network], loss=F.mse_loss)
    plan = pipeline.plan(fpipe.Placement.loop(ranks=1), microbatches=2)
    value0, grads0 = step_of("gpipe", pipeline, plan, handlers.Reference())(params, x, x)
    tp = interop.shard(params, mesh_of(2, names=("tp",)), {"up": [Shard(1)], "down": [Shard(0)]})
    with Collectives() as counted:
        value, grads = step_of("gpipe", pipeline, plan, handlers.Local())(tp, x, x)
    return abs(value - value0).item() / value0.item(), worst(distances(grads, grads0)), counted.counts


def stored(rank, folder):
    """Where params that are made in pieces, and that other meshes load from a checkpoint of pieces, differ."""
    import torch.distributed.checkpoint as dcp

    def by_name(params):
        return {f"{stage}.{name}": x for stage, tree in params.items() for name, x in tree.items()}

    mesh, style = mesh_of(2, 2, names=("dp", "tp")), interop.styles.megatron(**STYLE)
    pipeline, params = llama(2)
    zeros = {stage: {name: torch.zeros_like(x) for name, x in tree.items()} for stage, tree in params.items()}
    both = interop.fsdp(interop.shard(params, mesh["tp"], style), mesh["dp"])
    dcp.save(by_name(both), checkpoint_id=folder)
    into = [zeros, interop.fsdp(zeros, mesh_of(4)), interop.fsdp(interop.shard(zeros, mesh["dp"], style), mesh["tp"])]
    for other in into:
        dcp.load(by_name(other), checkpoint_id=folder)
    blank = {stage: {name: x.to("meta") for name, x in tree.items()} for stage, tree in params.items()}
    like = interop.fsdp(interop.shard(blank, mesh["tp"], style), mesh["dp"])
    made, expected = (interop.materialise(pipeline, like=placed)[0] for placed in (like, None))
    alike = all(made[s][n].placements == x.placements for s, tree in both.items() for n, x in tree.items())
    return [differences(whole(other), params) for other in into], differences(whole(made), expected), alike


def styles_of(name):
    """torch's styles by module: as its tutorials have them."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    attention, whole, rows = "block.attention", (Replicate(),), (Shard(1),)
    heads = {f"{attention}.{each}_proj": ColwiseParallel() for each in "qkv"}
    if name != "sequence":
        plan = heads | {f"{attention}.o_proj": RowwiseParallel(), "block.down_proj": RowwiseParallel()}
        plan |= {"block.gate_proj": ColwiseParallel(), "block.up_proj": ColwiseParallel()}
        if name == "prepared":
            plan |= {attention: PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole)}
        if name == "vocabulary":
            plan |= {"embed_tokens": RowwiseParallel(input_layouts=Replicate())}
            plan |= {"lm_head": ColwiseParallel(output_layouts=Replicate())}
        return plan
    return heads | {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "block.norm1": SequenceParallel(),
        attention: PrepareModuleInput(input_layouts=rows, desired_input_layouts=whole),
        f"{attention}.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "block.norm2": SequenceParallel(),
        "block.gate_proj": ColwiseParallel(input_layouts=Shard(1)),
        "block.up_proj": ColwiseParallel(input_layouts=Shard(1)),
        "block.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def parallelized(rank, name):
    """Errors of loss and gradients of modules that went through parallelize_module, by torch's own; the collectives."""
    from torch.distributed.tensor.parallel import parallelize_module

    torch.manual_seed(0)
    blocks = [Stage(i == 0, i == 1) for i in range(2)]
    for block in blocks:
        plan = {key: style for key, style in styles_of(name).items() if getattr(block, key.partition(".")[0])}
        parallelize_module(block, mesh_of(2, names=("tp",)), plan)
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(4, VOCABULARY, (ROWS, 6), generator=generator) for _ in range(2))
    value0 = sum(loss(blocks[1](blocks[0](a)), b) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)) / 4
    value0.backward()
    pipeline, params = interop.from_modules(blocks, loss=loss)
    plan = pipeline.plan(fpipe.Placement.loop(ranks=2), microbatches=4)
    with Collectives() as counted:
        value, grads = step_of("zb_h1", pipeline, plan, handlers.Local())(params, x, y)
    grads0 = {i: {name: p.grad for name, p in block.named_parameters()} for i, block in enumerate(blocks)}
    interop.into_modules(blocks, grads)
    copied = {i: {name: p.detach() for name, p in block.named_parameters()} for i, block in enumerate(blocks)}
    alike = all(placed_alike(g, params[s][n]) for s, tree in grads.items() for n, g in tree.items())
    alike &= not differences(whole(copied), whole(grads))
    errors = distances(grads, whole(grads0))
    return abs(value - value0).item() / value0.item(), worst(errors), counted.counts, alike


def unshardable(rank):
    """The errors for modules that torch has sharded in ways that stages can't be."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh, texts = mesh_of(2, names=("tp",)), []
    column = parallelize_module(nn.Sequential(nn.Linear(2, 4), nn.ReLU()), mesh, {"0": ColwiseParallel()})
    sharded = nn.Sequential(nn.Linear(2, 4), nn.ReLU())
    fully_shard(sharded[0], mesh=mesh)
    calls = [
        lambda: interop.split(column, at=["1"], example=torch.ones(2, 2)),
        lambda: interop.from_modules(sharded, at=[1]),
    ]
    for call in calls:
        with pytest.raises(fpipe.StageError) as caught:
            call()
        texts.append(str(caught.value))
    return texts
