"""A generation in the Pipeline tab: its capture has prefills and decodes, and the prediction takes their times."""

from collections import defaultdict
from dataclasses import replace
from statistics import median

import pytest
import torch

import fpipe
from fpipe import handlers
from fpipe.effects import Decode, Prefill
from fpipe.tensorboard import Recorder
from fpipe.tensorboard.files.reader import CaptureId, find
from fpipe.tensorboard.server.summary import summary
from tests.support.curves import scalars
from tests.support.generate_jobs import PROMPTS, cut, language_model

NEW = 4


def test_a_capture_has_prefills_and_decodes_and_the_prediction_their_times(tmp_path):
    pipeline, params = language_model(2)
    plan = pipeline.plan(cut(pipeline, 2), 4)
    options = {"handler": handlers.Local(), "max_new_tokens": NEW, "eos_token_id": ()}
    with Recorder(tmp_path, steps=[1]) as recorder:
        run = fpipe.generator(pipeline, plan, observe=recorder, **options)
        tokens = [run(params, PROMPTS) for _ in range(2)]
    expected = fpipe.generate(pipeline, params, PROMPTS, plan, **options)
    assert all(torch.equal(each, expected) for each in tokens)

    program = replace(plan, tokens=NEW)
    programs = fpipe.lower(fpipe.autoregressive, program)
    measured, predicted = (find(tmp_path).read(CaptureId("", kind, 1)) for kind in ("measured", "predicted"))
    for capture in (measured, predicted):
        assert capture.timeline.plan == program
        for rank, (effects, found) in enumerate(zip(programs.values(), summary(capture)["ranks"], strict=True)):
            pieces = [effect for effect in effects if isinstance(effect, Prefill | Decode)]
            assert [span.effect for span in capture.timeline.compute(rank)] == pieces
            assert found["kinds"].keys() == {"Prefill", "Decode"}
            assert sum(found["kinds"].values()) == pytest.approx(capture.timeline.busy[rank])
    taken, expected = seconds(measured.timeline), seconds(predicted.timeline)
    assert taken.keys() == expected.keys() == {(kind, s) for kind in (Prefill, Decode) for s in range(plan.stages)}
    for piece, each in expected.items():
        assert each == pytest.approx([median(taken[piece])] * len(taken[piece]))
    assert {"time/Prefill_seconds", "time/Decode_seconds"} <= scalars(tmp_path, "measured/rank0").keys()


def seconds(timeline):
    """The seconds of all pieces, by kind and stage."""
    times = defaultdict(list)
    for rank in range(timeline.plan.ranks):
        for span in timeline.compute(rank):
            times[type(span.effect), span.effect.stage].append(span.end - span.start)
    return times
