"""The examples run, at a small size."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SMALL = ["--layers", "4", "--width", "32", "--context", "16", "--batch", "8", "--microbatches", "4", "--steps", "6"]


def train_gpt(tmp_path, *options, processes=0):
    start = [sys.executable]
    if processes:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*start, "examples/train_gpt.py", *SMALL, "--logdir", str(tmp_path), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "can't be traced" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b"])
def test_train_gpt_in_one_process_and_in_two(tmp_path, schedule):
    """The same losses, for the same stages."""
    found = []
    for processes in (0, 2):
        out = train_gpt(tmp_path, "--schedule", schedule, "--ranks", "2", processes=processes)
        found.append(re.findall(r"loss (\S+)|(\S+) bits per byte before, (\S+) after 6 steps", out))
        assert "tensorboard --logdir" in out
    assert len(found[0]) == 7
    assert found[0] == found[1]
    assert {run.name for run in tmp_path.glob("*/measured/*")} == {"rank0", "rank1"}


def test_train_gpt_on_a_text_of_ones_own(tmp_path):
    text = tmp_path / "text"
    text.write_text("to be or not to be, that is the question. " * 200)
    assert "7,560 bytes to train on" in train_gpt(tmp_path, "--text", str(text))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--schedule", "1f2b"], "no schedule '1f2b': take one of gpipe, 1f1b, interleaved-1f1b"),
        (["--width", "100"], "--width 100 is no multiple of 32"),
        (["--batch", "4"], "--batch 4 can't be split into 8 microbatches"),
        (["--text", "LICENSE", "--context", "1000"], "too few for a context of 1000"),
    ],
)
def test_train_gpt_says_what_is_wrong_with_its_options(options, message):
    command = [sys.executable, "examples/train_gpt.py", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert message in done.stdout
    assert done.stderr == ""
