"""`make gpu`: its driver, and the checks' own code, in small on the CPU."""

import importlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import correctness, driver, failures, host
from benchmarks.gpu.blocks import Blocks
from benchmarks.gpu.checks import CHECKS, PARTS, Check
from benchmarks.gpu.driver import Options
from benchmarks.gpu.setting import Ranks, Report, Setting
from tests.docs import gpu_checks
from tests.support.combinations import sample
from tests.support.forked import ROOT
from tests.support.pool import NCCL_ON_ONE_GPU, Gpus

FORM = ["part", "check", "result", "seconds", "reason", "figures"]
LIMIT = 2.0  # seconds of a check that hangs
SLOW = {  # other tests run what they run, or much of it
    *("features", "failures", "local_bits", "nccl_bits", "replica_bits"),
    *("captured_bits", "large_messages", "memory", "host_time"),
    *("stolen_sms", "many_handlers", "transport", "dropped_handler", "saved_after_failure", "cut"),
}


def check(name, part="a", seconds=60.0, needs=None):
    return Check(part, seconds, f"tests.docs.gpu_checks:{name}", "", needs)


def results(checks, **options):
    return {line["check"]: line for line in driver.run(checks, Options(cpu=True, **options))}


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_each_check_has_one_line_however_it_ends():
    names = ("passing", "noting", "failing", "skipping", "crashing", "killed")
    lines = results({name: check(name) for name in names})
    assert all([*line] == FORM for line in lines.values())
    assert [line["result"] for line in lines.values()] == ["passed", "passed", "failed", "skipped", "failed", "failed"]
    assert [lines[name]["reason"] for name in names] == [
        "",
        "3 of 4 left out for time",
        "a quarter is too much",
        "this machine has no NVRTC",
        "ValueError: the check is broken (exit code 1)",
        "no message (exit code -9)",
    ]
    assert lines["passing"]["figures"]["kind"] == "cpu"
    assert 0 < lines["passing"]["figures"]["left"] <= 60
    assert lines["failing"]["figures"]["share"] == 0.25
    assert lines["crashing"]["figures"]["before"] == 1
    assert "Traceback" in lines["crashing"]["figures"]["log"]


def test_a_check_is_killed_with_its_children_at_its_limit():
    lines = results({"hanging": check("hanging", seconds=LIMIT), "leaving_children": check("leaving_children")})
    hanging = lines["hanging"]
    assert (hanging["result"], hanging["reason"]) == ("timed out", f"not done after {LIMIT:g} s")
    assert LIMIT <= hanging["seconds"] < LIMIT + 5
    assert lines["leaving_children"]["result"] == "passed"
    until = time.monotonic() + 10
    while any(alive(line["figures"]["child"]) for line in lines.values()):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.timing
def test_a_part_has_its_time_and_a_check_its_needs():
    checks = {
        "hanging": check("hanging"),
        "late": check("passing"),
        "other part": check("skipping", "b"),
        "needy": check("passing", "b", needs="other part"),
        "free": check("passing", "b", needs="not chosen"),
    }
    lines = results(checks, part_seconds=LIMIT)
    assert [line["result"] for line in lines.values()] == ["timed out", "skipped", "skipped", "skipped", "passed"]
    assert lines["late"]["reason"] == "the part's time is over"
    assert lines["needy"]["reason"] == "needs the check other part, which skipped"


@pytest.fixture
def called(monkeypatch, capsys):
    """`called(*options)`: (exit code, printed)."""

    def call(*options, no_gpu=""):
        monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", *options])
        monkeypatch.setattr(command, "probe", lambda options: ("", no_gpu))
        with pytest.raises(SystemExit) as exit_:
            command.main()
        return exit_.value.code, capsys.readouterr()

    return call


