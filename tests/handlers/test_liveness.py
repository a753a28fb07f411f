"""Ranks that let others wait: slow ones are waited for, dead, stopped and absent ones are named in time."""

import os
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from fpipe.devices import Cpu
from fpipe.effects import Forward
from fpipe.handlers.distributed.activity import LEAD, Activity, Markers, State
from fpipe.handlers.distributed.backends import NCCL, Gloo
from fpipe.handlers.distributed.failures import Failures
from fpipe.handlers.distributed.grid import Grid
from fpipe.handlers.distributed.groups import Groups
from fpipe.handlers.distributed.liveness import Answer, Watchdog, verdict
from tests.support import faults
from tests.support.combinations import one_in, thorough
from tests.support.fake_device import FakeDevice

GRACE = 8.0  # seconds that the error may come later than the time limit, on a busy machine


@thorough
def test_a_slow_stage_is_waited_for(pools):
    """It computes for three times the time limit."""
    losses = pools(3).run(faults.run, 3, "slow", "eager", 1.0)
    assert len(set(losses)) == 1


@one_in(2)
@pytest.mark.parametrize(
    ("fault", "limits", "reason"),
    [
        ("slow", (1.0, 1.5), r"rank 1 has been at Forward(stage=1, microbatch=3) for 2 s, longer than compute_timeout"),
        ("absent", (1.5,), "rank 1 has not come within timeout=1.5 s: its script is elsewhere"),
    ],
)
def test_a_rank_that_does_not_go_on_is_named(pools, fault, limits, reason):
    pools(3).run(faults.run, 3, "none")  # the first trace of a process takes long
    outcomes = pools(3).outcomes(faults.run, 3, fault, "eager", *limits, limit=30)
    for rank in (0, 2):
        check_loss(rank, outcomes[rank], reason, sum(limits))
    assert outcomes[1].error == "TransportError"
    assert reason in outcomes[1].text


def test_a_rank_that_is_stopped_is_named(fresh_pool):
    pool = fresh_pool(3)
    pool.run(faults.run, 3, "none")
    for pipe in pool.pipes:
        pipe.send((faults.run, (3, "stopped", "eager", 1.5)))
    until = time.monotonic() + 30
    for rank in (0, 2):
        outcome = pool.outcome(rank, until, faults.run)
        check_loss(rank, outcome, "rank 1 does not answer within timeout=1.5 s: its process is stopped", 1.5)


def check_loss(rank, outcome, reason, limit):
    assert outcome.error == "TransportError", outcome.text
    assert reason in outcome.text
    assert f"rank {rank} can't go on: {reason}" in outcome.text
    assert outcome.seconds < 1.0 + limit + GRACE


@thorough
def test_a_short_stop_between_two_slow_steps_is_no_absence(pools):
    """Rank 0 waits in the next step while rank 1 still computes this one, and then is elsewhere for a moment."""
    assert pools(2).run(faults.slow_evaluation, 1.5) == [True, True]


@thorough
def test_a_rank_that_evaluates_with_another_handler_is_waited_for(pools):
    assert pools(2).run(faults.two_handlers, 1.0) == [True, True]


def test_a_lifeline_tells_that_a_process_has_ended(fresh_pool):
    first, second, third = fresh_pool(3).outcomes(faults.lifeline, True, limit=30)
    assert first.value.startswith("rank 1 did not give a reason")
    assert third.value is None
    assert second.exitcode == 3


def test_a_lifeline_that_is_closed_tells_nothing(pools):
    assert pools(3).run(faults.lifeline, False) == [None] * 3


@thorough
def test_a_wait_is_cut_after_another_rank_has_gone(fresh_pool):
    """Nothing can be posted to the rank that is gone, which would not end a wait for the others."""
    gone, _, waited = fresh_pool(3).outcomes(faults.cut_after_a_loss, limit=30)
    assert gone.exitcode == 3
    assert waited.value is True


