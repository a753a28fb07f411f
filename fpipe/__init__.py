"""Pipeline-parallel training as pure functions, effects and handlers.

Names are imported on first use, so that what needs no torch never imports it.
"""

from typing import TYPE_CHECKING

from fpipe._lazy import attach

if TYPE_CHECKING:
    from fpipe.costs import Costs, Link
    from fpipe.errors import ScheduleError, StageError, TransportError
    from fpipe.norms import clip_by_global_norm, global_norm
    from fpipe.plan import Edges, Placement, Plan
    from fpipe.profiling.gathering import gather
    from fpipe.profiling.live_bytes import LiveBytes, peak_bytes
    from fpipe.profiling.profiler import profile
    from fpipe.profiling.recording import Recording
    from fpipe.programs.lowering import lower
    from fpipe.programs.program import Program
    from fpipe.programs.verifier import Report, verify
    from fpipe.stages.pipeline import Pipeline
    from fpipe.stages.stage import Batch, Output, Stage
    from fpipe.step import evaluate, value_and_grad
    from fpipe.timelines.measurement import Measurement
    from fpipe.timelines.simulator import simulate
    from fpipe.timelines.text import draw
    from fpipe.timelines.timeline import Timeline

__all__ = [
    "Batch",
    "Costs",
    "Edges",
    "Link",
    "LiveBytes",
    "Measurement",
    "Output",
    "Pipeline",
    "Placement",
    "Plan",
    "Program",
    "Recording",
    "Report",
    "ScheduleError",
    "Stage",
    "StageError",
    "Timeline",
    "TransportError",
    "clip_by_global_norm",
    "draw",
    "effects",
    "evaluate",
    "gather",
    "global_norm",
    "handlers",
    "interop",
    "lower",
    "peak_bytes",
    "policies",
    "profile",
    "schedules",
    "simulate",
    "tensorboard",
    "value_and_grad",
    "verify",
]

__getattr__, __dir__ = attach(__name__)
