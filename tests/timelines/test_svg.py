"""What notebooks show: well-formed, one rectangle for each compute effect, all text escaped, no script."""

import xml.etree.ElementTree as ET

import pytest
import torch

from fpipe import Costs, Pipeline, Placement, Plan, schedules, simulate
from fpipe.timelines import timeline as timelines
from fpipe.timelines.svg import svg

SVG = "{http://www.w3.org/2000/svg}"


def timeline(name="zb_v", ranks=3, microbatches=5, **costs):
    place = {"dualpipe": Placement.both_ways, "zb_v": Placement.v}.get(name, Placement.loop)
    return simulate(getattr(schedules, name), Plan(place(ranks), microbatches), Costs(**costs))


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches"), [("gpipe", 1, 1), ("one_f_one_b", 4, 8), ("zb_v", 3, 5), ("dualpipe", 4, 8)]
)
def test_a_rectangle_for_each_compute_effect(name, ranks, microbatches):
    predicted = timeline(name, ranks, microbatches, communication=0.5)
    root = ET.fromstring(svg(predicted))
    boxes = list(root.iter(f"{SVG}rect"))
    spans = [span for rank in range(ranks) for span in predicted.compute(rank)]
    assert [box.find(f"{SVG}title").text.split(",")[0] for box in boxes] == [str(s.effect).split(",")[0] for s in spans]
    width = float(root.get("width"))
    assert all(0 <= float(box.get("x")) <= float(box.get("x")) + float(box.get("width")) <= width for box in boxes)


def test_boxes_are_to_scale():
    boxes = list(ET.fromstring(svg(timeline("gpipe", 1, 2, forward=1, backward=3))).iter(f"{SVG}rect"))
    widths = [float(box.get("width")) + 1 for box in boxes]
    assert [width / widths[0] for width in widths] == pytest.approx([1, 1, 3, 3], rel=0.01)


def test_the_caption_accounts_for_all_time():
    caption = list(ET.fromstring(svg(timeline("gpipe", 2, 2))).iter(f"{SVG}text"))[-1].text
    assert caption == "makespan 9; compute 66.7%, warm-up 5.6%, dependency 16.7%, drain 11.1%"


def test_seconds_have_their_unit():
    assert "makespan 9 ms" in svg(timeline("gpipe", 2, 2, forward=1e-3, backward=2e-3), unit="s")


def test_text_is_escaped_and_there_is_no_script():
    drawing = svg(timeline(), title='<script>alert("1")</script> & co')
    root = ET.fromstring(drawing)
    assert next(root.iter(f"{SVG}text")).text == '<script>alert("1")</script> & co'
    assert not list(root.iter(f"{SVG}script"))
    assert "onload" not in drawing


def test_no_time_at_all():
    ET.fromstring(svg(timeline(forward=0, backward_input=0, backward_weight=0)))


def test_a_notebook_shows_a_timeline_unless_it_is_too_long(monkeypatch):
    assert ET.fromstring(timeline()._repr_svg_()).tag == f"{SVG}svg"
    monkeypatch.setattr(timelines, "_MAX_DRAWN", 3)
    assert timeline()._repr_svg_() is None


def test_a_notebook_shows_the_stages_of_a_plan():
    rows = ET.fromstring(Plan(Placement.v(2), 3)._repr_html_())
    assert ["".join(row.itertext()) for row in rows.iter("tr")] == ["stages", "rank 00, 3", "rank 11, 2"]


def test_a_notebook_shows_the_stages_of_a_pipeline():
    pipeline = Pipeline([lambda p, x: torch.tanh(x)] * 2, ties={(1, "<w>"): (0, "w")})
    shown = ET.fromstring(f"<div>{pipeline._repr_html_()}</div>")
    assert ["".join(row.itertext()) for row in shown.iter("tr")] == ["stagereads", "0batch", "1stage 0"]
    assert shown.find("div").text == "tied: <w> of stage 1 is w of stage 0"
