"""Captures that are found and read without a server: whatever else lies there, is cut short, or can't be read."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from fpipe import Costs, Placement, Plan, schedules, simulate
from fpipe.tensorboard.files import reader as disk
from fpipe.tensorboard.files import writer
from fpipe.tensorboard.files.captures import BadCapture, columns_of
from fpipe.tensorboard.files.columns import Header, encode
from fpipe.tensorboard.files.reader import CaptureId, find
from fpipe.tensorboard.files.writer import Writer, write

ROOT = Path(__file__).resolve().parents[2]
PLAN = Plan(Placement.loop(2), 4)


def made(forward=1.0):
    return simulate(schedules.one_f_one_b, PLAN, Costs(forward=forward, communication=0.5))


def captured(logdir, rank, *steps, kind="measured", forward=1.0, schedule="mine"):
    """A file with a rank's steps, and what else a training loop writes."""
    timeline = made(forward)
    with Writer(logdir, kind, rank) as file:
        for step in steps:
            file.scalar("loss", 0.5, step)
            header = Header(kind, step, rank, schedule, PLAN)
            file.timeline(header, columns_of(timeline, rank))
    return file.folder


def event_files(folder):
    return sorted(Path(folder).rglob("*tfevents*"), key=lambda path: path.stat().st_mtime_ns)


def test_what_was_written_comes_back(tmp_path):
    timeline = made()
    write(tmp_path, timeline, schedule="mine", step=7)
    found = find(tmp_path)
    assert list(found.captures) == [CaptureId("", "predicted", 7)]
    assert found.notices == ()
    capture = found.read(CaptureId("", "predicted", 7))
    assert (capture.schedule, capture.step, capture.kind) == ("mine", 7, "predicted")
    assert list(capture.timeline.spans) == list(timeline.spans)


@pytest.mark.parametrize(
    ("below", "experiment", "kinds", "ranks"),
    [
        ("", "all/mine", {"measured", "predicted"}, {0, 1}),
        ("all", "mine", {"measured", "predicted"}, {0, 1}),
        ("all/mine", "", {"measured", "predicted"}, {0, 1}),
        ("all/mine/measured", "", {"measured"}, {0, 1}),
        ("all/mine/measured/rank1", "", {"measured"}, {1}),
    ],
)
def test_any_folder_above_or_below_will_do(below, experiment, kinds, ranks, tmp_path, monkeypatch):
    for rank in range(2):
        captured(tmp_path / "all" / "mine", rank, 3, 20)
        captured(tmp_path / "all" / "mine", rank, 0, kind="predicted")
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / below, Path(below), f"./{below}"):
        found = find(folder)
        assert found.experiments == [experiment]
        assert {key.kind for key in found.captures} == kinds
        assert found.steps(experiment, "measured") == [3, 20]
        assert set(found.captures[CaptureId(experiment, "measured", 20)]) == ranks
        assert sorted(found.read(CaptureId(experiment, "measured", 20)).headers) == sorted(ranks)


def test_several_experiments_are_told_apart(tmp_path):
    for name in ("a", "b/c", "b/measured"):
        captured(tmp_path / name, 0, 1)
    assert find(tmp_path).experiments == ["a", "b/c", "b/measured"]


def test_the_later_file_wins_a_step_that_both_have(tmp_path):
    """By what its name says: the second, the host, the process, and a count."""
    later = ["8.host2.77.1", "9.host2.77.9", "9.host2.77.10", "10.host2.5.2"]
    for order, name in enumerate(later):
        folder = captured(tmp_path, 0, 5, 10 + order, forward=1.0 + order)
        event_files(folder)[-1].rename(folder / f"events.out.tfevents.{name}")
        found = find(tmp_path)
        assert found.steps("", "measured") == [5, *range(10, 11 + order)]
        ends = found.read(CaptureId("", "measured", 5)).columns[0].ends
        assert ends.tolist() == [span.end for span in made(1.0 + order).spans if span.rank == 0]


