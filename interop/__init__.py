"""torch's world outside the pipeline: modules, optimizers, and schedules as text. Imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fpipe.interop.modules import buffers, eval_mode, from_modules, into_modules
    from fpipe.interop.optim import Optimizer, optimizer
    from fpipe.interop.pipelining import from_csv, to_csv

_HOME = {
    "Optimizer": "optim",
    "buffers": "modules",
    "eval_mode": "modules",
    "from_csv": "pipelining",
    "from_modules": "modules",
    "into_modules": "modules",
    "optimizer": "optim",
    "to_csv": "pipelining",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fpipe.interop' has no attribute {name!r}")
    value = getattr(import_module(f"fpipe.interop.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
