"""Which memory checkpoint a start of a job loads: that of its own job, which continues the last one on disk.

Invariants:
- all processes come to the same choice, from the reports of all;
- a step is whole once all its parts are there, and a part of one start of the job goes with those of no other;
- what is on disk decides which job it is, and no step before the one on disk is chosen.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fpipe.interop.checkpoints.manifest import NUMBERED, CheckpointError
from fpipe.interop.checkpoints.neighbours import Transfer, neighbours

JOB = "memory.json"  # the file, beside the checkpoints, by which what is in memory belongs to them


class Choice(NamedTuple):
    """The memory checkpoints that a start of a job may load, by the reports of all its processes.

    Args:
        job: its name.
        start: a name of this start.
        saved: the number of the last checkpoint on disk; 0 if there is none.
        attempt: the number of this start, which is greater than those of all before, and of no other that a host lost.
        steps: attempt and step of each, the newest first.
        parts: how many a step has.
        writes: whether this process has a part.
        neighbours: where each process that has a part sends it, if asked to.
    """

    job: str
    start: str
    saved: int
    attempt: int
    steps: list[tuple[int, int]]
    parts: int
    writes: bool
    neighbours: list[Transfer]


Report = Mapping[str, Any]
"""A process's report, in plain Python types: its host, what it holds, and the parts of steps that it sees."""


def choice_of(reports: Sequence[Report], number: int) -> Choice:
    """Return the choice of all processes; `number` is that of this one.

    Raises:
        CheckpointError: they have different options.
    """
    if len({each["options"] for each in reports}) > 1:
        raise CheckpointError("the ranks have different Memory(every=, neighbour=): every rank makes the same")
    job, start, saved, saved_step = next(each["first"] for each in reports if each["first"] is not None)
    parts, counts, attempts = defaultdict[tuple[int, int], set[int]](set), dict[tuple[int, int], int](), [0]
    for of, attempt, step, holds, count, _ in (row for each in reports for row in each["parts"]):
        if of == job:
            attempts.append(attempt)
            parts[attempt, step].add(holds)
            counts[attempt, step] = count
    whole = [each for each, there in parts.items() if len(there) == counts[each] and each[1] >= saved_step]
    first = {(each["host"], each["holds"]): i for i, each in reversed([*enumerate(reports)])}
    return Choice(
        job=job,
        start=start,
        saved=saved,
        attempt=((max(attempts) >> 32) + 1 << 32) | int(start[:8], 16),
        steps=sorted(whole, reverse=True),
        parts=len({each["holds"] for each in reports}),
        writes=number in first.values(),
        neighbours=neighbours(reports, sorted(first.values())),
    )


def job_of(checkpoints: Path, memory: Path, saved: int) -> str:
    """Return the name of the job that saves into a folder, and has a folder in memory.

    It is new where the folder is, and where its last checkpoint is not the one that the job has saved last: it was
    removed, or something else was saved since. Then what is in memory does not belong to what is on disk. Where nothing
    was saved yet, it is as long as the file is there: removing all that a user sees begins anew.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads((checkpoints / JOB).read_bytes())
        if saved in content["saved"]:
            return str(content["job"])
    checkpoints.mkdir(parents=True, exist_ok=True)
    return note(checkpoints, memory, secrets.token_hex(8), saved)


def note(checkpoints: Path, memory: Path, job: str, *saved: int) -> str:
    """Write the name of a job, its folder in memory, and the number of what it has saved last; return the name.

    While one is sealed there are two numbers: a process that is killed then leaves either.
    """
    unfinished = checkpoints / f".{JOB}.unfinished"
    unfinished.write_text(json.dumps({"job": job, "memory": str(memory), "saved": saved}))
    unfinished.replace(checkpoints / JOB)
    return job


def memory_of(checkpoints: Path) -> Path | None:
    """Return the folder in memory of the job that saves into a folder; None if it has none."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return Path(json.loads((checkpoints / JOB).read_bytes())["memory"])
    return None


def saved_in(checkpoint: Path | None) -> tuple[int, int]:
    """Return number and step of a checkpoint on disk; 0 and -1 where there is none.

    Of one without a step, which no run has saved, the step is later than any.
    """
    match = NUMBERED.fullmatch("" if checkpoint is None else checkpoint.name)
    if match is None:
        return 0, -1
    return int(match[1]), int(match[2].rpartition("-")[2]) if match[2] else sys.maxsize