def test_the_host_is_some_effects_ahead_at_most():
    device = FakeDevice(lag=5.0, now=0.0)
    markers, waits = Markers(device), []
    for m in range(20):
        markers.add("waiting for a value", "waiting")
        markers.add(Forward(0, m))
        markers.keep_up()
        waits.append(len(device.waits))
        ahead = [marker for marker in markers._pending if not marker.event.query() and marker.kind != "waiting"]
        assert len(ahead) <= LEAD
    assert waits[: LEAD + 1] == [*[0] * LEAD, 1]
    assert markers.drain(lambda: device.now < 1e3 and not setattr(device, "now", device.now + 1))
    assert markers.oldest() is None


def test_a_state_says_what_the_device_waits_for_or_computes():
    device = FakeDevice(lag=5.0, now=0.0)
    activity = Activity(Markers(device))
    assert activity.state()[:2] == (0, "absent")
    activity.enter(lambda: Forward(0, 2))
    assert activity.state()[:3] == (1, "computing", "Forward(stage=0, microbatch=2)")
    activity.waiting = "beginning a step"
    assert activity.state()[:3] == (1, "waiting", "beginning a step")
    activity.markers.add("waiting for a value", "waiting")
    activity.markers.add(Forward(0, 3))
    assert activity.state()[:3] == (1, "waiting", "waiting for a value")  # whatever the host waits for
    activity.waiting = None
    assert activity.state()[:3] == (1, "waiting", "waiting for a value")  # or computes, such as a number it reads
    activity.leave()  # the script may wait for a result
    assert activity.state()[:3] == (1, "waiting", "waiting for a value")
    device.now += 5.0 - 5e-7
    assert activity.state()[:3] == (1, "computing", "Forward(stage=0, microbatch=3)")
    device.now += 1.0
    assert activity.state()[:2] == (1, "absent")


def test_a_rank_that_is_busy_with_another_handler_is_not_absent():
    training, evaluation = Activity(Markers(Cpu())), Activity(Markers(Cpu()))
    assert training.state()[1] == "absent"
    evaluation.enter(lambda: Forward(0, 2))
    assert training.state()[:3] == (0, "computing", "another handler: Forward(stage=0, microbatch=2)")
    evaluation.leave()
    assert training.state()[1] == "absent"


def test_a_rank_between_two_steps_is_not_late_yet():
    waits = State(4, "waiting", "beginning a step", 9.0)
    assert verdict(0, {0: waits, 1: State(3, "absent", "", 0.5)}, (), 2.0, 1800.0) is None
    assert "rank 1 has not come" in verdict(0, {0: waits, 1: State(3, "absent", "", 2.0)}, (), 2.0, 1800.0)


def test_a_rank_whose_device_computes_lets_all_others_wait():
    waits = State(4, "waiting", "beginning a step", 9.0)
    states = {0: waits, 1: State(4, "computing", "Backward(stage=1, microbatch=3)", 9.0), 2: waits}
    assert verdict(0, states, (), 2.0, 1800.0) is None
    states[1] = State(4, "replaying", "a replayed step", 9.0)
    assert verdict(0, states, (), 2.0, 1800.0) is None
    assert verdict(1, states, (), 2.0, 1800.0) is None
    assert "rank 2 does not answer" in verdict(1, {**states, 2: None}, [2], 2.0, 1800.0)


def test_time_in_which_the_process_was_stopped_does_not_count(monkeypatch):
    """All ranks of a host may be stopped, and go on together."""
    now, connections = 100.0, OneRank(Cpu())
    connections.timeout = 10.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    connections.activity.enter()
    connections.activity.waiting = "a value"
    watchdog = Watchdog(Failures(Grid(1), dist.HashStore()), connections, 10.0)
    monkeypatch.setattr(watchdog, "_exchange", lambda state: Answer(None, 0, [], {0: state, 1: state}))
    assert watchdog._look() is None
    now += 100
    assert watchdog._look() is None
    for _ in range(10):
        now += 1
        reason = watchdog._look()
    assert "every rank has waited for timeout=10 s" in reason


