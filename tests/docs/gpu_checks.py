"""Checks of the tests of benchmarks.gpu: they end in every way that a check can."""

import os
import signal
import subprocess
import time

from benchmarks.gpu.setting import Skipped


def passing(setting):
    setting.report.add(kind=setting.kind, left=setting.report.left)


def noting(setting):
    setting.report.note("3 of 4 left out for time")


def failing(setting):
    setting.report.add(share=0.25)
    setting.report.expect(True, "this holds")
    setting.report.expect(False, "a quarter is too much")


def skipping(setting):
    raise Skipped("this machine has no NVRTC")


def crashing(setting):
    setting.report.add(before=1)
    raise ValueError("the check is broken")


def killed(setting):
    os.kill(os.getpid(), signal.SIGKILL)


def leaving_children(setting):
    setting.report.add(child=subprocess.Popen(["sleep", "600"]).pid)


def hanging(setting):
    leaving_children(setting)
    time.sleep(600)


WAYS = {"right": 30.0, "wrong": 30.0, "raises": 30.0, "ends": 30.0, "hangs": 1.0, "right again": 30.0}
"""The ways in which `job` ends, with a limit in seconds."""


def job(rank, way):
    if way == "raises":
        raise ValueError(f"rank {rank} is broken")
    if way == "ends" and rank == 1:
        os._exit(3)
    if way == "hangs":
        time.sleep(600)
    return ["a place"] if way == "wrong" and rank == 1 else []


def importing(setting):
    import only_here
    import optree

    setting.report.expect(hasattr(optree, "tree_map"), f"{optree} is not the one of this Python")
    setting.report.add(file=only_here.__file__)
