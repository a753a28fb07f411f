"""torch's world: modules and optimizers as pure functions over pytrees."""

from fpipe.interop.modules import buffers, eval_mode, from_modules, into_modules
from fpipe.interop.optim import Optimizer, optimizer

__all__ = ["Optimizer", "buffers", "eval_mode", "from_modules", "into_modules", "optimizer"]
