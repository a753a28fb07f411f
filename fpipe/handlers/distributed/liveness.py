"""Decide whether a rank that lets others wait is slow, late, stopped or dead. One clock for gloo and NCCL.

A rank that has waited for a quarter of the time limit asks all ranks, through the job's store, for their states. A
thread of each process answers, whatever its main thread does. So a slow stage is not taken for a dead rank, and the
error says who is late, and where it is.

Invariants:
- no wait for a rank that is dead, stopped or absent lasts longer than the time limit, and some seconds;
- a rank that computes may take `compute_timeout` for one effect, and a replayed step as long;
- a rank is absent only if it has been outside of all handlers for the whole time limit;
- the first reason that a rank writes is every rank's;
- time in which this process did not run counts for nobody;
- the whole job asks at most eight questions in the time limit.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import NamedTuple

from fpipe.handlers.distributed.activity import State
from fpipe.handlers.distributed.connections import Connections, first_line
from fpipe.handlers.distributed.failures import LENT, STORE_TIMEOUT, Failure, Failures, failed_steps
from fpipe.handlers.distributed.questions import NO_STATES, SUSPECT, Questions, States, gone
from fpipe.store import host_of

log = logging.getLogger("fpipe.transport")


class Answer(NamedTuple):
    """An answer of the job's store.

    Args:
        ended: why the handler has ended, if it has.
        failed: the failed steps of an epoch.
        states, overdue: of all ranks, and those that have not answered, if they were asked for.
        beside: why a process beside the handler, with which this one computes stages, can't go on.
    """

    ended: str | None
    epoch: int
    failed: list[Failure]
    states: States = NO_STATES
    overdue: Collection[int] = ()
    beside: str | None = None


PATIENCE = 5.0
"""Seconds beyond the time limit, in which processes that compute stages together find out which of them is gone."""


def verdict(
    rank: int,
    states: States,
    overdue: Collection[int],
    timeout: float,
    compute_timeout: float,
    name: Callable[[int], str] = "rank {}".format,
    patience: float = 0.0,
) -> str | None:
    """Return why the wait of a rank can't end, or None if it may.

    Args:
        states: of all ranks; None where a rank has not answered yet.
        overdue: the ranks that have not answered for too long.
        name: of a rank, for messages.
        patience: seconds beyond the time limit, after which all ranks wait in vain.

    >>> waits, computes = State(3, "waiting", "beginning a step", 30.0), State(3, "computing", "Forward(0, 1)", 60.0)
    >>> verdict(0, {0: waits, 1: computes}, (), 30.0, 1800.0)
    >>> verdict(0, {0: waits, 1: computes}, (), 30.0, 60.0)
    'rank 1 has been at Forward(0, 1) for 60 s, longer than compute_timeout=60'
    >>> verdict(0, {0: waits, 1: None}, [1], 30.0, 1800.0)
    'rank 1 does not answer within timeout=30 s: its process is stopped, its host can not be reached, or an extension \
holds the GIL'
    >>> verdict(0, {0: waits, 1: State(2, "absent", "", 30.0)}, (), 30.0, 1800.0)
    'rank 1 has not come within timeout=30 s: its script is elsewhere, or calls fewer steps'
    >>> verdict(0, {0: waits, 1: State(3, "waiting", "finishing a send to rank 0", 31.0)}, (), 30.0, 1800.0)
    'every rank has waited for timeout=30 s, so a message was lost: rank 0, beginning a step; rank 1, finishing a send \
to rank 0'
    """
    answers = {other: state for other, state in states.items() if state is not None}
    for other, state in answers.items():
        if state.kind in ("computing", "replaying") and state.seconds >= compute_timeout:
            return (
                f"{name(other)} has been at {state.text} for {state.seconds:.0f} s, longer than "
                f"compute_timeout={compute_timeout:g}"
            )
    if answers[rank].kind not in ("waiting", "replaying") or answers[rank].seconds < timeout:
        return None
    if (reason := gone(rank, states, overdue, timeout, name)) is not None:
        return reason
    late = any(state.kind == "absent" and state.calls < answers[rank].calls for state in answers.values())
    works = any(state.kind in ("computing", "replaying") for state in answers.values())
    if late or works or len(answers) < len(states):
        return None
    stuck = {other: state for other, state in answers.items() if state.kind == "waiting"}
    if min(state.seconds for state in stuck.values()) < timeout + patience:
        return None
    waits = "; ".join(f"{name(other)}, {state.text}" for other, state in sorted(stuck.items()))
    return f"every rank has waited for timeout={timeout:g} s, so a message was lost: {waits}"


class Watchdog(threading.Thread):
    """Watches the waits of this rank, answers other ranks, and cuts the connections after a failure.

    It ends when the connections are closed, and keeps nothing of the handler alive but them.

    Args:
        compute_timeout: seconds, as of `Distributed`.
    """

    def __init__(self, failures: Failures, connections: Connections, compute_timeout: float) -> None:
        super().__init__(daemon=True, name="fpipe-watchdog")
        self._failures, self._groups, self._activity = failures, connections.groups, connections.activity
        self._timeout, self._compute_timeout = connections.timeout, compute_timeout
        self._busy, self._idle = min(1.0, connections.timeout / 16), min(5.0, connections.timeout / 8)
        self._interval = self._busy
        self._questions = Questions(failures.store, failures.rank, connections.size, connections.timeout)
        self._states: queue.SimpleQueue[State | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._asking = False
        self._looked = self._answered = time.monotonic()  # when it looked, and when the job's store answered, last

    def run(self) -> None:
        # A store whose host has vanished never answers: it has a thread of its own, which is then left behind.
        threading.Thread(target=self._exchanges, daemon=True, name="fpipe-store").start()
        while not self._groups.closed.wait(self._interval) and self._failures.ended is None:
            reason = self._look()
            if reason is not None:
                self._failures.ended = reason
                self._activity.conclude("lost", reason)
                self._groups.cut()
        self._states.put(None)

    def _look(self) -> str | None:
        """Return why the job has failed, if it has."""
        now = time.monotonic()
        asleep, self._looked = now - self._looked - self._interval - STORE_TIMEOUT, now
        if asleep > self._interval:  # this process, and perhaps all of the job, was stopped
            self._activity.skip(asleep)
            for questions in (self._questions, *(group.questions for group in self._groups.beside)):
                questions.skip(asleep)
            self._answered += asleep
        if self._activity.flight is not None:
            self._activity.flight.beat()
        try:
            state = self._activity.state()
        except RuntimeError as error:
            return self._first(f"{self._failures.name}: its device has failed: {first_line(error)}")
        if (loss := self._groups.loss()) is not None:
            return self._first(loss)
        answer = self._exchange(state)
        if answer is None:
            silence = now - self._answered
            if state.kind == "waiting" and min(silence, state.seconds) >= self._timeout:
                return (
                    f"nothing came within timeout={self._timeout:g} s, and the job's store"
                    f"{host_of(self._failures.store)} does not answer"
                )
            return None
        self._answered = time.monotonic()
        self._interval = self._idle if state.kind == "absent" else self._busy
        if answer.ended is None and answer.beside is not None:
            return self._first(answer.beside)
        if answer.ended is None and answer.states:
            limits, patience = (self._timeout, self._compute_timeout), PATIENCE if self._groups.beside else 0.0
            name = self._failures.grid.name
            reason = verdict(self._failures.rank, answer.states, answer.overdue, *limits, name, patience)
            if reason is not None:
                return self._first(reason)
        reasons = [each.reason for each in answer.failed if each.step <= self._activity.calls]
        if state.kind != "absent" and reasons:
            if self._groups.lent and answer.ended is None:
                return self._first(f"{reasons[0]}. {LENT}")
            self._end_step(answer.epoch)
        return answer.ended

    def _end_step(self, epoch: int) -> None:
        """End the waits of a step that has failed on another rank, once the device has done those before."""
        groups = self._groups
        if not groups.is_cut and self._activity.markers.is_committed():
            groups.cut([*groups.used, "control"], epoch)

    def _exchange(self, state: State) -> Answer | None:
        """Return the answer of the job's store; None if it has not come yet."""
        if not self._asking:
            self._asking = True
            self._states.put(state)
        with suppress(queue.Empty):
            answer = self._answers.get(timeout=STORE_TIMEOUT)
            self._asking = False
            return answer
        return None

    def _exchanges(self) -> None:
        """Exchange states with the job's store, until there is None."""
        store = self._failures.store
        while (state := self._states.get()) is not None:
            try:
                epoch, key = self._failures.epoch, self._failures.key
                ended, lines, question = store.multi_get(["failed", key, "questions"])
                suspects = state.kind in ("waiting", "replaying") and state.seconds >= SUSPECT * self._timeout
                answers = None if ended else self._questions.exchange(state, int(question), suspects)
                beside = None if ended else self._beside(state, suspects)
            except RuntimeError as error:
                log.debug("the job's store can't be reached: %s", error)
                self._answers.put(None)
                continue
            states, overdue = answers or (NO_STATES, [])
            reason = str(ended, "utf-8") or None
            self._answers.put(Answer(reason, epoch, failed_steps(lines), states, overdue, beside))

    def _beside(self, state: State, suspects: bool) -> str | None:
        """Return why a process beside the handler can't go on, with which this one computes stages."""
        for group in self._groups.beside:
            if (reason := self._failures.reason_of(group.key)) is not None:
                return reason
            answers = group.questions.exchange(state, group.question(), suspects)
            if answers and (reason := gone(group.rank, *answers, self._timeout, group.name)) is not None:
                return reason
        return None

    def _first(self, reason: str) -> str:
        """Write a reason; return the first that any rank wrote."""
        self._failures.post(reason)
        return self._failures.wait(0.0) or reason
