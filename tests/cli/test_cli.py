"""The command line: what it prints, what it writes, how it ends; and the catalogue of schedules that it names.

Oracles: closed forms, the library's own results, and the examples of the help texts, which must run.
"""

import json
import math
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
from rich.console import Console
from typer import testing

import fpipe
from fpipe import Costs, Edges, Placement, Plan, ScheduleError, schedules
from fpipe.cli import app
from fpipe.cli.again import again as command
from fpipe.cli.resolve import Memory
from fpipe.cli.tables import gantt
from fpipe.costs import ROUNDING, Shared
from fpipe.effects import Residuals
from fpipe.flight import recording
from fpipe.flight.format import FOLDER
from fpipe.interop.checkpoints.slots import Slot
from fpipe.programs.footprint import footprint
from fpipe.programs.verifier import verify
from fpipe.schedules import search
from fpipe.schedules.catalogue import CATALOGUE, shares
from fpipe.schedules.cuts import of_shares, recut
from fpipe.schedules.slice_costs import of_slice
from tests.support.combinations import EFFORT, few, one_in, thorough

ROOT = Path(__file__).resolve().parents[2]
NAMES = list(CATALOGUE)
VERBS = [
    *("schedules", "verify", "simulate", "draw", "compare", "search", "export", "import"),
    *("timeline", "explain", "env"),
]
SMALL = ("--ranks", "4", "--microbatches", "8")
QUICK = ("--effort", f"{EFFORT:g}")

OWN = """
from fpipe.effects import Backward, Forward
from neighbour import EXTRA

def eager(rank, plan):
    (stage,) = plan.stages_on(rank)
    warmup = min(plan.stages - 1 - stage + EXTRA, plan.microbatches)
    for m in range(plan.microbatches + warmup):
        if m < plan.microbatches:
            yield Forward(stage, m)
        if m >= warmup:
            yield Backward(stage, m - warmup)

def stuck(rank, plan):
    (stage,) = plan.stages_on(rank)
    for m in range(plan.microbatches):
        yield Forward(stage, m)
        yield Backward(stage, m)

def short(rank, plan):
    yield from list(eager(rank, plan))[:-1]

def costly(rank, plan, *, costs=None, memory_limit=None):
    assert costs.forward == 3.0 and memory_limit == 4.0
    yield from eager(rank, plan)

def made(plan, costs, memory_limit):
    from fpipe.schedules import zb_auto
    return zb_auto(plan, costs, memory_limit)

def made_none(plan):
    pass

def none(rank, plan):
    pass

def broken(rank, plan):
    yield {}["a key"]
"""


testing._get_command = cache(testing._get_command)  # each call would make the command again, which takes longer than it


def run(*args, status=0, **env):
    found = testing.CliRunner().invoke(app, list(map(str, args)), env={"COLUMNS": "120", **env}, prog_name="fpipe")
    if found.exception and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == status, found.output
    return found


def told(*args, **env):
    return json.loads(run(*args, "--json", **env).stdout)


