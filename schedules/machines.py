"""Devices and the links between them: how long FLOPs, bytes and collectives take. No torch.

Peaks, bandwidths and bytes are those of data sheets. The share of a peak that a model reaches is not in any: 0.5 by
default, as of models with more than a hundred billion parameters (Narayanan et al. 2021, table 1; Korthikanti et al.
2023, table 5).
Latencies are those of a step of a ring in NCCL's own model (`tuning.cc`, ring, simple protocol).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd

from fpipe.costs import Link
from fpipe.errors import ScheduleError

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Machine:
    """Hosts of equal devices, a rank on each.

    Args:
        flops: the peak of a device in FLOP/s, by dtype; dense, not sparse.
        bandwidth: of a device's memory, in bytes a second.
        memory: bytes of a device.
        inside: the link of a device to the others of its host, in one direction.
        between: its share of the links between hosts.
        on_host: devices of a host.
        efficiency: the share of the peak that the pieces of a model reach, without their collectives.

    Raises:
        ScheduleError: a number that is not positive, an efficiency above 1, or a dtype that is not known.
    """

    flops: Mapping[str, float]
    bandwidth: float
    memory: float
    inside: Link
    between: Link
    on_host: int = 8
    efficiency: float = 0.5

    def __post_init__(self) -> None:
        for dtype in self.flops:
            if dtype not in ITEMSIZES:
                raise ScheduleError(f"the bytes of {dtype!r} are not known: take {', '.join(ITEMSIZES)}")
        numbers = {"bandwidth": self.bandwidth, "memory": self.memory, "on_host": self.on_host}
        for name, number in {**numbers, **{f"flops of {dtype}": peak for dtype, peak in self.flops.items()}}.items():
            if not number > 0:
                raise ScheduleError(f"{name} must be more than 0, not {number!r}")
        if not 0 < self.efficiency <= 1:
            raise ScheduleError(
                f"efficiency is a share of the peak, more than 0 and at most 1, not {self.efficiency!r}"
            )

    @property
    def dtype(self) -> str:
        """bfloat16 if there is a peak for it, else the first dtype that has one."""
        return "bfloat16" if "bfloat16" in self.flops else next(iter(self.flops))

    def peak(self, dtype: str) -> float:
        """Return the peak in FLOP/s.

        Raises:
            ScheduleError: there is none for the dtype.
        """
        if dtype not in self.flops:
            raise ScheduleError(f"the machine has no peak for {dtype}: it has those for {', '.join(self.flops)}")
        return self.flops[dtype]

    def time(self, flops: float, moved: float, dtype: str) -> float:
        """Return the seconds of a piece: of its FLOPs or of the bytes that it moves, whichever takes longer.

        This is the roofline (Williams et al., "Roofline", CACM 2009) with the peak that is reached.
        """
        return max(flops / (self.peak(dtype) * self.efficiency), moved / self.bandwidth)

    def link(self, size: int, stride: int) -> Link:
        """Return the link of each rank in a ring of `size` ranks that are `stride` apart.

        Of a ring with k ranks on a host, k devices share its way to the next host. The slowest ring counts.

        >>> rings = [(8, 1), (16, 1), (2, 4), (2, 8), (3, 1), (12, 1)]
        >>> [MACHINES["a100"].link(size, stride).bandwidth / 1e9 for size, stride in rings]
        [300.0, 200.0, 300.0, 25.0, 25.0, 100.0]
        """
        together = self.together(size, stride)
        if together == size:
            return self.inside
        return Link(self.between.latency, min(self.inside.bandwidth, together * self.between.bandwidth))

    def together(self, size: int, stride: int) -> int:
        """Return how many ranks of a ring are on a host: of all rings and hosts, the fewest.

        The ring of ranks 6, 7 and 8 has one rank on the second host of eight devices, though the one before it has
        three on the first.

        >>> MACHINES["a100"].together(3, 1), MACHINES["a100"].together(4, 2)
        (1, 4)
        """
        return max(1, gcd(size * stride, self.on_host) // stride)


def gathering(link: Link, size: int, nbytes: float) -> float:
    """Return the seconds in which a ring of `size` ranks gathers so many bytes in all, or adds and scatters them.

    Each rank sends size - 1 times a part of 1/size (Thakur et al., "Optimization of Collective Communication Operations
    in MPICH", 2005, sections 4.1 and 4.4).

    >>> gathering(Link(latency=1, bandwidth=10), size=4, nbytes=40)
    6.0
    """
    return (size - 1) * (link.latency + nbytes / size / link.bandwidth)


def exchanging(machine: Machine, size: int, stride: int, nbytes: float) -> float:
    """Return the seconds in which each of `size` ranks sends every other one a part of 1/size of so many bytes.

    A rank sends to one after the other, those of its host and those of others (pairwise exchange, Thakur et al. 2005).

    >>> a100 = MACHINES["a100"]
    >>> exchanging(a100, 16, 1, 16e9) == 7 * (a100.inside.latency + 1 / 300) + 8 * (a100.between.latency + 1 / 25)
    True
    """
    together = machine.together(size, stride)
    peers = ((together - 1, machine.inside), (size - together, machine.between))
    return sum(count * (link.latency + nbytes / size / link.bandwidth) for count, link in peers)


def summing(link: Link, size: int, nbytes: float) -> float:
    """Return the seconds of an all-reduce over a ring: a reduce-scatter and an all-gather."""
    return 2 * gathering(link, size, nbytes)


_NVLINK, _NETWORK = 3.4e-6, 14e-6  # seconds of a step

# Data sheets of NVIDIA's A100 80GB SXM, H100 SXM, H200 SXM; of DGX A100 (200 Gb/s a GPU), DGX H100 and H200 (400 Gb/s).
# An NVLink's bandwidth is listed for both directions together. "cpu" is no device's: a core, and gloo on one host.
_H100 = Machine(
    flops={"bfloat16": 989e12, "float16": 989e12, "float32": 67e12},
    bandwidth=3.35e12,
    memory=80e9,
    inside=Link(_NVLINK, 450e9),
    between=Link(_NETWORK, 50e9),
)
MACHINES = {
    "a100": Machine(
        flops={"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12},
        bandwidth=2.039e12,
        memory=80e9,
        inside=Link(_NVLINK, 300e9),
        between=Link(_NETWORK, 25e9),
    ),
    "h100": _H100,
    "h200": replace(_H100, bandwidth=4.8e12, memory=141e9),
    "cpu": Machine(
        flops={"float32": 50e9},
        bandwidth=10e9,
        memory=4e9,
        inside=Link(100e-6, 1e9),
        between=Link(200e-6, 1e8),
        on_host=64,
    ),
}
