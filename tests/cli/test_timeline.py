"""`fpipe timeline` and `fpipe simulate --logdir`: what they print and write, and how they end."""

import csv
import json
import math
import os
import re
import subprocess
import sys
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fpipe import Costs, Placement, Plan, schedules, simulate
from fpipe.cli import app
from fpipe.cli.timeline import plain
from fpipe.effects import Reduce
from fpipe.tensorboard.files.captures import columns_of
from fpipe.tensorboard.files.columns import Clock, Header
from fpipe.tensorboard.files.writer import Writer, write
from fpipe.timelines.comparison import Difference, path_segments, path_shares
from fpipe.timelines.spans import Spans
from fpipe.timelines.timeline import Timeline
from fpipe.timelines.what_if import what_if
from tests.support.combinations import one_in

ROOT = Path(__file__).resolve().parents[2]
PLAN = Plan(Placement.loop(3), 6)
MS = Costs(forward=0.001, backward_input=0.0015, backward_weight=0.0005, communication=0.0002)
HOSTILE = "[bold]a[/bold]\x1b[31m\n</script>\ud800" + "y" * 5000
CLOCK = Clock(0.0, 2e-5)


def run(*args, status=0):
    found = CliRunner().invoke(app, list(map(str, args)), env={"COLUMNS": "120"}, prog_name="fpipe")
    if found.exception and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == status, found.output
    return found


def told(*args):
    return json.loads(run(*args, "--json").stdout)


def said(found):
    """What stands on stderr, in one line and without the frame."""
    return " ".join(found.stderr.replace("│", " ").split())


def measure(logdir, *steps, costs=MS, ranks=range(3), schedule="1f1b", clock=CLOCK, loop=1, **header):
    """Write steps, or loops of some, as a recorder of three ranks would."""
    timeline = simulate(schedules.one_f_one_b, PLAN, costs, steps=loop)
    for rank in ranks:
        with Writer(logdir, "measured", rank) as file:
            for step in steps:
                about = Header("measured", step, rank, schedule, PLAN, clock=clock, steps=loop, **header)
                file.timeline(
                    about,
                    columns_of(timeline, rank, memory=[(0.0, 2.0**20), (0.001, 3 * 2.0**20 + rank), (0.002, 0.0)]),
                )
    return timeline


@pytest.fixture
def runs(tmp_path):
    """A folder of runs: one measured at three steps and predicted, one that is only predicted."""
    measure(tmp_path / "mine", 0, 50, 100, peak=(2.5 * 2**30, "process"))
    write(tmp_path / "mine", simulate(schedules.one_f_one_b, PLAN, MS), schedule="1f1b", unit="s")
    write(tmp_path / "other", simulate(schedules.gpipe, PLAN), schedule="gpipe")
    return tmp_path


def test_replicas_of_a_pipeline_stand_in_one_folder(tmp_path):
    plan = replace(PLAN, replicas=2)
    timeline = simulate(schedules.one_f_one_b, plan, MS)
    for replica, folder in enumerate((tmp_path, tmp_path / "replica1")):
        for rank in range(3):
            with Writer(folder, "measured", rank) as file:
                about = Header("measured", 4, rank, "1f1b", plan, replica=replica, makespans=(0.015, 0.018))
                file.timeline(about, columns_of(timeline, rank))
    for replica, folder in enumerate((tmp_path, tmp_path / "replica1")):
        text = " ".join(run("timeline", folder).stdout.split())
        assert f"makespans of the replicas: 15 ms, 18 ms (this is replica {replica}, the slowest 1)" in text
        found = told("timeline", folder)
        assert (found["replica"], found["makespans"]) == (replica, [0.015, 0.018])
    assert "A - B" in run("timeline", tmp_path, tmp_path / "replica1").stdout
    measure(tmp_path / "another", 1)
    assert "holds several runs, ., another: name one of them" in said(run("timeline", tmp_path, status=2))


