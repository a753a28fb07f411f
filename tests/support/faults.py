"""A small training step that goes wrong in one of many ways."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

import fpipe
from fpipe import Pipeline, Placement, handlers, schedules
from fpipe.handlers.distributed.lifeline import Lifeline
from fpipe.training import verbs
from tests.support.cases import mse
from tests.support.combinations import few
from tests.support.programs import circle

FAULTS = {
    "wrong tree": r"rank 1, stage 1, microbatch 0: Forward raised KeyError: 'w'",
    "missing stage": r"rank 1, stage 1: params has no entry for it, only for stages",
    "foreign stage": r"rank 1: params has entries for stages \[9\], but this process holds only",
    "short batch": r"batch \(float32\[3, 4\]\) has 3 rows on axis 0: too few for 4 microbatches",
    "raises": r"rank 1, stage 1, microbatch 3: Forward raised ArithmeticError: the last",
    "misfit": r"rank 2, stage 2, microbatch 0: Forward raised RuntimeError: .*\(stage 1 gave it float32\[2, 3\]\)",
    "unregistered": r"rank 1, stage 1, microbatch 0: its output\['odd'\] is a tests.support.faults.Odd, which can't go",
    "raises at once": r"rank 0, stage 0, microbatch 0: Forward raised ArithmeticError: at once",
    "bad weight": r"rank 2: KeyError: 'weight'",
    "loss dtype": r"rank 2, stage 2: the loss is torch.float64, where equal inputs gave torch.float32 before",
    "aux": r"rank 2, stage 2: the outputs can't be merged: the plain value at \['note'\] differs between microbatches",
    "killed": r"rank 1 did not give a reason: did its script end, or was its process killed",
    "world size": "",
}
"""What goes wrong -> what is said of it, on every rank."""

SHORT = ("raises", "killed", "slow", "stopped", "aux")
"""What goes wrong when a microbatch has one row, as the last has in the third step."""
COUNTING = ("loss dtype",)
"""What goes wrong by the number of calls, which graphs don't make."""
GUILTY = {"short batch": 0, "misfit": 2, "raises at once": 0, "bad weight": 2, "aux": 2, "loss dtype": 2}


class Odd:
    pass


def layer(p, x):
    return torch.tanh((x["h"] if isinstance(x, dict) else x) @ p["w"])


def ways(*faults):
    """Each with every way to differentiate under which it can happen; by default with one, in turn."""
    each = [(f, way) for f in faults for way in ("graph", "eager") if way == "eager" or f not in COUNTING]
    return few(each, dict(sorted(each, key=lambda pair: faults.index(pair[0]) % 2 == (pair[1] == "eager"))).items())


def step(fault, ranks, handler, rank=None, autodiff="eager", observe=None):
    """A function that trains three steps; a wrong argument or an accident comes with the third."""
    calls = 0

    def guilty(p, x):
        if fault == "raises" and len(x) == 1:
            raise ArithmeticError("the last")
        if fault == "killed" and len(x) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "slow" and len(x) == 1:
            time.sleep(3)  # for longer than the handler waits
        if fault == "stopped" and len(x) == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        out = layer(p, x)
        if fault == "misfit":
            return out[:, :3]
        if fault == "unregistered":
            return {"h": out, "odd": Odd()}
        return out

    def first(p, x):
        if fault == "raises at once":
            raise ArithmeticError("at once")
        return layer(p, x)

    def weight(target):
        raise KeyError("weight")

    def loss(output, target):
        nonlocal calls
        calls += 1
        if fault == "loss dtype":
            return mse(output, target).to(torch.float64 if calls > 4 else torch.float32)
        return mse(output, target), {"note": f"{len(output)} rows"}

    options = {"bad weight": {"weight": weight}, "aux": {"has_aux": True}}.get(fault, {})
    torch.manual_seed(0)
    params = {s: {"w": torch.randn(4, 4)} for s in range(ranks)}
    pipeline = Pipeline([first, guilty, *[layer] * (ranks - 2)], loss if fault in ("aux", "loss dtype") else mse)
    plan = pipeline.plan(Placement.loop(ranks), 4)
    options = {"handler": handler, "autodiff": autodiff, "observe": observe, **options}
    one = fpipe.value_and_grad(pipeline, schedules.one_f_one_b, plan, **options)
    own = dict(params) if rank is None else pipeline.params_on(params, plan, rank)
    x, y = torch.randn(8, 4), torch.randn(8, 4)

    def run(wrong=True):
        for i in range(3):
            given, batch, target = dict(own), x, y
            if wrong and i == 2 and fault in SHORT:
                batch, target = x[:7], y[:7]
            if wrong and i == 2 and (rank is None or rank == GUILTY.get(fault, 1)):
                if fault == "missing stage":
                    del given[1]
                if fault == "wrong tree":
                    given[1] = {"v": given[1]["w"]}
                if fault == "foreign stage":
                    given[9] = {}
                if fault == "absent":
                    time.sleep(4)
                if fault == "short batch":
                    batch = x[:3]
            total, _ = one(given, batch, target)
        return total.item()

    return run


