"""The examples run, at a small size."""

import importlib
import os
import re
import sys

import pytest
import torch
import typer

from examples import train_gpt as example
from tests.support.combinations import ALL, sample
from tests.support.curves import scalars
from tests.support.forked import ROOT, script


def run(name, *options, processes=0):
    return script(ROOT / "examples" / f"{name}.py", *options, processes=processes)


def called(capsys, name, /, **options):
    """What an example prints in this process: it needs none of its own."""
    capsys.readouterr()
    importlib.import_module(f"examples.{name}").main(**options)
    return capsys.readouterr().out


def test_train_gpt_in_two_processes_and_on_from_there_in_one(tmp_path, capsys):
    """On a text of one's own: the same losses as in one process that never stopped, and as on other ranks."""
    text = tmp_path / "text"
    text.write_text("to be or not to be, that is the question. " * 200)
    options = {"layers": 2, "width": 32, "context": 16, "batch": 8, "microbatches": 4, "steps": 6, "dropout": 0.2}
    options["text"] = text
    places = {"logdir": tmp_path / "runs", "checkpoints": tmp_path / "saved"}
    given = [f"--{name}={value}" for name, value in {**options, **places, "schedule": "1f1b", "until": 3}.items()]

    def told(out):
        assert "7,560 bytes to train on" in out
        assert "tensorboard --logdir" in out
        return re.findall(r"loss (\S+)", out), *re.findall(r"(\S+) bits per byte before, (\S+) after (\d) steps", out)

    def here(**more):
        example.main(**{**options, "logdir": tmp_path, **more})
        return told(capsys.readouterr().out)

    begun, (before, between, until) = told(run("train_gpt", *given, processes=2))
    assert {path.name for path in places["logdir"].glob("*/measured/*")} == {"rank0", "rank1"}
    ended, (again, after, steps) = here(**places, schedule="interleaved-1f1b", ranks=1)
    assert (until, again, steps) == ("3", between, "6")
    runs = places["logdir"].glob("*/measured/rank0")
    assert sorted(sorted(scalars(run, ".")["step/loss"]) for run in runs) == [[0, 1, 2], [3, 4, 5]]
    assert here(stages=2, ranks=2) == (begun + ended, (before, after, "6"))
    assert [len(begun), len(ended)] == [3, 3]

    with pytest.raises(typer.Exit):
        here(**places, ranks=2, seed=1, steps=9)
    said = " ".join(capsys.readouterr().out.split())
    assert "is of a run with --seed 0 --steps 6: go on with the same, or save to another folder" in said


@pytest.mark.skipif(not ALL, reason="eight processes for a minute: FPIPE_TESTS=all runs them")
def test_llama_in_three_dimensions_trains_as_one_process():
    out = run("llama_3d", "--check", processes=8)
    assert len(re.findall(r"^.*: \S+ relative, at most \S+$", out, re.MULTILINE)) == 4


def test_long_sequences_in_two_processes_and_in_one(capsys):
    """Slices with the reference's bits, and whole sequences within rounding; the same losses over gloo."""
    options = {"slices": 3, "context": 20, "width": 16, "steps": 2}
    given = [f"--{name}={value}" for name, value in options.items()]
    printed = run("long_sequences", *given, processes=2), called(capsys, "long_sequences", **options, ranks=2)
    for out in printed:
        bits = re.findall(r"the reference's bits on (\d+) of (\d+) leaves", out)
        assert bits
        assert all(equal == count for equal, count in bits)
        assert all(float(error) < 1e-4 for error in re.findall(r"at most (\S+) relative", out))
    one, other = (re.findall(r"loss (\S+)", out) for out in printed)
    assert one == other


def test_experts_in_two_processes_and_in_one(capsys):
    """Two replicas have the microbatches of one: the same loss, balance and drops."""
    options = {"layers": 1, "experts": 4, "width": 8, "batch": 8, "steps": 2}
    printed = run("experts", *(f"--{name}={value}" for name, value in options.items()), "--microbatches=2", processes=2)
    assert printed == called(capsys, "experts", **options, microbatches=4)
    assert re.findall(r"step (\d): loss .*, balance 1\.\d\d, .* % dropped\n", printed) == ["0", "1"]


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
def test_train_gpt_says_what_is_wrong_with_its_options(options, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *options])
    with pytest.raises(SystemExit, match="2"):
        typer.run(example.main)
    printed = capsys.readouterr()
    assert message in printed.out
    assert printed.err == ""