def said(found):
    """What stands on stderr, in one line and without the frame."""
    return " ".join(found.stderr.replace("│", " ").split())


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "neighbour.py").write_text("EXTRA = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # what the command adds is taken away again
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    return tmp_path


def examples(verb):
    shown = run(verb, "--help").stdout
    return [line.strip() for line in shown.splitlines() if line.startswith(" fpipe ")]


@pytest.fixture(autouse=True)
def flight():
    """A job of two ranks, of which rank 0 has waited for rank 1."""
    about = [{"process": i, "name": f"rank {i}", "processes": 2} for i in range(2)]
    ranks = [recording.record("a job", each) for each in about]
    ranks[0].begin(3)
    ranks[0].waits("waiting for Activation(stage=1, microbatch=0) from rank 1", 1)
    ranks[1].begin(3)
    ranks[1].writer("effect", "Forward(stage=1, microbatch=0)")()
    yield
    for rank in ranks:
        rank.close()
    shutil.rmtree(ranks[0].path.parent, ignore_errors=True)  # it stays where a test has failed


@pytest.mark.parametrize("verb", few(VERBS, slice(None, None, 3)))
def test_the_examples_of_the_help_run_and_every_verb_has_json(verb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    *before, last = examples(verb)
    for example in before:
        words = example.split()
        assert words[0] == "fpipe"
        run(*words[1:])
    assert told(*last.split()[1:])


def test_the_help_lists_the_verbs():
    shown = run("--help").stdout
    assert [verb for verb in VERBS if not re.search(rf"│ {verb} ", shown)] == []


def test_the_json_of_simulate_is_fixed():
    times = ("--forward", "1.0", "--backward-input", "1.0", "--backward-weight", "1.0", "--communication", "0.1")
    found = told("simulate", "1f1b", "--ranks", "4", "--microbatches", "8", *times)
    assert list(found) == [
        *("schedule", "ranks", "microbatches", "chunks", "makespan", "cost", "bubble_rate", "idle", "peak_in_flight"),
        *("replicas", "resident", "memory", "stage_share", "lower_bound"),
    ]
    assert (found["schedule"], found["ranks"], found["microbatches"], found["chunks"]) == ("1f1b", 4, 8, 1)
    cost = (8 + 4 - 1) * 3 + 0.1 * (2 * 3 * 8 / 4 + 2 * 2)  # FIGURES: 1F1B (Narayanan et al. 2019; ZB table 2)
    assert found["cost"] == pytest.approx(cost, rel=1e-12)
    assert found["bubble_rate"] == pytest.approx((cost - 8 * 3) / cost, rel=1e-12)
    assert found["idle"][0] == pytest.approx(cost - 8 * 3, rel=1e-12)
    assert found["peak_in_flight"] == [4, 3, 2, 1]


def test_steps_without_a_barrier_have_a_period():
    plan, options = Plan(Placement.loop(4), 8), ("--update", "1.5", "--steps", "20")
    loop = fpipe.simulate(fpipe.schedules.updating("zb-h2"), plan, Costs(update=1.5), steps=20)
    found = told("simulate", "zb-h2", *SMALL, *options)
    assert list(found)[-3:] == ["lower_bound", "steps", "period"]
    assert (found["steps"], found["period"], found["makespan"]) == (20, loop.period, loop.makespan)
    assert loop.period == 8 * 3 + 1.5
    assert found["lower_bound"] == told("simulate", "zb-h2", *SMALL)["lower_bound"]
    assert told("simulate", "zb-h2", *SMALL, "--steps", "1")["period"] == 8 * 3 + 4 - 1
    shown = run("simulate", "zb-h2", *SMALL, *options).stdout
    assert shown.splitlines()[1].startswith("period 25.5 over 20 steps, makespan 513, bubble 0.0% of ")


def test_an_update_is_that_of_a_ranks_share_or_of_each_stage():
    named = ("interleaved-1f1b", *SMALL, "--chunks", "2")
    one, each = (told("simulate", *named, "--update", times) for times in ("4", "2,2,2,2,2,2,2,2"))
    assert one == each
    assert one["cost"] == told("simulate", *named)["cost"] + 4
    assert "update has 2 entries, the plan 8 stages" in run("verify", *named, "--update", "1,2", status=1).stderr
    spans = told("draw", "1f1b", *SMALL, "--update", "2", "--steps", "3")["spans"]
    assert [span["effects"] for span in spans if span["rank"] == 3][16::17] == [[{"kind": "Update", "stage": 3}]] * 3
    wrong = run("export", "1f1b", *SMALL, "--update", "1", status=2, COLUMNS="200").stderr
    assert "Invalid value for --update: the file has no effects for it" in wrong


def test_one_time_is_a_ranks_and_a_chunk_counts_its_part():
    p, v, m = 4, 2, 16
    found = told(
        "simulate",
        "interleaved-1f1b",
        "--ranks",
        p,
        "--microbatches",
        m,
        "--chunks",
        v,
        "--forward",
        "0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5",
    )
    total = v * (0.5 + 1 / v + 1 / v)
    assert found["chunks"] == v
    assert found["cost"] == pytest.approx(m * total + (p - 1) * total / v, rel=1e-12)
    assert found["peak_in_flight"] == [(2 * (p - r - 1) + (v - 1) * p + 1) / v for r in range(p)]


@pytest.mark.parametrize(
    ("option", "costs"),
    [
        (("--backward", "1.5"), Costs(backward=1.5)),
        (("--communication", "0.5:10", "--activation", "20"), Costs(communication=fpipe.Link(0.5, 10), activation=20)),
        (("--forward", "1,2,3,4"), Costs(forward=[1, 2, 3, 4])),
        (
            ("--communication", "0-1=0.1,1-2=0.2:5,2-3=0.3,1-0=0,2-1=0,3-2=1", "--activation", "1"),
            Costs(
                communication={(0, 1): 0.1, (1, 2): fpipe.Link(0.2, 5), (2, 3): 0.3, (1, 0): 0, (2, 1): 0, (3, 2): 1},
                activation=1,
            ),
        ),
    ],
)
def test_costs_are_the_librarys(option, costs):
    timeline = fpipe.simulate(fpipe.schedules.one_f_one_b, Plan(Placement.loop(4), 8), costs)
    assert told("simulate", "1f1b", *SMALL, *option)["makespan"] == timeline.makespan


def test_the_json_has_the_schedules_own_name():
    assert told("simulate", "Zb_H1", *SMALL)["schedule"] == "zb-h1"
    assert told("draw", "Zb_H1", *SMALL)["schedule"] == "zb-h1"


def test_overlap_is_the_time_of_a_pair():
    slow, fast = (told("simulate", "dualpipe-v", *SMALL, *option) for option in ((), ("--overlap", "2")))
    assert fast["makespan"] < slow["makespan"]


def test_simulate_shows_every_rank():
    shown = run("simulate", "1f1b", "--ranks", "2", "--microbatches", "4", "--residuals", str(5 * 2**20)).stdout
    assert (
        re.sub(" +$", "", shown, flags=re.MULTILINE)
        == """\
1f1b: 2 ranks, 2 stages, 4 microbatches
makespan 15, bubble 20.0%
                  warm  depen-  trans-  imba-             in
rank  busy  idle    up   dency     fer  lance  drain  flight  memory
   0    12     3     0       3       0      0      0       2  10 MiB
   1    12     3     1       0       0      0      2       1   5 MiB
"""
    )


def test_draw_is_to_scale():
    shown = run("draw", "gpipe", "--ranks", "2", "--microbatches", "3", "--backward", "4", "--width", "40").stdout
    assert (
        shown
        == """\
gpipe: 2 ranks, 2 stages, 3 microbatches
makespan 20, bubble 25.0%
         idle  0         10
rank 0  25.0%  FFF.....B0--B1--B2--
rank 1  25.0%  .FFFB0--B1--B2--....
F forward  B backward  . idle
The number is the microbatch.
"""
    )


def test_trained_stages():
    shown = run("draw", "1f1b", "--ranks", "3", "--microbatches", "2", "--trained", "1", "--width", "40").stdout
    assert [line[15:].strip() for line in shown.splitlines()[4:7]] == [
        "F0-F1-...............",
        "...F0-F1-...W0-...W1-",
        "......F0-I0-F1-I1-...",
    ]
    found = told("search", *SMALL, "--trained", "3", "--loops", "1,2,4")
    assert found["lower_bound"] == found["cost"] == 10  # each rank has a part of the trained stage
    rows, whole = (told("compare", "1f1b", "zb-v", *SMALL, *more)["schedules"] for more in (["--trained", "3"], []))
    assert [(row["schedule"], row["cost"]) for row in rows] == [("zb-v", 12), ("1f1b", 16)]
    assert [row["cost"] for row in whole] == [24, 33]
    assert (
        "trained names stage 4: there are stages 0 to 3"
        in run("verify", "1f1b", *SMALL, "--trained", "4", status=1).stderr
    )
    assert "'x' is no list of stages" in run("verify", "1f1b", *SMALL, "--trained", "x", status=2).stderr


@pytest.mark.parametrize("width", few([40, 60, 80], [40]))
def test_tables_are_never_cut(width):
    """However narrow the terminal: a number without its last digits is another number."""
    times = (*SMALL, "--communication", "0.1", "--residuals", str(2**30))
    shown = run("simulate", "1f1b", *times, COLUMNS=str(width)).stdout
    assert shown == run("simulate", "1f1b", *times, COLUMNS="200").stdout
    assert re.search(r"^ +0 +24 +10\.6 +0 +9\.9 +0\.7 +0 +0 +4 +4 GiB$", shown, re.MULTILINE)
    assert max(map(len, shown.splitlines())) <= 80
    shown, whole = (run("compare", *SMALL, COLUMNS=c).stdout.split("* best")[0] for c in (str(width), "200"))
    assert shown == whole
    assert re.search(r"^zb-v +2 +25\.5 +24\* +0\.0%\* +4 ", shown, re.MULTILINE)


def test_draw_gives_every_effect_a_column_and_goes_on_below():
    shown = run("draw", "1f1b", "--ranks", "4", "--microbatches", "64", "--communication", "0.1", COLUMNS="80").stdout
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    for rank in range(4):
        lane = "".join(line[15:] for line in lines if line.startswith(f"rank {rank}"))
        assert lane.count("F") == 64
        assert lane.count("B") == 64
        assert len(lane) == 211


def test_draw_says_where_it_ends():
    plan = ("--ranks", "2", "--microbatches", "8", "--width", "60")
    shown = run("draw", "1f1b", *plan, "--forward", "0.001").stdout
    lanes = [line[15:] for line in shown.splitlines() if line.startswith("rank 0")]
    assert len(lanes) == 40
    assert "".join(lanes).startswith("FF")
    assert "This is until 1.8 of 18.01: --out FILE.svg draws all of it." in shown
    left = "Some of what is shorter than a column is left out: --scale 1"
    assert left in run("draw", "1f1b", *plan, "--scale", "0.4").stdout
    assert "left out" not in run("draw", "1f1b", *plan, "--scale", "1").stdout


@pytest.mark.parametrize(("scale", "says"), [("1", False), ("2", True)])
def test_the_legend_is_of_the_labels_shown(scale, says):
    shown = run("draw", "gpipe", "--ranks", "2", "--microbatches", "3", "--backward", "1", "--scale", scale).stdout
    assert ("The number is the microbatch" in shown) == says


def test_labels_are_of_one_width():
    shown = run("draw", "1f1b", *SMALL, COLUMNS="100").stdout
    assert "  F0F1F2F3............B0--F4B1--F5B2--F6B3--" in shown


@pytest.mark.parametrize(
    ("system", "lane"),
    [("standard", "F0--F1--B0--B1--"), ("256", "0   1   0   1   "), ("truecolor", "0   1   0   1   ")],
)
def test_letters_stay_where_colours_are_few(system, lane):
    timeline = fpipe.simulate(fpipe.schedules.gpipe, Plan(Placement.loop(1), 2), Costs(backward=1))
    console = Console(color_system=system, force_terminal=True, width=40, _environ={})
    with console.capture() as shown:
        console.print(gantt(timeline, console, scale=4))
    assert lane in re.sub(r"\x1b\[[0-9;]*m", "", shown.get())


def test_draw_goes_on_below_what_is_wider_than_the_terminal():
    shown = run("draw", "1f1b", "--ranks", "2", "--microbatches", "3", "--scale", "4", "--width", "40").stdout
    lanes = [line[15:] for line in shown.splitlines() if line.startswith("rank 0")]
    assert "".join(lanes) == "F0--F1--........B0------F2--B1------....B2------"


@pytest.mark.parametrize(
    ("suffix", "option"),
    few([(".pdf", ()), (".svg", ("--residuals", "1e9")), (".svg", ()), (".png", ())], slice(2)),
)
@thorough
def test_draw_writes_a_file_whole(suffix, option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / f"a$b{suffix}"
    run("draw", "interleaved-1f1b", *SMALL, "--out", out, *option)
    first = out.read_bytes()
    assert first.startswith({".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}[suffix])
    assert len(first) > 5000
    assert [path.name for path in tmp_path.iterdir()] == [out.name]  # and no unfinished file beside it
    run("draw", "interleaved-1f1b", *SMALL, "--out", out, *option)
    assert out.read_bytes() == first


def test_a_drawing_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    out = tmp_path / "a.svg"
    out.write_text("before")

    def save(timeline, path, title):
        path.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fpipe.timelines.figure.save", save)
    assert "No space left" in said(run("draw", "1f1b", *SMALL, "--out", out, status=2))
    assert out.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]


def test_what_is_written_goes_where_a_link_leads(tmp_path):
    target, link = tmp_path / "kept.csv", tmp_path / "link.csv"
    target.write_text("before")
    target.chmod(0o640)
    link.symlink_to(target)
    run("export", "gpipe", *SMALL, "--out", link)
    assert link.is_symlink()
    assert target.read_text() == run("export", "gpipe", *SMALL).stdout
    assert target.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.csv", "link.csv"]


@pytest.mark.parametrize(
    ("args", "suffix"),
    few([(("export", "gpipe"), ".csv"), (("draw", "gpipe"), ".pdf"), (("search",), ".csv")], slice(2)),
)
def test_a_pipe_is_written_to(args, suffix, tmp_path):
    small = ("--ranks", "3", "--microbatches", "2")
    pipe, file = tmp_path / f"pipe{suffix}", tmp_path / f"file{suffix}"
    os.mkfifo(pipe)
    run(*args, *small, "--out", file)
    arrived = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE)
    try:
        run(*args, *small, "--out", pipe)
        assert pipe.is_fifo()
        assert arrived.communicate(timeout=30)[0] == file.read_bytes()
    finally:
        arrived.kill()


def test_the_end_of_a_files_name_is_read_in_any_case(tmp_path):
    run("draw", "gpipe", *SMALL, "--out", tmp_path / "a.PNG")
    assert (tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fpipe.timelines.figure", None)
    assert "pip install matplotlib" in said(run("draw", "gpipe", *SMALL, "--out", tmp_path / "a.png", status=2))


def test_the_spans_of_a_drawing():
    spans = told("draw", "1f1b", "--ranks", "2", "--microbatches", "1")["spans"]
    assert spans == [
        {"rank": 0, "start": 0.0, "end": 1.0, "effects": [{"kind": "Forward", "stage": 0, "microbatch": 0}]},
        {"rank": 0, "start": 4.0, "end": 6.0, "effects": [{"kind": "Backward", "stage": 0, "microbatch": 0}]},
        {"rank": 1, "start": 1.0, "end": 2.0, "effects": [{"kind": "Forward", "stage": 1, "microbatch": 0}]},
        {"rank": 1, "start": 2.0, "end": 4.0, "effects": [{"kind": "Backward", "stage": 1, "microbatch": 0}]},
    ]


def test_a_schedule_of_ones_own_and_its_neighbours(own):
    assert told("simulate", "mine.py:eager", *SMALL)["peak_in_flight"] == [5, 4, 3, 2]
    assert told("simulate", own / "mine.py:eager", *SMALL)["schedule"] == f"{own}/mine.py:eager"


def test_a_schedule_of_ones_own_gets_costs_and_limit_if_it_takes_them(own):
    found = told(
        "simulate", "mine.py:costly", "--ranks", "2", "--microbatches", "8", "--forward", "3", "--memory-limit", "4"
    )
    assert found["ranks"] == 2


def test_the_bound_is_none_of_residuals_that_stay_where_they_are_moved():
    moves = ("--offload", "0.1", "--fetch", "0.1", "--offload-limit-bytes", "2")
    found = told("simulate", "1f1b", *SMALL, "--residuals", "1", *moves, "--memory-limit-bytes", "2")
    plan, costs = Plan(Placement.loop(4), 8), Costs(residuals=1)
    assert schedules.lower_bound(plan, costs) == found["lower_bound"] <= found["cost"]
    assert schedules.lower_bound(plan, costs, memory_limit_bytes=2) > found["cost"]


def test_a_limit_in_bytes_orders_for_bytes():
    times = ("--forward", "18.5", "--backward-input", "18.1", "--backward-weight", "9.3", "--communication", "0.6")
    model = (
        "simulate",
        "zb-auto",
        "--ranks",
        "4",
        "--microbatches",
        "12",
        *times,
        "--residuals",
        "1",
        "--deferred",
        "0.5",
    )
    whole, in_bytes = told(*model, "--memory-limit", "5"), told(*model, "--memory-limit-bytes", "5")
    assert max(account["total"] for account in in_bytes["memory"]) <= 5
    assert in_bytes["lower_bound"] <= in_bytes["cost"] < whole["lower_bound"]
    gap = in_bytes["cost"] / in_bytes["lower_bound"] - 1
    shown = run(*model, "--memory-limit-bytes", "5").stdout
    assert re.search(rf"no order in this memory costs less than [\d.]+: this one costs {gap:.1%} more", shown)
    assert "in this memory" not in run(*model).stdout
    wrong = said(run(*model, "--memory-limit-bytes", "0.5", status=1))
    assert "rank 0 needs 1 B for a microbatch" in wrong


def test_lengths_and_their_order():
    model = ("--ranks", "3", "--microbatches", "5", "--lengths", "100,300,200,500,400")
    assert told("simulate", "1f1b", *model)["cost"] > told("simulate", "1f1b", *model[:4])["cost"]
    search = ("search", *model, "--loops", "1", "--memory-limit", "3", *QUICK)
    drawn, peak = told(*search), told(*search, "--order", "peak")
    assert (drawn["order"], peak["order"]) == ([0, 1, 2, 3, 4], [0, 1, 3, 4, 2])
    assert min(drawn["cost"], peak["cost"]) >= told(*search, "--order", "search")["cost"]
    assert "order of microbatches: 0 1 3 4 2" in run(*search, "--order", "peak").stdout
    assert "order" not in told("search", *model[:4], "--loops", "1", *QUICK)
    assert "scale has 2 entries, the plan 5 microbatches" in said(
        run("search", *model[:4], "--lengths", "1,2", status=2)
    )
    assert "as drawn" in said(run(*search, "--order", "peak", "--pareto", status=2))


def test_a_factory_of_ones_own_begins_with_the_plan(own):
    given = (*SMALL, "--forward", "2", "--memory-limit", "4")
    made, named = (told("simulate", name, *given) for name in ("mine.py:made", "zb-auto"))
    assert made == {**named, "schedule": "mine.py:made"}
    wrong = said(run("simulate", "mine.py:made_none", *SMALL, status=1))
    assert "so it makes a schedule, (rank, plan) -> effects; it made None" in wrong
    wrong = said(run("simulate", "mine.py:none", *SMALL, status=1))
    assert "on rank 0 the schedule returns None: it yields effects" in wrong


def test_what_a_file_of_ones_own_raises_is_shown_from_there(own):
    (own / "wrong.py").write_text("def f(:\n")
    shown = run("simulate", "mine.py:broken", *SMALL, status=1).stderr
    assert [Path(file).name for file in re.findall(r'File "(.*?)", line', shown)] == ["mine.py"]
    note = r"\d+ frames of fpipe and torch are folded; FPIPE_TRACEBACK=full shows them"
    assert re.search(rf"KeyError: 'a key'\n{note}\n$", shown)
    shown = run("simulate", "wrong.py:f", *SMALL, status=1).stderr
    assert [Path(file).name for file in re.findall(r'File "(.*?)", line', shown)] == ["wrong.py"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("option", few([(), ("--json",)], slice(1)))
def test_a_full_disk_is_told_in_a_sentence(option):
    command = [sys.executable, "-m", "fpipe", "simulate", "1f1b", *SMALL, *option]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (1, "error: the output can't be written: No space left on device\n")


@pytest.mark.parametrize("verb", ["verify", "simulate", "draw", "export", "compare"])
def test_a_wrong_schedule_ends_with_1_and_why_on_stderr(verb, own):
    found = run(verb, "mine.py:short", *SMALL, status=1)
    said = found.stdout + found.stderr if verb == "compare" else found.stderr
    assert re.search(r"rank 0 .*Backward.*microbatch=?.?7", said.replace("\n", " "))
    if verb != "compare":
        assert found.stdout == ""


def test_a_deadlock_is_shown_with_its_waits(own):
    swapped = """
from fpipe.effects import *
def swapped(rank, plan):
    if rank == 0:
        yield from (Forward(0, 0), Recv(Gradient(0, 1, 0), 1), Backward(0, 0), Send(Activation(0, 0), 1))
    else:
        yield from (Recv(Activation(0, 0), 0), Forward(1, 0), Backward(1, 0), Send(Gradient(0, 1, 0), 0))
"""
    (own / "swapped.py").write_text(swapped)
    said = run("verify", "swapped.py:swapped", "--ranks", "2", "--microbatches", "1", status=1).stderr
    assert "rank 0" in said
    assert "rank 1" in said
    assert "wait" in said


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("simulate", "zb-h", *SMALL), "did you mean zb-h1 or zb-h2"),
        (("simulate", "nothing", *SMALL), "there are gpipe, 1f1b"),
        (("simulate", "1f1b", "--ranks", "4"), "--microbatches 8"),
        (("simulate", "1f1b", "--ranks", "0", "--microbatches", "8"), "--ranks"),
        (("simulate", "1f1b", *SMALL, "--forward", "1,x"), "'x' is no number"),
        (("simulate", "1f1b", *SMALL, "--forward", "-1"), "'-1' is no number"),
        (("simulate", "1f1b", *SMALL, "--forward", "nan"), "'nan' is no number"),
        (("simulate", "1f1b", *SMALL, "--forward", "1,2"), "forward has 2 entries, the plan 4 stages"),
        (("simulate", "1f1b", *SMALL, "--placement", "0,2"), "rank 1 has no stage"),
        (("simulate", "1f1b", *SMALL, "--placement", "circle"), "no placement"),
        (("simulate", "1f1b", *SMALL, "--placement", "0,1"), "0,1 has 2, not 4"),
        (("simulate", "gpipe", *SMALL, "--placement", "v", "--chunks", "3"), "v has 2, not 3"),
        (("simulate", "gpipe", *SMALL, "--placement", "wave", "--chunks", "3"), "an even number of them, not 3"),
        (("compare", *SMALL, "--loops", "0"), "2,4"),
        (("compare", *SMALL, "--chunks", "2", "--forward", "1,2,3,4"), "forward has 4 entries, the plan 8 stages"),
        (("search", *SMALL, "--forward", "1,2"), "forward has 2 entries, the plan 4 stages"),
        (("search", "--microbatches", "4"), "--ranks"),
        (("search", *SMALL, "--pareto", "--out", "a.csv"), "--memory-limit, not --pareto"),
        (("search", *SMALL, "--pareto", "--layouts"), "the front is that of equal stages"),
        (("search", *SMALL, "--layouts"), "give costs of at least 4 layers, one on each rank"),
        (("search", *SMALL, "--costs", "none.json"), "none.json can't be read"),
        (("simulate", "missing.py:f", *SMALL), "no file missing.py"),
        (("simulate", "mine.py", *SMALL), "eager, stuck, short, costly"),
        (("simulate", "mine.py:other", *SMALL), "no function 'other'"),
        (("simulate", "my.pyx", *SMALL), "no schedule is called 'my.pyx'"),
        (("simulate", "1f1b", *SMALL, "--communication", "0.1,0.2"), "'0.1,0.2' is no transfer: give a time as 0.1"),
        (("simulate", "1f1b", *SMALL, "--communication", "1:0"), "bandwidth (more than 0)"),
        (("simulate", "1f1b", *SMALL, "--communication", "-1"), "'-1' is no transfer"),
        (("simulate", "1f1b", *SMALL, "--communication", "0-1"), "0-1=0.1,1-0=0.2"),
        (("draw", "1f1b", *SMALL, "--scale", "1e9"), "take 3030 or less"),
        (("import", "missing.csv"), "missing.csv"),
        (("draw", "1f1b", *SMALL, "--out", "a.gif"), ".svg, .png"),
        (("draw", "1f1b", *SMALL, "--out", "missing/a.svg"), "can't be written"),
        (("verify", "1f1b", *SMALL, "--transport", "pigeon"), "rendezvous"),
        (("export", "1f1b", *SMALL, "--format", "xml"), "torch-csv"),
    ],
)
def test_a_wrong_command_ends_with_2_and_says_what_would_do(args, says, own):
    found = run(*args, status=2)
    assert found.stdout == ""
    assert says in said(found)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("1f1b", *SMALL, "--chunks", "2"), "1f1b has 1 stage on each rank, not 2"),
        (("dualpipe", "--ranks", "3", "--microbatches", "8"), "even number of ranks"),
        (("1f1b", *SMALL, "--placement", "v"), "Placement.loop(4)"),
        (("1f1b", *SMALL, "--memory-limit", "3"), "rank 0 has 4 microbatches in flight, 1 more than the limit of 3"),
    ],
)
def test_a_plan_that_a_schedule_does_not_admit_ends_with_1(args, says):
    assert says in run("simulate", *args, status=1).stderr


