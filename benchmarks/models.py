"""Shared by the benchmarks over several processes: the model, its data, the machine's name, and the processes."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import queue
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessException

LAYERS, HEADS, MICROBATCHES, ROWS = 8, 4, 8, 2
REPEATS = 5  # steps that are profiled
PROFILED = 3  # microbatches of a profile of real compute; the median leaves out the first, which makes the sums
WIDTHS, RANKS = (32, 256, 512), (2, 4)
TIMEOUT = 120.0  # seconds that a rank waits for another
KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(64 << 20)}
"""Makes glibc keep the memory that a step gives back: to take it again from the system costs up to 10 µs a page."""
loss_fn = nn.functional.mse_loss


def layers(width: int, count: int = LAYERS) -> list[nn.Module]:
    """Encoder layers with the same parameters in every process."""
    torch.manual_seed(0)
    return [nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.0, batch_first=True) for _ in range(count)]


def stages(given: list[nn.Module], count: int) -> list[nn.Module]:
    """Group the layers into `count` stages of equal length. Stages of the same layers share their parameters."""
    size = len(given) // count
    return [nn.Sequential(*given[at : at + size]) for at in range(0, len(given), size)]


def data(width: int) -> tuple[Tensor, Tensor]:
    """Return a batch and its target: microbatches of ROWS sequences, of length 8 at width 32 and 64 at other widths."""
    generator = torch.Generator().manual_seed(1)
    batch, target = torch.randn(2, MICROBATCHES * ROWS, 8 if width == 32 else 64, width, generator=generator)
    return batch, target


def cores() -> int:
    return len(os.sched_getaffinity(0))


def machine() -> str:
    """Describe the machine in one line."""
    with open("/proc/cpuinfo") as file:
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    name = models[0] if models else platform.machine()
    return f"torch {torch.__version__}, Python {platform.python_version()}, {cores()} cores of {name}"


def positive(text: str) -> int:
    """Parse a whole number from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def output(text: str, kinds: Sequence[str] = (".json", ".svg", ".png")) -> pathlib.Path:
    """Parse the name of a file to write from the command line."""
    path = pathlib.Path(text)
    if path.suffix not in kinds or not path.parent.is_dir():
        *others, last = kinds
        listed = f"{', '.join(others)} or {last}" if others else last
        raise argparse.ArgumentTypeError(f"{text!r} must end in {listed}, in a folder that exists")
    return path


def parser(description: str | None, rounds: int, limit: int | None = None) -> argparse.ArgumentParser:
    """Return a parser of the options that all measurements have; with a limit, of those in several processes.

    An option that a benchmark adds by one of these names takes the place of it.
    """
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, conflict_handler="resolve"
    )
    result.add_argument("--rounds", type=positive, default=rounds)
    if limit is not None:
        result.add_argument("--limit", type=positive, default=limit, help="seconds until the processes are ended")
        add_out(result)
    result.add_argument("--json", action="store_true", help="print a list of objects")
    return result


def add_out(options: argparse.ArgumentParser) -> None:
    """Add the option of a file for the rows."""
    kind = partial(output, kinds=[".json"])
    options.add_argument("--out", type=kind, metavar="FILE.json", help="a file for them")


def report(
    name: str, as_json: bool, parts: Iterable[list[dict[str, Any]]], show: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """Show the rows of a benchmark part by part, as they are measured, or print all as JSON; return them.

    Exit with a message if the processes of `in_processes` fail.
    """
    print(machine(), file=sys.stderr if as_json else sys.stdout, flush=True)
    rows: list[dict[str, Any]] = []
    try:
        for part in parts:
            rows += part
            if not as_json:
                show(part)
    except (TimeoutError, ProcessException) as error:
        sys.exit(f"{name}: {str(error).strip()}")
    if as_json:
        print(json.dumps(rows, indent=1))
    return rows


def run(
    name: str,
    options: argparse.Namespace,
    parts: Iterable[list[dict[str, Any]]],
    show: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """Report the rows of a benchmark as its options say, `--json` and `--out`; return them."""
    rows = report(name, options.json, parts, show)
    if options.out:
        write(options.out, rows)
    return rows


def write(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON, with the machine."""
    path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def in_processes(job: Callable[..., Any], ranks: int, *args: Any, limit: float) -> Iterator[Any]:
    """Run `job(rank, ranks, *args)`, an iterator, in each of `ranks` processes over gloo, and yield rank 0's results.

    The processes keep their memory (`KEEPING`).

    Raises:
        TimeoutError: not done after `limit` seconds.
        ProcessException: a process failed. Either way none is left.
    """
    os.environ.update(KEEPING)  # for the server that forks the processes, which the first call starts
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = mp.get_context("forkserver").Queue()
    until = time.monotonic() + limit
    context = mp.start_processes(
        _serve, args=(ranks, port, found, job, args), nprocs=ranks, join=False, start_method="forkserver"
    )
    try:
        done = False
        while not done:
            done = context.join(timeout=0.2)
            try:
                while True:
                    yield found.get(timeout=0.2 if done else 0)
            except queue.Empty:
                pass
            if not done and time.monotonic() > until:
                raise TimeoutError(f"{ranks} processes were not done after {limit:g} s: give them more, or less to do")
    finally:
        for process in context.processes:
            process.kill()
        for process in context.processes:
            process.join()


def _serve(rank: int, ranks: int, port: int, found: Any, job: Callable[..., Iterator[Any]], args: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT))
    for value in job(rank, ranks, *args):
        if rank == 0:
            found.put(value)
    dist.barrier()
    dist.destroy_process_group()
