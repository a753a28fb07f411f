"""Check fpipe on a machine with one GPU: each check in a process of its own, with a time limit.

    make gpu                                                 # all checks, results in gpu.json
    make gpu PYTHON=/opt/python/bin/python PARTS="--packages ~/packages --parts a b"
    python -m benchmarks.gpu --checks transport failures
    python -m benchmarks.gpu --cpu                           # in small, over gloo: checks the checks

Prints a JSON object for each check as it ends, and a table last; docs/gpu.md describes both. Exits with 1 if a check
failed or took too long; without a GPU every check is skipped. No .venv is needed: this Python has torch 2.11 or later,
and `--packages` names folders with packages that it lacks, such as optree.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from benchmarks.gpu.checks import CHECKS, PARTS
from benchmarks.gpu.driver import Options, probe, run, table, write


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=[*PARTS], help="a correctness, b failures, c numbers"
    )
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=[*CHECKS], metavar="NAME", help="some alone")
    parser.add_argument("--packages", nargs="+", type=folder, default=[], metavar="FOLDER", help="for what is missing")
    parser.add_argument("--cpu", action="store_true", help="in small, over gloo, without a GPU")
    parser.add_argument("--out", type=output, metavar="FILE.json", help="also write the objects, as one list")
    parser.add_argument("--json", action="store_true", help="print no table")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a check's processes are killed
    options = Options(arguments.cpu, arguments.packages)
    unusable, no_gpu = probe(options)
    if unusable:
        parser.error(
            f"{sys.executable} can't run the checks: {unusable}; --packages names folders with what is missing"
        )
    chosen = {name: c for name, c in CHECKS.items() if c.part in arguments.parts and name in arguments.checks}
    lines = []
    for line in run(chosen, options, "" if arguments.cpu else no_gpu):
        print(json.dumps(line), flush=True)
        lines.append(line)
        if arguments.out:
            write(arguments.out, lines)
    if not arguments.json:
        print(f"\n{table(lines)}")
    sys.exit(any(line["result"] in ("failed", "timed out") for line in lines))


def folder(text: str) -> str:
    """Parse the name of a folder from the command line."""
    path = Path(text).expanduser().resolve()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder")
    return str(path)


def output(text: str) -> Path:
    """Parse the name of a file to write from the command line."""
    path = Path(text).expanduser().absolute()
    if path.suffix != ".json" or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} must end in .json, in a folder that exists")
    return path


if __name__ == "__main__":
    main()
