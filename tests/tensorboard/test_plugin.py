"""The Pipeline tab's server, in TensorBoard itself, with both of its loaders."""

import gzip
import json
import shutil
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from urllib.parse import urlencode

import pytest
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR, Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_FLOAT, DT_STRING
from werkzeug.exceptions import NotFound

from fpipe import Costs, Placement, Plan, schedules, simulate
from fpipe.tensorboard.files import writer as writing
from fpipe.tensorboard.files.captures import PLUGIN, assemble, columns_of, tag
from fpipe.tensorboard.files.columns import Header, decode, encode
from fpipe.tensorboard.files.reader import CaptureId, find
from fpipe.tensorboard.files.writer import Writer, write
from fpipe.tensorboard.server.exports import save
from fpipe.tensorboard.server.plugin import MAX_IMAGINED, PipelinePlugin, _Cached
from fpipe.tensorboard.server.summary import summary
from fpipe.timelines.comparison import Difference
from fpipe.timelines.what_if import WhatIf, what_if
from tests.support.board import Board
from tests.support.captures import record
from tests.support.combinations import one_in
from tests.support.tab import large

PLAN = Plan(Placement.v(2), 4)
TIMELINES = [simulate(schedules.zb_v, PLAN, Costs(forward=1 + n / 10, communication=0.1)) for n in range(3)]
HOSTILE = "<img src=x onerror=alert(1)>'\"&\n‮../../etc/passwd" + "x" * 5000
RUNS = ("run <b>bold</b> & 'more'", "..", "$(touch x)")


def measured(timeline, step, rank, **said):
    return replace(Header("measured", step, rank, "zb_v", timeline.plan), **said), columns_of(timeline, rank)


def written(logdir, steps, timeline=TIMELINES[0], **said):
    record(logdir, dict.fromkeys(steps, timeline), schedule="zb_v", **said)


