"""The flight recorder: what is recorded is read again, outlives its process, and names the rank where a fault began."""

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from fpipe import Placement, Plan, ScheduleError, lower, verify
from fpipe.flight import recording
from fpipe.flight.explanation import explain
from fpipe.flight.format import AT_ABOUT, AT_RECORDS, BYTES, CAPACITY, TEXT
from fpipe.flight.programs import read_program
from fpipe.flight.reading import Entry, Rank, read, read_rank
from fpipe.programs.program import Program
from fpipe.schedules import one_f_one_b
from fpipe.tables import TABLE
from fpipe.tensorboard.files.plans import Plans
from tests import test_own_effects as own_effects
from tests.support.programs import circle

ABOUT = {"process": 3, "name": "rank 1 of replica 1", "processes": 4}
NOW = 1_800_000_000 * 10**9
MS = 10**6


@pytest.fixture
def recorder(tmp_path):
    return recording.Recording(tmp_path / "000003.flight", ABOUT)


def test_records_are_read_in_order(recorder):
    recorder.begin(7)
    recorder.writer("effect", "Forward(stage=0, microbatch=1)")()
    arrived = recorder.waits("waiting for a", 2)
    recorder.arrived(arrived)
    recorder.waits("waiting for all", None)
    recorder.end()
    rank = read_rank(recorder.path)
    assert [(e.kind, e.step, e.peer, e.text, e.end is None) for e in rank.entries] == [
        ("step", 7, None, "", True),
        ("effect", 7, None, "Forward(stage=0, microbatch=1)", True),
        ("wait", 7, 2, "waiting for a", False),
        ("wait", 7, None, "waiting for all", True),
        ("end", 7, None, "", True),
    ]
    times = [entry.begin for entry in rank.entries]
    assert times == sorted(times)
    assert (rank.process, rank.name, rank.processes, rank.host, rank.pid) == (
        *ABOUT.values(),
        socket.gethostname(),
        os.getpid(),
    )
    assert (rank.state, rank.outcome) == ("runs", "open")


def test_the_last_records_stay(recorder):
    write = [recorder.writer("effect", f"effect {i}") for i in range(CAPACITY + 5)]
    for each in write:
        each()
    assert [entry.text for entry in read_rank(recorder.path).entries] == [f"effect {i + 5}" for i in range(CAPACITY)]
    assert recorder.path.stat().st_size == BYTES


