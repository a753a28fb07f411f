"""Memory of a graph: tensors with the layout of others, and copies into them."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe.devices.interface import Device
from fpipe.devices.tape import whole


def given_back_after(owner: object, event: Any, device: Device) -> None:
    """Let the current stream wait for an event when an owner of new memory is gone.

    The memory goes back to this stream, which may give it away at once, while another stream still uses it.
    """
    weakref.finalize(owner, device.current_stream().wait_event, event).atexit = False


def empty_as(x: Any) -> Any:
    """Return new memory with the layout of a tensor, which requires a gradient if that does; another value as it is."""
    if not isinstance(x, Tensor):
        return x
    memory = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    memory = memory.conj() if x.is_conj() else memory
    return (torch._neg_view(memory) if x.is_neg() else memory).requires_grad_(x.requires_grad)


def copied(values: Sequence[Any]) -> list[Any]:
    """Return tensors in new memory; other values as they are."""
    new = list(map(empty_as, values))
    copy(values, list(map(in_memory, new)))
    return new


def copy(values: Iterable[Any], into: Iterable[Any]) -> None:
    """Copy tensors into others of their layouts, those of one dtype by one kernel; leave other values out.

    Args:
        into: as `in_memory` returns them.
    """
    pairs = defaultdict[torch.dtype, tuple[list[Tensor], list[Tensor]]](lambda: ([], []))
    for x, memory in zip(values, into, strict=True):
        if isinstance(x, Tensor):
            pairs[x.dtype][0].append(memory)
            pairs[x.dtype][1].append(in_memory(x))
    with torch.no_grad():
        for memories, tensors in pairs.values():
            torch._foreach_copy_(memories, tensors)


def in_memory(x: Any) -> Any:
    """Return each element that is in memory once, as it is there: not repeated, not conjugated and not negated."""
    if not isinstance(x, Tensor):
        return x
    x = x.conj() if x.is_conj() else x
    return whole(torch._neg_view(x) if x.is_neg() else x)
