"""Packages whose public names are imported on first use, so that torch is imported only by what needs it."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`.

    A name of `__all__` comes from the module that the package's `if TYPE_CHECKING:` block imports it from, so that
    type checkers and Python agree. A name without such an import is a submodule.

    Raises:
        AttributeError: from `__getattr__`, for a name that is not in `__all__`.
    """
    module = sys.modules[package]

    def get(name: str) -> Any:
        if name not in module.__all__:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes(package).get(name)
        value = getattr(import_module(home), name) if home else import_module(f"{package}.{name}")
        setattr(module, name, value)  # the next lookup does not come here
        return value

    return get, lambda: sorted(module.__all__)


@functools.cache
def homes(package: str) -> dict[str, str]:
    """Return name -> module for the names that a package's `if TYPE_CHECKING:` block imports."""
    source = sys.modules[package].__file__
    assert source is not None
    return {a.name: module for module, names in _guarded(ast.parse(Path(source).read_text())) for a in names}


def _guarded(tree: ast.Module) -> Iterator[tuple[str, list[ast.alias]]]:
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from ((n.module, n.names) for n in node.body if isinstance(n, ast.ImportFrom) and n.module)
