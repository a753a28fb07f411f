"""The plan of a job for the processes that it has, found anew at each start.

A job that is started again may have fewer processes than before, or more. Stages, batch and microbatches stay, so that
training goes on with the same bits; placement and schedule are searched for the ranks that are there.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fpipe._format import counted, number, percent, scale_of
from fpipe.costs import Costs
from fpipe.errors import ScheduleError, TransportError
from fpipe.errors.arguments import checked
from fpipe.errors.tracebacks import warn
from fpipe.handlers.contents import fingerprint
from fpipe.handlers.distributed.handler import Distributed
from fpipe.handlers.protocol import Handler
from fpipe.plan import Placement, Plan, Schedule
from fpipe.programs.footprint import check_limit
from fpipe.programs.lowering import lower
from fpipe.programs.verifier import check
from fpipe.schedules.found import Found
from fpipe.schedules.search import search
from fpipe.stages.pipeline import Pipeline
from fpipe.store import JobStore, StoreError, bounded, warn_of_shared_store

T = TypeVar("T")
log = logging.getLogger("fpipe.elastic")
HINT = "every process calls elastic, with the same arguments"
NOTES = "plan.json"
DONE, LEFT = "done", "left"  # in the job's store: why the job ended, and how many waiting processes have read it
LAST_WORD = 5.0  # seconds for them to do so, and for the others to end


@dataclass(frozen=True, repr=False)
class Elastic:
    """The plan of a job for the processes that it has; `elastic` makes it.

    Args:
        found: the result of the search, also with its `name`, `costs` and `timeline`.
        handler: of the processes that have stages.
        text: one line about the choice.
    """

    found: Found
    handler: Handler
    text: str

    def __repr__(self) -> str:
        return f"<Elastic: {self.text}>"

    @property
    def schedule(self) -> Schedule:
        return self.found.schedule

    @property
    def plan(self) -> Plan:
        return self.found.plan

    @property
    def resident(self) -> int | None:
        """The number of stages whose shards are whole on a rank at a time; None where parameters are not sharded."""
        return self.found.resident


@checked()
def elastic(
    pipeline: Pipeline,
    microbatches: int,
    *,
    handler: Handler,
    folder: str | os.PathLike[str] | None = None,
    ranks: int | None = None,
    replicas: int = 1,
    costs: Costs | Callable[[], Costs] | None = None,
    names: Sequence[str] | None = None,
    memory_limit: float | None = None,
    memory_limit_bytes: float | None = None,
) -> Elastic:
    """Return the fastest plan for the processes that this job has, which may be others after each restart.

    The stages stay as they are, each on one rank: training that goes on from a checkpoint with other ranks has the bits
    of one that never stopped, with the same number of threads in each process. Every process calls it, and all come to
    the same plan, which is verified. The search takes seconds at most. The first process logs one line.

    Where the job has more processes than stages, those without a stage stay in this call until the others are done, and
    exit. So a restart finds them.

    Args:
        microbatches: of each replica.
        handler: of all processes, as `handlers.auto()`; or one that plays any number of ranks, as `Local`.
        folder: where the last choice is kept, with the costs that were measured, as `plan.json`; usually that of the
            checkpoints. All processes share it.
        ranks: the most for a replica; by default there is one in each process. With `Local` the number, by default 1.
        replicas: how many replicas there are, in each start: bits depend on them. They are the handler's dimension
            "dp", which is `handler.mesh` of the result; each takes its own batch. If the result has `resident`, as
            costs with sizes may lead to, params are shards: `interop.fsdp(params, mesh)`.
        costs: of the stages, by default equal ones. Or a function that measures them, such as
            `lambda: fpipe.profile(pipeline, params, batch, target, microbatches=8)`: the first process calls it, once
            for a folder, while the others wait, at most for the timeout of the handler.
        names: of the schedules to try; by default all that have no copies of stages.
        memory_limit: microbatches in flight on a rank, of its share of the model (1/ranks of it); by default, where
            neither `memory_limit_bytes` nor `names` is given, as many as ranks, which is what 1F1B needs.
        memory_limit_bytes: bytes on a rank, of all that `fpipe.footprint` counts; the costs need sizes.

    Raises:
        ScheduleError: no schedule keeps to the limits (the message has the least that one needs); costs do not fit the
            stages, or have no sizes for a limit in bytes; there are fewer processes than replicas; or a process had
            other arguments.
        TransportError: a process did not come; or, in one without a stage, the others failed.
        ValueError: the handler has replicas, or a number is not positive.

    >>> from fpipe import handlers
    >>> pipeline = Pipeline([lambda p, x: x @ p] * 4)
    >>> for ranks in (4, 3, 2):
    ...     print(elastic(pipeline, 8, handler=handlers.Local(), ranks=ranks).text)
    4 ranks: zb-h1 on Placement((0, 1, 2, 3)), a step takes 27 forwards of a stage, bubble 11.1%
    3 ranks: zb-auto on Placement((0, 1, 2, 0)), a step takes 48 forwards of a stage, bubble 0.0%
    2 ranks: zb-v on Placement((0, 1, 1, 0)), a step takes 48 forwards of a stage, bubble 0.0%
    """
    for name, value in (("microbatches", microbatches), ("ranks", ranks), ("replicas", replicas)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if isinstance(handler, Distributed) and handler.mesh is not None:
        raise ValueError("elastic makes the replicas: pass replicas=, and a handler of all processes, handlers.auto()")
    warn_of_shared_store()
    stages, is_first = len(pipeline.stages), handler.peers is None or handler.peers.rank == 0
    processes = handler.size if isinstance(handler, Distributed) else (ranks or 1) * replicas
    peers = handler.peers and handler.peers.new_group("an elastic plan", hint=HINT, error=ScheduleError)
    notes = _Notes(None if folder is None else Path(folder) / NOTES, f"{stages} stages, {microbatches} microbatches")

    def agreed(do: Callable[[], T], call: str, share: Callable[[T], Any]) -> tuple[T, list[Any]]:
        if peers is not None:
            return peers.agree(do, call, share)
        result = do()
        return result, [share(result)]

    last, measured = agreed(lambda: notes.recall(costs) if is_first else (), "the costs", list)[1][0]
    known = costs if isinstance(costs, Costs) else Costs() if measured is None else Costs.from_json(measured)

    def choose() -> Found:
        available = processes // replicas
        if not available:
            raise ScheduleError(f"there are {processes} processes for {replicas} replicas: start more, or take fewer")
        check_limit(memory_limit_bytes, known)
        count = min(stages, available, ranks or available)
        is_limited = any(option is not None for option in (memory_limit, memory_limit_bytes, names))
        found = search(
            pipeline.plan(Placement([s * count // stages for s in range(stages)]), microbatches, replicas),
            known,
            memory_limit if is_limited else count,
            memory_limit_bytes=memory_limit_bytes,
            recut=False,
            names=names,
        )
        check(lower(found.schedule, found.plan, resident=found.resident))
        return found

    found, digests = agreed(choose, "the plan", _digest)
    if len({*digests}) > 1:
        other = next(n for n, digest in enumerate(digests) if digest != digests[0])
        raise ScheduleError(f"processes 0 and {other} came to different plans: {HINT}, and has the same fpipe")
    text = _text(found, processes, "" if costs is None else "s" if callable(costs) else "cost", last)
    if is_first:
        log.log(logging.INFO if last is None or last["processes"] == processes else logging.WARNING, text)
        notes.keep(found, processes, measured)
    return Elastic(found, _among(handler, found.plan), text)


def _digest(found: Found) -> int:
    """Return a number for the programs of all ranks."""
    programs = lower(found.schedule, found.plan, resident=found.resident)
    return fingerprint([(rank, program.plan, program.effects) for rank, program in sorted(programs.items())])


def _text(found: Found, processes: int, unit: str, last: Mapping[str, Any] | None) -> str:
    """Return a line about a choice, and about the last one where it was another.

    Args:
        unit: of the costs: "s", "cost" for one that only the caller knows, or "" where stages cost 1 for each piece.
    """
    plan, timeline = found.plan, found.timeline
    took = {"s": scale_of(timeline.cost, "s").full(timeline.cost), "cost": f"{number(timeline.cost)} by the costs"}
    step = took.get(unit, f"{number(timeline.cost)} forwards of a stage")
    replicas = f" in each of {plan.replicas} replicas" if plan.replicas > 1 else ""
    text = f"{counted(plan.ranks, 'rank')}{replicas}: {found.name} on {plan.placement}, a step takes {step}, "
    text += f"bubble {percent(timeline.bubble_rate)}"
    if found.resident is not None:
        text += f", shards of {found.resident} stages whole at a time"
    if idle := processes - plan.ranks * plan.replicas:
        why = "no part of a replica" if plan.ranks < plan.stages else f"no stage: there are {plan.stages}"
        text += f"; {counted(idle, 'process', 'es')} with {why}"
    if last is not None and last != _choice(found, processes):
        text += f"; before: {counted(last['processes'], 'process', 'es')}, {last['schedule']} on "
        text += f"{Placement(last['placement'])}"
    return text


def _choice(found: Found, processes: int) -> dict[str, Any]:
    holders = [ranks[0] for ranks in found.plan.placement.holders]
    return {"processes": processes, "schedule": found.name, "placement": holders}


class _Notes:
    """The file with which the first process tells the next start its plan and the measured costs.

    Args:
        path: of the file; None to keep nothing.
        of: the model that costs are measured for.
    """

    def __init__(self, path: Path | None, of: str) -> None:
        self.path, self.of = path, of

    def recall(self, costs: Costs | Callable[[], Costs] | None) -> tuple[Any, Any]:
        """Return the last choice, and measured costs as JSON; measure them where there are none for this model."""
        content: dict[str, Any] = {}
        if self.path is not None and self.path.exists():
            try:
                content = json.loads(self.path.read_text())
                last = content["last"]
                Placement(last["placement"]), Costs.from_json(content.get("costs", {}))
                content["last"] = {name: last[name] for name in ("processes", "schedule", "placement")}
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                warn(f"{self.path} is no file of fpipe.interop.elastic, and is written anew: {error!r}")
                content = {}
        measured = content.get("costs") if content.get("of") == self.of else None
        if not callable(costs):
            measured = None
        elif measured is None:
            result = costs()
            if not isinstance(result, Costs):
                raise TypeError(f"costs must return Costs, as fpipe.profile does, not {result!r}")
            measured = result.as_json()
        return content.get("last"), measured

    def keep(self, found: Found, processes: int, measured: Any) -> None:
        if self.path is None:
            return
        content: dict[str, Any] = {"last": _choice(found, processes)}
        if measured is not None:
            content |= {"of": self.of, "costs": measured}
        unfinished = self.path.with_name(f".{self.path.name}.unfinished")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(content))
            unfinished.replace(self.path)
        except OSError as error:  # the job can do without
            warn(f"the next start will not know of this plan: {error}")


def _among(handler: Handler, plan: Plan) -> Handler:
    """Return the handler of the processes that a plan uses; in the others, wait until the job is done, and exit."""
    if not isinstance(handler, Distributed) or (plan.replicas == 1 and plan.ranks == handler.size):
        return handler
    every = dist.get_process_group_ranks(handler.group)
    used = plan.ranks * plan.replicas
    store = JobStore(None, handler.timeout).under(f"fpipe/elastic/{handler.group.group_name}")
    store = store.under(str(store.add(f"calls of {handler.rank}", 1)))  # the same on every rank
    if handler.rank >= used:
        _wait(store)
    if handler.rank == 0 and len(every) > used:
        atexit.register(_release, store, len(every) - used)
    grid = torch.tensor(every[:used]).view(plan.ranks, plan.replicas)
    rank, replica = divmod(handler.rank, plan.replicas)

    def group(processes: torch.Tensor) -> dist.ProcessGroup:
        numbers, limit = processes.tolist(), timedelta(seconds=handler.timeout)
        make = partial(dist.new_group, numbers, timeout=limit, use_local_synchronization=True)
        try:
            return bounded(make, handler.timeout)  # type: ignore[no-any-return]
        except (RuntimeError, TimeoutError) as error:  # the host of the job's store may be stopped
            raise TransportError(
                f"process {dist.get_rank()} could not make a group of processes {numbers}: {error}; {HINT}"
            ) from error

    if plan.replicas == 1:
        return handler.over(group(grid[:, 0]))
    groups = [group(grid[:, replica]), group(grid[rank])]
    mesh = DeviceMesh.from_group(groups, handler.device.type, mesh=grid, mesh_dim_names=("pp", "dp"))
    return handler.over(mesh["pp"].get_group(), mesh["dp"])


def _wait(store: JobStore) -> NoReturn:
    """Wait until the processes with stages are done.

    Raises:
        SystemExit: they are; with status 0.
        TransportError: they failed.
    """
    while not store.appear(DONE):
        pass
    reason = store.get(DONE)
    store.add(LEFT, 1)
    if reason:
        time.sleep(LAST_WORD)  # torchrun takes the process that fails first for the cause
        raise TransportError(f"the processes with stages failed: {reason}")
    raise SystemExit(0)


def _release(store: JobStore, count: int) -> None:
    """Let the waiting processes go, at the end of this one, which may host the store."""
    with suppress(StoreError):
        store.set(DONE, repr(error) if (error := getattr(sys, "last_value", None)) is not None else "")
        any(store.add(LEFT, 0) == count for _ in store.within(LAST_WORD).polls())
