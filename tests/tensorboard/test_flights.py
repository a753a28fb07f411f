"""Flights in a log directory: what ranks did last is found there after a crash, and names the rank where it began."""

import os
import socket
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fpipe import Placement, Plan, ScheduleError, verify
from fpipe.cli import app
from fpipe.flight import reading, runs
from fpipe.flight.explanation import explain
from fpipe.flight.reading import read
from fpipe.flight.recording import Recording
from fpipe.tensorboard.server import flights as listed
from fpipe.tensorboard.server.flights import Flights
from fpipe.tensorboard.server.plugin import PipelinePlugin
from tests.support import faults
from tests.support.programs import circle


def fly(folder, ranks=3, waits=()):
    """A flight of ranks in this process, each in a forward; those in `waits` for the rank after."""
    folder.mkdir(parents=True)
    for rank in range(ranks):
        recording = Recording(
            folder / f"{rank:06}.flight", {"process": rank, "name": f"rank {rank}", "processes": ranks}
        )
        recording.begin(7)
        recording.writer("effect", f"Forward(stage={rank}, microbatch=1)")()
        if rank in waits:
            recording.waits(f"waiting for Gradient(stage={rank}, microbatch=0) from rank {rank + 1}", rank + 1)
    return folder


def test_a_flight_is_linked_until_it_ends_well(tmp_path):
    flight, run = fly(tmp_path / "of this host" / "job"), tmp_path / "runs" / "mine"
    for file in flight.iterdir():
        runs.link(file, run)
        runs.link(file, run)
    assert list(runs.flights(run)) == [run / "flights" / "job"]
    assert [rank.process for rank in read(run / "flights" / "job")] == [0, 1, 2]
    for file in flight.iterdir():
        runs.unlink(file, run)
    assert not (run / "flights").exists()
    assert len(list(flight.iterdir())) == 3


def test_a_flight_that_failed_stays_linked(tmp_path):
    flight, run = fly(tmp_path / "job", ranks=1), tmp_path / "mine"
    (file,) = flight.iterdir()
    runs.link(file, run)
    recording = Recording(flight / "000001.flight", {"process": 1, "name": "rank 1", "processes": 2})
    recording.conclude("failed", "rank 1: KeyError: 'w'")
    runs.link(recording.path, run)
    runs.unlink(file, run)
    runs.unlink(recording.path, run)
    assert [file.name for file in (run / "flights" / "job").iterdir()] == ["000001.flight"]


def test_links_whose_files_are_gone_are_no_flight(tmp_path):
    flight, run = fly(tmp_path / "job"), tmp_path / "mine"
    for file in flight.iterdir():
        runs.link(file, run)
        file.unlink()
    assert list(runs.flights(run)) == []
    assert Flights(str(tmp_path)).listing() == []


def test_links_that_cant_be_followed_hide_no_other_flight(tmp_path):
    runs.copy(fly(tmp_path / "flights" / "one"), tmp_path / "runs" / "mine")
    for name in ("one", "two"):
        (tmp_path / "runs" / "mine" / "flights" / name).mkdir(exist_ok=True)
        (tmp_path / "runs" / "mine" / "flights" / name / "9.flight").symlink_to("x" * 300)
    assert [each["name"] for each in Flights(str(tmp_path / "runs")).listing()] == ["one"]


@pytest.mark.parametrize("linked", [False, True])
def test_a_copy_keeps_the_states_that_it_was_made_in(tmp_path, monkeypatch, linked):
    """Also in place of the links, and though the processes are gone later."""
    flight, run = fly(tmp_path / "elsewhere" / "job", waits=[0, 1]), tmp_path / "mine"
    if linked:
        for file in flight.iterdir():
            runs.link(file, run)
    place = runs.copy(run / "flights" / "job" if linked else flight, run)
    assert place == run / "flights" / "job"
    assert not any(file.is_symlink() for file in place.iterdir())
    before = explain(read(place))
    monkeypatch.setattr(reading, "process_state", lambda pid: None)
    assert [rank.state for rank in read(flight)] == ["gone"] * 3
    for file in flight.iterdir():
        file.unlink()
    ranks = read(place)
    assert [rank.state for rank in ranks] == ["runs"] * 3
    assert abs(ranks[0].copied / 1e9 - time.time()) < 60
    assert explain(ranks).text == before.text
    assert (before.kind, before.ranks) == ("computes", [2])


def test_what_a_killed_copy_left_is_deleted_by_the_next(tmp_path, monkeypatch):
    """But nothing of a copy that is being made, here or on another host."""
    flight, run, host = fly(tmp_path / "job"), tmp_path / "mine", socket.gethostname()
    place = runs.copy(flight, run)
    whole = {file.name for file in place.iterdir()}
    for name in (f".000000.flight.{host}.7", f".000001.flight.{host}.8", ".000002.flight.another.7"):
        (place / name).write_bytes(b"a part")
    monkeypatch.setattr(runs, "process_state", lambda pid: None if pid == 7 else ("runs", 0))
    runs.copy(flight, run)
    assert {file.name for file in place.iterdir()} - whole == {f".000001.flight.{host}.8", ".000002.flight.another.7"}
    assert [rank.process for rank in read(place)] == [0, 1, 2]