def test_it_says_what_a_step_took(runs):
    timeline = simulate(schedules.one_f_one_b, PLAN, MS)
    shown = run("timeline", runs / "mine").stdout.splitlines()
    text = " ".join(" ".join(shown).split())
    assert "mine measured, step 100, 1f1b: 3 ranks, 3 stages, 6 microbatches makespan" in text
    assert f"makespan {timeline.makespan * 1e3:.4g} ms" in text
    assert f"bubble {100 * timeline.bubble_rate:.1f}%" in text
    assert "times in ms" in text
    assert "clocks agree within 20 µs" in text
    assert "peak memory: 2.5 GiB on rank 0 (process)" in text
    assert "0.0% less than measured" in text
    row = next(line.split() for line in shown if line.split()[:1] == ["1"])
    causes = timeline.causes[1]
    assert row[1:3] == [f"{1e3 * each:.4g}" for each in (timeline.busy[1], timeline.idle[1])]
    assert row[3] == f"{1e3 * causes['warm-up']:.4g}"
    assert row[-2:] == ["3", "MiB"]


def test_the_critical_path_is_folded(runs):
    timeline = simulate(schedules.one_f_one_b, PLAN, MS)
    text = " ".join(run("timeline", runs / "mine").stdout.split())
    path = text[text.index("critical path:") :]
    assert "rank 0 (1 F) 1 ms -> transfer 0.2 ms -> rank 1 (1 F) 1 ms -> transfer 0.2 ms -> rank 2 (" in path
    assert f"backward {100 * path_shares(timeline)['backward'] / timeline.makespan:.1f}%" in path
    assert sum(stay.time for stay in path_segments(timeline)) == pytest.approx(timeline.makespan)
    assert sum(path_shares(timeline).values()) == pytest.approx(timeline.makespan)


def test_it_says_what_would_help(tmp_path):
    times = [1e-3, 1e-3, 4.5e-3, 1e-3]
    slow = Costs(times, times, times, communication=2e-4)
    timeline = simulate(schedules.one_f_one_b, Plan(Placement.loop(4), 8), slow)
    write(tmp_path / "slow", timeline, schedule="1f1b", unit="s")
    result = what_if(timeline, schedule="1f1b")
    found = told("timeline", "--what-if", tmp_path / "slow")
    assert found["what_if"] == [row | {} for row in json.loads(json.dumps(result.as_json()))["what_if"]]
    assert found["what_if"][0]["what"] == "rank 2"
    assert (found["kind"], found["unit"], found["error"]) == ("predicted", "s", pytest.approx(0, abs=1e-12))
    assert found["headline"].startswith("rank 2 computes 4.5x slower than the median: ")
    text = run("timeline", "--what-if", tmp_path / "slow").stdout
    assert found["headline"] in text
    first = next(line.split() for line in text.splitlines() if re.match(r"rank 2 +\d", line))
    assert first[2] == f"{1e3 * result.rows[0].seconds:.4g}"
    assert "replayed with its own times, the step takes as long as captured" in text
    even = simulate(schedules.gpipe, Plan(Placement.loop(1), 2))
    write(tmp_path / "even", even, schedule="gpipe")
    assert "nothing stands out" in run("timeline", "--what-if", tmp_path / "even").stdout
    with Writer(tmp_path / "turns", "measured", 0) as writer:
        writer.timeline(Header("measured", 1, 0, "1f1b", even.plan, turns=True), columns_of(even, 0))
    assert "the ranks took turns in one process" in said(run("timeline", "--what-if", tmp_path / "turns", status=1))
    for wrong in (["--diff"], [tmp_path / "even"], ["--out", tmp_path / "x.json"]):
        assert "it is about one run" in said(run("timeline", "--what-if", tmp_path / "slow", *wrong, status=2))


