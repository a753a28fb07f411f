"""Processes forked from one that has imported torch: a new process that imports it takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import select
import socket
import sys
import tempfile
import time
from multiprocessing import connection, forkserver
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = [
    *("torch.distributed", "torch.distributed.tensor"),
    *("tests.support.jobs", "tests.support.pool", "tests.support.warm"),
]
CONTEXT.set_forkserver_preload(PRELOADED)


def fork_server() -> None:
    """Fork the server of processes from this one, which has imported most of what a new one would import for seconds.

    It must be done before a test has run, which may start threads of torch. Without this call, or with a Python whose
    servers want a key, a new process is the server.
    """
    if sys.version_info >= (3, 14):
        return
    address, (alive, held) = connection.arbitrary_address("AF_UNIX"), os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        if not os.fork():
            try:
                os.close(held)
                select.select([listener, alive], [], [])  # imports the rest when a test wants a process
                forkserver.main(listener.detach(), alive, PRELOADED)
            finally:
                os._exit(0)
    os.close(alive)
    server = forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd = address, held
    server.ensure_running = lambda: None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def script(path: Path | str, *options: str, processes: int = 0, cwd: Path = ROOT, limit: float = 240.0) -> str:
    """Run a script in one process, or in several with the environment that torchrun sets; return its standard output.

    Raises:
        AssertionError: a process failed, was not done after `limit` seconds, or warned that a stage can't be traced.
    """
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    size = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)} if processes else {}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        children = []
        for rank in range(processes or 1):
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes else {}
            arguments = (str(path), options, str(cwd), {**shared, **size, **ranks}, outputs)
            children.append(CONTEXT.Process(target=_run, args=arguments))
            children[-1].start()
        until = time.monotonic() + limit
        for child in children:
            child.join(max(0.0, until - time.monotonic()))
        codes = [child.exitcode for child in children]
        for child in children:
            child.kill()
            child.join()
        printed, errors = (path.read_text() for path in outputs)
    assert codes == [0] * len(children), f"exit codes {codes}\n{printed}{errors}"
    assert "can't be traced" not in errors, errors
    return printed


def _run(name: str, options: tuple[str, ...], cwd: str, environment: dict[str, str], outputs: list[Path]) -> None:
    os.environ.update(environment)
    os.chdir(cwd)
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.argv = [name, *options]
    sys.path.insert(0, str(Path(name).parent))
    runpy.run_path(name, run_name="__main__")
