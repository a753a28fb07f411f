"""torch's world outside the pipeline: modules, optimizers, and schedules as text. Imported on first use."""

from typing import TYPE_CHECKING

from fpipe._lazy import attach

if TYPE_CHECKING:
    from fpipe.interop.checkpoints.checkpoints import Checkpoints
    from fpipe.interop.checkpoints.safetensors import export_safetensors
    from fpipe.interop.checkpoints.storage import CheckpointError
    from fpipe.interop.modes import eval_mode
    from fpipe.interop.modules.functions import buffers, from_functions, from_modules, into_modules
    from fpipe.interop.modules.materialising import materialise
    from fpipe.interop.modules.state_dicts import from_state_dict, to_state_dict
    from fpipe.interop.optim import Optimizer, optimizer
    from fpipe.interop.splitting.export import pipe_split
    from fpipe.interop.splitting.partition import End
    from fpipe.interop.splitting.split import split, split_points
    from fpipe.interop.torch_csv import from_csv, to_csv
    from fpipe.interop.torch_pipe import from_pipe

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "End",
    "Optimizer",
    "buffers",
    "eval_mode",
    "export_safetensors",
    "from_csv",
    "from_functions",
    "from_modules",
    "from_pipe",
    "from_state_dict",
    "into_modules",
    "materialise",
    "optimizer",
    "pipe_split",
    "split",
    "split_points",
    "to_csv",
    "to_state_dict",
    "transformers",
]

__getattr__, __dir__ = attach(__name__)
