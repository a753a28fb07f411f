"""All ranks' recordings over a process group, put on rank 0's clock.

Ranks that read one clock, those of one machine, need no more. Any other clock is compared with rank 0's by messages
there and back: what is read at the other end lies between their sending and their return, which bounds the difference
from both sides, however long either way takes.
"""

from __future__ import annotations

import hashlib
import os
import time
from array import array
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fpipe.errors import ScheduleError, TransportError
from fpipe.profiling.recording import Recording
from fpipe.programs.program import Programs
from fpipe.timelines.measurement import Columns, Measurement

ROUNDS = 64  # messages each way by which two clocks are compared
DRIFT = 1e-4  # seconds that two clocks may drift apart in one: a quartz is good to half of it


def gather(recording: Recording, group: dist.ProcessGroup | DeviceMesh | None = None) -> Measurement:
    """The last whole step of all ranks, on rank 0's clock. Every rank calls it, after the same step.

    Args:
        group: what `Distributed` was given: its ranks are the plan's. By default all processes of the job.

    Returns:
        The same times on every rank; `uncertainty` says how far a rank's may be off, drift since the step included.

    Raises:
        ScheduleError: a process doesn't play its rank of the group, or the recorded programs differ.
        ValueError: a rank has no whole step, or has seen more of them than another.
        TransportError: a peer can't be reached.
    """
    try:
        own: Measurement | ValueError = recording.measurement()
    except ValueError as error:
        own = error
    group = group.get_group() if isinstance(group, DeviceMesh) else group
    said = digest(recording.programs)
    return gathered(own, len(recording.programs), said, recording.steps, recording.clock, group or dist.group.WORLD)


def digest(programs: Programs) -> int:
    """A number that equal programs have."""
    return _number(repr([(program.plan, program.effects) for _, program in sorted(programs.items())]))


def gathered(
    own: Measurement | ValueError, ranks: int, said: int, steps: int, clock: Callable[[], float], group: Any
) -> Measurement:
    """`gather`, for who has measured a step in another way.

    Args:
        own: of this process's rank, or why there is none.
        ranks: how many have a program.
        said: the digest of these.
        steps: which step it is: the same on every rank.
        clock: what its times were read from.
        group: a process group, or a backend that torch.distributed has no name for, as a handler's own are.
    """
    ends = _Ends(own, ranks, said, steps, clock, group)
    try:
        return ends.measurement()
    except RuntimeError as error:
        raise TransportError(
            f"rank {ends.rank} could not gather the recordings ({error}): every rank calls gather, after the same step"
        ) from error


