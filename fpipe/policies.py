"""Rematerialisation policies: which values a forward saves for its backward, named as in `jax.checkpoint_policies`.

A policy returns whether to save a value. The backward recomputes the other values that it needs, at most once for
each microbatch. None leaves the choice to fpipe, which saves the value unless it can be recomputed from saved ones.
Inputs, values that depend on parameters alone, and random draws are never recomputed. A policy changes memory and
time, but no bit of the result.

    step = value_and_grad(pipeline, schedule, plan, handler=handler, policy=policies.dots_saveable)
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry


class Value(NamedTuple):
    """A value of a forward, for a policy.

    Args:
        op: the operation that computes it: `torch.ops.aten.mm.default`.
        names: its names by `checkpoint_name`.
        shape, dtype: of the value; `()` and None if it is not a tensor.
    """

    op: Any
    names: frozenset[str]
    shape: tuple[int, ...]
    dtype: torch.dtype | None


__all__ = [
    "Policy",
    "Value",
    "cheap",
    "checkpoint_name",
    "dots_saveable",
    "everything_saveable",
    "nothing_saveable",
    "save_only",
]

Policy = Callable[[Value], bool | None]

NORMS = {"native_layer_norm", "native_group_norm", "_fused_rms_norm", "_softmax", "_log_softmax"}
COPIES = {"_to_copy", "clone", "copy", "cat", "stack", "constant_pad_nd", "contiguous", "full_like", "zeros_like"}


def everything_saveable(value: Value) -> bool:
    """Save every value that the backward needs. The default."""
    return True


def nothing_saveable(value: Value) -> bool:
    """Save the stage's inputs only."""
    return False


def dots_saveable(value: Value) -> bool:
    """Save only the results of matrix products, convolutions and attention."""
    return _name(value.op) in DOTS


def cheap(value: Value) -> bool | None:
    """Recompute operations that are bound by memory: pointwise operations and normalisations."""
    is_pointwise = torch.Tag.pointwise in getattr(value.op, "tags", ())
    return None if is_pointwise or _name(value.op) in NORMS | COPIES else True


def save_only(*names: str) -> Policy:
    """Return a policy that saves only the values with one of these names, by `checkpoint_name`.

    Raises:
        TypeError: a name is not a string.

    >>> keep = save_only("hidden")
    >>> keep(Value(torch.ops.aten.mm.default, frozenset({"hidden"}), (2, 2), torch.float32))
    True
    """
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"save_only takes names, not {name!r}")

    def save_only_these(value: Value) -> bool:
        return not value.names.isdisjoint(names)

    return save_only_these


def checkpoint_name(x: Tensor, name: str) -> Tensor:
    """Name a tensor for `save_only`, and return it, as `jax.ad_checkpoint.checkpoint_name` does.

    >>> checkpoint_name(torch.ones(2), "hidden")
    tensor([1., 1.])
    """
    note = NAMING.get()
    if note is None:
        return x
    named = x.view_as(x)
    note(name)
    return named


NAMING: ContextVar[Callable[[str], object] | None] = ContextVar("NAMING", default=None)
"""Takes the name of the last value of the trace that is running."""


def _name(op: Any) -> str:
    packet = getattr(op, "overloadpacket", op)
    return str(getattr(packet, "__name__", packet)).removesuffix("_")


DOTS = {_name(op) for op in flop_registry} | {
    "addbmm",
    "mv",
    "addmv",
    "dot",
    "vdot",
    "_grouped_mm",
    "_int_mm",
    "linear",
    "mkldnn_rnn_layer",
    "_cudnn_rnn",
    "_cudnn_attention_forward",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_attention_math_for_mps",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
}
"""The operations whose floating-point operations torch counts, and those like them that it does not count."""