def test_without_a_gpu_it_says_which_checks_need_one(tmp_path, called):
    code, printed = called("--out", str(tmp_path / "gpu.json"), no_gpu="there is none")
    lines = json.loads((tmp_path / "gpu.json").read_text())
    rows = printed.out.splitlines()
    assert not code
    assert list(map(json.loads, rows[: len(CHECKS)])) == lines
    assert [(line["part"], line["check"]) for line in lines] == [(c.part, name) for name, c in CHECKS.items()]
    assert {(line["result"], line["reason"]) for line in lines} == {("skipped", "needs a GPU: there is none")}
    assert rows[len(CHECKS) + 1].split() == ["part", "check", "result", "s", "reason"]
    assert len(rows) == 2 * len(CHECKS) + 2
    assert os.listdir(tmp_path) == ["gpu.json"]


def test_parts_and_checks_are_chosen_and_a_failure_is_the_exit_code(monkeypatch, called):
    monkeypatch.setattr(command, "CHECKS", {"failing": check("failing"), "passing": check("passing", "b")})
    code, printed = called("--cpu", "--json")
    assert code
    assert [json.loads(row)["result"] for row in printed.out.splitlines()] == ["failed", "passed"]
    code, printed = called("--cpu", "--json", "--parts", "b")
    assert not code
    assert [json.loads(row)["check"] for row in printed.out.splitlines()] == ["passing"]


@pytest.mark.parametrize(
    ("option", "text"),
    [
        (("--out", "x.txt"), "must end in .json"),
        (("--packages", "nowhere"), "is not a folder"),
        (("--parts", "d"), "'a'"),
    ],
)
def test_a_wrong_option_says_what_is_possible(option, text, called):
    code, printed = called(*option)
    assert code == 2
    assert text in printed.err


def test_the_parts_fit_in_their_time():
    for part in PARTS:
        assert sum(each.seconds for each in CHECKS.values() if each.part == part) <= driver.PART_SECONDS


def test_the_page_has_every_check():
    rows = [f"| `{name}` | {each.part} | {each.seconds:g} | {each.passes} |" for name, each in CHECKS.items()]
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert page.endswith("\n".join(["| --- | --- | --- | --- |", *rows, ""]))
    assert all(f"| `{key}` |" in page for key in FORM)
    figures = page.partition("| check | figures |")[2].partition("## Checks")[0]
    names = [name for row in re.findall(r"^\| (`.*?`) \| ", figures, re.M) for name in re.findall(r"\w+", row)]
    assert sorted(names) == sorted(CHECKS)


def test_the_page_names_tests_checks_and_modules_that_exist():
    rows = re.findall(r"^\| (.*) \| (.*) \| (.*) \| (.*) \| no \|$", (ROOT / "docs" / "gpu.md").read_text(), re.M)
    tests = {
        name for path in ROOT.glob("tests/*/test_*.py") for name in re.findall(r"^def (\w+)", path.read_text(), re.M)
    }
    assert len(rows) > 30
    for _, mended, on_the_cpu, on_a_gpu in rows:
        assert set(re.findall(r"`(\w+)`", on_the_cpu)) <= tests
        assert set(re.findall(r"`(\w+)`", on_a_gpu)) <= {*CHECKS}
        assert all((ROOT / "fpipe" / name).exists() or (ROOT / name).exists() for name in _modules(mended))


def _modules(text):
    """The modules in a list of paths, of which one without a folder is in that of the one before."""
    folder, modules = "", []
    for path in re.findall(r"[\w/]+\.py", text):
        folder = path.rpartition("/")[0] or folder
        modules.append(f"{folder}/{path.rpartition('/')[2]}")
    return modules


MISSING = ("tensorboard", "typer", "rich", "pytest", "hypothesis", "transformers", "matplotlib")


def test_torch_numpy_and_optree_are_enough():
    modules = sorted({each.function.partition(":")[0] for each in CHECKS.values()})
    text = f"import sys; sys.modules |= dict.fromkeys({MISSING}); print([__import__(name) for name in {modules}])"
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.count("<module 'benchmarks'") == len(modules), done.stderr


def test_a_probe_tells_whether_there_is_a_gpu():
    unusable, no_gpu = driver.probe(Options())
    assert unusable == ""
    assert bool(no_gpu) == (not torch.cuda.is_available())


