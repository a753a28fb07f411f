"""The handshake that begins a step: its signatures, its rows, and whether every rank can run it.

All ranks of all replicas send each other a few numbers, posted before the first effect and waited for when the first
value travels, those excepted that lead (channels.py). A rank gives a pair of random numbers for each signature: one for
what all microbatches have in common, and one for each microbatch. Their sums over the ranks of a replica name it.

Invariants:
- the first exchange of every call has rows of one size, so that ranks that came to different calls can compare them;
- a row has one pair for all signatures of a step, in order. Only where the sum is new do the pairs of each travel, and
  all ranks remember the same sums, so that all of them exchange these pairs or none does.
"""

from __future__ import annotations

import json
import secrets
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.devices import aside, autocasts
from fpipe.errors import StageError, TransportError
from fpipe.handlers import contents
from fpipe.handlers.contents import CONTENT, UNKNOWN, fingerprint
from fpipe.handlers.distributed.grid import Grid
from fpipe.handlers.distributed.signature import signature_of
from fpipe.handlers.distributed.steps import Steps
from fpipe.handlers.distributed.wire import alike, look
from fpipe.handlers.protocol import Inputs, PeerLost, StepRejected
from fpipe.stages.microbatch import WEIGHING
from fpipe.stages.pytree import PLAIN, Flat, flatten

T = TypeVar("T")
REMEMBERED = 4096  # signatures; the least recently used is dropped
REMEMBERED_STEPS = 512  # tuples of the signatures of all microbatches
WIDTH = 11  # the most numbers that a call gives
REFUSES, LEADS, PROVISIONAL = 1, 2, 4  # how a rank comes to a call
COMPILING, REPLAYING = 0, -1  # calls; that of a step is the number of its program

Name = tuple[int, int]
"""The sums of the numbers that the ranks of a replica give for a signature: the same on all ranks."""


class RollCall:
    """Whole numbers of all ranks; the host waits for them. A rank that can't go on gives its reason.

    Args:
        call: a number for it, the same on every rank, or they came to different calls.
        numbers: at most `WIDTH`.
        error: why this rank can't.
        leads: values of this rank may travel before all ranks have come.
        provisional: its inputs are, see `Inputs`.
    """

    def __init__(
        self,
        steps: Steps,
        call: int,
        numbers: list[int],
        error: BaseException | None,
        leads: bool = False,
        provisional: bool = False,
    ) -> None:
        self._steps, self._connections, self._failures = steps, steps.connections, steps.failures
        self._count, self._error = len(numbers), error
        way = REFUSES * (error is not None) + LEADS * leads + PROVISIONAL * provisional
        self._row = [call, way, *numbers, *[0] * (WIDTH - len(numbers))]
        self._works: list[dist.Work] | None = None
        with suppress(PeerLost):  # that a rank is gone shows in the wait
            self._post()

    def _post(self) -> None:
        failures, error = self._failures, self._error
        failures.calls += 1
        self._key = f"refused {failures.epoch} {failures.calls}"
        if error is not None:
            text = failures.reason(error) if isinstance(error, StageError) else str(error) or repr(error)
            failures.post(text, self._key)
        with aside():
            self._rows, self._works = self._connections.collect(self._row)

    def answers(self, purpose: str) -> tuple[list[list[int]], str | None]:
        """Return the numbers of each rank, and the reason of one that can't go on, if there is one.

        Args:
            purpose: of the wait.

        Raises:
            StepRejected: the ranks came to different calls.
        """
        rows = None
        while rows is None:
            rows = self._await(purpose)
        ways = [way for _, way, *_ in rows]
        self._steps.has_met, self._steps.is_led = True, any(way & LEADS for way in ways)
        self._steps.is_provisional = any(way & PROVISIONAL for way in ways)
        numbers = [row[2 : 2 + self._count] for row in rows]
        if any(way & REFUSES for way in ways):
            return numbers, self._failures.wait(5.0, self._key) or "its reason could not be read"
        calls, grid = [call for call, *_ in rows], self._connections.grid
        if others := [process for process, call in enumerate(calls) if call != calls[0]]:
            raise StepRejected(
                StageError(
                    f"{grid.name(others[0])} came to another step than {grid.name(0)}: call the same functions in the "
                    "same order on every rank",
                    rank=grid.rank,
                )
            )
        return numbers, None

    def _await(self, purpose: str) -> list[list[int]] | None:
        """Wait for the rows; return None if the ranks had to connect again after an earlier step."""
        try:
            with aside():
                if self._works is None:
                    self._post()
                assert self._works is not None
                self._connections.wait_for_control(self._works, None, purpose)
                rows: list[list[int]] = self._rows.tolist()
                return rows
        except PeerLost as lost:
            self._works = None
            self._steps.connect_after(lost)
            return None

    def wait(self) -> list[list[int]]:
        """Return the numbers of each rank.

        Raises:
            StepRejected: a rank can't run the step, or came to another one.
        """
        numbers, reason = self.answers("beginning a step: a rank has not come to it")
        if self._error is not None:
            raise StepRejected(self._error)
        if reason is not None:
            raise StepRejected(TransportError(f"{self._failures.name} can't run the step, for a peer can't: {reason}"))
        return numbers

    @property
    def is_over(self) -> bool:
        """Whether this rank has received the numbers of all ranks."""
        return self._works is None or all(work.is_completed() for work in self._works)

    def clear(self) -> None:
        """Drop the works: a pending one would keep its connection open."""
        self._works = None


class Names(NamedTuple):
    """The names of a replica's inputs.

    Args:
        step: of what its microbatches have in common: params, state, settings, and the batch without its sizes.
        microbatches: of each.
    """

    step: Name
    microbatches: tuple[Name, ...]


@dataclass
class _KnownNames:
    """The names behind the sums of one pair for all signatures, once they have travelled."""

    names: Names | None = None


class Handshake:
    """Compares the inputs of all ranks before values travel, but for those that lead.

    Args:
        program: its number, the same on every rank, and another one for every other program of the handler.
        before_exchange: is called before ranks exchange what makes new names known.
        names: after `wait`, those of every replica.
        rows: after `wait`, the rows of the whole batch, of all replicas, if any rank has them.
        here: those of this replica.
        apart: after `wait`, whether the batch came as `Microbatches`, which some ranks may not have been given.
    """

    def __init__(self, steps: Steps, program: int) -> None:
        self.steps, self.connections, self.failures, self.program = steps, steps.connections, steps.failures, program
        self.roll: RollCall | None = None
        self.names: list[Names] = []
        self._token_of = tokens()
        self._tokens: list[int] = []
        self._tokens_before: list[int] | None = None  # of the last step whose names became known
        self._settings: dict[str, object] = {}
        self.before_exchange: Callable[[], None] = lambda: None
        self.forget()
        self._of_params = _Latest(lambda flat: self._token_of(_hashable(flat)))
        self._of_data = _Latest(self._sign_data)

    def forget(self) -> None:
        """Forget the names of all inputs."""
        # All ranks look up the same sums in the same order, so that they forget the same ones.
        self._known = lru_cache(REMEMBERED_STEPS)(lambda sums: _KnownNames())
        self._tokens_before = None

    def begin(self, inputs: Inputs, has_loss: bool, may_lead: bool = False) -> bool:
        """Post this rank's part; does not wait. Return whether this rank leads.

        Args:
            has_loss: this rank computes the loss of a microbatch.
            may_lead: values may travel before the handshake is over, if the signatures are those of the step before.
        """
        self.rows = self.here = inputs.rows
        rows = inputs.rows if inputs.weighed and inputs.rows is not None else UNKNOWN
        order = fingerprint(inputs.sizes) if inputs.apart and rows != UNKNOWN else 0
        lacks_rows = has_loss and inputs.weighed and rows == UNKNOWN
        apart = UNKNOWN if inputs.apart is None else inputs.apart
        self._settings = contents.settings(inputs)
        self._tokens = [] if inputs.broken is not None else self._tokens_of(inputs)
        settings, rng, data = contents.of_settings(inputs), contents.of_rng(inputs), contents.of_data(inputs)
        leaving, digest = self.steps.departure.number, _digest(self._tokens)
        numbers = [leaving, apart, lacks_rows, rows, order, settings, rng, *data, *digest]
        leads = may_lead and inputs.broken is None and self._tokens == self._tokens_before
        self.roll = RollCall(self.steps, self.program, numbers, inputs.broken, leads, inputs.provisional)
        return leads

    @property
    def is_over(self) -> bool:
        """Whether this rank has received the numbers of all ranks."""
        return self.roll is None or self.roll.is_over

    def meet(self, error: BaseException) -> None:
        """Wait until every rank has begun the step, in which this one has failed before it knew that.

        Raises:
            StepRejected: a rank can't run the step anyway; with this error.
        """
        if self.roll is None or self.steps.has_met:
            return
        try:
            self._called()
        except StepRejected:
            raise StepRejected(error) from None
        except PeerLost:
            return  # it is gone, or fails too

    def _called(self) -> list[list[int]]:
        """Wait for the numbers of all ranks; return them. Of a step that fails, too, all learn whether one leaves."""
        assert self.roll is not None
        calls = self.roll.wait()
        self.steps.departure.learn([leaving for leaving, *_ in calls])
        return calls

    def confirm(self, number: int) -> list[int]:
        """Wait until every rank has launched the whole step; return the number that each gives."""
        return [each for (each,) in self._exchange([number], "ending a step: a rank has not launched all of it")]

    def clear(self) -> None:
        """Drop what a failed step left."""
        if self.roll is not None:
            self.roll.clear()

    def _tokens_of(self, inputs: Inputs) -> list[int]:
        """Return the random numbers for the signatures of this rank's inputs: of the step, and of each microbatch."""
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
        grid, calls = self.connections.grid, self._called()
        _, apart, lacks_rows, rows_of, order_of, settings, rngs, *data, _, _ = zip(*calls, strict=True)
        if others := [process for process, each in enumerate(settings) if each != settings[0]]:
            if self.steps.is_led:
                self.before_exchange()  # a rank that leads tells its settings once it has the head that it waits for
            raise self._rejected(
                f"{grid.name(0)} and {grid.name(others[0])} were called with different settings"
                f"{self._other_settings(others[0])}. Enter the same autocast, and pass the same options, on every rank"
            )
        check_rng(rngs, grid)
        for name, numbers in zip(("batches", "targets"), data, strict=True):
            self._check_content(name, numbers)
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
        self._check_shared(each)
        if rows and self.apart and any(lacks_rows):
            raise self._rejected(
                "the losses of Microbatches are weighed by their rows, which a rank of the last stage was not given: "
                "pass batch or target there too, or weight= or reduction='sum', which need no rows"
            )
        if rows:
            self.rows, self.here = sum(rows), rows[grid.replica]
        self.names = self._names([row[-2:] for row in calls])
        self._tokens_before = self._tokens

    def _check_content(self, name: str, numbers: Sequence[int]) -> None:
        """Check that ranks of one replica that were given trees of one structure were given the same values."""
        grid = self.connections.grid
        first = dict[tuple[int, int], int]()  # the first process of each replica with each structure
        for process, number in enumerate(numbers):
            if number == UNKNOWN:
                continue
            other = first.setdefault((process // grid.ranks, number >> CONTENT), process)
            if numbers[other] != number:
                raise self._rejected(
                    f"{grid.name(other)} and {grid.name(process)} were given different {name} of equal shapes: every "
                    "rank must be given the same one in each step, so that inputs meet their targets. Has one of them "
                    "skipped a batch? Pass None on ranks whose stages don't read it"
                )

    def _check_shared(self, rows: Sequence[int | None]) -> None:
        """Check that replicas with parts of the same rows have equally many."""
        first = dict[int, int]()  # the first replica with each batch
        for replica, batch in enumerate(self.connections.grid.batches):
            other = first.setdefault(batch, replica)
            if rows[replica] != rows[other]:
                raise self._rejected(
                    f"replicas {other} and {replica} share the rows of a batch, for they differ in context= alone, and "
                    f"were given {rows[other]} and {rows[replica]} rows: give each its part of the same rows"
                )

    def _names(self, pairs: list[list[int]]) -> list[Names]:
        """Return the names of each replica's inputs. Where those of a replica are new, the numbers of each travel.

        Args:
            pairs: of each rank, for all its signatures.
        """
        known = [self._known(sums) for sums in self._sums(pairs)]
        if any(each.names is None for each in known):
            self.before_exchange()
            every = self._sums(self._exchange(self._tokens, "comparing signatures"))
            for each, (first, second, *others) in zip(known, every, strict=True):
                each.names = Names((first, second), tuple(zip(others[::2], others[1::2], strict=True)))
        return [each.names for each in known if each.names is not None]

    def _sums(self, numbers: list[list[int]]) -> list[tuple[int, ...]]:
        """Return the sums of each replica's numbers over its ranks."""
        grid = self.connections.grid
        own = ([numbers[grid.process(rank, r)] for rank in range(grid.ranks)] for r in range(grid.replicas))
        return [tuple(map(sum, zip(*each, strict=True))) for each in own]

    def _exchange(self, numbers: list[int], purpose: str) -> list[list[int]]:
        """Return the numbers of each rank; waits for all of them."""
        with aside():
            rows, works = self.connections.collect(numbers)
            self.connections.wait_for_control(works, None, purpose)
            every: list[list[int]] = rows.tolist()
            return every

    def _rows_of(self, replica: int, known: Sequence[tuple[int, int]]) -> int | None:
        """Return the rows of a replica, of those that each rank knows.

        Args:
            known: rows, and a number for the sizes of `Microbatches` in order.
        """
        grid = self.connections.grid
        counts = dict[tuple[int, int], int]()  # -> the first rank that knows it
        for rank in range(grid.ranks):
            counts.setdefault(known[grid.process(rank, replica)], rank)
        counts.pop((UNKNOWN, 0), None)
        if len(counts) > 1:
            ranks = f"the ranks of replica {replica}" if grid.replicas > 1 else "the ranks"
            what = "Microbatches" if self.apart else "batches"
            difference = "of different sizes"
            if len({count for count, _ in counts}) == 1:
                difference = "in another order, or divided otherwise"
            in_all = " in all" if self.apart else ""
            each = ", ".join(
                f"rank {rank} {count} row{'s' * (count != 1)}{in_all}" for (count, _), rank in counts.items()
            )
            raise self._rejected(
                f"{ranks} were given {what} {difference}, {each}: every rank must be given (its part of) the "
                f"same batch{' of its replica' if grid.replicas > 1 else ''}"
                + (f"; where rows are no samples, {WEIGHING}" if self.apart else "")
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
        ranks = self.connections.grid.ranks
        numbers = [number for (number,) in self._exchange([fingerprint(digest)], "comparing the replicas")]
        if wrong := [rank for rank in range(ranks) if len(set(numbers[rank::ranks])) > 1]:
            raise self._rejected(
                f"the replicas of rank {wrong[0]} were given different parameters{self._difference(wrong[0], digest)}; "
                "their shapes, dtypes, shards, which of them are trained and, in the first step, their values must be "
                "the same: make them from one seed, or load them"
            )

    def _difference(self, rank: int, digest: Mapping[str, str]) -> str:
        """Return a text about the first name whose descriptions differ between the replicas of a rank, if it is known.

        They travel through the job's store, once the digests are known to differ.
        """
        grid = self.connections.grid
        replicas = self._read(f"params {rank}", digest, [grid.process(rank, r) for r in range(grid.replicas)])
        for replica, other in enumerate(replicas):
            if names := _differing(replicas[0], other):
                here, there = (each.get(names[0], "missing") for each in (replicas[0], other))
                return f": {names[0]} is {here} on replica 0 and {there} on replica {replica}"
        return ""

    def _other_settings(self, process: int) -> str:
        """Return a text about the settings of a process that differ from those of process 0, if they are known."""
        grid = self.connections.grid
        settings = {name: str(setting) for name, setting in self._settings.items()}
        one, other = self._read("settings", settings, [0, process])
        texts = (
            f"{name} is {one.get(name, 'none')} on {grid.name(0)} and {other.get(name, 'none')} on {grid.name(process)}"
            for name in _differing(one, other)
        )
        return ": " * bool(text := "; ".join(texts)) + text

    def _read(self, name: str, texts: Mapping[str, str], processes: Sequence[int]) -> list[dict[str, str]]:
        """Return the texts of some processes, by name; nothing of those that did not post them in time."""
        grid, key = self.connections.grid, f"{name} {self.failures.epoch} {self.failures.calls} "
        here = grid.process(grid.rank, grid.replica)
        if here in processes:
            self.failures.post(json.dumps(texts), f"{key}{here}")
        posted = (self.failures.wait(5.0, f"{key}{process}") for process in processes)
        return [{} if text is None else json.loads(text) for text in posted]


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


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the names whose texts differ, or that one of the two lacks."""
    return [name for name in dict.fromkeys([*one, *other]) if one.get(name) != other.get(name)]


def _kind(leaf: Any) -> object:
    return leaf.dtype if isinstance(leaf, Tensor) else type(leaf)


def _digest(tokens: list[int]) -> tuple[int, int]:
    """Return one pair for all tokens, in order; as random as they are."""
    digest = blake2b(array("q", tokens), digest_size=10).digest()
    return int.from_bytes(digest[:5], "little"), int.from_bytes(digest[5:], "little")


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
    return inputs.rng is None, autocasts(), torch.get_default_dtype()


def check_rng(numbers: Sequence[int], grid: Grid) -> None:
    """Reject the step if ranks were called with different seeds, of each of which there is a number."""
    if others := [process for process, each in enumerate(numbers) if each != numbers[0]]:
        message = (
            f"{grid.name(0)} and {grid.name(others[0])} were called with different rng=: pass the same (seed, step) on "
            "every rank, or None on every rank. Where steps differ, one rank has skipped a batch"
        )
        raise StepRejected(StageError(message, rank=grid.rank))