def run(rank, ranks, fault, autodiff="eager", timeout=60.0, compute_timeout=60.0):
    own = handlers.Distributed(timeout=timeout, compute_timeout=compute_timeout)
    return step(fault, ranks, own, rank, autodiff)()


def recorded(rank, ranks, fault, logdir):
    """Three steps, of which a recorder captures the second."""
    own = handlers.Distributed(timeout=60.0)
    with fpipe.tensorboard.Recorder(logdir, steps=[1]) as recorder:
        return step(fault, ranks, own, rank, observe=recorder)()


def deadlocked(rank, ranks, logdir):
    """A step whose programs are not verified before they run, as where a handler is called without the verbs."""
    own = handlers.Distributed(timeout=2.0)
    params = {rank: {"w": torch.ones(4, 4)}}
    pipeline = Pipeline([layer] * ranks, mse)
    with fpipe.tensorboard.Recorder(logdir) as recorder:
        plan = pipeline.plan(Placement.loop(ranks), 2)
        with mock.patch.object(verbs, "check"):
            step = fpipe.value_and_grad(pipeline, circle, plan, handler=own, observe=recorder)
        step(params, torch.ones(2, 4), torch.ones(2, 4))


def recover(rank, ranks, fault, autodiff):
    """(loss of the steps after a refused one, the error before)."""
    again = step(fault, ranks, handlers.Distributed(timeout=30), rank, autodiff)
    error = ""
    try:
        again()
    except (fpipe.StageError, fpipe.TransportError) as caught:
        error = type(caught).__name__
    return again(wrong=False), error


def twice(rank, ranks):
    again = step("killed", ranks, handlers.Distributed(timeout=30), rank)
    with contextlib.suppress(fpipe.StageError, fpipe.TransportError):
        again()
    try:
        again()
    except fpipe.TransportError as error:
        return str(error)
    return "no error"


def different_programs(rank):
    pipeline = Pipeline([layer] * 2, mse)
    plan = pipeline.plan(Placement.loop(2), 2)
    schedule = schedules.gpipe if rank else schedules.one_f_one_b
    fpipe.value_and_grad(pipeline, schedule, plan, handler=handlers.Distributed(timeout=10))


def refused_twice(rank):
    """Two programs on one handler, each refused once: what the ranks are told of either."""
    own = handlers.Distributed(timeout=10)
    pipeline = Pipeline([layer] * 2, mse)
    plan = pipeline.plan(Placement.loop(2), 4)
    params = {rank: {"w": torch.eye(4)}}
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=own)
    evaluate = fpipe.evaluate(pipeline, plan, handler=own)
    told = []
    for rows, run in ((3, step), (2, evaluate)):
        x = torch.ones(rows if rank == 0 else 8, 4)
        try:
            run(params, x, torch.ones(8, 4))
        except (fpipe.StageError, fpipe.TransportError) as error:
            told.append(str(error))
    return told


def ends_early(rank):
    """Rank 1's script ends without a word after its first step."""
    own = handlers.Distributed(timeout=10)
    pipeline = Pipeline([layer] * 2, mse)
    plan = pipeline.plan(Placement.loop(2), 4)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=own)
    for i in range(2):
        if rank == 1 and i == 1:
            os._exit(0)
        step({rank: {"w": torch.eye(4)}}, torch.ones(8, 4), torch.ones(8, 4))


def plain_step():
    """A step of one rank in this process, its arguments given but for state and rng."""
    pipeline = Pipeline([layer], mse)
    plan = pipeline.plan(Placement.loop(1), 2)
    one = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local())
    return lambda **more: one({0: {"w": torch.eye(4)}}, torch.ones(4, 4), torch.ones(4, 4), **more)


