"""Pipeline-parallel training as pure functions, effects and handlers.

Names are imported on first use, so that what needs no torch never imports it.
"""

from typing import TYPE_CHECKING

from fpipe._lazy import attach
from fpipe._version import VERSION

if TYPE_CHECKING:
    from fpipe import (
        effects as effects,
        handlers as handlers,
        interop as interop,
        parallel as parallel,
        policies as policies,
        schedules as schedules,
        tensorboard as tensorboard,
        transforms as transforms,
    )
    from fpipe.costs import Costs as Costs, Link as Link
    from fpipe.errors import (
        NonFiniteError as NonFiniteError,
        ScheduleError as ScheduleError,
        StageError as StageError,
        TransportError as TransportError,
    )
    from fpipe.training.norms import clip_by_global_norm as clip_by_global_norm, global_norm as global_norm
    from fpipe.generating.generate import generate as generate, generator as generator
    from fpipe.parallel.constraint import constrain as constrain
    from fpipe.plan import Edges as Edges, Placement as Placement, Plan as Plan
    from fpipe.profiling.gathering import gather as gather
    from fpipe.profiling.live_bytes import LiveBytes as LiveBytes, peak_bytes as peak_bytes
    from fpipe.profiling.profiler import profile as profile
    from fpipe.profiling.recording import Recording as Recording
    from fpipe.programs.footprint import footprint as footprint
    from fpipe.programs.generation import autoregressive as autoregressive
    from fpipe.programs.lowering import lower as lower
    from fpipe.programs.program import Program as Program
    from fpipe.programs.residence import Residence as Residence
    from fpipe.programs.verifier import Report as Report, verify as verify
    from fpipe.schedules.lengths import by_length as by_length, pack as pack
    from fpipe.stages.cache import Cache as Cache
    from fpipe.stages.microbatch import Microbatches as Microbatches
    from fpipe.stages.pipeline import Pipeline as Pipeline
    from fpipe.stages.precision import Precision as Precision
    from fpipe.stages.stage import Batch as Batch, Output as Output, Stage as Stage
    from fpipe.training.loss_scale import LossScale as LossScale
    from fpipe.training.verbs import evaluate as evaluate, value_and_grad as value_and_grad
    from fpipe.timelines.measurement import Measurement as Measurement
    from fpipe.timelines.offloading import offload as offload
    from fpipe.timelines.simulator import simulate as simulate
    from fpipe.timelines.text import draw as draw
    from fpipe.timelines.timeline import Timeline as Timeline
    from fpipe.timelines.what_if import WhatIf as WhatIf, what_if as what_if
    from fpipe.training.train_step import train_step as train_step

__version__ = VERSION
__getattr__, __dir__ = attach(__name__)
