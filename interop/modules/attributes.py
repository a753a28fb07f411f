"""Attributes of modules that are not registered; and those by which one forward passes something on to the next.

A stage passes nothing on. An attribute that forward sets before it reads it, such as a loss or a map that it leaves,
passes nothing on either.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy
from torch import Tensor, nn

from fpipe.errors import warn
from fpipe.stages.pytree import describe

LOCK = threading.RLock()
"""The patch is process-wide: one call at a time."""

REGISTERED = ("_parameters", "_buffers", "_modules")
MISSING = object()


def attributes(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield the attributes of all submodules that are not registered: submodule's name, submodule, name and value."""
    for prefix, part in module.named_modules():
        for name, value in part.__dict__.items():
            if name not in REGISTERED:
                yield prefix, part, name, value


@contextmanager
def warning_of_changes(module: nn.Module) -> Iterator[None]:
    """Warn of attributes that forward reads first, and then changes.

    One that is missing or None before is most often a cache that forward fills, as a mask: it is filled anew instead.
    """
    before = {(id(part), name): (value, _content(value)) for _, part, name, value in attributes(module)}
    reads = dict[tuple[int, str], Any]()
    with LOCK, patch.object(nn.Module, "__getattribute__", _noting(reads)):
        yield
    for prefix, part, name, value in attributes(module):
        key = id(part), name
        was, content = before.get(key, (None, None))
        is_read_first = key in reads and reads[key] is was and was is not None
        is_torchs = type(part).__module__.startswith("torch.")  # such as the list of an LSTM's weights
        if is_read_first and not is_torchs and not (_same(was, value) and _same_all(content, _content(value))):
            change = "what is in it" if was is value else f"it from {_text(was)} to {_text(value)}"
            place = f"{prefix}.{name}" if prefix else name
            warn(
                f"forward reads the attribute {place} of a {type(part).__name__}, and then "
                f"changes {change}. Stages do not pass it on from call to call, as the module does: make it a buffer, "
                "or set it before it is read",
            )


def _noting(reads: dict[tuple[int, str], Any]) -> Any:
    """Return a `__getattribute__` that notes the first value that each attribute is read with."""

    def get(self: nn.Module, name: str) -> Any:
        try:
            value = object.__getattribute__(self, name)
        except AttributeError:
            reads.setdefault((id(self), name), MISSING)
            raise
        reads.setdefault((id(self), name), value)
        return value

    return get


def _content(value: Any) -> list[Any]:
    """Return what may change within a value while it stays the same object."""
    if isinstance(value, list | tuple | set):
        return list(value)
    if isinstance(value, dict):
        return [x for item in value.items() for x in item]
    if isinstance(value, random.Random):
        return [value.getstate()]
    if isinstance(value, numpy.random.RandomState):
        return [str(value.get_state())]
    if isinstance(value, numpy.random.Generator):
        return [str(value.bit_generator.state)]
    if isinstance(value, nn.Module | Tensor | type) or callable(value):
        return []
    return [x for item in getattr(value, "__dict__", {}).items() for x in item]


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, bool | int | float | complex | str | tuple) and bool(a == b))


def _same_all(a: list[Any] | None, b: list[Any]) -> bool:
    return a is not None and len(a) == len(b) and all(map(_same, a, b))


def _text(value: Any) -> str:
    return "None" if value is None else describe(value)
