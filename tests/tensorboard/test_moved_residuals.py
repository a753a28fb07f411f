"""Residuals on the host, and those that are recomputed, in captures: their lanes, kinds and causes."""

import pytest

import fpipe
from fpipe import Costs, Placement, Plan, handlers, offload, simulate
from fpipe.effects import Fetch, Offload, Recompute
from fpipe.tensorboard import Recorder
from fpipe.tensorboard.files.reader import CaptureId, find
from fpipe.tensorboard.server.summary import summary
from tests.support import cases
from tests.support.captures import record

LANES = {Offload: "offload", Fetch: "fetch", Recompute: None}  # None: a rank's compute


@pytest.mark.parametrize(
    ("schedule", "kinds", "drawn"),
    [("one_f_one_b_offloaded", {Offload, Fetch}, ("offload", "fetch")), ("gpipe_recomputed", {Recompute}, ())],
)
def test_a_step_that_is_recorded_has_the_moves_that_ran_and_so_has_its_prediction(tmp_path, schedule, kinds, drawn):
    case, generator, plan = cases.make("attention", schedule, 2, 4)
    with Recorder(tmp_path, steps=[1]) as recorder:
        step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handlers.Local(), observe=recorder)
        for i in range(2):
            step(case.params, case.batch, case.target, rng=(0, i))
    programs = fpipe.lower(generator, plan)
    for kind in ("measured", "predicted"):
        capture = find(tmp_path).read(CaptureId("", kind, 1))
        timeline = capture.timeline
        assert timeline.drawn_lanes == drawn
        assert ("offload" in summary(capture)["causes"]) == bool(drawn)
        for rank, program in programs.items():
            assert tuple(capture.columns[rank].effects) == program.effects
            for move, lane in LANES.items():
                moves = [effect for effect in program if type(effect) is move]
                spans = timeline.beside(rank, lane) if lane else timeline.compute(rank)
                assert [span.effect for span in spans if type(span.effect) is move] == moves
                assert bool(moves) == (move in kinds)
            again = [span for span in timeline.compute(rank) if type(span.effect) is Recompute]
            shown = summary(capture)["ranks"][rank]["kinds"].get("Recompute", 0.0)
            assert shown == pytest.approx(sum(span.end - span.start for span in again))


def test_waits_for_copies_are_a_cause_that_the_page_shows(tmp_path):
    """GPipe in half of its memory: each rank waits for copies, which take as long as two backwards."""
    plan, costs = Plan(Placement.loop(2), 4), Costs(backward=2, residuals=10, offload=4, fetch=4)
    timeline = simulate("gpipe", plan, costs, offload=offload(20, costs, slower=10.0))
    record(tmp_path, {1: timeline}, schedule="gpipe")
    capture = find(tmp_path).read(CaptureId("", "measured", 1))
    shown = summary(capture)
    assert list(capture.timeline.spans) == list(timeline.spans)
    assert shown["causes"]["offload"] == "its residuals were under way to or from the host's memory"
    assert [rank["causes"]["offload"] for rank in shown["ranks"]] == [8, 16]
    for rank in range(2):
        assert sum(timeline.causes[rank].values()) == pytest.approx(timeline.idle[rank])
        for track in ("offload", "fetch"):
            spans = list(capture.timeline.beside(rank, track))
            assert spans
            assert all(span.end - span.start == 4 for span in spans)
