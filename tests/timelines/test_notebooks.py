"""What notebooks show of a timeline, a plan and a pipeline: well-formed, with all text escaped."""

import sys
import xml.etree.ElementTree as ET

import torch

from fpipe import Pipeline, Placement, Plan, schedules, simulate
from fpipe.timelines import timeline as timelines

SVG = "{http://www.w3.org/2000/svg}"


def test_a_notebook_shows_the_figure_of_a_timeline():
    shown = simulate(schedules.zb_v, Plan(Placement.v(3), 5))._repr_svg_()
    root = ET.fromstring(shown)
    assert root.tag == f"{SVG}svg"
    assert "3 ranks, 6 stages, 5 microbatches" in {text.text for text in root.iter(f"{SVG}text")}
    assert not list(root.iter(f"{SVG}script"))


def test_a_notebook_shows_text_for_a_large_timeline_or_without_matplotlib(monkeypatch):
    timeline = simulate(schedules.gpipe, Plan(Placement.loop(2), 2))
    assert repr(timeline) == "<timeline of 2 ranks, 2 stages, 2 microbatches: makespan 9>"
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "matplotlib", None)
        assert timeline._repr_svg_() is None
    monkeypatch.setattr(timelines, "_MAX_DRAWN", 3)
    assert timeline._repr_svg_() is None


def test_a_notebook_shows_the_stages_of_a_plan():
    rows = ET.fromstring(Plan(Placement.v(2), 3)._repr_html_())
    assert ["".join(row.itertext()) for row in rows.iter("tr")] == ["stages", "rank 00, 3", "rank 11, 2"]


def test_a_notebook_shows_the_stages_of_a_pipeline():
    pipeline = Pipeline([lambda p, x: torch.tanh(x)] * 2, ties={(1, "<w>"): (0, "w")})
    shown = ET.fromstring(f"<div>{pipeline._repr_html_()}</div>")
    assert ["".join(row.itertext()) for row in shown.iter("tr")] == ["stagereads", "0batch", "1stage 0"]
    assert shown.find("div").text == "tied: <w> of stage 1 is w of stage 0"
