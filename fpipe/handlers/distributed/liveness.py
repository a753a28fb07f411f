"""Decide whether a rank that lets others wait is slow, late, stopped or dead. One clock for gloo and NCCL.

A rank that has waited for half of the time limit asks all ranks, through the job's store, for their states. A thread of
each process answers, whatever its main thread does. So a slow stage is not taken for a dead rank, and the error says
who is late, and where it is.

Invariants:
- no wait for a rank that is dead, stopped or absent lasts longer than the time limit, and some seconds;
- a rank that computes may take `compute_timeout` for one effect;
- the first reason that a rank writes is every rank's;
- the whole job asks at most eight questions in the time limit.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Collection, Mapping
from functools import partial

from fpipe.handlers.distributed.activity import State
from fpipe.handlers.distributed.connections import Connections, first_line
from fpipe.handlers.distributed.failures import STORE_TIMEOUT, Failures, call_with_timeout

States = Mapping[int, State | None]


def verdict(rank: int, states: States, overdue: Collection[int], timeout: float, compute_timeout: float) -> str | None:
    """Return why the wait of a rank can't end, or None if it may.

    Args:
        states: of all ranks; None where a rank has not answered yet.
        overdue: the ranks that have not answered for half of the timeout.

    >>> waits, computes = State(3, "waiting", "a value", 30.0), State(3, "computing", "Forward(0, 1)", 60.0)
    >>> verdict(0, {0: waits, 1: computes}, (), 30.0, 1800.0)
    >>> verdict(0, {0: waits, 1: computes}, (), 30.0, 60.0)
    'rank 1 has been at Forward(0, 1) for 60 s, longer than compute_timeout=60'
    >>> verdict(0, {0: waits, 1: None}, [1], 30.0, 1800.0)
    'rank 1 does not answer: its process is stopped, or its host can not be reached'
    >>> verdict(0, {0: waits, 1: State(2, "absent", "", 30.0)}, (), 30.0, 1800.0)
    'rank 1 has not come within timeout=30 s: its script is elsewhere, or calls fewer steps'
    >>> verdict(0, {0: waits, 1: State(3, "waiting", "another", 31.0)}, (), 30.0, 1800.0)
    'every rank waits, so a message was lost: rank 0 is waiting for a value; rank 1 is waiting for another'
    """
    answers = {other: state for other, state in states.items() if state is not None}
    for other, state in answers.items():
        if state.kind == "computing" and state.seconds >= compute_timeout:
            return (
                f"rank {other} has been at {state.text} for {state.seconds:.0f} s, longer than "
                f"compute_timeout={compute_timeout:g}"
            )
    if answers[rank].kind != "waiting" or answers[rank].seconds < timeout:
        return None
    for other, state in answers.items():
        if state.kind == "absent" and state.calls < answers[rank].calls:
            return (
                f"rank {other} has not come within timeout={timeout:g} s: its script is elsewhere, or calls fewer steps"
            )
    if overdue:
        return f"rank {min(overdue)} does not answer: its process is stopped, or its host can not be reached"
    stuck = {other: state for other, state in answers.items() if state.kind == "waiting"}
    if len(answers) < len(states) or any(state.kind == "computing" for state in answers.values()):
        return None
    if min(state.seconds for state in stuck.values()) < timeout:
        return None
    waits = "; ".join(f"rank {other} is waiting for {state.text}" for other, state in sorted(stuck.items()))
    return f"every rank waits, so a message was lost: {waits}"


class Questions:
    """This rank's part in the questions and answers.

    Args:
        timeout: seconds; a rank that has not answered for half of it is overdue.
    """

    def __init__(self, failures: Failures, size: int, timeout: float) -> None:
        self._store, self._rank, self._size, self._timeout = failures.store, failures.rank, size, timeout
        self._answered = 0
        self._open: list[tuple[int, float]] = []  # questions since this rank suspects something, and when they came

    def exchange(self, state: State, suspects: bool) -> tuple[States, list[int]] | None:
        """Answer the last question; return all states and the ranks that are overdue, if this rank suspects something.

        Every call of this function is an exchange with the job's store, which may fail, or never return.
        """
        number, now = self._store.add("questions", 0), time.monotonic()
        if not suspects:
            self._open = []
        elif not self._open or (number == self._open[-1][0] and now > self._open[-1][1] + self._timeout / 8):
            number = self._store.add("questions", 1)
        if number > self._answered:
            self._store.set(f"answer {self._rank}", json.dumps([number, *state]))
            self._answered = number
        if not suspects:
            return None
        if not self._open or number > self._open[-1][0]:
            self._open.append((number, now))
        due = [number for number, asked in self._open if now > asked + self._timeout / 2]
        texts = self._store.multi_get([f"answer {rank}" for rank in range(self._size)])
        answers = [json.loads(text) for text in texts]
        states: dict[int, State | None] = {
            rank: State(*fields) if number >= self._open[0][0] else None
            for rank, (number, *fields) in enumerate(answers)
        }
        states[self._rank] = state
        return states, [rank for rank, (number, *_) in enumerate(answers) if due and number < due[-1]]


def introduce(failures: Failures) -> None:
    """Write the first answer of this rank. Every rank does so before any of them asks."""
    failures.store.set(f"answer {failures.rank}", json.dumps([0, *State(0, "absent", "", 0.0)]))


class Watchdog(threading.Thread):
    """Watches the waits of this rank, answers other ranks, and cuts the connections after a failure.

    It ends with the handler's connections.

    Args:
        compute_timeout: seconds, as of `Distributed`.
    """

    def __init__(self, failures: Failures, connections: Connections, compute_timeout: float) -> None:
        super().__init__(daemon=True, name="fpipe-watchdog")
        self._failures, self._connections = weakref.ref(failures), weakref.ref(connections)
        self._activity, self._closed = connections.activity, connections.closed
        self._timeout, self._compute_timeout = connections.timeout, compute_timeout
        self._questions = Questions(failures, connections.size, connections.timeout)
        self._answered_at = time.monotonic()  # when the job's store answered last

    def run(self) -> None:
        while not self._closed.wait(min(1.0, self._timeout / 16)):
            failures, connections = self._failures(), self._connections()
            if failures is None or connections is None or failures.ended is not None:
                return
            reason = self._look(failures, connections)
            if reason is not None:
                failures.ended = reason
                connections.cut()
                return
            del failures, connections

    def _look(self, failures: Failures, connections: Connections) -> str | None:
        """Return why the job has failed, if it has."""
        try:
            state = self._activity.state()
        except RuntimeError as error:
            return _first(failures, f"rank {failures.rank}: its device has failed: {first_line(error)}")
        if (loss := connections.loss()) is not None:
            return _first(failures, loss)
        answer = call_with_timeout(STORE_TIMEOUT, partial(self._ask, failures, state))
        if answer is None:
            silence = time.monotonic() - self._answered_at
            if state.kind == "waiting" and min(silence, state.seconds) >= self._timeout:
                return f"nothing came within timeout={self._timeout:g} s, and the job's store does not answer"
            return None
        self._answered_at = time.monotonic()
        reason, states, overdue = answer
        if reason is None and states:
            reason = verdict(failures.rank, states, overdue, self._timeout, self._compute_timeout)
            if reason is not None:
                return _first(failures, reason)
        return reason

    def _ask(self, failures: Failures, state: State) -> tuple[str | None, States, list[int]]:
        if failures.store.check(["failed"]):
            return str(failures.store.get("failed"), "utf-8"), {}, []
        suspects = state.kind == "waiting" and state.seconds >= self._timeout / 2
        return None, *(self._questions.exchange(state, suspects) or ({}, []))


def _first(failures: Failures, reason: str) -> str:
    """Write a reason; return the first that any rank wrote."""
    failures.post(reason)
    return failures.wait(0.0) or reason
