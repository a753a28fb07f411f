"""Random numbers by (seed, step, stage, microbatch, slice). They do not depend on the schedule."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from fpipe.devices import Device, current_device

Rng = tuple[int, int]
"""(seed, step)."""
Seeder = Callable[[int, int], AbstractContextManager[None]]
"""Returns a context for (stage, microbatch) in which draws follow a seed of their own: a graph has such contexts."""


def as_rng(rng: Any) -> Rng:
    """Return (seed, step) as two integers.

    Raises:
        ValueError: it is anything else.
    """
    try:
        seed, step = map(int, rng)
    except (TypeError, ValueError):
        raise ValueError(f"rng must be (seed, step), as in rng=(0, step), not {rng!r}") from None
    return seed, step


def seed_of(seed: int, step: int, stage: int, microbatch: int, slice: int = 0) -> int:  # noqa: A002
    """Return a seed of 63 bits that depends on all numbers. The first slice has that of a microbatch without slices.

    >>> seed_of(0, 0, 0, 0) != seed_of(0, 0, 0, 1) != seed_of(0, 0, 0, 1, slice=1)
    True
    """
    numbers = (seed, step, stage, microbatch, *[slice] * (slice > 0))
    packed = struct.pack(f"<{len(numbers)}q", *(n & 0x7FFF_FFFF_FFFF_FFFF for n in numbers))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


@contextmanager
def seeded(
    rng: Rng | Seeder | None,
    stage: int,
    microbatch: int,
    device: Device | None = None,
    slice: int = 0,  # noqa: A002
) -> Iterator[None]:
    """Seed the generators of a device, by default the current one, and restore them afterwards.

    Args:
        rng: None leaves the generators alone.
    """
    if rng is None:
        yield
        return
    if callable(rng):
        with rng(stage, microbatch):
            yield
        return
    generators = (device or current_device()).generators()
    value = seed_of(*rng, stage, microbatch, slice)
    with restored(generators):
        for generator in generators:
            generator.manual_seed(value)
        yield


@contextmanager
def replayed(states: Sequence[torch.Tensor], device: Device | None = None) -> Iterator[None]:
    """Draw again what the generators of a device drew from these states on, and restore them afterwards."""
    generators = (device or current_device()).generators()
    with restored(generators):
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        yield


@contextmanager
def restored(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Restore the states of generators afterwards."""
    before = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
