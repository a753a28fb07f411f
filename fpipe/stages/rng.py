"""Random numbers by (seed, step, stage, microbatch). They do not depend on the schedule."""

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


def seed_of(seed: int, step: int, stage: int, microbatch: int) -> int:
    """Return a seed of 63 bits that depends on all four numbers.

    >>> seed_of(0, 0, 0, 0) != seed_of(0, 0, 0, 1)
    True
    """
    packed = struct.pack("<4q", *(n & 0x7FFF_FFFF_FFFF_FFFF for n in (seed, step, stage, microbatch)))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


@contextmanager
def seeded(rng: Rng | Seeder | None, stage: int, microbatch: int, device: Device | None = None) -> Iterator[None]:
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
    value = seed_of(*rng, stage, microbatch)
    with restored(generators):
        for generator in generators:
            generator.manual_seed(value)
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