def test_a_copy_that_fails_leaves_nothing(tmp_path, monkeypatch):
    flight, run = fly(tmp_path / "job"), tmp_path / "mine"
    monkeypatch.setattr(Path, "replace", lambda path, to: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        runs.copy(flight, run)
    assert list((run / "flights" / "job").iterdir()) == []


def test_a_recorders_own_files_are_not_replaced_by_copies(tmp_path):
    """FPIPE_FLIGHTS may be the folder of the run."""
    place = fly(tmp_path / "mine" / "flights" / "job", ranks=1)
    assert runs.copy(place, tmp_path / "mine") == place
    assert [rank.copied for rank in read(place)] == [0]


def test_flights_are_listed_by_experiment(tmp_path, monkeypatch):
    fly(tmp_path / "flights" / "c")
    fly(tmp_path / "mine" / "flights" / "a")
    fly(tmp_path / "mine" / "flights" / "b", waits=[0])
    (tmp_path / "mine" / "flights" / "notes").mkdir()
    fly(tmp_path / "other" / "measured" / "flights" / "d")  # not in the folder of a run
    for age, flight in enumerate(("flights/c", "mine/flights/b", "mine/flights/a")):
        for file in (tmp_path / flight).iterdir():
            os.utime(file, (1e9 - age, 1e9 - age))
    flights = Flights(str(tmp_path))
    newest = [("", "c"), ("mine", "b"), ("mine", "a")]
    assert [(each["experiment"], each["name"]) for each in flights.listing()] == newest
    found = flights.flight("mine", "b")
    assert (found["cause"], found["at"], found["chains"]) == ("computes", [1], {"0": [0, 1]})
    assert [rank["records"][-1]["kind"] for rank in found["ranks"]] == ["wait", "effect", "effect"]
    for experiment, name in (("mine", "c"), ("..", "b"), ("mine", "../../mine/flights/b"), ("mine", "notes")):
        assert flights.flight(experiment, name) is None
    monkeypatch.setattr(listed, "MOST_LISTED", 2)
    assert [(each["experiment"], each["name"]) for each in Flights(str(tmp_path)).listing()] == newest[:2]


def test_flights_behind_links_are_listed_and_loops_end(tmp_path):
    fly(tmp_path / "elsewhere" / "mine" / "flights" / "a")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "runs")
    assert [each["experiment"] for each in Flights(str(tmp_path / "runs")).listing()] == ["linked/mine"]


def test_a_flight_is_read_again_only_after_a_while(tmp_path, monkeypatch):
    fly(tmp_path / "mine" / "flights" / "a")
    reads = []
    monkeypatch.setattr(listed, "read", lambda folder: reads.append(folder) or read(folder))
    flights = Flights(str(tmp_path))
    assert flights.flight("mine", "a") is flights.flight("mine", "a")
    assert len(reads) == 1
    monkeypatch.setattr(listed, "KEPT", 0.0)
    flights.flight("mine", "a")
    assert len(reads) == 2


def test_the_tab_is_there_for_a_job_that_recorded_no_step(tmp_path):
    class Context:
        data_provider, logdir = None, str(tmp_path)

    plugin = PipelinePlugin(Context())
    assert not plugin.is_active()
    fly(tmp_path / "mine" / "flights" / "a")
    assert PipelinePlugin(Context()).is_active()


@pytest.mark.parametrize("logdir", ["", "gs://bucket/runs", "/nowhere"])
def test_without_a_folder_there_are_none(logdir):
    assert Flights(logdir).listing() == []


def test_after_a_rank_was_killed_the_run_has_its_flight(fresh_pool, tmp_path):
    fresh_pool(3).outcomes(faults.recorded, 3, "killed", str(tmp_path / "mine"), limit=30)
    flights = Flights(str(tmp_path))
    (flight,) = flights.listing()
    assert flight["experiment"] == "mine"
    found = flights.flight("mine", flight["name"])
    assert (found["cause"], found["at"]) == ("gone", [1])
    assert "Its last record is Forward(stage=1, microbatch=3), of step " in found["text"]
    assert [rank["outcome"] for rank in found["ranks"]] == ["lost", "open", "lost"]


def test_a_deadlock_has_the_verifiers_explanation(pools, tmp_path):
    """In the tab and in `fpipe explain`, of the job itself and of a copy."""
    outcomes = pools(2).outcomes(faults.deadlocked, 2, str(tmp_path / "mine"), limit=30)
    assert [outcome.error for outcome in outcomes] == ["TransportError"] * 2
    with pytest.raises(ScheduleError, match="no rank can go on: ") as refused:
        verify(circle, Plan(Placement.loop(2), 2))
    flights = Flights(str(tmp_path))
    (flight,) = flights.listing()
    found = flights.flight("mine", flight["name"])
    assert (found["cause"], found["at"]) == ("deadlock", [0, 1])
    start = f"Rank 0 and rank 1 wait for each other. The verifier says of their programs: {refused.value}. "
    assert found["text"].startswith(start)
    shown = CliRunner().invoke(app, ["explain", str(tmp_path / "mine" / "flights"), "--logdir", str(tmp_path / "copy")])
    assert start.strip() in " ".join(shown.stdout.split())
    assert Flights(str(tmp_path / "copy")).flight("", flight["name"])["text"] == found["text"]


def test_after_a_job_that_ended_well_there_is_none(pools, tmp_path):
    pools(2).run(faults.recorded, 2, "none", str(tmp_path / "mine"))
    assert not (tmp_path / "mine" / "flights").exists()