def test_packages_are_taken_from_folders_where_this_python_lacks_them(tmp_path):
    """The checks' process finds what is in the folder, behind what this Python has."""
    (tmp_path / "only_here.py").write_text("")
    (tmp_path / "optree.py").write_text("raise ImportError('this Python has its own')")
    options = Options(cpu=True, packages=(str(tmp_path),))
    (line,) = driver.run({"importing": check("importing")}, options)
    assert line["result"] == "passed", line


@pytest.mark.parametrize("name", sample(CHECKS, [name for name in CHECKS if name not in SLOW]))
def test_a_check_passes_in_small(name):
    report = Report(None, 120.0)
    setting = Setting(report, cpu=True)
    module, _, function = CHECKS[name].function.partition(":")
    try:
        getattr(importlib.import_module(module), function)(setting)
    finally:
        setting.close()
    assert report.reasons == []
    assert report.figures


def test_cases_that_are_left_out_for_time_are_in_the_reason():
    report = Report(None, 60.0)

    def differences(*task):
        report.until = time.monotonic()
        return []

    correctness._each(Setting(report, cpu=True), [(2, "linear", "gpipe")] * 3, differences)
    assert (report.reasons, report.notes, report.figures["equal"]) == ([], ["2 of 3 left out for time"], 1)


def test_the_hosts_share_of_captured_steps_is_limited():
    blocks = Blocks(torch.device("cpu"), 32, 1, 8, torch.float32)
    figures = {name: host._host_share(blocks, 2, capture) for name, capture in host.CAPTURES.items()}
    assert all(0 < each["host_share"] <= 1 for each in figures.values())
    report = Report(None, 60.0)
    for shares in ((0.1, 0.1, 0.4), (0.2, 0.05, 0.4)):
        host._gate(report, {name: {"host_share": s} for name, s in zip(host.CAPTURES, shares, strict=True)})
    assert report.reasons == ["the host takes 20% of the device's time at 1 ms, captured"]


@pytest.mark.parametrize("case", sample(failures.CASES, ("raises", "is killed in a replay", "is refused")))
def test_a_failure_in_small(case):
    report = Report(None, 120.0)
    failures.failure(Setting(report, cpu=True), case, timeout=3.0)
    assert report.reasons == []


def test_what_follows_an_error_has_fresh_processes():
    setting = Setting(Report(None, 60.0), cpu=True)
    ranks = Ranks(lambda: setting.pool(2))
    texts = [ranks.differences(gpu_checks.job, way, limit=limit) for way, limit in gpu_checks.WAYS.items()]
    setting.close()
    assert texts == [
        [],
        ["rank 1: ['a place']"],
        ["rank 0: ValueError: rank 0 is broken", "rank 1: ValueError: rank 1 is broken"],
        ["rank 1: exit code 3"],
        ["rank 0 of 2 hangs in job"],
        [],
    ]


def test_a_rank_on_a_gpu_is_a_host_of_its_own():
    gpus = Gpus(environment={"NCCL_DEBUG": "INFO", "CUDA_DEVICE_MAX_CONNECTIONS": None})
    first, second = (gpus.variables(rank, port=1234) for rank in (0, 1))
    assert first.pop("NCCL_HOSTID") != second.pop("NCCL_HOSTID")
    assert first == second == {**NCCL_ON_ONE_GPU, **gpus.environment}


def test_a_failure_that_is_missed_is_reported():
    """Rank 1 raises, and another error is expected of rank 0."""
    ended = [failures.Ended("nothing", exitcode=0), failures.Ended(error="StageError", exitcode=1)]
    wrong = failures._wrong(failures.CASES["raises"], ended, None, 3.0)
    assert wrong == "errors (None, 'StageError'), not ('TransportError', 'StageError')"
    ended[0].error, ended[0].exitcode = "TransportError", -6
    assert "exit codes (-6, 1)" in failures._wrong(failures.CASES["raises"], ended, 1.0, 3.0)
    ended[0].exitcode = 1
    assert "is not told" in failures._wrong(failures.CASES["raises"], ended, 1.0, 3.0)
    ended[0].text = "rank 1, stage 1, microbatch 0: ..."
    assert failures._wrong(failures.CASES["raises"], ended, 1.0, 3.0) == ""
    assert "after 7.0 s" in failures._wrong(failures.CASES["raises"], ended, 7.0, 3.0)
