"""A run that is killed goes on with the step that was in memory, to the same bits; nothing else is ever loaded."""

import errno
import getpass
import json
import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import fpipe
from fpipe import handlers, interop
from fpipe.interop.checkpoints import checkpoints, layout, slots
from fpipe.interop.checkpoints import memory as memories
from fpipe.interop.checkpoints.choice import choice_of
from fpipe.interop.checkpoints.memory_reader import MemoryReader
from fpipe.interop.checkpoints.room import Room, room_in
from fpipe.interop.checkpoints.slots import Slot, Stored, files_of, stored_in
from tests.support import memory_jobs, run_jobs
from tests.support.combinations import ALL, one_in, thorough
from tests.support.jobs import differences

ROOT = Path(__file__).resolve().parents[2]
EVERY = run_jobs.EVERY  # steps between two checkpoints on disk


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The end of a run that nothing interrupted."""
    return run_jobs.train(*run_jobs.begin(tmp_path_factory.mktemp("whole"), handlers.Local()))


@pytest.fixture
def begin(tmp_path):
    """Begin a run, or go on, with memory checkpoints."""
    return lambda **options: memory_jobs.begin(tmp_path, handlers.Local(), **options)


def stopped(at, begin, *rest):
    """Train until a step that fails."""

    def fails(i):
        if i == at:
            raise ArithmeticError("bad row")

    run, *rest = begin()
    with pytest.raises(ArithmeticError):
        run_jobs.train(run, *rest, fails)
    run.checkpoints.finish()
    return run


def parts(path):
    """The files with memory checkpoints, and the steps that they hold."""
    (folder,) = (path / "shm" / f"fpipe-{os.getuid()}").iterdir()
    return folder, sorted(stored.step for stored in stored_in(folder))


def assert_kept(path, steps):
    assert parts(path)[1] == steps


@one_in(3)
@pytest.mark.parametrize(("at", "every"), [(0, 1), (1, 1), (4, 1), (7, 1), (7, 3)])
def test_a_run_goes_on_with_the_step_in_memory_to_the_same_bits(begin, tmp_path, whole, at, every):
    def start():
        return begin(every=every)

    stopped(at, start)
    run, *rest = start()
    assert run.step == max(at // every * every, at // EVERY * EVERY)
    assert not differences(run_jobs.train(run, *rest), whole)


@thorough
def test_it_may_be_stopped_again_and_again(begin, whole):
    for at in (1, 2, 3, 3, 6, 6, 11):
        assert stopped(at, begin).step == at
    run, *rest = begin()
    assert run.step == 11
    assert not differences(run_jobs.train(run, *rest), whole)


def test_what_is_kept_is_a_copy_and_donated_buffers_are_free(begin, tmp_path):
    """Steps are captured, and have the memory of those before."""
    fused = interop.optimizer(torch.optim.Adam, lr=0.1, donate=True, fused=True, capturable=True)

    def trained(run, stop):
        pipeline, plan = run.checkpoints.pipeline, run.checkpoints.plan
        train = fpipe.train_step(pipeline, "1f1b", plan, fused, handler=handlers.Local(), capture=stop is not None)
        for i in run.steps(run_jobs.TOTAL):
            if i == stop:
                break
            run.params, run.optimizer, _ = train(run.params, run.optimizer, *run_jobs.batch(i))
        return run.params

    expected = trained(run_jobs.begin(tmp_path / "other", handlers.Local())[0], None)
    trained(begin()[0], 7)
    run, *_ = begin()
    assert run.step == 7
    assert not differences(trained(run, -1), expected)


def test_files_are_this_users_and_are_gone_once_the_run_has_ended(begin, tmp_path):
    stopped(7, begin)
    folder, steps = parts(tmp_path)
    assert steps == [6, 7]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    run, *rest = begin()
    run_jobs.train(run, *rest)
    assert [*(tmp_path / "shm").iterdir()] == []
    run_jobs.train(run, *rest, lambda i: i == 14 and assert_kept(tmp_path, [13, 14]), total=15)
    assert [*(tmp_path / "shm").iterdir()] == []


def test_sigterm_saves_on_disk_and_leaves_nothing_in_memory(begin, tmp_path):
    with pytest.raises(SystemExit):
        run_jobs.train(*begin(), lambda i: i == 7 and os.kill(os.getpid(), signal.SIGTERM))
    assert [*(tmp_path / "shm").iterdir()] == []
    assert begin()[0].step == 8


@pytest.mark.parametrize(
    "name",
    [
        "torch._foreach_copy_",
        "fpipe.interop.checkpoints.memory.checksum",
        "fpipe.interop.checkpoints.slots.Slot.commit",
    ],
)
def test_a_step_that_is_torn_is_not_loaded(begin, tmp_path, whole, name):
    """The process is killed while it copies, after a part of the tensors, or before the record is written."""
    write = memories.MemoryCheckpoints.write

    def torn(own, step, *rest):
        if step < 7:
            return write(own, step, *rest)
        with patch(name, side_effect=KeyboardInterrupt("killed")):
            return write(own, step, *rest)

    run, *rest = begin()
    with patch.object(memories.MemoryCheckpoints, "write", torn), pytest.raises(KeyboardInterrupt):
        run_jobs.train(run, *rest)
    run.checkpoints.finish()
    assert parts(tmp_path)[1] == [6]
    run, *rest = begin()
    assert run.step == 6
    assert not differences(run_jobs.train(run, *rest), whole)


def flip(path, at, bit=3):
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def test_a_flipped_bit_anywhere_is_never_loaded(begin, tmp_path, whole, caplog):
    """In tensors, the table, values or the record: the step before is, then the one on disk."""
    stopped(7, begin)
    folder, _ = parts(tmp_path)
    newest = next(stored for stored in stored_in(folder) if stored.step == 7)
    content = newest.path.read_bytes()
    used = [at for at, byte in enumerate(content) if byte]
    for at in [used[i] for i in range(0, len(used), len(used) // 40)]:
        flip(newest.path, at)
        after = Stored.read(newest.path)
        assert after is None or not after.is_right or after.tensors.tobytes() == newest.tensors.tobytes()
        assert after is None or (after.table, after.values) == (newest.table, newest.values)
        flip(newest.path, at)
    at = content.index(newest.tensors.tobytes()[:64])
    flip(newest.path, at + 5)
    with caplog.at_level(logging.WARNING, "fpipe.checkpoints"):
        run, *rest = begin()
    assert run.step == 6
    assert "step 7 in memory can't be loaded" in caplog.text
    assert not differences(run_jobs.train(run, *rest), whole)


def test_tensors_are_copied_in_runs_of_parts_whose_sums_are_that_of_all(tmp_path):
    """Of any shape, dtype and strides: parts of long rows, rows that end within a word, and nothing at all."""
    tensors = {
        "rows of three bytes": torch.arange(300, dtype=torch.int8).view(-1, 3),
        "transposed": torch.randn(40, 30).T,
        "expanded": torch.randn(1, 7).expand(50, 7),
        "number": torch.tensor(3.0),
        "nothing": torch.empty(0, 4),
        "one long row": torch.randn(1, 333),
        "half": torch.randn(33, 7).bfloat16(),
        "bits": torch.randn(77) > 0,
    }

    def checkpoints():
        pipeline = fpipe.Pipeline([run_jobs.layer], run_jobs.mse)
        plan, memory = pipeline.plan(fpipe.Placement.loop(1), 1), interop.Memory(folder=tmp_path)
        return interop.Checkpoints(tmp_path / "saved", pipeline, plan, handler=handlers.Local(), memory=memory)

    counts = []
    for cached in (8, 200, 1 << 19):
        with patch.object(layout, "CACHED", cached):
            first = checkpoints()
            first.resume(params={0: {"w": torch.ones(3, 3)}}, odd=tensors, step=0)
            first.keep_in_memory(params={0: {"w": torch.ones(3, 3)}}, odd=tensors, step=1)
            counts.append(len(first._memory._slots[0]._runs))
        (stored,) = stored_in(first._memory.folder)
        assert stored.is_right
        again = checkpoints()
        like = {name: torch.zeros_like(x) for name, x in tensors.items()}
        loaded = again.resume(params={0: {"w": torch.zeros(3, 3)}}, odd=like, step=0)
        assert loaded["step"] == 1
        assert not differences(loaded["odd"], tensors)
        content = stored.tensors.copy()
        for at in range(len(content)):
            content[at] ^= 1 << at % 8
            assert slots.checksum(content) != stored.sum
            content[at] ^= 1 << at % 8
        again.clear_memory()
        shutil.rmtree(tmp_path / "saved")
    assert counts[0] > counts[1] > counts[2] == 1


def test_files_that_another_program_removes_are_made_again(begin, tmp_path, whole):
    """As systemd does when the user logs out."""
    run, *rest = begin()

    def accident(i):
        if i == 3:
            shutil.rmtree(tmp_path / "shm" / f"fpipe-{os.getuid()}")
        if i == 9:
            raise ArithmeticError("bad row")

    warns = pytest.warns(UserWarning, match=r"another program has removed .*: with RemoveIPC=yes, systemd")
    with warns, pytest.raises(ArithmeticError):
        run_jobs.train(run, *rest, accident)
    run.checkpoints.finish()
    assert_kept(tmp_path, [8, 9])
    run, *rest = begin()
    assert run.step == 9
    assert not differences(run_jobs.train(run, *rest), whole)
    assert [*(tmp_path / "shm").iterdir()] == []


def test_where_memory_is_lost_the_checkpoint_on_disk_is_loaded(begin, tmp_path, whole):
    stopped(7, begin)
    for path in files_of(parts(tmp_path)[0]):
        flip(path, path.stat().st_size // 2)
        flip(path, 70)
    run, *rest = begin()
    assert run.step == 5
    assert not differences(run_jobs.train(run, *rest), whole)


def test_a_checkpoint_on_disk_that_was_removed_is_not_brought_back(begin, tmp_path):
    stopped(11, begin)
    names = sorted(path.name for path in tmp_path.glob("0*"))
    assert names == ["000001-step-5", "000002-step-10"]
    (tmp_path / names[1]).rename(tmp_path / "elsewhere")
    assert begin()[0].step == 5


@pytest.mark.parametrize("sealed", [True, False])
def test_a_process_may_be_killed_when_a_checkpoint_is_sealed(begin, tmp_path, sealed):
    """Before or after it has its name: memory goes with either."""

    def killed(*arguments):
        if sealed:
            seal(*arguments)
        raise KeyboardInterrupt("killed")

    run, *rest = begin()
    run_jobs.train(run, *rest, total=3)
    seal = checkpoints.sealed
    with patch.object(checkpoints, "sealed", killed), pytest.raises(KeyboardInterrupt):
        run_jobs.train(run, *rest, total=4)
    assert len([*tmp_path.glob("0*")]) == 1 + sealed
    again = begin()[0]
    assert (again.step, again.checkpoints._memory._choice.steps[0][1]) == (4, 4)


def test_a_run_that_goes_on_with_nothing_on_disk_says_so_and_how_to_begin_anew(begin, tmp_path, caplog):
    stopped(3, begin)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memory.json", "shm"]
    assert begin()[0].step == 3
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "the run goes on with step 3, from memory (" in record.message
    assert f"nothing is saved in {tmp_path}; to begin anew, remove {tmp_path}/memory.json" in record.message
    (tmp_path / "memory.json").unlink()
    assert begin()[0].step == 0


def memory_command(pool, folder):
    """Return a function that runs `fpipe checkpoint memory` in a pool's process, which inherits no lock of this one."""
    shared = ["--shared", str(folder / "shm")]
    return lambda *words: pool.run(memory_jobs.command, [*shared, *map(str, words)])[0]


