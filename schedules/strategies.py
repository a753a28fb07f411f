"""Search parallel strategies of a transformer: pipelines, replicas, tensor, context and expert parallel. No torch.

Those that may be the fastest, by a bound on their step, are simulated first, until no other one can be among the best.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from typing import TypeVar

from fpipe._format import format_bytes, number
from fpipe.errors import ScheduleError
from fpipe.errors.tracebacks import warn
from fpipe.programs.footprint import check_limit
from fpipe.schedules.candidates import Candidate, Degrees, Job, Strategy
from fpipe.schedules.catalogue import named
from fpipe.schedules.machines import MACHINES, Machine
from fpipe.schedules.shapes import SHAPES, ModelShape

T = TypeVar("T")

# Those that need no search and no copies of stages; GPipe takes as long as 1F1B, with more memory.
SCHEDULES = ("1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-h2", "interleaved-zb", "zb-v", "v-half", "v-min")
CLOSE = 0.01  # what could be faster by no more than this share is not simulated
ROWS, CHUNKS, REMAT = (1, 2, 4), (1, 2, 4), ("none", "full")


def strategies(
    model: ModelShape | str,
    world: int,
    machine: Machine | str = "h100",
    *,
    batch: int,
    memory_limit_bytes: float | None = None,
    dtype: str | None = None,
    rows: Sequence[int] = ROWS,
    pp: Sequence[int] | None = None,
    dp: Sequence[int] | None = None,
    tp: Sequence[int] | None = None,
    cp: Sequence[int] | None = None,
    ep: Sequence[int] | None = None,
    schedules: Sequence[str] = SCHEDULES,
    chunks: Sequence[int] = CHUNKS,
    remat: Sequence[str] = REMAT,
    sequence_parallel: bool = False,
    top: int = 10,
    budget: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[Strategy]:
    """Return the fastest parallel strategies of a model over `world` ranks that fit into memory, fastest first.

    Each has other degrees, and the best it can do with a schedule, a number of stages on a rank, of resident stages, of
    sequences in a microbatch, and with or without rematerialisation. Of these, only those are simulated whose lower
    bound says that they may be more than 1 % faster.

    Args:
        model: a shape, or a name in `SHAPES`.
        machine: devices and links, or a name in `MACHINES`.
        batch: sequences of a step, over all replicas.
        memory_limit_bytes: bytes that a rank has; by default those of the machine.
        dtype: in which stages compute; parameters, sums and Adam's two moments are float32. By default bfloat16 if the
            machine has a peak for it.
        rows: the numbers of sequences of a microbatch to try.
        pp, dp, tp, cp, ep: the degrees to try; by default every one. Those of ep divide the experts of a layer.
        schedules, chunks: names in `CATALOGUE`, and numbers of stages on a rank, to try.
        remat: whether to try stages that keep all, "none", and their input only, "full".
        sequence_parallel: whether tensor-parallel ranks share the tokens between matrix products.
        top: how many to return, at most.
        budget: seconds after which to stop, with a warning; the result is then the best of what was simulated.
        progress: called with each candidate that is simulated.

    Raises:
        ScheduleError: no strategy divides the model, the batch and the ranks; or none fits, and then the message has
            the least bytes that would.

    >>> best, *_ = strategies("llama-8b", 8, "h100", batch=16, dp=[1], cp=[1], schedules=["1f1b"], rows=[1])
    >>> best.degrees, best.name, best.remat, best.layers
    (Degrees(pp=2, dp=1, tp=4, cp=1, ep=1), '1f1b', 'none', (17, 15))
    """
    shape = _of_name(model, SHAPES, "model shape") if isinstance(model, str) else model
    hosts = _of_name(machine, MACHINES, "machine") if isinstance(machine, str) else machine
    for option, counts in {"rows": rows, "chunks": chunks, "world": [world], "batch": [batch], "top": [top]}.items():
        if not counts or min(counts) < 1:
            raise ScheduleError(f"{option} must be whole numbers of at least 1, not {counts!r}")
    if unknown := set(remat) - set(REMAT) or (set() if remat else {"nothing"}):
        raise ScheduleError(f"remat is none or full, not {', '.join(sorted(unknown))}")
    hosts = replace(hosts, on_host=min(hosts.on_host, world))
    dtype = dtype or hosts.dtype
    hosts.peak(dtype)
    check_limit(memory_limit_bytes)
    limit = hosts.memory if memory_limit_bytes is None else memory_limit_bytes
    job = Job(shape, hosts, world, batch, dtype, sequence_parallel, limit)
    entries = [named(name) for name in schedules]
    candidates: list[Candidate] = []
    for degrees in job.degrees(pp, dp, tp, cp, ep):
        for size, kind in product(sorted(set(rows)), dict.fromkeys(remat)):
            if batch % (degrees.batches * size) == 0:
                candidates += job.candidates(degrees, size, kind, entries, chunks)
    if not candidates:
        raise job.nothing_divides(rows, schedules, chunks, {"pp": pp, "dp": dp, "tp": tp, "cp": cp, "ep": ep})
    return _ranked(candidates, limit, top, budget, progress)


def _of_name(name: str, known: Mapping[str, T], noun: str) -> T:
    if name not in known:
        raise ScheduleError(f"no {noun} is called {name!r}: there are {', '.join(known)}")
    return known[name]


def _ranked(
    candidates: list[Candidate],
    limit: float,
    top: int,
    budget: float | None,
    progress: Callable[[str], None] | None,
) -> list[Strategy]:
    """Simulate candidates, those of the least bound first, until no other can be among the best."""
    best: dict[Degrees, Strategy] = {}
    rest = sorted((each for each in candidates if each.least <= limit), key=lambda each: (each.bound, each.least))
    end = inf if budget is None else time.monotonic() + budget
    for at, candidate in enumerate(rest):
        steps = sorted(strategy.step for strategy in best.values())
        enough = candidate.bound * (1 + CLOSE)
        if len(steps) >= top and enough >= steps[top - 1]:
            break
        known = best.get(candidate.degrees)
        if known and enough >= known.step:
            continue
        if time.monotonic() > end:
            stopped = f"stopped after {number(budget or 0.0)} s with {at} of up to {len(rest)} candidates done"
            way_out = "allow more time, or fewer degrees, schedules, chunks or sizes of a microbatch"
            if not best:
                raise ScheduleError(f"{stopped}, of which none keeps to {format_bytes(limit)}: {way_out}")
            warn(f"{stopped}, so that there may be faster strategies: {way_out}")
            break
        if progress:
            progress(str(candidate))
        strategy = candidate.strategy(limit)
        if strategy and (not known or (strategy.step, strategy.bytes) < (known.step, known.bytes)):
            best[strategy.degrees] = strategy
    if not best:
        raise _too_small(candidates, limit)
    return sorted(best.values(), key=lambda strategy: (strategy.step, strategy.bytes))[:top]


def _too_small(candidates: Sequence[Candidate], limit: float, tried: int = 16) -> ScheduleError:
    """Return the error that has the least bytes that were reached, of the candidates that may need least.

    Few microbatches, which need no more bytes than all, say which of them to try with all.
    """
    few = sorted(candidates, key=lambda each: each.least)[:tried]
    nbytes, least = inf, few[0]
    at_least = ((each.least_bytes(2 * each.plan.ranks), each) for each in few)
    for lowest, each in sorted(at_least, key=lambda reached: reached[0]):
        if lowest >= nbytes:
            break
        nbytes, least = min((nbytes, least), (each.least_bytes(), each), key=lambda reached: reached[0])
    if nbytes == inf:
        names = sorted({each.entry.name for each in few})
        return ScheduleError(f"{', '.join(names)} take no strategy of this model and these ranks: try other schedules")
    return ScheduleError(
        f"no strategy keeps to {format_bytes(limit)} on a rank: the least reached is {format_bytes(nbytes)}, of "
        f"{least.degrees} with {least.entry.name}, {least.pieces.rows} sequences in a microbatch and remat "
        f"{least.pieces.remat}; more ranks, more memory, or shorter sequences need less"
    )
