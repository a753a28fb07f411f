"""The Pipeline tab and a run in one file: no server, no network, the same figures."""

import json
import re
from importlib.resources import files

import pytest
from typer.testing import CliRunner

from fpipe import Costs, Placement, Plan, schedules, simulate
from fpipe.cli import app
from fpipe.tensorboard.files.columns import Clock
from fpipe.tensorboard.files.reader import CaptureId, find
from fpipe.tensorboard.files.writer import write
from fpipe.tensorboard.server import standalone
from fpipe.tensorboard.server.summary import summary
from fpipe.timelines.comparison import Difference
from fpipe.timelines.what_if import what_if
from tests.support.captures import record
from tests.support.combinations import thorough
from tests.support.tab import BROWSED, PATIENCE

PLAN = Plan(Placement.v(3), 6)
SLOW = Costs([1e-3, 1e-3, 4e-3, 4e-3, 1e-3, 1e-3], 1e-3, 1e-3, communication=2e-4)
HOSTILE = "</script><script>window.hacked=1</script><!--<script>{title}\u2028" + "x" * 200


def measure(logdir, schedule="dualpipe-v", **header):
    timeline = simulate(schedules.dualpipe_v, PLAN, SLOW)
    record(logdir, {7: timeline}, schedule=schedule, **{"clock": Clock(0.0, 1e-5)} | header)
    write(logdir, simulate(schedules.dualpipe_v, PLAN, Costs(1e-3, 1e-3, 1e-3)), schedule=schedule, unit="s")
    return logdir


def saved(logdir, file):
    found = CliRunner().invoke(app, ["timeline", str(logdir), "--out", str(file)], prog_name="fpipe")
    assert found.exit_code == 0, found.output
    return found