def test_the_command_lists_memory_checkpoints_and_removes_what_no_process_has(begin, tmp_path, pools):
    command = memory_command(pools(2), tmp_path)
    run = stopped(4, begin)
    (row,) = json.loads(command("--clear", "--json"))
    assert (row["state"], row["processes"], row["step"]) == ("in use", [os.getpid()], 4)
    assert (row["checkpoints"], row["job"]) == (str(tmp_path), run.checkpoints._memory.job)
    assert row["bytes"] == sum(path.stat().st_size for path in files_of(parts(tmp_path)[0]))
    assert row["user"] == getpass.getuser()
    assert parts(tmp_path)[1] == [3, 4]
    run.checkpoints._memory._lock._file.close()  # as when the process ends
    assert " left " in command()
    assert "no memory checkpoints in" in command(tmp_path / "other", "--clear")
    assert " removed " in command(tmp_path, "--clear")
    assert [*(tmp_path / "shm").iterdir()] == []


@one_in(2)
@pytest.mark.parametrize("name", ["000001.0", "000000.lock"])
def test_the_command_waits_for_no_pipe_and_follows_no_link(tmp_path, fresh_pool, name):
    """Root looks into the folders of all users. What waits ends the processes."""
    command = memory_command(fresh_pool(1), tmp_path)
    folder = tmp_path / "shm" / "fpipe-1" / "run"
    folder.mkdir(parents=True)
    slot = Slot(folder / "000000.0", 0)
    slot.lay_out(b'{"checkpoints": "a", "job": "b"}', 16, 0)
    slot.commit(1, 3, b"{}", 0)
    (folder / "000000.1").mkdir()
    os.mkfifo(folder / name)
    (tmp_path / "shm" / "fpipe-2").mkdir()
    (tmp_path / "shm" / "fpipe-2" / "run").symlink_to(folder)
    (row,) = json.loads(command("--json"))
    assert (row["folder"], row["step"], row["state"]) == (str(folder), 3, "left")
    (row,) = json.loads(command("--clear", "--json"))
    assert (row["state"], (folder / "000000.0").exists()) == ("removed", False)


