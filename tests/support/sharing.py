"""Graphs that many steps share: there is no time to trace a pipeline for each of a thousand schedules and sizes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, fields, replace
from types import FunctionType
from typing import Any

import torch
from torch import fx

from fpipe.autodiff.functions import TraceConfig
from fpipe.autodiff.graph.signature import Signature
from fpipe.autodiff.graph.trace import Cotangents, Joint
from fpipe.autodiff.options import _alike
from fpipe.autodiff.traced import Graphs, Traced
from fpipe.stages.stage import Stage

GRAPHS: dict[Hashable, Graphs] = {}
"""What was traced in this process, by the code of the stage and the options."""
JOINTS: dict[Hashable, Joint] = {}
"""Traces that no policy has partitioned."""


@dataclass(frozen=True)
class Sharing:
    """A handler whose steps take what earlier steps have traced of stages of the same code, and trace what is new."""

    handler: Any
    pipeline: Hashable = ()
    graphs: dict[Hashable, Graphs] = field(default_factory=lambda: GRAPHS)

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
    def departure(self):
        return self.handler.departure

    @property
    def timeout(self):
        return self.handler.timeout

    @property
    def beside(self):
        return self.handler.beside

    @property
    def flight(self):
        return self.handler.flight

    @property
    def replays(self):
        return self.handler.replays

    def check(self):
        self.handler.check()

    def compile(self, programs, pieces, observe):
        for number, piece in enumerate(pieces.stages):
            if isinstance(piece, Traced):
                stage = code(piece.stage, (self.pipeline, number, len(pieces.stages))), _alike(piece.stage)[1:]
                config = piece.config
                options = {each.name: getattr(config, each.name) for each in fields(TraceConfig)}
                piece.config = SharedTrace(**options, code=stage)
                key = stage, config.loss, config.policy, config.dynamic, piece.argnums
                piece.graphs = self.graphs.setdefault(key, piece.graphs)
        return self.handler.compile(programs, pieces, observe)


@dataclass(frozen=True, kw_only=True)
class SharedTrace(TraceConfig):
    """Trace a stage for a signature once, whatever policies it is partitioned by."""

    code: Hashable

    def joint(self, signature: Signature, cotangents: Cotangents | None) -> Joint:
        key = self.code, signature, cotangents, self.loss, self.dynamic
        if key not in JOINTS:
            JOINTS[key] = super().joint(signature, cotangents)
        return copied(JOINTS[key])


def copied(joint: Joint) -> Joint:
    """Return a trace with a graph of its own, for `partition` changes it."""
    graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    results = graph.graph_copy(joint.graph, nodes)
    graph.output(results).meta.update(next(reversed(joint.graph.nodes)).meta)
    lists = {
        name: [node and nodes[node] for node in getattr(joint, name)] for name in ("params", "inputs", "cotangents")
    }
    return replace(joint.map_results(nodes.__getitem__), graph=graph, **lists)


PLAIN = (int, float, str, bool, type(None), type, torch.dtype, torch.Size)


def code(x: Any, place: Hashable) -> Hashable:
    """The code of a function and of what it closes over; the place of a stage whose function is no plain one."""
    if isinstance(x, Stage):
        return code(x.fn, place)
    if isinstance(x, FunctionType):
        cells = (cell.cell_contents for cell in x.__closure__ or ())
        return x.__code__, *(code(each, place) for each in (*cells, *(x.__defaults__ or ())))
    if isinstance(x, tuple):
        return tuple(code(each, place) for each in x)
    return repr(x) if isinstance(x, PLAIN) else place


def sharing(handler, *pipeline):
    """A handler that shares; `pipeline` names the stages whose functions can't be told apart by their code."""
    return Sharing(handler, pipeline)
