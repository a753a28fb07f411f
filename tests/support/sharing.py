"""Graphs that many steps share: there is no time to trace a pipeline for each of a thousand schedules and sizes."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from fpipe.autodiff.options import _alike
from fpipe.autodiff.traced import Graphs, Traced
from fpipe.stages.stage import Stage


@dataclass(frozen=True)
class Sharing:
    """A handler whose steps take what earlier steps have traced of stages of the same code, and trace what is new."""

    handler: Any
    graphs: dict[Hashable, Graphs]

    @property
    def peers(self):
        return self.handler.peers

    @property
    def devices(self):
        return self.handler.devices

    def ranks(self, plan):
        return self.handler.ranks(plan)

    def replicas(self, plan):
        return self.handler.replicas(plan)

    @property
    def replays(self):
        return self.handler.replays

    def check(self):
        self.handler.check()

    def compile(self, programs, pieces, observe):
        for number, piece in enumerate(pieces.stages):
            if isinstance(piece, Traced):
                place, config = (number, len(pieces.stages)), piece.config
                options = config.loss, config.policy, config.dynamic, piece.argnums
                key = code(piece.stage, place), _alike(piece.stage)[1:], options
                piece.graphs = self.graphs.setdefault(key, piece.graphs)
        return self.handler.compile(programs, pieces, observe)


def code(x: Any, place: Hashable) -> Hashable:
    """The code of a function and of what it closes over; the place of a stage whose function is no plain one."""
    if isinstance(x, Stage):
        return code(x.fn, place)
    if isinstance(x, FunctionType):
        return x.__code__, *(code(cell.cell_contents, place) for cell in x.__closure__ or ())
    return place if callable(x) else repr(x)


@functools.cache
def graphs(*pipeline):
    """What was traced of pipelines of this name in this process."""
    return {}


def sharing(handler, *pipeline):
    return Sharing(handler, graphs(*pipeline))
