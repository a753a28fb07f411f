"""What the ranks agree on as a step begins: its signatures, its rows, and that every rank can take part."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from fpipe import effects as fx
from fpipe.errors import StageError, TransportError
from fpipe.handlers.failures import Failures
from fpipe.handlers.links import Links, Payload, Signatures
from fpipe.handlers.protocol import Inputs
from fpipe.signature import signature_of
from fpipe.tree import flatten

REMEMBERED = 64  # signatures of whole steps; the least recently used is forgotten, on every rank the same


class Refused(Exception):
    """A rank can't take part in this step; nothing has travelled, and the handler goes on."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Agreement:
    """Channels that find out, before the first value travels, what the ranks agree on."""

    def __init__(self, links: Links, failures: Failures, receipts: Mapping[fx.Value, int]) -> None:
        self.links, self.failures, self.receipts = links, failures, receipts
        self.works: list[Any] = []
        self.early: list[tuple[fx.Value, int, int]] | None = []
        self.tokens: OrderedDict[Any, tuple[int, int]] = OrderedDict()
        self.steps: OrderedDict[tuple[int, int], tuple[Signatures, torch.dtype | None]] = OrderedDict()

    def begin(self, inputs: Inputs) -> None:
        """Say what this rank brings to the step; nothing is waited for."""
        self.broken = inputs.broken
        self.early = []
        self.rows = inputs.rows
        self.loss_dtype: torch.dtype | None = None
        self.failures.steps += 1
        self.broken_key = f"refused {self.failures.steps}"
        if inputs.broken is not None:
            self.failures.tell(str(inputs.broken), self.broken_key)
        rows = inputs.rows if inputs.weighed else None
        known = [0, 0, 0] if rows is None else [1, rows, rows * rows]
        self.sum, self.works = self.links.collect([*self._token(inputs), inputs.broken is not None, *known])

    def _token(self, inputs: Inputs) -> tuple[int, int]:
        """Two random numbers for each signature of this rank's inputs; their sums name the step's."""
        if inputs.broken is not None:
            return (0, 0)
        key = _hashable(inputs)
        if key not in self.tokens:
            self.tokens[key] = (secrets.randbits(40), secrets.randbits(40))
            if len(self.tokens) > REMEMBERED:
                self.tokens.popitem(last=False)
        self.tokens.move_to_end(key)
        return self.tokens[key]

    def agree(self) -> None:
        """Wait for what all ranks said, once a step."""
        if self.early is None:
            return
        early, self.early = self.early, None
        self.links.wait(self.works, None, "beginning a step: a rank has not come to it")
        first, second, broken, *rows = map(int, self.sum)
        self._check(broken, *rows)
        self.name = (first, second)
        if self.name in self.steps:
            self.steps.move_to_end(self.name)
        known, self.loss_dtype = self.steps.get(self.name, (None, None))
        self.links.begin(known, self.receipts)
        for value, source, target in early:
            self.links.post(value, source, target)

    def _check(self, broken: int, knowing: int, rows: int, squares: int) -> None:
        if self.broken is not None:
            raise Refused(self.broken)
        if broken:
            reason = self.failures.told(5.0, self.broken_key) or "its reason could not be read"
            raise Refused(TransportError(f"rank {self.links.rank} can't run the step, for a peer can't: {reason}"))
        if knowing * squares != rows * rows:  # equal only if all are
            mine = "none" if self.rows is None else self.rows
            raise Refused(
                StageError(
                    f"the ranks were given batches of different sizes, this one {mine} rows, {rows / knowing:g} on "
                    "average: every rank must be given (its part of) the same batch",
                    rank=self.links.rank,
                )
            )
        if knowing:
            self.rows = rows // knowing

    def send(self, value: fx.Value, source: int, target: int, payload: Payload) -> None:
        self.agree()
        self.links.send(value, source, target, payload)

    def post(self, value: fx.Value, source: int, target: int) -> None:
        if self.early is not None:
            self.early.append((value, source, target))
        else:
            self.links.post(value, source, target)

    def take(self, value: fx.Value, source: int, target: int, by: fx.Effect) -> Payload:
        self.agree()
        return self.links.take(value, source, target, by)

    def end(self) -> None:
        signatures = self.links.end()
        self.steps[self.name] = (signatures, self.loss_dtype)
        if len(self.steps) > REMEMBERED:
            self.steps.popitem(last=False)

    def clear(self) -> None:
        """Give up what a step that failed has left: a pending work would keep its connection open."""
        self.works = []
        self.early = []


def _hashable(inputs: Inputs) -> Any:
    spec, leaves, _ = signature_of(flatten((dict(inputs.params), dict(inputs.state), list(inputs.data))))
    kinds = tuple(repr(leaf) if isinstance(leaf, float) else type(leaf) for leaf in leaves)  # True is not 1, nor 0 -0
    try:
        hash(leaves)
    except TypeError:
        leaves = tuple(map(repr, leaves))
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return spec, leaves, kinds, inputs.rng is None, *autocast, torch.get_default_dtype()
