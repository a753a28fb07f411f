"""Runs with memory checkpoints, in processes that are stopped or killed."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import sys
import threading
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from typer.testing import CliRunner

from fpipe import handlers, interop
from fpipe.cli import app
from fpipe.interop.checkpoints import memory, neighbours
from fpipe.interop.checkpoints.room import Room
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
        until = time.monotonic() + 10
        while apart and neighbour and time.monotonic() < until:  # until the last copies have come
            if {(each.part, each.step) for each in stored_in(run.checkpoints._memory.folder)} >= {(0, at), (1, at)}:
                break
            time.sleep(0.01)


def stopped_with_copies_behind(rank, folder, at, seconds):
    """Train on this rank until a step that fails on all, while copies come so much later; keep what memory has then."""

    def late(*arguments):
        time.sleep(seconds)
        return send(*arguments)

    def fails(i):
        if i == at:
            raise ArithmeticError("bad row")

    run, *rest = joined(rank, folder, True, True)
    send = neighbours.send
    with patch.object(neighbours, "send", late):
        try:
            run_jobs.train(run, *rest, fails)
        except ArithmeticError:
            shutil.copytree(Path(folder, f"shm{rank}"), Path(folder, f"then{rank}"))
            dist.barrier()
            time.sleep(2 * seconds)  # until the thread that sends has no more to do
    return [(each.part, each.step) for each in stored_in(next(Path(folder, f"then{rank}").glob("*/*")))]


def go_on(rank, folder, total=run_jobs.TOTAL, apart=False, neighbour=True):
    """Train to the end on this rank: where it begins, and its end."""
    run, *rest = joined(rank, folder, apart, neighbour)
    return run.step, run_jobs.train(run, *rest, total=total)


def with_room(rank, folder, apart, sizes):
    """Begin on this rank, which sees so many free bytes."""
    with patch.object(memory, "room_in", return_value=Room(sizes[rank], "machine", "in a box")):
        joined(rank, folder, apart, False)


def refused(rank, folder):
    """Begin on this rank; rank 1 finds no room for its second file."""
    allocate, calls = os.posix_fallocate, []

    def full(*arguments):
        calls.append(arguments)
        if rank == 1 and len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(*arguments)

    with patch("os.posix_fallocate", full):
        joined(rank, folder, False, False)


def loaded(rank, folder, no_room):
    """The step with which this rank begins, which is a host, and the parts and steps that the host then has."""

    def full(path, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    with patch.object(neighbours, "Slot", full) if no_room else nullcontext():
        run, *_ = joined(rank, folder, True, True)
    dist.barrier()
    return run.step, [(each.part, each.step) for each in stored_in(run.checkpoints._memory.folder)]


def ended_without_a_neighbour(rank, folder, silent):
    """Train to the end while rank 1 sends no more after some steps: the seconds that the end takes, and warnings."""
    send = neighbours.send

    def failing(group, content, limit):
        if rank == 1 and (run.step > 3 if not silent else not len(content)):
            if not silent:
                raise RuntimeError("the cable was pulled")
            time.sleep(1)
        return send(group, content, limit)

    run, *rest = joined(rank, folder, True, True)
    clear, seconds = run.checkpoints.clear_memory, []

    def timed():
        start = time.monotonic()
        clear()
        seconds.append(time.monotonic() - start)

    run.checkpoints.clear_memory = timed
    with (
        warnings.catch_warnings(record=True) as caught,
        patch.object(neighbours, "send", failing),
        patch.object(memory, "END", 0.5 if silent else 10.0),
    ):
        warnings.simplefilter("always")
        run_jobs.train(run, *rest)
        dist.barrier()
        time.sleep(silent)
    return seconds[0], "".join(str(each.message) for each in caught)


def slowed(rank, folder, seconds):
    """The warnings of a run whose copies come so much later."""
    send = neighbours.send

    def late(*arguments):
        time.sleep(seconds)
        return send(*arguments)

    run, *rest = joined(rank, folder, True, True)
    with (
        warnings.catch_warnings(record=True) as caught,
        patch.object(neighbours, "send", late),
        patch.object(memory, "LONG", seconds / 2),
    ):
        warnings.simplefilter("always")
        run_jobs.train(run, *rest, total=5)
    return "".join(str(each.message) for each in caught)


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


def command(rank, words):
    """Run `fpipe checkpoint memory` in the process of rank 0, and return its output."""
    if rank:
        return None
    result = CliRunner().invoke(app, ["checkpoint", "memory", *words], env={"COLUMNS": "250"})
    assert result.exit_code == 0, result.output
    return result.stdout


def killed(rank, folder, at, apart=False):
    """Train; rank 1 is killed within some milliseconds after a step has begun: this one, or the first after it."""
    run, *rest = joined(rank, folder, apart, True)
    at = max(at, run.step)

    def killing(i):
        if i == at and rank == 1:
            threading.Timer(random.uniform(0, 0.01), os.kill, (os.getpid(), signal.SIGKILL)).start()

    run_jobs.train(run, *rest, killing, total=10**9)


def main(folder):
    """A rank of a job under torchrun whose rank 1 is killed in the seventh step of the first two starts."""
    run, *rest = begin(folder, handlers.auto(timeout=20))
    handler, restarts = run.checkpoints.handler, int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    first = run.step
    Path(folder, f"began-{restarts}-{handler.rank}").write_text(str(first))

    def killed(i):
        if restarts < 2 and i == first + 6 and handler.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save(run_jobs.train(run, *rest, killed, total=20), Path(folder, f"end-{handler.rank}.pt"))


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


if __name__ == "__main__":
    main(sys.argv[1])