def test_a_long_path_is_cut_in_its_middle(tmp_path):
    write(
        tmp_path, simulate(schedules.one_f_one_b, Plan(Placement.loop(40), 40), Costs(communication=0.1)), schedule="x"
    )
    text = " ".join(run("timeline", tmp_path).stdout.split())
    assert "more … ->" in text
    assert text.count("->") == 24


def test_the_json_is_the_timelines_own(runs):
    timeline = simulate(schedules.one_f_one_b, PLAN, MS)
    found = told("timeline", runs / "mine")
    assert (found["kind"], found["step"], found["schedule"], found["unit"]) == ("measured", 100, "1f1b", "s")
    assert (found["makespan"], found["bubble_rate"]) == (timeline.makespan, timeline.bubble_rate)
    assert (found["busy"], found["causes"]) == (timeline.busy, timeline.causes)
    assert found["peak_memory"] == [3 * 2**20, 3 * 2**20 + 1, 3 * 2**20 + 2]
    assert found["allocator_peak"] == [2.5 * 2**30] * 3
    assert found["clock_uncertainty"] == 2e-5
    assert found["predicted_makespan"] == timeline.makespan
    assert found["critical_path"][0] == {"ranks": [0], "effects": {"Forward": 1}, "time": pytest.approx(0.001)}
    assert found["notices"] == []


def test_several_steps_have_a_period(tmp_path):
    options = ("--ranks", "3", "--microbatches", "6", "--steps", "8", "--update", "1", "--seconds")
    simulated = told("simulate", "zb-h2", *options, "--logdir", tmp_path)
    found = told("timeline", tmp_path)
    assert (found["steps"], found["period"]) == (8, simulated["period"]) == (8, 6 * 3 + 1)
    assert "period 19 s over 8 steps, makespan 154 s" in run("timeline", tmp_path).stdout


@pytest.mark.parametrize(
    ("args", "kind", "step"),
    [
        (["mine"], "measured", 100),
        (["mine", "--step", "50"], "measured", 50),
        (["mine@50"], "measured", 50),
        (["mine/predicted"], "predicted", 0),
        (["mine/measured@0"], "measured", 0),
        (["mine", "--kind", "predicted"], "predicted", 0),
        (["other"], "predicted", 0),
    ],
)
def test_which_capture_is_meant(args, kind, step, runs, monkeypatch):
    monkeypatch.chdir(runs)
    found = told("timeline", *args)
    assert (found["kind"], found["step"]) == (kind, step)


def test_a_folder_may_have_an_at_in_its_name(tmp_path):
    measure(tmp_path / "run@7", 3)
    assert told("timeline", tmp_path / "run@7")["step"] == 3
    assert told("timeline", f"{tmp_path / 'run@7'}@3")["step"] == 3


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (["gone"], 2, "there is no folder gone"),
        (["."], 2, "holds several runs, mine, other: name one of them"),
        (["empty"], 1, "no step was captured below empty: record some with fpipe.tensorboard.Recorder, or"),
        (["mine@60"], 2, "has no step 60 that was measured: it has 0, 50, 100"),
        (["mine", "--step", "7", "--kind", "predicted"], 2, "has no step 7 that was predicted: it has 0"),
        (["other", "--kind", "measured"], 2, "other has nothing measured, only predicted"),
        (
            ["mine", "--out", "a.txt"],
            2,
            "a.txt ends in no known format: take .html, .json, .svg, .png, .pdf or .csv",
        ),
        (["mine", "other", "--out", "a.json"], 2, "one timeline is written: name one run"),
        (["mine", "--out", "nowhere/a.json"], 2, "nowhere/a.json can't be written: No such file"),
        (["mine", "mine", "mine"], 2, "two runs can be compared, not 3"),
        (["other", "--diff"], 2, "other has nothing measured"),
        ([], 2, "Missing argument"),
    ],
)
def test_what_is_wrong_is_told_with_what_would_do(args, status, says, runs, monkeypatch):
    monkeypatch.chdir(runs)
    (runs / "empty").mkdir()
    assert says in said(run("timeline", *args, status=status))


