"""Handlers: they run programs, each effect in its own way. Modules are imported on first use."""

from typing import TYPE_CHECKING

from fpipe._lazy import attach

if TYPE_CHECKING:
    from fpipe.handlers.distributed.handler import Distributed
    from fpipe.handlers.local import Local
    from fpipe.handlers.protocol import Handler, Inputs, Observer, Peers, Results
    from fpipe.handlers.reference import Reference

__all__ = [
    "Distributed",
    "Handler",
    "Inputs",
    "Local",
    "Observer",
    "Peers",
    "Reference",
    "Results",
]

__getattr__, __dir__ = attach(__name__)
