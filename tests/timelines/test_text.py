"""Lanes to scale: columns add up, whatever is rounded; labels fit; the figure's marks are where spans are."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe import Costs, Placement, Plan, schedules, simulate
from fpipe._format import lighter
from fpipe.effects import Backward, Forward, Overlap
from fpipe.tables import TABLE
from fpipe.timelines.figure import figure
from fpipe.timelines.labels import drawn_rows, text
from fpipe.timelines.spans import CAUSES
from fpipe.timelines.text import lane


def written(timeline, rank, scale, letters=True):
    cells = lane(timeline, rank, scale, letters=letters)
    return "".join(cell.label.ljust(cell.columns, "-" if cell.effect else ".") for cell in cells)


def test_a_lane_to_scale():
    timeline = simulate(schedules.gpipe, Plan(Placement.loop(2), 2), Costs(forward=1, backward=2, communication=0.5))
    assert [written(timeline, rank, 4) for rank in (0, 1)] == [
        "F0--F1--................B0------B1------",
        "......F0--F1--B0------B1------..........",
    ]


def test_labels_shrink_to_what_fits():
    plan = Plan(Placement.loop(1, chunks=2), 12)
    timeline = simulate(schedules.gpipe, plan)
    assert [written(timeline, 0, scale)[: 3 * scale] for scale in (1, 2, 3)] == ["FFF", "F0F1F2", "F0aF1aF2a"]
    assert [written(timeline, 0, scale)[11 * scale : 12 * scale] for scale in (1, 2, 3, 4)] == [
        "F",
        "F-",
        "F11",
        "F11a",
    ]
    assert [written(timeline, 0, scale, letters=False)[11 * scale : 12 * scale] for scale in (1, 2, 3)] == [
        "-",
        "11",
        "11a",
    ]


@pytest.mark.parametrize("communication", [0.0, 0.1, 0.3, 0.5])
def test_what_takes_a_column_is_seen(communication):
    """At halves too, where floats may fall on either side."""
    timeline = simulate(schedules.one_f_one_b, Plan(Placement.loop(4), 64), Costs(communication=communication))
    for rank in range(4):
        assert sum(cell.effect is not None for cell in lane(timeline, rank, 1.0)) == 2 * 64


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.floats(0.01, 10),
    st.floats(0.01, 10),
    st.floats(0, 3),
    st.floats(0.05, 20),
)
def test_lanes_are_as_long_as_the_makespan(ranks, microbatches, forward, backward, communication, scale):
    costs = Costs(forward=forward, backward=backward, communication=communication)
    timeline = simulate(schedules.one_f_one_b, Plan(Placement.loop(ranks), microbatches), costs)
    for rank in range(ranks):
        cells = list(lane(timeline, rank, scale))
        whole = timeline.makespan * scale
        assert sum(cell.columns for cell in cells) == int(whole + 0.5 + 1e-9 * max(1.0, whole))  # halves go up
        assert all(cell.columns > 0 and len(cell.label) <= cell.columns for cell in cells)
        assert sum(c.columns for c in cells if c.effect) == pytest.approx(
            timeline.busy[rank] * scale, abs=2 * microbatches
        )


def test_compute_effects_differ_in_letter_and_colour():
    rows = drawn_rows(TABLE).values()
    assert len({row.colour for row in rows}) == len({row.letter for row in rows}) == len(rows) == 9


def luminance(colour):
    """Relative luminance (WCAG 2.1)."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("look", drawn_rows(TABLE).values(), ids=lambda look: look.label)
@pytest.mark.parametrize("share", [0, 0.4])
def test_black_text_reads_on_every_colour(look, share):
    assert (luminance(lighter(look.colour, share)) + 0.05) / 0.05 >= 4.5  # WCAG 2.1, AA


def test_text_of_an_overlap():
    plan = Plan(Placement.loop(2), 8)
    pair = Overlap(Forward(0, 7), Backward(0, 5))
    assert [text(pair, 0, plan, letter=letter) for letter in (True, False)] == ["F7&B5", "7&5"]


