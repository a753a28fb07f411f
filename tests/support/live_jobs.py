"""What a rank is asked for how many bytes it holds, and the stages that hold them: large beside a loss."""

from __future__ import annotations

import functools
from itertools import dropwhile
from unittest.mock import patch

import torch
import torch.nn.functional as F

import fpipe
from fpipe import Output, Pipeline, Stage
from fpipe.effects import Backward, BackwardInput, BackwardWeight, parts
from fpipe.handlers.distributed.channels import Channels
from fpipe.programs.interning import Interning
from fpipe.programs.memory import live_bytes
from tests.support import cases, jobs
from tests.support.policies import POLICIES
from tests.support.sharing import sharing

ROWS, WIDTH, LENGTH = 16, 32, 8
BACKWARD = Backward | BackwardInput | BackwardWeight


def blocks(stages):
    """Transformer blocks: the residuals of each are much more than its output."""

    def params():
        return {
            name: cases.randn(*shape, scale=0.2)
            for name, shape in {"qkv": (WIDTH, 3 * WIDTH), "up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}.items()
        }

    def batch(rows):
        return torch.randn(2, rows, LENGTH, WIDTH)

    return Pipeline([cases.attend] * stages, cases.mse), {s: params() for s in range(stages)}, batch


def layers(stages):
    """Residuals are inputs and outputs, and nothing else."""
    case = cases.linear(stages)
    params = {s: {"w": cases.randn(WIDTH, WIDTH), "b": cases.randn(WIDTH)} for s in range(stages)}
    return case.pipeline, params, lambda rows: torch.randn(2, 4 * rows * LENGTH, WIDTH)


def skip(stages):
    """One of the first output's two leaves is read by every later stage."""

    def first(p, x):
        h = torch.tanh(x @ p)
        return {"h": h, "skip": h * x}

    def layer(p, h, skip):
        return torch.tanh(h @ p + skip)

    nodes = [Stage(first), Stage(layer, reads=(Output(0, "h"), Output(0, "skip")))]
    nodes += [Stage(layer, reads=(Output(s - 1), Output(0, "skip"))) for s in range(2, stages)]
    params = {s: cases.randn(WIDTH, WIDTH) for s in range(stages)}
    return Pipeline(nodes, cases.mse), params, lambda rows: torch.randn(2, 4 * rows * LENGTH, WIDTH)


def dense(stages):
    """Each stage reads all earlier ones, and a rank adds the gradients of its stages."""

    def layer(p, *outputs):
        return torch.tanh(sum(x * weight for weight, x in enumerate(outputs, 2)) @ p)

    nodes = [Stage(lambda p, x: torch.tanh(x @ p))]
    nodes += [Stage(layer, reads=[Output(t) for t in range(s)]) for s in range(1, stages)]
    params = {s: cases.randn(WIDTH, WIDTH) for s in range(stages)}
    return (
        Pipeline(nodes, cases.mse, cotangents="by_rank"),
        params,
        lambda rows: torch.randn(2, 4 * rows * LENGTH, WIDTH),
    )


def causal(stages):
    """Keys and values are carried from slice to slice: later ones keep more of them, and have larger masks."""

    def block(p, carry, x):
        q, k, v = (x @ p["qkv"]).chunk(3, -1)
        if carry is not None:
            k, v = torch.cat((carry[0], k), 1), torch.cat((carry[1], v), 1)
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return x + F.gelu(x @ p["up"]) @ p["down"], (k, v)

    def batch(rows):
        return torch.randn(2, rows // ROWS, 48, WIDTH)

    _, params, _ = blocks(stages)
    return Pipeline([Stage(block, carry=True)] * stages, cases.mse), params, batch


KINDS = {f.__name__: f for f in (blocks, layers, skip)}


@functools.cache
def made(kind, stages, microbatches, policy, trained=None, slices=1):
    """(pipeline, params, batch, target, costs), the same in every process."""
    torch.manual_seed(0)
    pipeline, params, batch = (KINDS | {"dense": dense, "causal": causal})[kind](stages)
    if trained is not None:
        pipeline = pipeline.freeze(params, lambda path, x: path[0] not in trained)
    batch, target = batch(ROWS * microbatches)
    options = {"autodiff": "graph", "policy": POLICIES[policy]}
    options |= {"microbatches": microbatches, "slices": slices, "repeats": 1}
    costs = fpipe.profile(pipeline, params, batch, target, **options)
    return pipeline, params, batch, target, costs


def held(rank, kind, name, ranks, microbatches):
    schedule, place = (cases.SCHEDULES | cases.MOVING)[name]
    return compared(rank, kind, schedule, place(ranks), microbatches, jobs.handler())


def held_in_slices(rank, name, ranks, slices):
    schedule, place = cases.SCHEDULES[name]
    return compared(rank, "causal", schedule, place(ranks), 4, jobs.handler(), slices=slices)


def compared(rank, kind, schedule, placement, microbatches, handler, policy="everything", trained=None, slices=1):
    """What a rank holds at most, as measured and as predicted, and by how much these differ after an effect.

    Until the ranks agree on the step, in its first effects, no receive has been posted: differences count from the
    first backward on.
    """
    pipeline, params, batch, target, costs = made(kind, placement.stages, microbatches, policy, trained, slices)
    plan, live = pipeline.plan(placement, microbatches, slices=slices), fpipe.LiveBytes()
    own = sharing(handler, "live", kind, plan.stages, policy, trained)
    options = {"autodiff": "graph", "policy": POLICIES[policy]}
    step = fpipe.value_and_grad(pipeline, schedule, plan, handler=own, observe=live, **options)
    arguments = pipeline.params_on(params, plan, rank), batch, target
    # Without `rng`, a forward that is recomputed keeps the generators' states: on the host, which here is the device.
    rng = (0, 0)
    step(*arguments, rng=rng)  # traces
    step(*arguments, rng=rng)  # knows signatures
    with patch.object(Channels, "_may_lead", lambda channels: False):  # else some receives are posted later
        live.run(step, *arguments, rng=rng)
    predicted = list(live_bytes(fpipe.lower(schedule, plan), costs, Interning(plan)))[rank]
    pairs = zip((memory for memory in live.effects if memory.rank == rank), predicted, strict=True)
    later = dropwhile(lambda pair: not any(isinstance(e, BACKWARD) for e in parts(pair[0].effect)), pairs)
    difference = max(abs(memory.after - n) for memory, n in later)
    return live.peak(rank), fpipe.verify(schedule, plan, costs=costs).peak_bytes[rank], difference
