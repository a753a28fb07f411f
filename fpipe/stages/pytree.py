"""Pytrees: optree's, with the namespace "fpipe" in addition to the global one.

`optree.register_pytree_node(cls, flatten, unflatten, namespace="fpipe")` registers another type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import optree
import torch

from fpipe.errors import StageError

NAMESPACE = "fpipe"
PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
HOW_TO_REGISTER = (
    "only tensors, plain values and registered trees do; register its type with "
    f"optree.register_pytree_node(cls, flatten, unflatten, namespace={NAMESPACE!r})"
)

Path = tuple[Any, ...]


class Absent:
    """In place of a leaf that this rank does not read."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = Absent()


class Flat(NamedTuple):
    """A flattened tree: its leaves and its structure."""

    leaves: list[Any]
    spec: optree.PyTreeSpec

    @property
    def tree(self) -> Any:
        return self.spec.unflatten(self.leaves)


def flatten(tree: Any) -> Flat:
    return Flat(*optree.tree_flatten(tree, namespace=NAMESPACE))


def paths(tree: Any) -> list[Path]:
    """Return the path of every leaf, in flattening order."""
    return optree.tree_paths(tree, namespace=NAMESPACE)


@lru_cache(maxsize=1024)
def paths_of(spec: optree.PyTreeSpec) -> tuple[Path, ...]:
    """Return the path of every leaf of trees with this structure."""
    return tuple(map(tuple, spec.paths()))


def get_at(tree: Any, path: Iterable[Any]) -> Any:
    """Return the subtree at a path of keys, indices and field names.

    >>> get_at({"h": (1, 2)}, ("h", 1))
    2
    """
    for entry in path:
        by_name = isinstance(entry, str) and not isinstance(tree, Mapping)
        tree = getattr(tree, entry) if by_name else tree[entry]
    return tree


def indices(tree: Any, path: Path) -> list[int]:
    """Return the numbers, in flattening order, of the leaves below a path.

    >>> indices({"a": 1, "h": (2, 3)}, ("h", -1))
    [2]
    """
    leaves, spec = flatten(tree)
    return optree.tree_leaves(get_at(spec.unflatten(range(len(leaves))), path), namespace=NAMESPACE)


def set_at(tree: Any, path: Path, value: Any) -> Any:
    """Return a copy of a tree of dicts with a value added at a path.

    Raises:
        TypeError: the path leads through something else than dicts.
        ValueError: there is already a value at the path.

    >>> set_at({"a": {"b": 1}}, ("a", "c"), 2)
    {'a': {'b': 1, 'c': 2}}
    """
    if not isinstance(tree, Mapping):
        raise TypeError(f"it is put into a dict, not into a {type(tree).__name__}")
    key, *rest = path
    if key in tree and not rest:
        raise ValueError("it has such an entry already")
    return {**tree, key: set_at(tree.get(key, {}), tuple(rest), value) if rest else value}


def put_at(tree: Any, path: Path, value: Any) -> Any:
    """Return a copy of a tree of dicts with a value at a path, in place of the one that is there.

    >>> put_at({"a": {"b": 1}}, ("a", "b"), 2)
    {'a': {'b': 2}}
    """
    if not path:
        return value
    key, *rest = path
    return {**tree, key: put_at(tree.get(key, {}), tuple(rest), value)}


def as_path(path: Any) -> Path:
    """Return a path as a tuple. A single key is one component, even with dots."""
    return path if isinstance(path, tuple) else (path,)


def short(path: Path) -> str:
    """Format a path as Python indexing: `['h'][1]`."""
    return "".join(f"[{entry!r}]" for entry in path)


def describe(leaf: Any) -> str:
    """Format a leaf: `float32[2, 8]` for a tensor, the value for a number or text, else the type."""
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return repr(leaf) if isinstance(leaf, bool | int | float | str) else type(leaf).__name__


def summary(tree: Any) -> str:
    """Format a tree with its leaves described, for messages."""
    leaves, spec = flatten(tree)
    text = str(spec.unflatten([Text(describe(leaf)) for leaf in leaves]))
    return text if len(text) <= 400 else text[:400] + " ..."


class Text(str):
    """A string without quotes in the repr of a tree."""

    def __repr__(self) -> str:
        return str(self)


def alias_leaves(tree: Any) -> Any:
    """Return a tree with a new view of every tensor. All gradients of the tensor accumulate at that view.

    It has the strides of the tensor. A `view` chooses those of dimensions of size 1 anew, by which some kernels tell a
    memory format.

    Raises:
        TypeError: a tensor is sparse.
    """
    leaves, spec = flatten(tree)
    return spec.unflatten([_alias(x) if isinstance(x, torch.Tensor) else x for x in leaves])


def _alias(x: torch.Tensor) -> torch.Tensor:
    if x.layout in SPARSE:
        raise TypeError(
            f"a tensor of layout {x.layout} can't go from stage to stage: return it as to_dense(), or return its "
            "indices and values, and make it again where it is read"
        )
    alias: torch.Tensor = torch.ops.aten.alias.default(x)
    return alias


def check_plain(payload: Flat, rank: int, stage: int, microbatch: int) -> None:
    """Check an output that other stages read: an unregistered type could hide tensors, whose gradients would be lost.

    Raises:
        StageError: a leaf is neither a tensor nor plain.
    """
    for at, leaf in enumerate(payload.leaves):
        if not isinstance(leaf, torch.Tensor) and type(leaf) not in PLAIN and leaf is not ABSENT:
            kind = type(leaf)
            raise StageError(
                f"its output{short(paths(payload.tree)[at])} is a {kind.__module__}.{kind.__qualname__}, which can't "
                f"go from stage to stage: {HOW_TO_REGISTER}",
                rank=rank,
                stage=stage,
                microbatch=microbatch,
            )
