"""What all ranks do at once beside a step, over connections of their own: an error on one is an error on all."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from fpipe.errors import TransportError
from fpipe.handlers.protocol import Handler
from fpipe.interop.checkpoints.stored import CheckpointError, unpickled
from fpipe.program import Plan

T = TypeVar("T")


class Ranks:
    """The ranks that a handler plays, and their peers where it plays one.

    Args:
        purpose: what the connections are for; the same on every rank.
    """

    def __init__(self, handler: Handler, plan: Plan, purpose: str) -> None:
        self.handler: Any = handler
        self.played, self.purpose = handler.ranks(plan), purpose
        self.alone = len(self.played) == plan.ranks

    @property
    def first(self) -> bool:
        """Whether this process plays rank 0."""
        return 0 in self.played

    def connect(self) -> Any:
        """The group of all ranks.

        Raises:
            TransportError: the handler has failed, or a rank doesn't come.
        """
        return None if self.alone else self._reaching(lambda: self.handler.apart(self.purpose, self.handler.timeout))

    def together(self, do: Callable[[], T], tell: Callable[[T], Any] = lambda done: done) -> tuple[T, list[Any]]:
        """Do something on every rank, and tell the others of it: what came of it here, and what each rank told.

        Raises:
            CheckpointError: another rank failed; says why.
        """
        group, mine = self.connect(), None
        try:
            done = do()
            said = pickle.dumps((None, tell(done)))
        except Exception as error:
            mine = error
            said = pickle.dumps((str(error) if isinstance(error, CheckpointError) else repr(error), None))
        told = [said] if self.alone else self._reaching(lambda: _gathered(group, said))
        if mine is not None:
            raise mine
        answers = [unpickled(one) for one in told]
        for rank, (reason, _) in enumerate(answers):
            if reason is not None:
                raise CheckpointError(f"rank {rank} failed at {self.purpose}: {reason}")
        return done, [answer for _, answer in answers]

    def _reaching(self, speak: Callable[[], T]) -> T:
        try:
            return speak()
        except RuntimeError as error:
            if isinstance(error, TransportError):
                raise
            raise TransportError(
                f"rank {self.handler.rank} could not reach the other ranks about {self.purpose} ({error}): every rank "
                "saves and loads at once, with the same folder"
            ) from error


def _gathered(group: Any, own: bytes) -> list[bytes]:
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(group.size())]
    group.allgather([lengths], [torch.tensor([len(own)])]).wait()
    longest = max(map(int, lengths))
    shares: list[Tensor] = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
    padded = torch.frombuffer(bytearray(own.ljust(longest, b"\0")), dtype=torch.uint8)
    group.allgather([shares], [padded]).wait()
    return [share[: int(length)].numpy().tobytes() for share, length in zip(shares, lengths, strict=True)]
