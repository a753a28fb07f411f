"""Symbolic sizes, and guards: the sizes for which a graph is valid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fpipe.autodiff.graph.signature import Signature, Spec

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class Guards:
    """The signatures for which a graph is valid.

    Args:
        code: an expression in the sizes of the inputs; None if the graph is valid for all sizes.
        signature: the one that was traced.
    """

    env: ShapeEnv
    code: str | None
    signature: Signature

    def admit(self, signature: Signature) -> bool:
        """Return whether the graph is valid for another signature."""
        if without_sizes(signature) != without_sizes(self.signature):
            return False
        specs = [x for x in signature.inputs if isinstance(x, Spec)]
        examples = [torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device="meta") for x in specs]
        return self.code is None or bool(self.env.evaluate_guards_expression(self.code, examples))


def without_sizes(signature: Signature) -> Any:
    """Return a signature without the sizes of its inputs, to compare."""
    leaves = [
        (x.dtype, x.device, x.wanted, x.conj, x.neg, len(x.shape)) if isinstance(x, Spec) else x
        for x in signature.inputs
    ]
    specs = signature.state.spec, [tree.spec for tree in signature.sources], signature.data.spec
    return signature.params, signature.trained, signature.keep, signature.ambient, leaves, specs


def guards(fakes: Sequence[Tensor], signature: Signature) -> Guards:
    """Return the guards of a graph.

    Args:
        fakes: the signature's inputs, as traced.
    """
    env = fakes[0].fake_mode.shape_env if fakes else ShapeEnv()  # type: ignore[attr-defined]
    placeholders: list[Any] = list(fakes)
    code = env.produce_guards_expression(placeholders, ignore_static=False) if fakes else None
    return Guards(env, code, signature)


def symbolic(spec: Spec, name: str, mode: FakeTensorMode) -> Tensor:
    """Return a fake tensor whose sizes are symbols."""
    from torch._dynamo.source import ConstantSource  # takes a second to import

    assert mode.shape_env is not None
    example = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="meta")
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(spec.shape))
    sizes, strides, _ = mode.shape_env.create_symbolic_sizes_strides_storage_offset(
        example, ConstantSource(name), symbolic_context=context
    )
    with mode:
        return torch.empty_strided(sizes, strides, dtype=spec.dtype, device=spec.device)


def hint(value: Any) -> Any:
    """Return a symbol's value in the trace: 1 if it depends on values of tensors. Return other values unchanged."""
    if not isinstance(value, SYMBOLS):
        return value
    return value.node.hint if value.node.has_hint() else 1