def test_a_start_survives_that_its_folder_is_removed(begin, tmp_path, caplog):
    """As by --clear, and by other jobs that end: before the lock is taken, and after the choice of a step."""
    stopped(4, begin)
    folder, _ = parts(tmp_path)

    def gone(act):
        def first(*arguments, **options):
            if folder.parent.exists():
                shutil.rmtree(folder.parent)
            return act(*arguments, **options)

        return first

    with patch.object(memories.MemoryCheckpoints, "reader", gone(lambda _, step: MemoryReader(folder, step))):
        run, *_ = begin()
    assert run.step == 0
    assert "step 4 in memory can't be loaded: its parts were removed from" in caplog.text
    run.checkpoints.clear_memory()
    take, calls = slots.Lock.take, []

    def once(own, patience=0.0):
        calls.append(own)
        if len(calls) == 1:
            shutil.rmtree(folder.parent)
        return take(own, patience)

    with patch.object(slots.Lock, "take", once):
        begin()
    assert len(calls) == 2
    assert folder.is_dir()


def test_processes_of_a_host_know_each_other_though_the_folder_is_made_again(begin, tmp_path):
    """One has begun the next run where another still ends the one before."""
    run, *_ = begin()
    memory, hosts = run.checkpoints._memory, set()
    for i in range(2):
        hosts.add(memory.report(run._sections, None)["host"])
        memory.folder.rename(tmp_path / f"gone {i}")
    assert len(hosts) == 1


