"""Compare what processes that compute stages together were given, before the first step of a program.

Collectives inside of stages would mix the numbers of different batches, and wait for ever where parameters differ. So
each process writes descriptions into the job's store, and reads those of the others.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from fpipe.errors import StageError, TransportError
from fpipe.handlers.calls import Step
from fpipe.stages.pytree import describe, flatten, paths_of, short

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LIMIT = 300.0
"""Seconds within which the other processes must come to the step."""
EACH = 0.01
"""Seconds between two looks into the store."""


def compare(mesh: DeviceMesh, rows: Mapping[str, str], limit: float = LIMIT) -> None:
    """Compare descriptions by name with those of the other processes of a mesh; waits for them.

    Raises:
        StageError: they differ; on all processes, with the first name that differs.
        TransportError: a process did not come.
    """
    processes, here = mesh.mesh.flatten().tolist(), dist.get_rank()
    store = PrefixStore(f"fpipe/together/{'-'.join(map(str, processes))}", _get_default_store())
    number = store.add(f"count of {here}", 1)
    keys = {process: f"{number} of {process}" for process in processes}
    store.set(keys[here], json.dumps(dict(rows)))
    until = time.monotonic() + limit
    while missing := [process for process, key in keys.items() if not store.check([key])]:
        if time.monotonic() > until:
            store.delete_key(keys[here])  # so that the next comparison has the same number on each process
            store.add(f"count of {here}", -1)
            raise TransportError(
                f"processes {missing}, which compute stages together with this one over {mesh}, did not come to the "
                f"step within {limit:g} s: each of them makes the same calls"
            )
        time.sleep(EACH)
    first, *others = (json.loads(store.get(keys[process])) for process in processes)
    for process, other in zip(processes[1:], others, strict=True):
        for name in [*first, *(name for name in other if name not in first)]:
            a, b = (each.get(name, "missing") for each in (first, other))
            if a != b:
                raise StageError(
                    f"processes {processes} compute stages together and were given different arguments: {name} is {a} "
                    f"on process {processes[0]} and {b} on process {process}. They take the same params but for their "
                    "pieces, the same batch and the same rng"
                )


def descriptions(step: Step) -> dict[str, str]:
    """Return the descriptions of a step's arguments, by name: of params without values, of the microbatches with."""
    rows = {"rng": repr(step.inputs.rng) if not callable(step.inputs.rng) else "of a graph"}
    for stage, prepared in step.prepared.items():
        for i, (path, leaf) in enumerate(zip(paths_of(prepared.spec), prepared.leaves, strict=True)):
            place = prepared.placed.get(i)
            piece = describe(leaf) if place is None else f"{[*place.shape]} placed {place.placements}"
            frozen = "" if i in prepared.trained else ", frozen"
            rows[f"params[{stage}]{short(path)}"] = f"{piece}{frozen}"
    for m, microbatch in enumerate(step.inputs.data):
        for name in ("batch", "target"):
            rows |= {f"{name}{path} of microbatch {m}": x for path, x in _values(getattr(microbatch, name))}
    return rows


def _values(tree: object) -> Iterator[tuple[str, str]]:
    leaves, spec = flatten(tree)
    for path, leaf in zip(paths_of(spec), leaves, strict=True):
        if not isinstance(leaf, Tensor):
            yield short(path), repr(leaf)
            continue
        numbers = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield (
            short(path),
            f"{describe(leaf)} with values of digest {hashlib.blake2b(numbers, digest_size=4).hexdigest()}",
        )
