"""Sizes as symbols, for graphs that hold for many of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fpipe.autodiff.graph.signature import Call, Spec


@dataclass(frozen=True)
class Guards:
    """For which sizes a graph holds.

    Args:
        code: an expression in the sizes of the inputs, None where it holds for all.
    """

    env: ShapeEnv
    code: str | None
    call: Call

    def admit(self, call: Call) -> bool:
        """Whether the graph holds for another signature."""
        if alike(call) != alike(self.call):
            return False
        examples = [torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device="meta") for x in _specs(call)]
        return self.code is None or bool(self.env.evaluate_guards_expression(self.code, examples))


def alike(call: Call) -> Any:
    """A signature without the sizes of what is read."""
    leaves = [
        (x.dtype, x.device, x.wanted, x.conj, x.neg, len(x.shape)) if isinstance(x, Spec) else x for x in call.inputs
    ]
    specs = call.state.spec, [tree.spec for tree in call.sources], call.data.spec
    return call.params, call.trained, call.keep, call.ambient, leaves, specs


def guards(fakes: Sequence[Tensor], call: Call) -> Guards:
    """For which sizes the graph that was traced with these fakes holds; they are the call's inputs."""
    env = fakes[0].fake_mode.shape_env if fakes else ShapeEnv()  # type: ignore[attr-defined]
    places: list[Any] = list(fakes)
    return Guards(env, env.produce_guards_expression(places, ignore_static=False) if fakes else None, call)


def symbolic(spec: Spec, name: str, mode: FakeTensorMode) -> Tensor:
    """A fake whose sizes are symbols."""
    from torch._dynamo.source import ConstantSource  # takes a second to import

    assert mode.shape_env is not None
    example = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="meta")
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(spec.shape))
    sizes, strides, _ = mode.shape_env.create_symbolic_sizes_strides_storage_offset(
        example, ConstantSource(name), symbolic_context=context
    )
    with mode:
        return torch.empty_strided(sizes, strides, dtype=spec.dtype, device=spec.device)


def _specs(call: Call) -> list[Spec]:
    return [x for x in call.inputs if isinstance(x, Spec)]
