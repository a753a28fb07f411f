"""Graphs that many steps share: there is no time to trace a pipeline for each of a thousand schedules and sizes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from fpipe.autodiff.traced import Graphs, Traced


@dataclass(frozen=True)
class Sharing:
    """A handler whose steps take what earlier steps of the same pipeline have traced, and trace what is new."""

    handler: Any
    graphs: dict[int, Graphs]

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
        for stage, piece in enumerate(pieces.stages):
            if isinstance(piece, Traced):
                piece.graphs = self.graphs.setdefault(stage, piece.graphs)
        return self.handler.compile(programs, pieces, observe)


@functools.cache
def graphs(*pipeline):
    """By stage, what was traced of a pipeline of this name and number of stages in this process."""
    return {}


def sharing(handler, *pipeline):
    return Sharing(handler, graphs(*pipeline))
