"""What effects mean: handlers run programs. Imported on first use, like `fpipe` itself."""

from typing import TYPE_CHECKING

from fpipe.lazy import on_first_use

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


__getattr__ = on_first_use(__name__, _HOME)


def __dir__() -> list[str]:
    return __all__
