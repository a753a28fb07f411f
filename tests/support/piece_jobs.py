"""Collectives inside pieces: what graphs make of them, what is refused, and what a lost peer does."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import fpipe
from fpipe import handlers, parallel, policies
from fpipe.autodiff.traced import Traced
from fpipe.effects import Backward
from fpipe.stages.microbatch import Microbatch
from fpipe.stages.stage import Batch, Stage, Target
from tests.support import expert_jobs
from tests.support.context_jobs import block, mse, params_of, text_of
from tests.support.replica_jobs import Grid

WIDTH = 4


def layer(params, x):
    """A collective in the middle, beside work that needs none."""
    gathered = parallel.all_gather(x.sin(), dist.group.WORLD)
    beside = (x @ params["w"]).cos()
    return (gathered.sum(0) * beside).sum(-1, keepdim=True) * beside


def twice(params, x):
    """One sum, twice; the first one is written to."""
    first, second = (parallel.all_reduce(x * params["w"][0], dist.group.WORLD) for _ in range(2))
    return first.relu_() + second * x


def unread(params, x):
    """A sum that nobody reads, as a peer's branch may."""
    parallel.all_reduce(x, dist.group.WORLD)
    return x @ params["w"]


def of_params(params, x):
    """A sum of parameters alone, which does not change in a step."""
    return x @ parallel.all_reduce(params["w"].tanh(), dist.group.WORLD)


STAGES = {"layer": layer, "twice": twice, "unread": unread, "of_params": of_params}


def arguments(rank):
    w = torch.arange(16.0).reshape(4, 4).sin()
    return w.requires_grad_(), (torch.arange(12.0).reshape(3, 4).cos() + rank).requires_grad_()


def traced(function, rank, **options):
    """Results and gradients by graphs, whole and split, beside those of eager autograd; and the functions."""
    piece = Traced(Stage(function, reads=(Batch(),)), fallback=False, argnums=frozenset({"params", "batch"}), **options)
    w, x = arguments(rank)
    runs = []
    for is_split in (False, True):
        prepared = piece.prepare({"w": w.detach()})
        (output, residuals, _) = piece.forward(prepared, None, {}, Microbatch(x.detach(), None), True)
        functions = residuals.functions
        cotangents = [y.detach().sin() for y in output.leaves]
        if is_split:
            gradients, deferred = piece.backward_input(residuals, cotangents)
            weights = piece.backward_weight(deferred)
        else:
            weights, gradients = piece.backward(residuals, cotangents)
        runs.append([output.leaves[0].detach(), *weights, *next(iter(gradients.values()))])
    y = function({"w": w}, x)
    expected = [y.detach(), *torch.autograd.grad(y, (w, x), y.detach().sin())]
    return runs, expected, functions


def graphs(rank):
    """By stage and policy: whether bits are eager's, the collectives of each piece, and the source of the forward."""
    outcomes = {}
    for name, function in STAGES.items():
        for policy in (policies.everything_saveable, policies.nothing_saveable):
            runs, expected, functions = traced(function, rank, policy=policy)
            equal = all(torch.equal(a, b) for run in runs for a, b in zip(run, expected, strict=True))
            counts = Counter((post.piece, post.text.split("(")[0]) for post in functions.collectives)
            outcomes[name, policy.__name__] = equal, dict(counts), functions.run.source
    return outcomes