def test_of_many_steps_the_nearest_are_offered(tmp_path):
    measure(tmp_path, *range(0, 1000, 50), ranks=[0])
    assert "of its 20 the nearest are 100, 150, 200, 250" in said(run("timeline", tmp_path, "--step", "170", status=2))


def test_a_rank_that_is_missing_or_cut_short_is_a_note(runs):
    (file,) = (runs / "mine" / "measured" / "rank2").iterdir()
    file.write_bytes(file.read_bytes()[:-10])
    found = run("timeline", runs / "mine")
    assert "note: " in found.stderr
    assert "is cut short or broken at byte" in said(found)
    assert "rank 2 of 3 missing" in said(found)
    assert any(line.split() == ["2", "missing"] for line in found.stdout.splitlines())
    assert len(told("timeline", runs / "mine")["notices"]) == 2
    assert told("timeline", runs / "mine@50")["busy"][2] > 0


def test_what_cannot_be_read_ends_with_1(tmp_path):
    measure(tmp_path, 5, ranks=[0])
    (file,) = (tmp_path / "measured" / "rank0").iterdir()
    whole = bytearray(file.read_bytes())
    whole[whole.index(b"\x1f\x8b\x08\0\0\0\0\0") + 60] ^= 1
    file.write_bytes(whole)
    assert "step 5 in" in said(run("timeline", tmp_path, status=1))


NAN = float("nan")
NOT_WRITTEN = {
    "a time": ({}, {"ends": NAN}, "times that are out of range"),
    "a host's time": ({"host": [("load", 0.0, -math.inf)]}, {}, "times that are out of range"),
    "bytes": ({"peak": (-1.0, "process")}, {}, "far too large"),
    "memory": ({}, {"memory": NAN}, "far too large"),
    "a clock": ({"clock": Clock(0.0, NAN)}, {}, "far too large"),
    "a stage": ({"plan": Plan(Placement([2, 1, 0]), 6)}, {}, "a stage that is not on rank 0"),
    "no compute": ({}, {"effects": 0}, "No rank computed anything"),
}


@pytest.mark.parametrize(("about", "changed", "says"), NOT_WRITTEN.values(), ids=NOT_WRITTEN)
def test_a_timeline_that_none_wrote_ends_with_1(about, changed, says, tmp_path, monkeypatch):
    dumps = json.dumps
    monkeypatch.setattr(json, "dumps", lambda found, **options: dumps(found, **{**options, "allow_nan": True}))
    columns = columns_of(simulate(schedules.one_f_one_b, PLAN), 0, memory=[(0.0, 1.0), (1.0, 2.0)])
    if "ends" in changed:
        columns = replace(columns, ends=np.append(columns.ends[:-1], NAN))
    if "memory" in changed:
        columns = replace(columns, memory=(columns.memory[0], np.array([1.0, NAN])))
    if "effects" in changed:
        none = simulate(schedules.one_f_one_b, Plan(Placement.loop(1), 1))
        columns = replace(columns_of(none, 0), effects=[Reduce(0)] * len(none.spans))
    with Writer(tmp_path, "measured", 0) as file:
        file.timeline(
            Header(**{"kind": "measured", "step": 0, "rank": 0, "schedule": "mine", "plan": PLAN} | about), columns
        )
    assert says in said(run("timeline", tmp_path, status=1))


def test_hostile_names_are_shown_as_text(tmp_path):
    folder = tmp_path / "[bold]x[/bold]\x1b[2J\a"
    measure(folder, 1, schedule=HOSTILE, peak=(1.0, HOSTILE))
    (file,) = (folder / "measured" / "rank1").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    found = run("timeline", folder)
    assert "is cut short" in said(found)
    assert not {"\x1b", "\a"} & set(found.stdout + found.stderr)
    assert "[bold]a[/bold]" in found.stdout
    assert len(found.stdout) < 5000
    for suffix in ("json", "csv", "svg"):
        run("timeline", folder, "--out", tmp_path / f"a.{suffix}")
    assert told("timeline", folder)["schedule"] == HOSTILE


