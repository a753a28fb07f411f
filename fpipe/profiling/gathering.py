"""Gather the recordings of all ranks of all replicas, on the clock of the first rank.

Ranks of one machine read one clock. Any other clock is compared with that rank's by round trips of a message: the
reading at the other end lies between send and return, which bounds the difference from both sides, however long either
way takes.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fpipe.errors import ScheduleError
from fpipe.handlers.contents import fingerprint
from fpipe.handlers.distributed.collectives import over
from fpipe.handlers.protocol import Peers
from fpipe.profiling.recording import Recording
from fpipe.programs.program import Programs
from fpipe.timelines.measurement import Columns, Measurement

ROUNDS = 64  # round trips by which two clocks are compared
DRIFT = 1e-4  # seconds by which two clocks may drift apart in one second; a quartz oscillator is twice as good
HINT = "every rank calls gather, after the same step"


def gather(recording: Recording, group: dist.ProcessGroup | DeviceMesh | None = None) -> Measurement:
    """Return the last complete steps of all ranks, on rank 0's clock. Every rank calls it, after the same step.

    Args:
        group: processes that play all ranks of one replica of the pipeline, or of all replicas; or one dimension of a
            DeviceMesh. By default all processes of the job.

    Returns:
        The same times on every rank of a replica; `uncertainty` bounds the error of each rank's times, with the drift
        since the step. If the group has several replicas, `replicas` has the measurement of each, on the clock of rank
        0 of the first.

    Raises:
        ScheduleError: a process plays no rank or several, two play the same, or the recorded programs or loops differ.
        ValueError: a rank has no complete step, or more of them than another.
        TransportError: a peer can't be reached.
    """
    peers = over(group, "the recordings", hint=HINT, error=ValueError)
    step = Step(digest(recording.programs), recording.replica, recording.steps)
    return gathered(recording.measurement, step, recording.clock, peers)


def digest(programs: Programs) -> int:
    """Return a number that is the same for equal programs."""
    return fingerprint([(program.plan, program.effects) for _, program in sorted(programs.items())])


class Step(NamedTuple):
    """A recorded step.

    Args:
        programs: their digest.
        replica: the one that this process plays.
        number: the same on every rank.
    """

    programs: int
    replica: int
    number: int


class _Share(NamedTuple):
    """A process's part of the exchange.

    Args:
        ranks: those that the process plays.
        steps: how many it has recorded in a row.
        clock: a number of the clock; 0 where no other process may read the same one.
        columns: the bytes of the first of these ranks' times.
    """

    step: Step
    ranks: tuple[int, ...]
    steps: int
    clock: int
    columns: list[bytes]

    @property
    def place(self) -> tuple[int, int]:
        """The replica and the rank."""
        return self.step.replica, self.ranks[0]


def gathered(measure: Callable[[], Measurement], step: Step, clock: Callable[[], float], peers: Peers) -> Measurement:
    """Gather a step that was not measured by a `Recording` alone; otherwise as `gather`.

    Args:
        measure: returns this process's measurement, or raises an error, which reaches all ranks.
        clock: the one that its times were read from.
    """

    def share(local: Measurement) -> tuple[object, ...]:
        ranks = tuple(local.columns)
        columns = [column.tobytes() for column in local.columns[ranks[0]]] if len(ranks) == 1 else []
        return tuple(step), ranks, local.steps, _clock_number(clock), columns

    local, answers = peers.agree(measure, "gather", share)
    shares = [_Share(Step(*of), *rest) for of, *rest in answers]
    _check(shares, len(local.programs))
    differences = _differences(shares, clock, peers)
    times = [_shifted(each.columns, offset) for each, (offset, _) in zip(shares, differences, strict=True)]
    age = clock() - differences[peers.rank][0] - min(columns.starts[0] for columns in times)
    replicas: dict[int, Measurement] = {}
    for number in sorted(range(len(shares)), key=lambda number: shares[number].place):
        (replica, rank), (offset, width) = shares[number].place, differences[number]
        own = replicas.setdefault(replica, Measurement(local.programs, {}, steps=local.steps))
        replicas[replica] = replace(
            own,
            columns={**own.columns, rank: times[number]},
            offsets={**own.offsets, rank: offset},
            uncertainty={**own.uncertainty, rank: width + DRIFT * age * (width > 0)},
        )
    return replace(replicas[step.replica], replicas=tuple(replicas.values()) if len(replicas) > 1 else ())


def _check(shares: Sequence[_Share], ranks: int) -> None:
    places, replicas = set[tuple[int, int]](), {share.step.replica for share in shares}
    for number, share in enumerate(shares):
        if len(share.ranks) != 1 or share.place in places or len(shares) != ranks * len(replicas):
            raise ScheduleError(
                f"rank {number} of {len(shares)} processes does not play that rank alone of {ranks} recorded ones: "
                "gather wants each rank, of one replica or of all, in one process; a process that plays all ranks has "
                "recording.measurement()"
            )
        places.add(share.place)
    if len({share.step.programs for share in shares}) > 1:
        raise ScheduleError("the ranks recorded different programs: every rank makes its Recording of the same ones")
    if len({share.steps for share in shares}) > 1:
        raise ScheduleError("the ranks recorded different numbers of steps: give every rank's Recording the same loop=")
    steps = [share.step.number for share in shares]
    if len(set(steps)) > 1:
        lowest, highest = steps.index(min(steps)), steps.index(max(steps))
        raise ValueError(
            f"rank {lowest} has recorded {min(steps)} complete steps, rank {highest} {max(steps)}, so their last ones "
            "differ: call gather on every rank after the same step, and make new recordings after a failure"
        )


def _differences(shares: Sequence[_Share], clock: Callable[[], float], peers: Peers) -> list[tuple[float, float]]:
    """Return for each process how far its clock is ahead of the first rank's, and the error of that, in seconds."""
    differences = [(0.0, 0.0)] * len(shares)
    first = min(range(len(shares)), key=lambda number: shares[number].place)
    for number, share in enumerate(shares):
        if number != first and (not share.clock or share.clock != shares[first].clock):
            if peers.rank == first:
                differences[number] = _difference(number, clock, peers)
            elif peers.rank == number:
                _answer(clock, peers, first)
    return peers.gather(differences, "gather")[first]


def _difference(peer: int, clock: Callable[[], float], peers: Peers) -> tuple[float, float]:
    lowest, highest = -inf, inf
    for _ in range(ROUNDS):
        sent = clock()
        peers.send(0.0, peer)
        reading = peers.receive(peer)
        back = clock()
        lowest, highest = max(lowest, reading - back), min(highest, reading - sent)
    return (lowest + highest) / 2, abs(highest - lowest) / 2


def _answer(clock: Callable[[], float], peers: Peers, to: int) -> None:
    for _ in range(ROUNDS):
        peers.receive(to)
        peers.send(clock(), to)


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
