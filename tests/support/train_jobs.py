"""Training steps as one function and as their parts, on the ranks of a pool or in one process."""

from __future__ import annotations

import copy

import optree
import torch

import fpipe
from fpipe import interop
from tests.support import cases
from tests.support.jobs import differences, handler
from tests.support.sharing import sharing

OPTIMIZERS = {
    "sgd": lambda donate: interop.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, donate=donate),
    "adamw": lambda donate: interop.optimizer(torch.optim.AdamW, lr=0.1, donate=donate),
    "fused": lambda donate: interop.optimizer(torch.optim.Adam, lr=0.1, fused=True, donate=donate),
    "capturable": lambda donate: interop.optimizer(
        torch.optim.Adam, lr=0.1, fused=True, capturable=True, donate=donate
    ),
}


def train(rank, name, schedule, microbatches, ranks, optimizer, donate, max_norm, **options):
    """Steps of `train_step` on this rank against its parts: where the results differ."""
    case, generator, plan = cases.make(name, schedule, ranks, microbatches, cases.rows(microbatches))
    return compare(sharing(handler(), name), case, generator, plan, rank, optimizer, donate, max_norm, **options)


def train_early(*arguments):
    """The same, with updates before the norm is known."""
    return train(*arguments, post_validate=True)


def train_captured(rank, name, schedule, microbatches, ranks, optimizer, donate, max_norm=None):
    """The same, captured."""
    case, generator, plan = cases.make(name, schedule, ranks, microbatches, cases.rows(microbatches))
    own = sharing(handler(), name, plan.stages)
    return compare(own, case, generator, plan, rank, optimizer, donate, max_norm, capture=True)


def failing_update(rank, at, how):
    """Steps of which the update fails on rank 1, in a call that runs its code: errors, and the params at the end."""
    pipeline = fpipe.Pipeline([lambda p, x: x * p["w"]] * 2, loss=lambda y, t: y.sum())
    plan = pipeline.plan(fpipe.Placement.loop(2), 2)
    sgd = interop.optimizer(torch.optim.SGD, lr=0.1, donate=True)
    calls = []

    def update(grads, state, params, **options):
        calls.append(0)
        results = sgd.update(grads, state, params, **options)
        if rank == 1 and len(calls) == at + 1:
            FAILURES[how](params[1]["w"])
        return results

    own = fpipe.handlers.Distributed(timeout=10)
    step = fpipe.train_step(
        pipeline, fpipe.schedules.gpipe, plan, (sgd.init, update), handler=own, capture=True, max_norm=1.0
    )
    params, texts = {rank: {"w": torch.tensor(2.0)}}, []
    state = sgd.init(params)
    for _ in range(3):
        before = params[rank]["w"].item()
        try:
            params, state, *_ = step(params, state, torch.ones(4))
            texts.append("")
        except (fpipe.StageError, fpipe.TransportError, ZeroDivisionError) as error:
            texts.append(f"{type(error).__name__}: {error}")
            return texts, params[rank]["w"].item() == before
    return texts, False


FAILURES = {"raises": lambda w: 1 / 0, "reads the host": lambda w: w.item()}


def compare(own, case, generator, plan, rank, optimizer, donate, max_norm, **options):
    """Five steps, of which a captured one replays three."""
    params, batch, target, state = cases.own(case, plan, rank) if rank is not None else whole(case)
    pair = OPTIMIZERS[optimizer](donate)
    options = {**case.options, **options}
    step = fpipe.train_step(case.pipeline, generator, plan, pair, handler=own, max_norm=max_norm, **options)
    apart = by_parts(case, generator, plan, own, optimizer, max_norm)
    ours, theirs = (copy.deepcopy((params, pair.init(params), state)) for _ in range(2))
    device, found = optree.tree_leaves(params, namespace="fpipe")[0].device, []
    for i in range(5):
        rng = case.rng and (case.rng[0], i)
        lr = 0.1 / (1 + i // 4) if optimizer in ("sgd", "adamw") else torch.tensor(0.1 / (i + 1), device=device)
        results = step(*ours[:2], batch, target, state=ours[2], rng=rng, lr=lr)
        expected = apart(*theirs[:2], batch, target, theirs[2], rng, lr)
        found += [(i, *path) for path in differences(results, expected)]
        ours, theirs = [(*r[:2], r[-1] if state is not None else None) for r in (results, expected)]
    return found


def whole(case):
    return case.params, case.batch, case.target, case.state


def by_parts(case, generator, plan, own, optimizer, max_norm):
    """A step that calls value_and_grad, clip_by_global_norm and update itself, and donates nothing."""
    differentiate = fpipe.value_and_grad(case.pipeline, generator, plan, handler=own, **case.options)
    update = OPTIMIZERS[optimizer](donate=False).update

    def step(params, opt_state, batch, target, state, rng, lr):
        loss, grads, *new_state = differentiate(params, batch, target, state=state, rng=rng)
        norm = []
        if max_norm is not None:
            grads, *norm = fpipe.clip_by_global_norm(grads, max_norm, plan, handler=own)
        return *update(grads, opt_state, params, lr=lr), loss, *norm, *new_state

    return step