def test_a_step_captured_twice_in_a_file_is_the_later(tmp_path):
    captured(tmp_path, 0, 5, 5)
    (parts,) = find(tmp_path).captures[CaptureId("", "measured", 5)].values()
    assert len(parts) == 1
    assert find(tmp_path).read(CaptureId("", "measured", 5)).step == 5


def test_parts_are_joined(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "PART_BYTES", 100)
    captured(tmp_path, 0, 5)
    found = find(tmp_path)
    (parts,) = found.captures[CaptureId("", "measured", 5)].values()
    whole = encode(Header("measured", 5, 0, "mine", PLAN), columns_of(made(), 0))
    assert len(parts) == -(-len(whole) // 100) > 3
    assert disk._blob(parts) == whole
    assert found.read(CaptureId("", "measured", 5)).columns[0].effects == [
        span.effect for span in made().spans if not span.rank
    ]


@pytest.mark.parametrize("cut", [1, 4, 5, 200])
def test_of_a_file_cut_short_what_is_whole_is_read(cut, tmp_path):
    captured(tmp_path, 0, 1, 2, 3)
    (file,) = event_files(tmp_path)
    file.write_bytes(file.read_bytes()[:-cut])
    found = find(tmp_path)
    assert found.steps("", "measured") == [1, 2]
    (notice,) = found.notices
    assert notice.startswith(f"{file} is cut short or broken at byte ")
    assert found.read(CaptureId("", "measured", 2)).step == 2


def test_cut_anywhere_it_is_read_and_says_so(tmp_path):
    captured(tmp_path, 0, 1, 2)
    (file,) = event_files(tmp_path)
    whole = file.read_bytes()
    ends = [0]
    while ends[-1] < len(whole):
        ends.append(ends[-1] + 16 + int.from_bytes(whole[ends[-1] : ends[-1] + 8], "little"))
    for size in range(0, len(whole), 7):
        file.write_bytes(whole[:size])
        assert len(find(tmp_path).notices) == (size not in ends)


def test_a_record_that_is_broken_ends_the_file(tmp_path):
    captured(tmp_path, 0, 1, 2)
    (file,) = event_files(tmp_path)
    whole = bytearray(file.read_bytes())
    first = 16 + int.from_bytes(whole[:8], "little")
    whole[first + 12 : first + 20] = b"\xff" * 8
    file.write_bytes(whole)
    found = find(tmp_path)
    assert found.captures == {}
    assert "is broken at byte" in found.notices[0]


def test_a_payload_that_is_broken_leaves_the_other_ranks(tmp_path):
    captured(tmp_path, 0, 1)
    folder = captured(tmp_path, 1, 1)
    (file,) = event_files(folder)
    whole = bytearray(file.read_bytes())
    at = whole.index(b"\x1f\x8b\x08\0\0\0\0\0")  # where the gzip begins
    whole[at + 60] ^= 1
    file.write_bytes(whole)
    capture = find(tmp_path).read(CaptureId("", "measured", 1))
    assert list(capture.headers) == [0]
    (notice,) = capture.notices
    assert notice.startswith(f"rank 1 is left out: step 1 in {file} is damaged")


def test_a_file_that_is_gone_when_it_is_read_is_a_missing_rank(tmp_path):
    captured(tmp_path, 0, 1)
    folder = captured(tmp_path, 1, 1)
    found = find(tmp_path)
    event_files(folder)[0].unlink()
    assert list(found.read(CaptureId("", "measured", 1)).headers) == [0]
    event_files(tmp_path)[0].write_bytes(b"")
    with pytest.raises(BadCapture):
        found.read(CaptureId("", "measured", 1))


def test_links_are_followed_and_loops_are_not(tmp_path):
    captured(tmp_path / "data" / "mine", 0, 1)
    logdir = tmp_path / "logdir"
    logdir.mkdir()
    (logdir / "linked").symlink_to(tmp_path / "data" / "mine")
    (tmp_path / "data" / "mine" / "loop").symlink_to(tmp_path / "data")
    (logdir / "nowhere").symlink_to(tmp_path / "gone")
    found = find(logdir)
    assert list(found.captures) == [CaptureId("linked", "measured", 1)]
    assert found.notices == ()
    assert found.read(CaptureId("linked", "measured", 1)).step == 1


def test_a_folder_that_cannot_be_listed_is_a_notice(tmp_path, monkeypatch):
    captured(tmp_path, 0, 1)
    folder = captured(tmp_path, 1, 1)
    scandir = os.scandir

    def refused(path):
        if os.fspath(path) == str(folder):
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    found = find(tmp_path)
    assert set(found.captures[CaptureId("", "measured", 1)]) == {0}
    assert found.notices == (f"{folder} can't be read: Permission denied",)


def test_what_is_no_file_is_not_opened(tmp_path):
    folder = captured(tmp_path, 0, 1)
    (folder / "events.out.tfevents.1.folder").mkdir()
    (folder / "events.out.tfevents.2.gone").symlink_to(tmp_path / "gone")
    os.mkfifo(folder / "events.out.tfevents.3.pipe")  # which would wait for one who writes
    found = find(tmp_path)
    assert found.steps("", "measured") == [1]
    assert found.notices == ()


def test_what_other_programs_wrote_is_left_alone(tmp_path):
    folder = captured(tmp_path, 0, 1)
    (folder / "notes.txt").write_text("mine")
    (tmp_path / "events.out.tfevents.1.elsewhere").write_bytes(b"not read, since no rank's")
    found = find(tmp_path)
    assert list(found.captures) == [CaptureId("", "measured", 1)]
    assert found.notices == ()


@pytest.mark.parametrize("missing", ["gone", "file"])
def test_no_folder_is_an_error(missing, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        find(tmp_path / missing)


def test_listing_keeps_no_payload(tmp_path):
    captured(tmp_path, 0, *range(50))
    found = find(tmp_path)
    assert len(found.captures) == 50
    for parts in (parts for ranks in found.captures.values() for parts in ranks.values()):
        assert all(isinstance(field, Path | int) for part in parts for field in part)


def test_tensorboards_loader_reads_the_same(tmp_path):
    captured(tmp_path, 0, 1, 2)
    (file,) = event_files(tmp_path)
    theirs = [value for event in EventFileLoader(str(file)).Load() for value in event.summary.value]
    blobs = {value.tag: value.tensor.string_val[0] for value in theirs if value.tag.startswith("timeline/")}
    ours = {step: disk._blob(find(tmp_path).captures[CaptureId("", "measured", step)][0]) for step in (1, 2)}
    assert list(blobs.values()) == list(ours.values())


def test_columns_stay_what_they_were(tmp_path):
    write(tmp_path, made(), schedule="mine")
    capture = find(tmp_path).read(CaptureId("", "predicted", 0))
    for rank in range(2):
        assert np.array_equal(capture.columns[rank].starts, columns_of(made(), rank).starts)


def test_reading_imports_no_torch(tmp_path):
    captured(tmp_path, 0, 1)
    code = f"""if True:
        import sys
        from fpipe.tensorboard.files.reader import CaptureId, find
        print(find({str(tmp_path)!r}).read(CaptureId("", "measured", 1)).step, "torch" in sys.modules)
    """
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown == "1 False\n"


def test_a_prediction_has_the_owners_of_its_memory(tmp_path):
    costs = Costs(residuals=40, activation=10)
    timeline = simulate(schedules.one_f_one_b, Plan(Placement.loop(3), 6), costs)
    write(tmp_path, timeline, schedule="1f1b")
    found = find(tmp_path).read(CaptureId("", "predicted", 0))
    for rank in range(3):
        assert found.headers[rank].owners == timeline.owners(rank)
        assert sum(found.headers[rank].owners.values()) == found.peak_memory(rank) > 0
