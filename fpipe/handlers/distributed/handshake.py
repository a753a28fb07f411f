"""The handshake that begins a step: its signatures, its rows, and whether every rank can run it.

All ranks of all replicas send each other some numbers, posted before the first effect and waited for when the first
value travels. A rank gives a pair of random numbers for each signature: one for what all microbatches have in common,
and one for each microbatch. Their sums over the ranks of a replica name it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

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

T = TypeVar("T")
UNKNOWN = -1  # rows, or whether they come as Microbatches
REMEMBERED = 4096  # signatures; the least recently used is dropped

Name = tuple[int, int]
"""The sums of the numbers that the ranks of a replica give for a signature: the same on all ranks."""


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


class Names(NamedTuple):
    """The names of a replica's inputs.

    Args:
        step: of what its microbatches have in common: params, state, settings, and the batch without its sizes.
        microbatches: of each.
    """

    step: Name
    microbatches: tuple[Name, ...]


class Handshake:
    """Compares the inputs of all ranks before the first value travels.

    Args:
        microbatches: of a replica.
        names: after `wait`, those of every replica.
        rows: after `wait`, the rows of the whole batch, of all replicas, if any rank has them.
        here: those of this replica.
        apart: after `wait`, whether the batch came as `Microbatches`, which some ranks may not have been given.
    """

    def __init__(self, connections: Connections, failures: Failures, microbatches: int) -> None:
        self.connections, self.failures, self.microbatches = connections, failures, microbatches
        self.roll: RollCall | None = None
        self.names: list[Names] = []
        self._token_of = tokens()
        self._of_params = _Latest(lambda flat: self._token_of(_hashable(flat)))
        self._of_data = _Latest(self._sign_data)

    def begin(self, inputs: Inputs, has_loss: bool) -> None:
        """Post this rank's part; does not wait.

        Args:
            has_loss: this rank computes the loss of a microbatch.
        """
        self.rows = self.here = inputs.rows
        rows = inputs.rows if inputs.weighed and inputs.rows is not None else UNKNOWN
        order = fingerprint(inputs.sizes) if inputs.apart and rows != UNKNOWN else 0
        lacks_rows = has_loss and inputs.weighed and rows == UNKNOWN
        apart = UNKNOWN if inputs.apart is None else inputs.apart
        numbers = [apart, lacks_rows, rows, order, *self._tokens(inputs)]
        self.roll = RollCall(self.connections, self.failures, numbers, inputs.broken)

    def clear(self) -> None:
        """Drop what a failed step left."""
        if self.roll is not None:
            self.roll.clear()

    def _tokens(self, inputs: Inputs) -> list[int]:
        """Return the random numbers for the signatures of this rank's inputs: of the step, and of each microbatch."""
        if inputs.broken is not None:
            return [0, 0] * (1 + self.microbatches)
        params = self._of_params(flatten((dict(inputs.params), [*map(dict, inputs.state)])))
        kinds, numbers = self._of_data(flatten([(microbatch.batch, microbatch.target) for microbatch in inputs.data]))
        return [*self._token_of((params, kinds, *_ambient(inputs))), *numbers]

    def _sign_data(self, flat: Flat) -> tuple[Hashable, list[int]]:
        """Return the kinds of microbatches, apart from their sizes, and the random numbers for each."""
        each = list(map(flatten, flat.tree))
        kinds = frozenset((one.spec, tuple(map(_kind, one.leaves))) for one in each)
        return kinds, [number for one in each for number in self._token_of(_hashable(one))]

    def wait(self) -> None:
        """Wait for the numbers of all ranks.

        Raises:
            StepRejected: a rank can't run the step.
        """
        assert self.roll is not None, "begin comes first"
        grid, calls = self.connections.grid, self.roll.wait()
        apart, lacks_rows, rows_of, order_of, *_ = zip(*calls, strict=True)
        if True in apart and False in apart:
            raise self._rejected(
                f"{grid.name(apart.index(True))} was given Microbatches, {grid.name(apart.index(False))} a batch or "
                "target to be split: pass Microbatches, or None, on every rank"
            )
        self.apart = True in apart
        known = list(zip(rows_of, order_of, strict=True))
        each = [self._rows_of(replica, known) for replica in range(grid.replicas)]
        rows = [count for count in each if count is not None]
        if rows and len(rows) < len(each):
            raise self._rejected(
                f"only {len(rows)} of {len(each)} replicas were given a batch with rows, by which losses are weighed: "
                "give each replica its own rows, or pass weight= or reduction='sum', which need none"
            )
        if rows and self.apart and any(lacks_rows):
            raise self._rejected(
                "the losses of Microbatches are weighed by their rows, which a rank of the last stage was not given: "
                "pass batch or target there too, or weight= or reduction='sum', which need no rows"
            )
        if rows:
            self.rows, self.here = sum(rows), rows[grid.replica]
        of_replicas = [[calls[grid.process(rank, r)] for rank in range(grid.ranks)] for r in range(grid.replicas)]
        self.names = [_names([sum(column) for column in zip(*own, strict=True)][4:]) for own in of_replicas]

    def _rows_of(self, replica: int, known: Sequence[tuple[int, int]]) -> int | None:
        """Return the rows of a replica, of those that each rank knows.

        Args:
            known: rows, and a number for the sizes of `Microbatches`, which are in another order where it differs.
        """
        grid = self.connections.grid
        counts = dict[tuple[int, int], int]()  # -> the first rank that knows it
        for rank in range(grid.ranks):
            counts.setdefault(known[grid.process(rank, replica)], rank)
        counts.pop((UNKNOWN, 0), None)
        if len(counts) > 1:
            ranks = f"the ranks of replica {replica}" if grid.replicas > 1 else "the ranks"
            each = ", ".join(f"rank {rank} {count} rows" for (count, _), rank in counts.items())
            what = "Microbatches of different sizes" if self.apart else "batches of different sizes"
            raise self._rejected(
                f"{ranks} were given {what}, {each}: every rank must be given (its part of) the "
                f"same batch{' of its replica' if grid.replicas > 1 else ''}"
            )
        return next((count for count, _ in counts), None)

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


class _Latest(Generic[T]):
    """A function of the signature of a tree. It returns its last result while the tree looks the same."""

    def __init__(self, function: Callable[[Flat], T]) -> None:
        self.function = function
        self.last: tuple[Any, list[Any], T] | None = None

    def __call__(self, flat: Flat) -> T:
        looks = list(map(look, flat.leaves))
        if self.last is not None and self.last[0] == flat.spec and alike(self.last[1], looks):
            return self.last[2]
        result = self.function(flat)
        # A leaf that is neither a tensor nor plain may change in place: compare it in full each time.
        plain = all(isinstance(leaf, Tensor) or type(leaf) in PLAIN for leaf in flat.leaves)
        self.last = (flat.spec, looks, result) if plain else None
        return result


def _kind(leaf: Any) -> object:
    return leaf.dtype if isinstance(leaf, Tensor) else type(leaf)


def _names(numbers: list[int]) -> Names:
    step, *microbatches = zip(numbers[::2], numbers[1::2], strict=True)
    return Names(step, tuple(microbatches))


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
