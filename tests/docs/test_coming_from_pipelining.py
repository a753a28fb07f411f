"""The page for those who come from torch.distributed.pipelining: its code runs, and it names all that they know."""

import re

import torch.distributed.pipelining as theirs

import fpipe
from fpipe import interop, schedules
from tests.docs.test_readme import ROOT, run, torchrun

PAGE = (ROOT / "docs" / "coming_from_pipelining.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
CODE = [text for kind, text in BLOCKS if kind == "python"]


def test_the_training_loop_runs(tmp_path):
    torchrun(tmp_path, f"{CODE[0]}\nassert loss.isfinite()\n")


def test_a_pipe_runs(capsys):
    shown = [text for kind, text in BLOCKS if kind == "text"][-1]
    assert run(capsys, CODE[1]) == shown


def test_what_stands_side_by_side_runs(capsys):
    run(capsys, CODE[2])


def test_it_names_all_of_torchs_names():
    known = set(re.findall(r"\w+", " ".join(line.split("|")[1] for line in PAGE.splitlines() if line.startswith("|"))))
    more = {"get_stage_module", "step", "losses", "return_outputs", "eval", "TensorChunkSpec", "TORCH_LOGS"}
    more |= {"split_args_kwargs_into_chunks", "merge_chunks"}
    assert {*theirs.__all__, *more} - known == set()


def test_what_it_names_of_ours_is_there():
    ours = {"fpipe": fpipe, "interop": interop, "schedules": schedules}
    for module, name in re.findall(r"\b(fpipe|interop|schedules)\.(\w+)", PAGE):
        assert name == "Schedule" or hasattr(ours[module], name), f"{module}.{name}"
