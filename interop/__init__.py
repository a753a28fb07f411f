"""torch's world outside the pipeline: modules, optimizers, and schedules as text. Imported on first use."""

from typing import TYPE_CHECKING

from fpipe._lazy import attach

if TYPE_CHECKING:
    from fpipe.interop import styles as styles, transformers as transformers
    from fpipe.interop.adapters.lora import lora as lora, merge_lora as merge_lora
    from fpipe.interop.checkpoints.checkpoints import Checkpoints as Checkpoints
    from fpipe.interop.checkpoints.manifest import CheckpointError as CheckpointError
    from fpipe.interop.checkpoints.memory import Memory as Memory
    from fpipe.interop.checkpoints.run import Run as Run, resume as resume
    from fpipe.interop.checkpoints.safetensors import export_safetensors as export_safetensors
    from fpipe.interop.elasticity import Elastic as Elastic, elastic as elastic
    from fpipe.interop.modes import eval_mode as eval_mode
    from fpipe.interop.modules.functions import (
        buffers as buffers,
        from_functions as from_functions,
        from_modules as from_modules,
        into_modules as into_modules,
    )
    from fpipe.interop.modules.materialising import materialise as materialise
    from fpipe.interop.modules.state_dicts import from_state_dict as from_state_dict, to_state_dict as to_state_dict
    from fpipe.interop.optim import Optimizer as Optimizer, optimizer as optimizer
    from fpipe.interop.sampling import rows as rows
    from fpipe.interop.sharding import fsdp as fsdp, shard as shard
    from fpipe.interop.splitting.export import pipe_split as pipe_split
    from fpipe.interop.splitting.partition import End as End
    from fpipe.interop.splitting.split import split as split, split_points as split_points
    from fpipe.interop.torch_csv import from_csv as from_csv, to_csv as to_csv
    from fpipe.interop.torch_pipe import from_pipe as from_pipe
    from fpipe.interop.torch_traces.reading import BadTrace as BadTrace
    from fpipe.interop.torch_traces.traces import (
        TracedStep as TracedStep,
        Traces as Traces,
        from_traces as from_traces,
    )

__getattr__, __dir__ = attach(__name__)
