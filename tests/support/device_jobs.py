"""Jobs of the ranks of a pool, and of a process alone, on a kind of device, "cpu" or "cuda".

Each returns the places where a result differs in bits from the reference's on the same device.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace

import optree
import torch

import fpipe
from fpipe import Pipeline, Placement, handlers, interop
from tests.support import cases, jobs

SMALLEST_ALONE = 1 << 14  # elements of four bytes, beyond which a tensor travels in a message of its own
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
MODES = ("plain", "autocast", "bfloat16", "side stream", "eager", "dynamic", "sum")


def dtypes(rank, kind):
    """Tensors of every type from stage to stage, two elements of each in one message, and many in one each."""
    device = jobs.place(rank, kind)
    pipeline = Pipeline([lambda p, x: {str(d): (_as(x, d), _as(x[:, :2], d)) for d in DTYPES}, lambda p, v: v])
    plan, x = pipeline.plan(Placement.loop(2), 1), torch.arange(2.0 * SMALLEST_ALONE, device=device).view(2, -1)
    params = {0: {}, 1: {}}
    expected = fpipe.evaluate(pipeline, plan, handler=handlers.Reference(), out_axes=None)(params, x)
    run = fpipe.evaluate(pipeline, plan, handler=jobs.handler(kind), gather=True, out_axes=None)
    return [d for _ in range(2) for d in jobs.differences(run({rank: {}}, x if rank == 0 else None), expected)]


def _as(x, dtype):
    return (x % 100).to(dtype)


def in_mode(handler, rank, device, mode, schedule="one_f_one_b", ranks=2):
    """Two steps of a small transformer in one of `MODES`; all ranks in this process if `rank` is None."""
    case, generator, plan = cases.make("attention", schedule, ranks, 4)
    case, options = cases.on_device(case, device), {}
    if mode == "bfloat16":
        case = replace(case, params=optree.tree_map(torch.Tensor.bfloat16, case.params))
    if mode in ("eager", "dynamic", "sum"):
        options = {"eager": {"autodiff": "eager"}, "dynamic": {"dynamic": True}, "sum": {"reduction": "sum"}}[mode]
    case = replace(case, options=options)
    with _mode(mode, device):
        arguments = case.params, case.batch, case.target
        reference = replace(case, options={k: v for k, v in options.items() if k == "reduction"})
        expected = cases.reference(reference, generator, plan)
        if rank is not None:
            arguments = cases.own(case, plan, rank)[:3]
            expected = jobs.expected_on(expected, arguments[0], plan, rank, False)
        step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handler, **options)
        return [d for _ in range(2) for d in jobs.differences(step(*arguments), expected)]


@contextlib.contextmanager
def _mode(mode, device):
    with contextlib.ExitStack() as stack:
        if mode == "autocast":
            stack.enter_context(torch.autocast(device.type, torch.bfloat16))
        if mode == "side stream" and device.type == "cuda":
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            stack.enter_context(torch.cuda.stream(stream))
            stack.callback(lambda: torch.cuda.current_stream(device).wait_stream(stream))
        yield


def captured(name, schedule, device, capture=True):
    """Four steps of one process, of which two replay a graph."""
    case, generator, plan = cases.make(name, schedule, 2, 4, cases.rows(4))
    case, expected = cases.on_device(case, device), cases.oracle(name, plan, device)
    handler = handlers.Local([device] * plan.ranks)
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handler, capture=capture, **case.options)
    results = [step(case.params, case.batch, case.target, state=case.state, rng=case.rng) for _ in range(4)]
    return [(i, *at) for i, result in enumerate(results) for at in jobs.differences(result, expected)]


def captured_pair(handler, stages):
    """A step of a pipeline of two stages that is not captured, and one that is."""
    pipeline = Pipeline(stages, loss=lambda y, t: y.square().mean())
    plan = pipeline.plan(Placement.loop(2), 2)
    return [
        fpipe.value_and_grad(pipeline, fpipe.schedules.one_f_one_b, plan, handler=handler, capture=c)
        for c in (False, True)
    ]


def captured_without_gradients(rank, kind):
    """The first output has a part that is not differentiable in all microbatches, by the number of rows."""
    device = jobs.place(rank, kind)

    def last(p, v):
        return (v[0] + v[1] if len(v[0]) > 1 else v[0]) * p

    plain, step = captured_pair(jobs.handler(kind), [lambda p, x: (x * p, torch.sqrt(x * p)), last])
    places, params = [], {rank: torch.tensor(1.5, device=device)}
    for i, rows in enumerate([3, 3, 3, 4, 4, 3, 4, 2, 2, 2]):
        x = torch.arange(1.0, rows + 1, device=device) + i
        places += [(i, *at) for at in jobs.differences(step(params, x), plain(params, x))]
    return places


def captured_without_tensors(rank, kind):
    """A rank that is given no tensor at all; with a norm, to which it adds nothing."""
    device = jobs.place(rank, kind)
    pipeline = Pipeline([lambda p, x: x * p, lambda p, x: x * 2], loss=lambda y, t: y.square().mean())
    plan, sgd = pipeline.plan(Placement.loop(2), 2), interop.optimizer(torch.optim.SGD, lr=0.1)
    plain, step = (
        fpipe.train_step(
            pipeline, fpipe.schedules.gpipe, plan, sgd, handler=jobs.handler(kind), max_norm=0.1, capture=c
        )
        for c in (False, True)
    )
    params, places = {rank: [torch.tensor(1.5, device=device), {}][rank]}, []
    x = torch.arange(4.0, device=device) if rank == 0 else None
    for i in range(4):
        found, expected = (each(params, sgd.init(params), x) for each in (step, plain))
        places += [(i, *at) for at in jobs.differences(found, expected)]
    return places


def captured_in_turn(rank, kind):
    """Two captured steps of one handler, one after the other and back."""
    device = jobs.place(rank, kind)
    pairs = [captured_pair(jobs.handler(kind), [lambda p, x, f=f: f(x * p)] * 2) for f in (torch.tanh, torch.sin)]
    params, places = {rank: torch.tensor(1.5, device=device)}, []
    for i in range(10):
        plain, step = pairs[i % 3 % 2]
        x = torch.arange(4.0, device=device) + i
        places += [(i, *at) for at in jobs.differences(step(params, x), plain(params, x))]
    return places


def captured_on_streams(rank, kind):
    """Steps on other streams in turn, which the caller does not order: their arguments are there before."""
    device = jobs.place(rank, kind)
    plain, step = captured_pair(jobs.handler(kind), [lambda p, x: torch.tanh(x * p)] * 2)
    params = {rank: torch.tensor(1.5, device=device)}
    batches = [torch.arange(4.0, device=device) + i for i in range(8)]
    expected = [plain(params, x) for x in batches]
    streams = [contextlib.nullcontext()] * 2
    if kind == "cuda":
        streams = [torch.cuda.stream(torch.cuda.Stream(device)) for _ in range(2)]
        torch.cuda.synchronize()
    results = []
    for i, x in enumerate(batches):
        with streams[i // 3 % 2]:
            results.append(step(params, x))
    if kind == "cuda":
        torch.cuda.synchronize()
    return jobs.differences(results, expected)


def captured_failure(rank, kind):
    """Rank 1 fails where it would replay a graph, while rank 0 replays one: its error, and whether it came in time."""
    device = jobs.place(rank, kind)
    _, step = captured_pair(handlers.Distributed(timeout=20, device=device), [lambda p, x: x * p] * 2)
    params, x = {rank: torch.tensor(1.5, device=device)}, torch.arange(4.0, device=device)
    for _ in range(4):
        step(params, x)
    if rank == 1:
        (graph,) = step.captured.captured.graphs.values()
        graph.graph.replay = lambda seeds: 1 / 0
    begin, text = time.monotonic(), ""
    try:
        for _ in range(3):  # on a GPU the error is the next step's, or that of the one after it
            step(params, x)[0].item()
    except (fpipe.TransportError, ZeroDivisionError) as error:
        text = f"{type(error).__name__}: {error}"
    return text, time.monotonic() - begin < 15


def train_in_mode(rank, mode, kind):
    device = jobs.place(rank, kind)
    return in_mode(jobs.handler(kind), rank, device, mode)


def norm_and_checkpoint(rank, folder, kind):
    """The norm, clipped gradients, and a training state that was saved and loaded again."""
    device = jobs.place(rank, kind)
    case, generator, plan = cases.make("linear", "one_f_one_b", 2, 4)
    case, handler = cases.on_device(case, device), jobs.handler(kind)
    params, batch, target, _ = cases.own(case, plan, rank)
    _, whole = cases.reference(case, generator, plan)
    norm = fpipe.global_norm(whole, plan, handler=handlers.Local())
    clipped, _ = fpipe.clip_by_global_norm(whole, 0.1, plan, handler=handlers.Local())
    _, grads = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handler)(params, batch, target)
    places = jobs.differences(fpipe.global_norm(grads, plan, handler=handler), norm)
    places += jobs.differences(fpipe.clip_by_global_norm(grads, 0.1, plan, handler=handler)[0], {rank: clipped[rank]})
    adamw = interop.optimizer(torch.optim.AdamW, lr=0.1)
    params, optimizer = adamw.update(grads, adamw.init(params), params)
    checkpoints = interop.Checkpoints(folder, case.pipeline, plan, handler=handler)
    checkpoints.save(params=params, optimizer=optimizer, step=1)
    loaded = checkpoints.load(params=params, optimizer=optimizer, step=0)
    return places + jobs.differences(loaded, {"params": params, "optimizer": optimizer, "step": 1})
