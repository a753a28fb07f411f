"""The arguments of forward, and the batch that they form."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fpipe.interop.splitting.size_guards import Sizes
from fpipe.stages.pytree import Path, describe, short


class ExampleCall(NamedTuple):
    """The arguments of forward, with tensors on the meta device."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def stand_in(tree: Any) -> Any:
    """Return a tree with its tensors on the meta device."""
    return pytree.tree_map(lambda x: x.detach().to("meta") if isinstance(x, Tensor) else x, tree)


def device_of(*trees: Sequence[Any]) -> torch.device:
    """Return the device of the first tensor that is not on the meta device; by default the CPU."""
    devices = [x.device for x in pytree.tree_leaves(trees) if isinstance(x, Tensor) and x.device.type != "meta"]
    return devices[0] if devices else torch.device("cpu")


def leaves(inputs: tuple[tuple[Any, ...], dict[str, Any]], module: nn.Module) -> dict[fx.Node, Path]:
    """Return the path in the batch of each placeholder of a tensor. `inputs` are the placeholders as arguments."""
    return {node: path for path, node in placed(batch_of(ExampleCall(*inputs), module)).items() if _is_tensor(node)}


def batch_of(call: ExampleCall, module: nn.Module) -> Any:
    """Return the arguments of forward as a batch."""
    args = [x for x in call.args if _has_tensors(x)]
    if _has_tensors(call.kwargs):
        return {**inspect.signature(module.forward).bind_partial(*call.args).arguments, **call.kwargs}
    return args[0] if len(args) == 1 else tuple(args)


def placed(batch: Any) -> dict[Path, Any]:
    """Return the leaves of a batch, by path."""
    return {tuple(map(_key, path)): leaf for path, leaf in pytree.tree_leaves_with_path(batch)}


def known(call: ExampleCall, module: nn.Module) -> dict[Path, Any]:
    """Return the leaves of the example's batch, and the defaults of forward's other arguments, by path."""
    leaves = placed(batch_of(call, module))
    if _has_tensors(call.kwargs):
        for name, parameter in inspect.signature(module.forward).parameters.items():
            if type(parameter.default) in (bool, int, float, str):
                leaves.setdefault((name,), parameter.default)
    return leaves


def accept(batch: Any, example: Mapping[Path, Any], unread: Sizes) -> None:
    """Check that stages ignore no part of a batch.

    Args:
        unread: of tensors that no stage reads. Forward may have read their sizes.

    Raises:
        ValueError: the batch has a leaf that the example lacked, or another constant or size.
    """
    leaves = {path: x for path, x in placed(batch).items() if x is not None}
    for path, x in leaves.items():
        was = example.get(path)
        if isinstance(was, Tensor) and isinstance(x, Tensor):
            continue
        where = f"the batch{short(path)} is {describe(x)}"
        if was is None:
            way = "the batch is forward's one argument that has tensors" if () in example else "put it into the example"
            raise ValueError(f"{where}, and the module was split with nothing there: {way}")
        if isinstance(x, Tensor) or isinstance(was, Tensor) or not _same(x, was):
            raise ValueError(f"{where}, and the module was split for {describe(was)}: split it once more for another")
    unread.check({path: x for path, x in leaves.items() if path in unread.axes})


def _same(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b) or bool(a != a and b != b)  # a NaN is itself
    except (TypeError, ValueError, RuntimeError):
        return False


def _has_tensors(tree: Any) -> bool:
    return any(map(_is_tensor, pytree.tree_leaves(tree)))


def _is_tensor(x: Any) -> bool:
    """Whether a value is a tensor, or a graph node that stands for a tensor."""
    return isinstance(x.meta.get("val") if isinstance(x, fx.Node) else x, Tensor)


def _key(entry: Any) -> Any:
    return next(getattr(entry, name) for name in ("idx", "key", "name") if hasattr(entry, name))
