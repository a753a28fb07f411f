"""Pytrees as fpipe sees them: optree's, in the namespace "fpipe" on top of the global one.

`optree.register_pytree_node(cls, flatten, unflatten, namespace="fpipe")` adds a type of one's own.
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
HOW_TO_REGISTER = (
    "only tensors, plain values and registered trees do; register its type with "
    f"optree.register_pytree_node(cls, flatten, unflatten, namespace={NAMESPACE!r})"
)

Path = tuple[Any, ...]


class Absent:
    """Stands for a leaf that this rank does not read."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = Absent()


class Flat(NamedTuple):
    """A tree taken apart: its leaves, and the structure that puts them together."""

    leaves: list[Any]
    spec: optree.PyTreeSpec

    @property
    def tree(self) -> Any:
        return self.spec.unflatten(self.leaves)


def flatten(tree: Any) -> Flat:
    return Flat(*optree.tree_flatten(tree, namespace=NAMESPACE))


def paths(tree: Any) -> list[Path]:
    """The path of every leaf, in flattening order."""
    return optree.tree_paths(tree, namespace=NAMESPACE)


@lru_cache(maxsize=1024)
def paths_of(spec: optree.PyTreeSpec) -> tuple[Path, ...]:
    """The path of every leaf of trees with this structure."""
    return tuple(map(tuple, spec.paths()))


def pick(tree: Any, path: Iterable[Any]) -> Any:
    """The subtree at a path of keys, indices and field names.

    >>> pick({"h": (1, 2)}, ("h", 1))
    2
    """
    for entry in path:
        by_name = isinstance(entry, str) and not isinstance(tree, Mapping)
        tree = getattr(tree, entry) if by_name else tree[entry]
    return tree


def indices(tree: Any, path: Path) -> list[int]:
    """Which leaves, by their numbers in flattening order, stand under a path.

    >>> indices({"a": 1, "h": (2, 3)}, ("h", -1))
    [2]
    """
    leaves, spec = flatten(tree)
    return optree.tree_leaves(pick(spec.unflatten(range(len(leaves))), path), namespace=NAMESPACE)


def place(tree: Any, path: Path, value: Any) -> Any:
    """A copy of a tree of dicts with a value put in at a path that it lacks.

    Raises:
        TypeError: the way leads through something else than dicts.
        ValueError: there is something at the path already.

    >>> place({"a": {"b": 1}}, ("a", "c"), 2)
    {'a': {'b': 1, 'c': 2}}
    """
    if not isinstance(tree, Mapping):
        raise TypeError(f"it is put into a dict, not into a {type(tree).__name__}")
    key, *rest = path
    if key in tree and not rest:
        raise ValueError("there is an entry of its own")
    return {**tree, key: place(tree.get(key, {}), tuple(rest), value) if rest else value}


def as_path(path: Any) -> Path:
    """A path as a tuple: a key alone stands for itself, dots and all."""
    return path if isinstance(path, tuple) else (path,)


def short(path: Path) -> str:
    """A path as one would write it in Python: `['h'][1]`."""
    return "".join(f"[{entry!r}]" for entry in path)


def describe(leaf: Any) -> str:
    """`float32[2, 8]` for a tensor, the value itself for a plain one, else its type."""
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return repr(leaf) if isinstance(leaf, bool | int | float | str) else type(leaf).__name__


def summary(tree: Any) -> str:
    """A tree with its leaves described, for messages."""
    leaves, spec = flatten(tree)
    text = str(spec.unflatten([Text(describe(leaf)) for leaf in leaves]))
    return text if len(text) <= 400 else text[:400] + " ..."


class Text(str):
    """A string that shows without quotes inside a tree."""

    def __repr__(self) -> str:
        return str(self)


def viewed(tree: Any) -> Any:
    """Every tensor through an identity of its own, at which its gradients meet."""
    leaves, spec = flatten(tree)
    return spec.unflatten([x.view_as(x) if isinstance(x, torch.Tensor) else x for x in leaves])


def check_plain(payload: Flat, rank: int, stage: int, microbatch: int) -> None:
    """Refuse what can't go from stage to stage: a type that hides tensors would lose their gradients.

    Raises:
        StageError: a leaf that is neither a tensor nor plain.
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
