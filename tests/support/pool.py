"""Processes that stay up between tests, one rank each, joined by gloo on the loopback; or by NCCL, on GPUs.

NCCL refuses two ranks on one GPU, which it knows by host and bus. Each process of a pool on GPUs has a NCCL_HOSTID of
its own, so that NCCL takes it for a host with one GPU, and reaches the others by sockets: its communicators, streams,
kernels and errors are the real ones, its speed is not.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
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


NCCL_ON_ONE_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a pool: rank r has GPU r modulo their number, and is a host of its own to NCCL.

    Args:
        job: backend of the job's process group, gloo or nccl.
        environment: variables beside `NCCL_ON_ONE_GPU`, which they override; None for one that is not set.
    """

    job: str = "gloo"
    environment: Mapping[str, str | None] = field(default_factory=dict)

    def variables(self, rank: int, port: int) -> dict[str, str | None]:
        """The environment of a rank of the job at a port."""
        return {**NCCL_ON_ONE_GPU, "NCCL_HOSTID": f"fpipe-{port}-{rank}", **self.environment}


class Pool:
    """`run(job, *args)` calls `job(rank, *args)` in every process; jobs are functions of importable modules."""

    def __init__(self, size: int, gpus: Gpus | None = None) -> None:
        self._start([_stay] * size, "127.0.0.1", gpus)

    def _start(self, places: list[Callable[[], None]], address: str, gpus: Gpus | None = None) -> None:
        """Each process goes to its place first; rank 0 is reached at the address."""
        port, self.size = free_port(), len(places)
        self.pipes, self.processes = [], []
        context: Any = CONTEXT if gpus is None else multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        for rank, place in enumerate(places):
            ours, theirs = context.Pipe()
            arguments = (rank, self.size, address, port, place, theirs, gpus)
            process = context.Process(target=_serve, args=arguments, daemon=True)
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


@contextmanager
def kept() -> Iterator[Callable[[int], Pool]]:
    """`get(n)`: a pool of n processes, made on first use and kept in `get.made`."""
    made: dict[int, Pool] = {}

    def get(size: int) -> Pool:
        if size not in made:
            made[size] = Pool(size)
        return made[size]

    get.made = made  # type: ignore[attr-defined]
    try:
        yield get
    finally:
        for pool in made.values():
            pool.close()


def _stay() -> None:
    """Run where the process was started."""


def join(rank: int, size: int, address: str, port: int, gpus: Gpus | None = None) -> None:
    """Make this process a rank of the job at an address. CUDA and NCCL read the variables at their first use."""
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    if gpus is not None:
        for name, value in gpus.variables(rank, port).items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if gpus is None:
        _share_device()
    else:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo" if gpus is None else gpus.job)


def _share_device() -> None:
    """Let torch's own groups use the device of fpipe's: each device has a thread that polls, and meshes many groups."""
    from torch.distributed import distributed_c10d as c10d

    from fpipe.handlers.gloo import gloo_devices

    class Group(c10d.ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            options = self._Options()
            options._devices, options._timeout = gloo_devices(), timeout
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = Group


def _serve(
    rank: int, size: int, address: str, port: int, place: Callable[[], None], pipe: Any, gpus: Gpus | None
) -> None:
    """Run what comes through the pipe, until it is closed."""
    place()
    warnings.filterwarnings("error", "stage .* can't be traced", UserWarning)
    join(rank, size, address, port, gpus)
    gc.freeze()
    while True:
        try:
            job, args = pipe.recv()
        except EOFError:
            return
        start, threads = time.monotonic(), threading.active_count()
        try:
            outcome = Outcome(value=job(rank, *args))
        except BaseException as error:
            outcome = Outcome(error=type(error).__name__, text=f"{error}\n{traceback.format_exc()}")
        outcome.seconds = time.monotonic() - start
        pipe.send(outcome)
        if threading.active_count() > threads:  # of handlers in cycles, whose connections take time while they are open
            del outcome
            gc.collect()
