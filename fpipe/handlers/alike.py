"""Compare what processes that compute stages together were given, before the first step of a program.

Collectives inside of stages would mix the numbers of different batches, and wait for ever where parameters differ. So
each process writes descriptions into the job's store, and reads those of the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fpipe import effects as fx
from fpipe.autodiff.agreement import exchange
from fpipe.autodiff.graph.notices import Notices
from fpipe.errors import StageError, TransportError
from fpipe.handlers.calls import Step
from fpipe.programs.program import Program
from fpipe.stages.pytree import describe, flatten, paths_of, short


def compare(processes: tuple[int, ...], rows: Mapping[str, str], hint: str = "") -> None:
    """Compare descriptions by name with those of other processes that compute stages together; waits for them.

    Args:
        processes: this one and the others.
        hint: another way out.

    Raises:
        StageError: they differ; on all processes, with the first name that differs.
        TransportError: a process did not come.
    """

    def missing(absent: Sequence[int], timeout: float) -> TransportError:
        return TransportError(
            f"processes {[*absent]}, which compute stages together with this one in {[*processes]}, did not come to "
            f"the step within {timeout:g} s: each of them makes the same calls"
        )

    purpose = f"comparing arguments with ranks {[*processes]}"
    first, *others = exchange("arguments", processes, dict(rows), purpose, missing)
    for process, other in zip(processes[1:], others, strict=True):
        for name in [*first, *(name for name in other if name not in first)]:
            a, b = (each.get(name, "missing") for each in (first, other))
            if a != b:
                raise StageError(
                    f"processes {[*processes]} compute stages together and were given different arguments: {name} is "
                    f"{a} on process {processes[0]} and {b} on process {process}. They take the same params but for "
                    f"their pieces, the same batch and the same rng{hint}"
                )


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
