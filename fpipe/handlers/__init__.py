"""What effects mean: handlers run programs. Imported on first use, like `fpipe` itself."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fpipe.handlers.distributed import Distributed
    from fpipe.handlers.local import Local
    from fpipe.handlers.protocol import Handler, Inputs, Observer, Results
    from fpipe.handlers.reference import Reference

_HOME = {
    "Distributed": "distributed",
    "Handler": "protocol",
    "Inputs": "protocol",
    "Local": "local",
    "Observer": "protocol",
    "Reference": "reference",
    "Results": "protocol",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fpipe.handlers' has no attribute {name!r}")
    value = getattr(import_module(f"fpipe.handlers.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