def test_train_gpt_asks_for_a_queue_for_every_stream_before_cuda_starts(monkeypatch):
    name, seen = "CUDA_DEVICE_MAX_CONNECTIONS", []
    monkeypatch.setattr(os, "environ", {"RANK": "0"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen.append(os.environ[name]) or 1 / 0)
    with pytest.raises(ZeroDivisionError), example.processes(None):
        pass
    monkeypatch.setitem(os.environ, name, "16")
    with pytest.raises(ZeroDivisionError), example.processes(None):
        pass
    assert seen == ["32", "16"]


def test_custom_schedule(capsys):
    out = called(capsys, "custom_schedule")
    bubbles = dict(re.findall(r"^(\w+) +bubble +(\S+)%", out, re.MULTILINE))
    assert float(bubbles["patient"]) < float(bubbles["one_f_one_b"])
    assert "the bits of the reference" in out
    assert "rank 0 never yields BackwardWeight of stage 0, microbatch 7" in out


@pytest.mark.parametrize(
    ("name", "options"), [("gpt2_tied", {"steps": 11}), ("unet", {"steps": 11, "depth": 2, "blocks": 1})]
)
def test_one_process_and_two_learn_the_same(capsys, name, options):
    given = [f"--{option}={value}" for option, value in options.items()]
    texts = [called(capsys, name, **options)]
    texts.append(run(name, *given, processes=2) if name in sample(("gpt2_tied", "unet"), ("unet",)) else texts[0])
    found = [[float(loss) for loss in re.findall(r"loss (\S+)", text)] for text in texts]
    assert found[0] == found[1]
    assert found[0][-1] < found[0][0]
    assert "apart" not in texts[1]  # embedding and head


@pytest.mark.parametrize("processes", sample([0, 2], [0]))
def test_a_split_vocabulary_learns_the_same(capsys, processes):
    """Ten rows do not divide by three ranks. Over gloo, two."""
    options = {"vocabulary": 10, "steps": 11}
    given = [f"--{name}={value}" for name, value in options.items()]
    whole = called(capsys, "gpt2_tied", **options)
    if processes:
        split = run("gpt2_tied", *given, "--split", processes=processes)
    else:
        split = called(capsys, "gpt2_tied", **options, ranks=3, split=True)
    expected, found = ([float(loss) for loss in re.findall(r"loss (\S+)", text)] for text in (whole, split))
    assert found == pytest.approx(expected, abs=2e-4)
    assert found[-1] < found[0]


@pytest.mark.parametrize("processes", sample([0, 2], [0]))
def test_attention_residuals(capsys, processes):
    """Four stages on two ranks, four microbatches: stages 2 and 3 add what they send to stages 0 and 1."""
    if processes:
        out = run("attention_residuals", "--chunks=2", "--width=8", "--steps=11", processes=processes)
    else:
        out = called(capsys, "attention_residuals", chunks=2, width=8, steps=11)
    assert "gradients sent in a step: 16 by consumer, 12 by rank" in out
    assert "the bits of one process: True" in out
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", out)]
    assert losses[-1] < losses[0]


def test_sharded_gpt_learns_the_same_on_every_mesh(tmp_path):
    """Two replicas of two ranks, then one of two from where they stopped; by default, not one replica all the time."""
    options = ["--layers=2", "--width=32", "--context=16", "--batch=16", "--chunks=1", "--ranks=2"]
    saved = [f"--checkpoints={tmp_path / 'saved'}"]
    begun = run("sharded_gpt", *options, *saved, "--microbatches=2", "--steps=2", processes=4)
    ended = run("sharded_gpt", *options, *saved, "--microbatches=4", "--steps=3", processes=2)
    told = [re.findall(r"step (\d): (\S+) bits", out) for out in (begun, ended)]
    assert [[step for step, _ in each] for each in told] == [["0", "1"], ["2"]]
    if ALL:
        alone = run("sharded_gpt", *options, "--microbatches=4", "--steps=3", processes=2)
        assert [told[0][0], *told[1]] == re.findall(r"step (\d): (\S+) bits", alone)


def test_digits_are_read():
    out = run("digits", "--epochs", "3", processes=3)
    assert float(re.findall(r"accuracy (\S+)%", out)[-1]) > 95


def test_a_training_loop_goes_on_where_it_stopped(tmp_path):
    """At most 45 lines of code. It stops after its first two thirds; by default it is shorter than it is."""
    program = (ROOT / "examples" / "training_loop.py").read_text()
    assert sum(bool(line.strip()) for line in program.split('"""')[2].splitlines()) <= 45
    steps, every = (60, 20) if ALL else (6, 2)
    outputs = []
    for until in (steps - every, steps):
        assert "STEPS, EVERY, BATCH, PARTS, FOLDER = 60, 20," in program
        (tmp_path / "program.py").write_text(program.replace(" = 60, 20,", f" = {until}, {every},"))
        outputs.append(script(tmp_path / "program.py", processes=2, cwd=tmp_path))
    lines = [re.fullmatch(r"step (\d+): loss \S+, accuracy (\S+)%", line) for line in "".join(outputs).splitlines()]
    assert [int(line[1]) for line in lines] == [every, 2 * every, 3 * every]
    assert len(outputs[1].splitlines()) == 1
    assert float(lines[-1][2]) > (85 if ALL else 10)
    curve = scalars(tmp_path / "runs" / "training_loop", "measured/rank0")["step/loss"]
    assert sorted(curve) == list(range(2 * steps))  # two gradients in a step


def test_generate_gpt2(capsys):
    """In two processes and in one: the same greedy tokens; and the same drawn ones."""
    small = {"layers": 2, "width": 32, "tokens": 6, "microbatches": 3}
    options = [f"--{name}={value}" for name, value in small.items()]
    greedy = called(capsys, "generate_gpt2", **small)
    assert greedy.count("->") == 6
    assert "model.generate gives the same" in greedy
    assert run("generate_gpt2", *options, "--temperature=0.9", processes=2) == called(
        capsys, "generate_gpt2", **small, temperature=0.9
    )


@pytest.mark.parametrize("model", sample(["gpt2", "llama", "bert", "t5"], ["bert"]))
def test_huggingface(capsys, model):
    if model == "t5":
        out = run("huggingface", "--model", model, "--layers", "2", "--steps", "11", processes=2)
    else:
        out = called(capsys, "huggingface", name=model, layers=2, steps=11)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", out)]
    assert losses[-1] < losses[0]


def test_pippy_readme():
    assert "the outputs were the network's" in run("pippy_readme", processes=3)


@pytest.mark.parametrize("processes", sample([0, 2], [0]))
def test_torch_tutorial(processes):
    out = run("torch_tutorial", "--small", processes=processes)
    assert re.findall(r"^(.*): loss .*, outputs as on one device$", out, re.MULTILINE) == ["by hand", "by tracing"]
