"""The page for users of torch.distributed.pipelining has all names of its API, and names of fpipe that exist."""

import re

import fpipe
from fpipe import interop, schedules
from tests.docs.test_pages import ROOT

PAGE = (ROOT / "docs" / "coming_from_pipelining.md").read_text()


def test_it_names_all_of_torchs_names():
    import torch.distributed.pipelining as theirs  # takes seconds

    known = set(re.findall(r"\w+", " ".join(line.split("|")[1] for line in PAGE.splitlines() if line.startswith("|"))))
    more = {"get_stage_module", "step", "losses", "return_outputs", "eval", "TensorChunkSpec", "TORCH_LOGS"}
    more |= {"split_args_kwargs_into_chunks", "merge_chunks"}
    assert {*theirs.__all__, *more} - known == set()


def test_what_it_names_of_ours_is_there():
    ours = {"fpipe": fpipe, "interop": interop, "schedules": schedules}
    for module, name in re.findall(r"\b(fpipe|interop|schedules)\.(\w+)", PAGE):
        assert name == "Schedule" or hasattr(ours[module], name), f"{module}.{name}"
