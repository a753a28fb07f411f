"""The flights in a log directory: what the ranks of jobs that hang, crashed or run did last. No torch.

TensorBoard knows nothing of these files: they are read from the folders of runs below the log directory, of which a
bounded number is looked at.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fpipe.flight import runs
from fpipe.flight.explanation import explain
from fpipe.flight.reading import read
from fpipe.flight.report import as_json
from fpipe.tensorboard.files.columns import KINDS

MOST_FOLDERS = 10_000  # that are searched
MOST_LISTED = 100  # flights
KEPT = 3.0  # seconds for which a list is not made again
RECORDS = 12  # of each rank


class Flights:
    """The flights below a log directory.

    Args:
        logdir: TensorBoard's; "" or one that is not in the file system has none.
    """

    def __init__(self, logdir: str) -> None:
        self._logdir = Path(logdir).expanduser() if logdir and "://" not in logdir else None
        self._lock = threading.Lock()
        self._listed: tuple[float, dict[tuple[str, str], Path]] = (-KEPT, {})

    def listing(self) -> list[dict[str, Any]]:
        """Return the flights as JSON, the newest of each experiment first. The page reads this: keep the keys."""
        return [
            {"experiment": experiment, "name": name, "written": max(runs.written(folder), default=0.0)}
            for (experiment, name), folder in self._found().items()
        ]

    def flight(self, experiment: str, name: str) -> dict[str, Any] | None:
        """Return what a flight says, as JSON; None if it is not listed, or has ended well since.

        Names are only compared with those that are listed.
        """
        folder = self._found().get((experiment, name))
        try:
            ranks = [] if folder is None else read(folder)
        except OSError:
            ranks = []
        if not ranks:
            return None
        copied = max(rank.copied for rank in ranks) / 1e9
        about = {"experiment": experiment, "name": name, "copied": copied, "processes": ranks[0].processes}
        return about | as_json(ranks, explain(ranks), RECORDS)

    def _found(self) -> dict[tuple[str, str], Path]:
        with self._lock:
            since, found = self._listed
            if time.monotonic() - since > KEPT:
                found = dict(self._search())
                self._listed = time.monotonic(), found
            return found

    def _search(self) -> Iterator[tuple[tuple[str, str], Path]]:
        count = 0
        if self._logdir is None:
            return
        for run in _runs(self._logdir):
            experiment = run.relative_to(self._logdir).as_posix()
            for flight in runs.flights(run):
                yield ("" if experiment == "." else experiment, flight.name), flight
                count += 1
                if count == MOST_LISTED:
                    return


def _runs(logdir: Path) -> Iterator[Path]:
    """Yield the folders below a log directory that have a folder of flights."""
    for count, (folder, within, _) in enumerate(os.walk(logdir)):
        if count == MOST_FOLDERS:
            return
        if runs.FOLDER in within:
            yield Path(folder)
        within[:] = sorted(name for name in within if name not in (*KINDS, runs.FOLDER))
