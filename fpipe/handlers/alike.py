"""Begin a step on all processes that compute its stages together, or on none of them.

Collectives inside of stages would mix the numbers of different batches, and wait for ever where one process refuses the
step or its parameters differ. So before anything runs, each process writes descriptions of its arguments into the job's
store, and reads those of the others: in the first step of a program, and in each in which one of them has other
shardings, other values or an error. Whether one has is known from two numbers of each, which travel in every step. The
values of params that every process has whole are compared in the first step alone.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe import effects as fx
from fpipe.autodiff.agreement import exchange
from fpipe.autodiff.graph.collectives import watch_of_handler
from fpipe.autodiff.graph.notices import Notices, Ranks
from fpipe.autodiff.interface import DifferentiablePipeline
from fpipe.errors import StageError, TransportError
from fpipe.handlers import contents
from fpipe.handlers.calls import Step
from fpipe.handlers.contents import fingerprint
from fpipe.handlers.gloo import cut, gloo_group
from fpipe.handlers.protocol import Departure, Inputs
from fpipe.programs.program import Program
from fpipe.stages.pytree import describe, flatten, paths_of, short
from fpipe.stages.sharding import Placed, sharding_key
from fpipe.store import LIMIT, JobStore, bounded, polls

FOREVER = 30 * 86400.0  # seconds: the watch ends the wait
FIRST_PAUSE, LAST_PAUSE = 5e-5, 1e-3  # seconds between two looks for the numbers of other processes


class StagePeers:
    """The processes that compute the stages of one program together with this one."""

    def __init__(self) -> None:
        self._links: dict[Ranks, Any] = {}  # groups of gloo, on the CPU
        self._shardings: object = None  # of the params that were compared last

    def agree(
        self,
        groups: Sequence[Ranks],
        inputs: Inputs,
        shardings: object,
        rows: Callable[[bool], Mapping[str, str]],
        error: Exception | None,
        departure: Departure,
    ) -> None:
        """Wait until all processes can run the step.

        Args:
            groups: the processes, this one among them, along each dimension.
            shardings: is compared with that of the step before.
            rows: returns the descriptions of the arguments, by name; given whether those have the values of params.
            error: keeps this process from the step.
            departure: of the handler; the numbers tell the others whether it was asked.

        Raises:
            Exception: `error`.
            StageError: another process has one, or their arguments differ: on all processes, with the first name.
            TransportError: a process did not come.
        """
        has_news = error is not None or shardings != self._shardings
        departure.is_shared |= bool(groups)
        for processes in groups:
            watch_of_handler().meet(processes)
            is_first = processes not in self._links
            if not is_first and not self._have_news(processes, has_news, _digest(inputs), departure):
                continue
            try:
                link = compare(processes, {} if error is not None else rows(is_first), error)
            except StageError as difference:
                error = error or difference
                continue
            if is_first:
                self._link(processes, link)
        if error is not None:
            raise error
        self._shardings = shardings

    def _link(self, processes: Ranks, name: str) -> None:
        watch, rank, purpose = (
            watch_of_handler(),
            processes.index(dist.get_rank()),
            f"connecting processes {[*processes]}",
        )
        store = JobStore(None, LIMIT).under(f"fpipe/stages/{name}").store
        with watch.waiting(purpose, None):
            connect = partial(gloo_group, store, rank, len(processes), watch.timeout or FOREVER)
            try:
                self._links[processes] = bounded(connect, watch.timeout, partial(watch.check, purpose))
            except TimeoutError:
                raise _missing(processes, "one of them", watch.timeout or FOREVER) from None

    def _have_news(self, processes: Ranks, has_news: bool, digest: int, departure: Departure) -> bool:
        """Return whether one of the processes has news, or another digest."""
        watch, purpose = watch_of_handler(), f"beginning a step with processes {[*processes]}"
        numbers = torch.empty(len(processes), 2, dtype=torch.int64)
        own = torch.tensor([has_news | departure.is_asked << 1, digest])
        work = self._links[processes].allgather([[*numbers]], [own])
        limit = float("inf") if watch.timeout is None else watch.timeout
        try:
            with watch.waiting(purpose, None):
                looks = polls(time.monotonic() + limit, partial(watch.check, purpose), FIRST_PAUSE, LAST_PAUSE)
                if not any(work.is_completed() for _ in looks):
                    raise _missing(processes, "one of them", limit)
                work.wait()
        except BaseException:
            # What is in flight there would be taken for the next step's; a group waits for it when it is collected.
            cut(self._links.pop(processes))
            raise
        flags, digests = numbers.unbind(1)
        departure.is_passed |= bool((flags & 2).any())
        return bool((flags & 1).any() or (digests != digest).any())


def _digest(inputs: Inputs) -> int:
    """Return a number that is the same for the same rng, settings and rows: for the latter, it holds some values."""
    data = contents.of_data(inputs)
    return fingerprint((contents.of_rng(inputs), contents.settings(inputs), inputs.rows, len(inputs.data), data))


def compare(processes: Ranks, rows: Mapping[str, str], error: Exception | None = None, hint: str = "") -> str:
    """Compare descriptions by name with those of other processes that compute stages together; waits for them.

    Args:
        processes: this one and the others.
        error: keeps this process from the step.
        hint: another way out.

    Returns:
        A name that they share, and no others.

    Raises:
        StageError: one has an error, or they differ; on all processes, with the first name that differs.
        TransportError: a process did not come.
    """
    each = exchange(
        "arguments",
        processes,
        [uuid.uuid4().hex, None if error is None else _text(error), dict(rows)],
        f"comparing arguments with ranks {[*processes]}",
        lambda absent, timeout: _missing(processes, [*absent], timeout),
    )
    for process, (_, text, _) in zip(processes, each, strict=True):
        if text is not None:
            raise StageError(
                f"process {process}, which computes stages together with processes "
                f"{[other for other in processes if other != process]}, can't run the step: {text}"
            )
    name, _, first = each[0]
    for process, (_, _, other) in zip(processes[1:], each[1:], strict=True):
        for row in [*first, *(row for row in other if row not in first)]:
            a, b = (rows.get(row, "missing") for rows in (first, other))
            if a != b:
                raise StageError(
                    f"processes {[*processes]} compute stages together and were given different arguments: {row} is "
                    f"{a} on process {processes[0]} and {b} on process {process}. They take the same params but for "
                    f"their pieces, the same batch and the same rng{hint}"
                )
    return str(name)


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, StageError) else f"{type(error).__name__}: {error}"


def _missing(processes: Ranks, absent: object, timeout: float) -> TransportError:
    return TransportError(
        f"of processes {[*processes]}, which compute stages together, {absent} did not come to the step within "
        f"{timeout:g} s: each of them makes the same calls, with params sharded over the same mesh"
    )


def shardings_of(step: Step) -> object:
    """Return the shardings of a step's params, to be compared with those of another step."""
    return [
        (stage, prepared.spec, prepared.trained, [*prepared.placed.items()], [*map(_sharding, prepared.leaves)])
        for stage, prepared in step.prepared.items()
    ]