def test_what_another_run_saved_is_not_passed_over(begin, tmp_path):
    """A run without memory checkpoints went on from disk, to an earlier step than that in memory; and warned of it."""
    stopped(9, begin)

    def on_disk():
        return run_jobs.begin(tmp_path, handlers.Local())

    with pytest.warns(UserWarning, match=r"memory checkpoints of this run, up to step 9: pass Check.*=\) to") as caught:
        stopped(7, on_disk)
    assert f"remove them by `fpipe checkpoint memory {tmp_path} --clear` on each host" in str(caught[0].message)
    with pytest.warns(UserWarning, match="memory checkpoints of this run"):
        run, *_ = on_disk()
    run.step = 8
    run.save()
    assert begin()[0].step == 8


def test_no_room_is_an_error_before_the_first_step_with_the_bytes(begin, tmp_path):
    little = Room(9000, "machine", "in the machine's memory")
    with (
        patch.object(memories, "room_in", return_value=little),
        pytest.raises(OSError, match=r"want 1.* KiB more in .*, on the host of process 0, and 8\.789 KiB are free in"),
    ):
        begin()
    full = OSError(errno.ENOSPC, "No space left on device")
    with patch("os.posix_fallocate", side_effect=full), pytest.raises(OSError, match="memory checkpoints want"):
        begin()
    assert [*(tmp_path / "shm").iterdir()] == []
    assert begin()[0].step == 0


@one_in(2)
@pytest.mark.parametrize("apart", [False, True])
def test_room_is_for_all_processes_of_a_host_together(pools, tmp_path, apart):
    """Each of two has room for itself, and one of them for both."""
    pools(2).run(memory_jobs.stopped, str(tmp_path), 4, apart, False)
    before = sorted((tmp_path).glob("shm*/*/*/0*[01]"))
    for outcome in pools(2).outcomes(memory_jobs.with_room, str(tmp_path), apart, [12000, 14000]):
        if apart:
            assert outcome.error is None
            continue
        assert outcome.error == "OSError"
        assert "the host of processes 0, 1, and 13.67 KiB are free in a box: take a machine with more" in outcome.text
    if not apart:  # the step to go on with is there, and no other
        assert {each.step for path in before if (each := Stored.read(path)) is not None} == {4}
        assert [step for step, _ in pools(2).run(memory_jobs.go_on, str(tmp_path))] == [4, 4]


