"""The handshake that begins a step: its signatures, its rows, and whether every rank can run it.

All ranks of all replicas send each other some numbers, posted before the first effect and waited for when the first
value travels.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fpipe.devices import aside
from fpipe.errors import StageError, TransportError
from fpipe.handlers.distributed.collectives import fingerprint
from fpipe.handlers.distributed.connections import Connections
from fpipe.handlers.distributed.failures import Failures
from fpipe.handlers.distributed.signature import signature_of
from fpipe.handlers.distributed.wire import alike, look
from fpipe.handlers.protocol import Inputs
from fpipe.stages.pytree import PLAIN, Flat, flatten

UNKNOWN = -1  # rows
REMEMBERED = 64  # signatures of steps; the least recently used is dropped


class StepRejected(Exception):
    """A rank can't run this step. No value has travelled, and the handler stays usable."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class RollCall:
    """Whole numbers of all ranks; the host waits for them. A rank that can't go on gives its reason.

    Args:
        error: why this rank can't.
    """

    def __init__(
        self, connections: Connections, failures: Failures, numbers: list[int], error: BaseException | None
    ) -> None:
        failures.calls += 1
        self._connections, self._failures, self._error = connections, failures, error
        self._key = f"refused {failures.calls}"
        if error is not None:
            text = failures.reason(error) if isinstance(error, StageError) else str(error) or repr(error)
            failures.post(text, self._key)
        with aside():
            self._rows, self._works = connections.collect([*numbers, error is not None])

    def answers(self, purpose: str) -> tuple[list[list[int]], str | None]:
        """Return the numbers of each rank, and the reason of one that can't go on, if there is one.

        Args:
            purpose: of the wait.
        """
        with aside():
            self._connections.wait_for_control(self._works, None, purpose)
            rows = self._rows.tolist()
        numbers = [row[:-1] for row in rows]
        if not any(refused for *_, refused in rows):
            return numbers, None
        return numbers, self._failures.wait(5.0, self._key) or "its reason could not be read"

    def wait(self) -> list[list[int]]:
        """Return the numbers of each rank.

        Raises:
            StepRejected: a rank can't run the step.
        """
        numbers, reason = self.answers("beginning a step: a rank has not come to it")
        if self._error is not None:
            raise StepRejected(self._error)
        if reason is not None:
            raise StepRejected(TransportError(f"{self._failures.name} can't run the step, for a peer can't: {reason}"))
        return numbers

    def clear(self) -> None:
        """Drop the works: a pending one would keep its connection open."""
        self._works = []


