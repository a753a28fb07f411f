"""What the README shows runs, and prints what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fpipe import Placement, Plan
from fpipe.interop import from_csv
from fpipe.schedules import zb_v
from tests.support.forked import ROOT, script

BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def block(word):
    (found,) = [text for _, text in BLOCKS if word in text]
    return found


def torchrun(folder, text):
    path = folder / "script.py"
    path.write_text(text)
    return script(path, processes=2, cwd=folder)


def run(capsys, text):
    """What a block for one process prints, here: it needs no process of its own."""
    capsys.readouterr()
    exec(compile(text, "README.md", "exec"), {"__name__": "__main__"})
    return capsys.readouterr().out


CHECK = """
assert found["step"] == i + 1
assert all(torch.equal(params[s][n], found["params"][s][n]) for s in params for n in params[s])
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(what the training loop prints, its folder), of a run that also saves and loads, as is shown further below."""
    folder = tmp_path_factory.mktemp("trained")
    loop, end = block("for i in range(20)"), "dist.destroy_process_group()"
    assert loop.count(end) == 1
    return torchrun(folder, loop.replace(end, block("checkpoints.save(") + CHECK + end)), folder


def test_the_training_loop(trained):
    losses = dict(re.findall(r"rank (\d): loss (\d+\.\d{3})", trained[0]))
    assert losses.keys() == {"0", "1"}
    assert losses["0"] == losses["1"]
    assert float(losses["0"]) < 5.0


def test_what_the_training_loop_takes_and_gives_is_saved(trained):
    assert [path.name for path in (trained[1] / "checkpoints").iterdir()] == ["000001-step-20"]


def test_a_model_as_it_is(capsys):
    out = run(capsys, block("describe()"))
    assert [line.rstrip() for line in out.splitlines()] == block("stage  parameters").splitlines()


def test_a_schedule_of_ones_own(capsys):
    out = run(capsys, block("def eager_1f1b"))
    assert [line.rstrip() for line in out.splitlines()] == block("rank 0  F0").splitlines()


def test_a_step_as_it_ran(tmp_path):
    texts = torchrun(tmp_path, block("Recording(")), block("waiting for values")
    found, shown = ([re.sub(r"[\d.]+", "#", line).split() for line in text.splitlines()] for text in texts)
    assert found == shown


def test_a_run_that_is_recorded(tmp_path):
    torchrun(tmp_path, block("Recorder("))
    command = [Path(sys.executable).with_name("fpipe"), "timeline", "runs/mine"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "measured, step 1, zb_v" in done.stdout
    assert "critical path" in done.stdout
    assert done.stderr == ""


def test_what_policies_keep(capsys):
    out = run(capsys, block("policies.cheap, policies.dots"))
    assert [line.rstrip() for line in out.splitlines()] == block("everything_saveable  KiB").splitlines()


def fpipe(command):
    done = subprocess.run([Path(sys.executable).with_name("fpipe"), *command.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_comparison():
    out = fpipe(block("fpipe compare").strip().removeprefix("fpipe "))
    assert [line.rstrip() for line in out.splitlines() if line.strip()] == block("depen-").splitlines()


def test_the_file_for_torchtitan():
    (command,) = re.findall(r"^fpipe (export .*) > zb_v.csv$", block("fpipe export"), re.MULTILINE)
    schedule, plan = from_csv(fpipe(command))
    assert plan == Plan(Placement.v(4), 8)
    assert [list(schedule(rank, plan)) for rank in range(4)] == [list(zb_v(rank, plan)) for rank in range(4)]


def test_nothing_is_left_to_fill_in():
    assert re.findall(r"@\w+@", (ROOT / "README.md").read_text()) == []


def test_the_commands_are_the_makefiles():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make (\w+)", block("make demo"), re.MULTILINE)
    assert targets == ["demo", "test"]
    assert all(f"\n{target}: " in makefile for target in targets)
