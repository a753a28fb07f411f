"""Processes that stay up between tests, one rank each, joined by gloo on the loopback."""

from __future__ import annotations

import os
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.support.forked import CONTEXT, free_port


@dataclass
class Outcome:
    """What a rank came to: a value, an error's type and text, or nothing but its exit code."""

    value: Any = None
    error: str | None = None
    text: str = ""
    exitcode: int | None = None
    seconds: float = 0.0


class Pool:
    """`run(job, *args)` calls `job(rank, *args)` in every process; jobs are functions of importable modules."""

    def __init__(self, size: int) -> None:
        self._start([_stay] * size, "127.0.0.1")

    def _start(self, places: list[Callable[[], None]], address: str) -> None:
        """Each process goes to its place first; rank 0 is reached at the address."""
        port, self.size = free_port(), len(places)
        self.pipes, self.processes = [], []
        for rank, place in enumerate(places):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(rank, self.size, address, port, place, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def outcomes(self, job: Callable[..., Any], *args: Any, limit: float = 60.0) -> list[Outcome]:
        """What every rank came to; a rank still busy after `limit` seconds is an error of the test."""
        for pipe in self.pipes:
            pipe.send((job, args))
        until = time.monotonic() + limit
        return [self.outcome(rank, until, job) for rank in range(self.size)]

    def outcome(self, rank: int, until: float, job: Callable[..., Any]) -> Outcome:
        pipe, process = self.pipes[rank], self.processes[rank]
        if not pipe.poll(max(0.0, until - time.monotonic())):
            self.close()
            raise TimeoutError(f"rank {rank} of {self.size} hangs in {job.__name__}")
        try:
            return pipe.recv()
        except EOFError:
            process.join(10)
            return Outcome(exitcode=process.exitcode)

    def run(self, job: Callable[..., Any], *args: Any, limit: float = 60.0) -> list[Any]:
        """The value that every rank returned."""
        found = self.outcomes(job, *args, limit=limit)
        for rank, outcome in enumerate(found):
            if outcome.error or outcome.exitcode is not None:
                raise AssertionError(f"rank {rank}: {outcome.text or outcome.exitcode}")
        return [outcome.value for outcome in found]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def _stay() -> None:
    """Run where the process was started."""


def _serve(rank: int, size: int, address: str, port: int, place: Callable[[], None], pipe: Any) -> None:
    """Run what comes through the pipe, until it is closed."""
    place()
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    import torch
    import torch.distributed as dist

    warnings.filterwarnings("error", "stage .* can't be traced", UserWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    while True:
        try:
            job, args = pipe.recv()
        except EOFError:
            return
        start = time.monotonic()
        try:
            outcome = Outcome(value=job(rank, *args))
        except BaseException as error:
            outcome = Outcome(error=type(error).__name__, text=f"{error}\n{traceback.format_exc()}")
        outcome.seconds = time.monotonic() - start
        pipe.send(outcome)
