"""Packages whose names are imported on first use, so that what needs no torch never imports it."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def on_first_use(package: str, home: Mapping[str, str], modules: tuple[str, ...] = ()) -> Callable[[str], Any]:
    """A package's `__getattr__`.

    Args:
        home: name -> the module below the package that has it.
        modules: the package's own modules that are names as well.
    """

    def get(name: str) -> Any:
        if name in home:
            value = getattr(import_module(f"{package}.{home[name]}"), name)
        elif name in modules:
            value = import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)  # from now on it is found without us
        return value

    return get
