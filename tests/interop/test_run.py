"""A training run goes on where its last checkpoint ended, with the same bits, and saves when it is asked to end."""

import os
import signal
import subprocess
import sys
import time
from math import prod
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from fpipe import handlers, interop
from tests.support import run_jobs
from tests.support.combinations import ALL, few, one_in, thorough
from tests.support.jobs import differences

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
VARIABLES = os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The end of a run that nothing interrupted."""
    return run_jobs.train(*run_jobs.begin(tmp_path_factory.mktemp("whole"), handlers.Local()))


def names(folder):
    return [path.name for path in sorted(folder.iterdir()) if path.is_dir()]


def test_it_saves_in_between_and_at_the_end(tmp_path):
    run_jobs.train(*run_jobs.begin(tmp_path, handlers.Local()))
    assert names(tmp_path) == ["000001-step-5", "000002-step-10", "000003-step-12"]


def test_a_run_that_has_ended_does_nothing(tmp_path, whole):
    for _ in range(2):
        assert not differences(run_jobs.train(*run_jobs.begin(tmp_path, handlers.Local())), whole)
    assert len(names(tmp_path)) == 3


@one_in(3)
@pytest.mark.parametrize("at", [0, 6, 9])
def test_an_error_saves_nothing_and_the_next_start_goes_on_with_the_same_bits(tmp_path, whole, at):
    def fails(i):
        if i == at:
            raise ArithmeticError("bad row")

    before = signal.getsignal(signal.SIGTERM)
    run, *rest = run_jobs.begin(tmp_path, handlers.Local())
    with pytest.raises(ArithmeticError):
        run_jobs.train(run, *rest, fails)
    run.checkpoints.finish()  # as the interpreter does when it exits
    run, *rest = run_jobs.begin(tmp_path, handlers.Local())
    assert run.step == at // run_jobs.EVERY * run_jobs.EVERY
    assert not differences(run_jobs.train(run, *rest), whole)
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_saves_the_step_that_runs_and_leaves(tmp_path, whole):
    run, *rest = run_jobs.begin(tmp_path, handlers.Local())
    with pytest.raises(SystemExit) as left:
        run_jobs.train(run, *rest, lambda i: i == 7 and os.kill(os.getpid(), signal.SIGTERM))
    assert (left.value.code, run.step) == (143, 8)
    assert names(tmp_path) == ["000001-step-5", "000002-step-8"]
    assert not differences(run_jobs.train(*run_jobs.begin(tmp_path, handlers.Local())), whole)


def test_a_handler_of_sigterm_that_was_there_is_called_too(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(interop.resume.__module__ + ".LEFT", 7)
    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    try:
        run, *rest = run_jobs.begin(tmp_path, handlers.Local())
        with pytest.raises(SystemExit, match="7"):
            run_jobs.train(run, *rest, lambda i: i == 1 and os.kill(os.getpid(), signal.SIGTERM))
        assert calls == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)
        assert calls == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_of_sigterm_that_python_can_not_set_again_is_the_default_one(tmp_path):
    """As one that a library had set from C when Python started."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        with patch.object(signal, "getsignal", lambda number: None):
            run_jobs.train(*run_jobs.begin(tmp_path, handlers.Local()), total=1)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("at", [6, None])
def test_the_last_state_is_saved_where_the_save_before_it_has_failed(tmp_path, caplog, at):
    """At SIGTERM and at the end, where that one is the last: it is saved again."""
    run, *rest = run_jobs.begin(tmp_path, handlers.Local())
    save, calls = run.checkpoints._save, []

    def full(make):
        calls.append(make)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        return save(make)

    run.checkpoints._save = full
    if at is None:
        run_jobs.train(run, *rest, total=5)
    else:
        with pytest.raises(SystemExit, match="143"):
            run_jobs.train(run, *rest, lambda i: i == at and os.kill(os.getpid(), signal.SIGTERM))
    assert names(tmp_path) == [f"000001-step-{5 if at is None else 7}"]
    assert "the save in the background before step" in caplog.text
    assert "OSError: [Errno 28] No space left on device" in caplog.text


@one_in(3)
@pytest.mark.parametrize("guilty", [[0], [1], [0, 1]])
def test_all_ranks_save_the_same_step_whichever_gets_the_signal(pools, tmp_path, whole, guilty):
    assert pools(2).run(run_jobs.asked, str(tmp_path), guilty, 7) == [(143, 8)] * 2
    assert names(tmp_path) == ["000001-step-5", "000002-step-8"]
    ends = pools(2).run(run_jobs.go_on, str(tmp_path))
    assert not differences({**ends[0]["params"], **ends[1]["params"]}, whole["params"])