def test_names_are_never_read_as_markup(own):
    (own / "[red]x[bold].py").write_text(OWN)
    assert run("simulate", "[red]x[bold].py:eager", *SMALL).stdout.startswith("[red]x[bold].py:eager: 4 ranks")
    assert "[red]x[bold].py" in run("simulate", "[red]x[bold].py:other", *SMALL, status=2).stderr
    assert "[red]x[bold].py:eager" in run("compare", "[red]x[bold].py:eager", "gpipe", *SMALL).stdout


def test_a_placement_of_ones_own():
    found = told("simulate", "gpipe", "--placement", "0,1,1,0", "--microbatches", "4")
    assert (found["ranks"], found["chunks"]) == (2, 2)
    assert (
        told("simulate", "gpipe", "--placement", "v", "--ranks", "2", "--microbatches", "4")["makespan"]
        == found["makespan"]
    )
    waves = told("simulate", "gpipe", "--placement", "wave", "--ranks", "2", "--microbatches", "4")
    assert waves["chunks"] == 4
    assert (
        waves["makespan"]
        == told("simulate", "gpipe", "--placement", "0,1,1,0,0,1,1,0", "--microbatches", "4")["makespan"]
    )
    copies = told("simulate", "gpipe", "--placement", "0+1,1+0", "--microbatches", "4")
    assert (
        copies["idle"]
        == told("simulate", "gpipe", "--placement", "both-ways", "--ranks", "2", "--microbatches", "4")["idle"]
    )


