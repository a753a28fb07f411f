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
from fpipe.stages.stage import CARRY
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
        # Those that generate have two signatures, and learn them from the first tokens.
        self._store: JobStore | None = None if pieces.cached else lasting_store(LIMIT)
        self._keys: dict[int, str] = {}  # by stage, where the store has what it was given
        self._hints: dict[int, str] = {}

    def trace(self) -> None:
        """Trace this rank's stages in its first step."""
        if self._store is None or self._keys:
            return
        for stage in self._executor.stages:
            traced, prepared = self._executor.pieces.stages[stage], self._executor.calls.step.prepared[stage]
            reads = isinstance(traced, Traced) and traced.sources and CARRY not in traced.sources
            if reads and not prepared.placed:  # by this process alone
                params = [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x for x in prepared.leaves]
                self._keys[stage] = f"{self._name}/{stage}/{fingerprint(params)}"
        with suppress(TransportError):
            self._hints = {stage: self._store.get(key) for stage, key in self._keys.items() if self._store.has(key)}
        for stage, hint in self._hints.items():
            with suppress(Exception):  # of the stage: it is raised when the stage runs
                self._trace(stage, hint)

    def _trace(self, stage: int, hint: str) -> None:
        step, plan, pieces = self._executor.calls.step, self._executor.plan, self._executor.pieces
        traced = pieces.stages[stage]
        assert isinstance(traced, Traced)
        sources = {int(source): self._like(text) for source, text in json.loads(hint).items()}
        data = step.inputs.data[plan.unit(plan.microbatches_of(stage, self._executor.rank)[0])]
        traced.trace(step.prepared[stage], step.state.get(stage), sources, data, pieces.differentiated)

    def _like(self, text: str) -> Flat:
        """Return an output of another stage of which only the signature is known."""
        codec = PayloadCodec(decode(text.encode()), self._device)
        payload = codec.payload(codec.buffers())
        assert isinstance(payload, Flat)
        return payload

    def leave(self) -> None:
        """Leave the signatures for the next start, once a step is over."""
        if self._store is None:
            return
        store, self._store = self._store, None
        with suppress(TransportError, TypeError):  # of a signature that is not plain
            for stage, key in self._keys.items():
                traced = self._executor.pieces.stages[stage]
                if isinstance(traced, Traced) and (sources := traced.last_sources) is not None:
                    texts = {source: encode(signature_of(tree)).decode() for source, tree in sources.items()}
                    if (hint := json.dumps(texts)) != self._hints.get(stage):
                        store.set(key, hint)
