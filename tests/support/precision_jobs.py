"""A small language model in several precisions, and steps of it on the ranks of a pool or in one process."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import optree
import torch
import torch.nn.functional as F

import fpipe
from fpipe import Pipeline, Placement, Precision, handlers, interop
from fpipe.stages.sharding import local
from fpipe.training.norms import SharedSquares
from tests.support import cases, replica_jobs
from tests.support.jobs import differences, expected_on, handler
from tests.support.shards import whole

ROWS, LENGTH, WIDTH, TOKENS = 8, 3, 4, 7
STAGES = {"gpipe": 2, "zb_v": 4, "dualpipe": 2, "interleaved_1f1b": 4}


def block(p, h):
    normed = F.layer_norm(h, (WIDTH,), p["scale"])
    return h + F.softmax(normed @ p["up"], -1) @ p["down"]


def first(p, tokens):
    return block(p, p["wte"][tokens])


def last(p, h):
    """Its head is float32 under autocast too: only a backward under autocast would compute in bfloat16."""
    h = block(p, h)
    with torch.autocast("cpu", enabled=False):
        return h.float() @ p["head"].float().T


def nll(logits, target):
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def model(stages, tied=True, wrap=lambda fn: fn):
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    params = {s: {"up": randn(WIDTH, 8), "down": randn(8, WIDTH), "scale": randn(WIDTH)} for s in range(stages)}
    params[0]["wte"] = randn(TOKENS, WIDTH)
    if not tied:
        params[stages - 1]["head"] = randn(TOKENS, WIDTH)
    ties = {(stages - 1, "head"): (0, "wte")} if tied else None
    tokens = torch.randint(0, TOKENS, (2, ROWS, LENGTH), generator=generator)
    return Pipeline([*map(wrap, (first, *[block] * (stages - 2), last))], nll, ties=ties), params, tokens[0], tokens[1]


def autocasting(fn):
    def stage(p, x):
        with torch.autocast("cpu", torch.bfloat16):
            return fn(p, x)

    return stage


def cast(tree, dtype):
    return optree.tree_map(lambda x: x.to(dtype) if x.is_floating_point() else x, tree, namespace="fpipe")


MODES = {
    "autocast inside": {},
    "autocast around": {},
    "compute": {"precision": Precision(compute=torch.bfloat16)},
    "bfloat16 params": {},
    "float16": {"precision": Precision(compute=torch.float16)},
}


def prepared(mode, stages, tied=True):
    """(pipeline, params, batch, target, context of a call, arguments of a call) of a mode."""
    wrap = {"wrap": autocasting} if mode == "autocast inside" else {}
    pipeline, params, batch, target = model(stages, tied, **wrap)
    if mode == "bfloat16 params":
        params = cast(params, torch.bfloat16)
    context = torch.autocast("cpu", torch.bfloat16) if mode == "autocast around" else nullcontext()
    arguments = {"loss_scale": fpipe.LossScale(2.0**10)} if mode == "float16" else {}
    return pipeline, params, batch, target, context, arguments


def made(mode, schedule, own, microbatches=4, ranks=2, replicas=1, **options):
    """A step of a mode as a function of the params alone, its pipeline, its plan, and all params."""
    generator, place = cases.SCHEDULES[schedule]
    placement = place(ranks)
    pipeline, params, batch, target, context, arguments = prepared(mode, placement.stages)
    plan = pipeline.plan(placement, microbatches, replicas=replicas)
    step = fpipe.value_and_grad(pipeline, generator, plan, handler=own, **MODES[mode], **options)

    def call(params):
        with context:
            return step(params, batch, target, **arguments)

    return call, pipeline, plan, params


def compare(own, mode, schedule, rank=None, **options):
    """Where three steps, of which a captured one replays the last, differ from the reference's."""
    reference, *_ = made(mode, schedule, handlers.Reference(), replicas=options.get("replicas", 1))
    step, pipeline, plan, params = made(mode, schedule, own, **options)
    expected = reference(params)
    if rank is not None:
        params = pipeline.params_on(params, plan, rank)
        expected = expected_on(expected, params, plan, rank, False)
    return [at for _ in range(3) for at in differences(step(params), expected)]


def compare_ranks(rank, schedule, modes):
    """The same on the ranks of a pool; each mode with the handler of all jobs."""
    return [(mode, compare(handler(), mode, schedule, rank, **options)) for mode, options in modes]


