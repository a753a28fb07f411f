"""Trace the stages of a rank before their inputs come, by the signatures that an earlier start of the job has left.

Otherwise a rank traces a stage when its first input comes: one rank after another, and all of them once more in each
start. torchrun's store outlives the workers that it starts again, so that they find there what the stages were given
before. That is a hint: a graph is looked up by the signature of the inputs that come, as ever, and one for which none
come is traced for nothing.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress

import torch

from fpipe.autodiff.traced import Traced
from fpipe.errors import TransportError
from fpipe.handlers.contents import fingerprint
from fpipe.handlers.distributed.signature import decode, encode, signature_of
from fpipe.handlers.distributed.wire import PayloadCodec
from fpipe.handlers.executor import Executor
from fpipe.stages.pytree import Flat
from fpipe.store import JobStore, lasting_store

LIMIT = 1.0  # seconds for an answer of the store


class Ahead:
    """The signatures of one program.

    Args:
        device: where values are.
    """

    def __init__(self, executor: Executor, device: torch.device) -> None:
        self._executor, self._device = executor, device
        pieces, plan = executor.pieces, executor.plan
        kind = plan.stages, plan.edges, plan.microbatches, pieces.loss, pieces.differentiated, sorted(pieces.argnums)
        self._name = f"fpipe/inputs/{os.environ.get('TORCHELASTIC_RUN_ID')}/{fingerprint(kind)}"
        self._store: JobStore | None = lasting_store(LIMIT)
        self._left: dict[int, str] = {}  # by stage, what the store has

    def trace(self) -> None:
        """Trace this rank's stages in its first step."""
        if self._store is None or self._left:
            return
        with suppress(TransportError):
            for stage in self._executor.stages:
                traced, key = self._executor.pieces.stages[stage], f"{self._name}/{stage}"
                if isinstance(traced, Traced) and traced.sources and self._store.has(key):
                    self._left[stage] = self._store.get(key)
        for stage, text in self._left.items():
            with suppress(Exception):  # of the stage: it is raised when the stage runs
                self._trace(stage, text)

    def _trace(self, stage: int, text: str) -> None:
        step, plan, pieces = self._executor.calls.step, self._executor.plan, self._executor.pieces
        traced, prepared = pieces.stages[stage], step.prepared[stage]
        assert isinstance(traced, Traced)
        if prepared.placed:  # other processes trace it together with this one
            return
        sources = {int(source): self._made(hint) for source, hint in json.loads(text).items()}
        data = step.inputs.data[plan.microbatches_of(stage, self._executor.rank)[0]]
        traced.trace(prepared, step.state.get(stage), sources, data, pieces.differentiated)

    def _made(self, hint: str) -> Flat:
        codec = PayloadCodec(decode(hint.encode()), self._device)
        payload = codec.payload(codec.buffers())
        assert isinstance(payload, Flat)
        return payload

    def leave(self) -> None:
        """Leave the signatures for the next start, once a step is over."""
        if self._store is None:
            return
        store, self._store = self._store, None
        with suppress(TransportError, TypeError):  # of a signature that is not plain
            for stage in self._executor.stages:
                traced = self._executor.pieces.stages[stage]
                if isinstance(traced, Traced) and traced.sources and (sources := traced.last_sources) is not None:
                    hints = {source: encode(signature_of(tree)).decode() for source, tree in sources.items()}
                    if (text := json.dumps(hints)) != self._left.get(stage):
                        store.set(f"{self._name}/{stage}", text)
