"""Run checks one after the other, each in a process of its own with a time limit. No torch.

Invariants:
- a check's process leads a process group, which is killed as a whole when the check ends or its limit is over;
- the checks of a part take `PART_SECONDS` in all;
- a file of results is replaced as a whole after every check.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.checks import Check

ROOT = Path(__file__).parents[2]
PART_SECONDS = 600.0
PROBE_SECONDS = 120.0
LOG_CHARACTERS = 4000  # of the end of a check's output, if it does not pass

Line = dict[str, Any]
"""The result of a check, as docs/gpu.md describes it."""


@dataclass(frozen=True)
class Options:
    """The options of a run.

    Args:
        cpu: in small, over gloo on the CPU.
        packages: folders with packages that this Python lacks.
        part_seconds: time for the checks of a part.
    """

    cpu: bool = False
    packages: Sequence[str] = ()
    part_seconds: float = PART_SECONDS

    def command(self, module: str, *arguments: str) -> list[str]:
        """Return the command that runs a module with these options."""
        packages = [item for folder in self.packages for item in ("--packages", folder)]
        return [sys.executable, "-m", module, *arguments, *packages, *(["--cpu"] if self.cpu else [])]


def probe(options: Options) -> tuple[str, str]:
    """Return why fpipe can't be imported here, and why no check can run on a GPU; empty where nothing is wrong."""
    command = options.command("benchmarks.gpu.child", "--probe")
    try:
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return f"torch was not imported within {PROBE_SECONDS:g} s", ""
    if answer.returncode:
        return _last_line(answer.stderr) or f"exit code {answer.returncode}", ""
    return "", json.loads(answer.stdout.splitlines()[-1])["gpu"]


def run(checks: Mapping[str, Check], options: Options, no_gpu: str = "") -> Iterator[Line]:
    """Run the checks in order, and yield a line for each.

    Args:
        no_gpu: why no check can run on a GPU; skips all of them.
    """
    spent: defaultdict[str, float] = defaultdict(float)
    results: dict[str, str] = {}
    for name, check in checks.items():
        left = options.part_seconds - spent[check.part]
        if no_gpu:
            line = _line(name, check, "skipped", f"needs a GPU: {no_gpu}")
        elif left <= 0:
            line = _line(name, check, "skipped", "the part's time is over")
        elif results.get(check.needs or "", "passed") != "passed":
            line = _line(name, check, "skipped", f"needs the check {check.needs}, which {results[check.needs or '']}")
        else:
            start = time.monotonic()
            line = _run(name, check, min(check.seconds, left), options)
            line["seconds"] = round(time.monotonic() - start, 3)
            spent[check.part] += line["seconds"]
        results[name] = line["result"]
        yield line


def _line(name: str, check: Check, result: str, reason: str = "", figures: Any = None) -> Line:
    return {
        "part": check.part,
        "check": name,
        "result": result,
        "seconds": 0.0,
        "reason": reason,
        "figures": figures or {},
    }


def _run(name: str, check: Check, seconds: float, options: Options) -> Line:
    with tempfile.TemporaryDirectory(prefix="fpipe-check-") as folder:
        report, log = Path(folder, "report.json"), Path(folder, "log")
        arguments = (check.function, "--report", str(report), "--seconds", str(seconds))
        command = options.command("benchmarks.gpu.child", *arguments)
        environment = {**os.environ, "TMPDIR": folder, "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as output:
            code = _wait(command, seconds, stdout=output, stderr=output, cwd=ROOT, env=environment)
        content: Line = json.loads(report.read_text()) if report.exists() else {"figures": {}}
        text = log.read_text(errors="replace")
    figures = content["figures"]
    if code == 0 and "result" in content:
        result, reason = content["result"], content["reason"]
    elif code is None:
        result, reason = "timed out", f"not done after {seconds:g} s"
    else:
        result, reason = "failed", f"{_last_line(text) or 'no message'} (exit code {code})"
    if result in ("failed", "timed out"):
        figures["log"] = text[-LOG_CHARACTERS:]
    return _line(name, check, result, reason, figures)


def _wait(command: Sequence[str], seconds: float, **streams: Any) -> int | None:
    """Return a command's exit code; None if it took longer. No process of its group is left."""
    process = subprocess.Popen(command, start_new_session=True, **streams)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def write(path: Path, lines: Iterable[Line]) -> None:
    """Replace a file by the lines so far, as one JSON list."""
    whole = json.dumps(list(lines), indent=1)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(whole)
    os.replace(file.name, path)


def table(lines: Iterable[Line]) -> str:
    """Return one row for each check: part, name, result, seconds, reason."""
    rows = [("part", "check", "result", "s", "reason")]
    for line in lines:
        reason = line["reason"] if len(line["reason"]) < 100 else line["reason"][:97] + "..."
        rows.append((line["part"], line["check"], line["result"], f"{line['seconds']:.1f}", reason))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
