"""Run functions of trees in which some leaves are marked, such as `Dual`, through a transform of torch.func."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree

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

        new = run(of_tensors, [leaves[i] for i in at])
        return result.spec.unflatten(new)

    return transformed