def test_what_a_terminal_would_obey_is_taken_out():
    assert plain("a\x1b[31m\n\u202eb\ud800") == "a�[31m��b�"
    assert plain("x" * 300) == "x" * 200 + "…"


def test_clocks_that_were_not_compared_are_a_note(tmp_path):
    measure(tmp_path, 1, clock=None)
    found = run("timeline", tmp_path)
    assert "clocks of ranks 0, 1, 2 were not compared" in said(found)
    assert told("timeline", tmp_path)["clock_uncertainty"] is None


def test_the_prediction_is_the_last_before_the_step(tmp_path):
    measure(tmp_path, 5, 25)
    times = {10: 0.001, 20: 0.002, 30: 0.003}
    for step, forward in times.items():
        write(tmp_path, simulate(schedules.one_f_one_b, PLAN, Costs(forward)), schedule="1f1b", unit="s", step=step)
    makespans = {
        step: simulate(schedules.one_f_one_b, PLAN, Costs(forward)).makespan for step, forward in times.items()
    }
    assert told("timeline", tmp_path)["predicted_makespan"] == makespans[20]
    assert told("timeline", tmp_path, "--step", 5)["predicted_makespan"] == makespans[10]


def test_a_prediction_that_cannot_be_read_is_a_note(runs):
    for file in (runs / "mine" / "predicted").rglob("*tfevents*"):
        whole = bytearray(file.read_bytes())
        whole[whole.index(b"\x1f\x8b\x08\0\0\0\0\0") + 60] ^= 1
        file.write_bytes(whole)
    found = run("timeline", runs / "mine")
    assert "note: ranks 0, 1, 2 are left out: step 0 in" in said(found)
    assert "step 100" in found.stdout
    assert "predicted makespan" not in found.stdout
    assert "is damaged" in said(run("timeline", "--diff", runs / "mine", status=1))


def test_gaps_on_the_critical_path_are_the_hosts():
    spans = simulate(schedules.one_f_one_b, PLAN, MS).spans
    ends = array("d", (end - 0.1 * (end - start) for start, end in zip(spans.starts, spans.ends, strict=True)))
    timeline = Timeline(PLAN, Spans(spans.first, spans.effects, spans.starts, ends, spans.waited))
    assert path_shares(timeline)["host"] > 0.05 * timeline.makespan
    assert sum(path_shares(timeline).values()) == pytest.approx(timeline.makespan)
    assert sum(stay.time for stay in path_segments(timeline)) == pytest.approx(timeline.makespan)


def test_a_prediction_without_a_unit_is_not_measured_against(runs):
    write(runs / "mine", simulate(schedules.one_f_one_b, PLAN), schedule="1f1b")
    assert "its times have another unit" in run("timeline", runs / "mine").stdout


def test_a_prediction_of_fewer_steps_is_not_measured_against(tmp_path):
    measure(tmp_path, 1, loop=4)
    write(tmp_path, simulate(schedules.one_f_one_b, PLAN, MS), schedule="1f1b", unit="s")
    assert "there is a prediction too, but it is of 1 step" in run("timeline", tmp_path).stdout
    summary = told("timeline", tmp_path)
    assert summary["predicted_period"] is summary["predicted_makespan"] is None
    assert "totals do not compare" in said(run("timeline", "--diff", tmp_path))


def test_how_far_the_predicted_period_is(tmp_path):
    slow = measure(tmp_path, 1, costs=Costs(0.002, 0.0015, 0.0005), loop=4)
    fast = simulate(schedules.one_f_one_b, PLAN, MS, steps=4)
    write(tmp_path, fast, schedule="1f1b", unit="s")
    shown = " ".join(run("timeline", tmp_path).stdout.split())
    less = f"{100 * (1 - fast.period / slow.period):.1f}% less than measured"
    assert f"predicted period {fast.period * 1e3:.4g} ms, {less}" in shown
    assert told("timeline", tmp_path)["predicted_period"] == fast.period