def test_verify_reports_messages_and_peaks():
    found = told(
        "verify", "1f1b", "--ranks", "2", "--microbatches", "3", "--activation", "10", "--transport", "rendezvous"
    )
    assert (found["transport"], found["ordered"]) == ("rendezvous", True)
    assert found["edges"] == [
        {"from": 0, "to": 1, "messages": 3, "bytes": 30},
        {"from": 1, "to": 0, "messages": 3, "bytes": 30},
    ]
    assert found["peak_in_flight"] == [2, 1]


def test_verify_unordered(own):
    (own / "late.csv").write_text("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n")
    assert "error: " in run("verify", "late.csv", status=1).stderr
    run("verify", "late.csv", "--unordered")
    assert told("simulate", "late.csv")["microbatches"] == 2
    assert told("import", "late.csv")["ordered"] is False


@pytest.mark.parametrize("form", few(["torch-csv", "torch-csv-compute"], slice(1)))
def test_what_is_exported_comes_back(form, tmp_path):
    text = run("export", "interleaved-1f1b", *SMALL, "--format", form).stdout
    assert ("SEND" in text) == (form == "torch-csv")
    out = tmp_path / "a.csv"
    run("export", "interleaved-1f1b", *SMALL, "--format", form, "--out", out)
    assert out.read_text() == text
    assert told("export", "interleaved-1f1b", *SMALL, "--format", form)["rows"] == [
        line.split(",") for line in text.splitlines()
    ]
    found = told("import", out)
    assert (found["same_as"], found["ordered"], found["chunks"]) == (["interleaved-1f1b"], True, 2)
    here, back = (told("simulate", *args) for args in (("interleaved-1f1b", *SMALL), (out,)))
    assert {**back, "schedule": 0} == {**here, "schedule": 0}
    assert f"{out} has 4, not 5" in said(run("simulate", out, "--ranks", "5", status=2, COLUMNS="500"))


def test_import_says_what_a_file_is(tmp_path):
    out = tmp_path / "a.csv"
    run("export", "1f1b", "--ranks", "2", "--microbatches", "3", "--out", out)
    shown = run("import", out).stdout
    assert "\nPlacement.loop(2, chunks=1); the compute order of 1f1b\n" in shown


def test_compare_puts_the_fastest_first_and_says_who_cannot_run():
    found = told("compare", "--ranks", "3", "--microbatches", "8", "--communication", "0.1")
    rows = found["schedules"]
    assert rows == sorted(rows, key=lambda row: row["cost"])
    assert {row["schedule"] for row in rows} | {name.split(" ")[0] for name in found["refused"]} == set(NAMES)
    assert "even number of ranks" in found["refused"]["dualpipe"]
    assert all(sum(cause.values()) == pytest.approx(row["makespan"] - 8 * 3) for row in rows for cause in row["causes"])


@pytest.mark.parametrize(
    ("name", "option"),
    few([("interleaved-1f1b", ("--chunks", "4")), ("zb-v", ()), ("dualpipe", ()), ("gpipe", ())], slice(2)),
)
def test_simulate_and_compare_have_the_same_costs(name, option):
    """One number is for a rank's share of the model, also where other schedules cut it into more stages."""
    times = ("--communication", "0.1", "--forward", "2", "--residuals", "8KiB")
    loops = ("--loops", option[1]) if option else ()
    (compared,) = told("compare", name, *SMALL, *times, *loops)["schedules"]
    simulated = told("simulate", name, *SMALL, *option, *times)
    del simulated["lower_bound"]
    assert {key: compared[key] for key in simulated} == simulated
    shown = run("simulate", name, *SMALL, *option, *times).stdout
    said = {"zb-v": "a stage takes 1/2 of them", "interleaved-1f1b": "a stage takes 1/4 of them"}
    assert ("costs are for a rank's share of the model" in shown) == (name in said)
    assert said.get(name, "") in shown
    assert said.get(name, "") in run("verify", name, *SMALL, *option, *times).stdout


