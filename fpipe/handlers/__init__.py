"""Handlers: they run programs, each effect in its own way. Modules are imported on first use."""

from typing import TYPE_CHECKING

from fpipe._lazy import attach

if TYPE_CHECKING:
    from fpipe.handlers.distributed.auto import auto as auto
    from fpipe.handlers.distributed.backends import NCCL as NCCL
    from fpipe.handlers.distributed.backends import Backend as Backend
    from fpipe.handlers.distributed.backends import Gloo as Gloo
    from fpipe.handlers.distributed.handler import Distributed as Distributed
    from fpipe.handlers.local import Local as Local
    from fpipe.handlers.protocol import (
        Handler as Handler,
        Inputs as Inputs,
        Observer as Observer,
        Peers as Peers,
        Replicas as Replicas,
        Results as Results,
    )
    from fpipe.handlers.reference import Reference as Reference

__getattr__, __dir__ = attach(__name__)