def test_how_far_the_prediction_is(tmp_path):
    slow = measure(tmp_path, 1, costs=Costs(0.002, 0.0015, 0.0005))
    fast = simulate(schedules.one_f_one_b, PLAN, MS)
    write(tmp_path, fast, schedule="1f1b", unit="s")
    shown = " ".join(run("timeline", tmp_path).stdout.split())
    assert (
        f"predicted makespan {fast.makespan * 1e3:.4g} ms, {100 * (1 - fast.makespan / slow.makespan):.1f}% less"
        in shown
    )


@one_in(4)
@pytest.mark.parametrize("suffix", [".json", ".svg", ".png", ".pdf", ".csv", ".JSON"])
def test_it_is_written_whole(suffix, runs):
    out = runs / f"a{suffix}"
    found = run("timeline", runs / "mine", "--out", out)
    assert found.stdout == found.stderr == ""
    data = out.read_bytes()
    spans = simulate(schedules.one_f_one_b, PLAN, MS).spans
    if suffix.lower() == ".json":
        events = json.loads(data)["traceEvents"]
        rows = {(each["pid"], each["args"]["row"]) for each in events if each["ph"] == "X"}
        assert len(rows) == len(spans)
        assert {each["args"]["bytes"] for each in events if each["ph"] == "C" and each["name"] == "memory"} >= {
            2**20,
            3 * 2**20,
        }
    elif suffix == ".csv":
        rows = list(csv.DictReader(data.decode().splitlines()))
        assert [row["effect"] for row in rows] == [repr(span.effect) for span in spans]
        assert [float(row["end"]) for row in rows] == [span.end for span in spans]
        waits = [
            (spans.first[int(row["waited_rank"])] + int(row["waited_row"])) if row["waited_row"] else None
            for row in rows
        ]
        assert waits == [span.waited_for for span in spans]
    else:
        assert data.startswith({".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}[suffix])
    assert [path.name for path in runs.iterdir() if path.name.startswith((".", "tmp"))] == []


def test_without_matplotlib_a_figure_says_what_to_install(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "fpipe.timelines.figure", None)
    monkeypatch.delattr("fpipe.timelines.figure", raising=False)  # where it was imported before
    out = runs / "a.svg"
    assert "pip install" in said(run("timeline", runs / "mine", "--out", out, status=2))
    assert not out.exists()


def test_a_difference_is_shown_side_by_side(runs):
    costs = Costs(0.002, 0.0015, 0.0005, communication=0.0002)
    slow, fast = measure(runs / "slow", 3, costs=costs), simulate(schedules.one_f_one_b, PLAN, MS)
    found = run("timeline", "--diff", runs / "slow", runs / "mine@50")
    lines = [" ".join(line.split()) for line in found.stdout.splitlines()]

    def shown(pattern):
        return any(re.match(pattern, line) for line in lines)

    assert shown("A .*slow measured, step 3, 1f1b")
    assert shown("B .*mine measured, step 50, 1f1b")
    makespans = [f"{1e3 * each:.4g}" for each in (slow.makespan, fast.makespan, slow.makespan - fast.makespan)]
    assert shown(re.escape(" ".join(["makespan (ms)", *makespans])))
    assert shown(r"Forward \(ms\) 36 18 18 ")
    assert shown("2 24 18 ")  # the busy time of rank 2
    assert shown(r"rank 0: F \+1 ms x 6 forward \+6 ms \+1 ms$")
    assert not shown(r"\d \d F\d ")  # each differs as its group does
    assert found.stderr == ""


def test_single_effects_are_shown_that_differ_otherwise_than_their_group(runs):
    slow = Costs(0.002, 0.0015, 0.0005, communication=0.0002, scale=[1, 1, 1, 1, 3, 1])
    measure(runs / "slow", 3, costs=slow)
    difference = run("timeline", "--diff", runs / "slow", runs / "mine@50").stdout
    lines = [" ".join(line.split()) for line in difference.splitlines()]
    assert "rank 0: F +1 ms x 6 forward +10 ms +5 ms" in lines
    single = lines[lines.index("rank stage effect took A B A - B began later by") + 1 :]
    assert {line.split()[2] for line in single if line[:1].isdigit()} == {"F4", "B4"}
    assert any(re.match("0 0 F4 6 1 5 ", line) for line in single)


def test_the_json_of_a_difference(runs):
    found = told("timeline", "--diff", runs / "mine", runs / "other")
    expected = Difference(simulate(schedules.one_f_one_b, PLAN, MS), simulate(schedules.gpipe, PLAN)).as_json()
    assert [each["schedule"] for each in found["runs"]] == ["1f1b", "gpipe"]
    assert {key: found[key] for key in ("makespan", "breakdown", "kinds", "ranks")} == json.loads(
        json.dumps({key: expected[key] for key in ("makespan", "breakdown", "kinds", "ranks")})
    )
    assert "are in seconds" in found["notices"][0]


def test_one_run_is_compared_with_its_own_prediction(runs):
    for args in (["--diff", runs / "mine"], [runs / "mine", "--diff", "--step", "50"]):
        found = told("timeline", *args)
        assert [each["kind"] for each in found["runs"]] == ["measured", "predicted"]
        assert found["runs"][0]["step"] == (50 if "--step" in args else 100)
        assert found["makespan"][0] == found["makespan"][1]


def test_two_runs_need_no_flag(runs):
    assert told("timeline", runs / "mine", runs / "other") == told("timeline", "--diff", runs / "mine", runs / "other")


def test_simulate_writes_what_timeline_reads(tmp_path):
    plan = ("--ranks", "3", "--microbatches", "6")
    logdir = tmp_path / "a run's"
    found = run("simulate", "1f1b", *plan, "--logdir", logdir)
    assert (
        found.stdout.splitlines()[-1]
        == f"See it in the Pipeline tab of: tensorboard --logdir '{tmp_path}/a run'\"'\"'s'"
    )
    timeline = told("timeline", logdir)
    simulated = told("simulate", "1f1b", *plan)
    for name in ("resident", "memory", "stage_share", "lower_bound"):  # not in a file
        del simulated[name]
    assert {key: timeline[key] for key in simulated} == simulated
    assert (timeline["kind"], timeline["step"], timeline["unit"]) == ("predicted", 0, "")
    assert timeline["peak_memory"] == [None] * 3


def test_simulate_writes_memory_where_sizes_are_given_and_seconds_where_asked(tmp_path):
    run("simulate", "1f1b", "--ranks", 3, "--microbatches", 6, "--activation", 10, "--seconds", "--logdir", tmp_path)
    found = told("timeline", tmp_path)
    timeline = simulate(schedules.one_f_one_b, PLAN, Costs(activation=10))
    assert found["unit"] == "s"
    assert found["peak_memory"] == [max(held for _, held in timeline.memory(rank)) for rank in range(3)]
    assert "makespan 24 s" in run("timeline", tmp_path).stdout


def test_simulate_says_what_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    found = run("simulate", "1f1b", "--ranks", 2, "--microbatches", 2, "--logdir", tmp_path / "file", status=2)
    assert "can't be written" in said(found)
    assert "--logdir" in said(found)


def test_the_verb_imports_no_torch_and_json_no_rich(runs):
    code = f"""if True:
        import sys
        from fpipe.cli import app
        for args in (["{runs}/mine"], ["{runs}/mine", "{runs}/other"]):
            app(["timeline", *args, "--json"], standalone_mode=False)
        print(*sys.modules.keys() & {{"torch", "matplotlib", "rich"}}, file=sys.stderr)
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == "\n"
