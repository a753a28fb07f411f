"""Gather the recordings of all ranks, on the clock of rank 0.

Ranks of one machine read one clock. Any other clock is compared with rank 0's by round trips of a message: the reading
at the other end lies between send and return, which bounds the difference from both sides, however long either way
takes.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fpipe.errors import ScheduleError
from fpipe.handlers.distributed.collectives import fingerprint, over
from fpipe.handlers.protocol import Peers
from fpipe.profiling.recording import Recording
from fpipe.programs.program import Programs
from fpipe.timelines.measurement import Columns, Measurement

ROUNDS = 64  # round trips by which two clocks are compared
DRIFT = 1e-4  # seconds by which two clocks may drift apart in one second; a quartz oscillator is twice as good
HINT = "every rank calls gather, after the same step"


def gather(recording: Recording, group: dist.ProcessGroup | DeviceMesh | None = None) -> Measurement:
    """Return the last complete step of all ranks, on rank 0's clock. Every rank calls it, after the same step.

    Args:
        group: as `Distributed` has it: its ranks are the plan's. By default all processes of the job.

    Returns:
        The same times on every rank; `uncertainty` bounds the error of each rank's times, with the drift since the
        step.

    Raises:
        ScheduleError: a process does not play its rank of the group, or the recorded programs differ.
        ValueError: a rank has no complete step, or more of them than another.
        TransportError: a peer can't be reached.
    """
    peers = over(group, "the recordings", hint=HINT, error=ValueError)
    ranks, programs = len(recording.programs), digest(recording.programs)
    return gathered(recording.measurement, ranks, programs, recording.steps, recording.clock, peers)


def digest(programs: Programs) -> int:
    """Return a number that is the same for equal programs."""
    return fingerprint([(program.plan, program.effects) for _, program in sorted(programs.items())])


class _Share(NamedTuple):
    """A rank's part of the exchange.

    Args:
        plays: whether the process plays the rank of its number, and no other.
        clock: a number of the clock; 0 where no other rank may read the same one.
        columns: the bytes of the rank's times.
    """

    programs: int
    plays: bool
    steps: int
    clock: int
    columns: list[bytes]


def gathered(
    measure: Callable[[], Measurement],
    ranks: int,
    programs: int,
    steps: int,
    clock: Callable[[], float],
    peers: Peers,
) -> Measurement:
    """Gather a step that was not measured by a `Recording` alone; otherwise as `gather`.

    Args:
        measure: returns this process's measurement, or raises an error, which reaches all ranks.
        ranks: of the programs.
        programs: their digest.
        steps: a number of the step, the same on every rank.
        clock: the one that its times were read from.
    """

    def share(local: Measurement) -> tuple[object, ...]:
        plays = peers.size == ranks and list(local.columns) == [peers.rank]
        columns = [column.tobytes() for column in local.columns[peers.rank]] if plays else []
        return tuple(_Share(programs, plays, steps, _clock_number(clock), columns))

    local, answers = peers.agree(measure, "gather", share)
    shares = [_Share(*answer) for answer in answers]
    _check(shares, ranks)
    differences = _differences([each.clock for each in shares], clock, peers)
    columns = {rank: _shifted(each.columns, differences[rank][0]) for rank, each in enumerate(shares)}
    start = min(each.starts[0] for each in columns.values())
    age = clock() - differences[peers.rank][0] - start
    return Measurement(
        local.programs,
        columns,
        {rank: offset for rank, (offset, _) in enumerate(differences)},
        {rank: width + DRIFT * age * (width > 0) for rank, (_, width) in enumerate(differences)},
    )


def _check(shares: Sequence[_Share], ranks: int) -> None:
    steps = [share.steps for share in shares]
    for rank, share in enumerate(shares):
        if not share.plays:
            raise ScheduleError(
                f"rank {rank} of {len(shares)} processes does not play that rank alone of {ranks} recorded ones: "
                "gather wants rank r in process r; a process that plays all ranks has recording.measurement()"
            )
    if len({share.programs for share in shares}) > 1:
        raise ScheduleError("the ranks recorded different programs: every rank makes its Recording of the same ones")
    if len(set(steps)) > 1:
        lowest, highest = steps.index(min(steps)), steps.index(max(steps))
        raise ValueError(
            f"rank {lowest} has recorded {min(steps)} complete steps, rank {highest} {max(steps)}, so their last ones "
            "differ: call gather on every rank after the same step, and make new recordings after a failure"
        )


def _differences(clocks: Sequence[int], clock: Callable[[], float], peers: Peers) -> list[tuple[float, float]]:
    """Return for each rank how far its clock is ahead of rank 0's, and the error of that, in seconds."""
    differences = [(0.0, 0.0)] * len(clocks)
    for rank in range(1, len(clocks)):
        if not clocks[0] or clocks[rank] != clocks[0]:
            if peers.rank == 0:
                differences[rank] = _difference(rank, clock, peers)
            elif peers.rank == rank:
                _answer(clock, peers)
    return peers.gather(differences, "gather")[0]


def _difference(peer: int, clock: Callable[[], float], peers: Peers) -> tuple[float, float]:
    lowest, highest = -inf, inf
    for _ in range(ROUNDS):
        sent = clock()
        peers.send(0.0, peer)
        reading = peers.receive(peer)
        back = clock()
        lowest, highest = max(lowest, reading - back), min(highest, reading - sent)
    return (lowest + highest) / 2, abs(highest - lowest) / 2


def _answer(clock: Callable[[], float], peers: Peers) -> None:
    for _ in range(ROUNDS):
        peers.receive(0)
        peers.send(clock(), 0)


def _shifted(columns: Sequence[bytes], offset: float) -> Columns:
    times = [torch.frombuffer(bytearray(column), dtype=torch.float64) - offset for column in columns]
    return Columns(*(array("d", column.tolist()) for column in times))


def _clock_number(clock: Callable[[], float]) -> int:
    """Return a number that all processes share that read one monotonic clock; 0 if that is not known."""
    if clock is not time.perf_counter:
        return 0
    try:  # on Linux
        return fingerprint(Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/time"))
    except OSError:
        return 0