def different_batches(rank):
    """Each rank passes a batch of another size: what it is told."""
    pipeline = Pipeline([layer] * 3, mse)
    plan = pipeline.plan(Placement.loop(3), 2)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Distributed(timeout=10))
    x = torch.ones(8 + 2 * rank, 4)
    try:
        step({rank: {"w": torch.eye(4)}}, x, x)
    except fpipe.StageError as error:
        return str(error)


def missed_handler(rank):
    """Rank 1 does not come to a handler; the next one works all the same."""
    pipeline = Pipeline([layer] * 2, mse)
    plan = pipeline.plan(Placement.loop(2), 2)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=60))
    first = "nothing"
    if rank == 0:
        try:
            fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Distributed(group, timeout=1))
        except fpipe.TransportError as error:
            first = type(error).__name__
    group = dist.new_group([0, 1], timeout=timedelta(seconds=60))
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Distributed(group, timeout=10))
    loss, _ = step({rank: {"w": torch.eye(4)}}, torch.ones(8, 4), torch.ones(8, 4))
    return f"{first} then {'a loss' if loss.isfinite() else 'none'}"


LIFELINES = []


def lifeline(rank, ends):
    """Return why the next rank is gone, where rank 1's process ends or closes its lifeline, and others stay."""
    store = PrefixStore(f"lifelines {ends}", dist.distributed_c10d._get_default_store())
    line = Lifeline(store, rank, 3, 10.0)
    LIFELINES.append(line)  # it stays open as long as its process
    if rank == 1 and ends:
        os._exit(3)
    if rank == 1:
        line.close()
    until = time.monotonic() + 2
    while rank != 1 and line.lost is None and time.monotonic() < until:
        time.sleep(0.01)
    return line.lost


class NeverConnects(handlers.Gloo):
    """A backend whose edges are never made, as by a communicator that waits for a rank."""

    asynchronous = True

    def group(self, store, name, rank, ranks, timeout):
        if name != "results":
            threading.Event().wait(20)
        return super().group(store, name, rank, ranks, timeout)


def never_connects(rank):
    try:
        own = handlers.Distributed(timeout=1, backend=NeverConnects())
        pipeline = Pipeline([layer] * 2, mse)
        fpipe.value_and_grad(pipeline, schedules.gpipe, pipeline.plan(Placement.loop(2), 2), handler=own)
    except fpipe.TransportError as error:
        return str(error)


def cut_after_a_loss(rank):
    """Rank 0 ends while rank 2 waits for rank 1, which sends nothing; whether the wait ends when its group is cut."""
    store = PrefixStore("cut", dist.distributed_c10d._get_default_store())
    group = handlers.Gloo().group(store, "cut", rank, range(3), 10.0)
    group.barrier().wait()
    time.sleep(0.2)
    if rank == 0:
        os._exit(3)
    if rank == 1:
        time.sleep(3)
        return None
    work, ended = group.recv([torch.empty(1)], 1, 0), threading.Event()

    def wait():
        with contextlib.suppress(RuntimeError):
            handlers.Gloo().wait(work)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    time.sleep(0.5)
    handlers.Gloo().cut([group])
    return ended.wait(1)


def sleeper(seconds):
    """A pipeline of two stages, of which the second sleeps."""

    def slow(p, x):
        time.sleep(seconds)
        return x * p

    pipeline = Pipeline([lambda p, x: x * p, slow], loss=lambda y, t: y.sum())
    return pipeline, pipeline.plan(Placement.loop(2), 1)


def slow_evaluation(rank, timeout):
    pipeline, plan = sleeper(1.5 * timeout)
    run = fpipe.evaluate(pipeline, plan, handler=handlers.Distributed(timeout=timeout))
    for _ in range(2):
        output = run({rank: torch.tensor(2.0)}, torch.ones(2))
        time.sleep(0.3 * timeout * (rank == 1))
    return output is None or output.tolist() == [4.0, 4.0]


def two_handlers(rank, timeout):
    """Rank 1 computes for long in an evaluation that rank 0 has left."""
    pipeline, plan = sleeper(2 * timeout)
    evaluate = fpipe.evaluate(pipeline, plan, handler=handlers.Distributed(timeout=timeout))
    quick, _ = sleeper(0.0)
    step = fpipe.value_and_grad(quick, schedules.gpipe, plan, handler=handlers.Distributed(timeout=timeout))
    evaluate({rank: torch.tensor(2.0)}, torch.ones(2))
    return step({rank: torch.tensor(2.0)}, torch.ones(2))[0].item() == 8.0