def test_a_state_lasts_as_long_as_nothing_changes(monkeypatch):
    now, activity = 100.0, Activity(Markers(Cpu()))
    monkeypatch.setattr("fpipe.handlers.distributed.activity.time.monotonic", lambda: now)
    activity.enter()
    activity.waiting = "a value"
    assert activity.state().seconds == 0
    now += 7
    assert activity.state().seconds == 7
    activity.waiting = "another"
    assert activity.state().seconds == 0


class Stuck:
    """A communicator that can be aborted only while all others are: an abort waits for the device."""

    def __init__(self, barrier):
        self.barrier = barrier

    def abort(self):
        self.barrier.wait(5)
        raise RuntimeError("aborted")


def test_communicators_are_cut_all_at_once():
    begun = time.monotonic()
    barrier = threading.Barrier(4)
    NCCL().cut([Stuck(barrier) for _ in range(4)])
    assert not barrier.broken
    assert time.monotonic() - begun < 4


def test_connections_are_closed_when_the_device_is_done():
    device, closed = FakeDevice(lag=0.3), []
    backend = type("Backend", (NCCL,), {"close": lambda self, groups: closed.append(groups)})()
    groups = Groups(backend, Markers(device), limit=10)
    groups.edges[0, 1] = "a group"
    groups._markers.add(Forward(0, 0))
    begun = time.monotonic()
    groups.close()
    assert time.monotonic() - begun > 0.2
    assert groups.closed.is_set()
    assert closed == [["a group"]]
    assert not groups.edges
    assert not groups.is_cut


def test_connections_of_a_device_that_never_ends_are_cut():
    cuts = []
    backend = type("Backend", (NCCL,), {"cut": lambda self, groups: cuts.append(groups)})()
    groups = Groups(backend, Markers(FakeDevice(lag=1e6, now=0.0)), limit=0.2)
    groups.edges[0, 1] = "a group"
    groups._markers.add(Forward(0, 0))
    groups.close()
    assert cuts == [["a group"]]


def test_a_connection_that_is_never_made_is_an_error(pools):
    for text in pools(2).run(faults.never_connects):
        assert "while connecting rank 0 to rank 1 (no connection within timeout=1 s)" in text


def test_nccl_groups_are_bounded_and_never_end_the_process(monkeypatch):
    class Options:
        def __init__(self, is_high_priority_stream=False):
            self.high, self.config = is_high_priority_stream, SimpleNamespace()

    class Group(SimpleNamespace):
        def __init__(self, store, rank, size, options):
            super().__init__(options=options, handling=os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"])

    Group.Options = Options
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    edge = NCCL(channels=8).group(dist.HashStore(), "0-1", 0, [0, 1], 10.0)
    results = NCCL(channels=8).group(dist.HashStore(), "results", 0, range(4), 10.0)
    assert (edge.options.high, edge.options.config.max_ctas) == (True, 8)
    assert (results.options.high, results.options.config.max_ctas) == (False, 1)
    assert edge.options._timeout > timedelta(days=1)
    assert edge.handling == results.handling == "0"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"


class FailingDevice(FakeDevice):
    def event(self, timed=False):
        event = super().event(timed)
        event.query = self.fail
        return event

    def fail(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nMore of it")


class OneRank:
    """The connections of a job of one rank."""

    def __init__(self, device):
        self.activity, self.timeout, self.size = Activity(Markers(device)), 0.2, 1
        self.groups = Groups(Gloo(), self.activity.markers, 1.0)


def test_a_device_that_fails_is_every_ranks_reason():
    connections, failures = OneRank(FailingDevice()), Failures(Grid(3, rank=2), dist.HashStore())
    connections.activity.markers.add(Forward(0, 0))
    Watchdog(failures, connections, 10.0).run()
    text = "rank 2: its device has failed: CUDA error: an illegal memory access was encountered"
    assert failures.ended == text
    assert str(failures.store.get("failed"), "utf-8") == text