def unmarked(rank):
    """As `graphs`, in a torch that takes no node for impure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.fx.Node, "is_impure", lambda node, impure_random=True: False)
        return graphs(rank)


def layer_counts(rank):
    """The collectives of each piece of layers of fpipe.parallel: attention, by gathering and round a ring; experts."""
    group, width = dist.group.WORLD, expert_jobs.WIDTH
    layers = {
        "gathered": (block(group), params_of(1)[0], torch.randn(2, 4, 8)),
        "ring": (block(group, ring=True), params_of(1)[0], torch.randn(2, 4, 8)),
        "experts": (
            lambda p, x: expert_jobs.block(p, x, 2, None, group)[0],
            expert_jobs.params_of(1, experts=2)[0] | {"router": torch.randn(width, 4)},
            torch.randn(2, 3, width),
        ),
    }
    counts = {}
    for name, (function, params, x) in layers.items():
        stage, argnums = Stage(function, reads=(Batch(),)), frozenset({"params", "batch"})
        piece = Traced(stage, fallback=False, policy=policies.nothing_saveable, argnums=argnums)
        _, residuals, _ = piece.forward(piece.prepare(params), None, {}, Microbatch(x, None), True)
        posts = residuals.functions.collectives
        counts[name] = dict(Counter((post.piece, post.text.split("(")[0]) for post in posts))
    return counts


def different(rank, which):
    """What every process raises where their collectives differ, and of a step after that."""
    group = dist.group.WORLD
    functions = {
        "order": lambda p, x: parallel.all_reduce(x, group) + (x if rank else parallel.all_reduce(x * p["w"], group)),
        "shape": lambda p, x: parallel.all_gather(x[: 1 + rank], group).sum() * x * p["w"],
        "backward": lambda p, x: parallel.all_reduce(x * p["w"] if rank else (x * p["w"]).detach(), group) + p["w"],
        "missing": lambda p, x: x * p["w"] if rank else parallel.all_reduce(x * p["w"], group),
        "equal": lambda p, x: parallel.all_reduce(x * p["w"], group),
    }
    mesh = Grid("pp1 cp2").mesh
    own = handlers.Local() if which == "local" else handlers.Distributed(mesh["pp"], replicas=mesh["cp"], timeout=30)
    outcomes = {}
    if rank:  # an equal program that only this process runs, with other shapes
        alone = fpipe.Pipeline([lambda p, x: x * p["w"]], loss=mse)
        plan, x = alone.plan(fpipe.Placement.loop(1), 2), torch.ones(8, WIDTH)
        fpipe.value_and_grad(alone, "gpipe", plan, handler=handlers.Local())({0: {"w": torch.ones(WIDTH)}}, x, x)
    for name, function in functions.items():
        pipeline = fpipe.Pipeline([function], loss=mse)
        plan = pipeline.plan(fpipe.Placement.loop(1), 2, replicas=1 if which == "local" else 2)
        step = fpipe.value_and_grad(pipeline, "gpipe", plan, handler=own)
        x = torch.ones(4, WIDTH)
        for _ in range(1 if name == "equal" else 1 << 14):  # a rank that waits for nobody is stopped in a later step
            outcomes[name] = text_of(lambda step=step, x=x: step({0: {"w": torch.ones(WIDTH)}}, x, x))
            if outcomes[name] is not None:
                break
    return outcomes


def contrast(p, x, target, gather):
    """The mean distance of rows to the sum of all replicas' rows, over those with a target."""
    y = x * p["w"]
    is_counted = ~target.isnan()
    distances = (y - gather(y.tanh()).sum(0)).square().sum(-1) - target.nan_to_num()
    return (distances * is_counted).sum() / is_counted.sum().clamp(min=1)


def weightless(rank):
    """Gradients of replicas whose last stage gathers over them, one without a microbatch's targets; and of autograd."""
    mesh = Grid("pp1 dp2").mesh
    own = handlers.Distributed(mesh["pp"], replicas=mesh["dp"], timeout=30)
    pipeline = fpipe.Pipeline(
        [
            fpipe.Stage(lambda p, x: x * p),
            fpipe.Stage(
                lambda p, x, target: contrast(p, x, target, lambda y: parallel.all_gather(y, mesh["dp"])),
                reads=(fpipe.Output(0), Target()),
            ),
        ],
        loss=None,
    )
    plan = pipeline.plan(fpipe.Placement.loop(1, chunks=2), 2, replicas=2)
    x = torch.arange(32.0).reshape(2, 4, WIDTH).sin()  # [replica, row, width]
    target = torch.arange(8.0).reshape(2, 4)
    target[1, 2:] = torch.nan
    count = lambda t: float((~t.isnan()).sum())  # noqa: E731
    params = {0: torch.ones(WIDTH), 1: {"w": torch.arange(1.0, WIDTH + 1)}}
    step = fpipe.value_and_grad(pipeline, "gpipe", plan, handler=own, weight=count)
    loss, grads = step(params, x[rank], target[rank])
    leaves = [params[0].clone().requires_grad_(), params[1]["w"].clone().requires_grad_()]
    expected = 0
    for rows in (slice(0, 2), slice(2, 4)):
        ys = torch.cat([(x[r, rows] * leaves[0] * leaves[1]).tanh() for r in range(2)])
        for r in range(2):
            part = contrast({"w": leaves[1]}, x[r, rows] * leaves[0], target[r, rows], lambda y, ys=ys: ys)
            expected = expected + part * count(target[r, rows]) / count(target)
    return (loss, grads[0], grads[1]["w"]), (expected.detach(), *torch.autograd.grad(expected, leaves))