def test_costs_of_each_stage_are_taken_as_they_are():
    listed = ("--forward", "1,2,3,4,4,3,2,1", "--backward", "2,2,2,2,2,2,2,2")
    timeline = fpipe.simulate("gpipe", Plan(Placement.v(4), 8), Costs(forward=[1, 2, 3, 4, 4, 3, 2, 1], backward=2))
    assert told("simulate", "gpipe", *SMALL, "--placement", "v", *listed)["makespan"] == timeline.makespan


def test_compare_is_fair_to_cuts():
    """A microbatch takes 4 (2 + 3 + 1) through the model, wherever it is cut."""
    times = ("--forward", "2", "--backward-input", "3", "--backward-weight", "1", "--overlap", "6")
    rows = told("compare", *SMALL, *times, *QUICK)["schedules"]
    assert len(rows) > 8
    for row in rows:
        busy = row["makespan"] - row["idle"][0]
        assert busy == pytest.approx(8 * 6), row["schedule"]


def test_compare_marks_the_best_in_80_columns():
    shown = run("compare", *SMALL, "--communication", "0.1", *QUICK, COLUMNS="80").stdout
    table = shown.split("Not here")[0]
    assert "*" in table
    assert max(map(len, table.splitlines())) <= 80
    assert re.search(r"^1f1b +1 ", table, re.MULTILINE)


def test_compare_tries_what_searches_at_one_and_two_chunks():
    rows = told("compare", "zb-auto", "interleaved-zb", *SMALL, "--loops", "2,4")["schedules"]
    tried = [("interleaved-zb", 2), ("interleaved-zb", 4), ("zb-auto", 1), ("zb-auto", 2)]
    assert sorted((row["schedule"], row["chunks"]) for row in rows) == tried
    assert told("schedules")["zb-auto"]["placement"] == "any"


@pytest.mark.parametrize("verb", [("search",), ("search", "--pareto"), ("compare",)])
def test_an_effort_is_a_number_of_times(verb):
    assert "more than 0, not 0" in said(run(*verb, *SMALL, "--effort", "0", status=1))


def test_compare_keeps_the_limit():
    table = told("compare", *SMALL, "--memory-limit", "4", *QUICK)
    assert "8 microbatches in flight, 4 more than the limit" in table["refused"]["gpipe"]
    assert max(row["peak"] for row in table["schedules"]) <= 4


def test_the_json_of_search_is_that_of_simulate():
    fastest = told("search", *SMALL, "--communication", "0.1", *QUICK)
    assert list(fastest) == list(told("simulate", "1f1b", *SMALL))
    assert fastest["lower_bound"] <= fastest["cost"]
    compared = told("compare", *SMALL, "--communication", "0.1", *QUICK)["schedules"]
    assert fastest["cost"] <= min(row["cost"] for row in compared) * (1 + ROUNDING)


@thorough
def test_the_frontier_keeps_to_a_limit():
    small = ("--ranks", "2", "--microbatches", "4", "--pareto")
    rows = told("search", *small, "--memory-limit", "1.5")
    assert 0 < len(rows) < len(told("search", *small))
    assert max(peak for row in rows for peak in row["peak_in_flight"]) <= 1.5
    assert "the limit of 0.1" in run("search", *small, "--memory-limit", "0.1", status=1).stderr


@thorough
def test_search_makes_stages_of_layers(tmp_path):
    file = tmp_path / "layers.json"
    times = [1, 1, 1, 1, 1, 3]
    costs = Costs(times, times, times, residuals=2, parameters=[4, 1, 1, 1, 1, 4])
    file.write_text(json.dumps(costs.as_json()))
    job = ("search", "--layouts", "--ranks", "2", "--microbatches", "6", "--costs", file, "--loops", "1,2")
    found = told(*job)
    expected = search(Plan(Placement([0, 0, 0, 1, 1, 1]), 6), costs, layouts=True, chunks=(1, 2))
    assert (found["schedule"], found["cost"]) == (expected.name, expected.timeline.cost)
    assert (found["layers"], found["cuts"]) == ([*expected.layers], [*expected.cuts])
    assert (found["offload"], found["stage_share"], found["lower_bound"]) == (None, 1, 72)
    shown = run(*job, "--communication", "0.5").stdout
    assert re.search(r"^stage +rank +layers +forward +backward +residuals +parameters$", shown, re.MULTILINE)
    moved = told(*job, "--optimizer", "0", "--memory-limit-bytes", "30", "--offload", "0.1", "--fetch", "0.1")
    assert max(rank["total"] for rank in moved["memory"]) <= 30


TIMES = "1,2,1,1,2,3"
OF_LAYERS = ("search", "--layouts", "--ranks", "2", "--loops", "1,2", "--forward", TIMES, "--backward-input", TIMES)


@one_in(8)
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--communication", "0.5:100", "--activation", "3"),
        ("--communication", "0-1=0.25,1-0=0.5", "--lengths", "1,2,1,1,2,1"),
        ("--residuals", "2", "--parameters", "4,1,1,1,1,4", "--optimizer", "0", "--memory-limit-bytes", "30"),
        ("--residuals", "2", "--optimizer", "0", "--memory-limit-bytes", "10.5", "--offload", "0.1", "--fetch", "0.1"),
        (
            "--residuals",
            "2",
            "--optimizer",
            "0",
            "--memory-limit-bytes",
            "10.5",
            "--offload",
            "0:20",
            "--fetch",
            "1:30",
        ),
        ("--residuals", "2", "--deferred", "1", "--memory-limit", "2.5", "--trained", "2-5", "--host", "0.25"),
        ("--replicas", "2", "--parameters", "4", "--gather", "0.5:8", "--scatter", "1", "--memory-limit-bytes", "40"),
        ("--ranks", "4", "--forward", "9,1,1,1,1,1", "--backward-input", "9,1,1,1,1,1", "--memory-limit", "3"),
        ("--effort", "0.5"),
    ],
)
def test_the_command_that_a_search_of_layers_shows_gives_the_same_step(options):
    job = (*OF_LAYERS, "--microbatches", "6", *QUICK, *options)
    found = told(*job)
    (line,) = (line for line in run(*job).stdout.splitlines() if line.startswith("The same step: "))
    program, *words = shlex.split(line.removeprefix("The same step: "))
    again = told(*words)
    assert program == "fpipe"
    for name in ("schedule", "makespan", "cost", "memory"):
        assert again[name] == found[name], name


@pytest.mark.parametrize("copies", [{"offload": 0.1, "fetch": 0.1}, {"offload": fpipe.Link(0, 20), "fetch": 0.1}])
def test_the_command_moves_the_residuals_that_the_search_moved(copies):
    costs = Costs(*[[1, 2, 1, 1, 2, 3]] * 3, residuals=[1, 4, 4, 8, 4, 4], optimizer=0, **copies)
    plan, options = Plan(Placement([0, 0, 0, 1, 1, 1]), 6), {"layouts": True, "names": ["1f1b"], "chunks": (1,)}
    limit = 0.85 * search(plan, costs, **options).bytes
    found = search(plan, costs, memory_limit_bytes=limit, **options)
    assert found.offload
    again = told(*shlex.split(command(found, Memory(None, limit)).removeprefix("The same step: fpipe ")))
    assert (again["makespan"], again["cost"]) == (found.timeline.makespan, found.timeline.cost)
    assert max(rank["total"] for rank in again["memory"]) == found.bytes <= limit


def test_of_costs_that_no_option_has_no_command_is_shown(tmp_path):
    file = tmp_path / "layers.json"
    shared = Shared(1, (Residuals(0, 0), Residuals(2, 0)))
    file.write_text(json.dumps(Costs(forward=[1, 2, 1], residuals=2, shared=[shared]).as_json()))
    shown = run("search", "--layouts", "--ranks", "2", "--microbatches", "4", "--costs", file, "--loops", "1").stdout
    assert "No options have all of this: schedules.search(layouts=True) in Python" in shown


