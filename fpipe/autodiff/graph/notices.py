"""Notices in the job's store: the stages that a process has traced, and the collectives that others expect of it.

A process that waits for others to trace a stage's collectives would wait until its limit for one that has traced the
stage without them. So each process posts the groups of all that it traces, and one that waits for others reads theirs,
and posts for whom it waits. They look for that when they trace a stage, and after steps of which there are ever fewer.

Processes that share a group trace the stages of programs with equal effects in the same order: of those with inputs of
equal shapes, the n-th trace here is the n-th one there, whatever else a process runs alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property

import torch.distributed as dist

from fpipe.devices import is_capturing
from fpipe.errors import StageError
from fpipe.store import JobStore, StoreError

Ranks = tuple[int, ...]
ANSWER = 2.0  # seconds for an answer of the job's store, without which there are no notices
KEPT = 64
"""Notices of one process and program that others can read: of what it has traced last."""
SHOWN = 4096
"""Effects of a program that are compared one by one, where programs differ."""


class Notices:
    """The notices of one program on this process. Where there is no other process, or no store, it posts none.

    Args:
        effects: returns those of the program that compute, in order.
    """

    def __init__(self, effects: Callable[[], Iterable[object]]) -> None:
        self._effects = effects
        self._groups: dict[str, list[Ranks]] = {}  # of each trace: "stage signature number"
        self._steps = 0

    @cached_property
    def program(self) -> str:
        """The digest of the effects."""
        return digest(map(repr, self._effects()))

    def texts(self) -> list[str]:
        """Return the first effects as texts."""
        return [repr(effect) for effect, _ in zip(self._effects(), range(SHOWN), strict=False)]

    def post(self, stage: int, signature: str, groups: Iterable[Ranks]) -> None:
        """Post the groups of the collectives of a stage that has been traced.

        Raises:
            StageError: another process waits for collectives that it lacks.
        """
        if not is_job():
            return
        with suppress(StoreError):
            here, trace = dist.get_rank(), f"{stage} {signature}"
            key = f"{trace} {self._store.add(f'count of {trace} of {here}', 1)}"
            self._groups[key] = [*groups]
            self._store.set(_key(key, here), json.dumps(self._groups[key]))
            if len(self._groups) > KEPT:
                oldest = next(iter(self._groups))
                del self._groups[oldest]
                self._store.delete(_key(oldest, here))
            self._look()

    def expect(
        self, missing: Iterable[int], stage: int, signature: str, group: Ranks, posts: Sequence[str], is_first: bool
    ) -> None:
        """Post that this process waits for others to trace collectives of a stage.

        Args:
            posts: the collectives.
            is_first: it has not posted this yet.

        Raises:
            StageError: one has traced the stage without any.
        """
        here, trace = dist.get_rank(), f"{stage} {signature}"
        key = next((key for key in reversed(self._groups) if key.rpartition(" ")[0] == trace), None)
        if key is None:  # the job's store did not answer
            return
        for other in missing:
            with suppress(StoreError):  # of a store, too, that can't append, as one in files: then only this one raises
                if is_first:
                    self._store.append(_expected(other), json.dumps([here, stage, key, group, [*posts]]) + "\n")
            with suppress(StoreError):
                traced = _key(key, other)
                if self._store.has(traced) and [*group] not in json.loads(self._store.get(traced)):
                    raise lacking(other, stage, here, group, posts)

    def end_step(self) -> None:
        """Look for what others expect, after the steps 1, 2, 4, 8 and so on.

        Raises:
            StageError: another process waits for collectives that this one lacks.
        """
        self._steps += 1
        if self._groups and not self._steps & (self._steps - 1) and not is_capturing():
            with suppress(StoreError):
                self._look()

    def _look(self) -> None:
        here = dist.get_rank()
        lines = self._store.get(_expected(here)) if self._store.has(_expected(here)) else ""
        for line in lines.splitlines():
            rank, stage, key, group, posts = json.loads(line)
            if key in self._groups and tuple(group) not in self._groups[key]:
                raise lacking(here, stage, rank, tuple(group), posts)

    @cached_property
    def _store(self) -> JobStore:
        """The store of all programs with these effects."""
        return JobStore(None, ANSWER).under(f"fpipe/programs/{self.program}")


def digest(texts: Iterable[str]) -> str:
    """Return a short digest of texts."""
    state = hashlib.blake2b(digest_size=8)
    for text in texts:
        state.update(text.encode() + b"\n")
    return state.hexdigest()


def is_job() -> bool:
    """Return whether there are other processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def lacking(without: int, stage: int, rank: int, group: Ranks, posts: Sequence[str]) -> StageError:
    """Return the error of a process that has no collectives where another one waits for it."""
    others = f", and {len(posts) - 1} more" if len(posts) > 1 else ""
    return StageError(
        f"rank {without} has traced it without the collectives that rank {rank} has over ranks {[*group]}, and these "
        f"would wait for ever: {posts[0]}{others}. Each rank of a group runs the same operations in the same order: no "
        "branch of the stage may depend on the rank. A pipeline of equal effects and shapes that only some ranks run "
        "belongs on all ranks, or into handlers.Reference()",
        stage=stage,
    )


def _key(traced: str, rank: int) -> str:
    return f"{traced} of {rank}"


def _expected(rank: int) -> str:
    return f"expected of {rank}"
