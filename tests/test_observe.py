"""Observers and logs see every effect, and change nothing."""

import os
import subprocess
import sys

import fpipe
from fpipe import handlers
from tests import cases, jobs


class Watching:
    def __init__(self):
        self.open, self.seen = {}, []

    def begin(self, rank, effect):
        assert rank not in self.open
        self.open[rank] = effect

    def end(self, rank, effect):
        assert self.open.pop(rank) == effect
        self.seen.append((rank, effect))


def test_an_observer_sees_each_effect_begin_and_end():
    case, schedule, plan = cases.make("attention", "one_f_one_b", 2, 3)
    watching = Watching()
    step = fpipe.value_and_grad(case.pipeline, schedule, plan, handler=handlers.Local(), observe=watching)
    found = step(case.params, case.batch, case.target)
    for rank, program in fpipe.lower(schedule, plan).items():
        assert tuple(effect for r, effect in watching.seen if r == rank) == program.effects
    assert watching.open == {}
    assert jobs.differences(found, cases.reference(case, schedule, plan)) == []


SCRIPT = """
import torch, fpipe
pipeline = fpipe.Pipeline([lambda p, x: x * p] * 2, lambda y, t: y.sum())
plan = pipeline.plan(fpipe.Placement.loop(2), 1)
step = fpipe.value_and_grad(pipeline, fpipe.schedules.gpipe, plan, handler=fpipe.handlers.Local())
step({0: torch.ones(()), 1: torch.ones(())}, torch.ones(2))
"""


def logged(value):
    environment = {**os.environ, "FPIPE_LOG": value}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    return done.stderr.splitlines()


def test_the_log_of_effects_has_rank_and_time():
    lines = logged("effects")
    assert len(lines) == 10
    assert all(line.startswith("fpipe.effects") and " ms " in line for line in lines)
    assert sum("rank 1  Backward(stage=1, microbatch=0)" in line for line in lines) == 1


def test_the_log_is_pythons(caplog):
    case, schedule, plan = cases.make("linear", "gpipe", 2, 1)
    with caplog.at_level("DEBUG", logger="fpipe.effects"):
        step = fpipe.value_and_grad(case.pipeline, schedule, plan, handler=handlers.Local())
        step(case.params, case.batch, case.target)
    assert len(caplog.records) == sum(map(len, fpipe.lower(schedule, plan).values()))


def test_no_log_unless_asked_for():
    assert logged("") == []
