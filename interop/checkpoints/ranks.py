"""What all ranks do at once beside a step, over connections of their own: an error on one is an error on all."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from fpipe.errors import TransportError
from fpipe.handlers.distributed.connections import first_line
from fpipe.handlers.distributed.failures import PATIENCE, within
from fpipe.handlers.protocol import Handler
from fpipe.interop.checkpoints.storage import CheckpointError, unpickled
from fpipe.plan import Plan

T = TypeVar("T")

ORDER = "every rank calls latest, save and load, in the same order and with the same folder"


class Ranks:
    """The ranks that a handler plays, and their peers where it plays one.

    Args:
        purpose: what the connections are for; the same on every rank.
    """

    def __init__(self, handler: Handler, plan: Plan, purpose: str) -> None:
        self.handler: Any = handler
        self.played, self.purpose = handler.ranks(plan), purpose
        self.alone = len(self.played) == plan.ranks
        self._call, self._calls = "", 0

    @property
    def first(self) -> bool:
        """Whether this process plays rank 0."""
        return 0 in self.played

    def come(self, call: str) -> None:
        """Begin a call that every rank makes: connect to them, and let them know that this one has come.

        Raises:
            TransportError: the handler has failed, or a rank doesn't come.
        """
        self._call = call
        if not self.alone:
            self._calls = self._reaching(lambda: self._came(self.handler.rank, 1))
            self._reaching(self._group)

    def together(self, do: Callable[[], T], tell: Callable[[T], Any] = lambda done: done) -> tuple[T, list[Any]]:
        """Do something on every rank, and tell the others of it: what came of it here, and what each rank told.

        Raises:
            CheckpointError: another rank failed, or makes another call; says why.
            TransportError: another rank does not come, or is gone.
        """
        call, mine = self._call, None
        try:
            done = do()
            said = pickle.dumps((call, None, tell(done)))
        except Exception as error:
            mine = error
            said = pickle.dumps((call, str(error) if isinstance(error, CheckpointError) else repr(error), None))
        told = [said] if self.alone else self._reaching(lambda: _gathered(self._group(), said))
        if mine is not None:
            raise mine
        answers = [unpickled(one) for one in told]
        for rank, (theirs, reason, _) in enumerate(answers):
            if theirs != call:
                raise CheckpointError(f"rank {rank} is at {theirs} of {self.purpose}, and this one at {call}: {ORDER}")
            if reason is not None:
                raise CheckpointError(f"rank {rank} failed at {self.purpose}: {reason}")
        return done, [answer for *_, answer in answers]

    def _group(self) -> Any:
        return self.handler.apart(self.purpose, self.handler.timeout)

    def _came(self, rank: int, more: int = 0) -> int:
        """How many calls a rank has come to."""
        name = f"fpipe/{self.handler.group.group_name}/{self.purpose}/{rank}"
        return _get_default_store().add(name, more)

    def _reaching(self, speak: Callable[[], T]) -> T:
        try:
            return speak()
        except RuntimeError as error:
            if isinstance(error, TransportError):
                raise
            ranks, late = range(self.handler.size), "imed out" in str(error) or "timeout" in str(error)
            why = f"nothing came within {self.handler.timeout:g} s" if late else first_line(error)
            if missing := within(PATIENCE, lambda: [rank for rank in ranks if self._came(rank) < self._calls]):
                why += f"; missing: {missing}"
            raise TransportError(
                f"rank {self.handler.rank} could not reach the other ranks at {self._call} of {self.purpose} ({why}): "
                f"{ORDER}"
            ) from error


def _gathered(group: Any, own: bytes) -> list[bytes]:
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(group.size())]
    group.allgather([lengths], [torch.tensor([len(own)])]).wait()
    longest = max(map(int, lengths))
    shares: list[Tensor] = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
    padded = torch.frombuffer(bytearray(own.ljust(longest, b"\0")), dtype=torch.uint8)
    group.allgather([shares], [padded]).wait()
    return [share[: int(length)].numpy().tobytes() for share, length in zip(shares, lengths, strict=True)]