class Opened:
    """A file in a browser without a network: what it asked for, and what the console said."""

    def __init__(self, chromium, file):
        self.page = chromium.new_page(viewport={"width": 1400, "height": 900})
        self.page.context.set_offline(True)
        self.page.set_default_timeout(PATIENCE)
        self.said, self.asked = [], []
        self.page.on("console", lambda message: self.said.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri())
        self.until("window.fpipe?.app.capture?.summary")

    def js(self, text, argument=None):
        return self.page.evaluate(text, argument)

    def until(self, condition):
        """Wait for a condition; the page's own policy forbids Playwright's way, which makes code of text."""
        for _ in range(PATIENCE // 50):
            if self.js(f"Boolean({condition})"):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never: {condition}; {self.said}")

    def close(self):
        assert self.said == []
        assert [url for url in self.asked if not url.startswith(("data:", "file:"))] == []
        self.page.close()


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """(folder of a run, its file, what the command said)."""
    logdir, file = measure(tmp_path_factory.mktemp("runs") / "mine"), tmp_path_factory.mktemp("files") / "mine.html"
    return logdir, file, saved(logdir, file)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """The file of a run whose texts are to do harm."""
    folder = tmp_path_factory.mktemp("hostile")
    saved(measure(folder / "a <b>", schedule=HOSTILE), folder / "h.html")
    return folder / "h.html"


@pytest.fixture(scope="module")
def opened(chromium, mine):
    """(page, folder of the run)."""
    logdir, file, _ = mine
    page = Opened(chromium, file)
    yield page, logdir
    page.close()


def mark(test):
    for each in BROWSED:
        test = each(test)
    return test


@mark
def test_the_figures_are_those_of_python(opened):
    page, logdir = opened
    capture = find(logdir).read(CaptureId("", "measured", 7))
    expected = json.loads(json.dumps(summary(capture)))
    assert page.js("window.fpipe.app.capture.summary") == expected
    page.until("window.fpipe.app.capture.whatIf && window.fpipe.app.answer")
    headline = page.page.inner_text("#headline")
    assert f"makespan {1e3 * capture.timeline.makespan:.4g} ms" in re.sub(r"\s+", " ", headline)
    for rank, columns in capture.columns.items():
        own = page.js("rank => Array.from(window.fpipe.app.capture.ranks.get(rank).start)", rank)
        assert own == pytest.approx(columns.starts)
    predicted = find(logdir).read(CaptureId("", "predicted", 0))
    difference = json.loads(json.dumps(Difference(capture.timeline, predicted.timeline).as_json()))
    assert page.js("window.fpipe.app.answer") == difference
    result = what_if(capture.timeline, schedule="dualpipe-v")
    rows = page.js("window.fpipe.app.capture.whatIf.what_if")
    assert [row["what"] for row in rows] == [row.what for row in result.rows]


@mark
def test_what_would_help_can_be_seen_beside(opened):
    page, logdir = opened
    page.until("window.fpipe.app.capture.whatIf")
    what = page.js("window.fpipe.app.capture.whatIf.what_if[0].what")
    page.js("what => window.fpipe.app.state.imagine(what)", what)
    page.until("window.fpipe.app.sheet.other?.entry.what && window.fpipe.app.sheet.other.summary")
    capture = find(logdir).read(CaptureId("", "measured", 7))
    timeline = what_if(capture.timeline, schedule="dualpipe-v").timeline_of(what)
    assert page.js("window.fpipe.app.sheet.other.summary.makespan") == pytest.approx(timeline.makespan)


@mark
def test_the_panel_of_steps_has_those_of_the_file(opened):
    page, logdir = opened
    page.page.click("#tab-steps")
    page.until("window.fpipe.app.steps.shown?.rows.length === 1")
    (row,) = page.js("window.fpipe.app.steps.shown.rows")
    capture = find(logdir).read(CaptureId("", "measured", 7))
    assert row["busy"] == {str(rank): pytest.approx(busy) for rank, busy in enumerate(capture.timeline.busy)}
    assert page.js("window.fpipe.app.steps.shown.reason") is None
    assert "one captured step" in page.page.inner_text("#panel-steps")


@mark
def test_every_panel_has_what_it_asks_for(opened):
    page, _ = opened
    tabs = page.js("[...document.querySelectorAll('#tabs button')].filter(tab => !tab.hidden).map(tab => tab.id)")
    assert len(tabs) > 4
    for tab in tabs:
        page.js("id => document.getElementById(id).click()", tab)
        page.page.wait_for_timeout(200)
    assert "is not in the file" not in page.js("document.body.innerText")


@mark
def test_it_is_drawn_in_colours(opened):
    page, _ = opened
    colours = page.js(
        """() => {
            window.fpipe.redraw();
            const canvas = document.querySelector("#canvas");
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            const found = new Set();
            for (let at = 0; at < data.length; at += 4) found.add(data.slice(at, at + 3).join());
            return found.size;
        }"""
    )
    assert colours > 50
    assert page.js("getComputedStyle(document.querySelector('#page')).display") == "flex"  # so the style is there


@mark
@thorough
def test_texts_of_a_run_stay_texts(chromium, hostile):
    page = Opened(chromium, hostile)
    assert page.js("window.hacked") is None
    assert page.js("window.fpipe.app.capture.entry.schedule") == HOSTILE[:200]
    page.close()


@mark
def test_files_that_a_server_makes_are_not_offered(opened):
    page, _ = opened
    shown = [page.page.is_visible(f"#export-{form}") for form in ("png", "svg", "csv", "json", "open")]
    assert shown == [True, False, False, False, False]


def test_nothing_of_a_run_is_html(hostile):
    text = hostile.read_text()
    assert "hacked" not in text.replace("&lt;script&gt;window.hacked", "")
    assert text.count("<script") == text.count("</script>") == 3


def test_the_command_says_the_size(mine):
    _, file, found = mine
    assert f"{file.stat().st_size / 1024:.4g} KiB, to be opened in a browser" in " ".join(found.stderr.split())
    assert file.stat().st_size < 2e6


def test_ranks_that_can_not_be_compared_are_shown_too(tmp_path):
    logdir = measure(tmp_path / "runs", clock=None)
    saved(logdir, tmp_path / "a.html")
    shown = find(logdir).read(CaptureId("", "measured", 7))
    routes = [route for route, *_ in standalone._answers([standalone.Shown("a/measured", shown)])]
    assert routes.count("rank") == 3
    assert "what_if" in routes  # which says why nothing is known


def test_no_more_is_imagined_than_there_is_room_for(mine, monkeypatch):
    shown = [standalone.Shown("a/measured", find(mine[0]).read(CaptureId("", "measured", 7)))]
    asked = [query.get("what") for route, query, _ in standalone._answers(shown) if route == "summary"]
    assert len(asked) > 2
    monkeypatch.setattr(standalone, "_MOST_IMAGINED", 5000)
    fewer = [query.get("what") for route, query, _ in standalone._answers(shown) if route == "summary"]
    assert fewer == asked[: len(fewer)]
    assert len(fewer) < len(asked)
    monkeypatch.setattr(standalone, "_MOST_SPANS", 10)
    assert "what_if" not in [route for route, *_ in standalone._answers(shown)]


def test_one_module_alone_asks_the_server():
    """Or a file without one would lack what another module asks for."""
    static = files("fpipe.tensorboard.server").joinpath("static")
    asks = re.compile(r"import\.meta|\bfetch\(|XMLHttpRequest|EventSource|\bimport\(\"")
    found = {
        each.name for each in static.iterdir() if each.name.endswith(".js") and asks.search(code(each.read_text()))
    }
    assert found == {"server.js"}


def code(text):
    """A module without its comments."""
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
