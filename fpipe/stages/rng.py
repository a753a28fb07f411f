"""Randomness by (seed, step, stage, microbatch): the same under every schedule, the global generators untouched."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_of(seed: int, step: int, stage: int, microbatch: int) -> int:
    """63 bits that depend on all four.

    >>> seed_of(0, 0, 0, 0) != seed_of(0, 0, 0, 1)
    True
    """
    packed = struct.pack("<4q", *(n & 0x7FFF_FFFF_FFFF_FFFF for n in (seed, step, stage, microbatch)))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


@contextmanager
def seeded(
    rng: tuple[int, int] | None, stage: int, microbatch: int, device: torch.device | None = None
) -> Iterator[None]:
    """Seed the CPU's generator and a CUDA device's (the current one), and put them back; nothing without `rng`."""
    if rng is None:
        yield
        return
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device is None or device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    before = [generator.get_state() for generator in generators]
    value = seed_of(*rng, stage, microbatch)
    try:
        for generator in generators:
            generator.manual_seed(value)
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
