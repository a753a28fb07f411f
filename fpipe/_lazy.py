"""Packages whose public names are imported on first use, so that torch is imported only by what needs it."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`.

    Its public names, `__all__`, are those that its `if TYPE_CHECKING:` block re-exports, so that type checkers and
    Python agree.

    Raises:
        AttributeError: from `__getattr__`, for a name that is not public.
    """

    def get(name: str) -> Any:
        modules = reexports(package)
        if name == "__all__":
            return sorted(modules)
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = modules[name]
        value = import_module(f"{package}.{name}") if module == package else getattr(import_module(module), name)
        setattr(sys.modules[package], name, value)  # the next lookup does not come here
        return value

    return get, lambda: sorted(reexports(package))


@functools.cache
def reexports(package: str) -> dict[str, str]:
    """Return name -> module for every `from module import name as name` in a package's `__init__.py`."""
    source = sys.modules[package].__file__
    assert source is not None
    imports = (node for node in ast.walk(ast.parse(Path(source).read_text())) if isinstance(node, ast.ImportFrom))
    return {a.name: node.module for node in imports for a in node.names if a.asname == a.name and node.module}
