"""Run functions of trees in which some leaves are marked, such as `Dual`, through a transform of torch.func."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch

from fpipe.stages.pytree import NAMESPACE, Flat, flatten

NO_CHECKPOINT = (
    "torch.utils.checkpoint, or another hook of saved tensors, does not work within transforms: leave it out, and give "
    "value_and_grad policy=fpipe.policies.nothing_saveable"
)
Run = Callable[[Callable[..., list[Any]], Sequence[Any]], Sequence[Any]]
"""`run(function, marked)` returns the leaves of a result, by calling the function, which returns them as they are, once
with a tensor for each marked leaf."""


def through(function: Callable[..., Any], is_marked: Callable[[Any], bool], run: Run) -> Callable[..., Any]:
    """Return the function of trees, by `run`; without a marked leaf among its arguments it runs as it is."""

    def transformed(*arguments: Any) -> Any:
        trees: Any = arguments
        leaves, spec = optree.tree_flatten(trees, is_leaf=is_marked, namespace=NAMESPACE)
        at = [i for i, x in enumerate(leaves) if is_marked(x)]
        if not at:
            return function(*arguments)
        result: Flat = flatten(None)

        def of_tensors(*tensors: Any) -> list[Any]:
            nonlocal result
            whole = list(leaves)
            for i, tensor in zip(at, tensors, strict=True):
                whole[i] = tensor
            result = flatten(function(*spec.unflatten(whole)))
            return list(result.leaves)

        try:
            new = run(of_tensors, [leaves[i] for i in at])
        except RuntimeError as error:
            if rule := _missing_rule(error):
                raise NotImplementedError(rule) from error
            raise
        return result.spec.unflatten(new)

    return transformed


MISSING: Mapping[str, str] = {
    "must override the setup_context": "write its forward without ctx, and setup_context(ctx, inputs, output), which "
    "saves what backward reads",
    "does not have vmap support": "set generate_vmap_rule = True in it, if its forward and backward are made of "
    "torch's operators, or write its vmap(info, in_dims, *args)",
    "must implement the jvp function": "write its jvp(ctx, *tangents)",
}
"""The way out, by a part of torch's message about a Function without a rule for a transform."""


def _missing_rule(error: RuntimeError) -> str | None:
    """Return what a `torch.autograd.Function` of a stage lacks, if that is why a transform failed."""
    way_out = next((text for part, text in MISSING.items() if part in str(error)), None)
    if way_out is None:
        return None
    owners = (frame.f_locals.get("cls") for frame, _ in traceback.walk_tb(error.__traceback__))
    functions = [x for x in owners if isinstance(x, type) and issubclass(x, torch.autograd.Function)]
    name = functions[0].__qualname__ if functions else "of the stage"
    return f"the torch.autograd.Function {name} has no rule for this transform: {way_out}"