def test_where_one_rank_is_refused_all_give_their_files_up(pools, tmp_path):
    first, second = pools(2).outcomes(memory_jobs.refused, str(tmp_path))
    assert (first.error, second.error) == ("CheckpointError", "OSError")
    assert "rank 1 failed at resume of the checkpoints in" in first.text
    assert "in the file system of" in first.text
    assert [*(tmp_path / "shm").iterdir()] == []


def test_a_start_that_fails_before_it_claims_files_leaves_them(begin, tmp_path):
    stopped(4, begin)
    claim = patch.object(memories.MemoryCheckpoints, "claim", side_effect=interop.CheckpointError("rank 1 is gone"))
    with claim, pytest.raises(interop.CheckpointError, match="rank 1 is gone"):
        begin()
    assert parts(tmp_path)[1] == [3, 4]
    assert begin()[0].step == 4


GROUPS = {
    "v2": (
        "0::/a/b",
        {"a/memory.max": "1000", "a/memory.current": "700", "a/memory.stat": "active_file 100\ninactive_file 50\nx 9"},
        {"a/b/memory.max": "max", "a/b/memory.current": "1"},
    ),
    "v1": (
        "0::/\n4:cpu,memory:/a/b",
        {"memory/a/memory.limit_in_bytes": "1000", "memory/a/memory.usage_in_bytes": "700"},
        {"memory/a/memory.stat": "total_active_file 100\ntotal_inactive_file 50\nactive_file 9"},
    ),
    "v2 in a container": ("0::/", {"memory.max": "450", "memory.current": "0", "memory.stat": ""}, {}),
    "v1 in a container": (
        "4:memory:/docker/1",
        {"memory/memory.limit_in_bytes": "450", "memory/memory.usage_in_bytes": "0"},
        {"memory/memory.stat": ""},
    ),
}


