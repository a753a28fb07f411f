"""TensorBoard: what records timelines and scalars, and the Pipeline tab that shows them."""

from typing import TYPE_CHECKING

from fpipe._lazy import attach

if TYPE_CHECKING:
    from fpipe.tensorboard.recording.recorder import Recorder

__all__ = [
    "Recorder",
]

__getattr__, __dir__ = attach(__name__)