class _Ends:
    """This process's end of the group."""

    def __init__(
        self, own: Measurement | ValueError, ranks: int, said: int, steps: int, clock: Callable[[], float], group: Any
    ) -> None:
        self.own, self.ranks, self.said, self.steps, self.clock, self.group = own, ranks, said, steps, clock, group
        self.rank, self.size = group.rank(), group.size()
        named = isinstance(group, dist.ProcessGroup)
        self.device = "cuda" if named and dist.get_backend(group) == "nccl" else "cpu"

    def measurement(self) -> Measurement:
        own, clocks = self.own, self._agreed()
        if isinstance(own, ValueError):
            raise own  # the peers have been told
        differences = self._differences(clocks)
        columns = {}
        for rank, (offset, _) in enumerate(differences):
            times = [column.tolist() for column in own.columns[rank]] if rank == self.rank else None
            columns[rank] = self._columns(times, rank, len(own.programs[rank]), offset)
        begun = min(own.starts[0] for own in columns.values())
        now = self.clock() - differences[self.rank][0]
        return Measurement(
            own.programs,
            columns,
            {rank: offset for rank, (offset, _) in enumerate(differences)},
            {rank: width + DRIFT * (now - begun) * (width > 0) for rank, (_, width) in enumerate(differences)},
        )

    def _agreed(self) -> list[int]:
        """The clock of each rank as a number, 0 where nobody may share it; that they can be gathered is checked."""
        own = self.own
        plays = isinstance(own, ValueError) or list(own.columns) == [self.rank]
        told = self._all(
            [
                self.said,
                self.size == self.ranks and plays,
                0 if isinstance(own, ValueError) else self.steps,
                _number(_machine()) if self.clock is time.perf_counter else 0,
            ]
        )
        digests, playing, steps, clocks = (list(column) for column in zip(*told, strict=True))
        if not all(playing):
            raise ScheduleError(
                f"rank {playing.index(0)} of {self.size} processes does not play that rank alone of {self.ranks} "
                "recorded ones: gather wants rank r in process r; a process that plays all has recording.measurement()"
            )
        if len(set(digests)) > 1:
            raise ScheduleError(
                "the ranks recorded different programs: every rank makes its Recording of the same ones"
            )
        if not isinstance(own, ValueError) and len(set(steps)) > 1:
            lowest, highest = steps.index(min(steps)), steps.index(max(steps))
            raise ValueError(
                f"rank {lowest} has seen {min(steps)} whole steps, rank {highest} {max(steps)}, so that their last "
                "ones differ: call gather on every rank after the same step, and record anew after a failure"
            )
        return clocks

    def _all(self, numbers: Sequence[int]) -> list[list[int]]:
        shares = [torch.empty(len(numbers), dtype=torch.int64, device=self.device) for _ in range(self.size)]
        self.group.allgather([shares], [torch.tensor(numbers, dtype=torch.int64, device=self.device)]).wait()
        return [share.tolist() for share in shares]

    def _differences(self, clocks: Sequence[int]) -> list[tuple[float, float]]:
        """For each rank, how far its clock is ahead of rank 0's, and how far that may be off."""
        found = torch.zeros(self.size, 2, dtype=torch.float64)
        for rank in range(1, self.size):
            if not clocks[0] or clocks[rank] != clocks[0]:
                if self.rank == 0:
                    found[rank] = torch.tensor(self._difference(rank))
                elif self.rank == rank:
                    self._answer()
        return [(offset, width) for offset, width in self._from(0, found).tolist()]

    def _difference(self, peer: int) -> tuple[float, float]:
        lowest, highest = -inf, inf
        for _ in range(ROUNDS):
            sent = self.clock()
            self._send(0.0, peer)
            read = self._recv(peer)
            back = self.clock()
            lowest, highest = max(lowest, read - back), min(highest, read - sent)
        return (lowest + highest) / 2, abs(highest - lowest) / 2

    def _answer(self) -> None:
        for _ in range(ROUNDS):
            self._recv(0)
            self._send(self.clock(), 0)

    def _send(self, number: float, peer: int) -> None:
        self.group.send([torch.tensor(number, dtype=torch.float64, device=self.device)], peer, 0).wait()

    def _recv(self, peer: int) -> float:
        number = torch.empty((), dtype=torch.float64, device=self.device)
        self.group.recv([number], peer, 0).wait()
        return number.item()

    def _columns(self, own: list[list[float]] | None, rank: int, length: int, offset: float) -> Columns:
        """A rank's columns on rank 0's clock; `own` on that rank."""
        shape = 4, length
        times = torch.empty(shape, dtype=torch.float64) if own is None else torch.tensor(own, dtype=torch.float64)
        return Columns(*(array("d", column) for column in (self._from(rank, times) - offset).tolist()))

    def _from(self, rank: int, numbers: Tensor) -> Tensor:
        """What a rank has, on every rank."""
        numbers = numbers.to(self.device)
        self.group.broadcast(numbers, rank).wait()
        return numbers.cpu()


def _number(text: str) -> int:
    """A text as a whole number, 0 only for none."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little") if text else 0


def _machine() -> str:
    """What the processes that read one monotonic clock have in common, as far as Linux tells; else nothing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/time")
    except OSError:
        return ""