def dropout(rank):
    """A layer cut by hand: dropout of what is whole, and of a part of the hidden layer; beside one process."""
    group, hidden = dist.group.WORLD, 8
    w = [torch.arange(4.0 * hidden).reshape(shape).sin() for shape in ((WIDTH, hidden), (hidden, WIDTH))]

    def layer(p, x, whole=False):
        x = F.dropout(x if whole else parallel.copy(x, group), 0.5)
        h = x @ p[0]
        mask = F.dropout(torch.ones(x.shape[0], hidden), 0.5)  # of the whole layer
        y = (h * (mask if whole else mask.chunk(2, 1)[rank])) @ p[1]
        return y if whole else parallel.all_reduce(y, group, replicated=True)

    outcomes = []
    for is_whole in (False, True):
        pipeline = fpipe.Pipeline([lambda p, x, is_whole=is_whole: layer(p, x, is_whole)], loss=mse)
        plan = pipeline.plan(fpipe.Placement.loop(1), 2)
        params = w if is_whole else [w[0].chunk(2, 1)[rank].clone(), w[1].chunk(2, 0)[rank].clone()]
        step = fpipe.value_and_grad(pipeline, "gpipe", plan, handler=handlers.Local())
        loss, grads = step({0: params}, torch.ones(4, WIDTH), torch.zeros(4, WIDTH), rng=(0, 1))
        outcomes.append((loss, *grads[0]))
    (loss, *grads), (expected, *wholes) = outcomes
    return (loss, *grads), (expected, wholes[0].chunk(2, 1)[rank], wholes[1].chunk(2, 0)[rank])


def refusals(rank):
    """What a stage with collectives can't be: by its name."""
    group = dist.group.WORLD

    def branches(params, x):
        return parallel.all_reduce(x * params["w"], group) if x.sum() > 0 else x

    def after(params, x):
        y = parallel.all_reduce(x * params["w"], group)
        return y if y.sum() > 0 else x

    def in_place(params, x):
        y = x * params["w"]
        dist.all_reduce(y)
        return y

    def plain(params, x):
        return parallel.all_reduce(x * params["w"], group)

    cases = {
        "branches": (branches, {}),
        "after": (after, {}),
        "in_place": (in_place, {}),
        "eager": (plain, {"autodiff": "eager"}),
        "compile": (plain, {"compile": True}),
        "capture": (plain, {"capture": True}),
        "pieces": (plain, {"capture": "pieces"}),
    }
    outcomes = {}
    for name, (function, options) in cases.items():
        pipeline = fpipe.Pipeline([function], loss=mse)
        plan = pipeline.plan(fpipe.Placement.loop(1), 1)
        x, params = torch.ones(2, WIDTH), {0: {"w": torch.ones(WIDTH)}}

        def run(pipeline=pipeline, plan=plan, options=options, x=x, params=params):
            step = fpipe.value_and_grad(pipeline, "gpipe", plan, handler=handlers.Local(), **options)
            for _ in range(4):
                step(params, x, x)

        outcomes[name] = text_of(run)
    return outcomes


def lose(rank, how):
    """The error of a rank whose peer in a collective goes, and how long it waited, after a step that went well."""
    mesh = Grid("pp1 cp2").mesh
    limit = 6 if how == "stopped" else 20  # a rank that ends is known at once
    own = handlers.Distributed(mesh["pp"], replicas=mesh["cp"], timeout=limit)
    steps = []

    class Going(handlers.Observer):
        def begin(self, rank_, effect):
            if len(steps) == 1 and rank == 1 and isinstance(effect, Backward):
                if how == "raises":
                    raise RuntimeError("out of luck")
                os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)

    def stage(params, x):
        return parallel.all_reduce(x * params["w"], mesh["cp"])

    pipeline = fpipe.Pipeline([stage], loss=mse)
    plan = pipeline.plan(fpipe.Placement.loop(1), 1, replicas=2)
    step = fpipe.value_and_grad(pipeline, "gpipe", plan, handler=own, observe=Going())
    x, params = torch.ones(2, WIDTH), {0: {"w": torch.ones(WIDTH)}}
    steps.append(step(params, x, x))
    began = time.monotonic()
    first = text_of(lambda: step(params, x, x))
    return first, time.monotonic() - began, text_of(lambda: step(params, x, x))