@one_in(3)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), {"forward": 2, "optimizer": 0, "communication": 0.5}),
        (("--forward", "1"), {"forward": 1, "optimizer": 0, "communication": 0.5}),
        (("--communication", "0"), {"forward": 2, "optimizer": 0}),
        (("--optimizer", "2", "--lengths", "1,3"), {"forward": 2, "communication": 0.5, "scale": [0.5, 1.5]}),
    ],
)
def test_options_that_are_given_win_over_a_file_of_costs_also_as_by_default(tmp_path, options, expected):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(Costs(forward=2, optimizer=0, communication=0.5, parameters=1).as_json()))
    plan, costs = Plan(Placement.loop(2), 2), Costs(**expected, parameters=1)
    best = search(plan, costs, chunks=(1,), memory_limit_bytes=100)
    job = ("search", "--ranks", "2", "--microbatches", "2", "--loops", "1", "--memory-limit-bytes", "100")
    found = told(*job, "--costs", file, *options)
    assert (found["cost"], found["memory"][0]["total"]) == (best.timeline.cost, best.footprint[0].total)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON: Expecting property name"),
        ("[1]", "these are no costs as of Costs.as_json"),
        ('{"forward": -1}', "forward must be a finite number of at least 0, not -1"),
        ('{"froward": 1}', "these are no costs as of Costs.as_json: "),
    ],
)
def test_the_fault_of_a_file_of_costs_is_named(tmp_path, content, message):
    file = tmp_path / "costs.json"
    file.write_text(content)
    found = said(run("search", *SMALL, "--costs", file, status=2))
    assert message in found
    assert ("is no JSON" in found) == (content == "{")


def test_the_hosts_time_of_a_piece_is_one_beside_layers():
    found = said(run("search", *SMALL, "--host", "0.1", status=2))
    assert "it is beside the time of layers: give it with --layouts" in found
    one, other = (told(*OF_LAYERS, "--microbatches", "6", *QUICK, "--host", host) for host in ("0", "0.5"))
    assert one["cost"] < other["cost"]


LONG = (
    "--ranks",
    "3",
    "--microbatches",
    "8",
    *(f"--{each}=6,1,1" for each in ("forward", "backward-input", "backward-weight")),
)


def test_a_file_has_no_copies_of_stages(tmp_path):
    search_, file = ("search", "--layouts", *LONG, "--loops", "1"), tmp_path / "found.csv"
    assert told(*search_)["placement"] == [[0, 1], [2]]
    written = told(*search_, "--out", file)
    assert written["placement"] == [[0], [1], [2]] == told(*search_, "--no-copies")["placement"]
    assert told("simulate", file)["ranks"] == 3
    assert "leave --copies out" in said(run(*search_, "--copies", "--out", file, status=2))


def test_a_search_of_equal_stages_without_copies():
    options = (
        "search",
        "--ranks",
        "2",
        "--microbatches",
        "4",
        "--backward-input",
        "2",
        "--overlap",
        "3",
        "--loops",
        "1",
        *QUICK,
    )
    assert [told(*options, *no)["schedule"] == "dualpipe" for no in ((), ("--no-copies",))] == [True, False]
    with_copies, without = (told(*options, "--pareto", *no) for no in ((), ("--no-copies",)))
    assert "dualpipe" in {each["schedule"] for each in with_copies} - {each["schedule"] for each in without}


def test_layers_fewer_than_ranks_have_copies():
    options = ("search", "--layouts", "--ranks", "3", "--forward", "6,1", "--loops", "1", "--microbatches")
    assert told(*options, "8")["placement"] == [[0, 1], [2]]
    for wrong in (("7",), ("8", "--no-copies")):
        assert "or of two or more, if one stage may have copies" in said(run(*options, *wrong, status=2))


@pytest.mark.parametrize("verb", ["simulate", "draw"])
def test_costs_that_are_listed_are_no_shares(verb):
    listed = [f"--{each}=2,1" for each in ("forward", "backward-input", "backward-weight")]
    job = (verb, "1f1b", "--placement", "0+1,2", "--microbatches", "4")
    assert "a stage takes 3/2 of them" in run(*job, *listed[:2]).stdout
    assert "of them" not in run(*job, *listed).stdout


def test_layers_are_no_stages_of_a_rank():
    found = said(run(*OF_LAYERS, "--microbatches", "4", "--chunks", "2", status=2))
    assert "with --layouts costs are those of layers" in found
    assert "--loops has the numbers of stages on a rank to try" in found


def test_search_tries_the_chunks_asked_for():
    small = ("--ranks", "2", "--microbatches", "4", *QUICK)
    assert told("search", *small, "--loops", "1", "--memory-limit", "2")["chunks"] <= 2
    assert "more than 0" in run("search", *small, "--memory-limit", "0", status=1).stderr
    assert "the least is 1" in said(run("search", *small, "--memory-limit", "0.5", status=1))


@pytest.mark.parametrize("verb", ["verify", "simulate", "draw", "export"])
def test_every_verb_keeps_to_a_limit(verb):
    assert "4 microbatches in flight, 1 more" in run(verb, "1f1b", *SMALL, "--memory-limit", "3", status=1).stderr


@thorough
def test_what_was_found_runs_like_any_other(tmp_path):
    out = tmp_path / "found.csv"
    found = told("search", *SMALL, "--memory-limit", "4", "--out", out)
    assert max(found["peak_in_flight"]) <= 4
    assert (found["chunks"], found["stage_share"]) == (2, 0.5)
    assert told("simulate", out)["cost"] == pytest.approx(found["cost"])


def test_the_frontier_trades_time_for_memory():
    front = ("search", "--ranks", "2", "--microbatches", "4", "--pareto", "--loops", "1,2", *QUICK)
    assert "bound: no schedule in as much memory costs less" in run(*front).stdout
    rows = told(*front)
    assert len(rows) > 1
    assert [row["cost"] for row in rows] == sorted((row["cost"] for row in rows), reverse=True)


@thorough
def test_nothing_imports_torch_and_only_a_file_matplotlib(tmp_path):
    verbs = [verb for verb in VERBS if verb != "env"]  # which describes torch
    chosen = [line for verb in verbs for line in (examples(verb)[:1] if verb == "search" else examples(verb))]
    commands = [example.split()[1:] for example in chosen if not example.endswith(".svg")]
    code = f"""if True:
        import sys
        from fpipe.cli import app
        for args in {commands}:
            app([*args, "--json"], standalone_mode=False)
            print(*args, *sys.modules.keys() & {{"torch", "matplotlib", "rich"}}, file=sys.stderr)
    """
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), FOLDER: os.environ[FOLDER]},
    )
    assert ended.returncode == 0, ended.stderr
    said = [line for line in ended.stderr.splitlines() if not line.startswith("copied to ")]
    assert said == [" ".join(command) for command in commands]


def test_the_version():
    assert run("--version").stdout == f"fpipe {fpipe.__version__}\n"
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", fpipe.__version__)
    assert version("fpipe") == fpipe.__version__


def test_explain_names_the_rank_that_others_wait_for(tmp_path):
    found = told("explain", "--last", 5)
    assert (found["cause"], found["at"], found["chains"]) == ("computes", [1], {"0": [0, 1]})
    assert [each["kind"] for each in found["ranks"][0]["records"]] == ["step", "wait"]
    assert found["ranks"][0]["records"][1]["peer"] == 1
    shown = run("explain").stdout
    assert f"Rank 1 (process {os.getpid()} on {socket.gethostname()}) is at work" in " ".join(shown.split())
    assert "Rank 0 has waited since" in shown
    assert "there is no flight in" in run("explain", tmp_path, status=1).stderr
    assert told("explain", found["flight"])["flight"] == found["flight"]


def test_a_flight_is_copied_into_the_folder_of_a_run(tmp_path):
    found = run("explain", "--logdir", tmp_path / "mine", "--json")
    (place,) = (tmp_path / "mine" / "flights").iterdir()
    assert f"copied to {place}" in found.stderr
    copied, now = told("explain", tmp_path / "mine" / "flights"), json.loads(found.stdout)
    assert copied["flight"] == str(place)
    assert (copied["cause"], copied["at"]) == (now["cause"], now["at"])
    (tmp_path / "file").touch()
    refused = run("explain", "--logdir", tmp_path / "file", status=2).stderr
    assert "can't be written" in re.sub(r"[\s│]+", " ", refused)


def test_names_with_brackets_are_shown_as_they_are(tmp_path):
    """rich takes brackets for markup."""
    (tmp_path / "flight").mkdir()
    about = {"process": 0, "name": "rank [/b]", "processes": 1}
    recording.Recording(tmp_path / "flight" / "000000.flight", about).writer("effect", "Forward[/b]")()
    shown = run("explain", tmp_path / "flight", "--last", 1).stdout
    assert shown.count("rank [/b]") == 2
    assert shown.count("Forward[/b]") == 3

    folder = tmp_path / "shm" / "fpipe-0" / "run"
    folder.mkdir(parents=True)
    slot = Slot(folder / "000000.0", 0)
    slot.lay_out(json.dumps({"checkpoints": "runs[lr=0.1]", "job": "[/b]"}).encode(), 16, 0)
    slot.commit(1, 3, b"{}", 0)
    listed = run("checkpoint", "memory", "--shared", tmp_path / "shm").stdout
    assert " runs[lr=0.1] " in listed
    assert " [/b] " in listed