def disagree(rank):
    """The errors of ranks of which one is under autocast, or has a loss scale, or another; then a step of both."""
    texts = []
    _, pipeline, plan, params = made("compute", "gpipe", handler())
    _, _, batch, target, _, _ = prepared("compute", 2)
    run = fpipe.value_and_grad(pipeline, fpipe.schedules.gpipe, plan, handler=handler())
    params = pipeline.params_on(params, plan, rank)
    for context, scale in (
        (torch.autocast("cpu", torch.bfloat16, enabled=rank == 1), None),
        (nullcontext(), fpipe.LossScale() if rank else None),
        (nullcontext(), fpipe.LossScale(2.0 + rank)),
    ):
        with context:
            texts.append(_error(partial(run, params, batch, target, loss_scale=scale)))
    checks = fpipe.value_and_grad(pipeline, "gpipe", plan, handler=handler(), check_finite=rank == 1)
    texts.append(_error(partial(checks, params, batch, target)))
    sgd = interop.optimizer(torch.optim.SGD, lr=0.1)
    for options in (
        {"max_norm": torch.tensor(1.0) if rank else None, "check_finite": "skip"},
        {"check_finite": "skip" if rank else "raise"},
    ):
        train = fpipe.train_step(pipeline, "gpipe", plan, sgd, handler=handler(), **options)
        texts.append(_error(partial(train, params, sgd.init(params), batch, target)))
    captured = fpipe.value_and_grad(pipeline, fpipe.schedules.gpipe, plan, handler=handler(), capture=True)
    losses = [captured(params, batch, target, loss_scale=fpipe.LossScale(2.0 + i * rank))[0] for i in (0, 0, 0, 1, 0)]
    try:  # where the host does not read the loss, this is what compares them
        SharedSquares(lambda _: torch.zeros(2), None, fpipe.LossScale(2.0 + rank)).everywhere({}, handler())
    except fpipe.TransportError as error:
        texts.append(str(error))
    loss, _ = run(params, batch, target)
    return texts, [bool(loss.isfinite()) for loss in (*losses, loss)]


def overflowing(own, schedule, rank=None, **options):
    """Steps of `train_step` and of its parts by hand, of which the third overflows: where they differ, and the scales.

    The parts donate nothing. A step that is skipped must leave params and optimizer state as they were.
    """
    generator, place = cases.SCHEDULES[schedule]
    pipeline, params, batch, target, _, _ = prepared("float16", place(2).stages)
    plan = pipeline.plan(place(2), 4)
    params = params if rank is None else pipeline.params_on(params, plan, rank)
    factors = {"lr": 0.1, "fused": True, "capturable": bool(options.get("capture"))}
    precision = MODES["float16"]
    pairs = [interop.optimizer(torch.optim.Adam, donate=donate, **factors) for donate in (True, False)]
    step = fpipe.train_step(pipeline, generator, plan, pairs[0], handler=own, max_norm=1.0, **precision, **options)
    differentiate = fpipe.value_and_grad(pipeline, generator, plan, handler=own, **precision)
    scale = fpipe.LossScale(2.0**10, growth_interval=2)
    ours = cloned(params), pairs[0].init(params), scale
    theirs = params, pairs[1].init(params), scale
    wrong, scales = [], []
    for i in range(6):
        if i == 3:  # larger than float16 has
            ours, theirs = ((*each[:2], fpipe.LossScale(2.0**40, growth_interval=2)) for each in (ours, theirs))
        before = cloned(ours[:2])
        new_params, state, loss, norm, following = step(*ours[:2], batch, target, loss_scale=ours[2])
        ours = new_params, state, following
        expected_loss, grads = differentiate(theirs[0], batch, target, loss_scale=theirs[2])
        clipped, expected_norm = fpipe.clip_by_global_norm(grads, 1.0, plan, handler=own)
        finite = expected_norm.isfinite()
        taken = pairs[1].update(clipped, theirs[1], theirs[0]) if finite else theirs[:2]
        theirs = (*taken, theirs[2].adjust(finite))
        wrong += [(i, *at) for at in differences((*ours, loss, norm), (*theirs, expected_loss, expected_norm))]
        if not finite:
            wrong += [(i, "skipped", *at) for at in differences(ours[:2], before)]
        scales.append(ours[2].value.item())
    return wrong, scales


def cloned(tree):
    return optree.tree_map(torch.clone, tree, namespace="fpipe")