@one_in(3)
@pytest.mark.parametrize(
    ("shape", "guilty"), few([((2, 2), [2]), ((1, 2), [1]), ((2,), [1]), ((2, 2), [0, 3])], slice(3))
)
def test_all_processes_of_a_mesh_save_the_same_step(pools, tmp_path, shape, guilty):
    """Those that compute a stage together too: their handlers learn it one step later, and leave together."""
    size = prod(shape)
    assert pools(size).run(run_jobs.asked_of_a_mesh, str(tmp_path), shape, guilty, 7) == [(143, 9)] * size
    assert names(tmp_path) == ["000001-step-5", "000002-step-9"]


@thorough
def test_a_run_without_tensor_parallelism_leaves_though_the_one_before_had_some(pools, tmp_path):
    """Its ranks leave by themselves: the other pipeline has nothing to do with it, and goes on."""
    outcomes = pools(4).run(run_jobs.asked_after_a_mesh, str(tmp_path))
    assert outcomes == [(143, 5), (None, run_jobs.TOTAL)] * 2


def test_all_ranks_save_after_a_step_that_fails_and_is_left_out(pools, tmp_path):
    assert pools(2).run(run_jobs.asked_while_a_step_fails, str(tmp_path), 7) == [(143, 8)] * 2
    assert names(tmp_path) == ["000001-step-8"]


@pytest.mark.skipif(not ALL, reason="four starts under torchrun take a minute: FPIPE_TESTS=all runs them")
def test_a_job_that_loses_a_rank_again_and_again_ends_with_the_same_bits(tmp_path):
    """Under torchrun, which sends SIGTERM to the other rank: no save begins, and the next start loads the last one."""
    options = [
        "--max-restarts",
        "3",
        "--monitor-interval",
        "0.1",
        run_jobs.__file__,
        str(tmp_path / "killed"),
        "killed",
    ]
    done = subprocess.run([*TORCHRUN, *options], cwd=ROOT, env=VARIABLES, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    whole = run_jobs.train(*run_jobs.begin(tmp_path / "whole", handlers.Local()), total=20)
    for rank in range(2):
        end = torch.load(tmp_path / "killed" / f"end-{rank}.pt")
        assert end["step"] == 20
        assert not differences(end["params"][rank], whole["params"][rank])
    assert {int(name.rpartition("-")[2]) % run_jobs.EVERY for name in names(tmp_path / "killed")} == {0}


@pytest.mark.skipif(not ALL, reason="starts torchrun, and two processes that import torch: FPIPE_TESTS=all runs it")
def test_torchrun_that_is_asked_to_end_leaves_one_checkpoint_of_all_ranks(tmp_path):
    """It passes SIGTERM on to its processes, as where a scheduler takes the machine."""
    (folder := tmp_path / "asked").mkdir()
    script = [*TORCHRUN, "--max-restarts", "3", run_jobs.__file__, str(folder), "endless"]
    agent = subprocess.Popen(script, cwd=ROOT, env=VARIABLES, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while not (folder / "at-0").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        time.sleep(0.5)
        agent.terminate()
        assert agent.wait(60)
    finally:
        agent.kill()
    last = int((folder / "left-0").read_text())
    assert last == int((folder / "left-1").read_text())
    after = [step for name in names(folder) if (step := int(name.rpartition("-")[2])) % run_jobs.EVERY or step == last]
    assert after == [last]
    run, *rest = run_jobs.begin(folder, handlers.Local())
    assert run.step == last
    whole = run_jobs.train(*run_jobs.begin(tmp_path / "whole", handlers.Local()), total=last + 3)
    assert not differences(run_jobs.train(run, *rest, total=last + 3), whole)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: [*run.steps(-1)], "total must be a number of steps, at least 0, not -1"),
        (lambda run: [*run.steps(1, every=0)], "every must be a number of steps, at least 1, not 0"),
        (lambda run: [*run.steps(1, every=1.5)], r"every must be a number of steps, at least 1, not 1\.5"),
        (lambda run: [*run.steps(True)], "total must be a number of steps, at least 0, not True"),
        (lambda run: [*run.steps(1, every=True)], "every must be a number of steps, at least 1, not True"),
        (lambda run: interop.resume(run.checkpoints, step=1), "the run uses the name 'step' for itself"),
        (lambda run: interop.resume(run.checkpoints, steps=1), "the run uses the name 'steps' for itself"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, call, message):
    run, *_ = run_jobs.begin(tmp_path, handlers.Local())
    with pytest.raises(ValueError, match=message):
        call(run)


def test_a_section_that_it_lacks_is_named(tmp_path):
    run, *_ = run_jobs.begin(tmp_path, handlers.Local())
    with pytest.raises(AttributeError, match="no section 'average': pass it to resume, beside params, optimizer"):
        run.average  # noqa: B018
