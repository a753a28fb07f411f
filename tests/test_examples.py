"""The examples run, at a small size."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SMALL = ["--layers", "4", "--width", "32", "--context", "16", "--batch", "8", "--microbatches", "4", "--steps", "6"]


def run(name, *options, processes=0):
    start = [sys.executable]
    if processes:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*start, f"examples/{name}.py", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "can't be traced" not in done.stderr
    return done.stdout


def train_gpt(tmp_path, *options, processes=0):
    return run("train_gpt", *SMALL, "--logdir", str(tmp_path), *options, processes=processes)


def test_train_gpt_in_one_process_and_in_two(tmp_path):
    """The same losses, for the same stages."""
    found = []
    for processes in (0, 2):
        out = train_gpt(tmp_path, "--schedule", "interleaved-1f1b", "--ranks", "2", processes=processes)
        found.append(re.findall(r"loss (\S+)|(\S+) bits per byte before, (\S+) after 6 steps", out))
        assert "tensorboard --logdir" in out
    assert len(found[0]) == 7
    assert found[0] == found[1]
    assert {run.name for run in tmp_path.glob("*/measured/*")} == {"rank0", "rank1"}


def test_train_gpt_goes_on_from_a_checkpoint(tmp_path):
    """On another number of ranks, as if it had never stopped."""
    common = ["--schedule", "interleaved-1f1b", "--dropout", "0.2"]
    whole = re.findall(r"(\S+) after 6 steps|loss (\S+)", train_gpt(tmp_path, *common, "--ranks", "2"))
    common += ["--checkpoints", str(tmp_path / "saved")]
    first = train_gpt(tmp_path, *common, "--until", "3", processes=2)
    second = train_gpt(tmp_path, "--schedule", "gpipe", *common[2:], "--ranks", "4")
    assert "after 3 steps" in first
    assert re.findall(r"(\S+) after 6 steps|loss (\S+)", second) == whole[3:]


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
        (["--layers", "1"], "--layers 1 are too few for 2 stages"),
        (["--text", "LICENSE", "--context", "1000"], "too few for a context of 1000"),
    ],
)
def test_train_gpt_says_what_is_wrong_with_its_options(options, message):
    command = [sys.executable, "examples/train_gpt.py", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert message in done.stdout
    assert done.stderr == ""


def test_custom_schedule():
    out = run("custom_schedule")
    bubbles = dict(re.findall(r"^(\w+) +bubble +(\S+)%", out, re.MULTILINE))
    assert float(bubbles["patient"]) < float(bubbles["one_f_one_b"])
    assert "the bits of the reference" in out
    assert "rank 0 never yields BackwardWeight of stage 0, microbatch 7" in out


@pytest.mark.parametrize(("name", "options"), [("gpt2_tied", ["--steps", "21"]), ("unet", ["--steps", "11"])])
def test_one_process_and_two_learn_the_same(name, options):
    texts = [run(name, *options, processes=processes) for processes in (0, 2)]
    found = [[float(loss) for loss in re.findall(r"loss (\S+)", text)] for text in texts]
    assert found[0] == found[1]
    assert found[0][-1] < found[0][0]
    assert "apart" not in texts[1]  # embedding and head


def test_digits_are_read():
    out = run("digits", "--epochs", "3", processes=3)
    assert float(re.findall(r"accuracy (\S+)%", out)[-1]) > 95


@pytest.mark.parametrize(("model", "processes"), [("gpt2", 0), ("llama", 0), ("bert", 2), ("t5", 0)])
def test_huggingface(model, processes):
    out = run("huggingface", "--model", model, "--steps", "11", processes=processes)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", out)]
    assert losses[-1] < losses[0]


def test_pippy_readme():
    assert "the outputs were the network's" in run("pippy_readme", processes=3)


def test_torch_tutorial():
    out = run("torch_tutorial", "--small", processes=2)
    assert re.findall(r"^(.*): loss .*, outputs as on one device$", out, re.MULTILINE) == ["by hand", "by tracing"]
