"""What the ranks agree on as a step begins: its signatures, its rows, and that every rank can take part."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from fpipe.errors import StageError, TransportError
from fpipe.handlers.distributed.connections import Links
from fpipe.handlers.distributed.failures import Failures
from fpipe.handlers.distributed.signature import signature_of
from fpipe.handlers.distributed.wire import alike, look
from fpipe.handlers.protocol import Inputs
from fpipe.stages.pytree import PLAIN, Flat, flatten

REMEMBERED = 64  # signatures of whole steps; the least recently used is forgotten, on every rank the same


class Refused(Exception):
    """A rank can't take part in this step; nothing has travelled, and the handler goes on."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Agreement:
    """Finds out, before the first value travels, what the ranks agree on.

    After `wait`, `name` is the step's signature on all ranks, and `rows` how many its batch has.
    """

    def __init__(self, links: Links, failures: Failures) -> None:
        self.links, self.failures = links, failures
        self.works: list[Any] = []
        self.name = (0, 0)
        self.tokens: OrderedDict[Any, tuple[int, int]] = OrderedDict()
        self.last: tuple[Any, Any, list[Any], tuple[int, int]] | None = None

    def begin(self, inputs: Inputs) -> None:
        """Say what this rank brings to the step; nothing is waited for."""
        self.broken = inputs.broken
        self.rows = inputs.rows
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
        given = flatten((dict(inputs.params), dict(inputs.state), list(inputs.data)))
        ambient = _ambient(inputs)
        looks = [look(leaf) for leaf in given.leaves]
        if self.last is not None and self.last[:2] == (given.spec, ambient) and alike(self.last[2], looks):
            return self.last[3]
        token = self._find((*_hashable(given), *ambient))
        # What is neither a tensor nor plain may change in place.
        plain = all(isinstance(leaf, Tensor) or type(leaf) in PLAIN for leaf in given.leaves)
        self.last = (given.spec, ambient, looks, token) if plain else None
        return token

    def _find(self, key: Any) -> tuple[int, int]:
        if key not in self.tokens:
            self.tokens[key] = (secrets.randbits(40), secrets.randbits(40))
            if len(self.tokens) > REMEMBERED:
                self.tokens.popitem(last=False)
        self.tokens.move_to_end(key)
        return self.tokens[key]

    def wait(self) -> None:
        """Wait for what all ranks said.

        Raises:
            Refused: a rank can't take part.
        """
        self.links.wait(self.works, None, "beginning a step: a rank has not come to it")
        first, second, broken, *rows = self.sum.tolist()
        self._check(broken, *rows)
        self.name = (first, second)

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


def _hashable(given: Flat) -> tuple[Any, ...]:
    spec, leaves, _ = signature_of(given)
    kinds = tuple(repr(leaf) if isinstance(leaf, float) else type(leaf) for leaf in leaves)  # True is not 1, nor 0 -0
    try:
        hash(leaves)
    except TypeError:
        leaves = tuple(map(repr, leaves))
    return spec, leaves, kinds


def _ambient(inputs: Inputs) -> tuple[Any, ...]:
    """What else decides what a step's values look like."""
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return inputs.rng is None, *autocast, torch.get_default_dtype()
