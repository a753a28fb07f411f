"""Wrong arguments of everything public: the error is fpipe's own, and names the argument."""

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

import fpipe
from fpipe import Output, Pipeline, Placement, Stage, handlers, interop
from fpipe.errors.arguments import checked
from tests.support import fuzzing, surface
from tests.support.combinations import ALL

SLOW = ("schedules.search", "schedules.pareto", "profile", "split")  # what is searched, measured or exported


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Some wrong arguments are names of files."""
    monkeypatch.chdir(tmp_path)


def test_the_arguments_are_right_as_they_are(tmp_path):
    for name, (function, arguments) in surface.calls(f"{tmp_path}/saved").items():
        if ALL or name not in SLOW:
            assert fuzzing.named(function, dict(arguments)) is not Ellipsis, name


def test_fewer_than_one_wrong_argument_in_a_hundred_gives_a_bare_error(tmp_path):
    """What is left of them comes from functions of the caller's that take other arguments."""
    cases = fuzzing.cases(f"{tmp_path}/saved")
    if not ALL:
        cases = sorted(random.Random(0).sample([case for case in cases if case[0] not in SLOW], 500))
    bare = []
    for _, group in itertools.groupby(cases, key=lambda case: case[0]):
        calls = surface.calls(f"{tmp_path}/saved")
        bare += filter(None, (fuzzing.bare_error(*case, calls) for case in group))
    assert len(bare) < len(cases) / 100, "\n".join(bare)


def two():
    pipeline = Pipeline([surface.scale, surface.scale], loss=lambda y, t: (y - t).sum())
    return pipeline, pipeline.plan(Placement.loop(2), 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: two()[0].plan(2, 4), "placement must be a Placement, such as .*, not 2"),
        (lambda: Pipeline([surface.scale, Stage(surface.scale, reads=[Output(5)])]), "stage 1 reads stage 5"),
        (lambda: two()[0].params_on({}, two()[1], rank=-1), "there is no rank -1: the plan has ranks 0 to 1"),
        (lambda: fpipe.profile(two()[0], {}, torch.ones(4), microbatches=0), "microbatches must be a whole number"),
        (
            lambda: interop.optimizer(torch.optim.SGD, lr="x"),
            "SGD can't be made with lr='x': .* It takes lr: .*= 0.001",
        ),
        (lambda: interop.split(torch.nn.ReLU(), at=[], example=(), loss=5), "loss must be .*, not 5"),
        (lambda: Placement([10**9, 0]), "rank 1 has no stage: ranks are numbered 0 to 1000000000"),
        (lambda: handlers.Local(["x"]), "devices must be devices of torch's"),
        (lambda: fpipe.lower(len, two()[1]), r"schedule must be a function of \(rank, plan\)"),
    ],
)
def test_a_slip_is_told_by_its_name(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@checked()
def numbered(count: int = 0, limit: float = 0.0, limits: Sequence[float] = ()):
    return count, limit, limits


@pytest.mark.parametrize("value", [True, np.True_, np.array(True), torch.tensor(True)], ids=lambda x: type(x).__name__)
def test_a_bool_is_no_number(value):
    """A flag in the place of a number is a slip, whichever library it comes from."""
    for name, argument in (("count", value), ("limit", value), ("limits", [value])):
        with pytest.raises(TypeError, match=f"numbered: {name} must be "):
            numbered(**{name: argument})


@pytest.mark.parametrize("value", [2, np.int64(2), np.array(2), torch.tensor(2)], ids=lambda x: type(x).__name__)
def test_a_number_of_any_library_is_one(value):
    assert numbered(value, value, [value]) == (2, 2, [2])