@pytest.mark.parametrize("kind", GROUPS)
def test_the_limits_of_control_groups_count(tmp_path, kind):
    lines, *files = GROUPS[kind]
    tree = {"proc/self/cgroup": lines, "proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 8 kB"}
    for name, text in (tree | {f"groups/{name}": text for each in files for name, text in each.items()}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    room = room_in(tmp_path, tmp_path / "proc", tmp_path / "groups")
    name = "/" if "container" in kind else "/a"
    assert room == (450, "control group", f"within the memory limit of the control group {name}")
    assert room_in(tmp_path, tmp_path / "proc", tmp_path / "nowhere") == (8192, "machine", "in the machine's memory")


def test_no_room_later_is_a_warning(begin, tmp_path, whole):
    """The optimizer's values are more than was expected: training goes on."""
    with patch.object(layout, "EMPTY", 0):
        run, *rest = begin()
    opened = Slot._open

    def fails(slot, size):
        if size > 16384:
            raise OSError(errno.ENOSPC, "No space left on device")
        opened(slot, size)

    run.order = torch.arange(3)
    run.checkpoints._memory._layout.size += 1
    warns = pytest.warns(UserWarning, match="no memory checkpoints from step 1 on")
    with patch.object(Slot, "_open", fails), patch.object(memories, "ROOM", 1 << 20), warns:
        end = run_jobs.train(run, *rest)
    assert not differences(end, whole)


def test_another_users_folder_is_refused(begin, tmp_path):
    (tmp_path / "shm" / f"fpipe-{os.getuid()}").mkdir(parents=True, mode=0o755)
    with pytest.raises(PermissionError, match="is not a folder that this user alone can enter"):
        begin()


def test_ranks_that_are_killed_go_on_with_the_newest_step_that_all_have(fresh_pool, pools, tmp_path):
    """SIGKILL at one rank at a random moment: at most the step that ran is lost, on the rank that was behind."""
    for at in range(3, 4 + 4 * ALL, 2):
        first, second = (pool := fresh_pool(2)).outcomes(memory_jobs.killed, str(tmp_path), at)
        pool.close()
        assert second.exitcode == -signal.SIGKILL
        assert first.error == "TransportError"
    folder, _ = parts(tmp_path)
    newest = [max(stored.step for stored in stored_in(folder) if stored.part == part) for part in range(2)]
    begun, ends = zip(*pools(2).run(memory_jobs.go_on, str(tmp_path), 30), strict=True)
    assert begun == (min(newest),) * 2
    assert newest[1] >= at
    assert min(newest) <= max(newest) <= min(newest) + 1
    expected = run_jobs.train(*run_jobs.begin(tmp_path / "whole", handlers.Local()), total=30)
    assert not differences({**ends[0]["params"], **ends[1]["params"]}, expected["params"])


@thorough
def test_a_host_whose_ranks_are_killed_may_be_replaced(fresh_pool, pools, tmp_path):
    """Two steps may be on their way to the other host."""
    for at in (3, 6):
        first, second = (pool := fresh_pool(2)).outcomes(memory_jobs.killed, str(tmp_path), at, True)
        pool.close()
        assert second.exitcode == -signal.SIGKILL
        assert first.error == "TransportError"
        shutil.rmtree(tmp_path / "shm1")
    begun, ends = zip(*pools(2).run(memory_jobs.go_on, str(tmp_path), 30, True), strict=True)
    assert begun[0] == begun[1] >= 6 - 2
    expected = run_jobs.train(*run_jobs.begin(tmp_path / "whole", handlers.Local()), total=30)
    assert not differences({**ends[0]["params"], **ends[1]["params"]}, expected["params"])


@pytest.mark.skipif(not ALL, reason="starts torchrun, and six processes that import torch: FPIPE_TESTS=all runs it")
def test_a_job_under_torchrun_loses_the_step_that_ran_and_no_other(tmp_path):
    """A rank is killed in two starts; on disk is each fifth step."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    command = [sys.executable, *words, "--monitor-interval", "0.1", memory_jobs.__file__, str(tmp_path / "job")]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    began = sorted((path.name, path.read_text()) for path in (tmp_path / "job").glob("began-*"))
    assert began == [(f"began-{start}-{rank}", str(6 * start)) for start in range(3) for rank in range(2)]
    whole = run_jobs.train(*run_jobs.begin(tmp_path / "whole", handlers.Local()), total=20)
    for rank in range(2):
        assert not differences(torch.load(tmp_path / "job" / f"end-{rank}.pt")["params"][rank], whole["params"][rank])
    assert [*(tmp_path / "job" / "shm").iterdir()] == []


@pytest.mark.parametrize("_", range(3))
def test_whenever_a_process_is_killed_a_step_is_whole(fresh_pool, tmp_path, _):
    (killed,) = fresh_pool(1).outcomes(memory_jobs.write_for_ever, str(tmp_path))
    assert killed.exitcode == -signal.SIGKILL
    for stored in stored_in(parts(tmp_path)[0]):
        reader = MemoryReader(stored.path.parent, (stored.attempt, stored.step))
        loaded = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in reader.tensors.items()}
        reader.read(loaded)
        assert all((x == stored.step).all() for x in loaded.values())
    assert parts(tmp_path)[1]


@thorough
def test_another_placement_on_the_same_host_loads_them(begin, pools, tmp_path, whole):
    pools(2).run(memory_jobs.stopped, str(tmp_path), 7)
    assert stopped(9, begin).step == 9
    begun, ends = zip(*pools(2).run(memory_jobs.go_on, str(tmp_path)), strict=True)
    assert begun == (9, 9)
    assert not differences({**ends[0]["params"], **ends[1]["params"]}, whole["params"])
    assert [*(tmp_path / "shm").iterdir()] == []


@thorough
def test_a_part_that_is_missing_sends_all_ranks_to_disk(pools, tmp_path):
    pools(2).run(memory_jobs.stopped, str(tmp_path), 7)
    folder, _ = parts(tmp_path)
    for path in folder.glob("000001.*"):
        path.unlink()
    assert [step for step, _ in pools(2).run(memory_jobs.go_on, str(tmp_path))] == [5, 5]


def test_two_jobs_at_once(pools, tmp_path):
    """Of other folders, they don't meet; of one folder, the second is refused while the first runs."""
    assert pools(2).run(memory_jobs.two_jobs, str(tmp_path), ["a", "b"]) == ["", ""]
    first, second = pools(2).run(memory_jobs.two_jobs, str(tmp_path), ["c", "c"])
    assert first == ""
    assert "another job, which runs, has its memory checkpoints in" in second


def row(attempt, step, holds, *, job="j", count=2):
    return job, attempt, step, holds, count, holds // 10


def report(holds, rows=(), host="h", first=None, options=(1, False)):
    return {"host": host, "first": first, "holds": holds, "parts": rows, "options": options}


@pytest.mark.parametrize(
    ("rows", "saved", "steps"),
    [
        ([row(1, 4, 10), row(1, 5, 10), row(1, 3, 20), row(1, 4, 20)], -1, [(1, 4)]),  # one step apart
        ([row(1, 4, 10), row(2, 4, 20)], -1, []),  # of two starts
        ([row(1, 9, 10), row(1, 9, 20), row(2, 7, 10), row(2, 7, 20)], -1, [(2, 7), (1, 9)]),
        ([row(1, 4, 10), row(1, 4, 20, job="other")], -1, []),
        ([row(1, 4, 10), row(1, 4, 20)], 3, [(1, 4)]),
        ([row(1, 4, 10), row(1, 4, 20)], 4, [(1, 4)]),
        ([row(1, 4, 10), row(1, 4, 20)], 5, []),  # the one on disk is newer
    ],
)
def test_the_choice_of_a_step(rows, saved, steps):
    reports = [report(10, rows, first=("j", "00000007ab", 1, saved)), report(20)]
    choices = [choice_of(reports, number) for number in range(2)]
    assert [choice.steps for choice in choices] == [steps, steps]
    assert {choice.attempt for choice in choices} == {(1 << 32) + 7}


def test_of_those_that_hold_the_same_on_a_host_one_writes():
    places = [("a", 1), ("a", 2), ("a", 1), ("b", 1), ("b", 1)]
    reports = [report(holds, host=host, first=("j", "00000007ab", 0, -1)) for host, holds in places]
    assert [choice_of(reports, i).writes for i in range(5)] == [True, True, False, True, False]
    choice = choice_of(reports, 0)
    assert choice.parts == 2
    assert choice.neighbours == [(0, 3, 0), (1, 4, 1), (3, 0, 3)]


def test_ranks_with_other_options_are_told_so():
    reports = [report(1, first=("j", "00000007ab", 0, -1)), report(2, options=(2, False))]
    with pytest.raises(interop.CheckpointError, match=r"the ranks have different Memory\(every=, neighbour=\)"):
        choice_of(reports, 0)


def hosts(path):
    """The steps and parts on each of the hosts that folders play."""
    folders = sorted(path.glob("shm*"))
    return [sorted((each.part, each.step) for f in folder.glob("*/*") for each in stored_in(f)) for folder in folders]


def test_a_neighbour_has_a_copy_of_each_step(pools, tmp_path, whole):
    """A host is lost and replaced; then one is lost for good, and the other goes on alone."""
    pools(2).run(memory_jobs.stopped, str(tmp_path), 7, True)
    assert hosts(tmp_path) == [[(0, 5), (0, 6), (0, 7), (1, 6), (1, 7)], [(0, 6), (0, 7), (1, 5), (1, 6), (1, 7)]]
    shutil.rmtree(tmp_path / "shm1")
    pools(2).run(memory_jobs.stopped, str(tmp_path), 9, True)
    assert hosts(tmp_path) == [[(0, 7), (0, 8), (0, 9), (1, 8), (1, 9)], [(0, 8), (0, 9), (1, 7), (1, 8), (1, 9)]]
    run, *rest = memory_jobs.begin(tmp_path, handlers.Local(), host=0)
    assert run.step == 9
    assert not differences(run_jobs.train(run, *rest), whole)


@pytest.mark.parametrize("lost", range(2))
@thorough
def test_with_copies_that_are_behind_a_step_is_whole_whichever_host_is_lost(pools, tmp_path, whole, lost):
    """Copies take longer than steps. Nothing is on disk."""
    at = EVERY - 1
    steps = pools(2).run(memory_jobs.stopped_with_copies_behind, str(tmp_path), at, 0.3)[1 - lost]
    newest = max(step for part, step in steps if part == lost)
    assert at - 2 <= newest < at  # the last copies are on their way
    assert (1 - lost, at) in steps
    for rank in range(2):
        (tmp_path / f"shm{rank}").rename(tmp_path / f"gone{rank}")
    (tmp_path / f"then{1 - lost}").rename(tmp_path / f"shm{1 - lost}")
    begun, ends = zip(*pools(2).run(memory_jobs.go_on, str(tmp_path), 12, True), strict=True)
    assert begun == (newest, newest)
    assert not differences({**ends[0]["params"], **ends[1]["params"]}, whole["params"])


@one_in(3)
@pytest.mark.parametrize("fails", ["no room", "another sum", None])
def test_a_step_is_fetched_over_the_least_useful_one_and_only_when_it_is_whole(pools, tmp_path, whole, fails):
    """A host has lost its newest step, and kept those before."""
    pools(2).run(memory_jobs.stopped, str(tmp_path), 7, True)
    (folder,) = (tmp_path / "shm1").glob("*/*")
    (newest,) = (each.path for each in stored_in(folder) if each.number[1] == 7 and each.part == 1)
    flip(newest, 70)
    copy = next(each for each in stored_in(next((tmp_path / "shm0").glob("*/*"))) if (each.part, each.step) == (1, 7))
    if fails == "another sum":
        flip(copy.path, len(copy.content) - len(copy.tensors))
    begun, found = zip(*pools(2).run(memory_jobs.loaded, str(tmp_path), fails == "no room"), strict=True)
    assert begun == ((7, 7) if fails is None else (6, 6))
    assert {step for part, step in found[1] if part == 1} == ({7} if fails is None else {6})
    assert [*folder.glob("*.unfinished")] == []


def test_a_neighbours_copies_are_gone_once_the_run_has_ended(pools, tmp_path, whole):
    ends = [end for _, end in pools(2).run(memory_jobs.go_on, str(tmp_path), 12, True)]
    assert not differences({**ends[0]["params"], **ends[1]["params"]}, whole["params"])
    assert [*tmp_path.glob("shm*/*")] == []


@pytest.mark.parametrize("silent", [False, True])
@thorough
def test_a_run_ends_soon_where_a_neighbour_sends_no_more(pools, tmp_path, silent):
    """Its connection has failed, or it says nothing. Rank 0 removes the copies that it has of rank 1."""
    (seconds, texts), (_, others) = pools(2).run(memory_jobs.ended_without_a_neighbour, str(tmp_path), silent)
    assert seconds < 2
    if silent:
        assert "process 1, on another host, has not removed its memory checkpoints within 0.5 s: this one rem" in texts
    else:
        assert texts == ""
        assert "no memory checkpoints on another host any more: the cable was pulled; training goes on" in others
    assert [*tmp_path.glob("shm*/*/*/0*")] == []


def test_a_slow_network_is_said_once(pools, tmp_path):
    texts = pools(2).run(memory_jobs.slowed, str(tmp_path), 0.1)
    for rank, text in enumerate(texts):
        assert len(re.findall("until process", text)) == 1
        waited = rf"after step \d+, 0\.\d s passed until process {1 - rank}, on another host, had the memory checkpoint"
        assert re.search(waited + r" before: the network is slower than the steps; Memory\(every=\) sends fewer", text)


def test_another_placement_fetches_what_a_host_lacks(pools, tmp_path, whole):
    """One process had both stages; its host is one of two now."""
    stopped(7, lambda: memory_jobs.begin(tmp_path, handlers.Local(), host=0, neighbour=True))
    begun, ends = zip(*pools(2).run(memory_jobs.go_on, str(tmp_path), 12, True), strict=True)
    assert begun == (7, 7)
    assert not differences({**ends[0]["params"], **ends[1]["params"]}, whole["params"])


def test_without_copies_a_host_that_is_lost_sends_all_to_disk(pools, tmp_path):
    pools(2).run(memory_jobs.stopped, str(tmp_path), 7, True, False)
    assert hosts(tmp_path) == [[(0, 6), (0, 7)], [(1, 6), (1, 7)]]
    shutil.rmtree(tmp_path / "shm1")
    assert [step for step, _ in pools(2).run(memory_jobs.go_on, str(tmp_path), 12, True, False)] == [5, 5]


def test_what_makes_no_sense_is_refused(begin, tmp_path):
    with pytest.raises(ValueError, match="Memory: every must be a number of steps, at least 1, not 0"):
        begin(every=0)
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere of shared memory: pass Memory\(folder="):
        run_jobs.begin(tmp_path, handlers.Local(), memory=interop.Memory(folder=tmp_path / "nowhere"))
    run, *_ = begin()
    saved = run.checkpoints
    again = interop.Checkpoints(
        tmp_path, saved.pipeline, saved.plan, handler=saved.handler, memory=interop.Memory(folder=tmp_path)
    )
    with pytest.raises(ValueError, match=r"Checkpoints\.resume begins memory checkpoints"):
        again.keep_in_memory(params=run.params, step=1)