def test_a_long_text_is_cut_between_characters(recorder):
    recorder.writer("effect", "ü" * TEXT)()
    assert read_rank(recorder.path).entries[0].text == "ü" * (TEXT // 2)


def test_after_a_failure_nothing_is_recorded_until_the_ranks_go_on(recorder):
    place = recorder.waits("waiting for a", 0)
    recorder.conclude("failed", "rank 1: KeyError: 'w'")
    recorder.arrived(place)
    recorder.conclude("lost", "another")
    recorder.end()
    rank = read_rank(recorder.path)
    assert (rank.outcome, rank.reason, rank.wait.text) == ("failed", "rank 1: KeyError: 'w'", "waiting for a")
    recorder.recover()
    recorder.end()
    rank = read_rank(recorder.path)
    assert (rank.outcome, rank.reason, rank.entries[-1].kind) == ("open", "", "end")


@pytest.mark.parametrize("content", [b"", b"fpipe 1\0", b"another file" * 20_000, b"fpipe 1\0" + bytes(BYTES)])
def test_what_is_no_recording_is_left_out(tmp_path, recorder, content):
    (tmp_path / "000000.flight").write_bytes(content)
    assert [rank.process for rank in read(tmp_path)] == [3]


def test_every_damaged_byte_of_the_header_is_survived(recorder):
    recorder.begin(1)
    content = recorder.path.read_bytes()
    damaged = recorder.path.with_name("damaged.flight")
    for at in (*range(0, 64, 3), *range(544, 700, 5)):
        damaged.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
        rank = read_rank(damaged)
        assert rank is None or explain([rank]).text


@pytest.mark.parametrize(
    "about",
    [
        b"[" * 1500,
        b'{"process": Infinity, "name": "a", "processes": 2, "host": "a", "pid": 1, "began": 1}',
        b'{"process": 0, "name": "a", "processes": 1000000000000, "host": "a", "pid": 1, "began": 1}',
        b'{"process": 2, "name": "a", "processes": 2, "host": "a", "pid": 1, "began": 1}',
    ],
)
def test_a_file_that_says_nonsense_of_its_process_is_left_out(tmp_path, recorder, about):
    content = recorder.path.read_bytes()
    (tmp_path / "0.flight").write_bytes(
        content[:AT_ABOUT] + about.ljust(AT_RECORDS - AT_ABOUT, b"\0") + content[AT_RECORDS:]
    )
    assert [rank.process for rank in read(tmp_path)] == [3]


def test_what_is_no_file_is_not_waited_for(tmp_path, recorder):
    os.mkfifo(tmp_path / "0.flight")
    (tmp_path / "1.flight").symlink_to("/dev/zero")
    assert [rank.process for rank in read(tmp_path)] == [3]


def test_a_damaged_text_does_not_control_the_terminal(tmp_path):
    name = "rank \x1b[31m1\x07"
    recorder = recording.Recording(tmp_path / "000003.flight", ABOUT | {"name": name})
    recorder.writer("effect", name)()
    recorder.conclude("failed", f"{name}: KeyError\n    at line 3")
    rank = read_rank(recorder.path)
    assert (rank.name, rank.entries[0].text, rank.reason) == (
        "rank ?[31m1?",
        "rank ?[31m1?",
        "rank ?[31m1?: KeyError\n    at line 3",
    )


def test_the_files_of_ranks_that_ended_well_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setenv("FPIPE_FLIGHTS", str(tmp_path))
    ranks = [recording.record("flight", {**ABOUT, "process": process}) for process in range(3)]
    assert (tmp_path / "flight").stat().st_mode & 0o777 == 0o700
    ranks[0].close()
    ranks[1].conclude("lost", "rank 1 lost rank 2")
    ranks[2].close()
    ranks[1].close()
    assert [rank.outcome for rank in read(tmp_path / "flight")] == ["ended", "lost", "ended"]
    ranks[1].recover()
    ranks[1].close()
    assert not list(tmp_path.iterdir())


def test_flights_of_the_living_are_kept_and_the_oldest_others_go(tmp_path, monkeypatch):
    monkeypatch.setenv("FPIPE_FLIGHTS", str(tmp_path))
    monkeypatch.setattr(recording, "KEPT", 2)
    living = recording.record("0", ABOUT)
    for name in "1234":
        (tmp_path / name).mkdir()
        (tmp_path / name / "000000.flight").write_bytes(b"of a process that is gone")
    recording.record("5", ABOUT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "3", "4", "5"]
    assert living.path.exists()


def test_what_is_no_flight_stays(tmp_path, monkeypatch):
    """The folder may be one that has other things too."""
    monkeypatch.setenv("FPIPE_FLIGHTS", str(tmp_path))
    monkeypatch.setattr(recording, "KEPT", 1)
    (tmp_path / "0").mkdir()
    for name in ("experiment", "half a flight", "flight"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "000000.flight").touch()
    (tmp_path / "experiment" / "000000.flight").rename(tmp_path / "experiment" / "weights.pt")
    (tmp_path / "half a flight" / "notes").touch()
    (tmp_path / "link").symlink_to(tmp_path / "flight")
    recording.record("last", ABOUT)
    recording.record("one more", ABOUT)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["0", "experiment", "half a flight", "last", "link", "one more"]


def test_a_folder_that_can_not_be_written_is_a_warning(monkeypatch, caplog):
    monkeypatch.setenv("FPIPE_FLIGHTS", "/proc/none")
    assert recording.record("flight", ABOUT) is None
    assert "FPIPE_FLIGHTS" in caplog.text


DIES = """
import os, sys
from pathlib import Path
from fpipe.flight.recording import Recording
recorder = Recording(Path(sys.argv[1]), {"process": 0, "name": "rank 0", "processes": 1})
recorder.begin(4)
recorder.writer("effect", "Forward(stage=2, microbatch=1)")()
os.kill(os.getpid(), int(sys.argv[2]))
"""


def test_a_killed_process_leaves_its_records(tmp_path):
    path = tmp_path / "000000.flight"
    done = subprocess.run([sys.executable, "-c", DIES, path, str(int(signal.SIGKILL))], check=False)
    assert done.returncode == -signal.SIGKILL
    rank = read_rank(path)
    assert (rank.state, rank.outcome, rank.entries[-1].text) == ("gone", "open", "Forward(stage=2, microbatch=1)")
    explanation = explain([rank])
    assert (explanation.kind, explanation.ranks) == ("gone", [0])
    assert "is gone and left no reason" in explanation.text
    assert "Forward(stage=2, microbatch=1), of step 4" in explanation.text


# Explanations


def entry(kind, text="", ms=0.0, peer=None, step=5, end=None):
    return Entry(int(NOW - ms * MS), end, step, peer, kind, text)


def rank(process, *entries, state="runs", outcome="open", reason="", concluded=0, seen=NOW):
    about = {"process": process, "name": f"rank {process}", "processes": 4, "host": "a", "pid": 100 + process}
    return Rank(**about, state=state, seen=seen, entries=entries, outcome=outcome, concluded=concluded, reason=reason)


def waits(process, peer, **options):
    return rank(process, entry("wait", f"waiting for it from rank {peer}", ms=900, peer=peer), **options)


FORWARD = entry("effect", "Forward(stage=1, microbatch=2)", ms=1000)
ENDED = entry("end", ms=2000)
CAUSES = {
    "killed": ([waits(0, 1), rank(1, FORWARD, state="gone"), waits(2, 0)], "gone", [1]),
    "killed with its neighbours": ([waits(0, 1, state="gone"), rank(1, FORWARD, state="gone")], "gone", [1]),
    "killed first": (
        [rank(0, FORWARD, state="gone", seen=NOW - 5), rank(1, FORWARD, state="gone", seen=NOW - 9)],
        "gone",
        [1],
    ),
    "stopped": ([waits(0, 2), waits(1, 0), rank(2, FORWARD, state="stopped")], "stopped", [2]),
    "silent": ([waits(0, 1), rank(1, FORWARD, state="silent", seen=NOW - 60 * 10**9)], "silent", [1]),
    "raised": (
        [
            waits(0, 1, outcome="lost", concluded=NOW + 5, reason="a peer can't"),
            rank(1, FORWARD, outcome="failed", concluded=NOW, reason="rank 1: KeyError: 'w'", state="gone"),
        ],
        "failed",
        [1],
    ),
    "slow": ([waits(0, 1), rank(1, FORWARD), waits(2, 0), rank(3, FORWARD._replace(begin=NOW))], "computes", [1]),
    "elsewhere": ([waits(0, 1), rank(1, ENDED), rank(2, entry("wait", "beginning a step", ms=3))], "outside", [1]),
    "left": ([waits(0, 1, outcome="lost", concluded=NOW), rank(1, ENDED, outcome="ended")], "outside", [1]),
    "a circle": ([waits(0, 1), waits(1, 2), waits(2, 1)], "deadlock", [1, 2]),
    "a lost message": ([rank(0, entry("wait", "waiting for the loss")), waits(1, 0)], "lost", [0, 1]),
    "lost peers alone": ([waits(0, 3, outcome="lost", concluded=NOW, reason="rank 0 lost rank 3")], "failed", [0]),
    "well": ([rank(0, ENDED), rank(1, ENDED)], "ended", []),
    "new": ([rank(0), rank(1)], "ended", []),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_is_found(name):
    ranks, kind, at = CAUSES[name]
    explanation = explain(ranks, NOW)
    assert (explanation.kind, list(explanation.ranks)) == (kind, at)
    for process in at[:1] if kind not in ("lost", "deadlock") else ():
        assert explanation.text.startswith(f"Rank {process} (process {100 + process} on a) ")


def flown(tmp_path, schedule, effects=TABLE, before=(1, 1)):
    """The ranks of a flight whose programs are of a schedule: each in its first effect, and waiting for the other.

    Each keeps so many programs of other steps `before`.
    """
    for process, program in lower(schedule, Plan(Placement.loop(2), 2), effects=effects).items():
        about = {"process": process, "name": f"rank {process}", "processes": 2}
        recorder = recording.Recording(tmp_path / f"{process:06}.flight", about)
        others = [recorder.program(Program(program.plan, process, ())) for _ in range(before[process])]
        assert others == [*range(before[process])]
        recorder.begin(1)
        recorder.writer("effect", "Forward", recorder.program(program))()
        recorder.waits("waiting for it", 1 - process)
    return read(tmp_path)


def test_ranks_that_wait_for_each_other_have_the_verifiers_explanation(tmp_path):
    with pytest.raises(ScheduleError) as refused:
        verify(circle, Plan(Placement.loop(2), 2))
    assert (
        f"wait for each other. The verifier says of their programs: {refused.value}. "
        in explain(flown(tmp_path, circle)).text
    )


def test_a_circle_that_is_not_in_the_programs_is_a_lost_message(tmp_path):
    ranks = flown(tmp_path, one_f_one_b)
    assert "Their programs have no such circle, so a message between them was lost." in explain(ranks).text
    assert "programs" not in explain([ranks[0], replace(ranks[1], file=None)]).text
    file = ranks[0].file
    file.write_bytes(file.read_bytes()[:-20])
    assert "programs" not in explain(read(tmp_path)).text


@pytest.mark.parametrize("before", [(1, 0), (0, 1), (2, 1)])
def test_programs_that_ranks_number_differently_are_not_judged(tmp_path, before):
    """A rank did not keep one of them: its program of that number is another one."""
    text = explain(flown(tmp_path, circle, before=before)).text
    assert "wait for each other." in text
    assert "programs" not in text


def test_programs_with_effects_of_ones_own_are_not_judged(tmp_path):
    ranks = flown(tmp_path, own_effects.loading, own_effects.EFFECTS)
    assert "wait for each other." in explain(ranks).text
    assert "programs" not in explain(ranks).text


def test_programs_are_kept_while_there_is_room(recorder, monkeypatch):
    program = lower(one_f_one_b, Plan(Placement.loop(2), 2))[0]
    monkeypatch.setattr(recording, "MOST_EFFECTS", len(program) - 1)
    assert recorder.program(program) is None
    monkeypatch.setattr(recording, "MOST_EFFECTS", len(program))
    monkeypatch.setattr(recording, "MOST_PROGRAMS", 2)
    assert [recorder.program(program) for _ in range(3)] == [0, 1, None]
    assert [read_program(recorder.path, number, Plans()) for number in range(3)] == [program, program, None]


def test_a_chain_leads_to_the_rank_where_it_began():
    explanation = explain([waits(0, 1), waits(1, 2), rank(2, FORWARD), waits(3, 0)], NOW)
    assert explanation.chains == {0: [0, 1, 2], 1: [1, 2], 3: [3, 0, 1, 2]}
    order = [explanation.text.index(f"Rank {process} has waited") for process in (1, 0, 3)]
    assert order == sorted(order)


def test_what_an_effect_usually_takes_is_said_beside_it():
    before = [entry("effect", f"Forward(stage=1, microbatch={m})", ms=2000 - 3 * m) for m in range(4)]
    slow = rank(1, *before, entry("effect", "Forward(stage=1, microbatch=4)", ms=1980))
    assert "Forward(stage=1, microbatch=4), of step 5" in explain([slow], NOW).text
    assert "1.98 s before; the last 4 of Forward(stage=1) took 3 ms, at most 11 ms" in explain([slow], NOW).text


def test_ranks_without_a_record_are_named():
    assert "Of 2 processes (1, 3) there is no record here" in explain([waits(0, 1), rank(2, FORWARD)], NOW).text


def test_a_thousand_ranks_are_few_sentences():
    ranks = [replace(waits(i, i + 1), processes=1000) for i in range(999)] + [
        replace(rank(999, FORWARD), processes=1000)
    ]
    explanation = explain(ranks, NOW)
    assert (explanation.kind, explanation.ranks) == ("computes", [999])
    assert len(explanation.text) < 8000