def test_env_describes_the_machine(monkeypatch):
    shown = {"OMP_NUM_THREADS": "1", "LOCAL_RANK": "0", "MASTER_PORT": "29500", "TORCHINDUCTOR_MAX_AUTOTUNE": "1"}
    names = (
        "TORCH_TOKEN",
        "LOCAL_DB_PASS",
        "MASTER_PASS",
        "LOCAL_DSN",
        "NCCL_PWD",
        "TORCH_aws_cred",
        "FPIPE_AUTH",
        "SHELL",
    )
    for name, value in (shown | dict.fromkeys(names, "hunter2")).items():
        monkeypatch.setenv(name, value)
    described = told("env")
    assert described["fpipe"] == fpipe.__version__
    assert described["packages"]["torch"] == version("torch")
    assert described["torch"]["backends"][0] == "gloo"
    assert shown.items() <= described["environment"].items()
    printed = run("env").stdout
    assert f"\n  torch: {version('torch')}\n" in printed
    assert "hunter2" not in printed + json.dumps(described)


def test_env_counts_cores_where_there_is_no_affinity(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert told("env")["cores"] == {"all": os.cpu_count(), "usable": os.cpu_count()}


def test_env_reports_a_broken_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert told("env")["torch"]["error"].startswith("it can't be imported: ModuleNotFoundError")


def end(*args, stdout=subprocess.PIPE, **options):
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "fpipe", *args]
    return subprocess.run(command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, **options)


