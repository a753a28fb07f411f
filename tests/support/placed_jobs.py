"""Functions of fpipe.parallel over one dimension of a mesh, of values that another one places."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import fpipe
from fpipe import Placement, handlers, interop, parallel, schedules
from tests.support.shards import mesh_of, whole
from tests.support.tensor_jobs import distances, worst

WIDTH, HEADS, ROWS, TOKENS = 8, 4, 4, 8


def attend(params, x, group, ring):
    """Attention of `HEADS` heads of queries to those of keys and values that their layers make."""
    q, k, v = ((x @ params[name]).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for name in "qkv")
    y = parallel.attention(q, k, v, group, is_causal=True, enable_gqa=True, ring=ring)
    return x + y.transpose(1, 2).flatten(2) @ params["o"]


def experts(params, x):
    return torch.bmm(torch.relu(torch.bmm(x, params["in"])), params["out"])


def mix(params, x, group):
    x = x + torch.relu(x @ params["up"]) @ params["down"]
    routing = parallel.route(x @ params["router"], 2)
    y = parallel.mixture_of_experts(experts, {each: params[each] for each in ("in", "out")}, x, routing, group)
    return x + y * (parallel.balance_loss(routing) + parallel.dropped(routing, 1.0))


def exchange(params, x, group):
    """Each collective, of a tensor that is cut: along its dimension, and along another one."""
    x = x @ params["up"]
    x = torch.tanh(parallel.all_reduce(x, group) + parallel.copy(x, group) * parallel.shift(x, group))
    for dim in (1, 2):
        x = torch.sin(parallel.reduce_scatter(parallel.all_gather(x, group, dim), group, dim))
    x = parallel.all_to_all(parallel.all_to_all(x, group, 1, 2).cos(), group, 2, 1)
    return x @ params["down"]


ATTENTION = {"q": (8, 8), "k": (8, 4), "v": (8, 4), "o": (8, 8)}
NETWORK = {"up": (8, 16), "down": (16, 8)}
EXPERTS = {"router": (8, 4), "in": (4, 8, 4), "out": (4, 4, 8)}
MODELS = {
    "attention": (lambda p, x, group: attend(p, x, group, ring=False), ATTENTION, {"context": "beside"}),
    "one key": (
        lambda p, x, group: attend(p, x, group, ring=True),
        ATTENTION | {"k": (8, 2), "v": (8, 2)},
        {"context": "beside"},
    ),
    "experts": (mix, NETWORK | EXPERTS, {"experts": "beside"}),
    "collectives": (exchange, NETWORK, {}),
}
"""By name: the function of a stage, the shapes of its params, and options of the handler."""
CUTS = {"q": 1, "k": 1, "v": 1, "o": 0, "up": 1, "down": 0, "in": 2, "out": 1}
"""Dimensions that tensor parallelism cuts."""


def placed(rank, name, ranks, sequence):
    """Errors of the loss and of gradients beside those of a run in which no process cuts params for others."""
    mesh, (function, shapes, options) = mesh_of(ranks, 2, 2, names=("pp", "beside", "tp")), MODELS[name]
    torch.manual_seed(0)
    params = {stage: {each: torch.randn(shape) / 3 for each, shape in shapes.items()} for stage in range(2)}
    data = torch.randn(2, 2, ROWS, TOKENS, WIDTH)[:, mesh["beside"].get_local_rank()].unbind()

    def beside(path, leaf):
        return Shard(0) if path[1] in ("in", "out") else Replicate()

    def cut(path, leaf):
        is_cut = path[1] in CUTS and not (name == "one key" and path[1] in "kv")
        return beside(path, leaf), Shard(CUTS[path[1]]) if is_cut else Replicate()

    def step(pipeline, params):
        handler = handlers.Distributed(mesh["pp"], replicas=mesh["beside"], timeout=60, **options)
        plan = pipeline.plan(Placement.loop(ranks, chunks=2 // ranks), microbatches=2, replicas=2)
        schedule = "gpipe" if ranks == 1 else "zb_h1"
        own = pipeline.params_on(params, plan, handler.rank)
        return fpipe.value_and_grad(pipeline, getattr(schedules, schedule), plan, handler=handler)(own, *data)

    pipeline = fpipe.Pipeline([lambda p, x: function(p, x, mesh["beside"])] * 2, loss=torch.nn.functional.mse_loss)
    value0, grads0 = step(pipeline, interop.shard(params, mesh["beside"], lambda *leaf: [beside(*leaf)]))
    pipeline = pipeline.sequence_parallel() if sequence else pipeline
    value, grads = step(pipeline, interop.shard(params, mesh["beside", "tp"], cut))
    return abs(value - value0).item() / value0.item(), worst(distances(grads, whole(grads0)))


def misplaced(rank):
    """The error of a collective over the processes that cut its tensor."""
    mesh = mesh_of(2, names=("tp",))
    pipeline = fpipe.Pipeline([lambda p, x: parallel.all_reduce(x @ p, mesh)], loss=torch.nn.functional.mse_loss)
    own = interop.shard({0: torch.ones(4, 4)}, mesh, lambda *leaf: [Shard(1)])
    step = fpipe.value_and_grad(pipeline, "gpipe", pipeline.plan(Placement.loop(1), 2), handler=handlers.Local())
    with pytest.raises(fpipe.StageError) as caught:
        step(own, torch.ones(4, 4), torch.ones(4, 4))
    return str(caught.value)