def forge(logdir):
    """Captures that no recorder wrote: outlines and tensors of any kind."""
    texts = {1: b'{"ranks": Infinity}', 2: b"[" * 100_000, 3: b"null", 4: b'{"schedule": 1}'}
    text = TensorProto(dtype=DT_STRING, string_val=[b"no gzip"], tensor_shape=TensorShapeProto())
    number = TensorProto(dtype=DT_FLOAT, float_val=[1.0], tensor_shape=TensorShapeProto())
    several = TensorProto(dtype=DT_STRING, string_val=[b"a", b"b"], tensor_shape=TensorShapeProto(dim=[{"size": 2}]))
    with Writer(logdir, "measured", 0) as writer:
        for step, tensor in ((1, text), (2, text), (3, number), (4, several)):
            data = SummaryMetadata.PluginData(plugin_name=PLUGIN, content=texts[step])
            metadata = SummaryMetadata(plugin_data=data, data_class=DATA_CLASS_TENSOR)
            writer._add(Summary.Value(tag=tag(step), tensor=tensor, metadata=metadata), step, None)


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A log directory of all cases at once, for a server takes seconds to start."""
    logdir = tmp_path_factory.mktemp("runs")
    written(logdir / "many", range(120))
    write(logdir / "many", TIMELINES[1], schedule="zb_v", unit="s")
    write(logdir / "hostile", TIMELINES[0], schedule=HOSTILE)
    for number, name in enumerate(RUNS):
        folder = logdir / (f"up{number}" if name == ".." else name)
        written(folder, [number])
    forge(logdir / "forged")
    slow = Costs(forward=1e9, backward_input=1e9, backward_weight=1e9)
    written(logdir / "ages", [0], simulate(schedules.zb_v, PLAN, slow))
    large(logdir / "long", 60_000)
    with Writer(logdir / "scalars", "measured", 0) as writer:
        writer.scalar("step/loss", 1.0, 0)
    with Writer(logdir / "lonely", "measured", 1) as writer:
        writer.timeline(*measured(TIMELINES[0], 3, 1))
    written(logdir / "cut", [1, 2])
    (file,) = (logdir / "cut" / "measured" / "rank1").iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "PART_BYTES", 500)
        written(logdir / "parts", [5], TIMELINES[2])
    return logdir


@pytest.fixture(scope="module", params=["rust", "python"])
def board(request, logged, tmp_path_factory):
    """(server, log directory of its own, into which tests write)."""
    logdir = tmp_path_factory.mktemp("runs")
    shutil.copytree(logged, logdir, dirs_exist_ok=True)
    with Board(logdir, fast=request.param == "rust") as board:
        board.until(lambda captures: len(captures) == 135)
        yield board, logdir


@one_in(2)
def test_no_capture_is_dropped(board):
    """Of a tag with many steps TensorBoard would keep a few, at random."""
    captures = board[0].json("index")["captures"]
    many = [c for c in captures if c["run"] == "many/measured"]
    assert [c["step"] for c in many] == list(range(120))
    assert many[7] | {"wall": 0} == {
        "run": "many/measured",
        "experiment": "many",
        "kind": "measured",
        "step": 7,
        "ranks": [0, 1],
        "expected": 2,
        "schedule": "zb_v",
        "unit": "s",
        "stages": 4,
        "microbatches": 4,
        "wall": 0,
    }


def test_a_run_without_captures_is_not_listed(board):
    index = board[0].json("index")
    assert not any(c["experiment"] == "scalars" for c in index["captures"])
    assert not any("scalars" in notice for notice in index["notices"])


def test_ranks_come_as_they_were_written(board):
    for step in (0, 60, 119):
        for rank in range(2):
            status, kind, body = board[0].get("rank", run="many/measured", step=step, rank=rank)
            assert (status, kind) == (200, "application/octet-stream")
            assert body[:4] == b"FPT1"  # unpacked on the way, by the client's wish
            header, found = _decoded(body)
            assert (header.step, header.rank) == (step, rank)
            assert found.effects == columns_of(TIMELINES[0], rank).effects


def _decoded(body):
    return decode(gzip.compress(body, 1))


def test_a_summary_is_pythons(board):
    found = board[0].json("summary", run="many/predicted", step=0)
    blobs = {rank: board[0].get("rank", run="many/predicted", step=0, rank=rank)[2] for rank in range(2)}
    assert found == json.loads(json.dumps(summary(assemble({r: gzip.compress(b, 1) for r, b in blobs.items()}))))
    assert found["makespan"] == TIMELINES[1].makespan


def test_steps_have_the_figures_of_their_summaries(board):
    """Also of a rank that was cut short; of a step that is not there, the reason."""
    found = board[0].json("steps", run="many/measured", steps="0,7,500")
    whole = board[0].json("summary", run="many/measured", step=7)
    assert [row["step"] for row in found] == [0, 7, 500]
    for name in ("makespan", "cost", "bubble_rate"):
        assert found[1][name] == whole[name]
    assert found[1]["busy"] == {str(rank["rank"]): rank["busy"] for rank in whole["ranks"]}
    assert found[2] == {"step": 500, "error": "there is no capture of step 500 in this run"}
    for steps in ("", "1,x", "1,,2", ",".join(map(str, range(65)))):
        status, _, body = board[0].get("steps", run="many/measured", steps=steps)
        assert (status, body.startswith(b"steps= is a list")) == (400, True), steps


def test_two_captures_are_compared(board):
    found = board[0].json("compare", run="many/measured", step=3, other="many/predicted", other_step=0)
    assert found == json.loads(json.dumps(Difference(TIMELINES[0], TIMELINES[1]).as_json()))
    assert found["makespan"] == [TIMELINES[0].makespan, TIMELINES[1].makespan]


@one_in(2)
def test_what_would_help_is_pythons_and_comes_as_a_capture(board):
    server, _ = board
    query = {"run": "many/predicted", "step": 0}
    result, found = what_if(TIMELINES[1], schedule="zb_v"), server.json("what_if", **query)
    said = json.loads(json.dumps(result.as_json()))
    assert [row["what"] for row in found["what_if"]] == [row.what for row in result.rows]
    assert found["what_if"] == [
        {**row, "seconds": pytest.approx(row["seconds"])} | {"makespan": pytest.approx(row["makespan"])}
        for row in said["what_if"]
    ]
    what = result.rows[0].what
    imagined = result.timeline_of(what)
    header, columns = _decoded(server.get("rank", what=what, rank=1, **query)[2])
    assert (header.kind, header.rank, header.plan) == ("what-if", 1, imagined.plan)
    assert list(columns.ends) == pytest.approx([imagined.spans.ends[at] for at in imagined.spans.of(1)])
    assert server.json("summary", what=what, **query)["makespan"] == pytest.approx(imagined.makespan)
    beside = {"other": "many/predicted", "other_step": 0, "other_what": what}
    assert server.json("compare", **query, **beside)["makespan"] == pytest.approx(
        [TIMELINES[1].makespan, imagined.makespan]
    )


def test_names_are_data(board):
    server, logdir = board
    captures = server.json("index")["captures"]
    assert {c["schedule"] for c in captures if c["experiment"] == "hostile"} == {HOSTILE[:200]}
    header, _ = _decoded(server.get("rank", run="hostile/predicted", step=0, rank=0)[2])
    assert header.schedule == HOSTILE
    assert {RUNS[0], RUNS[2]} <= {c["experiment"] for c in captures}
    assert server.json("summary", run=f"{RUNS[0]}/measured", step=0)["notices"] == []
    assert not list(logdir.rglob("x"))


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_what_nobody_recorded_is_refused_and_hides_nothing_else(board, step):
    server, _ = board
    assert [c["step"] for c in server.json("index")["captures"] if c["run"] == "forged/measured"] == [1, 2, 3, 4]
    for route, query in (("summary", {}), ("rank", {"rank": 0})):
        status, kind, body = server.get(route, run="forged/measured", step=step, **query)
        assert (status, kind) == (422, "text/plain")
        assert body.startswith(b"rank 0 is left out: step %d in forged/measured/rank0 is " % step)


def test_runs_in_other_units_are_not_compared(board):
    query = {"run": "many/measured", "step": 0, "other": "hostile/predicted", "other_step": 0}
    status, _, body = board[0].get("compare", **query)
    assert status == 422
    assert b"without a unit" in body


@pytest.mark.parametrize(
    ("route", "query", "status", "text"),
    [
        ("rank", {"run": "many/measured", "step": 500, "rank": 0}, 404, "no capture of step 500 of rank 0"),
        ("rank", {"run": "many/measured", "step": 0, "rank": 9}, 404, "no capture of step 0 of rank 9"),
        ("rank", {"run": "../../etc/passwd", "step": 0, "rank": 0}, 404, "no capture"),
        ("rank", {"run": "many/measured", "step": 0}, 400, "lacks rank="),
        ("rank", {"run": "many/measured", "step": "../1", "rank": 0}, 400, "step= is a whole number"),
        ("rank", {"run": "many/measured", "step": "٣", "rank": 0}, 400, "step= is a whole number"),
        ("summary", {"run": "none", "step": 0}, 404, "no capture of step 0"),
        ("summary", {}, 400, "lacks run="),
        ("compare", {"run": "many/measured", "step": 0, "other": "none", "other_step": 0}, 404, "no capture"),
        ("export", {"run": "many/measured", "step": 0, "format": "exe"}, 400, "format= is one of"),
        ("export", {"run": "none", "step": 0, "format": "json"}, 404, "no capture"),
        ("what_if", {"run": "none", "step": 0}, 404, "no capture"),
        ("rank", {"run": "many/predicted", "step": 0, "rank": 0, "what": "rank 99"}, 404, "not among what would help"),
        ("rank", {"run": "many/predicted", "step": 0, "rank": 7, "what": "edge 0 -> 1"}, 404, "rank 7 is not in this"),
        ("../../../etc/passwd", {}, 404, ""),
        ("plugin.py", {}, 404, ""),
    ],
)
def test_what_is_not_there_is_said_clearly(board, route, query, status, text):
    found, _, body = board[0].get(route, **query)
    assert (found, text in body.decode()) == (status, True), body


def test_a_rank_that_is_missing_and_one_cut_short_are_told(board):
    server, _ = board
    assert server.json("summary", run="lonely/measured", step=3)["notices"] == [
        "rank 0 of 2 missing: no file of theirs has this step whole"
    ]
    cut = {c["step"]: c["ranks"] for c in server.json("index")["captures"] if c["run"] == "cut/measured"}
    assert cut == {1: [0, 1], 2: [0]}
    assert server.json("summary", run="cut/measured", step=2)["notices"] == [
        "rank 1 of 2 missing: no file of theirs has this step whole"
    ]


def test_what_is_large_goes_in_parts(board):
    server, _ = board
    assert [c["step"] for c in server.json("index")["captures"] if c["run"] == "parts/measured"] == [5]
    assert server.json("summary", run="parts/measured", step=5)["makespan"] == TIMELINES[2].makespan


def test_steps_that_come_later_are_seen(board):
    server, logdir = board
    with Writer(logdir / "late", "measured", 0) as writer:
        writer.timeline(*measured(TIMELINES[0], 1, 0))
        server.until(lambda captures: any(c["experiment"] == "late" for c in captures))
        writer.timeline(*measured(TIMELINES[0], 2, 0))
        writer.scalar("step/loss", 0.5, 2)
        index = server.until(lambda captures: sum(c["experiment"] == "late" for c in captures) == 2)
    assert [c["step"] for c in index["captures"] if c["experiment"] == "late"] == [1, 2]


@one_in(4)
@pytest.mark.parametrize(("form", "kind"), [("json", "application/json"), ("csv", "text/csv"), ("png", "image/png")])
@pytest.mark.parametrize("pack", [False, True])
def test_a_capture_is_exported(board, form, kind, pack, tmp_path):
    server, logdir = board
    if form == "png":
        pytest.importorskip("matplotlib")
    query = urlencode({"run": "many/measured", "step": 0, "format": form})
    request = urllib.request.Request(f"{server.url}data/plugin/fpipe_timeline/export?{query}")
    if pack:
        request.add_header("Accept-Encoding", "gzip")
    with urllib.request.urlopen(request, timeout=60) as answer:
        body = answer.read()
        assert (answer.headers["Content-Encoding"], answer.headers.get_content_type()) == (
            "gzip" if pack else None,
            kind,
        )
        assert int(answer.headers["Fpipe-Lines"]) == (0 if form == "png" else len(TIMELINES[0].spans))
    file = tmp_path / f"timeline.{form}"
    capture = find(logdir).read(CaptureId("many", "measured", 0))
    save(capture, file, "measured, step 0, zb_v")
    assert (gzip.decompress(body) if pack else body) == file.read_bytes()


def test_a_trace_that_would_round_times_is_refused(board):
    status, kind, body = board[0].get("export", run="ages/measured", step=0, format="json")
    assert (status, kind) == (422, "text/plain")
    assert body.startswith(b"a trace can't hold this step: it lasts 2.5e+10 s, and")
    assert board[0].get("export", run="ages/measured", step=0, format="csv")[0] == 200


@one_in(2)
def test_an_export_ends_with_its_client(board):
    """What is sent is more than the sockets hold, so that the server waits for its client."""
    server, _ = board
    query = urlencode({"run": "long/measured", "step": 1, "format": "json"})
    with urllib.request.urlopen(f"{server.url}data/plugin/fpipe_timeline/export?{query}", timeout=60) as answer:
        assert answer.read(20) == b'{"displayTimeUnit":"'
        assert server.get("export", run="many/measured", step=0, format="csv")[0] == 409
    end = time.monotonic() + 20
    while server.get("export", run="many/measured", step=0, format="csv")[0] != 200:
        assert time.monotonic() < end
        time.sleep(0.1)


def test_the_pages_files_are_served_and_nothing_else():
    class Context:
        data_provider = None

    apps = PipelinePlugin(Context()).get_plugin_apps()
    assert "/index.js" in apps
    assert all(path.endswith((".js", ".css")) or path.strip("/").isidentifier() for path in apps)


def test_the_tab_comes_with_data_and_is_named():
    class Context:
        data_provider = None

    plugin = PipelinePlugin(Context())
    assert plugin.is_active() is False
    assert plugin.data_plugin_names() == ("fpipe_timeline",)
    assert plugin.frontend_metadata().tab_name == "Pipeline"
    assert plugin.frontend_metadata().es_module_path == "/index.js"


def test_a_capture_with_a_part_ideal_is_worked_out_once(monkeypatch):
    """The page asks for each of its ranks; a few are kept."""
    asked = []
    made = WhatIf.timeline_of
    monkeypatch.setattr(WhatIf, "timeline_of", lambda self, what: asked.append(what) or made(self, what))
    blobs = {rank: encode(*measured(TIMELINES[0], 1, rank)) for rank in range(2)}
    cached = _Cached(lambda: blobs, {})
    names = [row.what for row in cached.what_if.rows][: MAX_IMAGINED + 1]
    for what in (*names, names[-1], names[1], names[0]):
        assert cached.imagined(what).header.kind == "what-if"
    assert asked == [*names, names[0]]
    with pytest.raises(NotFound):
        cached.imagined("rank 9")


def test_requests_at_the_same_time_assemble_a_capture_once():
    reads, together = [], threading.Barrier(4)

    def blobs():
        reads.append(time.sleep(0.05))
        return {rank: encode(*measured(TIMELINES[0], 1, rank)) for rank in range(2)}

    cached = _Cached(blobs, {})

    def request(_):
        together.wait()
        return cached.summary

    with ThreadPoolExecutor(4) as pool:
        one, *others = pool.map(request, range(4))
    assert len(reads) == 1
    assert all(other is one for other in others)
