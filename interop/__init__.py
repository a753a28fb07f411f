"""torch's world outside the pipeline: modules, optimizers, and schedules as text. Imported on first use."""

from typing import TYPE_CHECKING

from fpipe.lazy import on_first_use

if TYPE_CHECKING:
    from fpipe.interop.modules import buffers, eval_mode, from_modules, into_modules
    from fpipe.interop.optim import Optimizer, optimizer
    from fpipe.interop.pipe import from_pipe
    from fpipe.interop.pipelining import from_csv, to_csv

_HOME = {
    "Optimizer": "optim",
    "buffers": "modules",
    "eval_mode": "modules",
    "from_csv": "pipelining",
    "from_modules": "modules",
    "from_pipe": "pipe",
    "into_modules": "modules",
    "optimizer": "optim",
    "to_csv": "pipelining",
}

__all__ = sorted(_HOME)


__getattr__ = on_first_use(__name__, _HOME)


def __dir__() -> list[str]:
    return __all__
