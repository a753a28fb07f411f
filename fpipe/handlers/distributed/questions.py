"""Questions and answers of processes through the job's store: where is each of them, and does it run at all?

A process that suspects something asks a question, which has a number. A thread of each process answers with its state,
whatever its main thread does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType

from torch.distributed.distributed_c10d import Store

from fpipe.handlers.distributed.activity import State
from fpipe.store import JobStore

States = Mapping[int, State | None]
NO_STATES: States = MappingProxyType({})

SUSPECT, OVERDUE = 0.25, 0.75
"""Shares of the time limit: a rank waits for the first one before it asks, and for the second one for an answer."""


def introduce(store: JobStore, ranks: Iterable[int]) -> None:
    """Write what every process reads, before any of them does: no question, and a first answer of these ranks."""
    store.add("questions", 0)
    for rank in ranks:
        store.compare_set(f"answer {rank}", "", json.dumps([0, *State(0, "absent", "", 0.0)]))


class Questions:
    """This process's part in the questions and answers.

    Args:
        store: of those that ask each other.
        rank, size: of this process among them, and how many there are.
        timeout: seconds; a rank that has not answered for `OVERDUE` of it is overdue.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self.store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._answered = 0
        self._open: list[tuple[int, float]] = []  # questions since this rank suspects something, and when they came

    def skip(self, seconds: float) -> None:
        """Leave a time out of account, in which this process did not run."""
        self._open = [(number, asked + seconds) for number, asked in self._open]

    def exchange(self, state: State, number: int, suspects: bool) -> tuple[States, list[int]] | None:
        """Answer the last question; return all states and the ranks that are overdue, if this rank suspects something.

        Every call of this function is an exchange with the job's store, which may fail, or never return.

        Args:
            number: of the last question.
        """
        now = time.monotonic()
        if not suspects:
            self._open = []
        elif not self._open or (number == self._open[-1][0] and now > self._open[-1][1] + self._timeout / 8):
            number = self.store.add("questions", 1)
        if number > self._answered:
            self.store.set(f"answer {self._rank}", json.dumps([number, *state]))
            self._answered = number
        if not suspects:
            return None
        if not self._open or number > self._open[-1][0]:
            self._open.append((number, now))
        due = [number for number, asked in self._open if now > asked + OVERDUE * self._timeout]
        texts = self.store.multi_get([f"answer {rank}" for rank in range(self._size)])
        answers = [json.loads(text) for text in texts]
        states: dict[int, State | None] = {
            rank: State(*fields) if number >= self._open[0][0] else None
            for rank, (number, *fields) in enumerate(answers)
        }
        states[self._rank] = state
        return states, [rank for rank, (number, *_) in enumerate(answers) if due and number < due[-1]]


def gone(
    rank: int, states: States, overdue: Collection[int], timeout: float, name: Callable[[int], str] = "rank {}".format
) -> str | None:
    """Return which rank does not come or does not run, for which this one may wait in vain; None if all may come.

    Args:
        states: of all ranks; None where a rank has not answered yet.
        overdue: the ranks that have not answered for too long.
        name: of a rank, for messages.
    """
    answers = {other: state for other, state in states.items() if state is not None}
    if answers[rank].kind not in ("waiting", "replaying") or answers[rank].seconds < timeout:
        return None
    for other, state in answers.items():
        if state.kind == "absent" and state.calls < answers[rank].calls and state.seconds >= timeout:
            where = "its script is elsewhere, or calls fewer steps"
            return f"{name(other)} has not come within timeout={timeout:g} s: {where}"
    if overdue:
        return (
            f"{name(min(overdue))} does not answer within timeout={timeout:g} s: its process is stopped, its host can "
            "not be reached, or an extension holds the GIL"
        )
    return None