@thorough
def test_a_closed_stdout_is_no_error_to_show():
    read, write = os.pipe()
    os.close(read)
    ended = end("schedules", stdout=write)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (1, "")
    ended = end("schedules", preexec_fn=lambda: os.close(1))
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_terminal_with_ascii_alone():
    small = ("--ranks", "2", "--microbatches", "2")
    times = ("--seconds", "--forward", "1e-5", "--backward", "1e-5")
    ended = end("simulate", "1f1b", *small, *times, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "makespan 60 us" in ended.stdout
    ended = end("simulate", "\N{GREEK SMALL LETTER ALPHA}", *small, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert ended.returncode == 2
    assert "no schedule is called '?'" in ended.stderr


def test_the_list_of_schedules_is_whole_in_40_columns():
    shown = run("schedules", COLUMNS="40").stdout
    row = re.compile(r"(\S+) +(any|chain|loop|V|both ways|vocabulary) ")
    assert [found[1] for line in shown.splitlines() if (found := row.match(line))] == NAMES


@pytest.mark.parametrize(
    "args",
    [
        ("simulate", "gpipe", "--ranks", "1000000", "--microbatches", "8"),
        ("draw", "zb-v", "--ranks", "1000000000", "--microbatches", "1"),
        ("verify", "gpipe", "--placement", "0,1", "--microbatches", "100000000"),
        ("simulate", "mine.py:eager", "--placement", "0+1,1+0", "--microbatches", "100000000"),
        ("simulate", "dualpipe", "--placement", "both-ways", "--ranks", "1000000", "--microbatches", "8"),
        ("compare", "--ranks", "1000000", "--microbatches", "8"),
        ("search", "--ranks", "4000000000000", "--microbatches", "8"),
        ("export", "mine.py:eager", "--ranks", "1000000", "--microbatches", "8"),
    ],
)
def test_what_takes_very_long_is_refused_with_an_estimate(args, own):
    assert re.search(r"take about \S+ minutes and \S+ .iB .* --any-size", said(run(*args, status=2)))


def test_the_copies_of_a_stage_share_its_forwards():
    for schedule in ("dualpipe", "1f1b"):
        args = ("simulate", schedule, "--ranks", "128", "--microbatches", "200000")
        assert "25600000 forwards (128 stages, 200000 microbatches)" in said(run(*args, status=2))


def test_the_limit_of_sizes_is_lifted(monkeypatch):
    monkeypatch.setattr("fpipe.cli.options.LARGE", 10)
    run("simulate", "gpipe", *SMALL, status=2)
    assert told("simulate", "gpipe", *SMALL, "--any-size")["ranks"] == 4
    listed = ("simulate", "gpipe", "--placement", "0,1", "--microbatches", "6")
    run(*listed, status=2)
    assert told(*listed, "--any-size")["ranks"] == 2
    assert told("compare", "gpipe", *SMALL, "--any-size")["schedules"][0]["ranks"] == 4
    search = (*OF_LAYERS, "--microbatches", "6", *QUICK, "--any-size")
    (line,) = (line for line in run(*search).stdout.splitlines() if line.startswith("The same step: "))
    assert told(*shlex.split(line)[4:])["cost"] == told(*search)["cost"]


def test_as_a_module():
    shown = subprocess.run(
        [sys.executable, "-m", "fpipe", "schedules"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert shown.stdout.startswith("name ")
    assert shown.stderr == ""


def test_schedules_lists_the_catalogue():
    catalogue = told("schedules")
    assert list(catalogue) == NAMES
    assert [name for name, entry in catalogue.items() if entry["takes_copies"]] == ["gpipe", "1f1b", "zb-auto"]
    assert (catalogue["1f1b"]["peak"], catalogue["1f1b"]["peak_holds"]) == ("p", "no stage has copies")


@pytest.mark.parametrize("name", NAMES)
def test_the_catalogue_makes_plans_and_schedules_that_are_right(name):
    plan = CATALOGUE[name].plan(4, 12)
    schedule = CATALOGUE[name].schedule(plan)
    assert len(verify(schedule, plan).effects) == 4


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"zb-auto", "v-auto", "vocabulary-1f1b"}))
@pytest.mark.parametrize(("p", "m"), few([(2, 8), (4, 16), (6, 24)], [(4, 16)]))
def test_the_peaks_of_the_catalogue(name, p, m):
    entry = CATALOGUE[name]
    plan = entry.plan(p, m)
    peak = max(shares(fpipe.simulate(entry.schedule(plan), plan)))
    assert peak == eval(entry.peak, {"p": p, "v": entry.chunks, "m": m, "s": entry.slices})


@pytest.mark.parametrize("name", [name for name in NAMES if CATALOGUE[name].cost])
@pytest.mark.parametrize(("times", "c"), [((1, 1, 1), 0), ((2, 2, 1), 0), ((2, 2, 1), 0.25)])
def test_the_costs_of_the_catalogue(name, times, c):
    """Where they hold. Closed forms are tested over their whole domains beside each schedule."""
    entry = CATALOGUE[name]
    if ("F = B = W" in entry.holds and times != (1, 1, 1)) or ("c = 0" in entry.holds and c):
        return
    p, m = 4, 16
    plan = entry.plan(p, m)
    costs = of_slice(of_shares(Costs(*times, communication=c), plan), plan.slices)
    terms = {"p": p, "m": m, "v": entry.chunks, "s": plan.slices, "k": m, "c": c, "S": sum(times)}
    terms |= dict(zip("FBW", times, strict=True))
    assert fpipe.simulate(entry.schedule(plan, costs), plan, costs).cost == pytest.approx(eval(entry.cost, terms))


def test_one_number_is_for_a_ranks_share_where_the_vocabulary_is_split():
    """A third of it is its part of the output layer, whose forward does the work of its input gradient."""
    small = ("--ranks", "2", "--microbatches", "8")
    found = told("simulate", "vocabulary-1f1b", *small, "--forward", "3", "--backward-input", "6", "--update", "1.5")
    costs = Costs([0, 0, 2, 2, 3, 3, 0], [0, 0, 4, 4, 0, 0, 0], [0, 0, 2 / 3, 2 / 3, 1 / 3, 1 / 3, 0])
    plan = Plan(Placement.vocabulary(2), 8, Edges.vocabulary(2))
    costs = replace(costs, update=[0, 0, 1, 1, 0.5, 0.5, 0])
    expected = fpipe.simulate(schedules.updating(schedules.vocabulary_1f1b), plan, costs)
    assert found["cost"] == pytest.approx(expected.cost)
    assert found["stage_share"] == pytest.approx([0, 0, 2 / 3, 2 / 3, 1 / 3, 1 / 3, 0])
    shown = run("simulate", "vocabulary-1f1b", *small, COLUMNS="200").stdout
    assert "a block takes 2/3 of them, and a part of the output layer 1/3" in shown
    listed = ",".join(map(str, costs.forward))
    assert told("simulate", "vocabulary-1f1b", *small, "--forward", listed)["cost"] < found["cost"]


def test_other_schedules_have_no_stages_for_a_vocabulary_that_is_split():
    small = ("--ranks", "2", "--microbatches", "8")
    shown = run("compare", "vocabulary-1f1b", *small, status=1).stdout
    assert "with costs of its own, one a stage" in " ".join(shown.split())
    plan = Plan(Placement.vocabulary(2), 4, Edges.vocabulary(2))
    costs = of_shares(Costs(), plan)
    with pytest.raises(ScheduleError, match="not equal parts of a chain of layers"):
        search(Plan(Placement.loop(2), 4), names=["vocabulary-1f1b"])
    found = search(plan, costs, names=["vocabulary-1f1b"], recut=False)
    assert found.timeline.cost == fpipe.simulate("vocabulary-1f1b", plan, costs).cost >= found.lower_bound


@pytest.mark.parametrize("into", [1, 2, 3, 4, 6, 8, 12])
def test_a_recut_model_takes_as_long(into):
    costs = recut(Costs(forward=[1, 2, 3, 6], residuals=4, activation=[5, 6, 7, 8]), 4, into)
    assert costs.check(Plan(Placement.loop(into), 1)) is None
    assert sum(costs.forward) == pytest.approx(12)
    assert costs.residuals * into == 16
    assert costs.activation[-1] == 8
    assert costs.backward is None


SHARDED = ("--ranks", "2", "--microbatches", "4", "--replicas", "2", "--parameters", "8GiB", "--residuals", "1GiB")


def test_replicas_and_shards_are_the_librarys():
    plan = Plan(Placement.loop(2, 2), 4, replicas=2)
    costs = recut(Costs(parameters=8 * 2**30, residuals=2**30, gather=fpipe.Link(0.5, 16e9)), plan.ranks, plan.stages)
    costs = replace(costs, scatter=[0.1, 0.2, 0.3, 0.4])
    args = ("looped-bfs", *SHARDED, "--chunks", "2", "--resident", "1")
    found = told("simulate", *args, "--gather", "0.5:16e9", "--scatter", "0.1,0.2,0.3,0.4")
    timeline = fpipe.simulate(fpipe.schedules.looped_bfs, plan, costs, resident=1)
    assert found["makespan"] == timeline.makespan
    assert (found["replicas"], found["resident"]) == (2, 1)
    accounts = footprint(fpipe.lower(fpipe.schedules.looped_bfs, plan, resident=1), costs)
    assert [rank["total"] for rank in found["memory"]] == [account.total for account in accounts]
    in_bytes = told("simulate", *args[:-1], "4GiB", "--gather", "0.5:16e9", "--scatter", "0.1,0.2,0.3,0.4")
    assert in_bytes == found | {"resident": f"{4 * 2**30} B"}  # a stage has 4 GiB
    assert "rank 0 yields Forward(stage=0" in run("simulate", *args[:-1], "3GiB", status=1).stderr
    assert "give --parameters" in run("simulate", "gpipe", *SMALL, "--resident", "3GiB", status=2).stderr
    assert "neither a number of stages" in run("simulate", "gpipe", *SMALL, "--resident", "1.5", status=2).stderr
    verified = told("verify", *args)
    assert verified["peak_resident"] == [1, 1]
    assert verified["memory"] == found["memory"]
    shown = run("verify", *args).stdout
    assert "resident" in shown
    assert "2 replicas" in shown
    assert re.search(r"rank +parameters +optimizer +gradients +live +in all", shown)
    assert "resident" not in run("verify", "gpipe", *SMALL).stdout


@pytest.mark.parametrize("verb", few(["verify", "search", "compare", "simulate", "draw"], slice(3)))
def test_every_verb_keeps_to_a_limit_in_bytes(verb):
    name = () if verb in ("search", "compare") else ("gpipe",)
    loops = ("--loops", "1") if verb == "search" else ()
    run(verb, *name, *SHARDED, "--memory-limit-bytes", "64GiB", *loops)
    found = run(verb, *name, *SHARDED, "--memory-limit-bytes", "5e9", *loops, status=1)
    assert "4.657 GiB" in found.output + found.stderr


def test_search_says_how_to_lay_out_a_model():
    links = ("--loops", "2", "--gather", "0:100e9", "--scatter", "0:100e9", *QUICK)
    found = told("search", *SHARDED, *links, "--memory-limit-bytes", "32GiB")
    assert found["resident"] >= 1
    assert max(rank["total"] for rank in found["memory"]) <= 32 * 2**30
    shown = run("search", *SHARDED, "--loops", "1", "--memory-limit-bytes", "32GiB", *QUICK).stdout
    assert "resident: stages whose sharded parameters are whole on a rank at a time" in shown
    front = told("search", *SHARDED, "--pareto", "--loops", "1", *QUICK)
    totals = [max(rank["total"] for rank in each["memory"]) for each in front]
    assert totals == sorted(totals)


def test_shards_are_exported_and_come_back(tmp_path):
    file = tmp_path / "shards.csv"
    run("export", "looped-bfs", *SHARDED, "--chunks", "2", "--resident", "1", "--out", file)
    assert "0UNSHARD" in file.read_text()
    again = told("verify", file, "--replicas", "2", "--unordered")
    assert again["peak_resident"] == [1, 1]
    assert told("verify", file, "--unordered")["peak_resident"] == [0, 0]
    assert "2 replicas" in " ".join(run("import", file, "--replicas", "2").stdout.split())


@pytest.mark.parametrize(
    ("text", "size"), [("8e9", 8e9), ("80GiB", 80 * 2**30), ("1.5 MB", 1.5e6), ("2kib", 2048), ("7", 7)]
)
def test_sizes_have_units(text, size):
    found = told("simulate", "gpipe", *SMALL, "--parameters", text, "--optimizer", "0")
    assert {rank["parameters"] for rank in found["memory"]} == {size}


@pytest.mark.parametrize("text", ["80GiBB", "GiB", "-1GiB", "1,x"])
def test_sizes_that_are_none_are_refused(text):
    assert "give one as 8e9 or 80GiB" in said(run("simulate", "gpipe", *SMALL, f"--parameters={text}", status=2))


WORLD = ("search", "--world", "4", "--machine", "a100", "--rows", "1", "--schedules", "1f1b,zb-v", "--loops", "1")


def test_search_ranks_the_strategies_of_a_world():
    rows = told(*WORLD, "--model", "gpt2", "--batch", "16", "--top", "3", "--memory-limit-bytes", "16GiB")
    assert [math.prod(row[name] for name in ("pp", "dp", "tp", "cp", "ep")) for row in rows] == [4, 4, 4]
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(16 * 1024 / row["step"])
        assert row["bytes"] == max(rank["total"] for rank in row["memory"]) < 16 * 2**30
        assert sum(row["layers"]) == 12
    shape = ("--layers", "12", "--hidden", "768", "--heads", "12", "--vocabulary", "50257", "--sequence", "512")
    experts = ("--experts", "4", "--experts-per-token", "2", "--ep", "2")
    shown = run(*WORLD, *shape, *experts, "--batch-tokens", "8192", "--peak", "100e12", "--inside", "1e-6:1e12").stdout
    assert re.search(r"^pp +dp +tp +cp +ep +schedule +v +resident +rows +remat +step +tokens/s +MFU", shown)
    assert len(re.findall(r"^ *\d+ +\d+ +1 +\d+ +2 +(?:1f1b|zb-v) ", shown, re.MULTILINE)) == 3
    noted = run(*WORLD, "--model", "gpt2", "--memory-limit-bytes", "1MiB", status=1).stderr
    assert "no strategy keeps to 1 MiB on a rank: the least reached is" in " ".join(noted.split())


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("--model", "gpt5"), "'gpt5' is not one of gpt2, llama-8b"),
        (("--hidden", "8"), "a model without a name needs --layers, --heads, --vocabulary, --sequence"),
        (("--model", "gpt2", "--batch-tokens", "1500"), "no whole number of sequences of 1024: take 1024"),
        (("--model", "gpt2", "--ranks", "4", "--forward", "2", "--pareto"), "--pareto, --ranks, --forward"),
        (("--model", "gpt2", "--inside", "1"), "is no link: give seconds of latency and bytes a second"),
    ],
)
def test_options_of_a_world_are_checked(args, error):
    assert error in said(run(*WORLD, *args, status=2))
