"""Observers and logs see every effect, and every wait for a value, and change nothing."""

import logging

import pytest

import fpipe
from fpipe import handlers
from fpipe.effects import Activation, Forward, Recv
from fpipe.profiling.observers import EffectLog, Several
from fpipe.tables import TABLE
from tests.support import cases, jobs
from tests.support.combinations import few


class Watching(handlers.Observer):
    def __init__(self):
        self.open, self.seen, self.waits, self.came = {}, [], {}, []

    def begin(self, rank, effect):
        assert rank not in self.open
        self.open[rank] = effect

    def end(self, rank, effect):
        assert self.open.pop(rank) == effect
        self.seen.append((rank, effect))

    def wait(self, rank, value):
        assert rank not in self.open
        assert rank not in self.waits
        self.waits[rank] = value

    def arrive(self, rank, value):
        assert self.waits.pop(rank) == value
        self.came.append((rank, len([r for r, _ in self.seen if r == rank]), value))


def first_uses(rank, program):
    """(rank, place of the first effect that needs it, value) of what a rank receives."""
    received = {effect.value for effect in program if isinstance(effect, Recv)}
    for at, effect in enumerate(program):
        for name in TABLE.needs(effect, program.plan):
            if name in received:
                received.remove(name)
                yield rank, at, name


@pytest.mark.parametrize(
    ("name", "schedule", "ranks"), few([("attention", "one_f_one_b", 2), ("skip", "gpipe", 4)], slice(1, None))
)
def test_an_observer_sees_each_effect_begin_and_end_and_each_value_arrive(name, schedule, ranks):
    case, schedule, plan = cases.make(name, schedule, ranks, 3)
    watching = Watching()
    step = fpipe.value_and_grad(case.pipeline, schedule, plan, handler=handlers.Local(), observe=watching)
    found = step(case.params, case.batch, case.target)
    for rank, program in fpipe.lower(schedule, plan).items():
        assert tuple(effect for r, effect in watching.seen if r == rank) == program.effects
        assert [came for came in watching.came if came[0] == rank] == list(first_uses(rank, program))
    assert watching.open == watching.waits == {}
    assert jobs.differences(found, cases.reference(case, schedule, plan)) == []


def test_several_observers_lie_inside_one_another():
    told = []

    class Telling:
        def __init__(self, name):
            self.name = name

        def __getattr__(self, what):
            return lambda *args: told.append((self.name, what, *args))

    several, effect, value = Several([Telling("a"), Telling("b")]), Forward(1, 0), Activation(0, 0)
    several.wait(1, value)
    several.arrive(1, value)
    several.begin(1, effect)
    several.end(1, effect)
    assert told == [
        *(("a", "wait", 1, value), ("b", "wait", 1, value), ("b", "arrive", 1, value), ("a", "arrive", 1, value)),
        *(("a", "begin", 1, effect), ("b", "begin", 1, effect), ("b", "end", 1, effect), ("a", "end", 1, effect)),
    ]


def test_the_log_says_what_an_effect_waited(caplog, monkeypatch):
    times = iter([10.0, 10.5, 10.75, 11.0, 11.25, 12.0, 14.0, 15.0, 15.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    log = EffectLog()
    with caplog.at_level(logging.DEBUG, logger="fpipe.effects"):
        for value in (Activation(0, 0), Activation(1, 0)):  # a quarter of a second for each
            log.wait(1, value)
            log.arrive(1, value)
        for m in range(2):
            log.begin(1, Forward(2, m))
            log.end(1, Forward(2, m))
    assert [record.getMessage() for record in caplog.records] == [
        "  2000.000 ms  rank 1  Forward(stage=2, microbatch=0)  2000.000 ms  waited 500.000 ms",
        "  5000.000 ms  rank 1  Forward(stage=2, microbatch=1)  500.000 ms",
    ]


SCRIPT = """
import torch, fpipe
pipeline = fpipe.Pipeline([lambda p, x: x * p] * 2, lambda y, t: y.sum())
plan = pipeline.plan(fpipe.Placement.loop(2), 1)
step = fpipe.value_and_grad(pipeline, fpipe.schedules.gpipe, plan, handler=fpipe.handlers.Local())
step({0: torch.ones(()), 1: torch.ones(())}, torch.ones(2))
"""


def test_the_log_is_pythons(caplog):
    case, schedule, plan = cases.make("linear", "gpipe", 2, 1)
    with caplog.at_level("DEBUG", logger="fpipe.effects"):
        step = fpipe.value_and_grad(case.pipeline, schedule, plan, handler=handlers.Local())
        step(case.params, case.batch, case.target)
    assert len(caplog.records) == sum(map(len, fpipe.lower(schedule, plan).values()))


def test_no_log_unless_asked_for(capfd, caplog):
    exec(SCRIPT, {})
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []
