"""Questions about calls of torch's operators: what they write to, and whether they draw random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names in the operation's schema."""
    return dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes to; a list of tensors counts as its items."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    by_name = arguments(func, args, kwargs)
    values = [by_name.get(a.name) for a in schema.arguments if a.is_write]
    return [x for value in values for x in (value if isinstance(value, list | tuple) else [value]) if x is not None]


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call draws random numbers: attention, for one, does only with dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    rate = arguments(func, args, kwargs).get("dropout_p", 0.0)
    return not any(a.name == "dropout_p" for a in func._schema.arguments) or bool(rate)
