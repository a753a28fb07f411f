"""Pipeline-parallel training as pure functions, effects and handlers.

Names are imported on first use, so that what needs no torch never imports it.
"""

from typing import TYPE_CHECKING

from fpipe.lazy import on_first_use

if TYPE_CHECKING:
    from fpipe.costs import Costs, Link
    from fpipe.drawing import draw
    from fpipe.errors import ScheduleError, StageError, TransportError
    from fpipe.gathering import gather
    from fpipe.handlers.simulator import simulate
    from fpipe.handlers.verifier import Report, verify
    from fpipe.live import LiveBytes, peak_bytes
    from fpipe.lowering import lower
    from fpipe.measurement import Measurement
    from fpipe.norms import clip_by_global_norm, global_norm
    from fpipe.profiling import profile
    from fpipe.program import Edges, Placement, Plan, Program
    from fpipe.recording import Recording
    from fpipe.stage import Batch, Output, Pipeline, Stage
    from fpipe.step import evaluate, value_and_grad
    from fpipe.timeline import Timeline

_HOME = {
    "Batch": "stage",
    "Costs": "costs",
    "Edges": "program",
    "Link": "costs",
    "LiveBytes": "live",
    "Measurement": "measurement",
    "Output": "stage",
    "Pipeline": "stage",
    "Placement": "program",
    "Plan": "program",
    "Program": "program",
    "Recording": "recording",
    "Report": "handlers.verifier",
    "ScheduleError": "errors",
    "Stage": "stage",
    "StageError": "errors",
    "Timeline": "timeline",
    "TransportError": "errors",
    "clip_by_global_norm": "norms",
    "draw": "drawing",
    "evaluate": "step",
    "gather": "gathering",
    "global_norm": "norms",
    "lower": "lowering",
    "peak_bytes": "live",
    "profile": "profiling",
    "simulate": "handlers.simulator",
    "value_and_grad": "step",
    "verify": "handlers.verifier",
}
_MODULES = ("effects", "handlers", "interop", "policies", "schedules", "tensorboard")

__all__ = sorted([*_HOME, *_MODULES])


__getattr__ = on_first_use(__name__, _HOME, _MODULES)


def __dir__() -> list[str]:
    return __all__
