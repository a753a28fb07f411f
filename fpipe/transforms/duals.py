"""Trees of values with tangents: a `Dual` stands in place of a tensor that has one.

Transforms nest: the outer one owns the innermost `Dual` of a nest, whose primal is a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from fpipe.stages.pytree import NAMESPACE, describe, short, summary
from fpipe.transforms.forward_rules import ForwardRules
from fpipe.transforms.marks import NO_CHECKPOINT, through


class Dual(NamedTuple):
    """A tensor and its tangent, of the same shape and dtype.

    A pytree of two leaves: it is split into microbatches, sent and differentiated like any other.
    """

    primal: Any
    tangent: Any


def is_dual(x: Any) -> bool:
    return isinstance(x, Dual) and not isinstance(x.primal, Dual)


def dual(primals: Any, tangents: Any) -> Any:
    """Return a tree with a `Dual` for each tensor that has a tangent.

    Args:
        tangents: a prefix of `primals`, with a tensor for each tensor of its, and None for tensors or subtrees that
            have no tangent: they stay as they are.

    Raises:
        ValueError: the trees don't fit, or a tangent has another shape or dtype than its tensor.

    >>> dual({"x": torch.ones(2), "mask": torch.ones(2)}, {"x": torch.zeros(2), "mask": None})
    {'x': Dual(primal=tensor([1., 1.]), tangent=tensor([0., 0.])), 'mask': tensor([1., 1.])}
    """
    none = {"none_is_leaf": True, "namespace": NAMESPACE}
    names, leaves, spec = optree.tree_flatten_with_path(primals, **none)  # type: ignore[arg-type]
    try:
        directions = optree.broadcast_prefix(tangents, primals, **none)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"the tangents {summary(tangents)} are no prefix of the tree {summary(primals)}") from error
    pairs = zip(names, leaves, directions, strict=True)
    return spec.unflatten([x if v is None else _dual(x, v, path) for path, x, v in pairs])


def _dual(x: Any, tangent: Any, path: Any) -> Dual:
    place = short(path) or "the root"
    if not isinstance(tangent, Tensor):
        raise ValueError(f"the tangent at {place} is {describe(tangent)}: pass a tensor, or None where there is none")
    if not isinstance(x, Tensor) or (x.shape, x.dtype) != (tangent.shape, tangent.dtype):
        raise ValueError(f"at {place} is {describe(x)}, and its tangent is {describe(tangent)}: both must be alike")
    if not (x.is_floating_point() or x.is_complex()):
        raise ValueError(f"at {place} is {describe(x)}, which has no tangent: pass None for it")
    return Dual(x, tangent)


def primals(tree: Any) -> Any:
    """Return the tree without its tangents: each `Dual` is replaced by its primal.

    >>> primals({"x": Dual(torch.tensor(1.0), torch.tensor(2.0))})
    {'x': tensor(1.)}
    """
    return _mapped(tree, lambda x: x.primal if is_dual(x) else x)


def tangents(tree: Any) -> Any:
    """Return the tree of the tangents: each `Dual` is replaced by its tangent, and any other leaf by None.

    >>> tangents({"x": Dual(torch.tensor(1.0), torch.tensor(2.0)), "n": torch.tensor(3)})
    {'x': tensor(2.), 'n': None}
    """
    return _mapped(tree, lambda x: x.tangent if is_dual(x) else None)


def _mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    return optree.tree_map(function, tree, is_leaf=is_dual, namespace=NAMESPACE)


def pushforward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with tangents: `torch.func.jvp` over each `Dual` among its arguments.

    Every floating-point or complex tensor that it returns is then a `Dual`, with a tangent of zeros where it depends on
    none. Without a `Dual` among its arguments it runs as it is. Attention takes its math kernel, the only one with a
    forward mode, and normalizations are computed from their definitions, whose tangents can be differentiated.

    >>> pushforward(torch.square)(Dual(torch.tensor(3.0), torch.tensor(1.0)))
    Dual(primal=tensor(9.), tangent=tensor(6.))
    """

    def run(of_tensors: Callable[..., list[Any]], duals: Sequence[Dual]) -> list[Any]:
        leaves: list[Any] = []

        def of_primals(*values: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            nonlocal leaves
            leaves = of_tensors(*values)
            tensors = [x for x in leaves if isinstance(x, Tensor)]
            return [x for x in tensors if _has_tangent(x)], [x for x in tensors if not _has_tangent(x)]

        values, directions = zip(*duals, strict=True)
        attention = sdpa_kernel(SDPBackend.MATH)  # no other kernel has a forward mode
        with disable_saved_tensors_hooks(NO_CHECKPOINT), ForwardRules(), attention:
            outputs, slopes, others = torch.func.jvp(of_primals, values, directions, has_aux=True)  # type: ignore[misc]
        new, plain = map(Dual, outputs, slopes), iter(others)
        return [x if not isinstance(x, Tensor) else next(new) if _has_tangent(x) else next(plain) for x in leaves]

    return through(function, is_dual, run)


def _has_tangent(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
