"""Select params by name or by a predicate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from fpipe.stages.pytree import Path, flatten, paths

Where = str | Sequence[str] | Callable[[Path, Tensor], bool]
"""Params: a pattern of names, several of them, or a predicate of (path, parameter).

A path begins with the stage: `(stage, name)` in `{stage: {name: tensor}}`. A pattern is that of a shell, `*` and `?`,
for the path without the stage, with its components joined by dots: "*.bias", "layers.0.*".
"""


def leaves_of(params: Mapping[int, Any]) -> list[tuple[Path, Any]]:
    """Return the leaves of all stages with their paths, which begin with the stage."""
    return [
        ((stage, *path), x)
        for stage, tree in params.items()
        for path, x in zip(paths(tree), flatten(tree).leaves, strict=True)
    ]


def selected(where: Where, leaves: Sequence[tuple[Path, Any]]) -> list[Path]:
    """Return the paths of the selected tensors of floating point, out of all leaves.

    Raises:
        ValueError: a pattern matches none of them.

    >>> import torch
    >>> selected("*.bias", [((0, "fc.weight"), torch.ones(2)), ((0, "fc.bias"), torch.ones(2))])
    [(0, 'fc.bias')]
    """
    tensors = [(path, x) for path, x in leaves if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())]
    if callable(where):
        return [path for path, x in tensors if where(path, x)]
    patterns, chosen = [where] if isinstance(where, str) else list(where), dict[Path, None]()
    for pattern in patterns:
        matching = [path for path, _ in tensors if fnmatchcase(name_of(path), pattern)]
        if not matching:
            names = list(dict.fromkeys(name_of(path) for path, _ in tensors))
            such = f"names are such as {', '.join(names[:4])}" if names else "there is no tensor of floating point"
            raise ValueError(f"where: no parameter is called {pattern!r}: {such}")
        chosen |= dict.fromkeys(matching)
    return list(chosen)


def name_of(path: Path) -> str:
    """Return the name of a param without its stage.

    >>> name_of((3, "layers", 0, "weight"))
    'layers.0.weight'
    """
    return ".".join(map(str, path[1:]))