def test_a_figure_has_a_box_for_every_effect_and_a_label_where_it_fits():
    figure = pytest.importorskip("matplotlib.figure") and pytest.importorskip("fpipe.timelines.figure")
    timeline = simulate(schedules.one_f_one_b, Plan(Placement.loop(4), 8), Costs(communication=0.5))
    compute, idle, memory = figure.figure(timeline, "a title").axes
    boxes = sum(len(collection.get_paths()) for collection in compute.collections)
    assert boxes == 4 * 8 * 2
    assert sorted(label.get_text() for label in compute.texts) == sorted(str(m) for m in range(8) for _ in range(8))
    assert [axis.get_ylabel() for axis in (compute, idle, memory)] == ["rank", "idle ranks", "in flight"]
    assert memory.texts[0].get_text() == "peak 4 microbatches, on rank 0"
    assert memory.get_xlim() == (0, timeline.makespan)


def test_a_figure_has_no_edges_that_hide_its_boxes():
    figure = pytest.importorskip("fpipe.timelines.figure")
    wide, narrow = (simulate(schedules.gpipe, Plan(Placement.loop(2), m)) for m in (4, 600))
    widths = [{w for c in figure.figure(t).axes[0].collections for w in c.get_linewidths()} for t in (wide, narrow)]
    assert widths == [{0.5}, {0.0}]


def test_a_figure_labels_pairs():
    figure = pytest.importorskip("fpipe.timelines.figure")
    timeline = simulate(schedules.dualpipe, Plan(Placement.both_ways(8), 20), Costs(overlap=1.6))
    pairs = sum(isinstance(span.effect, Overlap) for rank in range(8) for span in timeline.compute(rank))
    labels = [label.get_text() for label in figure.figure(timeline).axes[0].texts]
    assert sum("&" in label for label in labels) == pairs > 50


def test_a_figure_counts_microbatches():
    figure = pytest.importorskip("fpipe.timelines.figure")
    *_, memory = figure.figure(simulate(schedules.gpipe, Plan(Placement.loop(2), 1))).axes
    assert memory.texts[0].get_text() == "peak 1 microbatch, on rank 0"
    assert all(float(tick).is_integer() for tick in memory.get_yticks())


def test_a_figure_with_every_hatch_is_small(tmp_path):
    figure = pytest.importorskip("fpipe.timelines.figure")
    plan = Plan(Placement.loop(2), 3, replicas=2)
    costs = Costs(forward=[1, 2], communication=0.1, gather=0.1, scatter=0.1)
    timeline = simulate(schedules.one_f_one_b, plan, costs, resident=1)
    assert {gap.cause for rank in (0, 1) for gap in timeline.gaps(rank)} == set(figure.IDLE) - {"host", "offload"}
    assert list(figure.IDLE) == list(CAUSES)
    figure.save(timeline, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size < 60_000


def test_a_figure_tells_memory_in_bytes_where_sizes_are_given():
    figure = pytest.importorskip("fpipe.timelines.figure")
    timeline = simulate(schedules.one_f_one_b, Plan(Placement.loop(4), 8), Costs(residuals=2**31))
    *_, memory = figure.figure(timeline).axes
    assert memory.texts[0].get_text() == "peak 8 GiB, on rank 0"
    assert memory.get_ylabel() == "memory"


def test_gathers_and_scatters_have_lanes_where_they_take_time():
    plan = Plan(Placement.loop(1, chunks=2), 2, replicas=2)
    timeline = simulate(schedules.looped_bfs, plan, Costs(backward=2, gather=2, scatter=3), resident=1)
    assert timeline.drawn_lanes == ("gather", "scatter")
    drawn = [
        "".join(
            cell.label.ljust(cell.columns, "-" if cell.effect else " ") for cell in lane(timeline, 0, 2, track=track)
        )
        for track in ("compute", *timeline.drawn_lanes)
    ]
    assert drawn == [
        "    F0F1    F0F1B0b-B1b-    B0a-B1a-      ",
        "Ga--    Gb--            Ga--              ",
        "                        Cb----      Ca----",
    ]
    assert simulate(schedules.looped_bfs, plan, resident=1).drawn_lanes == ()
    boxes = [
        [round(x, 6) for x in (path.vertices[:, 0].min(), path.vertices[:, 0].max())]
        for each in figure(timeline).axes[0].collections
        for path in each.get_paths()
    ]
    assert len(boxes) == 8 + 3 + 2
    assert [12.0, 14.0] in boxes  # the last gather