def _sharding(leaf: Any) -> object:
    return sharding_key(leaf) if isinstance(leaf, Tensor) else repr(leaf)


def notices_of(programs: Iterable[Program]) -> Notices:
    """Return the notices of the programs that a process runs: other processes of its groups run equal ones."""
    return Notices(
        lambda: (
            effect
            for program in programs
            for effect in program
            if any(program.table.effects[type(part)].track == "compute" for part in fx.parts(effect))
        )
    )


def options(pieces: DifferentiablePipeline) -> dict[str, object]:
    """Return the options of a step that are the same wherever one of its stages runs, by their names."""
    return {
        "loss= or gather=": (pieces.loss, pieces.gather),
        "precision=": pieces.precision,
        "argnums=": sorted(pieces.argnums),
        "reduction= or weight=": (pieces.shares, fingerprint(pieces.weight)),
    }


def descriptions(step: Step, pieces: DifferentiablePipeline, has_values: bool = False) -> dict[str, str]:
    """Return the descriptions of a step's arguments, by name, of the microbatches with values.

    Args:
        has_values: with digests of the values of params that are whole on every process.
    """
    inputs = step.inputs
    rows = {f"the option {name}": repr(option) for name, option in options(pieces).items()}
    rows |= {name: repr(setting) for name, setting in contents.settings(inputs).items()}
    rows |= {
        "rng": repr(inputs.rng) if not callable(inputs.rng) else "of a graph",
        "the number of rows": repr(inputs.rows),
    }
    for stage, prepared in step.prepared.items():
        for i, (path, leaf) in enumerate(zip(paths_of(prepared.spec), prepared.leaves, strict=True)):
            place = prepared.placed.get(i)
            piece = describe(leaf) if place is None else _placed(leaf, place)
            frozen = "" if i in prepared.trained else ", frozen"
            rows[f"params[{stage}]{short(path)}"] = f"{piece}{frozen}"
    for m, microbatch in enumerate(inputs.data):
        for name in ("batch", "target"):
            rows |= {f"{name}{path} of microbatch {m}": x for path, x in _values(getattr(microbatch, name))}
    return rows | (_digests(step) if has_values else {})


def _digests(step: Step) -> dict[str, str]:
    """Return digests of the values of params that are whole on every process, by name."""
    rows = {}
    for stage, prepared in step.prepared.items():
        for i, (path, leaf) in enumerate(zip(paths_of(prepared.spec), prepared.leaves, strict=True)):
            place = prepared.placed.get(i)
            if isinstance(leaf, Tensor) and (place is None or all(each.is_replicate() for each in place.placements)):
                rows[f"the digest of the values of params[{stage}]{short(path)}"] = contents.digest(leaf)
    return rows


def _placed(leaf: Tensor, place: Placed) -> str:
    mesh = place.mesh.mesh.flatten().tolist()
    return f"{describe(leaf).partition('[')[0]}{[*place.shape]} placed {place.placements} over processes {mesh}"


def _values(tree: object) -> Iterator[tuple[str, str]]:
    leaves, spec = flatten(tree)
    for path, leaf in zip(paths_of(spec), leaves, strict=True):
        if not isinstance(leaf, Tensor):
            yield short(path), repr(leaf)
            continue
        yield short(path), f"{describe(leaf)} with values of digest {contents.digest(leaf)}"
