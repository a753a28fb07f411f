"""torch's world outside the pipeline: modules, optimizers, and schedules as text. Imported on first use."""

from typing import TYPE_CHECKING

from fpipe.lazy import on_first_use

if TYPE_CHECKING:
    from fpipe.interop.checkpoints.checkpoint import Checkpoints
    from fpipe.interop.checkpoints.safetensors import export_safetensors
    from fpipe.interop.checkpoints.stored import CheckpointError
    from fpipe.interop.materialising import materialise
    from fpipe.interop.modes import eval_mode
    from fpipe.interop.modules import buffers, from_functions, from_modules, into_modules
    from fpipe.interop.optim import Optimizer, optimizer
    from fpipe.interop.pipe import from_pipe
    from fpipe.interop.pipelining import from_csv, to_csv
    from fpipe.interop.splitting.cut import End
    from fpipe.interop.splitting.export import pipe_split
    from fpipe.interop.splitting.split import split, split_points
    from fpipe.interop.state_dicts import from_state_dict, to_state_dict

_HOME = {
    "CheckpointError": "checkpoints.stored",
    "Checkpoints": "checkpoints.checkpoint",
    "End": "splitting.cut",
    "Optimizer": "optim",
    "buffers": "modules",
    "eval_mode": "modes",
    "export_safetensors": "checkpoints.safetensors",
    "from_csv": "pipelining",
    "from_functions": "modules",
    "from_modules": "modules",
    "from_pipe": "pipe",
    "from_state_dict": "state_dicts",
    "into_modules": "modules",
    "materialise": "materialising",
    "optimizer": "optim",
    "pipe_split": "splitting.export",
    "split": "splitting.split",
    "split_points": "splitting.split",
    "to_csv": "pipelining",
    "to_state_dict": "state_dicts",
}

_MODULES = ("transformers",)

__all__ = sorted([*_HOME, *_MODULES])


__getattr__ = on_first_use(__name__, _HOME, _MODULES)


def __dir__() -> list[str]:
    return __all__
