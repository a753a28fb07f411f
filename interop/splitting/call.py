"""How forward is called, and what of that is the batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fpipe.tree import NAMESPACE, Path, describe, short


class Call(NamedTuple):
    """How forward is called: tensors on the meta device stand for the example's."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def stand_in(tree: Any) -> Any:
    """The same tree with tensors of the meta device."""
    return pytree.tree_map(lambda x: x.detach().to("meta") if isinstance(x, Tensor) else x, tree)


def device_of(*trees: Sequence[Any]) -> torch.device:
    """Where the first of the tensors is that has values."""
    found = [x.device for x in pytree.tree_leaves(trees) if isinstance(x, Tensor) and x.device.type != "meta"]
    return found[0] if found else torch.device("cpu")


def leaves(inputs: tuple[tuple[Any, ...], dict[str, Any]], module: nn.Module) -> dict[fx.Node, Path]:
    """Where in the batch each tensor is: the batch is what forward is given, as `split` says."""
    args, kwargs = inputs

    def tensors(tree: Any) -> list[tuple[fx.Node, Path]]:
        found, _ = pytree.tree_flatten_with_path(tree)
        return [(x, tuple(map(_key, path))) for path, x in found if isinstance(_value(x), Tensor)]

    named = {name: tensors(tree) for name, tree in kwargs.items()}
    positional = [found for found in map(tensors, args) if found]
    if any(named.values()):
        bound = inspect.signature(module.forward).bind_partial(*args).arguments
        named |= {name: tensors(tree) for name, tree in bound.items()}
        return {node: (name, *path) for name, found in named.items() for node, path in found}
    if len(positional) == 1:
        return dict(positional[0])
    return {node: (i, *path) for i, found in enumerate(positional) for node, path in found}


def batch_of(call: Call, module: nn.Module) -> Any:
    """What forward is given, as a batch."""
    args = [x for x in call.args if _has_tensors(x)]
    if _has_tensors(call.kwargs):
        return {**inspect.signature(module.forward).bind_partial(*call.args).arguments, **call.kwargs}
    return args[0] if len(args) == 1 else tuple(args)


def placed(batch: Any) -> dict[Path, Any]:
    """What a batch has, by where it is."""
    leaves, spec = optree.tree_flatten(batch, none_is_leaf=True, namespace=NAMESPACE)
    return dict(zip(map(tuple, spec.paths()), leaves, strict=True))


def accept(batch: Any, known: Mapping[Path, Any]) -> None:
    """Raises:
    ValueError: the batch has what the example's lacked, or other constants: stages would pass over it.
    """
    for path, x in placed(batch).items():
        plain = type(x) in (bool, int, float, str)
        if isinstance(x, Tensor) or plain:
            was = known.get(path)
            where = f"the batch{short(path)} is {describe(x)}"
            if was is None or (isinstance(x, Tensor) and not isinstance(was, Tensor)):
                raise ValueError(f"{where}, and the module was split with nothing there: put it into the example")
            if plain and not isinstance(was, Tensor) and x != was:
                raise ValueError(f"{where}, and the module was split for {was!r}: split it once more for another")


def _has_tensors(tree: Any) -> bool:
    return any(isinstance(x, Tensor) for x in pytree.tree_leaves(tree))


def _value(x: Any) -> Any:
    return x.meta.get("val") if isinstance(x, fx.Node) else None


def _key(entry: Any) -> Any:
    return next(getattr(entry, name) for name in ("idx", "key", "name") if hasattr(entry, name))
