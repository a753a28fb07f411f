"""The steps and set-ups of a handler, which all ranks make together: a failure of one is a failure of all.

A step is refused, fails, or loses a rank:
- refused: a rank can't begin it, and says so in the roll call. Every rank raises, and no connection is cut, unless
  some rank leads: its values may be on their way. Then all cut the edges, and connect again in the next step.
- failed: a rank that is still there fails in the middle. It writes its reason into the job's store, and cuts the
  connections on which it has posted something; so do the others, whose waits end. In the next step all connect again.
- lost: a rank is gone, or does not come in time. The handler ends.

A rank ends a step when its own program has ended, and sends this to the others, without waiting for them, maybe with
numbers of its own (`Ends`). Those that wait for that, because they return results of several ranks or close the
connections, call `settle`.

Invariants:
- a rank cuts connections only when every rank has begun the step: one may still be in an earlier one, as of
  `evaluate`, whose values this one has sent. Those that it could not cut it gives up when all come to the next step;
- nothing is cut before the device has done the steps that all ranks have ended;
- all ranks connect again, or none: they compare messages in the job's store, and decide alike;
- connections on which no rank has posted anything in the failed step are kept;
- what some ranks have learned in a failed step is forgotten on all of them;
- a step that a rank has ended with results that it keeps, and in which another one fails, ends the handler.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from fpipe.devices import aside, is_capturing
from fpipe.errors import TransportError
from fpipe.handlers.distributed.connections import Connections, first_line
from fpipe.handlers.distributed.failures import LENT, Failure, Failures
from fpipe.handlers.protocol import Departure, PeerLost, StepRejected
from fpipe.store import FIRST_PAUSE, LAST_PAUSE, polls

ENDED = "The handler has ended: make a new one, and go on from a checkpoint"
SETTLING = "ending a step: a rank has not run all of its program"
RECONNECTING = "connecting again after a failed step: a rank has not come to the next one"


class Learner(Protocol):
    """Remembers what ranks have exchanged in earlier steps.

    Args:
        learned: the number of the step in which it has learned something last.
    """

    learned: int

    def forget(self) -> None:
        """Forget it all."""


def _nothing() -> None:
    """Run no effect."""


class Ends:
    """The numbers that each rank sends to the others as it ends a program.

    The thread that runs the steps waits for the works and drops them, and ends the handler where a rank is lost. Others
    only look: they may wait for the numbers while that one runs a later step.

    Args:
        read: returns them once the works are done.
        works: under way; others may drop them, for a pending work keeps its connection open.
    """

    def __init__(self, steps: Steps, read: Callable[[], list[list[int]]], works: list[Any]) -> None:
        self._steps, self._read, self._works = steps, read, works
        self._is_known, self._is_waiting = not works, False

    def wait(self) -> None:
        """Wait for all ranks; see `Steps.settle`. For the thread that runs the steps."""
        if not self._works:
            return
        self._is_waiting = True
        try:
            self._is_known = self._steps.wait_for(self._works)
        finally:
            self._is_waiting = False

    def __call__(self) -> list[list[int]]:
        """Wait for all ranks, and return the numbers of each. Any thread may call it.

        Raises:
            PeerLost, TransportError: as `Steps.settle`.
            TransportError: (in another thread) they don't come within the limit.
        """
        if self._steps.connections.activity.thread is threading.current_thread():
            self.wait()
            is_known = self._is_known
        else:
            is_known = self._come()
        if not is_known:
            raise TransportError(
                f"{self._steps.failures.name} has not received what the other ranks sent as they ended a step, for a "
                "later one has failed: go on from a checkpoint"
            )
        return self._read()

    def _come(self) -> bool:
        """Return whether the numbers come, while another thread runs the steps.

        Raises:
            TransportError: the handler has ended, or they don't come within the limit.
        """
        steps = self._steps
        for _ in polls(time.monotonic() + steps.limit, steps.failures.check, FIRST_PAUSE, LAST_PAUSE):
            if (is_known := self._look()) is not None:
                return is_known
        raise TransportError(
            f"{steps.failures.name}: a thread that reads a result waited {steps.limit:g} s for what the other ranks "
            "send as they end a step: a rank computes for longer, or hangs; if steps take that long, pass "
            "Distributed(compute_timeout=...) a greater limit"
        )

    def drop(self) -> None:
        """Drop the works, and keep the numbers if all of them are there."""
        self._is_known = bool(self._look())
        self._works.clear()

    def _look(self) -> bool | None:
        """Return whether the numbers of all ranks are here; None while they may still come."""
        if not (works := [*self._works]):  # read first: a wait takes them off, then sets what is known, then is over
            return None if self._is_waiting else self._is_known
        if not all(work.is_completed() for work in works):
            return None
        try:
            return all(work.wait() for work in works)
        except RuntimeError:
            return False


class Steps:
    """The steps of one handler on this rank.

    Args:
        compute_timeout: seconds that the device, or another rank, may take for the steps before.

    Attributes:
        limit: these seconds.
        failure: of the last step, until the ranks are connected again.
        has_met: whether every rank is known to have begun the running step.
        is_led: whether some rank is known to lead in it, or heads of values have been sent.
        is_provisional: whether the inputs of some rank are known to be, see `Inputs`.
        follows_a_result: all ranks have results of the call before, or the handler ends.
        irrevocable: why the running step can't be repeated once it fails; None where it can.
        learners: what was learned, by the number of its program.
    """

    def __init__(
        self, connections: Connections, failures: Failures, compute_timeout: float, departure: Departure | None = None
    ) -> None:
        self.connections, self.failures, self.limit = connections, failures, compute_timeout
        self.departure = departure or Departure(is_alone=False)
        self.failure: Failure | None = None
        self.has_met = self.is_led = self.is_provisional = self.follows_a_result = False
        self.irrevocable: str | None = None
        self.learners: weakref.WeakValueDictionary[int, Learner] = weakref.WeakValueDictionary()
        self._ends: Callable[[], Ends | None] = _nothing  # of the program that this rank ended last, if still wanted
        self._refused: BaseException | None = None
        self._is_repeatable = False

    @property
    def number(self) -> int:
        """The number of the running step; the same on every rank."""
        return self.connections.activity.calls

    @property
    def is_over(self) -> bool:
        """Return whether the running step was refused or has failed on this rank."""
        return self._refused is not None or self.failure is not None

    @contextmanager
    def running(
        self,
        effect: Callable[[], object] = _nothing,
        clear: Callable[[], None] = _nothing,
        is_repeatable: bool = False,
    ) -> Iterator[None]:
        """Run a step, or a part of it inside: a failure of this rank is one of all, a peer's is a `TransportError`.

        Args:
            effect: returns the effect that runs, or what runs in its place.
            clear: drops what keeps connections open.
            is_repeatable: running the step changes nothing that a rank keeps.
        """
        activity = self.connections.activity
        if is_step := not activity.inside:
            self._begin(is_repeatable)
        try:
            with activity.runs(effect):
                if is_step and self.failure is not None:
                    self._connect_again()
                yield
                self._check_cut()
        except StepRejected as refused:
            self._refused = refused.error
            if self.is_led:
                self._give_up_edges(refused.error)
            raise refused.error from refused.error.__cause__
        except PeerLost as lost:
            clear()
            failed = self._of_peer(lost)
            self._conclude(failed)
            raise failed from None
        except BaseException as error:  # an interrupt too: the other ranks wait for this one
            if not self.is_over and self.failures.ended is None:
                clear()
                self._of_own(error)
                activity.conclude("failed", self.failures.reason(error))
            raise
        finally:
            if is_step:
                activity.leave()

    def end_program(self, numbers: Sequence[int] = ()) -> Ends:
        """Report to the other ranks that this one has ended its program; does not wait.

        Where hosts run ahead of devices, and in a graph, the exchange of the losses has reported it.

        Args:
            numbers: what else to send to them; as many on each rank.
        """
        is_reported = self.connections.device.asynchronous and not numbers
        if self.connections.size == 1 or is_reported or is_capturing():
            return Ends(self, lambda: [[*numbers]], [])
        if (before := self._ends()) is not None:
            before.wait()  # which all ranks have reported, or they had not begun this step
        with aside():
            rows, self.connections.groups.ends = self.connections.collect([self.number, *numbers])

        def read() -> list[list[int]]:
            with aside():
                return [row[1:] for row in rows.tolist()]

        ends = Ends(self, read, self.connections.groups.ends)
        self._ends = weakref.ref(ends)
        return ends

    def settle(self) -> None:
        """Wait until every rank has ended the program that this one ran last.

        Raises:
            PeerLost: (in a step) one of them could not.
            TransportError: likewise, outside of one; the handler has then ended.
        """
        if (ends := self._ends()) is not None:
            ends.wait()
        elif self.connections.groups.ends:
            self.wait_for(self.connections.groups.ends)

    def wait_for(self, ends: list[Any]) -> bool:
        """Wait for works that report that every rank has ended a program, as `settle`; return whether each has."""
        activity = self.connections.activity
        if activity.inside:
            self.connections.wait_for_control(ends, None, SETTLING)
            return True
        activity.inside = True
        try:
            self.connections.wait_for_control(ends, None, SETTLING)
        except PeerLost as lost:
            failure = self._recorded(lost)
            if failure is not None and failure.repeatable:
                return False  # the next step connects again
            failed = self._of_peer(lost) if failure is None else self._of_ended(failure)
            self._conclude(failed)
            raise failed from None
        finally:
            activity.leave()
        return True

    def connect_after(self, lost: PeerLost) -> None:
        """Connect again if another rank has failed in a step that this one had ended; else raise `lost`.

        Nothing but a roll call may be on its way.

        Raises:
            TransportError: that step had results that this rank keeps: the handler has ended.
        """
        failure = self._recorded(lost)
        if failure is None or failure.step >= self.number or self.failures.ended is not None:
            raise lost
        if not failure.repeatable:
            failed = self._of_ended(failure)
            self._conclude(failed)
            raise failed
        self._connect_again()

    def check(self) -> None:
        """Wait for the other ranks, and for the device.

        Raises:
            TransportError: the handler has ended, or a peer has failed in a step that this rank has launched.
        """
        activity, failures = self.connections.activity, self.failures
        self.settle()
        try:
            activity.markers.drain(lambda: failures.ended is None and not self.connections.groups.is_cut)
        except RuntimeError as error:
            self._end(f"{failures.name}: its device has failed: {error}")
            raise TransportError(f"{failures.name}: its device has failed: {error}") from error
        failures.check()
        if self.failure is None and self.connections.groups.is_cut:
            _, recorded = failures.read() or (None, [])
            reason = next((each.reason for each in recorded), "it gave no reason")
            raise TransportError(f"a peer failed in a step whose results this rank has: {reason}")

    def _begin(self, is_repeatable: bool) -> None:
        self.failures.check()
        self.follows_a_result = not (self._is_repeatable or self.is_over)
        if not self._is_repeatable:
            self.connections.activity.markers.commit()
        self.connections.activity.enter()
        if not self.connections.groups.is_cut:  # else another rank failed in the step before, which needs these
            self.connections.used.clear()
            self.connections.groups.lent.clear()
        self.connections.groups.ends = []  # the roll call of this step comes after them
        self.has_met = self.is_led = self.is_provisional = False
        self.irrevocable, self._refused, self._is_repeatable = None, None, is_repeatable

    def _check_cut(self) -> None:
        if not self.is_over and (self.connections.groups.is_cut or self.failures.ended is not None):
            raise PeerLost(None, "finishing the step")  # on CUDA a group that was cut raises nothing

    # A failure of this step

    @property
    def _why_irrevocable(self) -> str | None:
        return LENT if self.connections.groups.lent else self.irrevocable

    def _of_own(self, error: BaseException) -> None:
        """Fail the step because this rank does, and give the reason to the other ranks.

        Those that still run the step before end it first, for its results are to be known: who reads the reason cuts
        the connections on which the ranks report to each other.
        """
        try:
            if (ends := self._ends()) is not None:
                with suppress(PeerLost):  # then they stay unknown
                    ends.wait()
        finally:  # also where a second interrupt ends the wait
            self._give_reason(error)

    def _give_reason(self, error: BaseException) -> None:
        rank = self.connections.rank
        failure = Failure(self.number, self.failures.reason(error), rank, self._is_repeatable)
        if (why := self._why_irrevocable) is not None:
            self._end(f"{failure.reason}. {why}")
            return
        self.failures.record(failure)
        self._fail(failure)

    def _of_peer(self, lost: PeerLost) -> TransportError:
        """Fail the step because a peer does, or end the handler because it is gone; return the error to raise."""
        failures = self.failures
        failure = self._recorded(lost)
        if failures.ended is None and failure is not None and (why := self._why_irrevocable) is not None:
            self._end(f"{failure.reason}. {why}")
        if failures.ended is None and failure is not None:
            self._fail(failure._replace(step=self.number, repeatable=self._is_repeatable))
        if failures.ended is None and failure is not None:
            return TransportError(
                f"{failures.name} can't finish the step, for a peer can't: {failure.reason} ({failures.name} was "
                f"{lost}). Nothing of this step counts, and the next one may go on, unless a rank had ended this one "
                "before it failed"
            )
        if failures.ended is None:
            reason = self._loss(lost)
            failures.post(reason)
            failures.ended = failures.wait(0.0) or reason  # the first one is every rank's
        self._drop_ends()
        self.connections.abort()
        return TransportError(f"{failures.name} can't go on: {failures.ended} ({failures.name} was {lost})")

    def _of_ended(self, failure: Failure) -> TransportError:
        """End the handler because a peer has failed in a step that this rank has ended; return the error to raise."""
        self._end(self._apart(failure, self.connections.rank))
        return TransportError(f"{self.failures.ended}. {ENDED}")

    def _apart(self, failure: Failure, ended: int) -> str:
        name = self.failures.grid.name
        return (
            f"{name(failure.process)} failed in step {failure.step} of this handler, which {name(ended)} had ended, so "
            f"that their results are of different steps: {failure.reason}"
        )

    def _conclude(self, failed: TransportError) -> None:
        """Note in the flight recorder why a peer's failure ends this step."""
        activity = self.connections.activity
        activity.conclude("lost", str(failed))
        if activity.flight is not None:
            failed.add_note(f"fpipe explain {activity.flight.path.parent} says what each rank did last")

    def _loss(self, lost: PeerLost) -> str:
        """Return which rank is gone, and how this one noticed it."""
        failures, known = self.failures, self._known(lost)
        beside = self.connections.groups.left_beside() or "a process"
        peer = beside if lost.is_other else "a peer" if known is None else failures.grid.name(known)
        host = failures.host_failure()  # where it is gone, the others end their connections because they can't reach it
        if host is not None:
            peer = f"{failures.grid.name(0)}, whose process has the job's store,"
        if host is not None and not host.has_ended:
            return f"{peer} does not answer: is its process stopped? {failures.name} noticed it while {lost}"
        return (
            f"{peer} did not give a reason: did its script end, or was its process killed? {failures.name} noticed it "
            f"while {lost}"
        )

    def _known(self, lost: PeerLost) -> int | None:
        known = lost.peer if lost.peer != self.connections.rank else None  # a broadcast of this rank's has no peer
        is_the_other = known is None and self.connections.size == 2 and not lost.is_other
        return 1 - self.connections.rank if is_the_other else known

    def _recorded(self, lost: PeerLost) -> Failure | None:
        """Return the failure behind a lost peer; None if there is none, or the handler has ended.

        A rank that fails writes its reason before it breaks its connections; so does this rank's watchdog. A rank that
        can't name the peer that it has lost waits longer, so that one that can writes first; and yet longer after
        a collective with processes that are no ranks of the handler, whose reasons come by way of some that are.
        """
        failures, groups = self.failures, self.connections.groups
        is_known = groups.left_beside() if lost.is_other else self._known(lost) is not None
        until = time.monotonic() + (0.2 if is_known else 3.0 if lost.is_other else 1.0)
        for _ in failures.jobs.polls(until):
            if failures.ended is None:
                failures.ended, recorded = failures.read() or (None, [])
            if failures.ended is not None:
                break
            if failure := next((each for each in recorded if each.step <= self.number), None):
                return failure
            keys = [*([] if lost.group is None else [lost.group]), *(group.key for group in groups.beside)]
            loss = groups.loss() or next(filter(None, map(failures.reason_of, keys)), None)
            if loss is not None:
                failures.post(loss)
                failures.ended = failures.wait(0.0) or loss
        return None

    def _fail(self, failure: Failure) -> None:
        """Cut the connections of this step."""
        self.failure = failure
        self._drop_ends()
        markers, until = self.connections.activity.markers, time.monotonic() + self.limit
        try:
            while not markers.is_committed():
                if self.failures.ended is not None or time.monotonic() > until:
                    self._end(f"{self.failures.name}: its device has not done the steps before: {failure.reason}")
                    return
                time.sleep(FIRST_PAUSE)
        except RuntimeError as error:
            self._end(f"{self.failures.name}: its device has failed: {first_line(error)}")
            return
        if self.has_met:
            self.connections.cut_used()
        else:
            self.connections.give_up_used()

    def _give_up_edges(self, error: BaseException) -> None:
        """Cut the edges after a step that all ranks refuse: some of its values may be on their way.

        The roll call of others may still be under way, on connections that stay.
        """
        self.failure = Failure(self.number, self.failures.reason(error), self.connections.rank, self._is_repeatable)
        self.connections.cut_edges()

    def _end(self, reason: str) -> None:
        """End the handler."""
        if self.failures.ended is None:
            self.failures.post(reason)
            self.failures.ended = self.failures.wait(0.0) or reason
        self._drop_ends()
        self.connections.abort()

    def _drop_ends(self) -> None:
        if (ends := self._ends()) is not None:
            ends.drop()

    # The next step

    def _connect_again(self) -> None:
        """Begin a new epoch: meet the other ranks, make the connections again that one of them is missing."""
        connections, failures, failure, rank = self.connections, self.failures, self.failure, self.connections.rank
        failures.begin_epoch()
        connections.groups.begin_epoch(failures.epoch)
        self.failure = None  # from here on, a failure is one of this step
        learned = {number: each.learned for number, each in self.learners.items()}
        message = {
            "step": self.number,
            "failure": failure,
            "missing": connections.missing(),
            "learned": [number for number, at in learned.items() if at >= self.number - 1],
        }
        key = f"epoch {failures.epoch} "
        with failures.quietly():
            failures.jobs.set(f"{key}{rank}", json.dumps(message))
        messages = self._messages([f"{key}{each}" for each in range(connections.size)])
        if (why := self._unsafe(messages)) is not None:
            self._end(why)
            raise TransportError(f"{why}. {ENDED}")
        self.has_met = True
        connections.activity.recover()
        connections.connect_again({name for each in messages for name in each["missing"]})
        for number in {number for each in messages for number in each["learned"]}:
            if number in self.learners:
                self.learners[number].forget()

    def _messages(self, keys: list[str]) -> list[Any]:
        """Return the messages of all ranks; the watchdog ends the wait for one that does not come."""
        failures, jobs = self.failures, self.failures.jobs
        with self.connections.activity.waits_for(RECONNECTING):
            for _ in jobs.polls(float("inf")):
                with failures.quietly():
                    if jobs.has(*keys):
                        return [json.loads(text) for text in jobs.multi_get(keys)]
                if failures.ended is not None or self.connections.groups.is_cut:
                    break
        raise PeerLost(None, RECONNECTING)

    def _unsafe(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """Return why the ranks can't go on together; the same on every rank."""
        name, steps = self.failures.grid.name, [each["step"] for each in messages]
        if others := [rank for rank, step in enumerate(steps) if step != steps[0]]:
            return f"after a failed step, {name(0)} came to another step than {name(others[0])}"
        failures = [each["failure"] and Failure(*each["failure"]) for each in messages]
        failed, ended = ([rank for rank, each in enumerate(failures) if bool(each) == has] for has in (True, False))
        if failed and ended and not failures[failed[0]].repeatable:
            return self._apart(failures[failed[0]], ended[0])
        return None