class Handshake:
    """Compares the inputs of all ranks before the first value travels.

    Args:
        name: after `wait`, the name of the step's signature, the same on all ranks.
        rows: after `wait`, the rows of the whole batch, of all replicas, if any rank has them.
        here: those of this replica, if there are several.
    """

    def __init__(self, connections: Connections, failures: Failures) -> None:
        self.connections, self.failures = connections, failures
        self.roll: RollCall | None = None
        self.name = (0, 0)
        self._token_of = tokens()
        self.last: tuple[Any, Any, list[Any], tuple[int, int]] | None = None

    def begin(self, inputs: Inputs) -> None:
        """Post this rank's part; does not wait."""
        self.rows = inputs.rows
        self.here: int | None = None
        rows = inputs.rows if inputs.weighed and inputs.rows is not None else UNKNOWN
        self.roll = RollCall(self.connections, self.failures, [*self._token(inputs), rows], inputs.broken)

    def clear(self) -> None:
        """Drop what a failed step left."""
        if self.roll is not None:
            self.roll.clear()

    def _token(self, inputs: Inputs) -> tuple[int, int]:
        """Return two random numbers for the signature of this rank's inputs; the ranks' sums name the step's."""
        if inputs.broken is not None:
            return (0, 0)
        data = [(microbatch.batch, microbatch.target) for microbatch in inputs.data]
        flat = flatten((dict(inputs.params), [*map(dict, inputs.state)], data))
        ambient = _ambient(inputs)
        looks = [look(leaf) for leaf in flat.leaves]
        if self.last is not None and self.last[:2] == (flat.spec, ambient) and alike(self.last[2], looks):
            return self.last[3]
        token = self._token_of((*_hashable(flat), *ambient))
        # A leaf that is neither a tensor nor plain may change in place: compare it in full each time.
        plain = all(isinstance(leaf, Tensor) or type(leaf) in PLAIN for leaf in flat.leaves)
        self.last = (flat.spec, ambient, looks, token) if plain else None
        return token

    def wait(self) -> None:
        """Wait for the numbers of all ranks.

        Raises:
            StepRejected: a rank can't run the step.
        """
        assert self.roll is not None, "begin comes first"
        grid = self.connections.grid
        first, second, known = zip(*self.roll.wait(), strict=True)
        each = [self._rows_of(replica, known) for replica in range(grid.replicas)]
        rows = [count for count in each if count is not None]
        if rows and len(rows) < len(each):
            raise self._rejected(
                f"only {len(rows)} of {len(each)} replicas were given a batch with rows, by which losses are weighed: "
                "give each replica its own rows, or pass weight= or reduction='sum', which need none"
            )
        if rows:
            self.rows = sum(rows)
            self.here = rows[grid.replica] if len(rows) > 1 else None
        self.name = sum(first), sum(second)

    def _rows_of(self, replica: int, known: Sequence[int]) -> int | None:
        """Return the rows of a replica, of those that each rank knows."""
        grid = self.connections.grid
        counts = dict[int, int]()  # -> the first rank that knows it
        for rank in range(grid.ranks):
            counts.setdefault(known[grid.process(rank, replica)], rank)
        counts.pop(UNKNOWN, None)
        if len(counts) > 1:
            ranks = f"the ranks of replica {replica}" if grid.replicas > 1 else "the ranks"
            each = ", ".join(f"rank {rank} {count} rows" for count, rank in counts.items())
            raise self._rejected(
                f"{ranks} were given batches of different sizes, {each}: every rank must be given (its part of) the "
                f"same batch{' of its replica' if grid.replicas > 1 else ''}"
            )
        return next(iter(counts), None)

    def _rejected(self, why: str) -> StepRejected:
        return StepRejected(StageError(why, rank=self.connections.grid.rank))

    def compare(self, digest: Mapping[str, str]) -> None:
        """Compare what must be equal on the same rank of every replica; waits for all ranks.

        Args:
            digest: descriptions by name.

        Raises:
            StepRejected: it differs.
        """
        with aside():
            rows, works = self.connections.collect([fingerprint(digest)])
            self.connections.wait_for_control(works, None, "comparing the replicas")
            numbers = rows.view(-1, self.connections.grid.ranks).tolist()  # of each replica
        if wrong := [rank for rank, same in enumerate(zip(*numbers, strict=True)) if len(set(same)) > 1]:
            raise self._rejected(
                f"the replicas of rank {wrong[0]} were given different parameters{self._difference(wrong[0], digest)}; "
                "their shapes, dtypes, shards and which of them are trained must be the same"
            )

    def _difference(self, rank: int, digest: Mapping[str, str]) -> str:
        """Return a text about the first name whose descriptions differ between the replicas of a rank, if it is known.

        They travel through the job's store, once the digests are known to differ.
        """
        grid, key = self.connections.grid, f"params {self.failures.calls} {rank} "
        if rank == grid.rank:
            self.failures.post(json.dumps(digest), key + str(grid.replica))
        texts = (self.failures.wait(5.0, key + str(replica)) for replica in range(grid.replicas))
        replicas = [{} if text is None else json.loads(text) for text in texts]
        first = replicas[0]
        for replica, other in enumerate(replicas):
            for name in dict.fromkeys([*first, *other]):
                if first.get(name) != other.get(name):
                    here, there = (each.get(name, "missing") for each in (first, other))
                    return f": {name} is {here} on replica 0 and {there} on replica {replica}"
        return ""


def tokens() -> Callable[[Hashable], tuple[int, int]]:
    """Return a function that gives each key two random numbers; the sums over all ranks name a step."""
    return lru_cache(REMEMBERED)(lambda key: (secrets.randbits(40), secrets.randbits(40)))


def _hashable(flat: Flat) -> tuple[Any, ...]:
    spec, leaves, _ = signature_of(flat)
    kinds = tuple(repr(leaf) if isinstance(leaf, float) else type(leaf) for leaf in leaves)  # True is not 1, 0 not -0
    try:
        hash(leaves)
    except TypeError:
        leaves = tuple(map(repr, leaves))
    return spec, leaves, kinds


def _ambient(inputs: Inputs) -> tuple[Any, ...]:
    """Return the settings of torch that decide dtypes beside the inputs."""
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return inputs.rng is None, *autocast, torch.get_default_dtype()
