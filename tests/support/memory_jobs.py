"""Runs with memory checkpoints, in processes that are stopped or killed."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from fpipe import handlers, interop
from fpipe.interop.checkpoints.slots import stored_in
from tests.support import run_jobs


def begin(folder, handler, host="", **options):
    """A run as it begins, or goes on, with its memory checkpoints in a folder beside, which may play a host."""
    shared = Path(folder) / f"shm{host}"
    shared.mkdir(parents=True, exist_ok=True)
    return run_jobs.begin(folder, handler, memory=interop.Memory(folder=shared, **options))


def joined(rank, folder, apart, neighbour):
    """A run of the pool, whose ranks may be hosts of their own."""
    options = {"host": rank, "neighbour": neighbour} if apart else {}
    return begin(folder, handlers.Distributed(timeout=20), **options)


def stopped(rank, folder, at, apart=False, neighbour=True):
    """Train on this rank until a step that fails on all."""

    def fails(i):
        if i == at:
            raise ArithmeticError("bad row")

    run, *rest = joined(rank, folder, apart, neighbour)
    try:
        run_jobs.train(run, *rest, fails)
    except ArithmeticError:
        run.checkpoints.finish()
        memory, until = run.checkpoints._memory, time.monotonic() + 10
        while apart and neighbour and time.monotonic() < until:  # until the last copies have come
            if {(each.part, each.step) for each in stored_in(memory.folder)} >= {(0, at), (1, at)}:
                break
            time.sleep(0.01)


def go_on(rank, folder, total=run_jobs.TOTAL, apart=False, neighbour=True):
    """Train to the end on this rank: where it begins, and its end."""
    run, *rest = joined(rank, folder, apart, neighbour)
    return run.step, run_jobs.train(run, *rest, total=total)


def two_jobs(rank, folder, names):
    """A job in each process: the error with which it is refused."""
    runs, errors = [], []
    for turn in range(2):
        if turn == rank:
            try:
                runs.append(begin(Path(folder) / names[rank], handlers.Local())[0])
            except interop.CheckpointError as error:
                errors.append(str(error))
        dist.barrier()
    for run in runs:
        run.checkpoints.clear_memory()
    return "".join(errors)


def killed(rank, folder, at, apart=False):
    """Train; rank 1 is killed within some milliseconds after a step has begun."""

    def killing(i):
        if i == at and rank == 1:
            threading.Timer(random.uniform(0, 0.01), os.kill, (os.getpid(), signal.SIGKILL)).start()

    run_jobs.train(*joined(rank, folder, apart, True), killing, total=10**9)


def write_for_ever(rank, folder):
    """Write the numbers of steps until the process is killed, which may be at any moment once the first is written."""
    run, *_ = begin(folder, handlers.Local())
    while True:
        if run.step == 1:
            threading.Timer(random.uniform(0.0, 0.1), os.kill, (os.getpid(), signal.SIGKILL)).start()
        run.step += 1
        run.params = {s: {"w": torch.full((3, 3), float(run.step))} for s in range(2)}
        run.order = torch.full((100_000,), run.step)
        run.checkpoints.keep_in_memory(**run._sections)
