"""torchrun whose workers are forked from a process that has imported torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fpipe.interop import torchrun
from tests.support.combinations import ALL

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
imported = sorted({"torch", "fpipe.training.verbs", "neighbour"} & sys.modules.keys())
import atexit, os, signal, time
from concurrent.futures import ThreadPoolExecutor
import neighbour
restart, rank = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK"))
if restart == 0:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
def leave():
    words = *imported, neighbour.NAME, *sys.argv[2:], hasattr(sys, "last_value"), *ended
    with open(f"{sys.argv[1]}/{rank}", "w") as file:
        print(__name__, restart, *words, file=file)
atexit.register(leave)
ended = []
ThreadPoolExecutor().submit(lambda: time.sleep(0.2) or ended.append("ended"))
if sys.argv[2:] == ["--fail"]:
    raise ArithmeticError("bad row")
sys.exit()
"""


@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--module", "train"], "--module starts a new interpreter: pass the path of a script"),
        (["--no-python", "train"], "--no-python starts a new interpreter: pass the path of a script"),
        (["--preload", "neighbor", "train.py"], "--preload neighbor: there is no such module"),
        (["--preload", "nowhere.x", "train.py"], "--preload nowhere.x: there is no such module"),
        (["--preload", "sys.x", "train.py"], "--preload sys.x: there is no such module"),
        (["--preload", ".x", "train.py"], "--preload .x: there is no such module"),
    ],
)
def test_what_it_cannot_do_is_refused(options, message, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit, match="2"):
        torchrun.main(options)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(not ALL, reason="a job under torchrun takes ten seconds: FPIPE_TESTS=all runs it")
@pytest.mark.parametrize("words", [[], ["--fail"]])
def test_a_restarted_script_runs_as_under_torchrun(words, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("NAME = 'neighbour'")
    command = [sys.executable, "-m", "fpipe.interop.torchrun", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "--preload", "neighbour", str(tmp_path / "train.py"), str(tmp_path), *words]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True, timeout=120)
    assert done.returncode == len(words), done.stderr
    assert ("ArithmeticError: bad row" in done.stderr) == bool(words)
    assert "RuntimeWarning" not in done.stderr
    expected = f"__main__ 1 fpipe.training.verbs neighbour torch neighbour {' '.join([*words, str(bool(words))])} ended"
    left = [(tmp_path / str(rank)) for rank in range(2)]
    texts = [path.read_text().strip() for path in left if path.exists()]
    assert texts == [expected] * len(texts)
    assert len(texts) >= 2 - len(words)  # of two that fail, torchrun may end one
