"""TensorBoard: record timelines and scalars, and show them in the Pipeline tab."""

from typing import TYPE_CHECKING

from fpipe._lazy import attach

if TYPE_CHECKING:
    from fpipe.tensorboard.recording.recorder import Recorder as Recorder

__getattr__, __dir__ = attach(__name__)
