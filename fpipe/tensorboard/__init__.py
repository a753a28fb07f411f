"""TensorBoard: what records timelines and scalars, and the Pipeline tab that shows them."""

from typing import TYPE_CHECKING

from fpipe.lazy import on_first_use

if TYPE_CHECKING:
    from fpipe.tensorboard.recorder import Recorder

_HOME = {"Recorder": "recorder"}

__all__ = sorted(_HOME)

__getattr__ = on_first_use(__name__, _HOME)


def __dir__() -> list[str]:
    return __all__