def overflowing_ranks(rank, schedule, captures):
    return [overflowing(handler(), schedule, rank, **options) for options in captures]


def check_finite(own, rank=None, replicas=1, **options):
    """What steps raise or leave out if the third microbatch's loss is not finite, or the gradients of the second."""
    pipeline = Pipeline(
        [lambda p, x: x * p["w"], lambda p, x: (x * p["v"]).sqrt()], lambda y, t: (y * t).mean(), ties={}
    )
    plan = pipeline.plan(Placement.loop(2), 4 // replicas, replicas=replicas)
    every = {0: {"w": torch.ones(2)}, 1: {"v": torch.ones(2)}}
    params = every if rank is None else pipeline.params_on(every, plan, rank)
    sgd = interop.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, donate=True)
    generator = cases.SCHEDULES["gpipe"][0]
    step = fpipe.value_and_grad(pipeline, generator, plan, handler=own, check_finite=True, **options)
    trains = [
        fpipe.train_step(pipeline, generator, plan, sgd, handler=own, check_finite=check, **options)
        for check in ("raise", "skip")
    ]
    good, nan, zero = torch.ones(8, 2), torch.ones(8, 2), torch.ones(8, 2)
    nan[5], zero[2] = torch.nan, 0.0
    target, texts, wrong = torch.ones(8, 2), [], []
    run = fpipe.evaluate(pipeline, plan, handler=own, loss=True, check_finite=True)
    for call in (step, run):
        for batch in (good, nan, zero, good, good, nan):
            texts.append(_error(lambda call=call, batch=batch: call(params, batch, target)))
    for which, train in zip(("raise", "skip"), trains, strict=True):
        own_params = cloned(params)
        state = sgd.init(own_params)
        for batch in (good, good, nan, zero, good):
            before = cloned((own_params, state))
            text = ""
            try:
                own_params, state, _, *finite = train(own_params, state, batch, target)
            except fpipe.NonFiniteError as error:
                text, finite = f"{error.microbatch} {error.stages}", []
            if batch is good:
                wrong += [] if differences(own_params, before[0]) else [(which, "not updated")]
            else:
                wrong += [(which, *at) for at in differences((own_params, state), before)]
            texts.append(text or [bool(x) for x in finite])
    return texts, wrong


def _error(call):
    try:
        call()
    except fpipe.StageError as error:
        return str(error).partition(". Find")[0]
    return ""


def check_finite_ranks(rank, options):
    return [check_finite(handler(), rank, **each) for each in options]


def sharded(rank, grid, mode):
    """Where steps over sharded params differ from those of one process; the third overflows. Then a NaN in one replica.

    With "bfloat16 params" the optimizer keeps masters, and nothing overflows.
    """
    pipeline, params, batch, target, _, _ = prepared(mode, 2)
    plan = pipeline.plan(Placement.loop(1, chunks=2), 2, replicas=2)
    master = torch.float32 if mode == "bfloat16 params" else None
    adamw = interop.optimizer(torch.optim.AdamW, lr=0.1, master=master)
    own = replica_jobs.handler(grid)
    schedule, options = cases.SCHEDULES["looped_bfs"][0], {"max_norm": 1.0, "check_finite": "skip", **MODES[mode]}
    step = fpipe.train_step(pipeline, schedule, plan, adamw, handler=own, resident=1, **options)
    alone = fpipe.train_step(pipeline, schedule, plan, adamw, handler=handlers.Local(), **options)
    half = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
    placed = interop.fsdp(params, grid.over)
    ours, theirs, wrong, taken = (placed, adamw.init(placed)), (params, adamw.init(params)), [], []
    for i in range(4):
        arguments = {} if master else {"loss_scale": fpipe.LossScale(2.0 ** (40 if i == 2 else 8))}
        *ours, loss, _, is_taken = step(*ours, batch[half], target[half], **arguments)[:5]
        *theirs, expected, _, _ = alone(*theirs, batch, target, **arguments)[:5]
        wrong += [(i, *at) for at in differences((*whole(tuple(ours)), loss), (*theirs, expected))]
        taken.append(bool(is_taken))
    checked = fpipe.value_and_grad(pipeline, schedule, plan, handler=own, resident=1, check_finite=True)
    if rank:  # a NaN in its shard
        local(ours[0][1]["up"])[0] = torch.nan
    return wrong, taken, _error(lambda: checked(ours[0], batch[half], target[half]))
