"""Locks of memory checkpoints whose files another program removes, and another start makes again."""

import subprocess
import sys

import pytest

from fpipe import handlers
from fpipe.interop.checkpoints.memory import MemoryCheckpoints
from fpipe.interop.checkpoints.slots import Lock
from tests.support import memory_jobs, run_jobs

HOLDS = "import fcntl,sys;f=open(sys.argv[1],'r+b');fcntl.lockf(f,fcntl.LOCK_EX);print(1,flush=True);sys.stdin.read()"


@pytest.fixture
def replaced(tmp_path):
    """A lock that is taken, whose path is then that of another file, and a function that lets a process lock that."""
    lock = Lock(tmp_path / "000000.lock")
    assert lock.take()
    lock.path.rename(tmp_path / "moved")  # still has a name, but not this one
    lock.path.touch()
    made = []

    def hold():
        made.append(subprocess.Popen([sys.executable, "-c", HOLDS, lock.path], stdin=-1, stdout=-1))
        made[-1].stdout.readline()

    yield lock, hold
    for process in made:
        process.communicate()


def test_the_lock_of_another_start_is_not_removed(replaced):
    lock, _ = replaced
    lock.remove()
    assert lock.path.exists()
    assert not lock.is_taken


def test_a_lock_that_was_replaced_is_not_taken_while_another_process_has_it(replaced):
    lock, hold = replaced
    hold()
    assert not lock.take()
    assert not lock.is_taken
    assert lock.path.exists()


def test_a_lock_that_was_replaced_is_taken_again(replaced):
    lock, _ = replaced
    assert lock.take()
    lock.remove()
    assert not lock.path.exists()


def test_a_run_that_ends_leaves_the_files_of_another_start(tmp_path):
    run, *rest = memory_jobs.begin(tmp_path, handlers.Local())
    seen = {}

    def replace(i):
        if i == 11:  # of 12: the last time that a test is asked
            seen["memory"] = next(
                each for each in vars(run.checkpoints).values() if isinstance(each, MemoryCheckpoints)
            )

    run_jobs.train(run, *rest, replace)
    memory = seen["memory"]
    for folder in (memory.folder.parent, memory.folder):
        folder.mkdir(0o700, exist_ok=True)
    memory._lock.take()
    memory._lock.path.rename(tmp_path / "moved")
    memory._lock.path.touch()
    memory._paths = [memory.folder / "000000.0"]
    memory._paths[0].touch()
    process = subprocess.Popen([sys.executable, "-c", HOLDS, memory._lock.path], stdin=-1, stdout=-1)
    process.stdout.readline()
    try:
        memory.clear()
    finally:
        process.communicate()
    assert memory._lock.path.exists()
    assert memory._paths[0].exists()
    memory.clear()  # the other start has ended: what no process has is removed
    assert not memory.folder.exists()
    memory.clear()
