"""Run one check in this process, or tell whether any can run: the driver starts this module."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

OLDEST_TORCH = (2, 11)
VARIABLES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}  # CUDA reads them when it starts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("function", nargs="?")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--packages", action="append", default=[])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--probe", action="store_true")
    options = parser.parse_args()
    sys.path += options.packages  # behind everything that this Python has
    if options.probe:
        print(json.dumps({"gpu": _probed()}))
    else:
        _run(options)


def _probed() -> str:
    """Return why no check can run on a GPU, after importing what all of them need."""
    import torch

    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        raise ImportError(f"torch is {torch.__version__}, and fpipe needs {'.'.join(map(str, OLDEST_TORCH))} or later")
    importlib.import_module("fpipe.training.verbs")
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} finds no CUDA device"


def _run(options: Any) -> None:
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    from benchmarks.gpu.setting import Report, Setting, Skipped
    from tests.support.forked import CONTEXT

    CONTEXT.set_forkserver_preload(["torch.distributed", "fpipe.training.verbs"])  # without the warm-up of the tests
    module, _, name = options.function.partition(":")
    report = Report(options.report, options.seconds)
    setting = Setting(report, options.cpu)
    try:
        getattr(importlib.import_module(module), name)(setting)
    except Skipped as reason:
        report.end("skipped", str(reason))
    else:
        report.end("failed" if report.reasons else "passed", "; ".join(report.reasons[:3] + report.notes))
    finally:
        setting.close()


if __name__ == "__main__":
    main()
