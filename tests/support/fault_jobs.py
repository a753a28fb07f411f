"""Processes that are stopped, killed or out of step, and the calls of the others while they are."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from unittest.mock import patch

import torch

import fpipe
from fpipe import Pipeline, Placement, handlers, interop, schedules
from fpipe.handlers.distributed.connections import Connections
from tests.support.cases import mse
from tests.support.faults import layer


def pipeline_of(ranks, microbatches=4):
    pipeline = Pipeline([layer] * ranks, mse)
    return pipeline, pipeline.plan(Placement.loop(ranks), microbatches)


def params_of(rank):
    return {rank: {"w": torch.eye(4)}}


def step_of(ranks, own, **options):
    pipeline, plan = pipeline_of(ranks)
    return fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=own, autodiff="eager", **options)


def processes(own):
    """The process numbers of all ranks."""
    return own.peers.new_group("processes").gather(os.getpid(), "gather")


def after(rank, ranks, timeout, accident, folder):
    """Rank 0, whose process has the job's store, is stopped or ends; {call: (error, its text, seconds)} of rank 1."""
    trains, compiles, between = (handlers.Distributed(timeout=timeout) for _ in range(3))
    pipeline, plan = pipeline_of(ranks)
    state = params_of(rank)
    step = step_of(ranks, trains)
    saved = interop.Checkpoints(folder, pipeline, plan, handler=between)
    unused = interop.Checkpoints(folder, pipeline, plan, handler=compiles)  # not connected yet
    saved.latest()
    fpipe.clip_by_global_norm(state, 1.0, plan, handler=between)
    x = torch.ones(8, 4)
    pid = processes(compiles)[0]
    if rank == 0:
        return None
    os.kill(pid, accident)
    calls = {
        "value_and_grad": lambda: step_of(ranks, compiles),
        "another handler": lambda: step_of(ranks, handlers.Distributed(timeout=timeout)),
        "a step": lambda: step(state, x, x),
        "latest": unused.latest,
        "save": lambda: saved.save(params=state),
        "clipping": lambda: fpipe.clip_by_global_norm(state, 1.0, plan, handler=between),
    }
    errors = {}

    def attempt(name):
        begun = time.monotonic()
        try:
            calls[name]()
        except Exception as error:
            errors[name] = type(error).__name__, str(error), time.monotonic() - begun

    threads = [threading.Thread(target=attempt, args=(name,), daemon=True) for name in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout + 30)
    return errors


def killed_while_connecting(rank, ranks, timeout, victim):
    """A rank is killed when it begins to make its edges; (the error of another rank, seconds)."""
    own = handlers.Distributed(timeout=timeout)
    own.peers.new_group("a meeting").gather(rank, "gather")  # all are there
    begun = time.monotonic()

    def kill(connections, edges, lanes):
        if edges:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        with patch.object(Connections, "_connect", kill if rank == victim else Connections._connect):
            step_of(ranks, own)
    except fpipe.TransportError as error:
        return str(error), time.monotonic() - begun
    return "no error", time.monotonic() - begun


def killed(rank, ranks, victim, moment, timeout=20.0):
    """A rank is killed in its third step, or before it; the error of another rank."""
    own = handlers.Distributed(timeout=timeout)
    step, x, calls = step_of(ranks, own), torch.ones(8, 4), 0
    try:
        for i in range(3):
            if rank == victim and i == 2:
                if moment == "before":
                    os.kill(os.getpid(), signal.SIGKILL)
                with patch.object(torch, "tanh", lambda x: os.kill(os.getpid(), signal.SIGKILL)):
                    step(params_of(rank), x, x)
            step(params_of(rank), x, x)
            calls += 1
    except fpipe.TransportError as error:
        return str(error)
    return f"no error in {calls} steps"


def blamed(text):
    """The rank that a message says is gone."""
    ended = r"(?:can't go on|ended with an earlier failure)"  # the latter where the rank comes to its call later
    return re.search(rf"{ended}: (.*?) ?(?:did not|is gone|does not|has not|, whose)", text).group(1)


def disagreements(rank):
    """What one of two ranks is told of each argument in which they differ, and the loss of a step after all of that."""
    own = handlers.Distributed(timeout=20)
    _, plan = pipeline_of(2)
    step, state, x = step_of(2, own), params_of(rank), torch.arange(32.0).reshape(8, 4)
    later = x + 1
    captured = fpipe.value_and_grad(*pipeline_of(2)[:1], "gpipe", plan, handler=own, capture=True)
    for i in range(3):
        captured(state, x, x, rng=(0, i))
    sgd = interop.optimizer(torch.optim.SGD, lr=0.1)
    clipping = {"handler": own, "capture": True, "max_norm": 1.0 + rank}
    train = fpipe.train_step(*pipeline_of(2)[:1], "gpipe", plan, sgd, **clipping)
    calls = {
        "rng": lambda: step(state, x, x, rng=(0, rank)),
        "rng of one": lambda: step(state, x, x, rng=(0, 1) if rank else None),
        "batch": lambda: step(state, later if rank else x, x),
        "target": lambda: step(state, x, later if rank else x),
        "skipped": lambda: step(state, None if rank else x, later if rank else None, rng=(0, 3 + rank)),
        "captured": lambda: captured(state, x, x, rng=(0, 5 + rank)),
        "captured max_norm": lambda: train(state, sgd.init(state), x, x),
        "reduction": lambda: step_of(2, own, reduction="sum" if rank else "mean"),
        "weight": lambda: step_of(2, own, weight=(lambda t: 2 * len(t)) if rank else (lambda t: 3 * len(t))),
        "max_norm": lambda: fpipe.clip_by_global_norm(state, 1.0 + rank, plan, handler=own),
    }
    told = {}
    for name, call in calls.items():
        try:
            call()
            told[name] = "nothing"
        except (fpipe.StageError, fpipe.ScheduleError, fpipe.TransportError) as error:
            told[name] = str(error)
    loss, _ = step(state, None if rank else x, x if rank else None, rng=(0, 4))
    return told, loss.item()


def out_of_step(rank, ranks, kind, microbatches, schedule, gather, autodiff):
    """The last rank makes one call more while the others step; the error of each."""
    own = handlers.Distributed(timeout=3)
    pipeline, plan = pipeline_of(ranks, microbatches)
    options = {"handler": own, "autodiff": autodiff}
    x, state = torch.ones(8, 4), params_of(rank)

    def train():
        return fpipe.value_and_grad(pipeline, schedule, plan, **options)

    def evaluate(loss=False):
        return fpipe.evaluate(pipeline, plan, loss=loss, gather=gather and not loss, **options)

    step, run = train(), evaluate()
    calls = {
        "value_and_grad": train,
        "evaluate": evaluate,
        "a step": lambda: step(state, x, x),
        "an evaluation": lambda: run(state, x),
        "clipping": lambda: fpipe.clip_by_global_norm(state, 1.0, plan, handler=own),
    }
    try:
        for _ in range(2):
            step(state, x, x)
            run(state, x)
        if rank == ranks - 1:
            calls[kind]()
        for _ in range(3):
            run(state, x)
            step(state, x, x)
    except (fpipe.StageError, fpipe.TransportError, fpipe.ScheduleError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
