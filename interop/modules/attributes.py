"""Attributes of modules that are not registered; and those by which one forward passes something on to the next.

A stage passes nothing on. An attribute that forward sets before it reads it, such as a loss or a map that it leaves,
passes nothing on either.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from fpipe.errors.tracebacks import warn
from fpipe.stages.pytree import describe, flatten

LOCK = threading.RLock()
"""The patch is process-wide: one call at a time."""

REGISTERED = ("_parameters", "_buffers", "_modules")
MISSING = object()


class Dependents(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the tensors that are computed from the values of some others."""

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors = WeakTensorKeyDictionary(dict.fromkeys(tensors))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if not FACTORY.search(getattr(func, "__name__", "")) and any(map(self.has, pytree.tree_leaves((args, kwargs)))):
            for x in pytree.tree_leaves(results):
                if isinstance(x, Tensor):
                    self.tensors[x] = None
        return results

    def has(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x in self.tensors


FACTORY = re.compile(r"_like\b|^new_")
"""Operators that take the shape of a tensor alone."""


def attributes(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield the attributes of all submodules that are not registered: submodule's name, submodule, name and value."""
    for prefix, part in module.named_modules():
        for name, value in part.__dict__.items():
            if name not in REGISTERED:
                yield prefix, part, name, value


@contextmanager
def warning_of_changes(module: nn.Module, inputs: Any = None) -> Iterator[None]:
    """Warn of attributes that forward reads first, and then changes.

    One that is missing or None before is most often a cache that forward fills, as a mask: it is filled anew instead.
    Only if it is then computed from the inputs, forward passes something on.

    Args:
        inputs: of forward; None if torch warns of attributes that are computed from them, as `torch.export` does.
    """
    before = {(id(part), name): (value, _content(value)) for _, part, name, value in attributes(module)}
    reads = dict[tuple[int, str], Any]()
    dependents = Dependents(x for x in flatten(inputs).leaves if isinstance(x, Tensor))
    with LOCK, ExitStack() as stack:
        stack.enter_context(patch.object(nn.Module, "__getattribute__", _noting(reads)))
        if inputs is not None:
            stack.enter_context(dependents)
        yield
    for prefix, part, name, value in attributes(module):
        key = id(part), name
        is_torchs = type(part).__module__.startswith("torch.")  # such as the list of an LSTM's weights
        if is_torchs or key not in reads:
            continue
        was, content = before.get(key, (reads[key], None))  # of the class, or missing
        if was is None or was is MISSING:
            is_changed = any(map(dependents.has, [value, *_content(value)]))
        else:
            is_same = _same(was, value) and (content is None or _same_all(content, _content(value)))
            is_changed = reads[key] is was and not is_same
        if is_changed:
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


def _same_all(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(_same, a, b))


def _text(value: Any) -> str:
    if value is MISSING:
        return "nothing"
    return "None" if value is None else describe(value)
